"""Writes the figures of the README and of these pages from committed result lines; `make figures` runs it.

The function NAME below writes the block that begins with `<!-- figures: NAME -->`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from metatokens.paper.report.derive import learned_from
from metatokens.records import CurvePoint, Result, read_lines

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)

Where = Mapping[str, Any]  # fields of a result, and their values
Rows = Mapping[str, Where]  # by label; columns too
MODELS = {
    "`gpt2`, plain": "gpt2",
    "`pause`, meta-tokens alone": "pause",
    "`twin`, second ordinary attention": "twin",
    "`meta`, meta-attention": "meta",
}
DEMO_MODELS = {label: model for label, model in MODELS.items() if model in ("gpt2", "meta")}
TASKS = ("list_recall", "parity", "copying", "segment_counting")
PLAIN: Where = {"condition": "paper", "train_condition": "paper", "metric": "exact_match", "intervention": None}
SMALL: Where = PLAIN | {"recipe": "small", "position_embedding": "rope"}
AT_128: Where = SMALL | {"train_length": 128, "length": 128}
TWICE: Where = SMALL | {"task": "list_recall", "train_length": 512, "length": 1024}
FAR: Where = AT_128 | {"task": "parity", "condition": "long_prompt", "length": 2048}
LANDMARKS: Where = TWICE | {"recipe": "small/landmark", "condition": "landmark", "train_condition": "landmark"}
_CURVE = ["recipe", "model", "position_embedding", "task", "seed"]


@cache
def results(folder: str) -> pd.DataFrame:
    """The result lines of a run, ordered by seed."""
    lines = read_lines(ROOT / folder / "results.jsonl.gz", Result)
    return pd.DataFrame(line.model_dump() for line in lines).sort_values("seed", kind="stable")


@cache
def curves(folder: str) -> pd.DataFrame:
    """The points of a run's learning curves, steps ascending."""
    points = read_lines(ROOT / folder / "curves.jsonl.gz", CurvePoint)
    frame = pd.DataFrame(point.model_dump() for point in points if point.exact_match is not None)
    return frame.drop_duplicates([*_CURVE, "step"], keep="last").sort_values("step")


def select(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The lines whose fields have these values."""
    conditions = [frame[name].isna() if value is None else frame[name] == value for name, value in where.items()]
    return frame[np.logical_and.reduce(conditions)]


def percent(share: float) -> str:
    """A proportion as a percentage: 0, 100, or one decimal."""
    return f"{100 * share:.{0 if share in (0, 1) else 1}f}"


def cell(found: pd.DataFrame, shown: Callable[[float], str] = percent) -> str:
    """One seed's figure with its interval, or the mean and each of several seeds; a dash where nothing was run."""
    found = found.dropna(subset=["value"])
    if found.empty:
        return "\u2013"
    if len(found) == 1:
        (one,) = found.itertuples()
        return f"{shown(one.value)} ({shown(one.low)}\u2013{shown(one.high)})"
    assert found.seed.is_unique, "more than one line of a seed"
    if found.value.nunique() == 1:
        return f"{shown(found.value.iloc[0])} ({'both' if len(found) == 2 else f'all {len(found)}'})"
    return f"{shown(found.value.mean())} ({', '.join(map(shown, found.value))})"


def table(first: str, rows: Mapping[str, list[str]], columns: Iterable[str]) -> str:
    """A table in Markdown, each row with its label."""
    lines = [[first, *columns], *([label, *cells] for label, cells in rows.items())]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def grid(first: str, rows: Rows, columns: Rows, folder: str = "results/small", floor: bool = True) -> str:
    """A table of the results that have a row's and a column's fields, and below it their n and intervals.

    The last row is the floor: the best shortcut on the prompts of each column.
    """
    found = {label: [select(results(folder), **row | one) for one in columns.values()] for label, row in rows.items()}
    cells = {label: [cell(one) for one in row] for label, row in found.items()}
    if floor:
        prompts = next(iter(rows.values()))
        cells["the best shortcut"] = [best_shortcut(prompts | column, folder) for column in columns.values()]
    used = pd.concat(chain.from_iterable(found.values()))
    seeds = max(len(one) for one in chain.from_iterable(found.values()))
    what = "one seed, with its 95 % interval"
    if seeds > 1:
        what = f"the mean of {seeds} seeds, then each seed; where there is one seed, its 95 % interval"
    widest = 100 * ((used.high - used.low) / 2).max()
    return (
        f"{table(first, cells, columns)}\nExact match in %: {what}.\n"
        f"n = {counts(used)} prompts a seed; each seed's interval is at most \u00b1{widest:.1f} points.\n"
    )


def counts(found: pd.DataFrame) -> str:
    """The numbers of test prompts, largest first."""
    return " or ".join(f"{n:,}" for n in sorted(found.n[found.n > 0].unique(), reverse=True))


def best_shortcut(where: Where, folder: str = "results/small") -> str:
    """The most that a shortcut scores on these prompts."""
    prompts = {name: where[name] for name in ("task", "condition", "length")}
    return percent(select(results(folder), **prompts, metric="shortcut").value.max())


def models(where: Where, names: Mapping[str, str] = MODELS) -> Rows:
    """A row for each model."""
    return {label: {**where, "model": name} for label, name in names.items()}


def lengths(*tokens: int) -> Rows:
    """A column for each prompt length."""
    return {f"{length:,}": {"length": length} for length in tokens}


def each_task(**where: Any) -> Rows:
    """A column for each task."""
    return {task.replace("_", " "): {"task": task, **where} for task in TASKS}


def mean(model: str, where: Where) -> str:
    """The mean of a model's seeds; a dash where nothing was run."""
    values = select(results("results/small"), **where, model=model).value
    return percent(values.mean()) if len(values) else "\u2013"


def summary() -> str:
    """The README's table: means on the four tasks at the trained length, and two beyond it."""
    columns = each_task(**AT_128) | {"list recall, twice as long": TWICE, "parity, 16 times as long": FAR}
    cells = {label: [mean(model, where) for where in columns.values()] for label, model in MODELS.items()}
    cells["the best shortcut"] = [best_shortcut(where) for where in columns.values()]
    runs = pd.concat(select(results("results/small"), **where) for where in columns.values())
    seeds = runs[runs.model.isin(MODELS.values())].groupby(["model", "task", "length"]).value
    assert set(seeds.size()) == {3}
    stages = pd.read_json(ROOT / "results/small/stages.jsonl", lines=True)
    sizes = [facts["parameters"] / 1e6 for facts in stages[stages.name.str.startswith("pretrain-")].facts]
    return (
        f"{table('exactly right, in %', cells, columns)}\n"
        f"The models have {min(sizes):.2f} to {max(sizes):.2f} million parameters; the paper's have 152 million. They "
        f"were trained and tested on prompts of up to 128 tokens; for the last two columns, trained on up to 512 and "
        f"128 and tested at 1,024 and 2,048. Each figure is the mean of three seeds, with n = {counts(runs)} prompts a "
        f"seed. Seeds differ by up to {100 * (seeds.max() - seeds.min()).max():.0f} points: see [each "
        f"seed](docs/results.md). A *shortcut* is a simple rule that answers without doing the task. A dash: not run.\n"
    )


def answers() -> str:
    """Whether meta-tokens help: at the trained length, beyond it, and where they do not point at the answer."""
    parity, copied = AT_128 | {"task": "parity"}, AT_128 | {"task": "copying"}
    each_line, marked = LANDMARKS | {"length": 128}, AT_128 | {"task": "list_recall"}
    return (
        f"- **At the trained length, no.** `meta` is not ahead of a plain GPT-2, even where the meta-tokens point at "
        f"the answer. On parity it answers {mean('meta', parity)} % of the prompts and GPT-2 {mean('gpt2', parity)} %, "
        f"with overlapping seeds; on copying {mean('meta', copied)} % and {mean('gpt2', copied)} %.\n"
        f"- **Beyond it, on two tasks of four.** On list recall in prompts twice as long, `meta` answers "
        f"{mean('meta', TWICE)} % and GPT-2 {mean('gpt2', TWICE)} %. On parity in prompts 16 times as long, with a "
        f"question as short as before, `meta` answers {mean('meta', FAR)} % and GPT-2 {mean('gpt2', FAR)} %. The extra "
        f"parameters do not explain it: `twin` has as many, and answers {mean('twin', TWICE)} % and "
        f"{mean('twin', FAR)} %. Nor do meta-tokens alone explain it, at least in two of three seeds: `pause` answers "
        f"{mean('pause', TWICE)} % on list recall. On copying and counting, `meta` has no lead.\n"
        f"- **Where no meta-token points at the answer, no.** In the paper's list recall, a meta-token follows the "
        f"answer, so a shortcut, to repeat the word before it, is right in {best_shortcut(marked)} % of the prompts. "
        f"With a meta-token after each line instead, `meta` answers {mean('meta', each_line)} % and GPT-2 "
        f"{mean('gpt2', each_line)} %, and seeds differ more than models do.\n"
    )


def verdicts() -> str:
    """The report's count of verdicts."""
    report = (ROOT / "results/small/report/report.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"Of (\d+) claims of the paper (\d+) \D+(\d+) \D+(\d+) \D+(\d+) cannot be told\.", report)
    claims, *verdicts = found
    return (
        "{} of the paper's {} claims hold at this scale, {} do not, {} holds in part, and {} cannot be "
        "decided.\n".format(verdicts[0], claims, *verdicts[1:])
    )


def tasks() -> str:
    """The four tasks at the trained length, and list recall at twice that."""
    columns = each_task(train_length=128, length=128)
    twice = {name: TWICE[name] for name in ("task", "train_length", "length")}
    return grid(
        "trained to 128 tokens, tested there", models(SMALL), columns | {"list recall, 512 \u2192 1,024": twice}
    )


def by_length(task: str, train_length: int, *tokens: int) -> str:
    """One task by prompt length."""
    rows = models(SMALL | {"task": task, "train_length": train_length})
    return grid(f"{task.replace('_', ' ')}, prompt tokens", rows, lengths(*tokens))


def sooner() -> str:
    """Steps of fine-tuning until a model answers a share of the prompts of 128 tokens, by seed."""
    points = select(curves("results/small"), position_embedding="rope")
    columns = {
        "list recall, 95 %": ("small", "list_recall", 0.95),
        "list recall among landmarks, 80 %": ("small/landmark", "list_recall", 0.8),
        "parity, 80 %": ("small", "parity", 0.8),
        "copying, 80 %": ("small", "copying", 0.8),
        "segment counting, 80 %": ("small", "segment_counting", 0.8),
    }
    rows = {}
    for label, model in MODELS.items():
        rows[label] = []
        for recipe, task, share in columns.values():
            seeds = select(points, recipe=recipe, task=task, model=model).groupby("seed")
            steps = [learned_from(one, share)[0] for _, one in seeds]
            rows[label].append(" / ".join(f"{one:,.0f}" if np.isfinite(one) else "\u2013" for one in steps))
    (n,) = points.n.dropna().unique()
    note = f"With {n:.0f} test prompts. A dash: not within the steps given."
    return f"{table('steps, by seed', rows, [*columns])}\n{note}\n"


def markers() -> str:
    """List recall with markers that point at the answer, with landmarks, and among decoys."""
    shown = {"as trained": "paper", "landmarks": "landmark", "decoys": "decoy"}
    columns = {label: {"condition": condition} for label, condition in shown.items()}
    return grid("list recall, 128 tokens", models(AT_128 | {"task": "list_recall"}), columns)


def unmarked() -> str:
    """List recall of models trained where no marker points at the answer."""
    return grid("trained and tested with landmarks", models(LANDMARKS), lengths(128, 256, 512))


def positions() -> str:
    """The four tasks by kind of positions."""
    kinds = {"rotary": "rope", "learned": "learned", "none": "none"}
    rows = {
        f"`{model}`, {label}": AT_128 | {"model": model, "position_embedding": kind}
        for label, kind in kinds.items()
        for model in MODELS.values()
    }
    return grid("trained to 128 tokens, tested there", rows, each_task())


def no_pos() -> str:
    """List recall without the meta-tokens' positions."""
    changes = {"unchanged": None, "without the positions": "no_pos", "without the embeddings": "no_embed"}
    columns = {label: {"intervention": kind} for label, kind in changes.items()}
    return grid("list recall, 128 tokens", models(AT_128 | {"task": "list_recall"}), columns, floor=False)


def yarn() -> str:
    """List recall with windows that YaRN extended."""
    rows = {
        f"window {window:,}, fine-tuned to {train:,}": PLAIN
        | {"task": "list_recall", "model": "meta", "recipe": f"small/yarn{factor}", "train_length": train}
        for factor, window, train in ((4, 1024, 512), (4, 1024, 1024), (8, 2048, 1024), (8, 2048, 2048))
    }
    return grid("list recall, prompt tokens", rows, lengths(128, 256, 512, 1024, 2048, 4096), floor=False)


def long_prompts() -> str:
    """Prompts of 16 times the train length with questions as short as in training."""
    kinds = {"plain": "small", "jumps and scalable softmax": "small/jumps"}
    rows = {
        f"`{model}`, {label}": FAR | {"model": model, "recipe": recipe}
        for label, recipe in kinds.items()
        for model in ("gpt2", "twin", "meta")
    }
    return grid("prompts of 2,048 tokens", rows, each_task())


def added() -> str:
    """A Llama pretrained without meta-tokens, by what was added to it."""
    arms = {
        "meta-attention, LoRA": "meta+lora",
        "LoRA": "lora",
        "LoRA, as many parameters as the first": "wide-lora",
        "meta-attention": "meta",
        "the meta-token alone": "pause",
    }
    shown = []
    for task, condition in {"list_recall": "landmark", "parity": "paper"}.items():
        rows = models({"metric": "exact_match", "task": task, "condition": condition}, arms)
        first = f"{task.replace('_', ' ')}, prompt tokens"
        shown.append(grid(first, rows, lengths(128, 256, 512, 1024), "results/retrofit"))
    return "\n".join(shown)


def long_texts() -> str:
    """Two tasks that hide something in the text of a book."""
    rows = {
        "the number of a thing": {"task": "needle", "metric": "exact_match"},
        "the variables that have a value": {"task": "variable_tracking", "metric": "exact_match"},
    }
    return grid("prompt tokens", rows, lengths(128, 256, 512, 1024, 2048), "results/long_texts", floor=False)


def perplexity() -> str:
    """Perplexity on held-out text, by model."""
    return _perplexities("results/small", {"position_embedding": "rope", "recipe": "small", "length": 1024})


def _perplexities(folder: str, where: Where) -> str:
    found = select(results(folder), metric="perplexity", condition="none", text="held_out", **where)
    measured = {label: select(found, model=name) for label, name in MODELS.items()}
    cells = {label: [cell(lines, "{:.1f}".format)] for label, lines in measured.items() if len(lines)}
    note = f"On {found.n.max():,} tokens of text; the tokens' frequencies alone give {found.chance.iloc[0]:.1f}."
    return f"{table('perplexity', cells, ['held-out text'])}\n{note}\n"


def speed() -> str:
    """What meta-attention costs, gathered and with the paper's dense mask."""
    compared = {
        "a training step at 1,024 positions: `meta` / `gpt2`": ("train", "meta", "gpt2"),
        "the same: `meta` / `pause`, which reads the same blocks": ("train", "meta", "pause"),
        "the same: dense mask / gathered": ("train", "dense", "meta"),
        "the same: `meta` compiled / as it is": ("compile", "meta, compiled", "meta"),
        "decoding with a meta-token every 10 tokens / without, batch 1": ("decode_1", "meta, inserting", "meta"),
        "the same, batch 8": ("decode_8", "meta, inserting", "meta"),
        "the same, batch 1: dense mask / gathered": ("decode_1", "dense, inserting", "meta, inserting"),
        "decoding, batch 1: our `gpt2` / transformers' GPT-2": ("decode_1", "gpt2-learned", "transformers"),
    }
    cells = {}
    for label, (name, model, against) in compared.items():
        timings = pd.read_json(ROOT / f"benchmarks/results/{name}.jsonl", lines=True)
        (one,) = select(timings, model=model, against=against).itertuples()
        cells[label] = [f"{one.ratio:.2f} ({one.ratio_low:.2f}\u2013{one.ratio_high:.2f})", f"{one.limit:.2f}"]
    return table("", cells, ["ratio of times", "by arithmetic"])


def cost() -> str:
    """What the grid took."""
    stages = pd.DataFrame(json.loads((ROOT / "results/small/run.json").read_text(encoding="utf-8"))["stages"])
    trained = stages.name.str.startswith(("pretrain-", "extend-", "finetune-")).sum()
    hours = stages.cpu_seconds.fillna(stages.seconds).sum() / 3600
    return f"The run has {len(stages)} stages, and {trained} of them trained a model. It took {hours:.1f} core-hours.\n"


def demo_tasks() -> str:
    """The demo's models on the four tasks."""
    rows = models(PLAIN | {"recipe": "demo"}, DEMO_MODELS)
    return grid("exact match, %", rows, each_task(length=128), "results/demo")


def demo_recall() -> str:
    """The demo's models on longer lists, and on other markers."""
    columns = lengths(256, 512) | {
        "128, landmarks": {"length": 128, "condition": "landmark"},
        "128, decoys": {"length": 128, "condition": "decoy"},
    }
    rows = models(PLAIN | {"recipe": "demo", "task": "list_recall"}, DEMO_MODELS)
    return grid("list recall, prompt tokens", rows, columns, "results/demo")


def demo_perplexity() -> str:
    """The demo's models on held-out text."""
    return _perplexities("results/demo", {})


FIGURES = {
    function.__name__: function
    for function in (
        summary, answers, verdicts, cost, tasks, sooner, markers, unmarked, positions, no_pos, yarn,
        long_prompts, added, long_texts, perplexity, speed, demo_tasks, demo_recall, demo_perplexity,
    )
}  # fmt: skip
FIGURES |= {
    "recall": partial(by_length, "list_recall", 512, 128, 256, 512, 1024, 2048),
    "parity": partial(by_length, "parity", 128, 128, 256, 512, 1024),
    "copying": partial(by_length, "copying", 512, 128, 256, 512, 1024),
    "counting": partial(by_length, "segment_counting", 128, 128, 256, 512, 1024),
}


def filled(text: str) -> str:
    """A document with its figures written anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{FIGURES[block[2]]()}{block[3]}", text)


def draw(path: Path) -> None:
    """Draw accuracy by prompt length on three tasks: the mean of each model's seeds, and each seed."""
    looks = {"gpt2": ("#7d8590", "s", ":"), "twin": ("#2a86c7", "D", "--"), "meta": ("#d9640f", "o", "-")}
    greyed = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color")
    style = dict.fromkeys(greyed, "#7d8590") | {"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "0"}
    with mpl.rc_context(style):
        figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
        for axis, task in zip(axes, TASKS[:3], strict=True):
            for model, (colour, marker, line) in looks.items():
                found = select(results("results/small"), **SMALL, train_length=512, task=task, model=model)
                found = found[found.length <= 2048]
                mean = 100 * found.groupby("length").value.mean()
                axis.plot(mean.index, mean, line, color=colour, marker=marker, label=model)
                axis.plot(found.length, 100 * found.value, ".", color=colour, markersize=5, alpha=0.7)
            axis.set_xscale("log", base=2)
            axis.set_xticks(mean.index, [f"{length:,.0f}" for length in mean.index], minor=False)
            axis.axvspan(110, 512, color="#7d8590", alpha=0.12, linewidth=0)
            axis.set_title(task.replace("_", " ").capitalize(), fontweight="bold")
            axis.set_xlabel("prompt length, tokens")
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("exactly right, %")
        axes[-1].legend(frameon=False, labelcolor="#7d8590")
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
    draw(ROOT / "docs/images/accuracy.svg")
