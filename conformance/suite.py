"""Fetch the model test suite of transformers, of the installed version, into an ignored folder.

All of it is in the repository on GitHub. The source distribution has the tests that all models share, without those of
generation, which is what there is where GitHub cannot be reached.
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from importlib.metadata import version
from pathlib import Path

VERSION = version("transformers")
FOLDER = Path(__file__).parents[1] / ".conformance" / VERSION
PACKAGE = FOLDER / "transformers_tests"
ARCHIVE = f"https://github.com/huggingface/transformers/archive/refs/tags/v{VERSION}.tar.gz"

# The tests of exporters need packages that nothing here is exported with.
EXPORT = {"exporters/test_export.py": "class ExportTesterMixin: ...\n"}
# What else the shared tests import and the source distribution lacks.
STAND_INS = EXPORT | {
    "__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
    "utils/test_configuration_utils.py": 'config_common_kwargs = {"dtype": "float16", "output_hidden_states": True}\n',
}


def has_generation() -> bool:
    """Whether the tests of generation are there."""
    return (PACKAGE / "generation" / "test_logits_process.py").exists()


def fetch() -> None:
    """Fetch the suite, unless it is there."""
    if has_generation():
        return
    try:
        with urllib.request.urlopen(ARCHIVE, timeout=60) as answer:
            archive = answer.read()
    except OSError as error:
        print(
            f"GitHub gives no tests of transformers {VERSION} ({error}): those of generation are left out."
        )
        if not PACKAGE.exists():
            unpack(source_distribution(), STAND_INS)
    else:
        unpack(archive, EXPORT)


def source_distribution() -> bytes:
    """The source distribution, downloaded and not built."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        what = ["--no-deps", "--no-binary=transformers", f"transformers=={VERSION}"]
        subprocess.run([*pip, "download", *what, "--dest", folder], check=True)
        (path,) = Path(folder).iterdir()
        return path.read_bytes()


def unpack(archive: bytes, stand_ins: dict[str, str]) -> None:
    """Write the Python files of the archive's `tests` folder and the stand-ins, in place of what is there."""
    whole = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for entry in files:
            _, top, name = [*entry.name.split("/", 2), "", ""][:3]
            if entry.isfile() and top == "tests" and name.endswith(".py"):
                whole[name] = files.extractfile(entry).read()
    whole |= {name: text.encode() for name, text in stand_ins.items()}
    partial = PACKAGE.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name, text in whole.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(text)
    shutil.rmtree(PACKAGE, ignore_errors=True)
    partial.rename(PACKAGE)


if __name__ == "__main__":
    fetch()
