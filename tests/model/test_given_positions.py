"""Positions that come with a batch: the results are the same, and a compiled model is one graph."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from metatokens import MetaGPT2ForCausalLM
from tests.gradients import far
from tests.model.tiny_models import FAMILIES, META, SECOND, Fields, pad, random_rows, tiny_model
from tests.numbers import ROUNDED, ROUNDED_DOUBLE

# torch's own, as it compiles
QUIET = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
ROWS = random_rows((26, 19, 23, 21), meta_rate=0.15)
# Operations that force a device sync, or have a data-dependent shape.
WAITING = ("_local_scalar_dense", "nonzero", "aten.item", "masked_select")


def places(mask: Tensor, columns: int) -> Tensor:
    """The positions of a mask, found one by one, padded with -1."""
    rows = [[position for position, chosen in enumerate(row) if chosen] for row in mask.tolist()]
    return torch.tensor([row + [-1] * (columns - len(row)) for row in rows])


def batch(rows: list[list[int]], columns: int = 16, label_columns: int = 24) -> dict[str, Tensor]:
    """A batch padded on the right, with labels at every other text token and all positions."""
    ids, mask = pad(rows, "right")
    ids = ids.masked_fill(mask == 0, 1)  # as a collator pads: not with meta-tokens
    labels = ids.masked_fill((mask == 0) | (ids % 2 == 0) | (ids == META), -100)
    ahead = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))
    return {
        "input_ids": ids,
        "labels": labels,
        "meta_positions": places(ids == META, columns),
        "scored_positions": places(ahead, label_columns),
    }


def found(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch without its positions, so that the model has to find them."""
    return {name: given[name] for name in ("input_ids", "labels")}


def gradients(model: MetaGPT2ForCausalLM, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("attention_scale", ["constant", "log_length"])
@pytest.mark.parametrize("label_columns", [13, 24])
@FAMILIES
def test_a_training_step_is_that_of_positions_found(fields: Fields, label_columns: int, attention_scale: str) -> None:
    model = tiny_model(**fields, attention_scale=attention_scale).train()
    given = batch(ROWS, 8, label_columns)
    if label_columns == 13:
        given["scored_positions"] = given["scored_positions"][:, :4]
        for row, kept in enumerate(given["scored_positions"].tolist()):
            gone = [place for place in range(1, 26) if place - 1 not in kept]
            given["labels"][row, gone] = -100
    loss, expected = model(**given).loss, model(**found(given)).loss
    assert far(loss, expected) < ROUNDED  # transformers computes the loss in single precision
    other = gradients(model, expected)
    for name, gradient in gradients(model, model(**given).loss).items():
        assert far(gradient, other[name]) < ROUNDED, name


@FAMILIES
def test_logits_are_those_of_positions_found(fields: Fields) -> None:
    model = tiny_model(**fields)
    given = batch(ROWS)
    with torch.no_grad():
        for keep in (0, 1, 3):
            logits = model(given["input_ids"], meta_positions=given["meta_positions"], logits_to_keep=keep).logits
            assert (logits - model(given["input_ids"], logits_to_keep=keep).logits).abs().max() < ROUNDED_DOUBLE


def compiled_with(model: MetaGPT2ForCausalLM, **options: Any) -> tuple[Any, list[Any]]:
    """The compiled model, and a list that gets its graphs, forward and backward."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    return torch.compile(model, backend=backend, **({"dynamic": False} | options)), graphs


def waits(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if any(word in str(node.target) for word in WAITING)]


def batches(count: int) -> list[dict[str, Tensor]]:
    """Batches of one shape, with different numbers of meta-tokens and labels."""
    return [
        batch(random_rows((26, 19, 23, 21), seed=seed, meta_rate=0.02 * (seed % 10 + 1)), 24, 24)
        for seed in range(count)
    ]


@pytest.mark.quick(second_attention=["meta"])
@QUIET
@SECOND
def test_a_compiled_training_step_is_one_graph_for_all_counts(second_attention: str) -> None:
    model = tiny_model(second_attention=second_attention).train()
    compiled, graphs = compiled_with(model, fullgraph=True)
    counts = set()
    for number, given in enumerate(batches(20)):
        counts.add((int((given["meta_positions"] >= 0).sum()), int((given["scored_positions"] >= 0).sum())))
        loss = compiled(**given).loss
        loss.backward()
        if number % 10 == 0:
            assert far(loss, model(**found(given)).loss) < ROUNDED
    assert len(counts) > 12
    assert len(graphs) == 2  # one forward, one backward
    assert [waits(graph) for graph in graphs] == [[], []]


@QUIET
def test_a_compiled_evaluation_is_one_graph_for_all_counts() -> None:
    model = tiny_model()
    compiled, graphs = compiled_with(model, fullgraph=True)
    with torch.no_grad():
        for given in batches(20):
            own = {name: given[name] for name in ("input_ids", "labels", "meta_positions")}
            outputs = compiled(**own, use_cache=False)
            assert (outputs.logits - model(given["input_ids"]).logits).abs().max() < ROUNDED_DOUBLE
    assert len(graphs) == 1
    assert waits(graphs[0]) == []


@pytest.mark.slow
@QUIET
@SECOND
def test_without_positions_a_compiled_pass_is_one_graph_for_all_lengths_and_counts(second_attention: str) -> None:
    """Meta-attention takes its dense form; without compilation, its gathered one."""
    model = tiny_model(second_attention=second_attention)
    compiled, graphs = compiled_with(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for seed, lengths in enumerate([(26, 19), (9, 12), (26, 26), (31, 2)]):
            ids, mask = pad(random_rows(lengths, seed=seed, meta_rate=0.3 * (seed % 2)))
            got = compiled(ids, attention_mask=mask, use_cache=False).logits
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            assert (got - expected)[mask.bool()].abs().max() < ROUNDED_DOUBLE
    assert len(graphs) == 1
    assert waits(graphs[0]) == []


@QUIET
def test_without_positions_the_model_waits() -> None:
    """A model that finds its rows would fail the tests above."""
    compiled, graphs = compiled_with(tiny_model().train())
    compiled(**found(batch(ROWS))).loss.backward()
    assert len(graphs) > 2


def test_the_forward_pass_can_be_exported() -> None:
    model, given = tiny_model(), batch(ROWS)
    own = {"input_ids": given["input_ids"], "meta_positions": given["meta_positions"], "use_cache": False}
    program = torch.export.export(model, (), own, strict=False)
    assert waits(program.graph_module) == []
    other = batch(random_rows((26, 19, 23, 21), seed=5, meta_rate=0.3))
    own |= {name: other[name] for name in ("input_ids", "meta_positions")}
    with torch.no_grad():
        assert (program.module()(**own).logits - model(**own).logits).abs().max() < ROUNDED_DOUBLE


@pytest.mark.quick(second_attention=["meta"])
@pytest.mark.parametrize("text_window", [None, 6])
@SECOND
def test_without_positions_a_pass_can_be_exported(second_attention: str, text_window: int | None) -> None:
    model = tiny_model(second_attention=second_attention, text_window=text_window)
    shapes = {"input_ids": {1: torch.export.Dim.DYNAMIC}, "use_cache": None}
    own = {"input_ids": torch.tensor(random_rows((20, 20), meta_rate=0.0)), "use_cache": False}
    program = torch.export.export(model, (), own, dynamic_shapes=shapes)
    assert waits(program.graph_module) == []
    for length in (20, 31):
        ids = torch.tensor(random_rows((length, length), meta_rate=0.3))
        with torch.no_grad():
            got = program.module()(input_ids=ids, use_cache=False).logits
            assert (got - model(ids, use_cache=False).logits).abs().max() < ROUNDED_DOUBLE
