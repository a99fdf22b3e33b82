"""The kernels compile for chips that are not here, and fit (make test-aot).

Heads of SmolLM2, LLaMA-7B, Llama-3-8B and Llama-3-70B (a tensor-parallel eighth of it). Compiling
proves that block and scratch memory fit; their sizes are computed too, and do not grow with S.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels.tree_attention import gpu, tpu, tree_attention
from pallas_kernels.tree_attention.block_sizes import DEFAULT
from pallas_kernels.tree_attention.rows import HEAD_SIZES
from parallel.aot import gpu_devices, tpu_devices

pytestmark = pytest.mark.aot

MODELS = {
    "smollm2-135m": (9, 3, 64),
    "llama-7b": (32, 32, 128),
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b, 1/8": (8, 1, 128),
}
SIZES = [(1, 1024), (21, 8192), (64, 32768), (256, 131072)]
MEMORY = {"v5e:2x2": 16e9, "v5p:2x2x1": 95e9, "v6e:2x2": 32e9, "h100": 80e9, "h200": 141e9}
VMEM, SMEM = 16 * 2**20, 232_448  # of a v5e kernel by default; of a Hopper block


@functools.cache
def device(name):
    return gpu_devices(name)[0] if name in ("h100", "h200") else tpu_devices(name)[0]


def compiled(target, heads, N, S, dtype, implementation):
    H, K, A = heads
    where = SingleDeviceSharding(device(target))

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    args = (
        array(1, N, H, A),
        *[array(1, K, S, A)] * 2,
        array(1, dtype=jnp.int32),
        *[array(1, N, K, A)] * 2,
        array(1, N, N, dtype=jnp.bool_),
    )
    run = functools.partial(tree_attention, implementation=implementation, device_kind="absent")
    return jax.jit(run).lower(*args).compile()


def cases():
    """Every model at every size on the smallest TPU and on one GPU; one model on the others."""
    for target in MEMORY:
        names = MODELS if target in ("v5e:2x2", "h100") else ("llama-3-8b",)
        for name in names:
            for N, S in SIZES:
                yield pytest.param(target, name, N, S, id=f"{target}-{name}-{N}-{S}")


def test_at_most_sixty():
    assert len(list(cases())) <= 60


@pytest.mark.parametrize(("target", "name", "N", "S"), list(cases()))
def test_compiles_and_fits(target, name, N, S):
    H, K, A = MODELS[name]
    kernel = "gpu" if target in ("h100", "h200") else "tpu"
    program = compiled(target, (H, K, A), N, S, jnp.bfloat16, kernel)
    text = program.as_text()
    assert ("mosaic_gpu" if kernel == "gpu" else "tpu_custom_call") in text
    assert f"pred[1,{N},{S}]" not in text, "no mask as long as the cache"
    if kernel == "gpu":
        assert gpu.smem_bytes(*gpu.block_of(S, A, DEFAULT.kv), A, jnp.bfloat16) <= SMEM
    else:
        assert tpu.vmem_bytes(DEFAULT, N * H // K, N, A, jnp.bfloat16) <= VMEM
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < MEMORY[target]


@pytest.mark.parametrize("A", HEAD_SIZES)
def test_float32_on_a_tpu(A):
    compiled("v5e:2x2", (6, 2, A), 21, 1024, jnp.float32, "tpu")
    assert tpu.vmem_bytes(DEFAULT, 256 * 3, 256, A, jnp.float32) <= VMEM


@pytest.mark.parametrize("A", HEAD_SIZES)
def test_float16_on_a_gpu(A):
    compiled("h100", (6, 2, A), 21, 1024, jnp.float16, "gpu")
    assert gpu.smem_bytes(*gpu.block_of(1024, A, DEFAULT.kv), A, jnp.float16) <= SMEM
