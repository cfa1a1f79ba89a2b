"""A page where you type a prompt, set and remove meta-tokens, and see answers and attention change.

    pip install gradio
    python examples/explore/app.py --model DIR --model OTHER

The folder is a Hugging Face Space as well: upload its files.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import gradio
import typer
from plotly import graph_objects
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metatokens.analysis.observation import Observation, observe
from metatokens.checkpoint import fetch_model, load_model
from metatokens.cli import main
from metatokens.cli.output import say
from metatokens.data.prompts import encode_prompt
from metatokens.data.tokenizer import beginning_of, load_tokenizer, meta_token_id
from metatokens.errors import UserError
from metatokens.looking.look import cover, likeliest, prompt_ids
from metatokens.looking.page import SCALE, readable
from metatokens.recipe import Device, Dtype
from metatokens.records import MARKER
from metatokens.tasks import TASKS
from metatokens.tasks.curriculum import TaskData, documents_for

MAX_TOKENS = 512  # per prompt, so that answers come at once
GAP, META = "·", "◆"
MEAN = "mean"
_CONDITIONS = ("paper", "decoy", "landmark")
_FEW = 12  # rows of a map that fit a label each
_FIRST = 128  # tokens of an example, at most

INTRODUCTION = """# What do meta-tokens do?
A *meta-token* (◆) is a learned token between the tokens of a text. Take an example of a task, or type a prompt of your
own with `_PAUSE_` for each meta-token. **Click between two tokens** to insert a meta-token there, or on a meta-token to
remove it. Every model answers at once and shows its attention. **Cover the text**, and the question, from its `Q:` on,
sees the meta-tokens before it alone."""


CHANGED = "**The prompt has changed: the results below belong to the previous one. Ask again.**"


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's response to a prompt.

    Attributes:
        tokens: the prompt's tokens, (length,).
        observation: the model's internal states and attention.
        probabilities: the five likeliest next tokens with their probabilities.
    """

    tokens: list[str]
    observation: Observation
    probabilities: dict[str, float]


class Explorer:
    """Models that are asked one at a time, which keeps the observations of different users apart."""

    def __init__(self, models: Sequence[Path], **placing: str | None):
        """Load models: folders, `hf:NAME` or `example`. `placing` is the device and dtype for `load_model`.

        Raises:
            UserError: if one cannot be loaded.
        """
        self.models: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}
        for name in models:
            folder = fetch_model(name)
            self.models[str(name)] = (
                load_model(folder, **placing),
                load_tokenizer(str(folder)),
            )
        self._lock = Lock()
        self._documents = {task: documents_for(task, "builtin") for task in TASKS}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The first model's tokenizer, whose tokens are shown."""
        return next(iter(self.models.values()))[1]

    def example(self, task: str, condition: str) -> tuple[str, str]:
        """Draw a new test example: its prompt and its answer."""
        data = TaskData(
            task, tokenizer=self.tokenizer, condition=condition, seed=random.randrange(10**6),
            documents=self._documents[task],
        )  # fmt: skip
        drawn = (data.sample(index, 1, "test") for index in range(100))
        shown = next(example for example in drawn if example.n_tokens <= _FIRST)
        return shown.prompt, shown.completion.strip()

    def ask(self, text: str, *, is_covered: bool = False) -> dict[str, Answer]:
        """Ask each model with a prompt that marks meta-tokens by ` _PAUSE_`.

        With `is_covered` the question sees the meta-tokens before it, and no text there.

        Raises:
            UserError: if the prompt is empty, longer than 512 tokens, or to be covered and has no question.
        """
        with self._lock:
            return {
                name: self._answer(*pair, text, is_covered) for name, pair in self.models.items()
            }

    @staticmethod
    def _answer(
        model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, is_covered: bool
    ) -> Answer:
        ids = prompt_ids(model, tokenizer, text, MARKER.strip(), MAX_TOKENS)
        seen = observe(model, ids, mask=cover(model, tokenizer, ids) if is_covered else None)
        best = likeliest(model, seen.logits[-1])

        def texts_of(tokens: Tensor) -> list[str]:
            return [readable(tokenizer.decode([token])) for token in tokens.tolist()]

        probabilities = zip(texts_of(best.ids), best.probabilities.tolist(), strict=True)
        return Answer(texts_of(ids), seen, dict(probabilities))

    def spans(self, text: str) -> list[tuple[str, str | None]]:
        """The prompt's tokens, and between every two a meta-token or a place for one."""
        spans: list[tuple[str, str | None]] = []
        for is_meta, ids in self._runs(text):
            if is_meta:
                spans = [*spans[:-1], *((META, "meta-token") for _ in ids)]
                continue
            for token in ids:
                spans += [(readable(self.tokenizer.decode([token])), None), (GAP, "gap")]
        return spans

    def toggled(self, text: str, index: int) -> str:
        """The prompt after a click on one of its spans, which adds or removes a meta-token; a text token stays."""
        spans = self.spans(text)
        runs = [token for _, ids in self._runs(text) for token in ids]
        meta = meta_token_id(self.tokenizer)
        tokens_before = sum(label != "gap" for _, label in spans[:index])
        kind = spans[index][1]
        if kind == "meta-token":
            del runs[tokens_before]
        elif kind == "gap":
            runs.insert(tokens_before, meta)
        return "".join(
            MARKER * len(list(ids)) if is_meta else self.tokenizer.decode(list(ids))
            for is_meta, ids in groupby(runs, meta.__eq__)
        )

    def _runs(self, text: str) -> list[tuple[bool, list[int]]]:
        """Runs of meta-tokens and of text, in turn."""
        ids = encode_prompt(self.tokenizer, text, MARKER.strip())[
            len(beginning_of(self.tokenizer)) :
        ]
        return [
            (is_meta, list(run))
            for is_meta, run in groupby(ids, meta_token_id(self.tokenizer).__eq__)
        ]


def heat_map(weights: Tensor, labels: Sequence[str], title: str) -> graph_objects.Figure:
    """Attention weights, (queries, keys), as a Plotly figure."""
    told = [[(query, key) for key in labels] for query in labels]
    trace = graph_objects.Heatmap(
        z=weights.sqrt().tolist(), customdata=told, text=weights.tolist(), colorscale=SCALE, zmin=0, zmax=1,
        showscale=False,
        hovertemplate="query %{customdata[0]}<br>key %{customdata[1]}<br>weight %{text:.3f}<extra></extra>",
    )  # fmt: skip
    figure = graph_objects.Figure(trace)
    figure.update_layout(
        title=title, height=340, margin={"l": 40, "r": 8, "t": 36, "b": 36}, template="plotly_white"
    )
    if len(labels) <= _FEW:  # where Plotly's own would be at halves, and each row can be named
        ticks = {
            "tickvals": [*range(len(labels))],
            "ticktext": [label.partition(" ")[0] for label in labels],
        }
        figure.update_xaxes(ticks).update_yaxes(ticks)
    return figure.update_yaxes(autorange="reversed", title="query").update_xaxes(title="key")


def build(models: Sequence[Path], **placing: str | None) -> gradio.Blocks:
    """Build the page.

    Args:
        models: one or more, which answer side by side: folders, `hf:NAME` or `example`.
        **placing: the device and dtype for `load_model`.

    Raises:
        UserError: if a model cannot be loaded.
    """
    explorer = Explorer(models, **placing)
    first = next(iter(explorer.models.values()))[0].config.get_text_config()
    layers = list(range(first.num_hidden_layers))
    heads = [MEAN, *range(first.num_attention_heads)]

    def shown(text: str, is_covered: bool, layer: int, head: str | int) -> list[Any]:
        try:
            answers = explorer.ask(text, is_covered=is_covered)
        except UserError as error:
            raise gradio.Error(str(error), print_exception=False) from error
        values: list[Any] = ["", explorer.spans(text)]
        for told in answers.values():
            values.append(told.probabilities)
            for module in ("attention", "second_attention"):
                values.append(_plot(told, module, layer, head))
        return values

    with gradio.Blocks(title="Meta-tokens", analytics_enabled=False, fill_width=True) as page:
        gradio.Markdown(INTRODUCTION)
        with gradio.Row():
            task = gradio.Dropdown(list(TASKS), value="list_recall", label="Task")
            condition = gradio.Dropdown(
                list(_CONDITIONS), value="paper", label="Meta-tokens as in condition"
            )
            another = gradio.Button("New example", elem_id="another")
        text = gradio.Textbox(label="Prompt", lines=6, max_lines=12, elem_id="prompt")
        with gradio.Row():
            ask = gradio.Button("Ask", variant="primary", elem_id="ask")
            is_covered = gradio.Checkbox(label="Cover the text", elem_id="cover")
            right = gradio.Textbox(
                label="Right answer of this example", interactive=False, elem_id="right"
            )
        note = gradio.Markdown(elem_id="note")
        tokens = gradio.HighlightedText(
            label="Click between tokens", elem_id="tokens", show_inline_category=False, combine_adjacent=False,
            color_map={"meta-token": "#d55e00", "gap": "#e2e0db"}, show_whitespaces=False,
        )  # fmt: skip
        with gradio.Row():
            layer = gradio.Radio(layers, value=layers[-1], label="Layer", elem_id="layer")
            head = gradio.Radio(heads, value=MEAN, label="Head", elem_id="head")
        outputs: list[Any] = [note, tokens]
        with gradio.Row():
            for number, name in enumerate(explorer.models):
                with gradio.Column(min_width=300):
                    gradio.Markdown(f"### {name}", elem_id=f"model-{number}")
                    outputs.append(
                        gradio.Label(
                            label="Next token", num_top_classes=5, elem_id=f"answer-{number}"
                        )
                    )
                    outputs += [gradio.Plot(label="Attention"), gradio.Plot(label="Attention")]
        asked: dict[str, Any] = {
            "fn": shown, "inputs": [text, is_covered, layer, head], "outputs": outputs,
            "trigger_mode": "always_last",  # answer the last question that came in meanwhile
        }  # fmt: skip
        gradio.on([ask.click, text.submit, is_covered.change, layer.change, head.change], **asked)

        # The answers to the last example do not belong to a prompt that is being typed.
        typed: dict[str, Any] = {
            "outputs": [right, note],
            "show_progress": "hidden",
            "trigger_mode": "always_last",
        }
        text.input(lambda: ("", CHANGED), **typed)

        def example(task: str, condition: str) -> tuple[str, str]:
            try:
                return explorer.example(task, condition)
            except UserError as error:
                raise gradio.Error(str(error), print_exception=False) from error

        drawn: dict[str, Any] = {
            "fn": example,
            "inputs": [task, condition],
            "outputs": [text, right],
        }
        gradio.on([another.click, task.change, condition.change, page.load], **drawn).then(**asked)

        def toggle(text: str, event: gradio.SelectData) -> str:
            return explorer.toggled(text, event.index)

        tokens.select(toggle, text, text).then(**asked)
    return page


def serve(page: gradio.Blocks, port: int | None = None) -> str:
    """Serve a page in a thread; its address. `port` None takes the first free one.

    Gradio serves it to this computer alone unless the environment's GRADIO_SERVER_NAME differs, as in a Space. The
    fonts are the computer's own, since Gradio's would be fetched. No run is kept in the browser: Gradio would keep all
    maps, and each answer would take longer than the one before.

    Raises:
        UserError: if the port is taken.
    """
    theme = gradio.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    try:
        _, address, _ = page.launch(
            server_port=port, prevent_thread_lock=True, quiet=True, share=False, footer_links=[], theme=theme,
            run_history=False,
        )  # fmt: skip
    except OSError as error:
        raise UserError(
            f"port {port} is taken; give another." if port else "no port is free."
        ) from error
    return str(address)


def _plot(told: Answer, module: str, layer: int, head: str | int) -> Any:
    """The map of a module, or nothing if the model has no such module."""
    if (module, layer) not in told.observation.attention:
        return gradio.Plot(visible=False)
    inputs = told.observation.attention[module, layer]
    weights = inputs.weights()
    chosen = weights.mean(dim=0) if head == MEAN else weights[min(int(head), len(weights) - 1)]
    labels = [f"{position} {told.tokens[position]}" for position in inputs.positions.tolist()]
    # Of meta-tokens alone.
    second = "Second attention" if len(labels) == len(told.tokens) else "Meta-attention"
    title = "Causal attention" if module == "attention" else second
    return gradio.Plot(heat_map(chosen, labels, title), label=title, visible=True)


def explore(
    models: Annotated[
        list[Path],
        typer.Option(
            "--model", metavar="DIR|hf:NAME", help="A model; repeatable, to compare several."
        ),
    ] = [Path("example")],  # noqa: B006  (typer reads it)
    device: Annotated[Device | None, typer.Option(help="Where the models run.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Number type of the weights.")] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port; by default the first free one.")
    ] = None,
) -> None:
    """Serve a page where you can try prompts with meta-tokens."""
    page = build(models, device=device, dtype=dtype)
    say(f"page: {serve(page, port)}")
    page.block_thread()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(explore)
    main(app)
