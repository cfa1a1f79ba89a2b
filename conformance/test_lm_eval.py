"""lm-evaluation-harness, which takes any causal language model of transformers, on a tiny checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metatokens.data.tokenizer import load_tokenizer, meta_token_id, padded_vocab_size
from metatokens.model.checkpoint import save_model
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM

QUESTIONS = [{"question": "the cat sat on a", "choices": ["mat", "river"], "answer": i % 2} for i in range(6)]
TASKS = {
    "chosen": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n",
    "continued": "output_type: generate_until\ndoc_to_target: '{{choices[answer]}}'\n"
    "generation_kwargs: {max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n",
}
WITH_IMPORT = "import metatokens; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
WITHOUT_IMPORT = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny untrained model and its tokenizer."""
    words = "the cat sat on a mat while two dogs ran over green hills and a river in spring"
    tokenizer = load_tokenizer("train:300", corpus=[words] * 4)
    torch.manual_seed(0)
    config = MetaGPT2Config(
        vocab_size=padded_vocab_size(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        meta_token_id=meta_token_id(tokenizer),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(MetaGPT2ForCausalLM(config), tokenizer, folder)
    return folder


@pytest.mark.parametrize(
    ("program", "further"), [(WITH_IMPORT, ""), (WITHOUT_IMPORT, ",trust_remote_code=True")], ids=["imported", "remote"]
)
def test_lm_eval(program: str, further: str, checkpoint: Path, tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS), encoding="utf-8")
    for name, lines in TASKS.items():
        files = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        text = f"task: {name}\n{files}doc_to_text: question\n{lines}"
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    tasks = ["--tasks", ",".join(TASKS), "--include_path", tmp_path, "--output_path", tmp_path / "out"]
    model = ["--model", "hf", "--device", "cpu", "--model_args", f"pretrained={checkpoint}{further}"]
    caches = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *model, *tasks], env=os.environ | caches, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text(encoding="utf-8"))["results"].keys() == TASKS.keys()
