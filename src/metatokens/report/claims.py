"""Every claim, as data: what the paper says, and what its controls would have to show.

A claim names its source, the section that shows it, and what is compared with what. `docs/paper_map.md` has the rules.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from metatokens.report import decisive
from metatokens.report.compare import GUESSING, Measured, Versus, place
from metatokens.report.decisive import CLOSE, FAR, INSIDE, TEXTS, THEIR_DEVICE, inside
from metatokens.report.derive import RATES, TRAINED
from metatokens.report.frame import TASKS, Fields, positive
from metatokens.report.paper import first_token_ratio, paper_table
from metatokens.report.text import name, tokens
from metatokens.report.verdict import SMALL, Claim

POSITIONS = ("rope", "learned")  # the paper's
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LEARNED_END = 1024  # the longest bin that a learned table reaches
MARKED_END = 512  # the longest bin in which models trained with markers are tested without them, or among decoys
STRONG = 0.8  # exact match, of what is said to be strong; below it at its own train length, a model has not learned
YARN = {"yarn4": (2048, 4096), "yarn8": (4096, 8192)}  # the paper's train lengths: half of the window, and all of it
YARN_LENGTHS = (1024, 2048, 4096, 8192, 16384)  # the block of its pretraining, and where its Table 1 tests
# By variant: positions drawn from all of 0 to 2,303, and, each sequence, from a range of its own within that.
RANDOM = {"random-positions": "Random positions", "random-ranges": "Random ranges"}
PER_CENT = math.log(1.01)


def claims(scale: int) -> dict[str, list[Claim]]:
    """The claims of the paper and our own, as the page groups them.

    Args:
        scale: how many times as long as ours the paper's prompts are where the context is extended.
    """
    return {
        "The paper claims": [*_lengths(), *_ablations(), *_yarn(scale), *_cost(), *_inside()],
        "Controls, and beyond the paper": [*_controls(), *_random_positions(), *_cost_controls(), *_inside_controls()],
    }


def reaches(position: str, length: int) -> bool:
    """Whether models with these positions can be run at a length."""
    return position != "learned" or length <= LEARNED_END


def _at(
    *ratios: int, tasks: tuple[str, ...] = TASKS, positions: tuple[str, ...] = POSITIONS, longest: int = LENGTHS[-1]
) -> list[Fields]:
    """Every setting at these multiples of the train length, up to the longest length; the longest trained first."""
    return [
        {"task": task, "position_embedding": position, "train_length": trained, "length": trained * ratio}
        for task, position, trained, ratio in product(tasks, positions, TRAINED[::-1], ratios)
        if reaches(position, trained * ratio) and trained * ratio <= longest
    ]


def _up_to_512(positions: tuple[str, ...] = POSITIONS) -> list[Fields]:
    return [
        {"task": task, "position_embedding": position, "train_length": trained, "length": length}
        for task, position, trained, length in product(TASKS, positions, TRAINED, TRAINED)
    ]


META, GPT2 = {"model": "meta"}, {"model": "gpt2"}
_NO_POS, _NO_EMBED = ({"model": "meta", "intervention": what} for what in ("no_pos", "no_embed"))
_CONTROL, _BEYOND = "control", "beyond the paper"


def _match(text: str, source: str, section: str, *versus: Versus, **more: Any) -> Claim:
    """A claim that nothing is lost: no more than 5 points, the smallest loss that is spoken of."""
    matching = tuple(replace(one, is_match=True) for one in versus)
    return Claim(text, source, section, matching, margin=-SMALL, negligible=-SMALL, **more)


def _lengths() -> Iterator[Claim]:
    source = "Figure 1, Tables 7\u201310"
    inside_gpt2 = Versus(META, GPT2, _up_to_512(), place)
    inside_neo = Versus(META, {"model": "gpt-neo"}, _up_to_512(("learned",)), place)
    beyond = Versus(META, GPT2, _at(2, 4), place)
    yield Claim(
        "meta beats gpt2 up to 512 tokens", source, "lengths", (inside_gpt2,), decisive=decisive.beside_the_paper
    )
    yield Claim("meta beats gpt-neo there", source, "lengths", (inside_neo,))
    yield Claim(
        "It beats both on all tasks at all train lengths",
        "section 4.3",
        "lengths",
        (inside_gpt2, inside_neo),
        is_universal=True,
    )
    yield Claim(
        "meta beats gpt2 at 2 and 4 times the train length", source, "lengths", (beyond,), decisive=decisive.beyond
    )
    where = [
        {"task": task, "position_embedding": position, "length": length}
        for task, position, length in product(TASKS, POSITIONS, TRAINED[1:])
    ]
    gain = {"metric": "training_gain"}
    yield Claim(
        "Training to 512 rather than 128 tokens adds more to meta than to gpt2",
        "section 4.3",
        "lengths",
        (
            Versus(
                META | gain,
                GPT2 | gain,
                where,
                lambda at: f"{name(at['task'])}, {at['position_embedding']}, 128 or 512 \u2192 {tokens(at['length'])}",
                room={"metric": "exact_match", "train_length": TRAINED[-1]},
            ),
        ),
    )


def _ablations() -> Iterator[Claim]:
    source = "Tables 2, 11\u201314, 17"
    kept = _at(1, 2, 4, tasks=("list_recall", "parity", "copying"))
    yield _match(
        "No Pos loses nothing (5 points), counting aside", source, "ablations", Versus(_NO_POS, META, kept, place)
    )
    yield Claim(
        "No Pos improves list recall at 2 and 4 times the length",
        source,
        "ablations",
        (Versus(_NO_POS, META, _at(2, 4, tasks=("list_recall",)), place),),
        decisive=decisive.without_positions,
    )
    yield Claim(
        "No Pos costs accuracy in segment counting",
        "Table 12",
        "ablations",
        (Versus(META, _NO_POS, _at(1, 2, 4, tasks=("segment_counting",)), place),),
    )
    yield Claim(
        "No Embed hurts, parity aside",
        "Tables 11\u201314",
        "ablations",
        (Versus(META, _NO_EMBED, _at(1, tasks=("list_recall", "segment_counting", "copying")), place),),
    )
    yield _match(
        "In parity No Embed loses no more than No Pos (5 points)",
        "Tables 11\u201314",
        "ablations",
        Versus(_NO_EMBED, _NO_POS, _at(1, tasks=("parity",)), place),
    )
    noisy = [
        {"task": task, "position_embedding": position, "train_length": trained, "length": length, "intervention": noise}
        for task, trained, length, position, noise in product(
            ("list_recall", "copying"), TRAINED, (128, 512), POSITIONS, ("noise:0.1", "noise:0.5")
        )
    ]
    yield _match(
        "Noise of 0.1 and 0.5 on positions loses nothing (5 points)",
        "section 4.4",
        "noise",
        Versus(
            META,
            META | {"intervention": ""},
            noisy,
            lambda at: f"{place(at)}, {at['intervention'].replace(':', ' ')}",
        ),
        decisive=decisive.noise,
    )


def _yarn(scale: int) -> Iterator[Claim]:
    windows = {variant: ends[-1] // scale for variant, ends in YARN.items()}
    lengths = [length // scale for length in YARN_LENGTHS]

    def versus(bound: float | str, where: list[tuple[str, str, int, int]]) -> tuple[Versus]:
        settings = [
            {"task": task, "variant": variant, "train_length": trained, "length": length}
            for task, variant, trained, length in where
        ]
        model = META | {"position_embedding": "rope"}
        return (Versus(model, bound, settings, lambda at: place({"position_embedding": at["variant"]} | at)),)

    tuned = list(product(("list_recall", "segment_counting"), windows.items()))
    within = [(task, variant, end, one) for task, (variant, end) in tuned for one in lengths if one <= end]
    half, window = windows["yarn8"] // 2, windows["yarn8"]
    claim = partial(Claim, source="Table 1", section="yarn", negligible=0.0)
    yield claim("YaRN: strong (80 % exact match) within the window", versus=versus(STRONG, within))
    yield claim(
        "YaRN: exact match above guessing at twice the window",
        versus=versus(GUESSING, [(task, variant, end, 2 * end) for task, (variant, end) in tuned]),
    )
    yield claim(
        "YaRN 8\u00d7, tuned to half the window, has 80 % exact match in all of it",
        versus=versus(STRONG, [("list_recall", "yarn8", half, length) for length in lengths if length <= window]),
        is_universal=True,
    )


def _cost() -> Iterator[Claim]:
    yield _data_efficient("gpt2", "section 4.3")
    yield from _slowdowns("dense, inserting", "dense", "dense as the paper's", "Table 3")
    sparse = {"benchmark": "decode", "model": "dense, inserting", "against": "meta, inserting", "shape": "paper"}
    yield Claim(
        "A sparse implementation reduces the overhead",
        "section 4.5",
        "speed",
        (
            Versus(
                sparse | {"metric": "slowdown"},
                1.0,
                Measured(("batch",)),
                lambda at: f"batch {at['batch']}" if at else "dense over gathered",
            ),
        ),
        negligible=0.0,
        unit="times",
        decisive=decisive.sparse(sparse),
    )


def _data_efficient(other: str, source: str) -> Claim:
    learned = {"metric": "tokens_to_learn"}
    rope = [{"position_embedding": "rope"}]
    return Claim(
        f"Data-efficient: fewer tokens of fine-tuning than {other} to 90 % recall",
        source,
        "learning",
        (Versus(META | learned, {"model": other} | learned, rope, lambda at: "text tokens to 90 %"),),
        negligible=0.0,
        unit="plain",
        decisive=decisive.tokens_to_learn(other),
    )


def _slowdowns(decoding: str, reading: str, code: str, source: str) -> Iterator[Claim]:
    """Whether a contestant is slower than gpt2 by no more than the paper's model; one exception refutes it.

    How much slower depends on the machine: what another than the paper's measured is shown, and settles nothing.
    """
    slowdown = paper_table(3).value(metric="slowdown", model="meta") or 0.0
    for text, benchmark, contestant, bound in (
        ("decoding", "decode", decoding, slowdown),
        ("the first token", "prefill", reading, first_token_ratio()),
    ):
        timed = {"benchmark": benchmark, "model": contestant, "against": "gpt2", "shape": "paper"}
        yield Claim(
            f"Meta-tokens slow {text} by {bound:.2f} at most, {code}",
            source,
            "speed",
            (
                Versus(
                    bound,
                    timed | {"metric": "slowdown"},
                    Measured(("batch",)),
                    lambda at, text=text: f"{text}, batch {at['batch']}" if at else text,
                    device=THEIR_DEVICE,
                ),
            ),
            negligible=0.0,
            is_universal=True,
            unit="times",
            decisive=decisive.slowdown(timed),
        )


def _inside() -> Iterator[Claim]:
    # Of the premise, and of log-odds, meta's second attention says nothing: all of its keys are meta-tokens. The
    # largest of all weights is never below exp(-H), and of two keys one's log-odds are the other's, its sign turned.
    first, second = ({"module": module, "layer": None} for module in ("attention", "second_attention"))
    within, end = {"marker": "context"}, {"marker": "final"}

    def changes(metric: str, label: str, where: Fields, *, falls: bool = False) -> Versus:
        change = META | {"metric": metric, **where}
        return Versus(*((0.0, change) if falls else (change, 0.0)), Measured(INSIDE), partial(inside, label))

    sharper = partial(Claim, section="sharpness", negligible=0.0, unit="nats")
    yield sharper(
        "Meta-tokens' embeddings raise attention logits at them",
        "Figure 2, left",
        versus=(
            changes("attention_logit_change", "attention logit", first),
            changes("attention_log_odds_change", "attention log-odds", first),
            changes("attention_logit_change", "second attention logit", second),
        ),
    )
    yield sharper(
        "They raise output logits there",
        "Figure 2, left",
        versus=(
            changes("output_top_logit_change", "top output logit, within the prompt", within),
            changes("output_top_logit_change", "top output logit, at the end", end),
            changes("output_answer_logit_change", "the answer's logit, at the end", end),
        ),
    )
    yield sharper(
        "They lower the entropy of attention and output",
        "Figure 2, middle",
        versus=(
            changes("attention_entropy_change", "attention", first, falls=True),
            changes("attention_entropy_change", "second attention", second, falls=True),
            changes("output_entropy_change", "output, within the prompt", within, falls=True),
            changes("output_entropy_change", "output, at the end", end, falls=True),
        ),
        decisive=decisive.entropies,
    )
    cosine = META | {"metric": "similarity_centred", "marker": "context", "subject": "meta"}
    yield Claim(
        "A meta-token's likeness to what it follows falls with distance",
        "Figure 2, right",
        "caching",
        (
            Versus(
                cosine | {"distance": CLOSE[0]},
                cosine | {"distance": FAR},
                Measured((*INSIDE, "layer"), {"layer": positive}),
                lambda at: inside(f"after layer {at['layer'] - 1}" if at else "similarity", at),
            ),
        ),
        unit="plain",
    )
    weight = META | {"module": "attention", "keys": "earlier_meta"}
    yield Claim(
        "The final meta-token attends to earlier ones",
        "Figure 3, left",
        "caching",
        (
            Versus(
                weight | {"metric": "attention_weight"},
                weight | {"metric": "attention_weight_if_uniform", "layer": None},
                Measured((*INSIDE, "layer")),
                lambda at: inside(f"in layer {at['layer']}" if at else "attention", at),
            ),
        ),
        negligible=0.0,
    )
    yield from _rate_distortion()


def _rate_distortion() -> Iterator[Claim]:
    told = {"metric": "distortion_at_rate", "position_embedding": "rope", "split": "held_out"}
    ours = META | told | {"subject": "meta", "intervention": ""}

    def versus(label: str, **other: str) -> tuple[Fields, Fields, list[Fields], Any]:
        at_rates = [{"rate": rate} for rate in RATES]
        return ours | other, ours, at_rates, lambda at: f"{label}, {at['rate']:g} nats"

    claim = partial(Claim, section="rate-distortion", unit="nats")
    yield claim(
        "Less distortion at a rate than at the text before",
        "Figure 3, right",
        versus=(Versus(*versus("text before it", subject="text")),),
        decisive=lambda inputs, _: decisive.text_gaps(inputs),
    )
    yield claim(
        f"No more of it ({SMALL:g} nats) than gpt2 and twin have at the same place",
        "Theorem 5.1",
        versus=tuple(Versus(*versus(other, model=other)) for other in ("gpt2", "twin")),
        margin=-SMALL,
        negligible=-SMALL,
    )
    full, zeroed, at_rates, label = versus("no_pos", intervention="no_pos")[1::-1] + versus("no_pos")[2:]
    yield claim(
        "No Pos lowers the distortion (list recall)", "section 5.2", versus=(Versus(full, zeroed, at_rates, label),)
    )


def _controls() -> Iterator[Claim]:
    for (a, b), text in {
        ("meta", "twin"): "The mask, not the parameters: meta beats twin",
        ("twin", "gpt2"): "Parameters and tokens help: twin beats gpt2",
        ("meta", "pause"): "Meta-attention helps: meta beats pause",
        ("pause", "gpt2"): "Meta-tokens alone help: pause beats gpt2",
    }.items():
        versus = Versus({"model": a}, {"model": b}, _at(1, 2, 4, positions=("rope",)), place)
        yield Claim(text, _CONTROL, "controls", (versus,), decisive=decisive.quote(1024))
    for condition, text, first in (
        ("none", "Without markers meta still beats gpt2", decisive.by_condition(MARKED_END)),
        ("decoy", "Among decoys meta still beats gpt2", decisive.quote(MARKED_END)),
    ):
        where = {"condition": condition}
        settings = _at(1, 2, positions=("rope",), longest=MARKED_END)
        yield Claim(text, _CONTROL, "markers", (Versus(META | where, GPT2 | where, settings, place),), decisive=first)
    unmarked = {"variant": "unmarked", "train_condition": "none", "condition": "none"}
    recall = _at(1, 2, 4, tasks=("list_recall",), positions=("rope",))
    for other in ("gpt2", "twin"):
        versus = Versus(META | unmarked, {"model": other} | unmarked, recall, place)
        text = f"Trained without markers, meta beats {other}"
        yield Claim(text, _CONTROL, "markers", (versus,), decisive=decisive.quote(MARKED_END))
    none, some, more, periodic = (META | {"variant": one} for one in ("k=0", "k=0.05", "k=0.2", "periodic"))
    yield Claim(
        "Meta-tokens in pretraining help: k = 0.1 beats k = 0",
        _CONTROL,
        "placement",
        (Versus(META, none, recall, place),),
    )
    yield _match(
        "Placed periodically they do as well (5 points)", _CONTROL, "placement", Versus(periodic, META, recall, place)
    )
    yield _match(
        "k = 0.05 and 0.2 do as well as 0.1 (5 points)",
        _CONTROL,
        "placement",
        *(Versus(share, META, recall, place) for share in (some, more)),
    )


def _random_positions() -> Iterator[Claim]:
    models = ("meta", "twin", "gpt2")
    about = {"position_embedding": "rope", "train_length": 128}

    def label(at: Fields) -> str:
        return f"{name(at['task'])}, {at['model']}, 128 \u2192 {tokens(at['length'])}"

    for variant, title in RANDOM.items():
        for model in models:
            far = [about | {"model": model, "task": task, "length": 2048} for task in TASKS]
            yield Claim(
                f"{title}: {model} holds 95 % at 16 times the length",
                _BEYOND,
                "random-positions",
                (Versus({"variant": variant}, 0.95, far, label),),
                negligible=0.0,
                is_universal=True,
                decisive=decisive.by_task([{**one, "variant": variant} for one in far]),
            )
        longer = [
            about | {"model": model, "task": "list_recall", "length": length}
            for model, length in product(models, (512, 1024, 2048))
        ]
        # Plain positions trained as long at that length alone: in the grid itself they have fewer steps there.
        yield Claim(
            f"{title}: better than plain at 4 to 16 times, trained alike",
            _BEYOND,
            "random-positions",
            (Versus({"variant": variant}, {"variant": "one-length"}, longer, label),),
            decisive=decisive.by_model(
                [about | {"model": one, "task": "list_recall", "length": 128, "variant": variant} for one in models]
            ),
        )


def _cost_controls() -> Iterator[Claim]:
    yield from _slowdowns("meta, inserting", "meta", "gathered as ours", _BEYOND)
    yield _data_efficient("twin", _CONTROL)
    logs, where = {"metric": "log_perplexity"}, {"condition": "none", "position_embedding": "rope"}
    for variant, text in {"": "per text token", "equal-compute": "per compute"}.items():
        yield Claim(
            f"Perplexity no worse than gpt2's (1 %) {text}",
            _CONTROL,
            "perplexity",
            (
                Versus(
                    GPT2 | logs | {"variant": variant},
                    META | logs,
                    [where | {"text": one} for one in TEXTS],
                    lambda at, variant=variant: ", ".join(filter(None, [TEXTS[at["text"]], variant])),
                ),
            ),
            margin=-PER_CENT,
            negligible=-PER_CENT,
            unit="percent",
        )


def _inside_controls() -> Iterator[Claim]:
    """What the corrected Theorem 4.1 rests on, and text tokens beside meta-tokens, which the paper leaves out."""
    rows = META | {"module": "attention", "layer": None}
    yield Claim(
        "Theorem 4.1 needs \u03b1 > exp(\u2212H): so it is in most rows",
        _CONTROL,
        "sharpness",
        (Versus(rows | {"metric": "premise_holds"}, 0.5, Measured(INSIDE), partial(inside, "rows above half")),),
        negligible=0.0,
        decisive=decisive.premise,
    )
    fell = rows | {"metric": "entropy_fell", "boosted": True}
    held, missing = (fell | {"premise": premise} for premise in (True, False))
    yield Claim(
        "Where that holds, a boost lowers entropy more often",
        _CONTROL,
        "sharpness",
        (Versus(held, missing, Measured(INSIDE), lambda at: inside("", at) or "rows"),),
        negligible=0.0,
    )
    cosine = META | {"metric": "similarity_centred", "marker": "context"}
    yield Claim(
        "A meta-token is more like what it follows than text is",
        _CONTROL,
        "caching",
        (
            Versus(
                cosine | {"subject": "meta"},
                cosine | {"subject": "text"},
                Measured((*INSIDE, "layer", "distance"), {"layer": positive, "distance": list(CLOSE)}),
                lambda at: inside(
                    f"after layer {at['layer'] - 1}, {at['distance']} before" if at else "similarity", at
                ),
            ),
        ),
        unit="plain",
    )
