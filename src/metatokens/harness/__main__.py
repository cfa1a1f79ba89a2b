"""`python -m metatokens.harness ...` is `lm_eval ...` for releases that do not find the model by its entry point."""

import sys

try:
    from lm_eval.__main__ import cli_evaluate
except ModuleNotFoundError:
    print("metatokens: the harness needs lm-evaluation-harness: pip install 'metatokens[lm-eval]'.", file=sys.stderr)
    sys.exit(2)

import metatokens.evaluation.lm_eval  # noqa: F401  (which registers it)

cli_evaluate()
