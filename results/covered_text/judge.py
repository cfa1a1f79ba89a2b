"""The tables and verdicts of the README, from the lines alone.

    python -m results.covered_text.judge results/covered_text/results.jsonl.gz

`--gather OUT` first writes that file from the lines of a run.
"""

import argparse
import gzip
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from metatokens.tasks import list_recall
from results.seeds import SMALLEST, Mean, header, holm, row

MODELS = ("pause", "twin", "meta", "block-text")
MAIN = [
    (task, other)
    for task in ("list_recall", "parity", "segment_counting")
    for other in ("pause", "twin")
]
FROM_QUESTION = "question reads landmarks"  # the edges of a cut
LEARNED = 0.8  # with the text in sight: a model below has not learned the task
KEY = [
    "model",
    "seed",
    "task",
    "text",
    "condition",
    "length",
    "cut",
    "layers",
    "head",
    "brief_steps",
]


class Lines:
    """The measured accuracies, and the shortcuts."""

    def __init__(self, frame: pd.DataFrame):
        is_shortcut = frame["metric"] == "shortcut"
        self.shortcuts = frame[is_shortcut]
        measured = frame[~is_shortcut].copy()
        for name in ("cut", "head", "brief_steps"):
            measured[name] = measured[name].astype(object).where(measured[name].notna(), "")
        measured["layers"] = measured["layers"].map(
            lambda layers: str(layers) if isinstance(layers, list) else ""
        )
        self.accuracy = measured.set_index(KEY)["exact_match"]
        self.learned = self._learned()

    def _learned(self) -> set[tuple[str, int, str]]:
        """The models, seeds and tasks that were learned in sight."""
        plain = self.select(text="in_sight", condition="paper", length=128)
        learned = plain[plain >= LEARNED].reset_index()
        return set(learned[["model", "seed", "task"]].itertuples(index=False, name=None))

    def select(self, **where: object) -> pd.Series:
        """Accuracies by model, seed and task; what is not named is the plain value."""
        plain = {"cut": "", "layers": "", "head": "", "brief_steps": ""}
        selected = self.accuracy
        for name, value in {**plain, **where}.items():
            selected = selected[selected.index.get_level_values(name) == value]
        return selected.droplevel([name for name in KEY if name not in ("model", "seed", "task")])

    def by_seed(self, model: str, task: str, **where: object) -> pd.Series:
        """Accuracies of one model on one task, by seed."""
        values = self.select(**{"text": "covered", "condition": "paper", "length": 128, **where})
        is_asked = (values.index.get_level_values("model") == model) & (
            values.index.get_level_values("task") == task
        )
        return values[is_asked].droplevel(["model", "task"])

    def difference(self, model: str, other: str, task: str, **where: object) -> pd.Series:
        """One model minus another, by seed."""
        difference = self.by_seed(model, task, **where) - self.by_seed(other, task, **where)
        return difference.dropna()

    def effect(self, by_seed: pd.Series, task: str, *models: str) -> Mean:
        """The mean over the seeds in which these models have learned the task."""
        learned = [
            value
            for seed, value in by_seed.items()
            if all((model, seed, task) in self.learned for model in models)
        ]
        return Mean.of(learned, (0.0, SMALLEST, -SMALLEST))

    def shortcut(self, task: str, condition: str, length: int) -> float:
        """The best rule that does not do the task."""
        rows = self.shortcuts.query(
            "task == @task and condition == @condition and length == @length"
        )
        return float(rows["exact_match"].max())

    def commonest(self, task: str, length: int) -> float:
        """The share of the paper's prompts whose answer is the commonest one, which guessing gives."""
        rows = self.shortcuts.query(
            "task == @task and condition == 'paper' and length == @length"
            " and model == 'the commonest answer'"
        )
        return float(rows["exact_match"].item())


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--gather", type=Path)
    options = parser.parse_args()
    if options.gather:
        text = b"".join(
            file.read_bytes() for file in sorted((options.gather / "lines").glob("*.jsonl"))
        )
        if not text:
            raise SystemExit(f"{options.gather} has no lines; {options.file} stays as it is.")
        options.file.write_bytes(gzip.compress(text, mtime=0))
    lines = Lines(pd.read_json(options.file, lines=True))
    for table in (
        accuracy_table,
        main_claims,
        explanations,
        cut_table,
        marker_table,
        facts_table,
        brief_table,
        layer_table,
        head_table,
    ):
        print(f"\n{table.__doc__}\n")
        print("\n".join(table(lines)))


def accuracy_table(lines: Lines) -> list[str]:
    """Exact match in %: mean over seeds (95 % interval) [seeds]."""
    rows = header("task, tokens, text", *MODELS, "best shortcut")
    for task in dict(MAIN):
        for length in (128, 256, 512):
            for text in ("in_sight", "covered"):
                cells = [
                    Mean.of(lines.by_seed(model, task, text=text, length=length).tolist()).shown()
                    for model in MODELS
                ]
                shortcut = f"{100 * lines.shortcut(task, 'paper', length):.1f}"
                rows.append(row(f"{task}, {length}, {text.replace('_', ' ')}", *cells, shortcut))
    return rows


def main_claims(lines: Lines) -> list[str]:
    """The six main claims: `meta` minus another model, covered, in points; seeds that both have learned, and all."""
    rows = header("task, minus", "learned in sight", "verdict", "holds after Holm", "all seeds")
    differences = {(task, other): lines.difference("meta", other, task) for task, other in MAIN}
    effects = {
        (task, other): lines.effect(difference, task, "meta", other)
        for (task, other), difference in differences.items()
    }
    holding = holm(effects)
    for task, other in MAIN:
        effect = effects[task, other]
        everyone = lines.effect(differences[task, other], task)
        told = (
            "-"
            if effect.verdict == "cannot be told"
            else ("yes" if (task, other) in holding else "no")
        )
        rows.append(
            row(
                f"{task}, {other}",
                effect.shown(signed=True),
                effect.verdict,
                told,
                everyone.shown(signed=True),
            )
        )
    return rows


def explanations(lines: Lines) -> list[str]:
    """The explanations, in points: list recall, covered, 128 tokens, or as named; seeds that were learned."""
    recall = "list_recall"
    meta, twin = (lines.by_seed(model, recall) for model in ("meta", "twin"))
    cut_from_question = lines.by_seed("meta", recall, cut=f"{FROM_QUESTION}, second attention")
    cut_in_first = lines.by_seed("meta", recall, cut=f"{FROM_QUESTION}, first attention")
    cut_from_text = lines.by_seed("meta", recall, cut="landmark reads text, first attention")
    masked = lines.by_seed("twin", recall, cut="second attention among meta-tokens alone")
    marked = lines.by_seed("meta", recall, condition="landmark")
    effects = {
        "1. question cut from landmarks, second attention": (cut_from_question - meta, "meta"),
        "1. the same, first attention": (cut_in_first - meta, "meta"),
        "2. landmark cut from the text, minus guessing": (
            cut_from_text - list_recall.CHANCE,
            "meta",
        ),
        "3. `twin` with the mask": (masked - twin, "twin"),
        "4. in `landmark`, minus the best shortcut": (
            marked - lines.shortcut(recall, "landmark", 128),
            "meta",
        ),
        "5. `block-text` minus `meta`": (
            lines.difference("block-text", "meta", recall),
            "block-text",
            "meta",
        ),
    }
    for facts in (2, 4, 8):
        condition = f"facts_{facts}"
        held = lines.by_seed("meta", recall, condition=condition)
        shortcut = lines.shortcut(recall, condition, 128)
        effects[f"6. {facts} facts, minus the best shortcut"] = held - shortcut, "meta"
    for other in ("pause", "twin"):
        tuned = lines.by_seed(other, recall, brief_steps=500.0)
        effects[f"7. {other} after 500 steps, minus meta"] = (tuned - meta).dropna(), other, "meta"
    rows = header("explanation", "points", "verdict")
    for name, (by_seed, *models) in effects.items():
        effect = lines.effect(by_seed, recall, *models)
        rows.append(row(name, effect.shown(signed=True), effect.verdict))
    for task, other in MAIN:
        for length in (256, 512):
            longer = lines.difference("meta", other, task, length=length)
            effect = lines.effect(longer, task, "meta", other)
            name = f"8. meta minus {other}, {task}, {length} tokens"
            rows.append(row(name, effect.shown(signed=True), effect.verdict))
    return rows


def cut_table(lines: Lines) -> list[str]:
    """Covered, 128 tokens: exact match in % without some edges, in all layers; seeds that the model has learned."""
    cuts = sorted(set(lines.accuracy.index.get_level_values("cut")))
    columns = [(model, task) for task in dict(MAIN) for model in MODELS]
    rows = header("cut", *(f"{model}, {task}" for model, task in columns))
    for cut in cuts:
        cells = []
        for model, task in columns:
            cells.append(lines.effect(lines.by_seed(model, task, cut=cut), task, model).shown())
        rows.append(row(cut or "none", *cells))
    return rows


def marker_table(lines: Lines) -> list[str]:
    """Other markers, 128 tokens: exact match in % of models that were not trained for them."""
    rows = header("task, markers, text", *MODELS, "best shortcut")
    for task in dict(MAIN):
        rows += condition_rows(lines, task, ("landmark", "decoy"))
    return rows


def facts_table(lines: Lines) -> list[str]:
    """Facts for each landmark, list recall, 128 tokens, not trained for: exact match in %."""
    conditions = [f"facts_{facts}" for facts in (1, 2, 4, 8)]
    rows = header("task, facts, text", *MODELS, "best shortcut")
    return [*rows, *condition_rows(lines, "list_recall", conditions)]


def condition_rows(lines: Lines, task: str, conditions: Sequence[str]) -> list[str]:
    """A row for each condition of a task's prompts, with the text in sight and covered."""
    rows = []
    for condition in conditions:
        shortcut = f"{100 * lines.shortcut(task, condition, 128):.1f}"
        for text in ("in_sight", "covered"):
            runs = [lines.by_seed(model, task, condition=condition, text=text) for model in MODELS]
            cells = [Mean.of(of_model.tolist()).shown() for of_model in runs]
            rows.append(row(f"{task}, {condition}, {text.replace('_', ' ')}", *cells, shortcut))
    return rows


def brief_table(lines: Lines) -> list[str]:
    """List recall, covered, after further training with covered text: exact match in %; all seeds."""
    rows = header("further steps", "pause", "twin")
    for steps in ("", 50.0, 200.0, 500.0):
        cells = [
            Mean.of(lines.by_seed(model, "list_recall", brief_steps=steps).tolist()).shown()
            for model in ("pause", "twin")
        ]
        rows.append(row(str(steps or 0), *cells))
    return rows


def layer_table(lines: Lines) -> list[str]:
    """`meta`, covered, 128 tokens: exact match in % without some edges in one layer, or in all layers but one."""
    layers = sorted(set(lines.accuracy.index.get_level_values("layers")) - {""})
    rows = header("task, cut", *layers)
    for task in dict(MAIN):
        for cut in sorted(set(lines.accuracy.index.get_level_values("cut")) - {""}):
            means = [
                Mean.of(lines.by_seed("meta", task, cut=cut, layers=layer).tolist())
                for layer in layers
            ]
            if any(mean.n for mean in means):
                rows.append(row(f"{task}, {cut}", *(mean.shown() for mean in means)))
    return rows


def head_table(lines: Lines) -> list[str]:
    """`meta`, covered, 500 prompts of 128 tokens: exact match in % without some edges in one head of one layer."""
    names = lines.accuracy.index.to_frame(index=False)
    of_heads = names[names["head"] != ""].drop_duplicates(["task", "cut", "layers"])
    heads = sorted(set(names["head"]) - {""})
    rows = header("task, cut, layer", *(f"head {head:.0f}" for head in heads))
    for task, cut, layer in of_heads[["task", "cut", "layers"]].itertuples(index=False):
        of_task = [
            lines.by_seed("meta", task, cut=cut, layers=layer, head=head).tolist() for head in heads
        ]
        rows.append(row(f"{task}, {cut}, {layer}", *(Mean.of(runs).shown() for runs in of_task)))
    return rows


if __name__ == "__main__":
    main()
