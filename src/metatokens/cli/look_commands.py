"""The commands that show something: examples of a task, continued text, the inside of a model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from metatokens.cli import options
from metatokens.cli.output import say
from metatokens.errors import UserError
from metatokens.files import replace_same_kind


def sample(
    task: options.Task,
    tokenizer: Annotated[
        str,
        typer.Option(metavar="TOKENIZER", help="A folder with a tokenizer, or gpt2."),
    ],
    phase: Annotated[
        int, typer.Option(metavar="PHASE", min=1, max=5, help="Difficulty, from 1 (easiest) to 5.")
    ] = 1,
    condition: options.Condition = "paper",
    n: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Number of examples.")] = 1,
    split: options.Split = "test",
) -> None:
    """Print examples of a task with their answers, as JSON lines."""
    from metatokens.data.tokenizer import load_tokenizer
    from metatokens.tasks.curriculum import TaskData, documents_for

    examples = TaskData(
        task,
        tokenizer=load_tokenizer(tokenizer),
        condition=condition,
        documents=documents_for(task, options.BUILTIN),
    )
    for index in range(n):
        print(json.dumps(examples.sample(index, phase, split).to_record(), ensure_ascii=False))


Marker = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="What marks a meta-token in PROMPT, such as _PAUSE_."),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        metavar="",
        help="Wrap PROMPT in the chat template as a user message; print only the answer.",
    ),
]
ShowMeta = Annotated[
    bool,
    typer.Option(
        "--show-meta", metavar="", help="Show meta-tokens in the output, such as <|meta|>."
    ),
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


def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    marker: Marker = None,
    landmarks: options.Landmarks = None,
    chat: Chat = False,
    show_meta: ShowMeta = False,
    max_new_tokens: MaxNewTokens = 64,
    meta_every: MetaEvery = None,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> None:
    """Continue a text."""
    import torch

    from metatokens.data.prompts import chat_text, encode_chat, encode_prompt
    from metatokens.data.tokenizer import check_meta_token
    from metatokens.decoder import continue_prompts

    loaded, tokenizer = options.load(model)
    if (marker, meta_every, landmarks) != (None, None, None):
        check_meta_token(loaded.config, tokenizer, model)
    if chat:
        text = chat_text(tokenizer, [{"role": "user", "content": prompt}])
        ids = encode_chat(tokenizer, text, marker, landmarks=landmarks)
    else:
        ids = encode_prompt(tokenizer, prompt, marker or (), landmarks=landmarks)
    if not ids:
        raise UserError("the prompt is empty.")
    has_meta = loaded.config.meta_token_id in ids
    if marker is not None and not has_meta:
        raise UserError(f"the marker {marker!r} is not in the prompt.")
    if landmarks is not None and not has_meta:
        say(f"the rule {landmarks} puts no landmark into this prompt.")
    torch.manual_seed(seed)
    (continuation,) = continue_prompts(
        loaded,
        tokenizer,
        [ids],
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        meta_every=meta_every,
    )
    if show_meta:
        print(continuation.with_meta)
    elif chat:
        print(continuation.text)
    else:
        print(f"{prompt}{continuation.text}")


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
    landmarks: options.Landmarks = None,
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

    looks = []
    for folder in filter(None, (model, compare)):
        loaded, tokenizer = options.load(fetch_model(folder))
        looks.append(
            look_inside(loaded, tokenizer, prompt, marker, landmarks=landmarks, name=str(folder))
        )
    replace_same_kind(out, to_html(looks).encode(), SIGNATURE.encode())
    say(f"page: {out}")
