"""Writes the tables and draws the pictures of these pages from committed result lines; `make figures` runs it.

The function NAME below writes the block that begins with `<!-- figures: NAME -->`. It only says what a table selects;
the report's engine makes the table.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from metatokens.evaluation.intervals import clustered_interval
from metatokens.looking.style import STYLES, band, line
from metatokens.paper.claims import ClaimResult, claims, judge
from metatokens.paper.frame import Inputs, load
from metatokens.paper.report import overview
from metatokens.paper.report.make_table import Cell, Fields, Table, make_table
from metatokens.paper.report.paper_numbers import paper_table
from metatokens.paper.report.text import NOT_RUN, PERCENT, Form, number, words
from metatokens.paper.rule import Effect, effect
from metatokens.records import Result, read_lines, unpack_hits
from metatokens.shrink.lookups import CHAT, PASSAGE, read_forms
from metatokens.shrink.measuring import ASKED_IN_CHAT, EXCERPT
from metatokens.shrink.measuring import FACTS as FACTS_OF_A_TEXT
from metatokens.tasks import TASKS, list_recall
from results.covered_text import judge as covered_text
from results.seeds import Mean
from results.shrink import judge as shrink_judge
from results.shrink import own_tests

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "results/forget/README.md",
    ROOT / "results/covered_text/README.md",
    ROOT / "results/shrink/README.md",
)
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)

Rows = Mapping[str, Fields]  # selections by label; columns too
KINDS = {
    "gpt2": "plain",
    "pause": "meta-tokens alone",
    "twin": "second ordinary attention",
    "meta": "meta-attention",
}
COVERED = ("pause", "twin", "meta")  # the models that have meta-tokens from pretraining on
CUTS = {  # of results/covered_text, as a reader sees them
    "landmark reads text, first attention": "the landmark reads the text, ordinary attention",
    "landmark reads text, second attention": "the landmark reads the text, meta-attention",
    "landmark reads landmarks, first attention": "landmarks read landmarks, ordinary attention",
    "landmark reads landmarks, second attention": "landmarks read landmarks, meta-attention",
    "question reads landmarks, first attention": "the question reads landmarks, ordinary attention",
    "question reads landmarks, second attention": "the question reads landmarks, meta-attention",
}
LABELS = {Markup(f"`{model}`, {kind}"): model for model, kind in KINDS.items()}
PLAIN: Fields = {
    "condition": "paper",
    "train_condition": "paper",
    "intervention": "",
    "variant": "",
}
SMALL: Fields = {"position_embedding": "rope"}
FACTS_TO_FORGET = 8  # in a text of results/forget
AT_128: Fields = {**SMALL, "train_length": 128, "length": 128}


class Arm(NamedTuple):
    """A model of results/forget: its recipe, without `forget/`, and how it keeps text."""

    recipe: str
    model: str


BASE = Arm("full-1-1-untrained", "full")
FULL_CACHE = Arm("full-1-1-brief", "full")
WINDOW = Arm("window-1-8-brief", "window")
BLOCKS = Arm("window-1-8-full-18-23-brief", "window")
BLOCKS_ON_PROSE = Arm("window-1-8-prose-full-18-23-brief", "window")
BLOCKS_TOWARDS_BASE = Arm("window-1-8-teacher-prose-full-18-23-brief", "window")
BLOCKS_AND_LANDMARKS = Arm("tokens-1-8-sentence-full-18-23-brief", "tokens")
OTHER_BLOCKS = Arm("window-1-8-full-9-20-brief", "window")
BLOCKS_UNTRAINED = Arm("window-1-8-untrained-full-18-23", "window")
FULL_BLOCKS = {
    "the base, full cache": BASE,
    "full cache, trained alike": FULL_CACHE,
    "a window of 60 in all blocks": WINDOW,
    "**blocks 18 and 23 full**, a window of 28": BLOCKS,
    "the same, trained on prose alone": BLOCKS_ON_PROSE,
    "the same, on prose, towards the base": BLOCKS_TOWARDS_BASE,
    "blocks 18 and 23 full, landmarks after sentences, a window of 9": BLOCKS_AND_LANDMARKS,
    "blocks 9 and 20 full, a window of 28": OTHER_BLOCKS,
    "blocks 18 and 23 full, untrained": BLOCKS_UNTRAINED,
}
SHRUNK = {  # models of results/shrink
    "base": "full cache, untrained",
    "full": "full cache, trained alike",
    "shrunk": "**nine full heads and a window, trained**",
    "window": "a window alone, trained alike",
}
CURVE = {  # runs of results/shrink with seed 0
    "quarter": "1/4, 18 full heads",
    "0": "1/8, nine full heads",
    "heads-6": "1/8, six full heads",
    "heads-3": "1/8, three full heads",
    "blocks-3": "1/8, three full blocks",
    "sixteenth": "1/16, four full heads",
}
SHORT_NAMES = {"shrunk": "nine full heads", "full": "full cache"}  # both trained
KINDS_OF_LOOKUPS = {
    "statement": "another statement, asked for in its words",
    "question": "the same, asked for in other words",
    "keys": "keys and values in another form",
    "several": "two facts together",
    "chat": "in a chat",
    "trained form": "a trained form, other names and words",
    "passage": "a passage of the text, repeated",
}
LONG_PROMPTS = {"list_recall": 2048, "segment_counting": 2048, "parity": 2048, "copying": 512}
TEXT_LENGTHS = (512, 2048, 8192)  # of the texts with facts

GREYED = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color")
GREY = "#7d8590"  # which a white and a dark page show
STYLE = dict.fromkeys(GREYED, GREY) | {"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "0"}


@cache
def run(folder: str = "results/small") -> Inputs:
    """The lines of a run, and the times of the benchmarks, which some claims are on."""
    speeds = [
        ROOT / f"benchmarks/results/{file}.jsonl" for file in ("decode_1", "decode_8", "prefill")
    ]
    return load([ROOT / folder, *speeds])


@cache
def judged() -> list[ClaimResult]:
    """The claims with their verdicts."""
    return [judge(run(), claim) for claim in claims()]


def grid(
    corner: str, rows: Rows, columns: Rows, folder: str = "results/small", form: Form = PERCENT
) -> str:
    """A table of the figures that have a row's and a column's fields; the plain runs' where these do not say."""
    figures = run(folder).measured(
        variant="*", condition="*", train_condition="*", intervention="*"
    )
    full_rows = {label: {**PLAIN, **row} for label, row in rows.items()}
    return make_table(figures, full_rows, columns, corner=corner, form=form).markdown()


def models(where: Fields) -> Rows:
    """A row for each model."""
    return {label: {**where, "model": model} for label, model in LABELS.items()}


def lengths(*tokens: int) -> Rows:
    """A column for each prompt length."""
    return {number(length): {"length": length} for length in tokens}


def each_task(**where: Any) -> Rows:
    """A column for each task."""
    return {words("task", task).lower(): {"task": task, **where} for task in TASKS}


def differences() -> str:
    """The main claims: the difference in each task, the mean with and without list recall, and the verdict."""
    main_claims = [result for result in judged() if result.claim.primary]
    headings = [
        result.claim.text.split(": ")[-1].replace(" beats ", " minus ") for result in main_claims
    ]
    rows = [
        (words("task", task), *(points_in_task(result, task) for result in main_claims))
        for task in TASKS
    ]
    rows.append(("mean of tasks", *(points(result.effect) for result in main_claims)))
    rows.append(
        ("mean without list recall", *(points_without_recall(result) for result in main_claims))
    )
    rows.append(
        ("verdict on the mean of tasks", *(overview.verdict(result) for result in main_claims))
    )
    return Table("", ("points (95 % interval)", *headings), rows).markdown()


def points(measured: Effect) -> str:
    """A difference of shares and its interval, in points."""
    return overview.amount(measured, "points").replace(" points", "")


def points_in_task(result: ClaimResult, task: str) -> str:
    """The same in one task."""
    return points(result.tasks[task]) if task in result.tasks else NOT_RUN


def points_without_recall(result: ClaimResult) -> str:
    """The same in the mean of the other tasks."""
    return points(effect([stratum for stratum in result.strata if stratum.task != "list_recall"]))


def verdicts(*beginnings: str) -> str:
    """The claims that begin so."""
    results = [result for result in judged() if result.claim.text.startswith(beginnings)]
    rows = [
        (result.claim.text, points(result.effect), overview.verdict(result)) for result in results
    ]
    return Table("", ("claim", "points (95 % interval)", "verdict"), rows).markdown()


def answers() -> str:
    """How many of the paper's claims have each verdict."""
    return f"{overview.counts(judged())}\n"


def tasks() -> str:
    """The four tasks at the trained length."""
    return grid("trained to 128 tokens, tested there", models(SMALL), each_task(**AT_128))


def beside_paper() -> str:
    """The model `meta`, trained on up to 512 tokens, and the paper's below it."""

    def of_the_paper(of_cell: pd.DataFrame) -> list[str]:
        fields = of_cell.iloc[0].to_dict()
        values = [paper_table(number).at(**fields) for number in (7, 8, 9, 10)]
        return [f"paper {value:.1f}" for value in values if value is not None]

    rows: Rows = {
        words("task", task): {**SMALL, "model": "meta", "train_length": 512, "task": task}
        for task in TASKS
    }
    columns = lengths(128, 256, 512, 1024)
    return make_table(
        run().measured(), rows, columns, corner=Markup("`meta`, prompt tokens"), below=of_the_paper
    ).markdown()


def long_prompts() -> str:
    """Prompts longer than any in training, without and with position jumps and scalable softmax."""
    rows: dict[str, Fields] = dict(models(SMALL))
    for label, model in LABELS.items():
        if model in ("gpt2", "meta"):
            rows[label + ", with both"] = {**SMALL, "model": model, "variant": "jumps"}
    columns: dict[str, Fields] = {
        f"{words('task', task).lower()}, {number(length)} tokens": {
            "task": task,
            "train_length": 128,
            "length": length,
            "condition": "long_prompt",
        }
        for task, length in LONG_PROMPTS.items()
    }
    claimed = verdicts("Position jumps and scalable softmax")
    return grid("trained to 128 tokens", rows, columns) + f"\n{claimed}"


@cache
def lines_on_covered_text() -> covered_text.Lines:
    """The lines of results/covered_text."""
    return covered_text.Lines(
        pd.read_json(ROOT / "results/covered_text/results.jsonl.gz", lines=True)
    )


def mean_over_seeds(model: str, task: str, **where: Any) -> Mean:
    """The accuracy of a model of results/covered_text over its seeds."""
    return Mean.of(lines_on_covered_text().by_seed(model, task, **where).tolist())


def share(mean: Mean) -> str:
    """In %, with the interval, and the seeds if these are not twelve."""
    value, low, high = (100 * number for number in (mean.value, mean.low, mean.high))
    seeds = "" if mean.n == 12 else f", {mean.n} seeds"
    return f"{value:.1f} ({max(low, 0):.1f} to {min(high, 100):.1f}{seeds})"


def guess(task: str, length: int) -> float:
    """The share that guessing gives."""
    if task == "list_recall":
        return list_recall.CHANCE
    return lines_on_covered_text().commonest(task, length)


def covered_task(task: str) -> str:
    """A task of twelve seeds, with the text in sight and covered."""
    columns: dict[str, Fields] = {
        "in sight, 128 tokens": {"text": "in_sight", "length": 128},
        "covered, 128": {"length": 128},
        "covered, 256": {"length": 256},
        "covered, 512": {"length": 512},
    }
    rows = []
    for label, model in LABELS.items():
        if model in COVERED:
            means = [mean_over_seeds(model, task, **where) for where in columns.values()]
            rows.append((label, *map(share, means)))
    guesses = [guess(task, where["length"]) for where in columns.values()]
    rows.append(("guessing", *(f"{100 * value:.1f}" for value in guesses)))
    # A shortcut reads the text, so it has nothing to read where that is covered.
    best = lines_on_covered_text().shortcut(task, "paper", 128)
    rows.append(("best shortcut", f"{100 * best:.1f}", *[""] * (len(columns) - 1)))
    return Table(
        "", (f"{words('task', task).lower()}, exactly right, %", *columns), rows
    ).markdown()


def covered_cuts() -> str:
    """List recall of twelve seeds of `meta` with the text covered, without some edges of attention."""
    rows = []
    for cut, label in {"": "none", **CUTS}.items():
        mean = mean_over_seeds("meta", "list_recall", cut=cut)
        rows.append((label, share(mean)))
    return Table(
        "", ("taken away at test time", Markup("`meta`, exactly right, %")), rows
    ).markdown()


def unmarked() -> str:
    """List recall of models that trained among landmarks, where no marker points at the answer; the claims on it."""
    among = {"variant": "landmark", "train_condition": "landmark", "condition": "landmark"}
    shown = grid(
        "list recall, prompt tokens",
        models({"task": "list_recall", **among}),
        lengths(128, 256, 512),
    )
    return shown + "\n" + verdicts("Trained where")


def more_steps() -> str:
    """List recall with three times the steps, at both train lengths; the claims on it."""
    columns = {
        f"{length} tokens, {steps}": {"train_length": length, "length": length, "variant": variant}
        for length in (128, 512)
        for variant, steps in {"": "as above", "longer": "three times the steps"}.items()
    }
    shown = grid(
        "list recall, trained to and tested at", models({**SMALL, "task": "list_recall"}), columns
    )
    return shown + "\n" + verdicts("With three")


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
        corner = f"{words('task', task).lower()}, prompt tokens"
        shown.append(grid(corner, rows, lengths(128, 256, 512, 1024), "results/retrofit"))
    return "\n".join(shown)


@cache
def lines_on_forgetting() -> pd.DataFrame:
    """The lines of SmolLM2-135M that forgets."""
    return pd.read_json(ROOT / "results/forget/results.jsonl.gz", lines=True)


def lines_on_prose() -> pd.DataFrame:
    """Those on prose, with the loss."""
    lines = lines_on_forgetting()
    prose = lines[lines.metric == "perplexity"]
    return prose.assign(loss=np.log(prose.value))


def of_arm(lines: pd.DataFrame, arm: Arm) -> pd.DataFrame:
    """The lines of an arm, all its seeds."""
    return lines[(lines.recipe == f"forget/{arm.recipe}") & (lines.model == arm.model)]


def lost(arm: Arm, reference: Arm) -> pd.Series:
    """What an arm loses to another on each excerpt, nats, in the mean of its seeds."""
    prose = lines_on_prose()
    loss, reference_loss = (
        of_arm(prose, each).groupby("text").loss.mean() for each in (arm, reference)
    )
    return (loss - reference_loss).dropna()


def plus_minus(values: pd.Series, form: str) -> str:
    """A mean and its 95 % interval (normal)."""
    half = 1.96 * values.std() / len(values) ** 0.5
    return f"{values.mean():+{form}} \u00b1 {half:{form}}".replace("-", "\u2212") if half else "0"


def lines_on_facts(arm: Arm, length: int) -> pd.DataFrame:
    """An arm's lines on facts in texts of a length."""
    lines = of_arm(lines_on_forgetting(), arm)
    return lines[(lines.length == length) & (lines.task == "facts")]


def facts_found(arm: Arm, length: int) -> tuple[float, float, float]:
    """The share of the facts that an arm finds, %, and its interval.

    All seeds are asked about the same texts, so a text is an observation.
    """
    lines = lines_on_facts(arm, length)
    of_seeds = np.stack([unpack_hits(line.hits, line.n) for line in lines.itertuples()])
    of_texts = of_seeds.reshape(len(lines), -1, FACTS_TO_FORGET).swapaxes(0, 1)
    low, high = clustered_interval([answers.ravel() for answers in of_texts])
    return 100 * of_seeds.mean(), 100 * low, 100 * high


def share_found(arm: Arm, length: int) -> str:
    """The same as a cell of a table."""
    share, low, high = facts_found(arm, length)
    return f"{share:.1f} ({low:.0f} to {high:.0f})"


def share_kept(lines: pd.DataFrame) -> str:
    """The share of the keys and values that is kept, %."""
    return f"{100 * lines.kv_kept.mean():.1f}"


def forgetting(arms: Mapping[str, Arm], reference: Arm) -> str:
    """What arms keep, their loss on prose minus that of a reference, and the facts that they find."""
    rows = []
    for label, arm in arms.items():
        shares_kept = (
            share_kept(of_arm(lines_on_prose(), arm)),
            share_kept(lines_on_facts(arm, 8192)),
        )
        cells = (share_found(arm, length) for length in TEXT_LENGTHS)
        rows.append(
            (
                Markup(label),
                " / ".join(shares_kept),
                plus_minus(lost(arm, reference), ".3f"),
                *cells,
            )
        )
    heads = (f"facts at {number(length)} tokens, %" for length in TEXT_LENGTHS)
    return Table("", ("", "KV kept of 512 / 8,192, %", "prose, nats", *heads), rows).markdown()


@cache
def lines_on_shrinking() -> list[Result]:
    """The lines of what `metatokens shrink` makes of SmolLM2-135M."""
    return own_tests.named_as_arms(read_lines(ROOT / "results/shrink/runs.jsonl.gz", Result))


def shrunk() -> str:
    """What the main runs keep and find, and what prose and replies lose."""
    lines = own_tests.of_main_runs(lines_on_shrinking())
    findings = shrink_judge.Findings(lines, own_tests.NEW, FACTS_OF_A_TEXT)
    of_full = [line for line in lines if line.model == "full"]
    rows = []
    for model, label in SHRUNK.items():
        of_model = [line for line in lines if line.model == model]
        seeds = {line.seed for line in of_model}
        share = shrink_judge.kept_share(lines, model, 4096)
        answered = (shrink_judge.cell(findings, model, length) for length in findings.lengths)
        full_of_seeds = [line for line in of_full if line.seed in seeds]
        prose = own_tests.loss_difference(EXCERPT, of_model, full_of_seeds)
        runs = "-" if model == "base" else number(len(seeds))
        loss = "0" if model == "full" else nats(prose)
        rows.append((Markup(label), runs, share, *answered, loss))
    ratios = (share_of_full(findings, length) for length in findings.lengths)
    rows.append(("found, as a share of the full cache's", "", "", *ratios, ""))
    heads = (f"found in {number(length)} tokens, %" for length in findings.lengths)
    columns = ("", "trainings", "kept of 4,096 tokens, %", *heads, "prose, nats a token")
    return Table("", columns, rows).markdown()


def shrunk_in_short() -> str:
    """What the main runs keep and find at 4,096 tokens, next to the full cache after the same training."""
    lines = own_tests.of_main_runs(lines_on_shrinking())
    lines = [line for line in lines if line.length == 4096]
    rows = []
    for model, label in {
        "full": "full cache, the same training",
        "shrunk": "nine full heads",
    }.items():
        findings = shrink_judge.Findings(lines, own_tests.NEW, FACTS_OF_A_TEXT)
        answered = shrink_judge.cell(findings, model, 4096)
        rows.append((label, shrink_judge.kept_share(lines, model, 4096), answered))
    columns = ("4,096 tokens, %", "keys and values kept", "look-ups answered")
    return Table("", columns, rows).markdown()


def share_of_full(findings: shrink_judge.Findings, length: int) -> str:
    """What the shrunk model finds, in % of what the full cache finds after the same training."""
    shrunk, full = findings.shares("shrunk", length), findings.shares("full", length)
    ratio, low, high = shrink_judge.ratio_with_interval(shrunk, full)
    return f"{100 * ratio:.0f} ({100 * low:.0f} to {100 * high:.0f})"


def nats(difference: tuple[float, float, float] | None) -> str:
    """A difference with its interval."""
    return own_tests.nats(difference).replace("-", "\u2212")


def shrunk_by_seed() -> str:
    """What each training finds, in % of what the full cache finds after the same training."""
    lines = own_tests.of_main_runs(lines_on_shrinking())
    rows = []
    for seed in sorted({result.seed for result in lines}):
        of_seed = [result for result in lines if result.seed == seed]
        findings = shrink_judge.Findings(of_seed, own_tests.NEW, FACTS_OF_A_TEXT)
        cells = (share_of_full(findings, length) for length in findings.lengths)
        rows.append((f"seed {seed}", *cells))
    lengths_read = shrink_judge.Findings(lines, own_tests.NEW).lengths
    heads = (f"{number(length)} tokens" for length in lengths_read)
    return Table("", ("of what the full cache finds, %", *heads), rows).markdown()


def shrunk_by_kind() -> str:
    """What the main runs find of each kind, next to the full cache, trained alike: the mean of the trainings."""
    lines = own_tests.of_main_runs(lines_on_shrinking())
    lengths_read = shrink_judge.Findings(lines, own_tests.NEW).lengths
    rows = []
    for kind, label in KINDS_OF_LOOKUPS.items():
        findings = findings_of_kind(lines, kind)
        for model, name in SHORT_NAMES.items():
            cells = (shrink_judge.cell(findings, model, length) for length in lengths_read)
            rows.append((label if model == "shrunk" else "", name, *cells))
    heads = (f"{number(length)} tokens, %" for length in lengths_read)
    return Table("", ("", "", *heads), rows).markdown()


def findings_of_kind(lines: Sequence[Result], kind: str) -> shrink_judge.Findings:
    """What models find of one kind of look-ups; a text asks for one passage, or for six facts."""
    return shrink_judge.Findings(lines, [kind], 1 if kind == PASSAGE else FACTS_OF_A_TEXT)


def shrunk_by_form() -> str:
    """What the main runs find in 512 tokens, by the form of the look-up."""
    lines = own_tests.of_main_runs(lines_on_shrinking())
    all_forms = read_forms()["test"]
    rows = []
    for kind in own_tests.NEW:
        # A chat asks the questions of the kind `question`.
        forms = [
            form for form in all_forms if form.kind == (ASKED_IN_CHAT if kind == CHAT else kind)
        ]
        findings = findings_of_kind(lines, kind)
        for index, form in enumerate(forms):
            cells = []
            for model in SHORT_NAMES:
                shares = findings.shares(model, 512)
                assert shares is not None
                cells.append(shrink_judge.estimate(shares[:, index :: len(forms)]))
            in_chat = " (in a chat)" if kind == CHAT else ""
            rows.append((Markup(f"`{' '.join(form.ask.split())}`{in_chat}"), *cells))
    columns = ("512 tokens, %", *SHORT_NAMES.values())
    return Table("", columns, rows).markdown()


def shrunk_curve() -> str:
    """What is found by the share that is kept and the number of full heads, in those runs that there are."""
    lines = lines_on_shrinking()
    of_full = [line for line in own_tests.of_main_runs(lines) if line.model == "full"]
    lengths_read = shrink_judge.Findings(lines, own_tests.NEW).lengths
    cells_by_run = own_tests.run_rows(lines, of_full, lengths_read)
    rows = []
    for run, label in CURVE.items():
        if run in cells_by_run:
            rows.append((label, *(cell.replace("-", "\u2212") for cell in cells_by_run[run])))
    heads = (f"{number(length)} tokens, %" for length in lengths_read)
    columns = ("", "kept of 4,096 tokens, %", *heads, "prose, nats", "replies, nats")
    return Table("", columns, rows).markdown()


def shrunk_cost() -> str:
    """The memory of the caches, and their tokens a second as multiples of those of the full cache."""
    files = ("costs.json", "costs_by_intel_paths.json")
    by_file = [
        pd.read_json(ROOT / "results/shrink" / file).set_index(["cache", "length"])
        for file in files
    ]
    rows = []
    for length in by_file[0].loc["full"].index:
        speeds = []
        for lines in by_file:
            full, small = lines.loc["full", length], lines.loc["shrunk", length]
            speeds.append(f"{small.read_per_second / full.read_per_second:.1f}")
            speeds.append(f"{small.new_per_second / full.new_per_second:.1f}")
        memory = f"{small.cache_bytes / 1e6:.1f} of {full.cache_bytes / 1e6:.0f} MB"
        rows.append((number(length), memory, *speeds))
    paths = ("reading", "writing", "reading, Intel's paths", "writing, Intel's paths")
    return Table("", ("tokens", "cache", *paths), rows).markdown()


def cost() -> str:
    """What the grid took, and what it would take on CPUs alone.

    A stage that ran on the GPU is taken to need what it needs on a CPU with other seeds; where it has not run on one,
    as many times its time beside the GPU as the others need.
    """
    stages = pd.read_json(ROOT / "results/small/stages.jsonl", lines=True)
    trained = stages.name.str.startswith(("pretrain-", "extend-", "finetune-")).sum()
    on_cpu = stages.versions.str["torch"].str.endswith("+cpu")
    hours = stages.cpu_seconds / 3600
    stage = stages.name.str.replace(r"-seed\d+", "", regex=True)
    expected = stage.map(hours[on_cpu].groupby(stage[on_cpu]).mean())[~on_cpu]
    beside_gpu = hours[~on_cpu]
    times_longer = expected.sum() / beside_gpu[expected.notna()].sum()
    on_cpus_alone = hours[on_cpu].sum() + expected.fillna(beside_gpu * times_longer).sum()
    return (
        f"Of {number(len(stages))} stages, {trained} of them trainings, {on_cpu.sum()} took "
        f"{hours[on_cpu].sum():.1f} hours of CPU time; the others ran on the GPU. On CPUs alone all would take about "
        f"{on_cpus_alone:.0f} hours.\n"
    )


def demo_tasks() -> str:
    """The demo's models on the four tasks."""
    return grid("exactly right, in %", models({}), each_task(length=128), "results/demo")


FIGURES = {
    function.__name__: function
    for function in (
        answers, differences, tasks, beside_paper, unmarked, more_steps, long_prompts, cost, demo_tasks, added,
        covered_cuts,
        shrunk, shrunk_in_short, shrunk_by_seed, shrunk_by_kind, shrunk_by_form, shrunk_curve, shrunk_cost,
    )
}  # fmt: skip
FIGURES |= {
    "covered_recall": partial(covered_task, "list_recall"),
    "covered_parity": partial(covered_task, "parity"),
    "covered_counting": partial(covered_task, "segment_counting"),
    "full_blocks": partial(forgetting, FULL_BLOCKS, WINDOW),
}


def filled(text: str) -> str:
    """A document with its figures written anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{FIGURES[block[2]]()}{block[3]}", text)


@contextmanager
def drawing(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure that is written to a file once it is drawn."""
    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def set_logarithmic(axis: Axes, ticks: Mapping[float, str]) -> None:
    """Give an axis a logarithmic scale to the right, with these ticks."""
    axis.set_xscale("log", base=2)
    axis.set_xticks([*ticks], [*ticks.values()], minor=False)
    axis.spines[["top", "right"]].set_visible(False)


def draw(path: Path) -> None:
    """Draw what the models answer with the text covered, and with it in sight by prompt length."""
    with drawing(path, (12, 4.6)) as figure:
        left, right = figure.subfigures(1, 2, width_ratios=(7, 8), wspace=0.03)
        draw_covered(left)
        draw_lengths(right)


def draw_covered(figure: SubFigure) -> None:
    """Draw what three models answer with all text in sight, and with the text covered: one panel for each task."""
    tasks = ("list_recall", "parity", "segment_counting")
    axes = figure.subplots(1, len(tasks), sharey=True)
    for axis, task in zip(axes, tasks, strict=True):
        draw_covered_task(axis, task)
        axis.axhline(100 * guess(task, 128), color=GREY, linestyle=":", label="guessing")
        axis.set_title(words("task", task), fontweight="bold")
    axes[0].set(ylim=(-3, 119), yticks=range(0, 101, 25), ylabel="exactly right at 128 tokens, %")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        frameon=False,
        labelcolor=GREY,
        loc="outside lower center",
        ncols=3,
        columnspacing=1.2,
        handlelength=1.4,
    )


def draw_covered_task(axis: Axes, task: str) -> None:
    """Draw what three models answer of one task: pale bars with all text in sight, dark ones with the text covered."""
    looks = {
        "in_sight": ("text in sight", -0.2, 0.35),
        "covered": ("text covered", 0.2, 1.0),
    }
    for text, (label, shift, opacity) in looks.items():
        for x, model in enumerate(COVERED):
            mean = mean_over_seeds(model, task, text=text)
            value, low, high = 100 * mean.value, 100 * mean.low, 100 * mean.high
            colour = STYLES[model].colour
            axis.bar(x + shift, value, 0.36, color=colour, alpha=opacity)
            axis.errorbar(x + shift, value, [[value - low], [high - value]], color=GREY, capsize=3)
            axis.annotate(
                f"{value:.0f}",
                (x + shift, min(high, 100)),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
            )
        axis.bar(0, 0, color=GREY, alpha=opacity, label=label)
    axis.set_xticks(range(len(COVERED)), COVERED)
    axis.spines[["top", "right"]].set_visible(False)


def draw_cuts(path: Path) -> None:
    """Draw list recall of `meta` with the text covered, when an edge is cut in one layer or in one head of it."""
    layers, heads = range(3), range(4)
    columns: list[tuple[int, float | str]] = [
        (layer, head) for layer in layers for head in ("", *map(float, heads))
    ]
    shares = [
        [
            100
            * mean_over_seeds("meta", "list_recall", cut=cut, layers=f"[{layer}]", head=head).value
            for layer, head in columns
        ]
        for cut in CUTS
    ]
    with drawing(path, (9.2, 3.4)) as figure:
        axis = figure.subplots()
        axis.imshow(shares, cmap="Blues", vmin=0, vmax=220, aspect="auto")
        for row, values in enumerate(shares):
            for column, value in enumerate(values):
                axis.annotate(
                    f"{value:.0f}",
                    (column, row),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="black",
                )
        for layer in layers[1:]:
            axis.axvline(len(columns) / len(layers) * layer - 0.5, color="white", linewidth=4)
        axis.set_yticks(range(len(CUTS)), CUTS.values())
        axis.set_xticks(
            range(len(columns)),
            ["all" if head == "" else f"{head + 1:.0f}" for _, head in columns],
        )
        for layer in layers:
            middle = len(columns) / len(layers) * (layer + 0.5) - 0.5
            axis.annotate(f"layer {layer + 1}", (middle, -0.8), ha="center", annotation_clip=False)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.set_xlabel("heads of the layer in which the edges are cut")


def draw_lengths(figure: SubFigure) -> None:
    """Draw accuracy by prompt length on the tasks: the mean of each model's runs, and its interval."""
    styles = STYLES | {"gpt2": replace(STYLES["gpt2"], colour=GREY)}  # which a dark page shows too
    ticks = {length: number(length) for length in (128, 256, 512, 1024, 2048)}
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for axis, task in zip(axes.flat, TASKS, strict=True):
        for model, style in styles.items():
            where = {**SMALL, "train_length": 512, "task": task, "model": model}
            cells = {length: Cell.of(run().measured(**where, length=length)) for length in ticks}
            estimates = {length: cell.estimate() for length, cell in cells.items() if cell.runs}
            mean, low, high = 100 * np.array([*estimates.values()]).T
            axis.plot([*estimates], mean, label=model, **line(style))
            band(axis, [*estimates], low, high, style)
        axis.axvspan(110, 512, color=GREY, alpha=0.12, linewidth=0)
        axis.set(ylim=(-3, 103))
        axis.set_title(words("task", task), fontweight="bold")
        set_logarithmic(axis, ticks)
    figure.supxlabel("prompt length, tokens", fontsize=STYLE["font.size"])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, labelcolor=GREY, ncols=4, loc="outside upper center"
    )


def draw_shrunk(path: Path) -> None:
    """Draw what SmolLM2-135M finds, by the length of the text and the cache."""
    lines = own_tests.of_main_runs(lines_on_shrinking())
    findings = shrink_judge.Findings(lines, own_tests.NEW, FACTS_OF_A_TEXT)
    looks = {
        "base": (GREY, "s:"),
        "full": (GREY, "^--"),
        "shrunk": ("#d9640f", "o-"),
    }
    ticks = {length: number(length) for length in findings.lengths}
    with drawing(path, (6, 3.2)) as figure:
        axis = figure.subplots()
        for model, (colour, form) in looks.items():
            shares = [findings.shares(model, length) for length in ticks]
            estimates = [shrink_judge.mean_with_interval(share) for share in shares]
            share, low, high = 100 * np.array(estimates).T
            axis.plot([*ticks], share, form, color=colour, label=SHRUNK[model].strip("*"))
            axis.fill_between([*ticks], low, high, color=colour, alpha=0.15, linewidth=0)
        set_logarithmic(axis, ticks)
        axis.set(xlabel="tokens of the text", ylabel="look-ups answered, %", ylim=(-3, 103))
        axis.legend(
            frameon=False, labelcolor=GREY, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1)
        )


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
    prose = lines_on_prose()
    base = of_arm(prose, BASE).set_index("text").loss
    prose = prose.assign(lost=prose.loss - prose.text.map(base))
    with drawing(path, (6, 5)) as figure:
        axis = figure.subplots()
        for label, (pattern, colour, form) in looks.items():
            chosen = prose[prose.recipe.str.fullmatch(f"forget/{pattern}")]
            shown = (
                chosen.groupby(["recipe", "model"])[["kv_kept", "lost"]]
                .mean()
                .sort_values("kv_kept")
            )
            axis.plot(100 * shown.kv_kept, shown.lost, form, color=colour, label=label)
        set_logarithmic(axis, {share: f"{share:g}" for share in (6.25, 12.5, 25, 50, 100)})
        axis.set(
            xlabel="keys and values kept, %",
            ylabel="loss of prose minus the\nuntrained base's, nats",
        )
        axis.legend(
            frameon=False, labelcolor=GREY, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1)
        )


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
    draw(ROOT / "docs/images/accuracy.svg")
    draw_cuts(ROOT / "docs/images/covered_text.svg")
    draw_shrunk(ROOT / "docs/images/shrunk.svg")
    draw_forgetting(ROOT / "docs/images/forgetting.svg")
