"""A retrofitted model trained by several processes."""

from pathlib import Path

import pytest
import torch

from tests.forked import Run
from tests.retrofit import distributed_gradients
from tests.retrofit.architectures import META, retrofitted

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


# What was added is in float32, beside a frozen base in either.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_are_those_of_one_process(kind: str, dtype: torch.dtype, tmp_path: Path, run_ranks: Run) -> None:
    run_ranks(2, distributed_gradients.compute, kind, dtype, tmp_path / "gradients.pt")
    shared = torch.load(tmp_path / "gradients.pt", weights_only=True)
    ids = distributed_gradients.batch()
    assert [bool((row == META).any()) for row in ids] == [True, True, False, False]
    model = retrofitted("llama", freeze=True, dtype=dtype).train()
    # One process at a time: the share of meta-tokens among the labels is taken to be the same in all of them.
    expected: dict[str, torch.Tensor] = {}
    for half in ids.split(2):
        model.zero_grad()
        for name, gradient in distributed_gradients.gradients(model, half).items():
            expected[name] = expected.get(name, 0) + gradient
    assert shared.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=1e-6)
