"""Tables of a grid's accuracies: those that the paper has too, and those of our controls.

A cell has lines: our figure with its 95 % interval, the paper's, and each seed's, rounded, where there are several.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product

from metatokens.data.insertion import meta_token_count
from metatokens.report.claims import LENGTHS, RANDOM, STRONG, YARN, YARN_LENGTHS, reaches
from metatokens.report.derive import TRAINED
from metatokens.report.frame import LONGER, MODELS, TASKS, Cell, Fields, Inputs, one_seed, shared
from metatokens.report.intervals import Difference, newcombe
from metatokens.report.paper import PaperTable, paper_table, printed
from metatokens.report.tables.table import POSITIONS, Cells, Table, change, crosstab, label
from metatokens.report.text import MINUS, compact, count, name, percent, signed, tokens
from metatokens.report.verdict import SMALL

LENGTH_TABLES = dict(zip(TASKS, (7, 8, 9, 10), strict=True))
ABLATION_TABLES = dict(zip(TASKS, (11, 12, 13, 14), strict=True))
NOISE_TABLES = {"list_recall": 15, "copying": 16}
FAMILY = (*MODELS, "gpt-neo")
INTERVENTIONS = {"": "full", "no_pos": "no position", "no_embed": "no embedding", "neither": "neither"}
SCALES = ("0.1", "0.5", "1", "2")
NOISE_KINDS = {"": "", ":meta": "at the meta-tokens alone", ":raw": "in raw units"}
NOISE_KINDS[":meta:raw"] = f"{NOISE_KINDS[':meta']}, {NOISE_KINDS[':raw']}"
PLACEMENTS = {"": "uniform, k = 0.1 (paper)", "periodic": "periodic, k = 0.1", "k=0": "none"}
PLACEMENTS |= {f"k={k}": f"uniform, k = {k}" for k in ("0.05", "0.2")}
_RECALL = {"model": "meta", "position_embedding": "rope", "task": "list_recall"}


def lengths(inputs: Inputs, task: str) -> Table:
    """Tables 7 to 10: a row for each of the paper's, a column for each length."""
    paper = paper_table(LENGTH_TABLES[task])
    rows = [{"train_length": TRAINED[-1], "task": task, **row.fields} for row in paper.rows]
    return crosstab(
        inputs,
        f"{name(task)} (Table {paper.table}): answers exactly right, %",
        "model, positions, train length",
        [(label(fields), fields) for fields in rows],
        _by_length(column["length"] for column in paper.columns),
        below=[list(map(_papers, row.values)) for row in paper.rows],
        note=f"{_notes(paper)} {untrained(inputs)}".strip(),
    )


def all_lengths(
    inputs: Inputs, task: str, condition: str = "paper", *, variant: str = "", metric: str = "exact_match"
) -> Table:
    """Every model, kind of positions and train length that was measured on a task."""
    where = {"task": task, "condition": condition, "intervention": "", "variant": variant}
    trained_on = {"train_condition": "none" if variant == "unmarked" else "paper"}
    columns = _by_length(inputs.values("length", **where, **trained_on, metric=metric))
    rows = [
        {"model": model, "position_embedding": position, "train_length": trained} | where | trained_on
        for position, model in product(POSITIONS, FAMILY)
        for trained in inputs.values("train_length", **where, metric=metric, model=model, position_embedding=position)
    ]
    extra = f", condition {condition}" if condition != "paper" else ""
    extra += ", trained longer" if variant == LONGER else ""
    is_exact = metric == "exact_match"
    has_learned = bool(inputs.values("task", **where, metric=metric, position_embedding="learned"))
    table = crosstab(
        inputs,
        f"{name(task)}{extra}: {'answers exactly right' if is_exact else 'answer tokens right'}, %",
        "model, positions, train length",
        [(label(fields), fields | {"metric": metric}) for fields in rows],
        columns,
        note=untrained(inputs) if is_exact and has_learned else "",
    )
    if is_exact:
        return table
    settings = [fields | column for fields in rows for column in columns.values()]
    n = ("n (tokens a seed)", *table.footer[1][1:])
    return replace(table, footer=(n,), note=_token_note(inputs, settings))


def yarn(inputs: Inputs, task: str) -> Table:
    """Table 1 by extended window and train length: exact match, tokens and the paper's, at its lengths or a quarter."""
    paper, scale = paper_table(1), inputs.scale
    columns = [length // scale for length in YARN_LENGTHS]
    rows, below = [], []
    for variant, window, trained in _yarn_models(inputs):
        fields = _RECALL | {"task": task, "variant": variant, "train_length": trained}
        of_paper = f"paper's {scale * window // 1024}k / {scale * trained // 1024}k"
        rows.append((f"meta, window {tokens(window)}, trained to {tokens(trained)}", fields, of_paper))
        theirs = {"task": task, "window": scale * window, "train_length": scale * trained}
        right = inputs.cells([fields | {"length": one, "metric": "token_accuracy"} for one in columns])
        below.append(
            [
                ", ".join(
                    ([f"tokens {percent(pooled.value)}"] if cell and (pooled := cell.pooled()) else [])
                    + ([_papers(paper.value(**theirs, length=scale * one))] if one != columns[0] else [])
                )
                for one, cell in zip(columns, right, strict=True)
            ]
        )
    settings = [fields | {"length": one} for _, fields, _ in rows for one in columns]
    headers = (tokens(columns[0]), *(f"{tokens(one)} (paper's {scale * one // 1024}k)" for one in columns[1:]))
    table = crosstab(
        inputs,
        f"{name(task)} with YaRN (Table 1): answers exactly right, %; below, answer tokens right",
        "model",
        [(text, fields) for text, fields, _ in rows],
        {header: {"length": one} for header, one in zip(headers, columns, strict=True)},
        below=below,
        note="The paper's number is a token accuracy; which tokens it counts is not said. Ours is exact match, with "
        f"token accuracy below it. {_token_note(inputs, settings)} {_notes(paper)}".strip(),
    )
    named = ((f"{row[0]}\n{of_paper}", *row[1:]) for row, (_, _, of_paper) in zip(table.rows, rows, strict=True))
    return replace(table, rows=tuple(named))


def papers_yarn() -> Table:
    """The paper's Table 1 as printed."""
    paper = paper_table(1)
    return Table(
        "The paper's Table 1: token accuracy, %",
        ("window / train length", *(f"{(column['length'] or 0) // 1024}k" for column in paper.columns)),
        tuple((f"{name(str(row.fields['task']))}, {row.printed}", *map(printed, row.values)) for row in paper.rows),
    )


def ablations(inputs: Inputs, task: str) -> Table:
    """Tables 11 to 14: full, no position, no embedding, neither at the meta-tokens, tested at the train length."""
    paper = paper_table(ABLATION_TABLES[task])
    rows = sorted(paper.rows, key=lambda row: str(row.fields["position_embedding"]), reverse=True)
    settings = [{"model": "meta", "task": task, "length": row.fields["train_length"], **row.fields} for row in rows]
    return crosstab(
        inputs,
        f"{name(task)} (Table {paper.table}): tested at the train length, %; the paper's not always, see below",
        "model, positions, train length",
        [(label(fields), fields) for fields in settings],
        {text: {"intervention": what} for what, text in INTERVENTIONS.items()},
        below=[list(map(_papers, row.values)) for row in rows],
        shared_by=1,
        is_measured_by_row=True,
        note=_notes(paper),
    )


def ablations_by_length(inputs: Inputs, task: str, trained: int) -> Table:
    """Every model that was measured, full and with each thing taken away from its meta-tokens, by length."""
    where = {"task": task, "train_length": trained}
    zeroed = where | {"metric": "exact_match", "condition": "paper", "intervention": "no_pos"}
    rows = [
        (f"{model}, {position}, {text}", {"model": model, "position_embedding": position, "intervention": what} | where)
        for position, model in product(("rope", "learned"), MODELS)
        if inputs.values("length", **zeroed, main=True, model=model, position_embedding=position)
        for what, text in INTERVENTIONS.items()
    ]
    return crosstab(
        inputs,
        f"{name(task)} of models trained to {tokens(trained)}, by length: answers exactly right, %",
        "model, positions, at the meta-tokens",
        rows,
        _by_length(inputs.values("length", **zeroed, variant="")),
        shared_by=len(INTERVENTIONS),
    )


def zeroed_positions(inputs: Inputs) -> Table:
    """Tables 2 and 17: list recall by length, full and without positions at the meta-tokens."""
    tables = [paper_table(number) for number in (17, 2)]
    rows, theirs = [], []
    for position, trained, length in product(("rope", "learned"), TRAINED, LENGTHS[:5]):
        if reaches(position, length):
            where = {"position_embedding": position, "train_length": trained, "length": length}
            rows.append((f"{position}, {tokens(trained)} \u2192 {tokens(length)}", _RECALL | where))
            values = ([paper.value(**column, **where) for paper in tables] for column in tables[1].columns)
            theirs.append([next((one for one in both if one is not None), None) for both in values])

    def gap(number: int, cells: Cells) -> str:
        paper = theirs[number][2]
        return f"{change(cells[1], cells[0])}\npaper {printed(None) if paper is None else signed(paper / 100)}"

    return crosstab(
        inputs,
        "List recall, no position at the meta-tokens (Tables 2, 17), %",
        "positions, train \u2192 test length",
        rows,
        {text: {"intervention": what} for what, text in list(INTERVENTIONS.items())[:2]},
        below=[list(map(_papers, values[:2])) for values in theirs],
        shared_by=1,
        extra={"difference, points": gap},
        is_measured_by_row=True,
        note=" ".join(
            (
                *(note for paper in tables for note in paper.notes),
                "The paper's small, medium, hard and extra-hard are read as 128, 256, 512 and 1,024.",
            )
        ),
    )


def noise(inputs: Inputs, task: str, length: int, kind: str = "") -> Table:
    """Tables 15 and 16: Gaussian noise on the positions; `kind` is one of the further forms, such as `:meta`."""
    paper = paper_table(NOISE_TABLES[task])
    where = {"task": task, "length": length}
    columns = {"no noise": {"intervention": ""}}
    columns |= {f"noise {scale}": {"intervention": f"noise:{scale}{kind}"} for scale in SCALES}
    noises = [column["intervention"] for column in columns.values()][1:]
    ours = [("gpt2", "rope")] if not kind else product(("gpt2", "meta"), ("rope", "learned"))
    added = [
        {"model": model, "position_embedding": position, "train_length": trained}
        for (model, position), trained in product(ours, TRAINED)
    ]
    if kind:
        added = [one for one in added if inputs.values("task", **where, **one, main=True, intervention=noises)]
    rows = [{**row.fields} for row in paper.rows if not kind] + added
    blank = [[""] * len(columns)] * len(added)
    return crosstab(
        inputs,
        f"{name(task)}, noise on positions {NOISE_KINDS[kind] or f'(Table {paper.table})'}: "
        f"tested at {tokens(length)} tokens, %",
        "model, positions, train length",
        [(label(fields), fields | where) for fields in rows],
        columns,
        below=[list(map(_papers, row.values)) for row in paper.rows if not kind] + blank,
        shared_by=1,
        note=f"{_noise_of(kind)} {'' if kind else _notes(paper)}".strip(),
    )


def controls(inputs: Inputs) -> Table:
    """All four models with rope at 1, 2 and 4 times the train length, a row for each task and train length."""
    rows = [
        (
            f"{name(task)}, {tokens(trained)} \u2192 {tokens(trained * ratio)}",
            {"position_embedding": "rope", "task": task, "train_length": trained, "length": trained * ratio},
        )
        for task, trained, ratio in product(TASKS, TRAINED, (1, 2, 4))
    ]
    places = [MODELS.index(model) for model in ("meta", "twin")]
    return crosstab(
        inputs,
        "What each addition brings (rope), %",
        "task, train \u2192 test length",
        rows,
        {model: {"model": model} for model in MODELS},
        extra={f"meta {MINUS} twin": lambda _, cells: change(*(cells[place] for place in places))},
        is_measured_by_row=True,
        is_column_of_one_seed=True,
    )


def markers(inputs: Inputs) -> Table:
    """Each model and task with the markers that it was trained with, without them, and among decoys."""
    length = TRAINED[-1]
    ends = {"position_embedding": "rope", "train_length": length, "length": length}
    return crosstab(
        inputs,
        f"By condition, rope, trained and tested at {tokens(length)} tokens: answers exactly right, %",
        "task, model",
        [(f"{name(task)}, {model}", ends | {"model": model, "task": task}) for task, model in product(TASKS, MODELS)],
        {condition: {"condition": condition} for condition in ("paper", "none", "decoy")},
        shared_by=1,
        is_measured_by_row=True,
    )


def placement(inputs: Inputs) -> Table:
    """Where meta-tokens are put in pretraining and how many: list recall by length."""
    rows = [
        (f"{text}, trained to {tokens(trained)}", _RECALL | {"train_length": trained, "variant": variant})
        for trained, (variant, text) in product(TRAINED, PLACEMENTS.items())
    ]
    return crosstab(
        inputs,
        "List recall of meta with rope, by its pretraining, %",
        "meta-tokens",
        rows,
        _by_length(LENGTHS[:5]),
        shared_by=len(PLACEMENTS),
    )


def random_positions(inputs: Inputs, task: str) -> Table:
    """Trained to 128 tokens with positions drawn at random, and with plain ones: as long, and as in the grid."""
    variants = {variant: title.lower() for variant, title in RANDOM.items()}
    if task == "list_recall" or inputs.values("task", metric="exact_match", task=task, variant="one-length"):
        variants["one-length"] = "plain, at 128 alone"
    variants[""] = "plain, first phase"
    rows = [
        (
            f"{model}, {text}{_steps(inputs, model, task, variant)}",
            {"model": model, "position_embedding": "rope", "task": task, "train_length": 128, "variant": variant},
        )
        for model, (variant, text) in product(("gpt2", "twin", "meta"), variants.items())
    ]
    return crosstab(
        inputs,
        f"{name(task)}, trained to 128 tokens (rope): answers exactly right, %",
        "model, positions in training",
        rows,
        {f"{tokens(one)} ({one // 128}\u00d7)": {"length": one} for one in LENGTHS},
        shared_by=len(variants),
    )


def seed_spread(inputs: Inputs) -> str:
    """How far the seeds of the paper's placement differ, beside which the others, of one seed, are to be seen."""
    cell = inputs.cell(**_RECALL, train_length=TRAINED[-1], length=2 * TRAINED[-1])
    if not cell or len(cell.seeds) < 2:
        return ""
    own = " / ".join(percent(one.value) for one in cell.seeds.values())
    return (
        f"The rows are of one seed. How much that says: trained to {tokens(TRAINED[-1])} and tested at "
        f"{tokens(2 * TRAINED[-1])} tokens, the seeds of meta with the paper's placement have {own} %."
    )


def whose_loss(inputs: Inputs) -> str:
    """Whether what list recall loses without positions is meta's alone: with rope, at the train length."""
    gaps: dict[str, dict[int, Difference]] = {}
    labels: dict[str, str] = {}
    for model, trained in product(MODELS, TRAINED):
        where = _RECALL | {"model": model, "train_length": trained, "length": trained}
        cells = shared(inputs.cells([where | {"intervention": what} for what in ("", "no_pos")]))
        full, zeroed = (cell and cell.pooled() for cell in cells)
        if full and zeroed and (gap := newcombe(zeroed, full)):
            gaps.setdefault(model, {})[trained] = gap
            labels[model] = model + one_seed(cells)
    ends = sorted(set(TRAINED).intersection(*gaps.values()))
    if "meta" not in gaps or len(gaps) == 1 or not ends:
        return "Whether other models lose as much without positions has not been measured yet."
    figures = {labels[model]: " / ".join(signed(own[end].value) for end in ends) for model, own in gaps.items()}
    changes = "; ".join(f"{model} {each}" for model, each in figures.items())
    losing = [model for model, own in gaps.items() if all(own[end].high < -SMALL for end in ends)]
    others = ", ".join(model for model in losing if model != "meta")
    if "meta" not in losing:
        said = f"meta does not lose more than 5 points at each{f', while others do: {others}' if others else ''}"
    elif others:
        said = f"meta loses more than 5 points at each, and others do too ({others}): the loss is not meta's alone"
    else:
        said = "only meta loses more than 5 points at each: the loss is meta's alone"
    return (
        f"List recall with rope, trained and tested at {' / '.join(map(tokens, ends))} tokens, no position less "
        f"full, points: {changes}. So {said}."
    )


def unlearned_yarn(inputs: Inputs) -> str:
    """Which of the extended models have not learned list recall at their own train length."""
    models = {
        f"window {tokens(window)}, trained to {tokens(trained)}": _RECALL
        | {"variant": variant, "train_length": trained, "length": trained}
        for variant, window, trained in _yarn_models(inputs)
    }
    return _unlearned(inputs, models)


def unlearned(inputs: Inputs) -> str:
    """Which models have not learned list recall at their own train length."""
    models = [
        {"model": model, "position_embedding": position, "train_length": trained}
        for position, model, trained in product(POSITIONS, FAMILY, TRAINED)
    ]
    own = {label(one): {**one, "task": "list_recall", "length": one["train_length"]} for one in models}
    return _unlearned(inputs, own)


def longer(inputs: Inputs) -> str:
    """Which models of list recall were trained longer than the others; empty where none was."""
    where = {"metric": "exact_match", "task": "list_recall", "variant": LONGER}
    names = {"learned": "learned positions", "none": "no positions"}
    positions = [
        text for position, text in names.items() if inputs.values("task", **where, position_embedding=position)
    ]
    if not positions:
        return ""
    said = ""
    for model, position in product(MODELS, names):
        stage = f"finetune-{model}-{position}"
        plain, own = (_recipe(inputs, f"{stage}{variant}-list_recall") for variant in ("", f"-{LONGER}"))
        if plain and own:
            before, now = (count(settings["task"]["train_steps"][0]) for settings in (plain, own))
            said = f", for {now} steps at {tokens(TRAINED[0])} tokens in place of {before}"
    return (
        f"{name('list_recall')} with {' or '.join(positions)} is of models trained longer{said}; those trained as long "
        "as rope's are in the tables of every model."
    )


def untrained(inputs: Inputs) -> str:
    """Which of a learned table's rows nobody trained; how long the blocks were, as far as run.json says."""
    blocks = {
        model: tokens(settings["data"]["block_size"])
        for model in FAMILY
        if (settings := _recipe(inputs, f"pretrain-{model}-learned"))
    }
    said = f" ({', '.join(f'{model}: {size} tokens' for model, size in blocks.items())})" if blocks else ""
    return (
        f"Learned positions beyond the blocks of pretraining{said} are untrained: fine-tuning goes to "
        f"{tokens(TRAINED[-1])} tokens."
    )


def text_read(inputs: Inputs) -> str:
    """How much text each row of `placement` read in pretraining, as far as run.json has their settings."""
    read, said = set(), []
    for variant, text in PLACEMENTS.items():
        if settings := _recipe(inputs, f"pretrain-meta{'-' if variant else ''}{variant}"):
            data, training = settings["data"], settings["training"]
            size = data["block_size"]
            own = size - meta_token_count(size, data["fraction"], data["placement"])
            blocks = training["max_steps"] * training["per_device_train_batch_size"]
            total = own * blocks * training["gradient_accumulation_steps"]
            read.add(total)
            said.append(f"{text}: {compact(total)} ({tokens(own)} of a block's {tokens(size)})")
    if len(said) < 2:
        return ""
    same = "All read the same text" if len(read) == 1 else "The rows differ in the text read"
    return f"{same}, tokens in pretraining: {'; '.join(said)}."


def _by_length(ends: Iterable[int]) -> dict[str, Fields]:
    return {tokens(length): {"length": length} for length in ends}


def _papers(value: float | None) -> str:
    return f"paper {printed(value)}"


def _notes(paper: PaperTable) -> str:
    return "The paper's numbers: " + " ".join(paper.notes) if paper.notes else ""


def _yarn_models(inputs: Inputs) -> list[tuple[str, int, int]]:
    """The variant, the window and the train length of each of Table 1's models."""
    scale = inputs.scale
    return [(variant, ends[-1] // scale, trained // scale) for variant, ends in YARN.items() for trained in ends]


def _unlearned(inputs: Inputs, models: Mapping[str, Fields]) -> str:
    below = [
        f"{model} ({percent(pooled.value)})"
        for model, cell in zip(models, inputs.cells(list(models.values())), strict=True)
        if cell and (pooled := cell.pooled()) and pooled.value is not None and pooled.value < STRONG
    ]
    if not below:
        return ""
    return (
        f"Below {100 * STRONG:g}\u00a0% of list recall at their own train length, so that what they lose beyond it "
        f"tells little: {'; '.join(below)}."
    )


def _token_note(inputs: Inputs, settings: list[Fields]) -> str:
    """Why token accuracy misleads, and how much of it the end of text is: each answer has one."""
    by_metric = (
        inputs.cells([{**fields, "metric": metric} for fields in settings])
        for metric in ("exact_match", "token_accuracy")
    )
    both = [pair for pair in zip(*by_metric, strict=True) if all(pair)]
    answers, of_tokens = (sum(_n(pair[side]) for pair in both) for side in (0, 1))
    share = f", {percent(answers / of_tokens)} % of the answer tokens here" if of_tokens else ""
    return (
        f"Token accuracy counts the end of text that closes every answer{share}: a model that knows nothing else "
        "scores as much without one answer right. Exact match asks for the whole answer, its end included."
    )


def _n(cell: Cell | None) -> int:
    return sum(one.n for one in cell.seeds.values()) if cell else 0


def _noise_of(kind: str) -> str:
    """What noise S is: where, and in which unit."""
    where = "of the meta-tokens alone" if "meta" in kind else "of every token"
    added = (
        "Learned positions: S in the table's own units; rope: S in radians, a draw for each frequency's angle."
        if "raw" in kind
        else "Learned positions: S in standard deviations of the table's entries, added to every entry of p_t; rope: S "
        "in positions, added to t before the angles are taken."
    )
    return (
        f"Noise S: the position {where} gets one draw from a Gaussian of standard deviation S, for all layers, heads "
        f"and both attentions; each of 5 draws on another fifth of the prompts. {added}"
    )


def _steps(inputs: Inputs, model: str, task: str, variant: str) -> str:
    """`, 8,000 steps`: those at 128 tokens, where the run's settings are at hand."""
    settings = _recipe(inputs, f"finetune-{model}{'-' if variant else ''}{variant}-{task}")
    return f", {count(settings['task']['train_steps'][0])} steps" if settings else ""


def _recipe(inputs: Inputs, stage: str) -> Fields:
    """The settings of a stage; empty where no run.json has them."""
    return next((run.recipes[stage] for run in inputs.runs if stage in run.recipes), {})
