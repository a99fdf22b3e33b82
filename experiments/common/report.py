"""Rows of data with where they come from, and tables printed from rows."""

import csv
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

RESULTS = pathlib.Path(__file__).parents[1] / "results"
_PACKAGES = ("jax", "flax", "numpy")


def provenance() -> dict[str, str]:
    """Returns the columns that every result row carries: commit, machine, versions, command."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    device = jax.devices()[0]
    return {
        "commit": _commit(),
        "machine": f"{_processor()}, {_cores()} cores, {device.platform} {device.device_kind}",
        "versions": ", ".join([f"python {platform.python_version()}", *versions]),
        "command": _command(),
    }


def write_csv(
    path: pathlib.Path, rows: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, str]] = ()
) -> None:
    """Writes rows (equal keys) with their provenance; replaces the file whole or not at all.

    Args:
        path: file to write.
        rows: of this run.
        kept: of earlier runs, see `read_csv`: written first, with the provenance that they have.

    Raises:
        ValueError: if there is no row, or a kept one has other columns.
    """
    if not rows:
        raise ValueError(f"No rows to write to {path}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = provenance()
    columns = [*rows[0], *source]
    for row in kept:
        if [*row] != columns:
            raise ValueError(
                f"{path}: rows of an earlier run have the columns {[*row]}, those of this one "
                f"{columns}: make all of them anew."
            )
    draft = path.with_suffix(".tmp")
    with draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(kept)
        writer.writerows({**row, **source} for row in rows)
    draft.replace(path)


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """Reads the rows of an earlier run as the text that they were written in."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Lays rows out under their column names: text to the left, numbers to the right."""

    def show(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    cells = [list(columns), *[[show(row[column]) for column in columns] for row in rows]]
    width = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    right = [all(isinstance(row[column], int | float) for row in rows) for column in columns]
    return "\n".join(
        "  ".join(
            text.rjust(w) if r else text.ljust(w)
            for text, w, r in zip(line, width, right, strict=True)
        ).rstrip()
        for line in cells
    )


def _commit() -> str:
    """Returns the commit, marked dirty if anything but result rows differs from it."""
    here = RESULTS.parent
    changed = ["status", "--porcelain", "--untracked-files=no", "--", ":/", ":!results"]
    try:
        commit, dirty = (
            subprocess.run(
                ["git", *run], cwd=here, capture_output=True, text=True, check=True
            ).stdout.strip()
            for run in (["rev-parse", "--short=12", "HEAD"], changed)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if dirty else commit


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _command() -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    script = f"python -m {spec.name}" if spec else pathlib.Path(sys.argv[0]).name
    return " ".join([script, *map(shlex.quote, sys.argv[1:])])
