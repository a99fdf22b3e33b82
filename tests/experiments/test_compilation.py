"""What one process compiled the next one loads; a folder that does not do is only a warning."""

import json
import re

import jax
import numpy as np

from experiments.common import compilation
from tests.common import processes

# One program, whatever happens to the folder before it; says what came of it.
SCRIPT = """
import json, pathlib, shutil, sys, warnings
import jax, numpy as np
from absl import logging
from experiments.common import compilation
folder, fate = sys.argv[1:]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    used = compilation.use_cache(folder)
    programs = compilation.programs()
    if fate == "lost":  # nothing can be read or written any more
        shutil.rmtree(used)
        used.write_text("")
    if fate == "cut":  # a process that was killed while it wrote
        for entry in used.glob("*-cache"):
            entry.write_bytes(entry.read_bytes()[:-9])
    value = jax.jit(lambda x: x * 31 + 17)(np.float32(1)).item()
told = [str(each.message)[:50] for each in seen]
print(json.dumps([value, programs.compiled, programs.cached, used and used.name, told]))
"""


def run(folder, fate: str = "", **environment: str) -> tuple[list, str]:
    """What the script says, and what it complains of."""
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "true"} | environment
    done = processes.python("-c", SCRIPT, str(folder), fate, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


def test_the_second_process_compiles_nothing(tmp_path):
    (value, compiled, cached, name, told), _ = run(tmp_path)
    assert (value, compiled, cached, told) == (48, 1, 0, [])
    assert jax.__version__ in name
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert run(tmp_path)[0] == [48, 0, 1, name, []]
    # A program that was written in part is made anew, and its bytes are never run.
    (value, compiled, cached, _, told), _ = run(tmp_path, "cut")
    assert (value, compiled, cached) == (48, 1, 0)
    assert told == ["Error reading persistent compilation cache entry fo"[:50]]
    # Other flags, other programs.
    flags = f"{processes.one_device()['XLA_FLAGS']} --xla_cpu_enable_fast_min_max=true"
    assert run(tmp_path, XLA_FLAGS=flags)[0][:3] == [48, 1, 0]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    """Below a file, since root may write anywhere; and one that is lost on the way."""
    (tmp_path / "file").write_text("")
    said, errors = run(tmp_path / "file" / "below")
    assert said == [48, 1, 0, None, []]
    assert "Compiled programs are not kept" in errors
    said, _ = run(tmp_path / "folder", "lost")
    assert said[:3] == [48, 1, 0]
    assert [words[:16] for words in said[4]] == ["Error reading pe"]


def test_no_cache(tmp_path, monkeypatch):
    """An empty folder and JAX's own switch (which conftest uses) leave none."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "told"))
    assert compilation.use_cache() is None
    assert compilation.use_cache("") is None
    assert not [*tmp_path.iterdir()]


def test_every_version_and_processor_has_a_folder(monkeypatch):
    label = compilation._label.__wrapped__
    here = label()
    assert label() == here
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert label() != here
    monkeypatch.undo()
    monkeypatch.setattr(compilation.platform, "processor", lambda: "another")
    assert label() != here


def test_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation.default_folder() == tmp_path / "espalier"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(compilation.sys, "platform", "linux")
    assert compilation.default_folder() == tmp_path / ".cache" / "espalier"


def test_the_count():
    programs = compilation.Programs()
    jax.jit(lambda x: x * 31 + 19)(np.float32(1))
    assert (programs.compiled, programs.cached) == (1, 0)
    assert re.fullmatch(r"programs: 1 compiled, 0 from the cache, \d+\.\d s", programs.told())


def test_every_notebook_has_the_cache():
    for path in (processes.ROOT / "experiments" / "notebooks").glob("*.ipynb"):
        assert '"compilation.use_cache()' in path.read_text(encoding="utf-8"), path.name
