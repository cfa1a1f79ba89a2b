"""The commands that show something: examples of a task, continued text, the inside of a model."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metatokens.cli import options
from metatokens.cli.output import print_table, say
from metatokens.errors import UserError
from metatokens.files import replace_same_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from metatokens.decoder import Continuation
    from metatokens.tasks.example import Example


def sample(
    task: options.Task,
    phase: Annotated[
        int, typer.Option(metavar="PHASE", help="Difficulty, from 1 (easiest) to 5.")
    ] = 1,
    condition: options.Condition = "paper",
    n: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Number of examples.")] = 1,
    split: options.Split = "test",
    tokenizer: Annotated[
        str, typer.Option(metavar="TOKENIZER", help=f"{options.TOKENIZER}.")
    ] = "train:4096",
    corpus: Annotated[
        str,
        typer.Option(
            metavar="CORPUS", help=f"Text for the task copying and for train:N: {options.CORPUS}."
        ),
    ] = options.BUILTIN,
) -> None:
    """Print examples of a task with their answers, as JSON lines."""
    from metatokens.data.corpus import read_corpus
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.tasks.curriculum import TaskData, documents_for, task_texts

    documents = documents_for(task, corpus)
    text = read_corpus(corpus) if tokenizer.startswith("train:") else None
    loaded = load_tokenizer(tokenizer, corpus=text, extra_texts=task_texts())
    examples = TaskData(task, tokenizer=loaded, condition=condition, documents=documents)
    for index in range(n):
        print(json.dumps(examples.sample(index, phase, split).to_record(), ensure_ascii=False))


Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="Text to continue, unless a file is given.")
]
Marker = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="What marks a meta-token in PROMPT, such as _PAUSE_."),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="Wrap PROMPT in the chat template as a user message; print only the answer."
    ),
]
ShowMeta = Annotated[
    bool, typer.Option("--show-meta", help="Show meta-tokens in the output, such as <|meta|>.")
]
MaxNewTokens = Annotated[
    int, typer.Option(metavar="TOKENS", min=1, help="Length limit of the new text.")
]
MetaEvery = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS", min=1, help="Insert a meta-token every so many generated tokens."
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="T",
        min=0.0,
        max=1e6,
        help="Sampling temperature; 0 always picks the likeliest token.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="Random seed.")]
TextAsJson = Annotated[
    bool, typer.Option("--json", metavar="", help="Print JSON lines instead of text or a table.")
]


def generate(
    model: options.Model,
    prompt: Prompt = None,
    data: options.Data = None,
    marker: Marker = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    chat: Chat = False,
    show_meta: ShowMeta = False,
    max_new_tokens: MaxNewTokens = 64,
    meta_every: MetaEvery = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    batch_size: options.BatchSize = 1,
    as_json: TextAsJson = False,
) -> None:
    """Continue a text, or the prompts of a file."""
    import torch
    from transformers import TextStreamer

    from metatokens.data.tokenizer import check_meta_token
    from metatokens.decoder import continue_prompts
    from metatokens.tasks.example import read_examples

    if (prompt is None) == (data is None):
        raise UserError("give either a prompt or --data.")
    if data is not None and (marker is not None or chat):
        raise UserError(
            "--marker and --chat go with a prompt; the records of --data are continued as they are."
        )
    loaded, tokenizer = options.load(model, device, dtype, text_window)
    records: Sequence[Example] = ()
    if data is not None:
        records = read_examples(data, tokenizer, needs_completion=False, landmarks=landmarks)
    if (marker, meta_every, landmarks) != (None, None, None) or any(
        record.markers for record in records
    ):
        check_meta_token(loaded.config, tokenizer, model)
    torch.manual_seed(seed)
    continue_ids: Any = partial(
        continue_prompts,
        loaded,
        tokenizer,
        batch_size=batch_size,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        meta_every=meta_every,
    )
    if records:
        prompts = [record.input_ids[: record.answer_start] for record in records]
        _say_cache_share(loaded, prompts)
        _print_continued(records, continue_ids(prompts), show_meta=show_meta, as_json=as_json)
        return
    text = str(prompt)
    ids = _encoded(tokenizer, text, marker, landmarks, is_chat=chat)
    _check_markers(ids, loaded.config.meta_token_id, marker, landmarks)
    _say_cache_share(loaded, [ids])
    shown = "" if chat else text  # an answer stands alone
    if as_json or show_meta or not _can_stream(loaded, len(ids), max_new_tokens, meta_every):
        (continuation,) = continue_ids([ids])
        _print_text(text, shown, continuation, show_meta=show_meta, as_json=as_json)
    else:
        print(shown, end="", flush=True)
        list(
            continue_ids(
                [ids], streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            )
        )


def _encoded(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    marker: str | None,
    landmarks: str | None,
    *,
    is_chat: bool,
) -> list[int]:
    from metatokens.data.prompts import chat_text, encode_chat, encode_prompt

    if is_chat:
        chat = chat_text(tokenizer, [{"role": "user", "content": text}])
        return encode_chat(tokenizer, chat, marker, landmarks=landmarks)
    return encode_prompt(tokenizer, text, () if marker is None else marker, landmarks=landmarks)


def _check_markers(
    ids: Sequence[int], meta_token_id: int | None, marker: str | None, landmarks: str | None
) -> None:
    """Refuse a prompt that is empty or lacks the marker; say so if a rule puts no landmark into it."""
    if not ids:
        raise UserError("the prompt is empty.")
    if meta_token_id in ids:
        return
    if marker is not None:
        raise UserError(f"the marker {marker!r} is not in the prompt.")
    if landmarks is not None:
        say(f"the rule {landmarks} puts no landmark into this prompt.")


def _can_stream(
    model: Any, prompt_length: int, max_new_tokens: int, meta_every: int | None
) -> bool:
    """Whether words may be printed as they come.

    Beams may take them back, and a text that outgrows the model's positions ends in a mistake.
    """
    from metatokens.model.positions import reaches

    inserted = max_new_tokens // meta_every if meta_every else 0
    has_beams = model.generation_config.num_beams not in (None, 1)
    return not has_beams and reaches(model.config, prompt_length + max_new_tokens + inserted)


def _print_text(
    text: str, shown: str, continuation: "Continuation", *, show_meta: bool, as_json: bool
) -> None:
    """Print a continued prompt, as text or as a line of JSON."""
    if as_json:
        print(json.dumps({"prompt": text, **_fields(continuation, show_meta)}, ensure_ascii=False))
    elif show_meta:
        print(continuation.with_meta)
    else:
        print(f"{shown}{continuation.text}")


def _print_continued(
    records: "Sequence[Example]",
    continuations: "Iterable[Continuation]",
    *,
    show_meta: bool,
    as_json: bool,
) -> None:
    """Print records with their continuations, as a table or as JSON lines as soon as each is there."""
    rows: Iterator[dict[str, Any]] = (
        {"prompt": record.prompt, "markers": record.markers, **_fields(continuation, show_meta)}
        for record, continuation in zip(records, continuations, strict=True)
    )
    if as_json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
        return
    shown = list(rows)
    if show_meta:
        print_table({"with meta-tokens": [row["with_meta"] for row in shown]})
    else:
        print_table({name: [row[name] for row in shown] for name in ("prompt", "continuation")})


def _fields(continuation: "Continuation", show_meta: bool) -> dict[str, str]:
    fields = {"continuation": continuation.text}
    if show_meta:
        fields["with_meta"] = continuation.with_meta
    return fields


def _say_cache_share(model: Any, prompts: Any) -> None:
    """Print how much of prompts a cache keeps, if the model has a text window."""
    from metatokens.decoder import cache_share_line, measure_cache_share

    cache_share = measure_cache_share(model, prompts)
    if cache_share:
        say(cache_share_line(cache_share))


def look(
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR|hf:NAME", help="A folder, hf:NAME from the Hub, or example (bundled)."
        ),
    ],
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text, with a marker for each meta-token.")
    ],
    compare: Annotated[
        Path | None, typer.Option(metavar="DIR|hf:NAME", help="Another model to show next to it.")
    ] = None,
    marker: Annotated[
        str, typer.Option(metavar="TEXT", help="What marks a meta-token in PROMPT.")
    ] = "_PAUSE_",
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Blocks whose attention to show, from 0; by default all."
        ),
    ] = None,
    landmarks: options.Landmarks = None,
    text_window: options.TextWindow = None,
    device: options.Device = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML file to write.")] = Path(
        "look.html"
    ),
) -> None:
    """Look inside a model on one prompt, as a page.

    The page shows the attention of each position, the next token that each layer's state predicts, and the model's
    answer with the meta-tokens, without them, with meta-tokens elsewhere too, and with the text before the question
    covered.
    """
    from metatokens.checkpoint import fetch_model
    from metatokens.looking.look import look as look_inside
    from metatokens.looking.page import SIGNATURE, to_html

    chosen_layers = options.parse_layers(layers)
    looks = []
    for folder in [model] if compare is None else [model, compare]:
        loaded, tokenizer = options.load(fetch_model(folder), device, text_window=text_window)
        inside = look_inside(
            loaded,
            tokenizer,
            prompt,
            marker,
            landmarks=landmarks,
            name=str(folder),
            layers=chosen_layers,
        )
        looks.append(inside)
        _say_cache_share(loaded, [inside.ids])
    replace_same_kind(out, to_html(looks).encode(), SIGNATURE.encode())
    say(f"page: {out}")
