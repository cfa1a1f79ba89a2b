"""Tables of a grid's accuracies: those that the paper has too, and those of our controls.

A cell has lines: our figure with its 95 % interval, the paper's, and each seed's, rounded, where there are several.
"""

from collections.abc import Iterable
from itertools import product

from metatokens.paper.report.compare import reaches
from metatokens.paper.report.derive import TRAINED
from metatokens.paper.report.frame import LENGTHS, MODELS, TASKS, Fields, Inputs
from metatokens.paper.report.labels import in_order
from metatokens.paper.report.paper import PaperTable, paper_table, printed
from metatokens.paper.report.tables.table import POSITIONS, Table, crosstab, label
from metatokens.paper.report.text import MINUS, name, percent, signed, tokens
from metatokens.paper.report.words import table_words

FAMILY = (*MODELS, "gpt-neo")
LENGTH_TABLES = dict(zip(TASKS, (7, 8, 9, 10), strict=True))
ABLATION_TABLES = dict(zip(TASKS, (11, 12, 13, 14), strict=True))
NOISE_TABLES = {"list_recall": 15, "copying": 16}
INTERVENTIONS = {"": "full", "no_pos": "no position", "no_embed": "no embedding", "neither": "neither"}
NOISE_KINDS = {":meta": "at the meta-tokens alone", ":raw": "in raw units"}
NOISE_KINDS[":meta:raw"] = ", ".join(NOISE_KINDS.values())
PLACEMENTS = {"": "uniform, k = 0.1 (paper)", "periodic": "periodic, k = 0.1", "k=0": "none"}
PLACEMENTS |= {f"k={k}": f"uniform, k = {k}" for k in ("0.05", "0.2")}
JUMPS = {"": "plain", "jumps": "one jump, scalable softmax"}  # by variant
YARN = {"yarn4": (2048, 4096), "yarn8": (4096, 8192)}  # the paper's train lengths: half of the window, and all of it
YARN_LENGTHS = (1024, 2048, 4096, 8192, 16384)  # the block of its pretraining, and where its Table 1 tests
STRONG = 0.8  # below it at its own train length, a model has not learned
_RECALL = {"model": "meta", "position_embedding": "rope", "task": "list_recall"}
_UNTRAINED = "Learned positions beyond the blocks of pretraining are untrained: fine-tuning goes to 512 tokens."


def lengths(inputs: Inputs, task: str) -> Table:
    """Tables 7 to 10: a row for each of the paper's, a column for each length."""
    paper = paper_table(LENGTH_TABLES[task])
    rows = [{"train_length": TRAINED[-1], "task": task, **row.fields} for row in paper.rows]
    columns = _by_length(column["length"] for column in paper.columns)
    notes = {"paper_notes": _notes(paper), "untrained": _UNTRAINED}
    words = table_words("lengths").of(task=name(task), table=paper.table, **notes)
    return crosstab(inputs, words, _labelled(rows), columns, below=[_papers(row.values) for row in paper.rows])


def every_model(
    inputs: Inputs, task: str, condition: str = "paper", *, variant: str = "", metric: str = "exact_match"
) -> Table:
    """Every model, kind of positions and train length that was measured on a task."""
    where = {"metric": metric, "task": task, "condition": condition, "intervention": "", "variant": variant}
    where["train_condition"] = "landmark" if variant == "landmark" else "paper"
    rows = [
        where | {"model": model, "position_embedding": position, "train_length": trained}
        for position, model in product(POSITIONS, FAMILY)
        for trained in inputs.values("train_length", **where, model=model, position_embedding=position)
    ]
    which = f", condition {condition}" if condition != "paper" else ""
    untrained = _UNTRAINED if any(row["position_embedding"] == "learned" for row in rows) else ""
    words = table_words("every-model" if metric == "exact_match" else "every-model-by-token")
    words = words.of(task=name(task), which=which, untrained=untrained)
    return crosstab(inputs, words, _labelled(rows), _by_length(inputs.values("length", **where)))


def yarn(inputs: Inputs, task: str) -> Table:
    """Table 1 by extended window and train length: exact match, tokens and the paper's, at its lengths or a quarter."""
    paper, scale = paper_table(1), inputs.scale
    columns = {tokens(one // scale): {"length": one // scale} for one in YARN_LENGTHS}
    rows, below = [], []
    for variant, window, trained in _yarn_models():
        fields = _RECALL | {"task": task, "variant": variant, "train_length": trained // scale}
        model = f"meta, window {tokens(window // scale)}, trained to {tokens(trained // scale)}"
        rows.append((f"{model}\npaper's {window // 1024}k / {trained // 1024}k", fields))
        cells = inputs.cells([fields | column | {"metric": "token_accuracy"} for column in columns.values()])
        right = [f"tokens {percent(cell.value)}" if cell else "" for cell in cells]
        theirs = (paper.value(task=task, window=window, train_length=trained, length=one) for one in YARN_LENGTHS[1:])
        below.append([", ".join(filter(None, both)) for both in zip(right, ["", *_papers(theirs)], strict=True)])
    words = table_words("yarn").of(task=name(task), paper_notes=_notes(paper))
    return crosstab(inputs, words, rows, columns, below=below)


def papers_yarn(_: Inputs) -> Table:
    """The paper's Table 1 as printed."""
    paper = paper_table(1)
    header = ("window / train length", *(f"{(column['length'] or 0) // 1024}k" for column in paper.columns))
    rows = ((f"{name(str(row.fields['task']))}, {row.printed}", *map(printed, row.values)) for row in paper.rows)
    return Table("The paper's Table 1: token accuracy, %", header, tuple(rows))


def ablations(inputs: Inputs, task: str) -> Table:
    """Tables 11 to 14: full, no position, no embedding, neither at the meta-tokens, tested at the train length."""
    paper = paper_table(ABLATION_TABLES[task])
    theirs = sorted(paper.rows, key=lambda row: str(row.fields["position_embedding"]), reverse=True)
    rows = [{"model": "meta", "task": task, "length": row.fields["train_length"], **row.fields} for row in theirs]
    columns = _by_intervention(INTERVENTIONS)
    words = table_words("ablations").of(task=name(task), table=paper.table, paper_notes=_notes(paper))
    below = [_papers(row.values) for row in theirs]
    return crosstab(inputs, words, _labelled(rows), columns, below=below, shared_by=1)


def ablations_by_length(inputs: Inputs, task: str, trained: int) -> Table:
    """Every model that was measured, full and with each thing taken away from its meta-tokens, by length."""
    where = {"task": task, "train_length": trained}
    zeroed = where | {"metric": "exact_match", "condition": "paper", "intervention": "no_pos"}
    rows = [
        (f"{model}, {position}, {text}", where | {"model": model, "position_embedding": position, "intervention": what})
        for position, model in product(("rope", "learned"), MODELS)
        if inputs.values("length", **zeroed, main=True, model=model, position_embedding=position)
        for what, text in INTERVENTIONS.items()
    ]
    columns = _by_length(inputs.values("length", **zeroed, variant=""))
    words = table_words("ablations-by-length").of(task=name(task), trained=tokens(trained))
    return crosstab(inputs, words, rows, columns, shared_by=len(INTERVENTIONS))


def zeroed_positions(inputs: Inputs) -> Table:
    """Tables 2 and 17: list recall by length, full and without positions at the meta-tokens."""
    papers, rows, below = [paper_table(17), paper_table(2)], [], []
    for position, trained, length in product(("rope", "learned"), TRAINED, LENGTHS[:5]):
        if reaches(position, length):
            where = {"position_embedding": position, "train_length": trained, "length": length}
            rows.append((f"{position}, {tokens(trained)} \u2192 {tokens(length)}", _RECALL | where))
            cells = [[paper.value(**column, **where) for paper in papers] for column in papers[0].columns]
            *figures, gap = (next((one for one in both if one is not None), None) for both in cells)
            below.append([*_papers(figures), f"paper {printed(None) if gap is None else signed(gap / 100)}"])
    words = table_words("zeroed-positions").of(paper_notes=" ".join(papers[0].notes + papers[1].notes))
    gaps = {"difference, points": (INTERVENTIONS["no_pos"], INTERVENTIONS[""])}
    return crosstab(inputs, words, rows, _by_intervention(("", "no_pos")), below=below, gaps=gaps, shared_by=1)


def noise(inputs: Inputs, task: str, length: int, kind: str = "") -> Table:
    """Tables 15 and 16: Gaussian noise on the positions; `kind` is one of the further forms, such as `:meta`."""
    paper = paper_table(NOISE_TABLES[task])
    theirs = () if kind else paper.rows
    columns = {"no noise": {"intervention": ""}}
    columns |= {f"noise {scale}": {"intervention": f"noise:{scale}{kind}"} for scale in ("0.1", "0.5", "1", "2")}
    where = {"task": task, "length": length}
    rows = [where | row.fields for row in theirs] + [
        where | {"model": model, "position_embedding": position, "train_length": trained}
        for model, position, trained in product(("gpt2", "meta"), ("rope", "learned"), TRAINED)
        if (kind or (model, position) == ("gpt2", "rope"))
    ]
    noises = [column["intervention"] for column in columns.values()][1:]
    rows = [one for one in rows if not kind or inputs.values("task", **one, main=True, intervention=noises)]
    below = [_papers(row.values) for row in theirs] + [[""] * len(columns)] * (len(rows) - len(theirs))
    which = {"kind": NOISE_KINDS.get(kind, f"(Table {paper.table})"), "paper_notes": "" if kind else _notes(paper)}
    words = table_words("noise").of(task=name(task), length=tokens(length), **which)
    return crosstab(inputs, words, _labelled(rows), columns, below=below, shared_by=1)


def controls(inputs: Inputs) -> Table:
    """All four models with rope at 1, 2 and 4 times the train length, a row for each task and train length."""
    rows = [
        (
            f"{name(task)}, {tokens(trained)} \u2192 {tokens(trained * ratio)}",
            {"position_embedding": "rope", "task": task, "train_length": trained, "length": trained * ratio},
        )
        for task, trained, ratio in product(TASKS, TRAINED, (1, 2, 4))
    ]
    columns = {model: {"model": model} for model in MODELS}
    gaps = {f"meta {MINUS} twin": ("meta", "twin")}
    return crosstab(inputs, table_words("controls").of(), rows, columns, gaps=gaps)


def markers(inputs: Inputs, task: str) -> Table:
    """Each model with the markers that it was trained with, with those of lines, without any, and among decoys."""
    where = {"position_embedding": "rope", "task": task, "train_length": TRAINED[-1], "length": TRAINED[-1]}
    measured = in_order(inputs.values("condition", metric="exact_match", variant="", **where))
    columns = {condition: {"condition": condition} for condition in measured}
    rows = [(model, where | {"model": model}) for model in MODELS]
    words = table_words("markers").of(task=name(task), length=tokens(TRAINED[-1]))
    return crosstab(inputs, words, rows, columns, shared_by=1)


def placement(inputs: Inputs) -> Table:
    """Where meta-tokens are put in pretraining and how many: list recall by length."""
    rows = [
        (f"{text}, trained to {tokens(trained)}", _RECALL | {"train_length": trained, "variant": variant})
        for trained, (variant, text) in product(TRAINED, PLACEMENTS.items())
    ]
    words = table_words("placement").of()
    return crosstab(inputs, words, rows, _by_length(LENGTHS[:5]), shared_by=len(PLACEMENTS))


def jumps(inputs: Inputs, task: str, condition: str) -> Table:
    """Trained to 128 tokens with plain positions and with jumps in them, by length."""
    about = {"position_embedding": "rope", "task": task, "train_length": 128, "condition": condition}
    rows = [
        (f"{model}, {text}", about | {"model": model, "variant": variant})
        for model, (variant, text) in product(("gpt2", "twin", "meta"), JUMPS.items())
    ]
    measured = sorted({*inputs.values("length", metric="exact_match", variant="jumps", **about)})
    columns = {f"{tokens(one)} ({one // 128}\u00d7)": {"length": one} for one in measured}
    which = "the question as long as at 128 tokens" if condition == "long_prompt" else "the question grows too"
    words = table_words("jumps").of(task=name(task), which=which)
    return crosstab(inputs, words, rows, columns, shared_by=len(JUMPS))


def unlearned(inputs: Inputs) -> str:
    """Which models have not learned list recall at their own train length; the extended ones too."""
    plain: list[Fields] = [
        {"model": model, "position_embedding": position, "task": "list_recall", "train_length": end, "length": end}
        for position, model, end in product(POSITIONS, FAMILY, TRAINED)
    ]
    ends = [(variant, trained // inputs.scale) for variant, _, trained in _yarn_models()]
    extended = [_RECALL | {"variant": variant, "train_length": end, "length": end} for variant, end in ends]
    below = [
        f"{', '.join(filter(None, [label(one), one.get('variant')]))} ({percent(cell.value)})"
        for one, cell in zip(plain + extended, inputs.cells(plain) + inputs.cells(extended), strict=True)
        if cell and cell.value is not None and cell.value < STRONG
    ]
    said = f"Below {100 * STRONG:g}\u00a0% of list recall at their own train length, so that what they lose beyond it"
    return f"{said} tells little: {'; '.join(below)}." if below else ""


def _labelled(rows: Iterable[Fields]) -> list[tuple[str, Fields]]:
    return [(label(row), row) for row in rows]


def _by_length(ends: Iterable[int]) -> dict[str, Fields]:
    return {tokens(length): {"length": length} for length in ends}


def _by_intervention(chosen: Iterable[str]) -> dict[str, Fields]:
    return {INTERVENTIONS[what]: {"intervention": what} for what in chosen}


def _papers(values: Iterable[float | None]) -> list[str]:
    return [f"paper {printed(value)}" for value in values]


def _notes(paper: PaperTable) -> str:
    return "The paper's numbers: " + " ".join(paper.notes)


def _yarn_models() -> list[tuple[str, int, int]]:
    """The variant, the window and the train length of each of Table 1's models, as in the paper."""
    return [(variant, ends[-1], trained) for variant, ends in YARN.items() for trained in ends]
