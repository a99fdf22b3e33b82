"""The kernels compile for chips that are not here, and fit (make test-aot)."""

import re

import jax.numpy as jnp
import pytest

from experiments.compile_kernels import (
    MEMORY,
    MODELS,
    SMEM,
    VMEM,
    Case,
    cases,
    compiled,
    on_chip_bytes,
)
from pallas_kernels.tree_attention.rows import HEAD_SIZES

pytestmark = pytest.mark.aot

CASES = list(cases())


def test_at_most_sixty():
    """With the whole steps of test_step.py."""
    assert len(CASES) + 2 * len(HEAD_SIZES) <= 60 - 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_and_fits(case):
    program = compiled(case, MODELS[case.heads], jnp.bfloat16)
    text = program.as_text()
    assert ("mosaic_gpu" if case.kernel == "gpu" else "tpu_custom_call") in text
    N, S, A = case.nodes, case.slots, MODELS[case.heads][2]
    if N not in (1, A):  # where heads are as wide as the tree, the cache itself looks like that
        assert not re.search(rf"[\[,](?:{N},{S}|{S},{N})[\],]", text), "nodes by slots"
    limit = SMEM if case.kernel == "gpu" else VMEM
    assert on_chip_bytes(case, MODELS[case.heads], jnp.bfloat16) <= limit
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < MEMORY[case.target]


@pytest.mark.parametrize("A", HEAD_SIZES)
def test_float32_on_a_tpu(A):
    compiled(Case("v5e:2x2", "", 21, 1024), (6, 2, A), jnp.float32)
    assert on_chip_bytes(Case("v5e:2x2", "", 256, 1024), (6, 2, A), jnp.float32) <= VMEM


@pytest.mark.parametrize("A", HEAD_SIZES)
def test_float16_on_a_gpu(A):
    compiled(Case("h100", "", 21, 1024), (6, 2, A), jnp.float16)
    assert on_chip_bytes(Case("h100", "", 21, 1024), (6, 2, A), jnp.float16) <= SMEM
