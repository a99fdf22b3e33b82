"""Eight CPU devices unless the caller says otherwise, and JAX told to raise, not to guess."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nothing is written to the user's folder; tests of the cache give commands one of their own.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import jax.numpy as jnp
import pytest

from models.checkpoint import gguf, load_model
from models.tokenizer import load_tokenizer

# Read when JAX first asks for a device.
flags = os.environ.get("XLA_FLAGS", "")
if "host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker and hasattr(os, "sched_setaffinity"):
    # Its own cores for each of pytest-xdist's processes: XLA's thread pools would fight for them.
    cores, workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) :: workers] or cores)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def smollm2_path():
    """The packaged SmolLM2-135M; its absence is a failure, since the Makefile installs it."""
    return gguf.packaged_smollm2()


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """The model in float32, and its tokenizer."""
    return load_model(smollm2_path, jnp.float32), load_tokenizer(smollm2_path)
