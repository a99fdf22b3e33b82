"""Every committed notebook runs from top to bottom (smoke mode), in a process of its own."""

import json

import pytest

from tests.common import processes

NOTEBOOKS = sorted((processes.ROOT / "experiments" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "clear outputs before committing"
    source = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    done = processes.python("-c", source, SMOKE="1", MPLBACKEND="Agg")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
