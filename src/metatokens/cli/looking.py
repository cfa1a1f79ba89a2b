"""Verbs that show something: examples of a task, a text that is continued, the inside of a model."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from metatokens.cli.options import CORPUS, TOKENIZER, Condition, Landmarks, Model, ResultFile, Task, choice
from metatokens.cli.output import PNG, print_table, say, shows_tables, write_lines, write_own
from metatokens.errors import UserError

SPLITS = ("train", "validation", "test")


def sample(
    task: Task,
    phase: Annotated[int, typer.Option(metavar="PHASE", help="How hard they are: 1, the easiest, to 5.")] = 1,
    condition: Condition = "paper",
    n: Annotated[int, typer.Option("-n", metavar="N", min=1, help="How many.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random draws.")] = 0,
    split: Annotated[str, typer.Option(metavar="NAME", **choice("What they are for", *SPLITS))] = "test",
    tokenizer: Annotated[str, typer.Option(metavar="TOKENIZER", help=f"{TOKENIZER}.")] = "train:4096",
    corpus: Annotated[
        str, typer.Option(metavar="CORPUS", help=f"Text for the task copying and for train:N: {CORPUS}.")
    ] = "builtin",
    out: ResultFile = None,
) -> None:
    """Print examples of a task, each with its answer, as JSON lines."""
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


def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue, unless --data is given.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Records whose prompts to continue: JSON lines of prompt and markers."),
    ] = None,
    marker: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="What stands for a meta-token in PROMPT, such as _PAUSE_; by default all is text."
        ),
    ] = None,
    landmarks: Landmarks = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Give PROMPT as a user's message to the chat template; print the answer alone."),
    ] = False,
    show_meta: Annotated[
        bool, typer.Option("--show-meta", help="Show meta-tokens in the output, as <|meta|>.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Text to generate at most.")] = 64,
    meta_every: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Insert a meta-token each time that so much text is generated."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="Of sampling; 0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines in place of text or a table.")] = False,
) -> None:
    """Continue a text, or the prompts of a file."""
    import torch

    from metatokens.data.prompts import encode_chat, encode_prompt
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.model.checkpoint import load_model
    from metatokens.tasks.example import read_examples
    from metatokens.training.finetune import check_meta_token

    if (prompt is None) == (data is None):
        raise UserError("give either a prompt or --data.")
    if data is not None and marker is not None:
        raise UserError("--marker goes with a prompt; the records of --data name their markers by offset.")
    if data is not None and chat:
        raise UserError("--chat goes with a prompt; the records of --data are continued as they stand.")
    loaded, tokenizer = load_model(model).eval(), load_tokenizer(str(model))
    if chat and tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {model} has no chat template.")
    if marker is not None or meta_every is not None or landmarks is not None:
        check_meta_token(loaded.config, tokenizer, model)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if meta_every is not None:
        sampling["meta_every"] = meta_every

    def continuation(prompt_ids: Sequence[int]) -> tuple[str, str]:
        """What follows a prompt, and all of it with its meta-tokens."""
        ids = torch.tensor([prompt_ids], device=loaded.device)
        output = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
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
        records = read_examples(data, tokenizer, needs_completion=False, landmarks=landmarks)
        if any(record.markers for record in records):
            check_meta_token(loaded.config, tokenizer, model)

        def continued() -> Iterator[dict[str, Any]]:
            for record in records:
                new, whole = continuation(record.input_ids[: record.answer_start])
                told = {"prompt": record.prompt, "markers": record.markers, "continuation": new}
                yield told | ({"with_meta": whole} if show_meta else {})

        if shows_tables(as_json):
            rows = list(continued())
            shown = (
                {"with meta-tokens": "with_meta"} if show_meta else {name: name for name in ("prompt", "continuation")}
            )
            print_table({heading: [row[name] for row in rows] for heading, name in shown.items()})
        else:
            write_lines((json.dumps(row, ensure_ascii=False) for row in continued()), None)
        return
    assert prompt is not None
    if chat:
        message = [{"role": "user", "content": prompt}]
        text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        ids = encode_chat(tokenizer, text, marker, landmarks=landmarks)
    else:
        ids = encode_prompt(tokenizer, prompt, () if marker is None else marker, landmarks=landmarks)
    if not ids:
        raise UserError("the prompt is empty.")
    if marker is not None and loaded.config.meta_token_id not in ids:
        raise UserError(f"the marker {marker!r} is not in the prompt.")
    if landmarks is not None and loaded.config.meta_token_id not in ids:
        say(f"landmarks by {landmarks} have no place in this prompt.")
    new, whole = continuation(ids)
    if as_json:
        told = {"prompt": prompt, "continuation": new} | ({"with_meta": whole} if show_meta else {})
        print(json.dumps(told, ensure_ascii=False))
    else:
        print(whole if show_meta else new if chat else f"{prompt}{new}")


def look(
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR|hf:NAME", help="The model: a folder, hf:NAME from the Hub, or example, which comes along."
        ),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text, with a marker for each meta-token.")],
    compare: Annotated[
        Path | None, typer.Option(metavar="DIR|hf:NAME", help="Another model, to be shown beside it.")
    ] = None,
    marker: Annotated[str, typer.Option(metavar="TEXT", help="What stands for a meta-token in PROMPT.")] = "_PAUSE_",
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML file to write.")] = Path("look.html"),
    picture: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="PNG file to draw into too, for a paper.")
    ] = None,
) -> None:
    """Look inside a model on one prompt, as a page.

    What each position attends to, and what each layer would say.
    What the model answers: with the meta-tokens, without them, and among others that stand anywhere.
    """
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.looking.figure import draw
    from metatokens.looking.look import look as look_inside
    from metatokens.looking.page import SIGNATURE, to_html
    from metatokens.model.checkpoint import fetch_model, load_model

    looks = []
    for given in filter(None, (model, compare)):
        folder = fetch_model(given)
        looks.append(look_inside(load_model(folder), load_tokenizer(str(folder)), prompt, marker, name=str(given)))
    write_own(out, to_html(looks).encode(), SIGNATURE.encode())
    say(f"page: {out}")
    if picture is not None:
        write_own(picture, draw(looks), PNG)
        say(f"picture: {picture}")


def explore(
    models: Annotated[
        list[Path], typer.Option("--model", metavar="DIR|hf:NAME", help="A model; may be repeated, to compare.")
    ],
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Where to serve; by default the first free.")] = None,
) -> None:
    """Open a local page to try prompts with meta-tokens on.

    Type a prompt, set and remove meta-tokens, and see answers and attention change. It needs
    metatokens[explore], and is served to this computer alone.
    """
    from metatokens.looking.explore import build, serve

    serve(build(models), port, say)
