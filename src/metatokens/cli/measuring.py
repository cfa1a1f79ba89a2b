"""Commands that measure a model: accuracy, perplexity, and what happens inside it."""

from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from metatokens.cli import options
from metatokens.cli.output import check_results_file, write_figures, write_records
from metatokens.errors import UserError


def evaluate(
    context: typer.Context,
    model: options.Model,
    task: options.TaskOrData = None,
    data: options.Data = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    lengths: Annotated[
        str, typer.Option(metavar=options.SEVERAL, help="Longest prompts in tokens; the shortest have half as many.")
    ] = "128,256,512,1024",
    condition: options.Condition = "paper",
    n: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Test prompts per length.")] = 2_500,
    intervention: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Change the meta-tokens: {options.CHANGES}; or hide the document's text from the question: "
            "landmarks_alone.",
        ),
    ] = None,
    noise_seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Seed of --intervention noise:S; by default 0.")
    ] = None,
    name: options.Name = None,
    corpus: options.TaskCorpus = "builtin",
    predictions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append every prompt, with both answers, to this file.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
    out: options.ResultFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how often a model's answers are right.

    Exact match and token accuracy, by prompt length on a task, or on your own records.
    """
    from metatokens.data.tokenizer import check_meta_token
    from metatokens.evaluation.accuracy import draw_test_examples, evaluate
    from metatokens.evaluation.predictions import predict
    from metatokens.model.interventions import Intervention, intervene
    from metatokens.model.positions import check_length
    from metatokens.records import About, unpack_hits
    from metatokens.tasks.curriculum import documents_for
    from metatokens.tasks.example import Example, read_examples
    from metatokens.tasks.landmarks_alone import ALONE, LandmarksAlone
    from metatokens.training.run_folder import training_of

    if (task is None) == (data is None):
        raise UserError("give either --task or --data.")
    drawing = {"lengths": "--lengths", "condition": "--condition", "n": "-n", "corpus": "--corpus"}
    given = [option for name, option in drawing.items() if _is_given(context, name)]
    if data is not None and given:
        raise UserError(f"{given[0]} goes with --task; the records of --data are read as they are.")
    if data is None and landmarks is not None:
        raise UserError("--landmarks goes with --data; --condition places the meta-tokens of a task.")
    if intervention == ALONE and (data is not None or predictions is not None):
        raise UserError(
            f"--intervention {ALONE} goes with --task, whose prompts have a question; leave --predictions out."
        )
    changed = None if intervention is None or intervention == ALONE else Intervention.parse(intervention)
    is_noise = changed is not None and changed.is_random
    if noise_seed is not None and not is_noise:
        raise UserError("--noise-seed goes with --intervention noise:S.")
    check_results_file(out)
    check_results_file(predictions)
    loaded, tokenizer = options.load(model, device, dtype, text_window)
    check_meta_token(loaded.config, tokenizer, model)
    tests: dict[Any, list[Example]]
    if task is None:
        assert data is not None
        tests, shown = {None: read_examples(data, tokenizer, landmarks=landmarks)}, landmarks
        check_length(loaded.config, max(len(record.input_ids) - 1 for record in tests[None]))
    else:
        bins = options.parse_lengths(lengths)
        check_length(loaded.config, max(bins))
        documents, shown = documents_for(task, corpus), condition
        tests = {
            length: draw_test_examples(task, length, n, tokenizer, condition=condition, documents=documents)
            for length in bins
        }
    alone = LandmarksAlone(loaded, tokenizer) if intervention == ALONE else None
    with intervene(loaded, changed, seed=noise_seed or 0):
        about = About(
            model=name or str(model),
            task=task,
            condition=shown,
            intervention=None if changed is None else str(changed),
            noise_seed=(noise_seed or 0) if is_noise else None,
            **training_of(model),
        )
        results = evaluate(loaded, tests, about, batch=batch_size, alone=alone)
        if predictions is not None:
            hits = {one.length: unpack_hits(one.hits, one.n).tolist() for one in results if one.hits is not None}
            answers = (predict(loaded, tests[length], tokenizer, right) for length, right in hits.items())
            write_records(chain.from_iterable(answers), predictions)
    write_figures(results, out, as_json=as_json)


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def analyze(
    kind: options.Kind,
    model: options.Model,
    task: options.Task = "list_recall",
    length: Annotated[
        int, typer.Option(metavar="LENGTH", min=1, help="Longest prompts in tokens; the shortest have half as many.")
    ] = 128,
    condition: options.Condition = "paper",
    n: Annotated[
        int | None,
        typer.Option("-n", metavar="N", min=1, help="Test prompts; by default 100 (rate-distortion: 2,500)."),
    ] = None,
    intervention: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Change the meta-tokens, for rate-distortion: {options.CHANGES}."),
    ] = None,
    fits: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Fits of rate-distortion, one per seed; by default 3.")
    ] = None,
    name: options.Name = None,
    corpus: options.TaskCorpus = "builtin",
    device: options.Device = None,
    dtype: options.Dtype = None,
    out: options.ResultFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what meta-tokens do inside a model.

    Whether they sharpen attention (sharpness), which context their states hold (residual), and how far these states
    can be compressed (rate-distortion).
    """
    from metatokens.analysis.rate_distortion import rate_distortion
    from metatokens.analysis.residual import residual
    from metatokens.analysis.sharpness import sharpness
    from metatokens.data.tokenizer import check_meta_token
    from metatokens.evaluation.accuracy import draw_test_examples
    from metatokens.model.interventions import Intervention
    from metatokens.records import About
    from metatokens.tasks.curriculum import documents_for
    from metatokens.training.run_folder import training_of

    for option, given in {"--intervention": intervention, "--fits": fits}.items():
        if given is not None and kind != "rate-distortion":
            raise UserError(f"{option} goes with rate-distortion.")
    check_results_file(out)
    loaded, tokenizer = options.load(model, device, dtype)
    check_meta_token(loaded.config, tokenizer, model)
    count = n or (2_500 if kind == "rate-distortion" else 100)
    documents = documents_for(task, corpus)
    examples = draw_test_examples(task, length, count, tokenizer, condition=condition, documents=documents)
    about = About(model=name or str(model), task=task, condition=condition, length=length, **training_of(model))
    if kind == "rate-distortion":
        changed = None if intervention is None else Intervention.parse(intervention)
        measured = rate_distortion(loaded, examples, about, fits=fits or 3, intervention=changed, held_out=count // 5)
    else:
        measured = {"sharpness": sharpness, "residual": residual}[kind](loaded, examples, about)
    write_figures(measured, out, as_json=as_json)


def perplexity(
    model: options.Model,
    corpus: Annotated[
        str, typer.Option(metavar="CORPUS|DIR", help=f"Text: {options.CORPUS}; or what tokenize held out in a folder.")
    ],
    block_size: Annotated[int, typer.Option(metavar="TOKENS", min=2, help="Block length, meta-tokens included.")] = 256,
    fraction: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of meta-tokens in a block, at most 0.5.")
    ] = 0.1,
    placement: options.Placement = "none",
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, help="Limit on the text that is read; by default all is.")
    ] = None,
    name: options.Name = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
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

    check_results_file(out)
    if landmarks is not None and placement != "none":
        raise UserError("give --placement or --landmarks, not both: each places the meta-tokens of a block.")
    loaded, tokenizer = options.load(model, device, dtype, text_window)
    text = held_out_text(corpus, tokenizer, max_tokens)
    result = perplexity(
        loaded,
        text,
        About(model=name or str(model), seed=training_of(model).get("seed", 0)),
        block_size=block_size,
        fraction=fraction,
        placement=placement,
        landmarks=None if landmarks is None else Landmarks(tokenizer, landmarks),
        source=corpus,
        batch=batch_size or 16,
    )
    write_figures([result], out, as_json=as_json)
