"""What the tests here run with, which of them cannot apply, and a summary by member of the family."""

import os
import sys
from collections import Counter, defaultdict
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

import pytest
from not_applicable import NOT_APPLICABLE
from suite import FOLDER, VERSION, has_generation

os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
# Which stand in the way of what the commands print.
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
sys.path[:0] = [str(FOLDER), str(Path(__file__).parents[1])]

CONTROL = "llama"
CANNOT_APPLY = "cannot apply: "
HEADINGS = (
    "",
    "passed",
    "failed",
    "not applicable",
    "skipped alike",
    "sub-tests passed",
    "sub-tests failed",
)

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
SWEEP_HEAD = "\n## Every type\n"
PAGE_HEAD = """# Architectures

`make conformance` gives meta-attention to tiny decoders with random weights, and runs these checks on each. All are in
float32, except for *sites* (four precisions) and *half precision*. A figure is the largest difference, or the number of
cases with one. `tests/retrofit/architectures.py` says how each check is measured, and how much is allowed.

- **sites**: in how many blocks the package did not find the place for meta-attention (0 is good).
- **text**: logits of text without meta-tokens, against the base's.
- **start**: logits with meta-tokens before any training, against the base with the meta-token's embedding.
- **cached**, **padded**: logits read in pieces with a cache, or padded on the left, against those of one pass.
- **reloaded**: logits of the model from disk, whole and as what was added alone; those of text, against the base's.
- **half precision**: the same in bfloat16, with what was added in float32.
- **checkpointed gradients**: with gradient checkpointing, in both its forms, against without.
- **scored columns**: loss and gradients if only the logits of scored columns are computed.
- **logits in pieces**: logits computed a few at a time, as `perplexity` does, against all at once.
- **generation**: in how many of five ways to generate the cache changes a token.

"""
WINDOW_TEXT = """
A model may [forget the text](how_to/forget_the_text.md) outside a window. In some model types single heads can then
keep all text (*full heads*), in others only whole blocks (*full blocks*). Some refuse a window.

| next to a window | model types |
| --- | --- |
"""
SWEEP_TEXT = """
We tried every type of decoder in transformers {version}, built small from its configuration class alone:
{counts}.
A type is taken if text has the logits of the base to the last bit, if the model from disk equals the saved one (whole,
and as what was added alone), and if greedy generation with a meta-token every three tokens gives the same with and
without a cache. A refusal is one sentence that says why. Where no small model could be built, nothing was tried.
`:multimodal` marks the class that also takes images or sound, if there are two.

| outcome | model types |
| --- | --- |
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot apply, with its reason."""
    for item in items:
        for member, test, reason in NOT_APPLICABLE:
            if fnmatchcase(item.parent.name, member) and fnmatchcase(item.name, test):
                item.add_marker(pytest.mark.skip(reason=CANNOT_APPLY + reason))


def _table(rows: dict[str, list[str]]) -> str:
    """A table of what holds for which model types."""
    return "".join(f"| {label} | {', '.join(names)} |\n" for label, names in rows.items())


class Tally:
    """What became of each member's tests."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, str]] = defaultdict(dict)  # by member, by test
        self.reasons: dict[tuple[str, str], str] = {}
        self.subtests: dict[str, Counter[str]] = defaultdict(Counter)
        self.architectures: dict[str, dict[str, float | str]] = {}
        self.types: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report of one test, a part of it, or its setting up."""
        *_, member, test = report.nodeid.split("::")
        if member == "test_architectures.py":
            if report.when == "call":
                test, _, name = test.rstrip("]").partition("[")
                is_sweep = test == "test_every_type"
                outcomes_by_name = self.types if is_sweep else self.architectures
                outcomes_by_name[name] = dict(report.user_properties)
                if is_sweep and report.failed and not self.types[name]:
                    self.types[name] = {
                        "kind": "crashed",
                        "sentence": report.longreprtext.splitlines()[-1],
                    }
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

    def measured(self) -> str:
        """The largest figures of the checks, then which model types take a text window."""
        largest: dict[str, float] = defaultdict(float)
        windows: dict[str, list[str]] = {"full heads": [], "full blocks": [], "refused": []}
        for name, figures in sorted(self.architectures.items()):
            for check, value in figures.items():
                if isinstance(value, str):
                    windows[value].append(name)
                else:
                    largest[check] = max(largest[check], value)
        nonzero = [f"{value:.1g} ({check})" for check, value in largest.items() if value]
        text = (
            f"The largest figures of {len(self.architectures)} model types are: "
            f"{', '.join([*nonzero, '0 (all other checks)'])}.\n"
        )
        return text + WINDOW_TEXT + _table(windows)

    def sweep(self) -> str:
        """How many types of decoder have each outcome, and which are taken, wrong or crashed."""
        order = ("taken", "refused", "not built", "wrong", "crashed")
        counts = Counter(tried["kind"] for tried in self.types.values())
        text = ", ".join(f"{counts[kind]} {kind}" for kind in order)
        rows: dict[str, list[str]] = defaultdict(list)
        for name, outcome in sorted(self.types.items()):
            if outcome["kind"] not in ("refused", "not built"):
                sentence = outcome["sentence"].replace("|", "/")
                rows[": ".join(filter(None, (outcome["kind"], sentence)))].append(name)
        in_order = sorted(
            rows.items(), key=lambda row: (order.index(row[0].split(":")[0]), -len(row[1]))
        )
        return SWEEP_TEXT.format(version=VERSION, counts=text) + _table(dict(in_order))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A gap is a failure."""
        if self.gaps() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line for each member, then the gaps."""
        terminalreporter.write_sep("=", "conformance")
        terminalreporter.write_line(
            ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "peft"))
        )
        rows: list[tuple[str | int, ...]] = [HEADINGS]
        for member, outcomes in sorted(self.outcomes.items()):
            counts, parts = Counter(outcomes.values()), self.subtests[member]
            listed = sum(
                member_of_reason == member and CANNOT_APPLY in reason
                for (member_of_reason, _), reason in self.reasons.items()
            )
            skipped = listed, counts["skipped"] - listed
            rows.append(
                (
                    member,
                    counts["passed"],
                    counts["failed"],
                    *skipped,
                    parts["passed"],
                    parts["failed"],
                )
            )
        for row in rows:
            terminalreporter.write_line("".join(f"{cell:>18}" for cell in row))
        for member, test, reason in sorted(self.gaps()):
            terminalreporter.write_line(
                f"{member}: {test} is skipped, and runs for {CONTROL}: {reason}", red=True
            )
        from tests.retrofit.architectures import ARCHITECTURES  # by the path above
        from tests.retrofit.small import every_name

        if self.architectures.keys() == ARCHITECTURES.keys():
            _, head, sweep = PAGE.read_text(encoding="utf-8").partition(SWEEP_HEAD)
            PAGE.write_text(PAGE_HEAD + self.measured() + head + sweep, encoding="utf-8")
            terminalreporter.write_line(f"{len(self.architectures)} architectures: {PAGE}")
        if self.types.keys() == set(every_name()):
            before = PAGE.read_text(encoding="utf-8").partition(SWEEP_HEAD)[0]
            PAGE.write_text(before + SWEEP_HEAD + self.sweep(), encoding="utf-8")
            terminalreporter.write_line(f"{len(self.types)} types: {PAGE}")
        if not has_generation():
            terminalreporter.write_line(
                "The tests of generation were not fetched, and did not run."
            )


def pytest_configure(config: pytest.Config) -> None:
    """Count, in the process that hears of every test."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tally())
