"""Models with meta-attention as ONNX graphs, exported by transformers and run by ONNX Runtime."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.model import tiny_models
from tests.retrofit.architectures import META, error, retrofitted, with_meta_tokens

pytest.importorskip("onnxruntime")
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and onnxscript's own


def own() -> tuple[PreTrainedModel, Tensor, int]:
    rows = torch.tensor(tiny_models.random_rows((31, 31), meta_rate=0.3))
    return tiny_models.tiny_model(dtype=torch.float32), rows, tiny_models.META


@pytest.mark.parametrize("name", ["meta_gpt2", "gpt2", "llama", "qwen3"])
def test_logits_are_those_of_the_model(name: str) -> None:
    """The graph is traced with text alone, and takes other numbers of tokens, with any of meta-tokens."""
    model, rows, meta = (
        own() if name == "meta_gpt2" else (retrofitted(name), with_meta_tokens(), META)
    )
    example = {"input_ids": rows.masked_fill(rows == meta, 1), "use_cache": False}
    exported = OnnxExporter().export(model, example, config=OnnxConfig(dynamic=True))
    for ids in (rows, rows[:, :13], rows[:1]):
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits[..., :meta]
        got = torch.as_tensor(exported(input_ids=ids).logits)[..., :meta]
        assert error(got, expected) < 1e-4
