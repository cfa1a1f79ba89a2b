"""Functions that take a model take one that torch.compile or a wrapper for several processes has around it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from metatokens import (
    add_meta_attention,
    freeze_base,
    load_meta,
    save_meta,
    set_text_window,
)
from metatokens.errors import UserError
from metatokens.model.interventions import Intervention, intervene
from metatokens.model.wrappers import unwrapped
from metatokens.retrofit.layers import added_parameters
from tests.retrofit.architectures import (
    META,
    ROWS,
    base,
    error,
    logits,
    retrofitted,
    train_like,
    with_meta_tokens,
)


def compiled(model: nn.Module) -> Any:
    """The model in the wrapper of torch.compile, which traces its graphs when it runs."""
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda model: compiled(model),
    "in parallel": DistributedDataParallel,
    "on several devices": nn.DataParallel,
    "twice": lambda model: compiled(DistributedDataParallel(compiled(model))),
}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """A group of one process, which opens no connection, for the wrappers that need a group."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    """Leave no compiled graphs behind."""
    yield
    torch.compiler.reset()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_is_saved_frozen_and_read_as_itself(wrapper: str, tmp_path: Path) -> None:
    model, plain = retrofitted("llama"), retrofitted("llama")
    wrapped = WRAPPERS[wrapper](model)
    save_meta(plain, tmp_path / "plain")
    save_meta(wrapped, tmp_path / "wrapped")

    assert files(tmp_path / "wrapped") == files(tmp_path / "plain")
    freeze_base(wrapped)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == added_parameters(model).keys()
    set_text_window(wrapped, 5)
    set_text_window(plain, 5)
    ids = with_meta_tokens()
    assert torch.equal(logits(model, ids), logits(plain, ids))


def tiny() -> PreTrainedModel:
    """A base of one block, since tracing takes long."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=ROWS, initializer_range=0.3, **sizes)).eval()


def test_a_compiled_base_gets_meta_attention(tmp_path: Path) -> None:
    """Also one that has run, whose graph knows nothing of it."""
    ids, options = with_meta_tokens(), {"meta_token_id": META, "heads": 2, "head_size": 8}
    expected = train_like(add_meta_attention(tiny(), **options))
    save_meta(expected, tmp_path)
    wrapper = compiled(tiny())
    before = logits(wrapper, ids)

    assert add_meta_attention(wrapper, **options) is wrapper
    train_like(wrapper)
    # Traces nothing, but would run a graph that still holds.
    with torch.compiler.set_stance("eager_on_recompile"):
        after = logits(wrapper, ids)
    assert error(after, logits(expected, ids)) < 1e-5
    assert error(after, before) > 0.01
    other = compiled(tiny())
    assert load_meta(other, tmp_path) is other
    loaded = added_parameters(unwrapped(other))
    assert all(
        torch.equal(loaded[name], weight) for name, weight in added_parameters(expected).items()
    )


def test_what_wrappers_do_not_allow_is_refused(tmp_path: Path) -> None:
    """A wrapper for several processes has counted the parameters; a shard is no weight; a graph runs no new hook."""
    with pytest.raises(UserError, match="cannot be added to a DistributedDataParallel"):
        add_meta_attention(DistributedDataParallel(base("llama")), meta_token_id=META)  # type: ignore[arg-type]
    sharded: Any = retrofitted("llama")
    fully_shard(sharded)
    with pytest.raises(UserError, match="are in parts"):
        save_meta(sharded, tmp_path)
    with (
        pytest.raises(UserError, match="give it without its wrapper"),
        intervene(compiled(retrofitted("llama")), Intervention.parse("no_embed")),
    ):
        pass
