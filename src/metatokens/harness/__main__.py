"""`python -m metatokens.harness ...` is `lm_eval ...` for releases that do not find the model by its entry point."""

from lm_eval.__main__ import cli_evaluate

import metatokens.harness.model  # noqa: F401  (which registers it)

cli_evaluate()
