"""Commands that show something: examples of a task, continued text, the inside of a model."""

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metatokens.cli import options
from metatokens.cli.output import print_table, say, write_lines
from metatokens.errors import UserError
from metatokens.files import PNG, replace_own

if TYPE_CHECKING:
    from metatokens.decoder import Continuation
    from metatokens.tasks.example import Example


def sample(
    task: options.Task,
    phase: Annotated[int, typer.Option(metavar="PHASE", help="Difficulty, from 1 (easiest) to 5.")] = 1,
    condition: options.Condition = "paper",
    n: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Number of examples.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed.")] = 0,
    split: options.Split = "test",
    tokenizer: Annotated[str, typer.Option(metavar="TOKENIZER", help=f"{options.TOKENIZER}.")] = "train:4096",
    corpus: Annotated[
        str, typer.Option(metavar="CORPUS", help=f"Text for the task copying and for train:N: {options.CORPUS}.")
    ] = "builtin",
    out: options.ResultFile = None,
) -> None:
    """Print examples of a task with their answers, as JSON lines."""
    from metatokens.data.corpus import read_corpus
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.tasks.curriculum import TaskData, documents_for, task_texts

    documents = documents_for(task, corpus)
    text = read_corpus(corpus) if tokenizer.startswith("train:") else None
    loaded = load_tokenizer(tokenizer, corpus=text, extra_texts=task_texts())
    source = TaskData(task, tokenizer=loaded, condition=condition, seed=seed, documents=documents)
    write_lines((json.dumps(source.sample(i, phase, split).to_record(), ensure_ascii=False) for i in range(n)), out)


def generate(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue, unless a file is given.")
    ] = None,
    data: options.Data = None,
    marker: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What marks a meta-token in PROMPT, such as _PAUSE_.")
    ] = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap PROMPT in the chat template as a user message; print only the answer.")
    ] = False,
    messages: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A chat, a JSON list of role and content; PROMPT continues it.")
    ] = None,
    show_meta: Annotated[
        bool, typer.Option("--show-meta", help="Show meta-tokens in the output, such as <|meta|>.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Length limit of the new text.")] = 64,
    meta_every: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, help="Insert a meta-token every so many generated tokens.")
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", min=0.0, max=1e6, help="Sampling temperature; 0 always picks the likeliest token."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="Random seed.")] = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of text or a table.")] = False,
) -> None:
    """Continue a text, a chat, or the prompts of a file."""
    import torch
    from transformers import TextStreamer

    from metatokens.data.prompts import chat_text, encode_chat, encode_prompt, read_messages
    from metatokens.data.tokenizer import check_meta_token
    from metatokens.decoder import continue_prompts
    from metatokens.model.positions import reaches
    from metatokens.tasks.example import read_examples

    if (prompt is None and messages is None) == (data is None):
        raise UserError("give either a prompt or --data; or a chat as --messages.")
    if data is not None and marker is not None:
        raise UserError("--marker goes with a prompt; the records of --data name their markers by offset.")
    if data is not None and chat:
        raise UserError("--chat goes with a prompt; the records of --data are continued as they are.")
    asked = [] if messages is None else read_messages(messages)
    asked += [] if prompt is None else [{"role": "user", "content": prompt}]
    loaded, tokenizer = options.load(model, device, dtype, text_window)
    if marker is not None or meta_every is not None or landmarks is not None:
        check_meta_token(loaded.config, tokenizer, model)
    torch.manual_seed(seed)
    decoding: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    decoding |= {} if meta_every is None else {"meta_every": meta_every}
    continued: Any = partial(continue_prompts, loaded.eval(), tokenizer, batch_size=batch_size or 1, **decoding)

    if data is not None:
        records = read_examples(data, tokenizer, needs_completion=False, landmarks=landmarks)
        if any(record.markers for record in records):
            check_meta_token(loaded.config, tokenizer, model)
        prompts = [record.input_ids[: record.answer_start] for record in records]
        _say_kept(loaded, prompts)
        _print_continued(records, continued(prompts), show_meta=show_meta, as_json=as_json)
        return
    chat = chat or messages is not None
    if chat:
        ids = encode_chat(tokenizer, chat_text(tokenizer, asked), marker, landmarks=landmarks)
    else:
        ids = encode_prompt(tokenizer, str(prompt), () if marker is None else marker, landmarks=landmarks)
    if not ids:
        raise UserError("the prompt is empty.")
    if marker is not None and loaded.config.meta_token_id not in ids:
        raise UserError(f"the marker {marker!r} is not in the prompt.")
    if landmarks is not None and loaded.config.meta_token_id not in ids:
        say(f"the rule {landmarks} puts no landmark into this prompt.")
    _say_kept(loaded, [ids])
    longest = len(ids) + max_new_tokens + (max_new_tokens // meta_every if meta_every else 0)
    has_beams = loaded.generation_config.num_beams not in (None, 1)  # they may take words back
    if not (as_json or show_meta or has_beams) and reaches(loaded.config, longest):  # else it may end in a mistake
        print("" if chat else prompt, end="", flush=True)
        list(continued([ids], streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)))
        return
    (new,) = continued([ids])
    if as_json:
        line: dict[str, Any] = {"prompt": prompt} if messages is None else {"messages": asked}
        print(json.dumps(line | _fields(new, show_meta), ensure_ascii=False))
    else:
        print(new.with_meta if show_meta else new.text if chat else f"{prompt}{new.text}")


def _print_continued(
    records: "Sequence[Example]", continued: "Iterable[Continuation]", *, show_meta: bool, as_json: bool
) -> None:
    """Print records with their continuations, as a table or as JSON lines as soon as each is there."""
    rows = (
        {"prompt": record.prompt, "markers": record.markers, **_fields(new, show_meta)}
        for record, new in zip(records, continued, strict=True)
    )
    if as_json:
        write_lines((json.dumps(row, ensure_ascii=False) for row in rows), None)
    else:
        names = {"with_meta": "with meta-tokens"} if show_meta else {name: name for name in ("prompt", "continuation")}
        columns = zip(*([row[name] for name in names] for row in rows), strict=True)
        print_table(dict(zip(names.values(), columns, strict=True)))


def _say_kept(model: Any, prompts: Any) -> None:
    """Print what a cache keeps of prompts, if the model has a text window."""
    from metatokens.decoder import cache_kept, kept_line

    if kept := cache_kept(model, prompts):
        say(kept_line(kept))


def _fields(new: "Continuation", show_meta: bool) -> dict[str, str]:
    return {"continuation": new.text} | ({"with_meta": new.with_meta} if show_meta else {})


def look(
    model: Annotated[
        Path, typer.Option(metavar="DIR|hf:NAME", help="A folder, hf:NAME from the Hub, or example (bundled).")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text, with a marker for each meta-token.")],
    compare: Annotated[
        Path | None, typer.Option(metavar="DIR|hf:NAME", help="Another model to show next to it.")
    ] = None,
    marker: Annotated[str, typer.Option(metavar="TEXT", help="What marks a meta-token in PROMPT.")] = "_PAUSE_",
    layers: Annotated[
        str | None, typer.Option(metavar="N,...", help="Blocks whose attention to show, from 0; by default all.")
    ] = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML file to write.")] = Path("look.html"),
    picture: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="PNG file to draw as well.")] = None,
) -> None:
    """Look inside a model on one prompt, as a page.

    The page shows the attention of each position, the next token that each layer's state predicts, and the model's
    answer with the meta-tokens, without them, with meta-tokens elsewhere too, and with the text before the question
    covered.
    """
    from metatokens.checkpoint import fetch_model
    from metatokens.looking.figure import draw
    from metatokens.looking.look import look as look_inside
    from metatokens.looking.page import SIGNATURE, to_html

    chosen = options.parse_layers(layers)
    looks = []
    for given in filter(None, (model, compare)):
        loaded, tokenizer = options.load(fetch_model(given), device, dtype, text_window)
        found = look_inside(loaded, tokenizer, prompt, marker, landmarks=landmarks, name=str(given), layers=chosen)
        looks.append(found)
        _say_kept(loaded, [found.ids])
    replace_own(out, to_html(looks).encode(), SIGNATURE.encode())
    say(f"page: {out}")
    if picture is not None:
        replace_own(picture, draw(looks), PNG)
        say(f"picture: {picture}")
