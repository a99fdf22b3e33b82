"""Scripts and notebooks run in processes of their own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python from the repository's root on one device, not on conftest's eight."""
    flags = os.environ["XLA_FLAGS"]
    # Never empty: XLA takes that for the name of a file.
    flags = flags.replace("device_count=8", "device_count=1")
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
