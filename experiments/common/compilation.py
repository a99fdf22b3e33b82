"""Compiled programs outlive a command: JAX's own persistent cache, and how much came from it."""

import functools
import hashlib
import os
import pathlib
import platform
import sys
import tempfile

import jax
import jaxlib
from absl import logging

# What jax 0.10.2 tells its listeners: every program asked of XLA, and those found on disk.
_ASKED = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"


class Programs:
    """Counts the programs of this process.

    Attributes:
        asked: handed to XLA since the first look.
        cached: of these, found on disk.
        seconds: that making and loading them took, without tracing.
    """

    def __init__(self) -> None:
        """Listens from now on."""
        self.asked, self.cached, self.seconds = 0, 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._took)
        jax.monitoring.register_event_listener(self._happened)

    @property
    def compiled(self) -> int:
        """Those that were not on disk."""
        return self.asked - self.cached

    def told(self) -> str:
        """Returns a line about them."""
        return (
            f"programs: {self.compiled} compiled, {self.cached} from the cache, "
            f"{self.seconds:.1f} s"
        )

    def _took(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _ASKED:
            self.asked, self.seconds = self.asked + 1, self.seconds + duration_secs

    def _happened(self, event: str, **_: str | int) -> None:
        self.cached += event == _FOUND


@functools.cache
def programs() -> Programs:
    """Returns the count of this process, which begins with the first call."""
    return Programs()


def default_folder() -> pathlib.Path:
    """Returns where this platform keeps what a program can make again, for us."""
    home = pathlib.Path.home()
    usual = {"darwin": home / "Library" / "Caches", "win32": home / "AppData" / "Local"}
    chosen = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, home / ".cache")
    return pathlib.Path(chosen) / "espalier"


def use_cache(folder: str | None = None) -> pathlib.Path | None:
    """Lets JAX keep compiled programs on disk; call it before the first of them.

    JAX's keys tell programs, jaxlib versions, XLA flags and devices apart. A folder of its own
    for each version and processor does so once more: code for one CPU may not run on another. A
    folder that cannot be written is a warning. Nothing is ever deleted: remove the folder at will
    (a program that was written in part, on a full disk, is warned of and made anew until then),
    but let nobody else write there, for what it holds is run.

    Processes that this one starts do the same, as far as they call this function too.

    Args:
        folder: holds the folders; None for what JAX's own variable JAX_COMPILATION_CACHE_DIR says,
            else `default_folder`; empty for no cache. JAX_ENABLE_COMPILATION_CACHE=false is
            obeyed.

    Returns:
        The folder in use, None if there is none.
    """
    if folder is None:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(default_folder()))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    jax.config.update("jax_compilation_cache_dir", None)
    allowed = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if not folder or not allowed:
        return None
    path = pathlib.Path(folder).expanduser() / _label()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        logging.warning(
            "Compiled programs are not kept (%s): give --compilation_cache a folder.", error
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return path


@functools.cache
def _label() -> str:
    """Returns a name for this JAX on this kind of processor."""
    seen = [platform.machine(), platform.processor()]
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        seen += sorted({line for line in lines if line.startswith(wanted)})
    kind = hashlib.sha256("\n".join(seen).encode()).hexdigest()[:8]
    return f"jax-{jax.__version__}-{jaxlib.__version__}-{platform.machine()}-{kind}"
