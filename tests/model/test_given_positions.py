"""Positions that come with a batch: the results are the same, and a compiled model is one graph."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from metatokens import MetaGPT2ForCausalLM
from tests.gradients import gradients_by
from tests.model.agreement import assert_close, assert_gradients_close
from tests.model.text_window import MIXED, SMALL
from tests.model.tiny_models import (
    FAMILIES,
    FAMILY,
    META,
    SECOND,
    Fields,
    pad,
    random_rows,
    tiny_model,
)
from tests.numbers import ROUNDED, ROUNDED_DOUBLE

# torch's own, as it compiles
QUIET = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
LENGTHS = (26, 19, 23, 21)
# Operations that force a device sync, or have a data-dependent shape.
WAITING = ("_local_scalar_dense", "nonzero", "aten.item", "masked_select")
Batch = dict[str, Tensor]


def positions_of(mask: Tensor, columns: int) -> Tensor:
    """The positions of a mask, one by one, padded with -1."""
    rows = [
        [position for position, is_chosen in enumerate(row) if is_chosen] for row in mask.tolist()
    ]
    return torch.tensor([row + [-1] * (columns - len(row)) for row in rows])


def batch_with_positions(seed: int = 0, meta_rate: float = 0.15) -> Batch:
    """A batch padded on the right, with labels at every other text token, and all positions."""
    ids, mask = pad(random_rows(LENGTHS, seed=seed, meta_rate=meta_rate), "right")
    ids = ids.masked_fill(mask == 0, 1)  # as a collator pads: not with meta-tokens
    labels = ids.masked_fill((mask == 0) | (ids % 2 == 0) | (ids == META), -100)
    has_next_label = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))
    return {
        "input_ids": ids,
        "labels": labels,
        "meta_positions": positions_of(ids == META, 24),
        "scored_positions": positions_of(has_next_label, 24),
    }


def without_positions(batch: Batch) -> Batch:
    """The batch for a model that has to find the positions."""
    return {name: batch[name] for name in ("input_ids", "labels")}


@pytest.mark.quick(fields=FAMILY[::4])
@pytest.mark.parametrize("attention_scale", ["constant", "log_length"])
@FAMILIES
def test_a_training_step_is_that_without_positions(fields: Fields, attention_scale: str) -> None:
    model, batch = (
        tiny_model(**fields, attention_scale=attention_scale).train(),
        batch_with_positions(),
    )
    loss, expected = model(**batch).loss, model(**without_positions(batch)).loss
    assert_close(loss, expected, ROUNDED)  # transformers computes the loss in single precision
    assert_gradients_close(gradients_by(model, loss), gradients_by(model, expected), ROUNDED)


@pytest.mark.quick(fields=FAMILY[::4])
@FAMILIES
@torch.no_grad()
def test_logits_are_those_without_positions(fields: Fields) -> None:
    model, batch = tiny_model(**fields), batch_with_positions()
    for count in (0, 1, 3):
        logits = model(
            batch["input_ids"], meta_positions=batch["meta_positions"], logits_to_keep=count
        ).logits
        assert_close(logits, model(batch["input_ids"], logits_to_keep=count).logits, ROUNDED_DOUBLE)


@torch.no_grad()
def test_scored_positions_choose_the_logits() -> None:
    model, batch = tiny_model().train(), batch_with_positions()
    at_labels, everywhere = model(**batch).logits, model(batch["input_ids"]).logits
    assert_close(model.eval()(**batch).logits, everywhere, ROUNDED_DOUBLE)
    for row, positions in enumerate(batch["scored_positions"].tolist()):
        scored = [position for position in positions if position >= 0]
        assert_close(at_labels[row, : len(scored)], everywhere[row, scored], ROUNDED_DOUBLE)


def compiled_with(model: MetaGPT2ForCausalLM, **options: Any) -> tuple[Any, list[Any]]:
    """The compiled model, and a list that gets its graphs, forward and backward."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    return torch.compile(model, backend=backend, **options), graphs


def waits_of(graph: torch.fx.GraphModule) -> list[str]:
    """The operations of a graph for which a device waits."""
    operations = [str(node.target) for node in graph.graph.nodes]
    return [operation for operation in operations if any(word in operation for word in WAITING)]


@pytest.mark.quick(second_attention=["meta"], window=[SMALL])
@QUIET
@pytest.mark.parametrize(
    "window", [{}, SMALL, MIXED], ids=["all text", "text_window", "text_full_layers"]
)
@SECOND
def test_a_compiled_training_step_is_one_graph_for_all_counts(
    second_attention: str, window: Fields
) -> None:
    model = tiny_model(
        **{"num_hidden_layers": 1} | window, second_attention=second_attention
    ).train()
    compiled, graphs = compiled_with(model, fullgraph=True, dynamic=False)
    for seed, meta_rate in enumerate((0.02, 0.1, 0.2)):
        batch = batch_with_positions(seed, meta_rate)
        loss = compiled(**batch).loss
        loss.backward()
        assert_close(loss, model(**without_positions(batch)).loss, ROUNDED)

    assert len(graphs) == 2  # one forward, one backward
    assert [waits_of(graph) for graph in graphs] == [[], []]
