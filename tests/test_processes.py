"""Real processes and real collectives (Gloo, loopback): one curve, clear ends, exact resumption."""

import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import processes, training_job
from tests.test_resume import losses

TIMEOUT = 150


def launched(folder, mesh, count, steps=training_job.STEPS):
    """Starts `count` processes of the training job, a device each."""
    job = ("-m", "tests.training_job", str(folder), mesh)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, *job, f"localhost:{port}", str(count), str(number), str(steps)],
            cwd=processes.ROOT,
            env=processes.one_device(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def finished(running):
    """Waits for all; returns (exit status, errors) of each."""
    out = []
    for process in running:
        try:
            _, errors = process.communicate(timeout=TIMEOUT)
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


@pytest.mark.parametrize(("mesh", "count"), [("data=2", 2), ("fsdp=2,tensor=2", 4)])
def test_many_processes_give_one_curve(tmp_path, alone, mesh, count):
    for status, errors in finished(launched(tmp_path, mesh, count)):
        assert status == 0, errors[-2000:]
    close(losses(tmp_path), alone)


def test_the_death_of_one_ends_the_others(tmp_path):
    """Killed after a checkpoint; the other says why it ends; one device goes on exactly."""
    many, alone = tmp_path / "many", tmp_path / "alone"
    checkpoints = many / "checkpoints"
    first, second = launched(many, "fsdp=2", 2, steps=2000)
    deadline = time.monotonic() + TIMEOUT
    while not (checkpoints / "4").is_dir() and time.monotonic() < deadline:
        time.sleep(0.01)
    second.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    (status, errors), _ = finished([first, second])
    assert status != 0
    assert time.monotonic() - killed < 60
    assert any(word in errors for word in ("heartbeat", "Connection", "Gloo", "coordination"))
    reached = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    training_job.train(many, steps=reached + 4)
    training_job.train(alone, steps=reached + 4)
    close(losses(many), losses(alone))
