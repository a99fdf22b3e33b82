"""Scripts and notebooks run in processes of their own."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]


def one_device() -> dict[str, str]:
    """Returns an environment in which a process has one CPU device."""
    # Never empty: XLA takes that for the name of a file.
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    return os.environ | {"XLA_FLAGS": flags}


def python(
    *arguments: str, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess:
    """Runs Python from the repository's root on one device, not on conftest's eight."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=one_device() | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# A start of Python and JAX takes longer than a refusal, so one process does all of them.
_REFUSALS = """
import contextlib, json, sys
from absl import flags
from absl.testing import flagsaver
from experiments import {script} as script
script.define_flags()
for given in json.load(sys.stdin):
    with flagsaver.flagsaver():
        flags.FLAGS(["script", *given])
        try:
            with contextlib.redirect_stdout(sys.stderr):
                script.main(flags.FLAGS)
        except SystemExit as stop:
            print(json.dumps(str(stop.code)))
"""


def refusals(script: str, commands: Sequence[Sequence[str]]) -> list[str]:
    """Returns with what words a script ends for each list of flags; other exceptions fail."""
    done = subprocess.run(
        [sys.executable, "-c", _REFUSALS.format(script=script)],
        input=json.dumps(commands),
        cwd=ROOT,
        env=one_device(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
