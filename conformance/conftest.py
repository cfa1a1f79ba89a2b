"""What the tests here run with, which of them cannot apply, and a summary by member of the family."""

import os
import sys
from collections import Counter, defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from not_applicable import NOT_APPLICABLE
from suite import FOLDER, has_generation

os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
sys.path[:0] = [str(FOLDER), str(Path(__file__).parents[1])]

CONTROL = "llama"
CANNOT_APPLY = "cannot apply: "
HEADINGS = ("", "passed", "failed", "not applicable", "skipped alike", "sub-tests passed", "sub-tests failed")

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
PAGE_HEAD = """# Architectures

What `make conformance` measured of each decoder with meta-attention: a tiny model with random weights, in float32 but
for two columns. A figure is the largest difference, or in how many cases there was one;
`tests/retrofit/architectures.py` says how each is measured, and how much is allowed.

- **sites**: blocks whose site was not found, in three precisions, with and without an outlier among the embeddings.
- **text**: logits of text without meta-tokens, beside the base's.
- **start**: logits with meta-tokens before any training, beside the base with the meta-token's embedding.
- **cached**, **padded**: logits read in pieces with a cache, or padded on the left, beside the same at once.
- **reloaded**: logits of the model from disk, whole and as what was added alone; those of text, beside the base's.
- **half precision**: the same in bfloat16, beside which what was added is in float32.
- **checkpointed gradients**: with gradient checkpointing, in both its ways, beside without.
- **scored columns**: loss and gradients where the logits of scored columns alone are computed.
- **generation**: of five ways to generate, those in which the cache changes a token.

"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot apply, with its reason."""
    for item in items:
        for member, test, reason in NOT_APPLICABLE:
            if fnmatchcase(item.parent.name, member) and fnmatchcase(item.name, test):
                item.add_marker(pytest.mark.skip(reason=CANNOT_APPLY + reason))


class Tally:
    """What became of each member's tests."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, str]] = defaultdict(dict)  # by member, by test
        self.reasons: dict[tuple[str, str], str] = {}
        self.subtests: dict[str, Counter[str]] = defaultdict(Counter)
        self.architectures: dict[str, dict[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report of one test, a part of it, or its setting up."""
        *_, member, test = report.nodeid.split("::")
        if member == "test_architectures.py":
            if report.when == "call":
                self.architectures[test.partition("[")[2].rstrip("]")] = dict(report.user_properties)
            return
        outcomes = self.outcomes[member]
        if isinstance(report, pytest.SubtestReport):
            self.subtests[member][report.outcome] += 1
            if report.failed:
                outcomes[test] = "failed"
        elif report.when == "call" or not report.passed:
            outcomes[test] = "failed" if outcomes.get(test) == "failed" else report.outcome
            if report.skipped:
                self.reasons[member, test] = report.longrepr[2]

    def gaps(self) -> list[tuple[str, str, str]]:
        """Member, test and reason where the suite skips what it runs for the control: a model's way to hide a lack."""
        return [
            (member, test, reason)
            for (member, test), reason in self.reasons.items()
            if self.outcomes[CONTROL].get(test) == "passed" and CANNOT_APPLY not in reason
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A gap is a failure."""
        if self.gaps() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line for each member, then the gaps."""
        terminalreporter.write_sep("=", "conformance")
        rows: list[tuple[str | int, ...]] = [HEADINGS]
        for member, outcomes in sorted(self.outcomes.items()):
            counts, parts = Counter(outcomes.values()), self.subtests[member]
            listed = sum(one == member and CANNOT_APPLY in reason for (one, _), reason in self.reasons.items())
            skipped = listed, counts["skipped"] - listed
            rows.append((member, counts["passed"], counts["failed"], *skipped, parts["passed"], parts["failed"]))
        for row in rows:
            terminalreporter.write_line("".join(f"{cell:>18}" for cell in row))
        for member, test, reason in sorted(self.gaps()):
            terminalreporter.write_line(f"{member}: {test} is skipped, and runs for {CONTROL}: {reason}", red=True)
        from tests.retrofit.architectures import ARCHITECTURES  # by the path above

        if self.architectures.keys() == ARCHITECTURES.keys():
            checks = list(next(iter(self.architectures.values())))
            rows = [("model type", *checks), ("---", *("---:" for _ in checks))]
            for name, values in sorted(self.architectures.items()):
                rows.append((name, *(f"{value:.0e}" if value else "0" for value in values.values())))
            PAGE.write_text(PAGE_HEAD + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows), encoding="utf-8")
            terminalreporter.write_line(f"{len(self.architectures)} architectures: {PAGE}")
        if not has_generation():
            terminalreporter.write_line("The tests of generation were not fetched, and did not run.")


def pytest_configure(config: pytest.Config) -> None:
    """Count, in the process that hears of every test."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally())
