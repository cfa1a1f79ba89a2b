"""`import metatokens` is all that the Auto classes need, in a fresh process and in any order of imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from metatokens import MetaGPT2ForCausalLM, set_text_window
from tests.retrofit.architectures import retrofitted

ORDERS = {
    "ours first": "import metatokens, transformers",
    "ours last, the Auto classes in use": "from transformers import AutoConfig, AutoModelForCausalLM\n"
    "AutoConfig.for_model('gpt2'); AutoModelForCausalLM._model_mapping.keys()\nimport metatokens",
}
PROMPT, OPTIONS = [[5, 6, 319, 7]], {"max_new_tokens": 6, "meta_every": 2, "do_sample": False}


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a retrofitted Llama."""
    folder = tmp_path_factory.mktemp("added")
    retrofitted("llama").save_pretrained(folder)
    return folder


def forgetful() -> PreTrainedModel:
    """A Llama that forgets half of the prompt, but for one key-value head."""
    model = retrofitted("llama")
    set_text_window(model, 2, sinks=0, full_heads=[(0, 1)])
    return model


@pytest.fixture(scope="module")
def forgetful_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with a text window."""
    folder = tmp_path_factory.mktemp("forgetful")
    forgetful().save_pretrained(folder)
    return folder


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that cannot reach the Hub."""
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""} | environment
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=variables
    )


def generated(folder: Path) -> list[list[list[int]]]:
    """What the three models answer in this process."""
    models = (MetaGPT2ForCausalLM.from_pretrained(folder), retrofitted("llama"), forgetful())
    answers = [model.generate(torch.tensor(PROMPT), **OPTIONS).tolist() for model in models]
    assert answers[1] != answers[2]  # the window has an effect
    return answers


@pytest.mark.quick(order=["ours first"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_fresh_process_loads_a_checkpoint(
    folder: Path, added: Path, forgetful_folder: Path, order: str
) -> None:
    code = f"""{ORDERS[order]}
import json, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
folder = {str(folder)!r}
config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
folders = (folder, {str(added)!r}, {str(forgetful_folder)!r})
models = [AutoModelForCausalLM.from_pretrained(path) for path in folders]
assert type(AutoModelForCausalLM.from_config(config)) is type(models[0])
assert tokenizer.meta_token_id == config.meta_token_id
answer = pipeline("text-generation", folder)("the cat", max_new_tokens=3, do_sample=False)
ids = [model.generate(torch.tensor({PROMPT}), **{OPTIONS}).tolist() for model in models]
print(json.dumps([type(config).__name__, *(type(model).__name__ for model in models), answer, ids]))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    *names, answer, ids = json.loads(done.stdout.splitlines()[-1])
    assert names == [
        "MetaGPT2Config",
        "MetaGPT2ForCausalLM",
        "LlamaForCausalLM",
        "LlamaForCausalLM",
    ]
    assert answer[0]["generated_text"].startswith("the cat")
    assert ids == generated(folder)
    assert "is not supported" not in done.stderr


def test_a_server_loads_a_model_by_its_architecture_without_a_warning(
    forgetful_folder: Path, tmp_path: Path
) -> None:
    """As `transformers serve` does."""
    code = f"""
import transformers
config = transformers.AutoConfig.from_pretrained({str(forgetful_folder)!r}, trust_remote_code=True)
architecture = getattr(transformers, config.architectures[0])
model = architecture.from_pretrained({str(forgetful_folder)!r}, trust_remote_code=True)
print(model.config.text_window)
"""
    done = run(code, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"
    assert "to instantiate a model of type" not in done.stderr


def test_a_process_that_does_not_import_the_package_may_trust_the_folders_code(
    folder: Path, added: Path, forgetful_folder: Path, tmp_path: Path
) -> None:
    code = f"""
import json, torch
from transformers import AutoModelForCausalLM
folders = ({str(folder)!r}, {str(added)!r}, {str(forgetful_folder)!r})
models = [AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True) for path in folders]
from metatokens import MetaGPT2ForCausalLM
assert type(models[0]) is MetaGPT2ForCausalLM
models[0].save_pretrained({str(tmp_path / "again")!r})
print(json.dumps([model.generate(torch.tensor({PROMPT}), **{OPTIONS}).tolist() for model in models]))
"""
    done = run(code, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == generated(folder)
    again = tmp_path / "again"  # saves the package's names, and no copy of its code
    assert [path.name for path in again.glob("*.py")] == ["metatokens_classes.py"]
    assert (again / "config.json").read_text() == (folder / "config.json").read_text()
