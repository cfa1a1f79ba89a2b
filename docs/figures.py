"""Writes the figures of the README and of these pages, from committed result lines; `make figures` runs it.

A block that begins with `<!-- figures: NAME -->` is what the function of that name below gives.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
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

Where = Mapping[str, Any]  # the fields of a result, and their values
MODELS = {
    "`gpt2`, a GPT-2": "gpt2",
    "`pause`, meta-tokens added": "pause",
    "`twin`, second ordinary attention": "twin",
    "`meta`, meta-attention": "meta",
}
DEMO_MODELS = {label: model for label, model in MODELS.items() if model in ("gpt2", "meta")}
TASKS = ("list_recall", "parity", "copying", "segment_counting")
PLAIN: Where = {"condition": "paper", "train_condition": "paper", "metric": "exact_match", "intervention": None}
SMALL: Where = PLAIN | {"recipe": "small", "position_embedding": "rope"}
TO_512: Where = SMALL | {"train_length": 512}
_CURVE = ["recipe", "model", "position_embedding", "task", "seed"]
RECALL: Where = TO_512 | {"task": "list_recall"}


@cache
def results(folder: str) -> pd.DataFrame:
    """The result lines of a run, those of one figure by seed."""
    lines = read_lines(ROOT / folder / "results.jsonl.gz", Result)
    return pd.DataFrame(line.model_dump() for line in lines).sort_values("seed", kind="stable")


@cache
def curves(folder: str) -> pd.DataFrame:
    """The points of a run's learning curves, steps ascending."""
    points = read_lines(ROOT / folder / "curves.jsonl.gz", CurvePoint)
    frame = pd.DataFrame(point.model_dump() for point in points if point.exact_match is not None)
    return frame.drop_duplicates([*_CURVE, "step"], keep="last").sort_values("step")


def select(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The lines whose fields have these values; a field that there is not is a KeyError."""
    conditions = [frame[name].isna() if value is None else frame[name] == value for name, value in where.items()]
    return frame[np.logical_and.reduce(conditions)]


def percent(share: float) -> str:
    """A proportion as a percentage with one decimal; none and all without it."""
    return f"{100 * share:.{0 if share in (0, 1) else 1}f}"


def cell(found: pd.DataFrame, shown: Callable[[float], str] = percent) -> str:
    """One seed's figure with its interval, or the mean of several and each of them; a dash where nothing was run."""
    found = found.dropna(subset=["value"])
    if found.empty:
        return "\u2013"
    if len(found) == 1:
        (one,) = found.itertuples()
        return f"{shown(one.value)} ({shown(one.low)}\u2013{shown(one.high)})"
    assert found.seed.is_unique, "more lines than one of a seed"
    if found.value.nunique() == 1:
        return f"{shown(found.value.iloc[0])} ({'both' if len(found) == 2 else f'all {len(found)}'})"
    return f"{shown(found.value.mean())} ({', '.join(map(shown, found.value))})"


def table(first: str, rows: Mapping[str, list[str]], columns: list[str]) -> str:
    """A table in Markdown: a label and its cells in each row."""
    lines = [[first, *columns], ["---"] * (1 + len(columns)), *([label, *cells] for label, cells in rows.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def grid(first: str, rows: Mapping[str, Where], columns: Mapping[str, Where], folder: str = "results/small") -> str:
    """A table whose cells are the results that have a row's and a column's fields, and what they rest on."""
    found = {
        label: [select(results(folder), **row, **column) for column in columns.values()] for label, row in rows.items()
    }
    used = pd.concat(chain.from_iterable(found.values()))
    widest = ((used.high - used.low) / 2).max()
    counts = " or ".join(f"{n:,}" for n in sorted(used.n[used.n > 0].unique(), reverse=True))
    seeds = max(len(one) for one in chain.from_iterable(found.values()))
    what = "of one training run, and its 95 % interval"
    if seeds > 1:
        what = f"the mean of {seeds} training runs (seeds) and each of them; of a single one its 95 % interval"
    size = f"n = {counts} prompts; each run's interval is ±{100 * widest:.1f} points at most"
    cells = {label: [cell(one) for one in row] for label, row in found.items()}
    return f"{table(first, cells, list(columns))}\nExactly right, in %: {what}.\n{size}.\n"


def models(where: Where, names: Mapping[str, str] = MODELS) -> dict[str, Where]:
    """A row for each model."""
    return {label: {**where, "model": name} for label, name in names.items()}


def lengths(*tokens: int) -> dict[str, Where]:
    """A column for each prompt length."""
    return {f"{length:,}": {"length": length} for length in tokens}


def best_shortcut(folder: str, **where: Any) -> str:
    """The most that a short cut scores on the prompts of a column; a dash where there are no such prompts."""
    found = select(results(folder), **{"condition": "paper"} | where, metric="shortcut").value
    return percent(found.max()) if len(found) else "\u2013"


def with_shortcuts(whole: str, columns: Iterable[Where], folder: str = "results/small") -> str:
    """A table of `grid` with a last row: what the best short cut scores in each column."""
    asked = ({name: column[name] for name in ("task", "condition", "length") if name in column} for column in columns)
    best = [best_shortcut(folder, **one) for one in asked]
    rows, note = whole.split("\n\n")
    return f"{rows}\n| the best short cut | {' | '.join(best)} |\n\n{note}"


def answers() -> str:
    """What meta-tokens do where they point at the answer, where they do not, and what of them does it."""
    at_128 = SMALL | {"train_length": 128}
    parity, copied = (at_128 | {"task": task, "length": 128} for task in ("parity", "copying"))
    far = at_128 | {"task": "parity", "condition": "long_prompt", "length": 2048}
    twice = RECALL | {"length": 1024}
    led = RECALL | {"recipe": "small/landmark", "condition": "landmark", "train_condition": "landmark", "length": 128}
    led |= {"train_length": 128}
    cut = best_shortcut("results/small", task="list_recall", condition="landmark", length=128)

    def of(model: str, where: Where) -> str:
        return cell(select(results("results/small"), **where, model=model))

    def count(where: Where) -> str:
        (n,) = select(results("results/small"), **where, model="meta").n.unique()
        return f"{n:,}"

    return (
        f"- **Where meta-tokens point at the answer** `meta` is not ahead of a plain GPT-2 at the train length: parity "
        f"{of('meta', parity)} % against {of('gpt2', parity)}, copying {of('meta', copied)} against "
        f"{of('gpt2', copied)}. In parity it is far ahead in prompts of 16 times that length: {of('meta', far)} "
        f"against {of('gpt2', far)}.\n"
        f"- **Where they do not point at it**, in list recall with one behind each line, `meta` is not ahead either, "
        f"and the seed decides more than the model: `meta` has {of('meta', led)} %, `gpt2` {of('gpt2', led)}, `pause` "
        f"{of('pause', led)}, `twin` {of('twin', led)}, and the best short cut {cut}.\n"
        f"- **The mask, the parameters or the tokens?** Where `meta` is ahead it is not the parameters: in those long "
        f"prompts `twin`, with as many and a second *ordinary* attention, has {of('twin', far)}. Nor is it, in two "
        f"seeds of three, the tokens: in list recall at twice the train length `meta` has {of('meta', twice)}, `pause` "
        f"{of('pause', twice)} and `twin` {of('twin', twice)}. In copying and counting `meta` has no such lead over "
        f"`gpt2`.\n\n"
        f"The mean of the training runs (seeds), and in brackets each of them. "
        f"n = {count(parity)} prompts a run at 128 tokens, {count(twice)} in list recall at 1,024 and {count(far)} in "
        f"prompts of 16 times the train length.\n"
    )


def tasks() -> str:
    """Models trained to 128 tokens on the four tasks; and to 512 on list recall, tested at twice that."""
    columns = {
        "list recall": {"task": "list_recall", "length": 128, "train_length": 128},
        "list recall, 512 \u2192 1,024": {"task": "list_recall", "length": 1024, "train_length": 512},
        "parity": {"task": "parity", "length": 128, "train_length": 128},
        "copying": {"task": "copying", "length": 128, "train_length": 128},
        "segment counting": {"task": "segment_counting", "length": 128, "train_length": 128},
    }
    return with_shortcuts(grid("trained to 128 tokens, tested there", models(SMALL), columns), columns.values())


def _by_length(task: str, train_length: int, *tokens: int) -> str:
    where = SMALL | {"task": task, "train_length": train_length}
    columns = lengths(*tokens)
    whole = grid(f"{task.replace('_', ' ')}, prompt tokens", models(where), columns)
    return with_shortcuts(whole, ({"task": task, **column} for column in columns.values()))


def sooner() -> str:
    """Steps of fine-tuning until so many prompts of 128 tokens are answered right, by seed."""
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
    note = f"Of {n:.0f} test prompts; a dash: not within the steps given."
    return f"{table('steps, by seed', rows, [*columns])}\n{note}\n"


def recall() -> str:
    """List recall by prompt length."""
    return _by_length("list_recall", 512, 128, 256, 512, 1024, 2048)


def parity() -> str:
    """Parity by prompt length."""
    return _by_length("parity", 128, 128, 256, 512, 1024)


def copying() -> str:
    """Copying by prompt length."""
    return _by_length("copying", 512, 128, 256, 512, 1024)


def counting() -> str:
    """Segment counting by prompt length."""
    return _by_length("segment_counting", 128, 128, 256, 512, 1024)


def markers() -> str:
    """List recall in three conditions."""
    shown = {"as trained": "paper", "landmarks": "landmark", "decoys": "decoy"}
    columns = {label: {"condition": condition, "length": 128} for label, condition in shown.items()}
    where = {name: value for name, value in SMALL.items() if name != "condition"}
    where |= {"task": "list_recall", "train_length": 128}
    whole = grid("list recall, 128 tokens", models(where), columns)
    return with_shortcuts(whole, ({"task": "list_recall", **column} for column in columns.values()))


def unmarked() -> str:
    """List recall of models that were trained where no marker knows the answer."""
    where = RECALL | {"recipe": "small/landmark", "condition": "landmark", "train_condition": "landmark"}
    columns = lengths(128, 256, 512)
    whole = grid("trained and tested with landmarks", models(where), columns)
    asked = ({"task": "list_recall", "condition": "landmark", **column} for column in columns.values())
    return with_shortcuts(whole, asked)


def positions() -> str:
    """The four tasks by kind of positions."""
    kinds = {"rotary": "rope", "learned": "learned", "none": "none"}
    rows = {
        f"`{model}`, {label}": SMALL | {"model": model, "position_embedding": kind, "train_length": 128}
        for label, kind in kinds.items()
        for model in MODELS.values()
    }
    columns = {task.replace("_", " "): {"task": task, "length": 128} for task in TASKS}
    return with_shortcuts(grid("trained to 128 tokens, tested there", rows, columns), columns.values())


def no_pos() -> str:
    """List recall without the meta-tokens' positions."""
    changes = {"unchanged": None, "without the positions": "no_pos", "without the embeddings": "no_embed"}
    where = {"task": "list_recall", "train_length": 128, "length": 128, **SMALL} | {"train_length": 128}
    del where["intervention"]
    return grid(
        "list recall, 128 tokens", models(where), {label: {"intervention": kind} for label, kind in changes.items()}
    )


def yarn() -> str:
    """List recall with windows that YaRN made longer."""
    rows = {
        f"window {window:,}, fine-tuned to {train:,}": PLAIN
        | {"task": "list_recall", "model": "meta", "recipe": f"small/yarn{factor}", "train_length": train}
        for factor, window, train in ((4, 1024, 512), (4, 1024, 1024), (8, 2048, 1024), (8, 2048, 2048))
    }
    return grid("list recall, prompt tokens", rows, lengths(128, 256, 512, 1024, 2048, 4096))


def long_prompts() -> str:
    """Prompts of 16 times the train length whose question stays as long as in training."""
    kinds = {"plain": "small", "jumps and scalable softmax": "small/jumps"}
    where = {name: value for name, value in SMALL.items() if name != "condition"} | {"train_length": 128}
    rows = {
        f"`{model}`, {label}": where | {"model": model, "recipe": recipe}
        for label, recipe in kinds.items()
        for model in ("gpt2", "twin", "meta")
    }
    columns = {
        f"{task.replace('_', ' ')}": {"task": task, "condition": "long_prompt", "length": 2048} for task in TASKS
    }
    return with_shortcuts(grid("prompts of 2,048 tokens", rows, columns), columns.values())


def added() -> str:
    """A Llama that was pretrained without meta-tokens, by what was added to it and trained."""
    arms = {
        "meta-attention, LoRA": "meta+lora",
        "LoRA": "lora",
        "LoRA, as many parameters as the first": "wide-lora",
        "meta-attention": "meta",
        "the meta-token alone": "pause",
    }
    folder, columns = "results/retrofit", lengths(128, 256, 512, 1024)
    shown = []
    for task, condition in {"list_recall": "landmark", "parity": "paper"}.items():
        asked = {"task": task, "condition": condition}
        rows = models({"metric": "exact_match", **asked}, arms)
        whole = grid(f"{task.replace('_', ' ')}, prompt tokens", rows, columns, folder)
        shown.append(with_shortcuts(whole, ({**asked, **column} for column in columns.values()), folder))
    return "\n".join(shown)


def long_texts() -> str:
    """The two tasks of the harness that hide something in the text of a book."""
    folder, columns = "results/long_texts", lengths(128, 256, 512, 1024, 2048)
    rows = {
        "the number of a thing": {"task": "needle", "metric": "exact_match"},
        "the variables that have a value": {"task": "variable_tracking", "metric": "exact_match"},
    }
    return grid("prompt tokens", rows, columns, folder)


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


def verdicts() -> str:
    """The report's count of the paper's claims."""
    report = (ROOT / "results/small/report/report.md").read_text(encoding="utf-8")
    (count,) = re.findall(r"Of \d+ claims of the paper[^.]*\.", report)
    return f"{count}\n"


def cost() -> str:
    """What the grid took."""
    stages = pd.DataFrame(json.loads((ROOT / "results/small/run.json").read_text(encoding="utf-8"))["stages"])
    trained = stages.name.str.startswith(("pretrain-", "extend-", "finetune-")).sum()
    hours = stages.cpu_seconds.fillna(stages.seconds).sum() / 3600
    return f"The run has {len(stages)} stages, {trained} of which trained a model. It took {hours:.1f} core-hours.\n"


def demo_tasks() -> str:
    """The demo's models on the four tasks."""
    columns = {task.replace("_", " "): {"task": task, "length": 128} for task in TASKS}
    whole = grid("exactly right, %", models(PLAIN | {"recipe": "demo"}, DEMO_MODELS), columns, "results/demo")
    return with_shortcuts(whole, columns.values(), "results/demo")


def demo_recall() -> str:
    """The demo's models on longer lists, and on other markers."""
    columns = lengths(256, 512) | {
        "128, landmarks": {"length": 128, "condition": "landmark"},
        "128, decoys": {"length": 128, "condition": "decoy"},
    }
    columns = {label: {"condition": "paper", **column} for label, column in columns.items()}
    where = {name: value for name, value in PLAIN.items() if name != "condition"} | {"task": "list_recall"}
    whole = grid("list recall, prompt tokens", models(where, DEMO_MODELS), columns, "results/demo")
    return with_shortcuts(whole, ({"task": "list_recall", **column} for column in columns.values()), "results/demo")


def demo_perplexity() -> str:
    """The demo's models on held-out text."""
    return _perplexities("results/demo", {})


FIGURES = {
    function.__name__: function
    for function in (
        answers, tasks, sooner, recall, parity, copying, counting, markers, unmarked, positions, no_pos, yarn,
        long_prompts, added, long_texts, perplexity, speed, verdicts, cost, demo_tasks, demo_recall, demo_perplexity,
    )
}  # fmt: skip


def filled(text: str) -> str:
    """A document with its blocks as the result lines give them."""
    return BLOCK.sub(lambda block: f"{block[1]}{FIGURES[block[2]]()}{block[3]}", text)


def draw(path: Path) -> None:
    """Accuracy by prompt length on three tasks: the mean of each model's seeds, and each seed."""
    looks = {"gpt2": ("#7d8590", "s", ":"), "twin": ("#2a86c7", "D", "--"), "meta": ("#d9640f", "o", "-")}
    grey = {
        "axes.edgecolor": "#7d8590",
        "axes.labelcolor": "#7d8590",
        "xtick.color": "#7d8590",
        "ytick.color": "#7d8590",
    }
    with mpl.rc_context(grey | {"text.color": "#7d8590", "font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "0"}):
        figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
        for axis, task in zip(axes, TASKS[:3], strict=True):
            for model, (colour, marker, line) in looks.items():
                found = select(results("results/small"), **TO_512, task=task, model=model)
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
