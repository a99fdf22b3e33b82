"""Real processes and real collectives (Gloo, loopback): one curve, clear ends, exact resumption."""

import csv
import email
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from parallel import launch
from tests.common import processes, training_job
from tests.parallel.test_resume import losses

TIMEOUT = 280


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def launched(folder, mesh, count, steps=training_job.STEPS, *shard):
    """Starts `count` processes of the training job, a device each."""
    job, port = ("-m", "tests.common.training_job", str(folder), mesh), free_port()
    return [
        subprocess.Popen(
            [
                sys.executable,
                *job,
                f"localhost:{port}",
                str(count),
                str(number),
                str(steps),
                *shard,
            ],
            cwd=processes.ROOT,
            env=processes.one_device(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def finished(running, timeout=TIMEOUT):
    """Waits for all; returns (exit status, errors) of each."""
    out = []
    for process in running:
        try:
            _, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
        out.append((process.returncode, errors))
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The curve of one process without a mesh."""
    folder = tmp_path_factory.mktemp("alone")
    training_job.train(folder)
    return losses(folder)


def close(found, wanted):
    assert [step for step, _ in found] == [step for step, _ in wanted]
    np.testing.assert_allclose([x for _, x in found], [x for _, x in wanted], rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "count", "shard"),
    [
        ("data=2", 2, ()),
        pytest.param("fsdp=2,tensor=2", 4, (), marks=pytest.mark.slow),
        # Six query and two key/value heads: padded, and with copies.
        pytest.param("tensor=4", 4, (), marks=pytest.mark.slow),
        pytest.param("host=2,fsdp=2", 4, ("host,fsdp",), marks=pytest.mark.slow),
    ],
)
def test_many_processes_give_one_curve(tmp_path, alone, mesh, count, shard):
    running = launched(tmp_path, mesh, count, training_job.STEPS, *shard)
    for status, errors in finished(running):
        assert status == 0, errors[-2000:]
    close(losses(tmp_path), alone)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_one_ends_the_others(tmp_path, victim):
    """Killed after a checkpoint, the coordinator or not; two more go on, and one device too."""
    many, alone = tmp_path / "many", tmp_path / "alone"
    checkpoints = many / "checkpoints"
    running = launched(many, "fsdp=2", 2, steps=2000)
    deadline = time.monotonic() + TIMEOUT
    while not (checkpoints / "4").is_dir() and time.monotonic() < deadline:
        time.sleep(0.01)
    running[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    status, errors = finished(running)[1 - victim]
    assert status != 0
    assert time.monotonic() - killed < 60
    # Our words where a collective failed; JAX's own where its coordinator did.
    assert "lost the others: one has ended" in errors or "distributed service" in errors
    reached = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    if victim:
        for status, errors in finished(launched(many, "data=2", 2, steps=reached + 4)):
            assert status == 0, errors[-2000:]
    else:
        training_job.train(many, steps=reached + 4)
    training_job.train(alone, steps=reached + 4)
    close(losses(many), losses(alone))


def test_a_wrong_collective_is_seen(monkeypatch):
    """The self-check at the start."""
    mesh = launch.make_mesh({"data": 4, "tensor": 2})
    launch.check_collectives(mesh)
    monkeypatch.setattr(launch.collectives, "_ring_scatter", lambda x, name, axis: x[: x.size // 2])
    with pytest.raises(RuntimeError, match=r"ring_scatter over mesh axes \('data',\)"):
        launch.check_collectives(launch.make_mesh({"tensor": 2, "data": 4}))


def test_shards_over_two_axes_are_checked(monkeypatch):
    """A group that is neither one axis nor all of them; the first one that is wrong is named."""
    mesh = launch.make_mesh({"host": 2, "fsdp": 2, "tensor": 2})
    whole = launch.collectives.all_gather

    def wrong(x, axis, axes, how):
        found = whole(x, axis, axes, how)
        return found if axes != ("host", "fsdp") else found + 1

    monkeypatch.setattr(launch.collectives, "all_gather", wrong)
    launch.check_collectives(mesh)
    with pytest.raises(RuntimeError, match=r"all_gather over mesh axes \('host', 'fsdp'\) \(4 dev"):
        launch.check_collectives(mesh, ("host", "fsdp"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((None, 2, 0), "give all three"),
        (("localhost:1", 2, 2), r"must lie in 0\.\.1"),
        (("localhost:1", 2, 0, True), "or let them be detected"),
    ],
)
def test_processes_are_named_whole_or_not(given, words):
    with pytest.raises(ValueError, match=words):
        launch.start(*given)


@pytest.mark.slow
def test_a_drafter_trained_by_two_processes(tmp_path):
    """The code pair's drafter, 60 steps on one package, same order: rank-1 success within 0.01."""
    train = ("-m", "experiments.train", f"--data=text:{pathlib.Path(email.__file__).parent}")
    done = processes.python(
        *train, "--config=code_target", "--steps=40", f"--out={tmp_path / 'target'}", timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    target = f"--target={tmp_path / 'target' / 'model'}"
    job = (*train, "--config=code_drafter", "--steps=60", target)
    done = processes.python(*job, f"--out={tmp_path / 'one'}", timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    many = (*job, f"--out={tmp_path / 'two'}", "--mesh=data=2", "--num_processes=2")
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, *many, f"--coordinator=localhost:{port}", f"--process_id={number}"],
            cwd=processes.ROOT,
            env=processes.one_device(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for status, errors in finished(running, timeout=900):
        assert status == 0, errors[-2000:]
    one, two = (scores(tmp_path / name) for name in ("one", "two"))
    assert one["rank_1"] > 0.02
    assert abs(one["rank_1"] - two["rank_1"]) <= 0.01
    assert abs(one["tokens_per_step"] - two["tokens_per_step"]) <= 0.05
    close(losses(tmp_path / "two")[:10], losses(tmp_path / "one")[:10])


def scores(folder):
    with (folder / "evaluation.csv").open(newline="") as file:
        *_, last = csv.DictReader(file)
    return {name: float(value) for name, value in last.items()}
