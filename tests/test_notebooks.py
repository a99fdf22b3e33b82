"""Every committed notebook runs from top to bottom (smoke mode), in a process of its own."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "clear outputs before committing"
    source = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env=os.environ | {"SMOKE": "1", "MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
