"""What the paper claims of the four tasks, and what its controls would have to show: comparisons of accuracies."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from metatokens.report.cells import common, one_seed
from metatokens.report.grid import Cell, Grid
from metatokens.report.paper import paper_table, printed
from metatokens.report.verdicts import SMALL, Claim, Comparison, above, between, less
from metatokens.report.wording import name, percent, points, tokens

TASKS = ("list_recall", "segment_counting", "parity", "copying")
LENGTH_TABLES = dict(zip(TASKS, (7, 8, 9, 10), strict=True))
ABLATION_TABLES = dict(zip(TASKS, (11, 12, 13, 14), strict=True))
TRAINED = (128, 256, 512)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LEARNED_END = 1024  # the longest bin that a learned table reaches
POSITIONS = ("rope", "learned")  # the paper's
STRONG = 0.8  # exact match, of what is said to be strong; below it at its own train length, a model has not learned
YARN = {"yarn4": (2048, 4096), "yarn8": (4096, 8192)}  # the paper's train lengths: half of the window, and all of it
YARN_LENGTHS = (1024, 2048, 4096, 8192, 16384)  # the block of its pretraining, and where its Table 1 tests
Setting = tuple[str, str, int, int]  # task, positions, train length, length


def claims(grid: Grid) -> list[Claim]:
    """The paper's claims on accuracies, in the order of its sections."""
    return [
        *_against_gpt2(grid),
        _longer_training_prompts(grid),
        *_without_positions(grid),
        *_without_embedding(grid),
        _noise(grid),
        *_yarn(grid),
    ]


def place(task: str, position: str, train_length: int, length: int) -> str:
    """Where a comparison stands: `List recall, rope, 512 → 1,024`."""
    return f"{name(task)}, {position}, {tokens(train_length)} \u2192 {tokens(length)}"


def reaches(position: str, length: int) -> bool:
    """Whether models with these positions can be run at a length."""
    return position != "learned" or length <= LEARNED_END


def with_seed(found: Comparison, *cells: Cell | None) -> Comparison:
    """The comparison, whose figures say so where they are of one seed alone."""
    return replace(found, figures=found.figures + one_seed(common(*cells))) if found.figures else found


def pairs(
    grid: Grid,
    first: dict[str, Any],
    second: dict[str, Any],
    settings: Iterable[Setting],
    *,
    is_match: bool = False,
) -> tuple[Comparison, ...]:
    """The comparison of two models in each setting.

    Args:
        grid: the results.
        first, second: the fields of the models' results, beside those of the setting.
        settings: where they are compared.
        is_match: whether the claim is that nothing is lost.
    """
    found = []
    for task, position, trained, length in settings:
        here: dict[str, Any] = {"position_embedding": position, "task": task}
        here |= {"train_length": trained, "length": length}
        a, b = grid.accuracy(**here | first), grid.accuracy(**here | second)
        label = place(task, position, trained, length)
        between_them = between(label, a, b, floor=grid.floor(task, length), is_match=is_match)
        found.append(with_seed(between_them, a, b))
    return tuple(found)


def at(
    *ratios: int,
    tasks: tuple[str, ...] = TASKS,
    positions: tuple[str, ...] = POSITIONS,
    longest: int = LENGTHS[-1],
) -> Iterator[Setting]:
    """Every setting at these multiples of the train length, up to the longest length; the longest trained first."""
    for task, position, trained, ratio in product(tasks, positions, TRAINED[::-1], ratios):
        if reaches(position, trained * ratio) and trained * ratio <= longest:
            yield task, position, trained, trained * ratio


def matches(text: str, source: str, section: str, comparisons: tuple[Comparison, ...]) -> Claim:
    """A claim that nothing is lost: no more than 5 points, the smallest loss that is spoken of."""
    return Claim(text, source, section, comparisons, margin=-SMALL, negligible=-SMALL)


def _up_to_512() -> Iterator[Setting]:
    return product(TASKS, POSITIONS, TRAINED, TRAINED)


def _against_gpt2(grid: Grid) -> list[Claim]:
    inside = pairs(grid, {"model": "meta"}, {"model": "gpt2"}, _up_to_512())
    neo = pairs(grid, {"model": "meta"}, {"model": "gpt-neo"}, product(TASKS, ("learned",), TRAINED, TRAINED))
    beyond = pairs(grid, {"model": "meta"}, {"model": "gpt2"}, at(2, 4))
    source = "Figure 1, Tables 7\u201310"
    paper = paper_table(7)
    theirs = " v ".join(
        printed(paper.value(model=model, position_embedding=position, train_length=512, length=1024))
        for model, position in (("meta", "rope"), ("gpt2", "learned"))
    )
    return [
        Claim("meta beats gpt2 up to 512 tokens", source, "lengths", inside, decisive=row(grid)),
        Claim("meta beats gpt-neo there", source, "lengths", neo),
        Claim(
            "It beats both on all tasks at all train lengths",
            "section 4.3",
            "lengths",
            (*inside, *neo),
            is_universal=True,
        ),
        Claim(
            "meta beats gpt2 at 2 and 4 times the train length",
            source,
            "lengths",
            beyond,
            decisive=f"{quote(beyond)} (paper {theirs}, its gpt2 with learned positions)" if quote(beyond) else "",
        ),
    ]


def _longer_training_prompts(grid: Grid) -> Claim:
    """What training on to 512 tokens adds to training to 128, in meta and in gpt2."""

    def gain(model: str, where: dict[str, Any]) -> tuple[Cell | None, Cell | None]:
        short, long = (grid.accuracy(model=model, train_length=trained, **where) for trained in (128, 512))
        return long, less(long, short)

    found = []
    for task, position, length in product(TASKS, POSITIONS, TRAINED[1:]):
        where: dict[str, Any] = {"task": task, "position_embedding": position, "length": length}
        (long, ours), (their_long, theirs) = gain("meta", where), gain("gpt2", where)
        label = f"{name(task)}, {position}, 128 or 512 \u2192 {tokens(length)}"
        has_room = between(label, long, their_long, floor=grid.floor(task, length)).is_informative
        found.append(replace(with_seed(between(label, ours, theirs), ours, theirs), is_informative=has_room))
    text = "Training to 512 rather than 128 tokens adds more to meta than to gpt2"
    return Claim(text, "section 4.3", "lengths", tuple(found))


def row(grid: Grid) -> str:
    """List recall by length of meta with rope, trained to 512 tokens, beside the paper's."""
    lengths = LENGTHS[:5]
    where: dict[str, Any] = {
        "model": "meta", "position_embedding": "rope", "task": "list_recall", "train_length": 512
    }  # fmt: skip
    cells = [grid.accuracy(**where, length=length) for length in lengths]
    figures = [cell.pooled() if cell else None for cell in cells]
    if not any(figures):
        return ""
    ours = " / ".join(percent(figure.value) if figure else "\u2026" for figure in figures)
    theirs = " / ".join(printed(paper_table(7).value(**where, length=length)) for length in lengths)
    return f"list recall, rope, 512 \u2192 128 \u2026 2,048: {ours} (paper {theirs})"


def quote(comparisons: tuple[Comparison, ...], length: int = 1024) -> str:
    """The comparison on list recall with rope, trained to 512 tokens."""
    label = place("list_recall", "rope", 512, length)
    found = next((one.figures for one in comparisons if one.label == label), "")
    return f"{label.lower()}: {found}" if found else ""


def _without_positions(grid: Grid) -> list[Claim]:
    zeroed, full = {"model": "meta", "intervention": "no_pos"}, {"model": "meta"}
    source = "Tables 2, 11\u201314, 17"
    kept = ("list_recall", "parity", "copying")
    recall = ("list_recall",)
    gains = pairs(grid, zeroed, full, at(2, 4, tasks=recall))
    return [
        matches(
            "No Pos loses nothing (5 points), counting aside",
            source,
            "ablations",
            pairs(grid, zeroed, full, at(1, 2, 4, tasks=kept), is_match=True),
        ),
        Claim(
            "No Pos improves list recall at 2 and 4 times the length",
            source,
            "ablations",
            gains,
            decisive="; ".join(
                f"{tokens(128)} \u2192 {tokens(128 * ratio)}: {points(one.gap)}"
                for ratio in (2, 4)
                for one in gains
                if one.gap and one.label == place("list_recall", "rope", 128, 128 * ratio)
            ),
        ),
        Claim(
            "No Pos costs accuracy in segment counting",
            "Table 12",
            "ablations",
            pairs(grid, full, zeroed, at(1, 2, 4, tasks=("segment_counting",))),
        ),
    ]


def _without_embedding(grid: Grid) -> list[Claim]:
    zeroed, full, no_pos = (
        {"model": "meta", "intervention": intervention} for intervention in ("no_embed", None, "no_pos")
    )
    source = "Tables 11\u201314"
    hurt = pairs(grid, full, zeroed, at(1, tasks=("list_recall", "segment_counting", "copying")))
    alike = pairs(grid, zeroed, no_pos, at(1, tasks=("parity",)), is_match=True)
    return [
        Claim("No Embed hurts, parity aside", source, "ablations", hurt),
        matches("In parity No Embed loses no more than No Pos (5 points)", source, "ablations", alike),
    ]


def _noise(grid: Grid) -> Claim:
    tasks, tested = ("list_recall", "copying"), (128, 512)
    little = []
    for task, trained, length, position, scale in product(tasks, TRAINED, tested, POSITIONS, ("0.1", "0.5")):
        where: dict[str, Any] = {"position_embedding": position, "task": task, "length": length}
        where |= {"model": "meta", "train_length": trained}
        noisy, full = grid.accuracy(**where, intervention=f"noise:{scale}"), grid.accuracy(**where)
        label = f"{place(task, position, trained, length)}, noise {scale}"
        loss = between(label, noisy, full, floor=grid.floor(task, length), is_match=True)
        little.append(with_seed(loss, noisy, full))
    paper = [paper_table(number) for number in (15, 16)]
    lost = [
        float(row.values[0] or 0.0) - float(row.values[2] or 0.0)
        for table in paper
        for row in table.rows
        if row.fields["model"] == "meta"
    ]
    claim = matches("Noise of 0.1 and 0.5 on positions loses nothing (5 points)", "section 4.4", "noise", tuple(little))
    own = f"the paper's own loses up to {max(lost):.0f} points to noise 0.5 (Tables 15, 16)"
    return replace(claim, decisive=own) if claim.run else claim


def _yarn(grid: Grid) -> list[Claim]:
    def cell(task: str, note: str, trained: int, length: int) -> Cell | None:
        where = {"model": "meta", "position_embedding": "rope", "task": task}
        return grid.accuracy(note, **where, train_length=trained, length=length)

    def label(task: str, note: str, trained: int, length: int) -> str:
        return f"{name(task)}, {note}, {tokens(trained)} \u2192 {tokens(length)}"

    def over(task: str, note: str, trained: int, length: int, bound: float) -> Comparison:
        here = (task, note, trained, length)
        return with_seed(above(label(*here), cell(*here), bound), cell(*here))

    windows = {note: trained[-1] // grid.scale for note, trained in YARN.items()}
    lengths = [length // grid.scale for length in YARN_LENGTHS]
    tasks = ("list_recall", "segment_counting")
    strong = [
        over(task, note, window, length, STRONG)
        for task, (note, window) in product(tasks, windows.items())
        for length in lengths
        if length <= window
    ]
    beyond = [
        over(task, note, window, 2 * window, grid.floor(task, 2 * window))
        for task, (note, window) in product(tasks, windows.items())
    ]
    half, window = windows["yarn8"] // 2, windows["yarn8"]
    wide = [over("list_recall", "yarn8", half, length, STRONG) for length in lengths if length <= window]
    return [
        Claim("YaRN: strong (80 % exact match) within the window", "Table 1", "yarn", tuple(strong), negligible=0.0),
        Claim("YaRN: exact match above guessing at twice the window", "Table 1", "yarn", tuple(beyond), negligible=0.0),
        Claim(
            "YaRN 8\u00d7, tuned to half the window, has 80 % exact match in all of it",
            "Table 1",
            "yarn",
            tuple(wide),
            negligible=0.0,
            is_universal=True,
        ),
    ]
