"""The commands that measure a model: accuracy, perplexity, and what happens inside it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metatokens.cli import options
from metatokens.cli.output import check_results_file, write_figures, write_records
from metatokens.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from metatokens.evaluation.predictions import Prediction
    from metatokens.records import Result
    from metatokens.tasks.example import Example

DEFAULT_LENGTHS = "128,256,512,1024"
DEFAULT_PROMPTS = 2_500


Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTH,...",
        help=f"Longest prompts of --task in tokens; the shortest have half as many. By default {DEFAULT_LENGTHS}.",
    ),
]
PromptsPerLength = Annotated[
    int | None,
    typer.Option(
        "-n",
        metavar="N",
        min=1,
        help=f"Test prompts of --task per length; by default {DEFAULT_PROMPTS:,}.",
    ),
]
InterventionName = Annotated[
    str | None,
    typer.Option(
        "--intervention",
        metavar="NAME",
        help="Take something from the meta-tokens: no_pos, no_embed or neither; or add noise to positions, noise:S, "
        "those of meta-tokens alone, noise:S:meta, in raw units, noise:S:raw or noise:S:meta:raw; or hide the "
        "document's text from the question: landmarks_alone.",
    ),
]
Predictions = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append every prompt, with both answers, to this file."),
]


def evaluate(
    model: options.Model,
    task: options.TaskOrData = None,
    data: options.Data = None,
    landmarks: options.Landmarks = None,
    lengths: Lengths = None,
    condition: options.ConditionOrData = None,
    n: PromptsPerLength = None,
    intervention: InterventionName = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the model in the results; by default its folder."
        ),
    ] = None,
    predictions: Predictions = None,
    out: options.ResultFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how often a model's answers are right.

    Exact match and token accuracy, by prompt length on a task, or on your own records.
    """
    from metatokens.data.tokenizer import check_meta_token
    from metatokens.evaluation.accuracy import evaluate, longest_input
    from metatokens.model.interventions import Intervention, intervene
    from metatokens.model.positions import check_length
    from metatokens.records import ALONE, About
    from metatokens.tasks.example import read_examples
    from metatokens.tasks.landmarks_alone import LandmarksAlone
    from metatokens.training.run_folder import training_of

    _check_sources(task, data, landmarks, is_drawn=(lengths, condition, n) != (None, None, None))
    is_alone = intervention == ALONE
    if is_alone:
        _check_alone(task, predictions)
    change = None if intervention is None or is_alone else Intervention.parse(intervention)
    check_results_file(out, data, predictions)
    check_results_file(predictions, data)
    loaded, tokenizer = options.load(model)
    check_meta_token(loaded.config, tokenizer, model)
    tests: dict[Any, list[Example]]
    if data is not None:
        records = read_examples(data, tokenizer, landmarks=landmarks)
        check_length(loaded.config, longest_input(None, records))
        tests = {None: records}
    else:
        condition = condition or "paper"
        bins = options.parse_numbers("lengths", lengths or DEFAULT_LENGTHS, smallest=1)
        check_length(loaded.config, max(bins))
        tests = _test_sets(task, bins, condition, n or DEFAULT_PROMPTS, tokenizer)
    subject = About(
        model=name or str(model),
        task=task,
        text=None if data is None else str(data),
        condition=condition or landmarks,
        intervention=None if change is None else str(change),
        **training_of(model),
    )
    with intervene(loaded, change):
        results = evaluate(
            loaded, tests, subject, alone=LandmarksAlone(loaded, tokenizer) if is_alone else None
        )
        write_figures(results, out, as_json=as_json)
        if predictions is not None:
            write_records(_predictions(loaded, tests, tokenizer, results), predictions)


def _check_alone(task: str | None, predictions: Path | None) -> None:
    """Refuse to cover the text of records, which may have no question, and of predictions, which are made in sight."""
    if task is None or predictions is not None:
        raise UserError(
            "--intervention landmarks_alone goes with --task, whose prompts have a question; leave --predictions out."
        )


def _check_sources(
    task: str | None, data: Path | None, landmarks: str | None, *, is_drawn: bool
) -> None:
    """Refuse options of drawn test prompts with a user's own records, and the other way round."""
    options.check_task_or_data(task, data)
    if data is not None and is_drawn:
        raise UserError(
            "--lengths, --condition and -n go with --task; the records of --data are read as they are."
        )
    if task is not None and landmarks is not None:
        raise UserError(
            "--landmarks goes with --data; --condition places the meta-tokens of a task."
        )


def _test_sets(
    task: Any, bins: Sequence[int], condition: str, n: int, tokenizer: "PreTrainedTokenizerBase"
) -> "dict[int, list[Example]]":
    """The test prompts of a task, by the upper end of their length."""
    from metatokens.evaluation.accuracy import draw_test_examples
    from metatokens.tasks.curriculum import documents_for

    documents = documents_for(task, options.BUILTIN)
    return {
        length: draw_test_examples(
            task, length, n, tokenizer, condition=condition, documents=documents
        )
        for length in bins
    }


def _predictions(
    model: Any,
    tests: "Mapping[Any, Sequence[Example]]",
    tokenizer: "PreTrainedTokenizerBase",
    results: "Sequence[Result]",
) -> "Iterator[Prediction]":
    """The model's answers to all prompts, those that `results` counts as right and the others."""
    from metatokens.evaluation.predictions import predict
    from metatokens.records import unpack_hits

    for result in results:
        if result.hits is not None:
            is_right = unpack_hits(result.hits, result.n).tolist()
            yield from predict(model, tests[result.length], tokenizer, is_right)


def analyze(
    kind: options.Kind,
    model: options.Model,
    task: options.Task = "list_recall",
    length: Annotated[
        int,
        typer.Option(
            metavar="LENGTH",
            min=1,
            help="Longest prompts in tokens; the shortest have half as many.",
        ),
    ] = 128,
    n: Annotated[
        int | None,
        typer.Option(
            "-n", metavar="N", min=1, help="Test prompts; by default 100 (rate-distortion: 2,500)."
        ),
    ] = None,
    out: options.ResultFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what meta-tokens do inside a model.

    Whether they sharpen attention (sharpness), which context their states hold (residual), and how far these states
    can be compressed (rate-distortion).
    """
    from metatokens.analysis.analyses import ANALYSES
    from metatokens.data.tokenizer import check_meta_token
    from metatokens.records import About
    from metatokens.training.run_folder import training_of

    check_results_file(out)
    loaded, tokenizer = options.load(model)
    check_meta_token(loaded.config, tokenizer, model)
    count = n or (DEFAULT_PROMPTS if kind == "rate-distortion" else 100)
    examples = _test_sets(task, [length], "paper", count, tokenizer)[length]
    subject = About(
        model=str(model), task=task, condition="paper", length=length, **training_of(model)
    )
    write_figures(ANALYSES[kind](loaded, examples, subject), out, as_json=as_json)


def perplexity(
    model: options.Model,
    corpus: Annotated[
        str,
        typer.Option(
            metavar="CORPUS|DIR",
            help=f"Text: {options.CORPUS}; or what tokenize held out in a folder.",
        ),
    ],
    block_size: Annotated[
        int, typer.Option(metavar="TOKENS", min=2, help="Block length, meta-tokens included.")
    ] = 256,
    fraction: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of meta-tokens in a block, at most 0.5.")
    ] = 0.1,
    placement: options.Placement = "none",
    landmarks: options.Landmarks = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", min=1, help="Limit on the text that is read; by default all is."
        ),
    ] = None,
    out: options.ResultFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how well a model predicts text.

    The perplexity counts text tokens alone; meta-tokens are context and never targets.
    """
    from metatokens.data.landmarks import Landmarks
    from metatokens.evaluation.perplexity import held_out_text, perplexity
    from metatokens.records import About
    from metatokens.training.run_folder import training_of

    check_results_file(out, corpus)
    if landmarks is not None and placement != "none":
        raise UserError(
            "give --placement or --landmarks, not both: each places the meta-tokens of a block."
        )
    loaded, tokenizer = options.load(model)
    text = held_out_text(corpus, tokenizer, max_tokens)
    result = perplexity(
        loaded,
        text,
        About(model=str(model), text=corpus, seed=training_of(model).get("seed", 0)),
        block_size=block_size,
        fraction=fraction,
        placement=placement,
        landmarks=None if landmarks is None else Landmarks(tokenizer, landmarks),
    )
    write_figures([result], out, as_json=as_json)
