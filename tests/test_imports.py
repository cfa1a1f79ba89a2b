"""Imports go one way, and nothing heavy is loaded before it is needed."""

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import metatokens

PACKAGE = Path(metatokens.__file__).parent
ORDER = [
    "errors",
    "differences",
    "machine",
    "model",
    "files",
    "recipe",
    "records",
    "data",
    "decoder",
    "retrofit",
    "untrusted",
    "checkpoint",
    "tasks",
    "training",
    "evaluation",
    "analysis",
    "looking",
    "shrink",
    "paper",
    "cli",
    "__main__",
]
HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "matplotlib",
    "scipy",
    "numpy",
    "pandas",
}
MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")
)


def stage_of(module):
    """The part of the package that a module name, dotted or with slashes, belongs to; empty for the package itself."""
    return module.replace("/", ".").removeprefix("metatokens").strip(".").split(".")[0]


def tree_of(module):
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def imported(tree):
    """The modules of this package that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "metatokens":
                    yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            parent = node.module or ""
            if parent.split(".")[0] == "metatokens":
                for alias in node.names:
                    name = f"{parent}.{alias.name}"
                    is_module = (
                        parent == "metatokens"
                        or name.partition(".")[2].replace(".", "/") in MODULES
                    )
                    yield name if is_module else parent


def test_every_stage_is_in_the_order():
    stages = {stage_of(module) for module in MODULES}
    assert stages == {*ORDER, "__init__"}


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__"])
def test_imports_go_one_way(module):
    allowed = ORDER[: ORDER.index(stage_of(module)) + 1]
    for name in imported(tree_of(module)):
        assert stage_of(name) in allowed


@pytest.mark.parametrize("module", [module for module in MODULES if stage_of(module) == "model"])
def test_the_model_can_be_taken_by_itself(module):
    for name in imported(tree_of(module)):
        assert stage_of(name) in ("errors", "machine", "model")


def circle_in(trees):
    """Modules that import one another, by name, the first one at the end again; empty if there are none."""
    names = {
        "metatokens." + module.replace("/", ".").removesuffix(".__init__"): module
        for module in trees
    }
    graph: dict[str, set[str]] = {}
    for name, module in names.items():
        imports = set(imported(trees[module]))
        for node in ast.walk(trees[module]):  # a submodule may be imported from its folder
            if isinstance(node, ast.ImportFrom):
                imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        graph[name] = imports & names.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_one_another():
    trees = {module: tree_of(module) for module in MODULES if module != "__init__"}

    assert circle_in(trees) == []


def test_the_check_sees_imports_inside_functions():
    tree = ast.parse(
        "def f():\n    from metatokens.cli import main\n    import metatokens.paper.report.page as page"
    )
    assert sorted(imported(tree)) == ["metatokens.cli", "metatokens.paper.report.page"]


def loaded_by(code):
    """The top-level packages that a fresh process has loaded after running some code."""
    code += "\nimport json, sys\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import metatokens") & HEAVY == set()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_first_look_at_the_command_loads_nothing_heavy(option):
    code = f"""
import sys
from metatokens import cli
sys.argv = ["metatokens", "{option}"]
try:
    cli.main()
except SystemExit as status:
    assert not status.code
"""
    assert loaded_by(code) & HEAVY == set()


def test_the_public_names_load_when_asked_for():
    for name in metatokens.__all__:
        assert getattr(metatokens, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        metatokens.nothing  # noqa: B018


def test_what_a_report_reads_needs_no_model():
    assert loaded_by("import metatokens.records") & HEAVY == set()
    assert (
        loaded_by("import metatokens.paper.frame") & {"torch", "transformers", "matplotlib"}
        == set()
    )
    assert "torch" not in loaded_by("import metatokens.paper.report.page")
