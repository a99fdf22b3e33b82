"""Imports go down the list of the README, files stay small, what is public is explained."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MAY_IMPORT = {
    "experiments": {"experiments", "spec", "models", "parallel", "pallas_kernels"},
    "spec": {"spec", "models", "parallel"},
    "models": {"models", "parallel", "pallas_kernels"},
    "parallel": {"parallel"},
    "pallas_kernels": {"pallas_kernels"},
}
FILES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))
BACKENDS = {"tpu.py", "gpu.py"}  # a kernel's backend may be longer


def imported(source):
    """Returns the first name of every absolute import, wherever in the file it stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: name the room"
            names.add(node.module.split(".")[0])
    return names


def upward(room, source):
    """Returns the imports of our own folders that a file of `room` may not make."""
    ours = set(MAY_IMPORT) | {"tests"}
    return (imported(source) & ours) - MAY_IMPORT[room]


def modules(source):
    """Returns the dotted name of every module or member imported, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def of_package(source, package):
    """Returns what a file imports from a package, by dotted name."""
    return {name for name in modules(source) if f"{name}.".startswith(f"{package}.")}


def test_what_runs_never_imports_what_plans():
    for path in (ROOT / "parallel").glob("*.py"):
        assert not of_package(path.read_text(encoding="utf-8"), "parallel.planner"), path.name
    assert of_package("from parallel.planner import cost", "parallel.planner")
    assert of_package("import parallel.planner.cost", "parallel.planner")


COMMANDS = sorted(path for path in (ROOT / "experiments").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_command(path):
    """A file at the top of experiments/ is a command that nothing else needs."""
    source = path.read_text(encoding="utf-8")
    assert '"smoke"' in source
    assert source.endswith('if __name__ == "__main__":\n    command.run(main, define_flags)\n')
    assert f"python -m experiments.{path.stem}" in ast.get_docstring(ast.parse(source))
    name = f"experiments.{path.stem}"
    users = [other for other in FILES if of_package(other.read_text(encoding="utf-8"), name)]
    assert not users


def test_there_are_files():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file(path):
    source = path.read_text(encoding="utf-8")
    assert not upward(path.relative_to(ROOT).parts[0], source)
    limit = 600 if path.name in BACKENDS and "pallas_kernels" in path.parts else 400
    assert source.count("\n") <= limit
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "no module docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_a_bad_import_is_seen():
    assert upward("models", "from spec.tree import TokenTree") == {"spec"}
    assert upward("parallel", "def f():\n    import models.config") == {"models"}
    assert upward("spec", "import pallas_kernels") == {"pallas_kernels"}
    assert upward("experiments", "import tests.common.toys") == {"tests"}
    assert not upward("spec", "import models, parallel.comm, numpy")


def test_attention_is_the_only_door_to_the_kernels():
    """But for the scripts that measure the kernels themselves."""
    doors = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if "pallas_kernels" not in path.parts
        and "pallas_kernels" in imported(path.read_text(encoding="utf-8"))
    }
    scripts = {f"experiments/{name}_kernels.py" for name in ("bench", "compile", "tune")}
    scripts.add("experiments/common/kernel_cases.py")
    assert doors == {"models/attention.py"} | scripts
