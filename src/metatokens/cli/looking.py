"""Verbs that show something: examples of a task, a text that is continued, the inside of a model."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from metatokens.cli.options import (
    CORPUS,
    TOKENIZER,
    BatchSize,
    Condition,
    Device,
    Dtype,
    Landmarks,
    Model,
    ResultFile,
    Task,
    choice,
    parse_lengths,
)
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
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue, unless a file is given.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Records whose prompts to continue: JSON lines of prompt and markers."),
    ] = None,
    marker: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Text that marks a meta-token in PROMPT, such as _PAUSE_; by default all is text."
        ),
    ] = None,
    landmarks: Landmarks = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Give PROMPT as a user's message to the chat template; print the answer alone."),
    ] = False,
    messages: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A chat so far, a JSON list of role and content; PROMPT, if given, goes on with it.",
        ),
    ] = None,
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
    device: Device = None,
    dtype: Dtype = None,
    batch_size: BatchSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines in place of text or a table.")] = False,
) -> None:
    """Continue a text, a chat, or the prompts of a file."""
    import torch
    from transformers import TextStreamer

    from metatokens.checkpoint import load_model
    from metatokens.data.prompts import encode_chat, encode_prompt
    from metatokens.data.tokenizer import check_meta_token, load_tokenizer
    from metatokens.model.positions import reaches
    from metatokens.tasks.example import read_examples

    if (prompt is None and messages is None) == (data is None):
        raise UserError("give either a prompt or --data; or a chat as --messages.")
    if data is not None and marker is not None:
        raise UserError("--marker goes with a prompt; the records of --data name their markers by offset.")
    if data is not None and chat:
        raise UserError("--chat goes with a prompt; the records of --data are continued as they are.")
    asked = [*([] if messages is None else _read_messages(messages))]
    asked += [] if prompt is None else [{"role": "user", "content": prompt}]
    chat = chat or messages is not None
    loaded, tokenizer = load_model(model, device=device, dtype=dtype).eval(), load_tokenizer(str(model))
    if chat and tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {model} has no chat template.")
    if marker is not None or meta_every is not None or landmarks is not None:
        check_meta_token(loaded.config, tokenizer, model)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if meta_every is not None:
        sampling["meta_every"] = meta_every

    def continuations(prompts: Sequence[Sequence[int]], streamer: Any = None) -> Iterator[tuple[str, str]]:
        """The continuation of each prompt, and the whole text with its meta-tokens."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), tokenizer.eos_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt_ids in enumerate(prompts):
            ids[row, longest - len(prompt_ids) :] = torch.tensor(prompt_ids)
            mask[row, longest - len(prompt_ids) :] = 1
        output = loaded.generate(
            ids.to(loaded.device),
            attention_mask=mask.to(loaded.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            return_dict_in_generate=True,
            use_cache=True,  # the cache has the places of the meta-tokens that were inserted
            streamer=streamer,
            num_return_sequences=1,
            **sampling,
        )
        ends = loaded.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        for prompt_ids, sequence in zip(prompts, output.sequences.tolist(), strict=True):
            stops = (place for place, one in enumerate(sequence[longest:], longest + 1) if one in ends)
            del sequence[next(stops, len(sequence)) :]  # behind it is padding
            new = tokenizer.decode(sequence[longest:], skip_special_tokens=True)
            for place in reversed(getattr(output.past_key_values, "inserted", [])):
                if place < len(sequence):
                    sequence.insert(place, loaded.config.meta_token_id)
            yield new, tokenizer.decode(sequence[longest - len(prompt_ids) :])

    if data is not None:
        records = read_examples(data, tokenizer, needs_completion=False, landmarks=landmarks)
        if any(record.markers for record in records):
            check_meta_token(loaded.config, tokenizer, model)

        def continued() -> Iterator[dict[str, Any]]:
            size = batch_size or 1
            for batch in (records[start : start + size] for start in range(0, len(records), size)):
                followed = continuations([record.input_ids[: record.answer_start] for record in batch])
                for record, (new, whole) in zip(batch, followed, strict=True):
                    line = {"prompt": record.prompt, "markers": record.markers, "continuation": new}
                    yield line | ({"with_meta": whole} if show_meta else {})

        if shows_tables(as_json):
            rows = list(continued())
            shown = (
                {"with meta-tokens": "with_meta"} if show_meta else {name: name for name in ("prompt", "continuation")}
            )
            print_table({heading: [row[name] for row in rows] for heading, name in shown.items()})
        else:
            write_lines((json.dumps(row, ensure_ascii=False) for row in continued()), None)
        return
    if chat:
        text = _chat_text(tokenizer, asked)
        ids = encode_chat(tokenizer, text, marker, landmarks=landmarks)
    else:
        ids = encode_prompt(tokenizer, str(prompt), () if marker is None else marker, landmarks=landmarks)
    if not ids:
        raise UserError("the prompt is empty.")
    if marker is not None and loaded.config.meta_token_id not in ids:
        raise UserError(f"the marker {marker!r} is not in the prompt.")
    if landmarks is not None and loaded.config.meta_token_id not in ids:
        say(f"landmarks by {landmarks} have no place in this prompt.")
    most = len(ids) + max_new_tokens + (max_new_tokens // meta_every if meta_every else 0)
    has_beams = loaded.generation_config.num_beams not in (None, 1)  # they may take words back
    if not (as_json or show_meta or has_beams) and reaches(loaded.config, most):  # otherwise it may end in a mistake
        print("" if chat else prompt, end="", flush=True)
        list(continuations([ids], TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)))
        return
    ((new, whole),) = continuations([ids])
    if as_json:
        line: dict[str, Any] = {"prompt": prompt} if messages is None else {"messages": asked}
        print(
            json.dumps(line | {"continuation": new} | ({"with_meta": whole} if show_meta else {}), ensure_ascii=False)
        )
    else:
        print(whole if show_meta else new if chat else f"{prompt}{new}")


def _read_messages(file: Path) -> list[dict[str, str]]:
    """The messages of a chat.

    Raises:
        UserError: if the file cannot be read, or does not hold a list of messages.
    """
    try:
        messages = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON: {' '.join(str(error).split())}.") from error
    keys = {"role", "content"}
    if not (isinstance(messages, list) and messages) or not all(
        isinstance(one, dict) and one.keys() == keys and all(isinstance(one[key], str) for key in keys)
        for one in messages
    ):
        raise UserError(f'{file} must hold a list of messages, such as [{{"role": "user", "content": "Hello"}}].')
    return messages


def _chat_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Apply the chat template to a chat.

    Raises:
        UserError: if it refuses the messages, such as two of the user's in succession.
    """
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise UserError(f"the chat template does not take these messages: {error}.") from error


def look(
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR|hf:NAME", help="The model: a folder, hf:NAME from the Hub, or example, which comes along."
        ),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text, with a marker for each meta-token.")],
    compare: Annotated[
        Path | None, typer.Option(metavar="DIR|hf:NAME", help="Another model, to be shown next to it.")
    ] = None,
    marker: Annotated[str, typer.Option(metavar="TEXT", help="Text that marks a meta-token in PROMPT.")] = "_PAUSE_",
    layers: Annotated[
        str | None, typer.Option(metavar="N,...", help="Blocks whose attention is shown, from 0; by default all.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML file to write.")] = Path("look.html"),
    picture: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="PNG file to draw into too, for a paper.")
    ] = None,
) -> None:
    """Look inside a model on one prompt, as a page.

    The page shows the attention of each position, and the next token by each layer's state. It shows the model's
    answer with the meta-tokens, without them, and among others at other places.
    """
    from metatokens.checkpoint import fetch_model, load_model
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.looking.figure import draw
    from metatokens.looking.look import look as look_inside
    from metatokens.looking.page import SIGNATURE, to_html

    chosen = None if layers is None else parse_lengths(layers, least=0, name="layers")
    looks = []
    for given in filter(None, (model, compare)):
        folder = fetch_model(given)
        loaded, tokenizer = load_model(folder, device=device, dtype=dtype), load_tokenizer(str(folder))
        looks.append(look_inside(loaded, tokenizer, prompt, marker, name=str(given), layers=chosen))
    write_own(out, to_html(looks).encode(), SIGNATURE.encode())
    say(f"page: {out}")
    if picture is not None:
        write_own(picture, draw(looks), PNG)
        say(f"picture: {picture}")
