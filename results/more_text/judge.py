"""The tables and verdicts of the README, from the lines alone.

    python -m results.more_text.judge results/more_text/results.jsonl.gz results/small/results.jsonl.gz

The second file has the partners, which were pretrained on a twentieth of the text.
"""

import argparse
from itertools import product
from math import isnan
from pathlib import Path

import pandas as pd

from results.seeds import SMALLEST, Mean, header, holm, row

MODELS = ("gpt2", "pause", "twin", "meta")
OTHERS = ("gpt2", "twin", "pause")
SEEDS = range(22, 30)
WIDER_SEEDS = (22, 23)
LENGTHS = (128, 256, 512)
MAIN = 256  # tokens, twice the train length
VARIANTS = {"list_recall": "/landmark", "parity": ""}  # of recipes, by the task of their models
RECALL, PARITY = (
    ("list_recall", "landmark"),
    ("parity", "paper"),
)  # tasks with the condition of their prompts


class Lines:
    """The accuracies and perplexities of a preset's models."""

    def __init__(self, file: Path, preset: str):
        lines = pd.read_json(file, lines=True)
        is_plain = lines["intervention"].isna() if "intervention" in lines else True
        self.lines = lines[is_plain & lines["model"].isin(MODELS)]
        self.preset = preset

    def accuracies(
        self, model: str, task: tuple[str, str], length: int, *, wider: bool = False
    ) -> pd.Series:
        """Exact match at a length, by seed, of models that were trained up to 128 tokens."""
        name, condition = task
        variant = "/wider" if wider else VARIANTS[name]
        chosen = self.lines[
            (self.lines["metric"] == "exact_match")
            & (self.lines["recipe"] == self.preset + variant)
            & (self.lines["model"] == model)
            & (self.lines["task"] == name)
            & (self.lines["condition"] == condition)
            & (self.lines["train_condition"] == condition)
            & (self.lines["train_length"] == 128)
            & (self.lines["length"] == length)
            & self.lines["seed"].isin(SEEDS)
        ]
        return chosen.set_index("seed")["value"]

    def perplexities(self, model: str, text: str, variant: str) -> pd.DataFrame:
        """Perplexity of a text without meta-tokens, and that of its token frequencies, by seed."""
        chosen = self.lines[
            (self.lines["metric"] == "perplexity")
            & (self.lines["recipe"] == self.preset + variant)
            & (self.lines["model"] == model)
            & (self.lines["condition"] == "none")
            & (self.lines["text"] == text)
            & self.lines["seed"].isin(SEEDS)
        ]
        return chosen.set_index("seed")[["value", "chance"]]

    def lead(self, other: str, task: tuple[str, str], length: int) -> pd.Series:
        """`meta` minus another model, by seed."""
        return self.accuracies("meta", task, length) - self.accuracies(other, task, length)


def mean_of(differences: pd.Series) -> Mean:
    """A mean over seeds, with what its verdict needs."""
    return Mean.of(differences.dropna().tolist(), (0.0, SMALLEST, -SMALLEST))


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("partners", type=Path)
    options = parser.parse_args()
    long, brief = Lines(options.file, "more_text"), Lines(options.partners, "small")
    for table in (
        main_claims,
        accuracy_table,
        lead_table,
        gain_table,
        wider_table,
        perplexity_table,
    ):
        print(f"\n{table.__doc__}\n")
        print("\n".join(table(long, brief)))


def main_claims(long: Lines, brief: Lines) -> list[str]:
    """List recall among landmarks at 256 tokens, `meta` minus another model, in points (95 % interval) [seeds]."""
    effects = {other: mean_of(long.lead(other, RECALL, MAIN)) for other in ("gpt2", "twin")}
    holding = holm(effects)
    rows = header("minus", "11 million tokens", "verdict", "holds after Holm", "0.6 million tokens")
    for other, effect in effects.items():
        partner = mean_of(brief.lead(other, RECALL, MAIN))
        holds = "yes" if other in holding else "no"
        rows.append(
            row(other, effect.shown(signed=True), effect.verdict, holds, partner.shown(signed=True))
        )
    return rows


def accuracy_table(long: Lines, brief: Lines) -> list[str]:
    """Exact match in %: mean over seeds (95 % interval) [seeds]; after 11 million and after 0.6 million tokens."""
    rows = header("task, tokens, pretraining", *MODELS)
    for task in (RECALL, PARITY):
        for length in LENGTHS:
            for name, lines in (("long", long), ("brief", brief)):
                means = [mean_of(lines.accuracies(model, task, length)) for model in MODELS]
                rows.append(row(f"{task[0]}, {length}, {name}", *(mean.shown() for mean in means)))
    return rows


def lead_table(long: Lines, brief: Lines) -> list[str]:
    """`meta` minus another model, in points; after Holm's correction for nine; how much larger than its partners'."""
    rows = header("task, tokens, minus", "long", "verdict", "holds", "long minus brief", "verdict")
    for task in (RECALL, PARITY):
        cases = [*product(LENGTHS, OTHERS)]
        leads = {case: long.lead(case[1], task, case[0]) for case in cases}
        effects = {case: mean_of(lead) for case, lead in leads.items()}
        holding = holm(effects)
        for length, other in cases:
            effect = effects[length, other]
            change = mean_of(leads[length, other] - brief.lead(other, task, length))
            cells = [
                effect.shown(signed=True),
                effect.verdict,
                "yes" if (length, other) in holding else "no",
                change.shown(signed=True),
                change.verdict,
            ]
            rows.append(row(f"{task[0]}, {length}, {other}", *cells))
    return rows


def gain_table(long: Lines, brief: Lines) -> list[str]:
    """What long pretraining adds to each model at 256 tokens, in points."""
    rows = header("task", *MODELS)
    for task in (RECALL, PARITY):
        gains = [
            mean_of(long.accuracies(model, task, MAIN) - brief.accuracies(model, task, MAIN))
            for model in MODELS
        ]
        rows.append(row(task[0], *(gain.shown(signed=True) for gain in gains)))
    return rows


def wider_table(long: Lines, brief: Lines) -> list[str]:
    """Seeds 22 and 23 of width 128 and 64 after as much text: exact match in list recall, %, and perplexities."""
    rows = header("tokens or text, width", *MODELS)
    widths = ((128, True), (64, False))
    for length, (width, is_wider) in product(LENGTHS, widths):
        runs = [100 * long.accuracies(model, RECALL, length, wider=is_wider) for model in MODELS]
        rows.append(row(f"{length}, {width}", *map(_two_runs, runs)))
    for text, (width, is_wider) in product(("held_out", "book"), widths):
        variant = "/wider" if is_wider else VARIANTS["list_recall"]
        runs = [long.perplexities(model, text, variant)["value"] for model in MODELS]
        rows.append(row(f"{text}, {width}", *map(_two_runs, runs)))
    return rows


def _two_runs(by_seed: pd.Series) -> str:
    """The values of seeds 22 and 23."""
    runs = by_seed.reindex(WIDER_SEEDS)
    return " and ".join("-" if isnan(run) else f"{run:.1f}" for run in runs)


def perplexity_table(long: Lines, brief: Lines) -> list[str]:
    """Perplexity without meta-tokens: mean over seeds; that of the text's token frequencies; a difference (95 %)."""
    rows = header(
        "text, models of, pretraining", *MODELS, "token frequencies", "`meta` minus `gpt2`"
    )
    for text, (task, variant), (name, lines) in product(
        ("held_out", "book"), VARIANTS.items(), (("long", long), ("brief", brief))
    ):
        by_model = {model: lines.perplexities(model, text, variant) for model in MODELS}
        means = [f"{values['value'].mean():.1f}" for values in by_model.values()]
        chance = pd.concat(by_model.values())["chance"].max()
        cost = mean_of(by_model["meta"]["value"] - by_model["gpt2"]["value"])
        difference = f"{cost.value:+.1f} ({cost.low:+.1f} to {cost.high:+.1f}) [{cost.n}]"
        rows.append(row(f"{text}, {task}, {name}", *means, f"{chance:.0f}", difference))
    return rows


if __name__ == "__main__":
    main()
