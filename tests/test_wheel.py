"""What is shipped: the wheel holds all that is not code too, and its types are there for a user's program."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        str(folder),
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


def test_the_wheel_holds_every_file_of_the_package(wheel):
    folder = ROOT / "src"
    files = (
        path
        for path in (folder / "metatokens").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    names = {path.relative_to(folder).as_posix() for path in files}
    assert shipped == names
    assert "metatokens/py.typed" in shipped


def test_a_users_program_is_checked_with_the_packages_types(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    wheel.extractall(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    program = tmp_path / "program.py"
    program.write_text(
        "from typing import Any\n"
        "from metatokens import encode_prompt\n"
        "def ids(tokenizer: Any) -> list[int]:\n"
        "    return encode_prompt(tokenizer, 'a _PAUSE_', markers='_PAUSE_')\n"
        "def text(tokenizer: Any) -> str:\n"
        "    return encode_prompt(tokenizer, 'a _PAUSE_')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    check = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(tmp_path / "venv/bin/python"),
    ]
    line = [*check, "--cache-dir", str(tmp_path / "cache"), program.name]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        'program.py:6: error: Incompatible return value type (got "list[int]", expected "str")  [return-value]',
        "Found 1 error in 1 file (checked 1 source file)",
    ]
