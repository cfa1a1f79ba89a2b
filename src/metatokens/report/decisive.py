"""The figure that a claim shows first, as a line of text; empty where it was not run."""

from collections.abc import Callable, Sequence

from metatokens.report.compare import Comparison, place
from metatokens.report.derive import RATES, TRAINED
from metatokens.report.frame import MODELS, Cell, Fields, Inputs, one_seed, shared
from metatokens.report.intervals import student
from metatokens.report.paper import paper_table, printed
from metatokens.report.text import MINUS, NOT_YET, learned_at, name, percent, points, signed_nats, tokens

INSIDE = ("position_embedding", "task", "train_length", "length")  # what tells apart the settings of an analysis
CLOSE = (1, 2, 3, 4)  # tokens before a meta-token
FAR = 16
TEXTS = {"held_out": "held-out text", "book": "a book"}
THEIR_DEVICE = "A100"  # of Table 3

Decisive = Callable[[Inputs, tuple[Comparison, ...]], str]

_RECALL: Fields = {"position_embedding": "rope", "task": "list_recall"}
_LONGEST: Fields = {**_RECALL, "model": "meta", "train_length": TRAINED[-1]}


def inside(label: str, where: Fields) -> str:
    """Which model, trained and tested how: `attention, rope, list recall, 512 → 256`."""
    if not where:
        return label
    task = (where["task"] or "no task").replace("_", " ")
    setting = f"{where['position_embedding']}, {task}, {where['train_length']} \u2192 {where['length']}"
    return f"{label}, {setting}" if label else setting


def beside_the_paper(inputs: Inputs, _: tuple[Comparison, ...]) -> str:
    """List recall by length of meta with rope, trained to 512 tokens, beside the paper's."""
    lengths = (128, 256, 512, 1024, 2048)
    figures = [_value(cell) for cell in inputs.cells([{**_LONGEST, "length": length} for length in lengths])]
    if not any(figures):
        return ""
    ours = " / ".join(figure or NOT_YET for figure in figures)
    theirs = " / ".join(printed(paper_table(7).value(**_LONGEST, length=length)) for length in lengths)
    return f"list recall, rope, 512 \u2192 128 \u2026 2,048: {ours} (paper {theirs})"


def quote(length: int) -> Decisive:
    """The comparison on list recall with rope, trained to 512 tokens."""
    label = place({**_LONGEST, "length": length})

    def quoted(_: Inputs, comparisons: tuple[Comparison, ...]) -> str:
        found = next((one.figures for one in comparisons if one.label == label), "")
        return f"{label.lower()}: {found}" if found else ""

    return quoted


def beyond(inputs: Inputs, comparisons: tuple[Comparison, ...]) -> str:
    """That at twice the train length, and the paper's."""
    theirs = " v ".join(
        printed(paper_table(7).value(model=model, position_embedding=position, train_length=512, length=1024))
        for model, position in (("meta", "rope"), ("gpt2", "learned"))
    )
    ours = quote(1024)(inputs, comparisons)
    return f"{ours} (paper {theirs}, its gpt2 with learned positions)" if ours else ""


def without_positions(_: Inputs, comparisons: tuple[Comparison, ...]) -> str:
    """List recall with rope, trained to 128 tokens, at twice and four times that."""
    return "; ".join(
        f"{tokens(128)} \u2192 {tokens(128 * ratio)}: {points(one.gap)}"
        for ratio in (2, 4)
        for one in comparisons
        if one.gap and one.label == place({**_RECALL, "train_length": 128, "length": 128 * ratio})
    )


def noise(_: Inputs, comparisons: tuple[Comparison, ...]) -> str:
    """What the paper's own models lose."""
    lost = [
        float(row.values[0] or 0.0) - float(row.values[2] or 0.0)
        for number in (15, 16)
        for row in paper_table(number).rows
        if row.fields["model"] == "meta"
    ]
    own = f"the paper's own loses up to {max(lost):.0f} points to noise 0.5 (Tables 15, 16)"
    return own if any(one.gap for one in comparisons) else ""


def tokens_to_learn(other: str) -> Decisive:
    """Each seed's text tokens until 90 % of list recall."""

    def told(inputs: Inputs, _: tuple[Comparison, ...]) -> str:
        about = {"metric": "tokens_to_learn", "position_embedding": "rope"}
        ours, theirs = inputs.cells([about | {"model": model} for model in ("meta", other)])
        if not ours or not theirs:
            return ""
        each = (" / ".join(learned_at(one.value) for one in cell.seeds.values()) for cell in (ours, theirs))
        return f"text tokens, by seed: {' v '.join(each)}"

    return told


def sparse(timed: Fields) -> Decisive:
    """How much longer the dense code takes than the gathered."""
    return lambda inputs, _: f"dense over gathered: {told}" if (told := _ratios(inputs, timed)) else ""


def slowdown(timed: Fields) -> Decisive:
    """How much longer than gpt2 it takes, and where."""

    def told(inputs: Inputs, _: tuple[Comparison, ...]) -> str:
        devices = inputs.select(metric="slowdown", **timed)["device"].tolist()
        ratios = _ratios(inputs, timed)
        return f"{ratios}, on {devices[0]}; the bound is an {THEIR_DEVICE}'s" if devices else ""

    return told


def _ratios(inputs: Inputs, timed: Fields) -> str:
    found = inputs.select(metric="slowdown", **timed)
    return ", ".join(f"{one.value:.2f} (batch {one.batch:g})" for one in found.itertuples())


def entropies(inputs: Inputs, _: tuple[Comparison, ...]) -> str:
    """By how much entropies fall in each model with rope: pause and twin have no meta-attention."""
    said = []
    for what, metric, where in (
        ("attention", "attention_entropy_change", {"module": "attention", "layer": None}),
        ("output at the end", "output_entropy_change", {"marker": "final"}),
    ):
        about = {"metric": metric, "position_embedding": "rope", **where}
        cells = inputs.cells([about | {"model": model} for model in MODELS])
        changes = [
            f"{model} {signed_nats(pooled.value)}"
            for model, cell in zip(MODELS, cells, strict=True)
            if cell and (pooled := cell.pooled()) and pooled.value is not None
        ]
        said += [f"{what}: {', '.join(changes)}"] if changes else []
    return "; ".join(said)


def premise(inputs: Inputs, _: tuple[Comparison, ...]) -> str:
    """In which share of rows the premise of Theorem 4.1 holds, by setting and seed."""
    where = {"metric": "premise_holds", "model": "meta", "module": "attention", "layer": None}
    found = inputs.select(**where)[list(INSIDE)].drop_duplicates().to_dict("records")
    cells = inputs.cells([where | setting for setting in found])
    rates = [" / ".join(percent(one.value) for one in cell.seeds.values()) for cell in cells if cell]
    held = " and ".join(f"{rate}\u00a0%" for rate in rates if rate)
    return f"{held} of rows" if held else ""


def text_gaps(inputs: Inputs) -> str:
    """By how much each model's distortion at the last meta-token is below that at the text before it, at one rate."""
    about = {"metric": "distortion_at_rate", "position_embedding": "rope", "split": "held_out", "intervention": ""}
    about |= {"rate": RATES[-1]}
    gaps = {}
    for model in ("meta", "gpt2", "twin"):
        settings = [about | {"model": model, "subject": subject} for subject in ("text", "meta")]
        text, meta = inputs.cells(settings)
        seeds = sorted(text.seeds.keys() & meta.seeds.keys()) if text and meta else []
        if text and meta and seeds:
            gaps[model] = student([(text.seeds[one].value or 0.0) - (meta.seeds[one].value or 0.0) for one in seeds])
    told = (
        f"{model} {signed_nats(gap.value) if (gap := gaps.get(model)) else NOT_YET}"
        for model in ("meta", "gpt2", "twin")
    )
    return f"at {RATES[-1]:g} nats: {', '.join(told)}" if any(gaps.values()) else ""


def by_condition(length: int) -> Decisive:
    """meta's list recall at its longest train length with markers, without them, and among decoys; then the quote."""

    def told(inputs: Inputs, comparisons: tuple[Comparison, ...]) -> str:
        texts = {"paper": "with markers", "none": "without", "decoy": "among decoys"}
        where = {**_LONGEST, "train_length": length, "length": length}
        cells = shared(inputs.cells([{**where, "condition": condition} for condition in texts]))
        figures = [f"{_value(cell)} {text}" for text, cell in zip(texts.values(), cells, strict=True) if _value(cell)]
        of_meta = f"meta: {', '.join(figures)}{one_seed(cells)}" if figures else ""
        return "; ".join(filter(None, [of_meta, quote(length)(inputs, comparisons)]))

    return told


def by_task(settings: Sequence[Fields]) -> Decisive:
    """One figure for each task."""

    def told(inputs: Inputs, _: tuple[Comparison, ...]) -> str:
        cells = inputs.cells(settings)
        figures = [
            f"{name(where['task']).lower()} {_value(cell)}"
            for where, cell in zip(settings, cells, strict=True)
            if _value(cell)
        ]
        return ", ".join(figures) + one_seed(cells)

    return told


def by_model(settings: Sequence[Fields]) -> Decisive:
    """One figure for each model, at the train length."""

    def told(inputs: Inputs, _: tuple[Comparison, ...]) -> str:
        pairs = zip(settings, inputs.cells(settings), strict=True)
        figures = [f"{where['model']} {_value(cell)}" for where, cell in pairs if _value(cell)]
        return f"at 128 itself: {', '.join(figures)}" if figures else ""

    return told


def _value(cell: Cell | None) -> str:
    pooled = cell.pooled() if cell else None
    return percent(pooled.value) if pooled else ""
