"""Scripts and notebooks run in processes of their own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


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
