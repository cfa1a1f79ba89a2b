"""`import metatokens` is all that the Auto classes need, in a fresh process and in any order of imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ORDERS = {
    "ours first": "import metatokens, transformers",
    "ours last": "import transformers, transformers.models.auto.modeling_auto, metatokens",
    "ours last, the Auto classes in use": "from transformers import AutoConfig, AutoModelForCausalLM\n"
    "AutoConfig.for_model('gpt2'); AutoModelForCausalLM._model_mapping.keys()\nimport metatokens",
}


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that cannot reach the Hub."""
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=variables)


@pytest.mark.parametrize(
    "order",
    ["ours first", pytest.param("ours last", marks=pytest.mark.thorough), "ours last, the Auto classes in use"],
)
def test_a_fresh_process_loads_a_checkpoint(folder: Path, order: str) -> None:
    code = f"""{ORDERS[order]}
import json
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
folder = {str(folder)!r}
config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
assert type(AutoModelForCausalLM.from_config(config)) is type(model)
answer = pipeline("text-generation", folder)("the cat", max_new_tokens=3, do_sample=False)
knows_meta = tokenizer.meta_token_id == config.meta_token_id
print(json.dumps([type(config).__name__, type(model).__name__, knows_meta, answer]))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    config, model, knows_meta, answer = json.loads(done.stdout.splitlines()[-1])
    assert (config, model, knows_meta) == ("MetaGPT2Config", "MetaGPT2ForCausalLM", True)
    assert answer[0]["generated_text"].startswith("the cat")
    assert "is not supported" not in done.stderr


def test_a_process_that_does_not_import_the_package_may_trust_the_folders_code(folder: Path, tmp_path: Path) -> None:
    code = f"""
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
from metatokens import MetaGPT2ForCausalLM
assert type(model) is MetaGPT2ForCausalLM
model.save_pretrained({str(tmp_path / "again")!r})
"""
    done = run(code, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    again = tmp_path / "again"  # saves the package's names, and no copy of its code
    assert [path.name for path in again.glob("*.py")] == ["metatokens_classes.py"]
    assert (again / "config.json").read_text() == (folder / "config.json").read_text()


def test_without_the_import_transformers_says_what_would_help(folder: Path) -> None:
    code = f"from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained({str(folder)!r})"
    done = run(code)
    assert done.returncode == 1
    assert "trust_remote_code=True" in done.stderr.splitlines()[-1]
