"""Verbs that print something: examples, accuracies, perplexities, what is inside a model, text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from metatokens.cli.app import (
    TASKS,
    AsJson,
    Corpus,
    Lengths,
    Model,
    ResultFile,
    app,
    check_results_file,
    named,
    parse_lengths,
    print_table,
    shows_tables,
    write_lines,
    write_records,
)
from metatokens.errors import UserError

TaskName = Annotated[str | None, typer.Option("--task", **named(*TASKS))]
Task = Annotated[str, typer.Option(**named(*TASKS))]
Condition = Annotated[str, typer.Option(**named("paper", "none", "decoy"))]
Name = Annotated[str | None, typer.Option(help="What the results are filed under; default: the folder.")]
InterventionName = Annotated[
    str | None, typer.Option("--intervention", help="no_pos, no_embed, neither, or noise:S[:meta][:raw].")
]


@app.command(rich_help_panel="Look")
def sample(
    task: Annotated[str, typer.Argument(**named(*TASKS))],
    phase: Annotated[int, typer.Option(help="1 to 5.")] = 1,
    condition: Annotated[str, typer.Option(**named("paper", "none", "decoy"))] = "paper",
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    split: Annotated[str, typer.Option(**named("train", "test"))] = "test",
    tokenizer: Annotated[str, typer.Option(help="gpt2, a folder, or train:N.")] = "train:4096",
    corpus: Corpus = "builtin",
    out: ResultFile = None,
) -> None:
    """Print examples of a task as JSON lines."""
    from metatokens.data.corpus import read_corpus
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.tasks.curriculum import TaskData, documents_for, task_texts

    documents = documents_for(task, corpus)
    text = read_corpus(corpus) if tokenizer.startswith("train:") else None
    loaded = load_tokenizer(tokenizer, corpus=text, extra_texts=task_texts())
    source = TaskData(task, tokenizer=loaded, condition=condition, seed=seed, documents=documents)
    write_lines(
        (json.dumps(source.sample(i, phase, cast(Any, split)).to_record(), ensure_ascii=False) for i in range(n)), out
    )


@app.command(rich_help_panel="Measure")
def evaluate(
    context: typer.Context,
    model: Model,
    task: TaskName = None,
    data: Annotated[Path | None, typer.Option(help="Your own records in place of a task's: see finetune.")] = None,
    lengths: Lengths = "128,256,512,1024",
    condition: Condition = "paper",
    n: Annotated[int, typer.Option("-n", min=1, help="Test prompts of each length.")] = 2_500,
    intervention: InterventionName = None,
    noise_seed: Annotated[int, typer.Option(min=0, help="Of the noise on positions.")] = 0,
    name: Name = None,
    corpus: Corpus = "builtin",
    predictions: Annotated[
        Path | None, typer.Option(help="Append every prompt, with the right answer and the model's, to this file.")
    ] = None,
    out: ResultFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure exact match and token accuracy by prompt length, or on your own records."""
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.evaluation.accuracy import evaluate, test_examples
    from metatokens.evaluation.predictions import predict
    from metatokens.model.checkpoint import load_model
    from metatokens.model.interventions import Intervention, intervene
    from metatokens.model.positions import check_length
    from metatokens.tasks.curriculum import documents_for
    from metatokens.tasks.example import Example, read_examples
    from metatokens.training.finetune import check_meta_token, training_of

    if (task is None) == (data is None):
        raise UserError("give either --task or --data.")
    drawing = {"lengths": "--lengths", "condition": "--condition", "n": "-n", "corpus": "--corpus"}
    given = [option for name, option in drawing.items() if _is_given(context, name)]
    if data is not None and given:
        raise UserError(
            f"{given[0]} says which prompts of a task are drawn; the records of --data are read as they are."
        )
    check_results_file(out)
    check_results_file(predictions)
    loaded, tokenizer = load_model(model), load_tokenizer(str(model))
    check_meta_token(loaded.config, tokenizer, model)
    tests: dict[Any, list[Example]]
    if task is None:
        assert data is not None
        records = read_examples(data, tokenizer)
        check_length(loaded.config, max(len(record.input_ids) - 1 for record in records))
        tests, shown = {None: records}, None
    else:
        bins = parse_lengths(lengths)
        check_length(loaded.config, max(bins))
        documents, shown = documents_for(task, corpus), condition
        tests = {
            length: test_examples(task, length, n, tokenizer, condition=condition, documents=documents)
            for length in bins
        }
    changed = None if intervention is None else Intervention.parse(intervention)
    is_noise = changed is not None and changed.kind == "noise"
    with intervene(loaded, changed, seed=noise_seed):
        results = evaluate(
            loaded,
            tests,
            task=task,
            name=name or str(model),
            condition=shown,
            intervention=None if changed is None else str(changed),
            noise_seed=noise_seed if is_noise else None,
            **training_of(model),
        )
        if predictions is not None:
            reached = (tests[length] for length in dict.fromkeys(r.length for r in results if r.value is not None))
            write_records((each for examples in reached for each in predict(loaded, examples, tokenizer)), predictions)
    write_records(results, out, as_json=as_json)


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


@app.command(rich_help_panel="Measure")
def analyze(
    kind: Annotated[str, typer.Argument(**named("sharpness", "residual", "rate-distortion"))],
    model: Model,
    task: Task = "list_recall",
    length: Annotated[int, typer.Option(min=1, help="Prompts of more than half and at most so many tokens.")] = 128,
    condition: Condition = "paper",
    n: Annotated[
        int | None, typer.Option("-n", min=1, help="Prompts; default: 100, for rate-distortion 2,500.")
    ] = None,
    intervention: InterventionName = None,
    fits: Annotated[int, typer.Option(min=1, help="Seeds of the bottleneck's fit (rate-distortion).")] = 3,
    name: Name = None,
    corpus: Corpus = "builtin",
    out: ResultFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure what meta-tokens do inside a model: sharper attention, cached context, compression."""
    from metatokens.analysis.rate_distortion import rate_distortion
    from metatokens.analysis.residual import residual
    from metatokens.analysis.sharpness import sharpness
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.evaluation.accuracy import test_examples
    from metatokens.model.checkpoint import load_model
    from metatokens.model.interventions import Intervention
    from metatokens.tasks.curriculum import documents_for
    from metatokens.training.finetune import check_meta_token, training_of

    if kind not in ("sharpness", "residual", "rate-distortion"):
        raise UserError(f"unknown analysis {kind!r}; choose sharpness, residual or rate-distortion.")
    if intervention is not None and kind != "rate-distortion":
        raise UserError("--intervention goes with rate-distortion alone.")
    check_results_file(out)
    loaded, tokenizer = load_model(model), load_tokenizer(str(model))
    check_meta_token(loaded.config, tokenizer, model)
    count = n or (2_500 if kind == "rate-distortion" else 100)
    documents = documents_for(task, corpus)
    examples = test_examples(task, length, count, tokenizer, condition=condition, documents=documents)
    about: Any = {"seed": 0, **training_of(model), "task": task, "condition": condition, "length": length}
    about["model"] = name or str(model)
    if kind == "rate-distortion":
        changed = None if intervention is None else Intervention.parse(intervention)
        measured = rate_distortion(loaded, examples, about, fits=fits, intervention=changed, held_out=count // 5)
    else:
        measured = {"sharpness": sharpness, "residual": residual}[kind](loaded, examples, about)
    write_records(measured, out, as_json=as_json)


@app.command(rich_help_panel="Measure")
def perplexity(
    model: Model,
    corpus: Annotated[str, typer.Option(help="A corpus spec, or a token store, whose held-out split is read.")],
    block_size: Annotated[int, typer.Option(min=2, help="Positions of a block, meta-tokens included.")] = 256,
    fraction: Annotated[float, typer.Option(help="Of the positions that are meta-tokens, in [0, 0.5].")] = 0.1,
    placement: Annotated[str, typer.Option(**named("uniform", "periodic", "none"))] = "none",
    tokens: Annotated[int | None, typer.Option(min=1, help="Text tokens to read at most; all where not given.")] = None,
    name: Name = None,
    out: ResultFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure perplexity, counted on text tokens alone, on a corpus or on the held-out split of a token store."""
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.evaluation.perplexity import held_out_text, perplexity
    from metatokens.model.checkpoint import load_model
    from metatokens.training.finetune import training_of

    check_results_file(out)
    loaded = load_model(model)
    text = held_out_text(corpus, load_tokenizer(str(model)), tokens)
    result = perplexity(
        loaded,
        text,
        block_size=block_size,
        fraction=fraction,
        placement=placement,
        name=name or str(model),
        source=corpus,
        seed=training_of(model).get("seed", 0),
    )
    write_records([result], out, as_json=as_json)


@app.command(rich_help_panel="Look")
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="Text; what looks like a marker in it stays text.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="JSON lines with a prompt and its markers, continued as JSON lines.")
    ] = None,
    marker: Annotated[
        str | None, typer.Option(help="What stands for a meta-token in the prompt, such as _PAUSE_.")
    ] = None,
    show_meta: Annotated[bool, typer.Option("--show-meta", help="Show the meta-tokens, inserted ones too.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Text tokens to generate.")] = 64,
    meta_every: Annotated[int | None, typer.Option(min=1, help="Insert a meta-token every so many tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue a text, or the prompts of a file."""
    import torch

    from metatokens.data.prompts import encode_prompt
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.model.checkpoint import load_model
    from metatokens.tasks.example import read_examples
    from metatokens.training.finetune import check_meta_token

    if (prompt is None) == (data is None):
        raise UserError("give either a prompt or --data.")
    if data is not None and marker is not None:
        raise UserError("--marker goes with a prompt; the records of --data name their markers by offset.")
    loaded, tokenizer = load_model(model).eval(), load_tokenizer(str(model))
    if marker is not None:
        check_meta_token(loaded.config, tokenizer, model)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}

    def continuation(prompt_ids: Sequence[int]) -> tuple[str, str]:
        """What follows a prompt, and all of it with its meta-tokens."""
        ids = torch.tensor([prompt_ids], device=loaded.device)
        output = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            meta_every=meta_every,
            pad_token_id=tokenizer.eos_token_id,
            return_dict_in_generate=True,
            use_cache=True,  # which knows where meta-tokens were inserted
            **sampling,
        )
        sequence = output.sequences[0].tolist()
        new = tokenizer.decode(sequence[len(prompt_ids) :], skip_special_tokens=True)
        for place in reversed(getattr(output.past_key_values, "inserted", [])):
            sequence.insert(place, loaded.config.meta_token_id)
        return new, tokenizer.decode(sequence)

    if data is not None:
        records = read_examples(data, tokenizer, needs_completion=False)
        if any(record.markers for record in records):
            check_meta_token(loaded.config, tokenizer, model)
        rows = []
        for record in records:
            new, whole = continuation(record.input_ids[: record.answer_start])
            shown = {"prompt": record.prompt, "markers": record.markers, "continuation": new}
            shown |= {"with_meta": whole} if show_meta else {}
            if shows_tables(as_json):
                rows.append(shown)
            else:
                write_lines([json.dumps(shown, ensure_ascii=False)], None)
        if rows:
            print_table(rows)
        return
    assert prompt is not None
    ids = encode_prompt(tokenizer, prompt, () if marker is None else marker)
    if not ids:
        raise UserError("the prompt is empty.")
    if marker is not None and loaded.config.meta_token_id not in ids:
        raise UserError(f"the marker {marker!r} is not in the prompt.")
    new, whole = continuation(ids)
    if as_json:
        told = {"prompt": prompt, "continuation": new} | ({"with_meta": whole} if show_meta else {})
        print(json.dumps(told, ensure_ascii=False))
    else:
        print(whole if show_meta else f"{prompt}{new}")
