"""HO-30: what is killed and resumed ends with the same bits; on another mesh, with one curve."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

from experiments.common.loop import LoopConfig, columns, fit
from experiments.data.batches import Batches, Rows
from models.stages import llama_stages, split
from parallel.partition import Composition
from parallel.plan import Plan
from parallel.train import init_state, make_train_step
from tests.common import processes, toys, training_job
from tests.parallel.test_mesh_training import mesh_of


def losses(folder):
    with (folder / "train.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def killed(folder, ready):
    """Starts the job and kills it as soon as `ready()`; returns whether it was still running."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.common.training_job", str(folder)],
        cwd=processes.ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 120
        while not ready() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


def test_killed_at_any_moment(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = jax.tree.leaves(training_job.train(whole))
    checkpoints = broken / "checkpoints"
    # In the middle of writing the first checkpoint, whatever it is called until it is complete ...
    assert killed(broken, lambda: checkpoints.is_dir() and any(checkpoints.iterdir()))
    # ... and once one is complete.
    assert killed(broken, lambda: any((checkpoints / str(n)).is_dir() for n in (2, 4, 6)))
    done = processes.python("-m", "tests.common.training_job", str(broken))
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(broken / "final.npz") as file:
        for a, b in zip(expected, [file[name] for name in file.files], strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)
    assert losses(broken) == losses(whole)
    assert [step for step, _ in losses(whole)] == [*range(1, training_job.STEPS + 1)]


def test_a_longer_run_goes_on_where_the_shorter_ended(tmp_path):
    """Losses of steps 5 to 8 and the optimiser's moments, against an unbroken run."""
    training_job.train(tmp_path / "parts", steps=4, save_every=4)
    parts = training_job.train(tmp_path / "parts", steps=8, save_every=4)
    whole = training_job.train(tmp_path / "whole", steps=8, save_every=4)
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert losses(tmp_path / "parts")[4:] == losses(tmp_path / "whole")[4:]


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    """Four steps on fsdp 4, and the unbroken eight."""
    folder = tmp_path_factory.mktemp("fsdp4")
    training_job.train(folder / "part", 4, 4, mesh_of({"fsdp": 4}))
    return folder / "part", training_job.train(folder / "whole", 8, 4, mesh_of({"fsdp": 4}))


@pytest.mark.parametrize(
    "sizes",
    # Four tensor ranks share two key/value heads, each a copy.
    [{"fsdp": 4}, {"fsdp": 2}, {}, {"data": 2, "tensor": 2}, {"tensor": 4}],
    ids=str,
)
def test_resumed_on_another_mesh(four_steps, tmp_path, sizes):
    """Losses of steps 5 to 8, weights and moments; the same bits on the same mesh."""
    part, whole = four_steps
    shutil.copytree(part, tmp_path / "run")
    mesh = mesh_of(sizes) if sizes else None
    state = training_job.train(tmp_path / "run", 8, 4, mesh)
    tolerance = 0 if sizes == {"fsdp": 4} else 2e-6
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=5 * tolerance, atol=tolerance)
    wanted = [loss for _, loss in losses(part.parent / "whole")]
    found = [loss for _, loss in losses(tmp_path / "run")]
    np.testing.assert_allclose(found, wanted, rtol=1e-6 if tolerance else 0)


LEVELS = {"host": 2, "fsdp": 2}
ACROSS = Composition.parse("all_gather(host) all_gather(fsdp)")
ACROSS_PLAN = Plan(shard=("host", "fsdp"), gather=ACROSS, scatter=ACROSS.mirrored())


@pytest.mark.parametrize("sizes", [{}, pytest.param({"fsdp": 2}, marks=pytest.mark.slow)], ids=str)
def test_shards_over_two_levels_resumed(four_steps, tmp_path, sizes):
    """From one level to two, to another mesh; a device holds a quarter of every weight between."""
    part, whole = four_steps
    run = tmp_path / "run"
    shutil.copytree(part, run)
    state = training_job.train(run, 6, 6, mesh_of(LEVELS), ACROSS_PLAN)
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        if leaf.ndim:
            assert leaf.size == 4 * leaf.addressable_shards[0].data.size
            # Numbered host by host: the first device of the second host has the third quarter.
            starts = [
                max(index.start or 0 for index in each.index) for each in leaf.addressable_shards
            ]
            assert starts == sorted(starts)
            assert len(set(starts)) == 4
    state = training_job.train(run, 8, 8, mesh_of(sizes) if sizes else None)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=2e-6)
    wanted = [loss for _, loss in losses(part.parent / "whole")]
    np.testing.assert_allclose([loss for _, loss in losses(run)], wanted, rtol=1e-6)


def test_another_models_checkpoint_is_refused(tmp_path):
    training_job.train(tmp_path, steps=2)
    model, optimizer = toys.tiny(d_ff=32), optax.adam(1e-2)
    step = make_train_step(llama_stages(model.config), optimizer)
    with pytest.raises(ValueError, match=r"step 2 .* another model or optimiser"):
        fit(step, init_state(split(model), optimizer), [], LoopConfig(4, 1, 0, 1), tmp_path)


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    training_job.train(tmp_path, steps=2)
    with (tmp_path / "train.csv").open("a") as file:
        file.write("2,1.")
    training_job.train(tmp_path, steps=4)
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]


def test_evaluated_at_regular_steps_and_at_the_last(tmp_path):
    """In the middle of a group of steps whose losses are read together."""
    model, optimizer = toys.tiny(vocab_size=96), optax.adam(1e-2)
    step = make_train_step(llama_stages(model.config), optimizer)
    batches = Batches(Rows(training_job.corpus(), 16, None), 4, seed=1)
    fit(
        step,
        init_state(split(model), optimizer),
        batches,
        LoopConfig(5, 5, 2, keep=1),
        tmp_path,
        evaluate=lambda state: {"done": int(state.step)},
    )
    assert columns(tmp_path / "evaluation.csv") == {"step": [2, 4, 5], "done": [2, 4, 5]}
    assert [number for number, _ in losses(tmp_path)] == [1, 2, 3, 4, 5]


def test_useless_settings_are_refused():
    with pytest.raises(ValueError, match="save_every = 0"):
        LoopConfig(4, 0, 0, 1)
