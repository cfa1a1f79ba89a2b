"""A cache of a fixed size, and a compiled decoding step, against the cache that grows."""

from typing import Any

import pytest
import torch
from transformers import CompileConfig, StaticCache

from metatokens import MetaGPT2ForCausalLM
from metatokens.errors import UserError
from tests.model.tiny_models import FAMILIES, FAMILY, META, SECOND, Fields, pad, random_rows, tiny_model
from tests.numbers import ROUNDED_DOUBLE

LENGTHS = (7, 11, 4)


def generate(model: MetaGPT2ForCausalLM, **options: Any) -> torch.Tensor:
    """Continuations of rows padded on the left, beyond the end of text."""
    ids, mask = pad(random_rows(LENGTHS, meta_rate=0.25))
    ids = ids.masked_fill(mask == 0, 1)
    return model.generate(ids, attention_mask=mask, **({"max_new_tokens": 13, "min_new_tokens": 13} | options))


def assert_alike(model: MetaGPT2ForCausalLM, **options: Any) -> None:
    found = []
    for kind in ("static", "dynamic"):
        torch.manual_seed(0)
        found.append(generate(model, cache_implementation=kind, disable_compile=True, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("meta_every", [None, 3])
@pytest.mark.parametrize("way", [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@FAMILIES
def test_generation_is_that_of_a_cache_that_grows(fields: Fields, way: dict[str, Any], meta_every: int | None) -> None:
    model = tiny_model(**fields)
    assert_alike(model, meta_every=meta_every, **way)


@SECOND
def test_keys_are_counted_as_in_a_cache_that_grows(second_attention: str) -> None:
    assert_alike(tiny_model(second_attention=second_attention, attention_scale="log_length"), meta_every=1)


@SECOND
def test_a_cache_that_the_user_makes(second_attention: str) -> None:
    model = tiny_model(second_attention=second_attention)
    ids = torch.tensor(random_rows((20, 20), meta_rate=0.4))
    cache = StaticCache(model.config, max_cache_len=24)
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(2):
            parts = [model(part, past_key_values=cache).logits for part in ids.split((9, 1, 1, 5, 4), dim=1)]
            assert (torch.cat(parts, dim=1) - expected).abs().max() < ROUNDED_DOUBLE
            cache.reset()


# Compiling takes two to four seconds, so that the quick run compiles with rotary positions alone.
COMPILED = [(one, pytest.mark.thorough if one["position_embedding"] != "rope" else ()) for one in FAMILY]


@pytest.mark.parametrize(
    ("fields", "is_compiled"),
    [*((one, False) for one in FAMILY), *(pytest.param(one, True, marks=marks) for one, marks in COMPILED)],
)
def test_a_mask_as_long_as_the_cache(fields: Fields, is_compiled: bool) -> None:
    torch._dynamo.reset()
    model = tiny_model(**fields)
    ids = torch.tensor(random_rows((20, 20), meta_rate=0.4))
    cache, mask = StaticCache(model.config, max_cache_len=24), torch.zeros(2, 24, dtype=torch.long)
    parts = []
    with torch.no_grad():
        for first, last in ((0, 9), (9, 10), (10, 20)):
            mask[:, first:last] = 1
            # The second store is made with the first tokens, before anything is compiled.
            run = torch.compile(model, backend="eager") if is_compiled and first else model
            parts.append(run(ids[:, first:last], past_key_values=cache, attention_mask=mask).logits)
        assert (torch.cat(parts, dim=1) - model(ids).logits).abs().max() < ROUNDED_DOUBLE


def test_positions_beyond_a_learned_table_are_refused() -> None:
    model = tiny_model(position_embedding="learned", max_position_embeddings=6)
    cache = StaticCache(model.config, max_cache_len=9)
    model(torch.tensor([[1, META, 3, 4, 5]]), past_key_values=cache)
    with pytest.raises(UserError, match="6 learned positions"):
        model(torch.tensor([[6, 7]]), past_key_values=cache)


@pytest.mark.quick(second_attention=["meta"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, as it compiles
@pytest.mark.parametrize("meta_every", [None, 3])
@SECOND
def test_a_compiled_step_is_one_graph_for_each_number_of_tokens(second_attention: str, meta_every: int | None) -> None:
    torch._dynamo.reset()
    graphs = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = tiny_model(second_attention=second_attention, dtype=torch.float32)
    expected = generate(model, meta_every=meta_every, do_sample=False)
    compiled = CompileConfig(backend=note, fullgraph=True, dynamic=False, mode=None)
    compiled._compile_all_devices = True  # by default transformers compiles nothing on a CPU
    got = generate(
        model, meta_every=meta_every, do_sample=False, cache_implementation="static", compile_config=compiled
    )
    assert torch.equal(got, expected)
    assert len(graphs) == (1 if meta_every is None else 2)  # a text token, alone or with an inserted one
