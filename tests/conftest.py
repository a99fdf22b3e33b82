"""Eight CPU devices, and JAX told to raise where it would guess."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import pytest

from models.checkpoint import gguf, load_model
from models.tokenizer import load_tokenizer

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
