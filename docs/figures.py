"""Writes the figures of the README and of these pages from committed result lines; `make figures` runs it.

The function NAME below writes the block that begins with `<!-- figures: NAME -->`. It only says what a table selects;
the report's engine makes the table.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes

from metatokens.evaluation.intervals import wilson_interval
from metatokens.looking.style import STYLES, band, line
from metatokens.paper.claims import ClaimResult, claims, judge
from metatokens.paper.frame import Inputs, load
from metatokens.paper.report import overview
from metatokens.paper.report.table import Cell, Fields, Table, make_table
from metatokens.paper.report.tables import INTERVENTIONS, PERPLEXITY, RECIPES, Tables
from metatokens.paper.report.text import NOT_RUN, PERCENT, Form, name, number
from metatokens.paper.rule import Effect
from metatokens.records import unpack_hits
from metatokens.tasks import TASKS

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)

Rows = Mapping[str, Fields]  # selections by label; columns too
KINDS = {"gpt2": "plain", "pause": "meta-tokens alone", "twin": "second ordinary attention", "meta": "meta-attention"}
LABELS = {Markup(f"`{model}`, {kind}"): model for model, kind in KINDS.items()}
SMALL: Fields = {"position_embedding": "rope"}
AT_128: Fields = {**SMALL, "train_length": 128, "length": 128}
TWICE: Fields = {"task": "list_recall", "train_length": 512, "length": 1024}
FOUND = (512, 2048, 8192)  # tokens of the texts that facts are looked for in
FULL_BLOCKS = {
    "the base, full cache": ("full-1-1-untrained", "full"),
    "full cache, trained alike": ("full-1-1-brief", "full"),
    "a window of 60 in all blocks": ("window-1-8-brief", "window"),
    "**blocks 18 and 23 full**, a window of 28": ("window-1-8-full-18-23-brief", "window"),
    "the same, trained on prose alone": ("window-1-8-prose-full-18-23-brief", "window"),
    "the same, on prose, towards the base": ("window-1-8-teacher-prose-full-18-23-brief", "window"),
    "blocks 18 and 23 full, landmarks after sentences, a window of 9": (
        "tokens-1-8-sentence-full-18-23-brief",
        "tokens",
    ),
    "blocks 9 and 20 full, a window of 28": ("window-1-8-full-9-20-brief", "window"),
    "blocks 18 and 23 full, untrained": ("window-1-8-untrained-full-18-23", "window"),
}
HELD_OUT = {"emma": "Emma", "dracula": "Dracula", "c4": "C4"}
OTHER_FACTS = {
    "the base, full cache": ("full-1-1-untrained", "full"),
    "full cache, trained alike": ("full-1-1-brief", "full"),
    "blocks 18 and 23 full, a window of 28": ("window-1-8-full-18-23-brief-float32", "window"),
}
FORMS = {  # of facts
    "facts": "as trained",
    "facts_cities": "unseen cities",
    "facts_wording": "another wording",
    "facts_question": "another question",
}
FORGETTING = {
    "the base, full cache": ("full-1-1-untrained", "full"),
    "a window, untrained": ("window-1-8-untrained", "window"),
    "StreamingLLM, untrained": ("press-1-8", "streaming"),
    "Knorm, untrained": ("press-1-8", "knorm"),
    "SnapKV, untrained": ("press-1-8", "snapkv"),
    "expected attention, untrained": ("press-1-8", "expected"),
    "a window": ("window-1-8", "window"),
    "landmarks every 16 tokens, a window of 30": ("tokens-1-8", "tokens"),
    "landmarks after sentences, a window of 43": ("tokens-1-8-sentence", "tokens"),
    "the same, with meta-attention": ("meta-1-8-sentence", "meta"),
}
ADDED_SEEDS = 30  # the first of the four that were added after the verdicts of eight had been published
FAR: Fields = {"train_length": 128, "length": 2048, "condition": "long_prompt"}

GREYED = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color")
GREY = "#7d8590"  # which a white and a dark page show
STYLE = dict.fromkeys(GREYED, GREY) | {"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "0"}


@cache
def run(folder: str = "results/small") -> Inputs:
    """The lines of a run, and the times of the benchmarks, which some claims are on."""
    speeds = [ROOT / f"benchmarks/results/{file}.jsonl" for file in ("decode_1", "decode_8", "prefill")]
    return load([ROOT / folder, *speeds])


@cache
def judged() -> list[ClaimResult]:
    """The claims with their verdicts."""
    return [judge(run(), claim) for claim in claims()]


def grid(corner: str, rows: Rows, columns: Rows, folder: str = "results/small", form: Form = PERCENT) -> str:
    """A table of the figures that have a row's and a column's fields."""
    return make_table(run(folder), "", corner, rows, columns, form=form).markdown()


def models(where: Fields) -> Rows:
    """A row for each model."""
    return {label: {**where, "model": model} for label, model in LABELS.items()}


def lengths(*tokens: int) -> Rows:
    """A column for each prompt length."""
    return {number(length): {"length": length} for length in tokens}


def each_task(**where: Any) -> Rows:
    """A column for each task."""
    return {name(task).lower(): {"task": task, **where} for task in TASKS}


def summary() -> str:
    """The README's table: the four tasks at the trained length."""
    return grid("trained to 128 tokens, tested there", models(SMALL), each_task(**AT_128))


def differences() -> str:
    """The main claims: the differences in each task, their mean, the verdict, and what the last four seeds add."""
    told = {one.claim.text: one for one in judged() if one.claim.primary}
    columns = {text.split(": ")[-1].replace(" beats ", " minus "): one for text, one in told.items()}
    figures = run().figures
    added = replace(run(), figures=figures[figures.seed >= ADDED_SEEDS])
    rows = [
        (name(task), *(points(one.tasks[task]) if task in one.tasks else NOT_RUN for one in columns.values()))
        for task in TASKS
    ]
    rows.append(("mean of tasks", *(points(one.effect) for one in columns.values())))
    rows.append((Markup("verdict on a lead of `meta`"), *(one.verdict for one in columns.values())))
    again = (points(judge(added, one.claim).effect) for one in columns.values())
    rows.append(("mean of tasks in the four seeds added last", *again))
    return Table("", ("points (95 % interval)", *columns), [*rows]).markdown()


def points(effect: Effect) -> str:
    """A difference of shares and its interval, in points."""
    return overview.amount(effect, "points").replace(" points", "")


def answers() -> str:
    """The first sentences of the report."""
    said = overview.sentences(Tables(run()), judged())
    return "".join(f"- {sentence}\n" for sentence in said)


def tasks() -> str:
    """The four tasks at the trained length, and list recall at twice that."""
    columns = {**each_task(train_length=128, length=128), "list recall, 512 \u2192 1,024": TWICE}
    return grid("trained to 128 tokens, tested there", models(SMALL), columns)


def by_length(task: str, train_length: int, *tokens: int) -> str:
    """One task by prompt length."""
    where = {**SMALL, "task": task, "train_length": train_length}
    return grid(f"{name(task).lower()}, prompt tokens", models(where), lengths(*tokens))


def sooner() -> str:
    """Steps of fine-tuning until a model answers 90 % of the prompts of 128 tokens."""
    return Tables(run()).sooner().markdown()


def markers() -> str:
    """List recall with markers that point at the answer, and among decoys."""
    columns = {text: {"condition": condition} for condition, text in {"paper": "as trained", "decoy": "decoys"}.items()}
    return grid("list recall, 128 tokens", models({**AT_128, "task": "list_recall"}), columns)


def unmarked() -> str:
    """List recall of models that trained among landmarks, where no marker points at the answer; the claims on it."""
    among = {"variant": "landmark", "train_condition": "landmark", "condition": "landmark"}
    shown = grid("list recall, prompt tokens", models({"task": "list_recall", **among}), lengths(128, 256, 512))
    return shown + "\n" + verdicts("Trained where")


def other_recipes() -> str:
    """List recall with other learning rates and with more steps, at both train lengths; the claims on all tasks."""
    shown = []
    for train_length in (128, 512):
        where = {**SMALL, "task": "list_recall", "train_length": train_length, "length": train_length}
        columns = {what: {"variant": variant} for variant, what in {"": "as above", **RECIPES}.items()}
        shown.append(grid(f"list recall, trained to {train_length} tokens, tested there", models(where), columns))
    return "\n".join([*shown, verdicts("At half", "With three")])


def verdicts(*beginnings: str) -> str:
    """The claims that begin so."""
    told = [one for one in judged() if one.claim.text.startswith(beginnings)]
    rows = [(one.claim.text, points(one.effect), one.verdict) for one in told]
    return Table("", ("claim", "points (95 % interval)", "verdict"), rows).markdown()


def held() -> str:
    """Facts recalled through landmarks alone."""
    return Tables(run()).held().markdown()


def no_pos() -> str:
    """List recall without the meta-tokens' positions or embeddings."""
    columns = {INTERVENTIONS[what]: {"intervention": what} for what in ("", "no_pos", "no_embed")}
    return grid("list recall, 128 tokens", models({**AT_128, "task": "list_recall"}), columns)


def yarn() -> str:
    """List recall with windows that YaRN extended."""
    rows = {
        f"{model}, window {number(window)}, trained to {number(train)}": {
            **SMALL, "task": "list_recall", "model": model, "variant": f"yarn{factor}", "train_length": train,
        }
        for model in ("gpt2", "meta")
        for factor, window, train in ((4, 1024, 512), (4, 1024, 1024), (8, 2048, 1024), (8, 2048, 2048))
    }  # fmt: skip
    return grid("list recall, prompt tokens", rows, lengths(128, 512, 1024, 2048, 4096))


def long_prompts() -> str:
    """Prompts of 16 times the train length with questions as short as in training."""
    return grid("prompts of 2,048 tokens", models(SMALL | FAR), each_task())


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
        where = {"task": task, "condition": condition, "train_condition": condition}
        rows = {label: {**where, "model": model} for label, model in arms.items()}
        corner = f"{name(task).lower()}, prompt tokens"
        shown.append(grid(corner, rows, lengths(128, 256, 512, 1024), "results/retrofit"))
    return "\n".join(shown)


def long_texts() -> str:
    """Two tasks that hide something in the text of a book."""
    where = {"condition": "", "train_condition": ""}
    rows = {
        "the number of a thing": {**where, "task": "needle"},
        "the variables that have a value": {**where, "task": "variable_tracking"},
    }
    return grid("prompt tokens", rows, lengths(128, 256, 512, 1024, 2048), "results/long_texts")


@cache
def forget() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """SmolLM2-135M that forgets: lines on prose, on facts, and on tasks."""
    lines = pd.read_json(ROOT / "results/forget/results.jsonl.gz", lines=True)
    prose = lines[lines.metric == "perplexity"].assign(loss=lambda those: np.log(those.value))
    return prose, lines[lines.task.isin(FORMS)], lines[lines.task.isin(TASKS)]


def of_arm(lines: pd.DataFrame, arm: tuple[str, str]) -> pd.DataFrame:
    """The lines of an arm, all its seeds."""
    return lines[(lines.recipe == f"forget/{arm[0]}") & (lines.model == arm[1])]


def lost(arm: tuple[str, str], to: tuple[str, str]) -> pd.Series:
    """What an arm loses to another on each excerpt, nats, in the mean of its seeds."""
    prose, *_ = forget()
    one, other = (of_arm(prose, which).groupby("text").loss.mean() for which in (arm, to))
    return (one - other).dropna()


def plus_minus(values: pd.Series, form: str) -> str:
    """A mean and its 95 % interval (normal)."""
    half = 1.96 * values.std() / len(values) ** 0.5
    return f"{values.mean():+{form}} \u00b1 {half:{form}}".replace("-", "\u2212") if half else "0"


def found(arm: tuple[str, str], length: int, form: str = "facts") -> tuple[float, float, float]:
    """The share of the facts that an arm finds, %, over its seeds, and Wilson's interval."""
    lines = of_arm(forget()[1], arm)
    own = lines[(lines.length == length) & (lines.task == form)]
    right, asked = round((own.value * own.n).sum()), int(own.n.sum())
    low, high = wilson_interval(right, asked)
    return 100 * right / asked, 100 * low, 100 * high


def share_found(arm: tuple[str, str], length: int, form: str = "facts") -> str:
    """The same as a cell of a table."""
    return "{:.1f} ({:.0f} to {:.0f})".format(*found(arm, length, form))


def forgetting(arms: Mapping[str, tuple[str, str]], to: str) -> str:
    """SmolLM2-135M that forgets text, by what it keeps: prose minus an arm with a window, and facts found."""
    prose, facts, _ = forget()
    rows = []
    for label, arm in arms.items():
        kept = [of_arm(prose, arm), of_arm(facts, arm).query("length == 8192 and task == 'facts'")]
        cells = (share_found(arm, length) for length in FOUND)
        shares = (f"{100 * one.kv_kept.mean():.1f}" for one in kept)
        rows.append((Markup(label), " / ".join(shares), plus_minus(lost(arm, (to, "window")), ".3f"), *cells))
    heads = (f"facts at {number(length)} tokens, %" for length in FOUND)
    return Table("", ("", "KV kept of 512 / 8,192, %", "prose, nats", *heads), rows).markdown()


def full_differences() -> str:
    """What full blocks, landmarks, and the choice of blocks change: prose by excerpt, facts by text."""
    _, limit, alone, full, prose, teacher, landmarks, other, _ = FULL_BLOCKS.values()
    rows = []
    for label, (one, than) in {
        "blocks 18 and 23 full, minus full cache, trained alike": (full, limit),
        "blocks 18 and 23 full, minus a window in all blocks": (full, alone),
        "prose alone, minus facts and prose": (prose, full),
        "prose alone towards the base, minus the next token's loss": (teacher, prose),
        "landmarks too, minus without": (landmarks, full),
        "blocks 18 and 23, minus 9 and 20": (full, other),
    }.items():
        more, texts = lost(one, than), [facts_by_text(arm) for arm in (one, than)]
        parts = (plus_minus(more[more.index.str.startswith(text)], ".3f") for text in HELD_OUT)
        rows.append((label, plus_minus(100 * (texts[0] - texts[1]), ".1f"), plus_minus(more, ".3f"), *parts))
    heads = "facts at 512 tokens, points", "prose, nats", *HELD_OUT.values()
    return Table("", ("", *heads), rows).markdown()


def other_facts() -> str:
    """Facts unlike those of the training that SmolLM2-135M finds in 512 tokens."""
    rows = [(label, *(share_found(arm, 512, form) for form in FORMS)) for label, arm in OTHER_FACTS.items()]
    return Table("", ("facts at 512 tokens, %", *FORMS.values()), rows).markdown()


def smaller_cache() -> str:
    """The README's row on forgetting: what an eighth of the keys and values keeps, next to all of them."""
    prose, *_ = forget()
    _, limit, _, full, *_ = FULL_BLOCKS.values()
    _, *asked = OTHER_FACTS.values()
    rows = []
    for label, arm, other in zip(("full cache", "two full blocks"), (limit, full), asked, strict=True):
        kept = f"{100 * of_arm(prose, arm).kv_kept.mean():.1f}"
        cells = share_found(arm, 512), share_found(other, 512, "facts_wording"), plus_minus(lost(arm, limit), ".3f")
        rows.append((label, kept, *cells))
    heads = "KV kept, %", "facts, %", "facts in another wording, %", "loss of prose, nats"
    return Table("", ("texts of 512 tokens", *heads), rows).markdown()


def facts_by_text(arm: tuple[str, str]) -> pd.Series:
    """The share of facts that an arm finds in each text of 512 tokens, in the mean of its seeds."""
    own = of_arm(forget()[1], arm).query("length == 512 and task == 'facts'")
    hits = np.stack([unpack_hits(one.hits, one.n) for one in own.itertuples()])
    return pd.Series(hits.reshape(len(hits), -1, 8).mean(axis=(0, 2)))


def forgetting_tasks() -> str:
    """SmolLM2-135M that forgets text: the four tasks, and the best rule that does not do them."""
    *_, lines = forget()
    best = lines[lines.metric == "shortcut"].sort_values("value").groupby("task").last()
    rows = {"the best shortcut": best}
    for label, arm in FORGETTING.items():
        own = of_arm(lines, arm)
        rows |= {label: own.set_index("task")} if len(own) else {}
    shown = []
    for label, own in rows.items():
        ends = (100 * own.loc[task, ["value", "low", "high"]] for task in TASKS)
        shown.append((label, *(f"{one.value:.0f} ({one.low:.0f} to {one.high:.0f})" for one in ends)))
    return Table("", ("exactly right, in %", *(name(task).lower() for task in TASKS)), shown).markdown()


def forgetting_cost() -> str:
    """The cache of SmolLM2-135M that forgets, and its tokens a second as multiples of those of the full cache."""
    lines = pd.read_json(ROOT / "results/forget/speed.jsonl", lines=True).set_index(["length", "model"])
    labels = {
        "window": "a window of 60",
        "blocks": "blocks 18 and 23 full, a window of 28",
        "tokens": "landmarks every 16 tokens, a window of 29",
        "meta": "the same, with meta-attention",
    }
    rows, lengths_read = [], lines.index.unique("length")
    for model, label in labels.items():
        cells = []
        for length in lengths_read:
            full, one = lines.loc[length, "full"], lines.loc[length, model]
            cells.append(f"{one.cache_bytes / 1e6:.1f} of {full.cache_bytes / 1e6:.0f} MB")
            cells.append(" / ".join(f"{one[what][1] / full[what][1]:.2f}" for what in ("read_per_s", "new_per_s")))
        rows.append((label, *cells))
    heads = (f"{number(length)}: {what}" for length in lengths_read for what in ("cache", "speed"))
    return Table("", ("", *heads), rows).markdown()


def perplexity(folder: str = "results/small") -> str:
    """Perplexity on held-out text, by model."""
    where = {"metric": "perplexity", "position_embedding": "rope"}
    return grid("perplexity", models(where), {"held-out text": {"condition": "none"}}, folder, PERPLEXITY)


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
    rows = []
    for label, (file, model, against) in compared.items():
        timings = pd.read_json(ROOT / f"benchmarks/results/{file}.jsonl", lines=True)
        (one,) = timings[(timings.model == model) & (timings.against == against)].itertuples()
        rows.append(
            (Markup(label), f"{one.ratio:.2f} ({one.ratio_low:.2f} to {one.ratio_high:.2f})", f"{one.limit:.2f}")
        )
    return Table("", ("", "ratio of times", "by arithmetic"), rows).markdown()


def cost() -> str:
    """What the grid took."""
    stages = pd.DataFrame(json.loads((ROOT / "results/small/run.json").read_text(encoding="utf-8"))["stages"])
    trained = stages.name.str.startswith(("pretrain-", "extend-", "finetune-")).sum()
    hours = stages.cpu_seconds.fillna(stages.seconds).sum() / 3600
    return f"{number(len(stages))} stages, {trained} of them trainings, took {hours:.1f} hours of CPU time.\n"


def demo_tasks() -> str:
    """The demo's models on the four tasks."""
    return grid("exactly right, in %", models({}), each_task(length=128), "results/demo")


def demo_recall() -> str:
    """The demo's models with the text covered, on longer lists, and on other markers."""
    columns: Rows = {
        "128, text covered": {"length": 128, "intervention": "landmarks_alone"},
        **lengths(256),
        "128, landmarks": {"length": 128, "condition": "landmark"},
        "128, decoys": {"length": 128, "condition": "decoy"},
    }
    return grid("list recall, prompt tokens", models({"task": "list_recall"}), columns, "results/demo")


FIGURES = {
    function.__name__: function
    for function in (
        summary, differences, answers, cost, tasks, sooner, markers, held, no_pos, yarn, long_prompts, full_differences,
        unmarked, other_recipes, added, long_texts, forgetting_tasks, forgetting_cost, perplexity, speed, demo_tasks,
        demo_recall,
    )
}  # fmt: skip
FIGURES |= {
    "recall": partial(by_length, "list_recall", 512, 128, 256, 512, 1024, 2048),
    "parity": partial(by_length, "parity", 128, 128, 256, 512, 1024),
    "copying": partial(by_length, "copying", 512, 128, 256, 512, 1024),
    "counting": partial(by_length, "segment_counting", 128, 128, 256, 512, 1024),
    "demo_perplexity": partial(perplexity, "results/demo"),
    "other_facts": other_facts,
    "smaller_cache": smaller_cache,
    "full_blocks": partial(forgetting, FULL_BLOCKS, "window-1-8-brief"),
    "forgetting": partial(forgetting, FORGETTING, "window-1-8"),
}


def filled(text: str) -> str:
    """A document with its figures written anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{FIGURES[block[2]]()}{block[3]}", text)


@contextmanager
def panels(path: Path, count: int, size: tuple[float, float], ticks: Mapping[float, str]) -> Iterator[Sequence[Axes]]:
    """Panels in a row, with a logarithmic axis to the right that has these ticks; they are written when drawn."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, count, figsize=size, sharey=True, layout="constrained", squeeze=False)
        yield axes[0]
        for axis in axes[0]:
            axis.set_xscale("log", base=2)
            axis.set_xticks([*ticks], [*ticks.values()], minor=False)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def draw(path: Path) -> None:
    """Draw accuracy by prompt length on the tasks: the mean of each model's runs, and its interval."""
    styles = STYLES | {"gpt2": replace(STYLES["gpt2"], colour=GREY)}  # which a dark page shows too
    shown = {length: number(length) for length in (128, 256, 512, 1024, 2048)}
    with panels(path, 4, (13, 3), shown) as axes:
        for axis, task in zip(axes, TASKS, strict=True):
            for model, style in styles.items():
                where = {**SMALL, "train_length": 512, "task": task, "model": model}
                cells = {length: Cell.of(run().select(**where, length=length)) for length in shown}
                cells = {length: cell for length, cell in cells.items() if cell.runs}
                ends = [[100 * end for end in cell.estimate()] for cell in cells.values()]
                mean, low, high = zip(*ends, strict=True) if ends else ((), (), ())
                axis.plot([*cells], mean, label=model, **line(style))
                band(axis, [*cells], low, high, style)
            axis.set(ylim=(-3, 103), xlabel="prompt length, tokens")
            axis.axvspan(110, 512, color=GREY, alpha=0.12, linewidth=0)
            axis.set_title(name(task), fontweight="bold")
        axes[0].set_ylabel("exactly right, %")
        axes[-1].legend(frameon=False, labelcolor=GREY)


def draw_full_blocks(path: Path) -> None:
    """Draw how many facts SmolLM2-135M finds at an eighth of the keys and values, by the length of the text."""
    looks = {
        "the base, full cache": ("full-1-1-untrained", "full", GREY, "s:"),
        "the same, trained": ("full-1-1-brief", "full", GREY, "^--"),
        "blocks 18 and 23 full": ("window-1-8-full-18-23-brief", "window", "#d9640f", "o-"),
        "a window": ("window-1-8-brief", "window", "#3f8f5a", "v-"),
        "SnapKV, untrained": ("press-1-8", "snapkv", "#2a86c7", "D--"),
    }
    shown = {length: number(length) for length in (512, 1024, 2048, 4096, 8192)}
    with panels(path, 1, (6, 3.2), shown) as [axis]:
        for label, (recipe, model, colour, form) in looks.items():
            middle, low, high = zip(*(found((recipe, model), length) for length in shown), strict=True)
            axis.plot([*shown], middle, form, color=colour, label=label)
            axis.fill_between([*shown], low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel="tokens of the text", ylabel="facts found, %", ylim=(-3, 103))
        axis.legend(frameon=False, labelcolor=GREY, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


def draw_forgetting(path: Path) -> None:
    """Draw what prose loses by the share of keys and values that is kept, in SmolLM2-135M: every arm."""
    looks = {
        "a window, untrained": (r"(full|window).*-untrained", GREY, "s-"),
        "full blocks, untrained": (r"window.*-untrained-full-18-23", GREY, "^"),
        "presses of kvpress, untrained": (r"press-.*", "#2a86c7", "D"),
        "landmarks, 1,500 steps": (r"(tokens|meta)-1-8(-sentence)?", "#d9640f", "o"),
        "a window, 1,500 steps": (r"window-1-8", "#3f8f5a", "v"),
        "a window or all text, 120 steps": (r"(window-1-8|full-1-1)-brief", "#3f8f5a", "x--"),
        "full blocks, 120 steps": (r".*-full-\d+-\d+-brief", "#d9640f", "+"),
    }
    prose, *_ = forget()
    base = of_arm(prose, FULL_BLOCKS["the base, full cache"]).set_index("text").loss
    prose = prose.assign(lost=prose.loss - prose.text.map(base))
    with panels(path, 1, (6, 5), {share: f"{share:g}" for share in (6.25, 12.5, 25, 50, 100)}) as [axis]:
        for label, (pattern, colour, form) in looks.items():
            chosen = prose[prose.recipe.str.fullmatch(f"forget/{pattern}")]
            shown = chosen.groupby(["recipe", "model"])[["kv_kept", "lost"]].mean().sort_values("kv_kept")
            axis.plot(100 * shown.kv_kept, shown.lost, form, color=colour, label=label)
        axis.set(xlabel="keys and values kept, %", ylabel="loss of prose minus the\nuntrained base's, nats")
        axis.legend(frameon=False, labelcolor=GREY, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
    draw(ROOT / "docs/images/accuracy.svg")
    draw_full_blocks(ROOT / "docs/images/full_blocks.svg")
    draw_forgetting(ROOT / "docs/images/forgetting.svg")
