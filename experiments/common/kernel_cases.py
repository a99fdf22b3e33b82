"""Shapes on which the attention kernels are checked and timed, and how that is done."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import Implementation, tree_attention

HEADS = {"llama-7b": (32, 32, 128), "llama-3-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
NODES, SLOTS, LOOP, REPEATS = (1, 16, 64, 256), (1024, 8192, 32768), 8, 5
# Caches that one timing walks over: four times the largest on-chip cache (H200: 60 MB).
AT_LEAST = 256 * 2**20


def arguments(heads: tuple[int, int, int], N: int, S: int, seed: int = 0) -> tuple:
    """Returns one row of bfloat16 arguments with a full cache and a random tree."""
    H, K, A = heads
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = ((1, N, H, A), (1, K, S, A), (1, K, S, A), (1, N, K, A), (1, N, K, A))
    q, k, v, tree_k, tree_v = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    mask = np.eye(N, dtype=bool)
    for node in range(1, N):
        mask[node] |= mask[rng.integers(0, node)]
    return q, k, v, jnp.full(1, S, jnp.int32), tree_k, tree_v, jnp.asarray(mask[None])


def error_of(out: jax.Array, args: tuple) -> float:
    """Returns the largest error against the float32 reference, relative to the largest value."""
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
    with jax.default_matmul_precision("highest"):
        want, _ = tree_attention(*wide, implementation="reference")
    return float(jnp.abs(out.astype(jnp.float32) - want).max() / jnp.abs(want).max())


def microseconds(attend: Callable[..., jax.Array], args: tuple) -> float:
    """Returns the median time of a call, from runs of calls that wait for each other.

    Every call of a run has a cache of its own, all together more than the chip keeps.
    """
    q, k, v, *rest = args
    copies = max(LOOP, -(-AT_LEAST // (k.nbytes + v.nbytes)))
    caches = [(k + jnp.asarray(i, k.dtype), v) for i in range(copies)]
    caches = [(k, jnp.copy(v)) for k, v in caches]

    @jax.jit
    def run(q: jax.Array, caches: list, rest: list) -> jax.Array:
        for k, v in caches:
            q = attend(q, k, v, *rest)
        return q

    return 1e6 / copies * median_seconds(lambda: run(q, caches, rest))


def by(implementation: Implementation) -> Callable[..., jax.Array]:
    """Returns one implementation's output as a function of the arguments."""
    return lambda *args: tree_attention(*args, implementation=implementation)[0]


def kernel_here() -> Implementation | None:
    """Returns the kernel that this machine's accelerator runs, or None."""
    device = jax.devices()[0]
    if device.platform == "tpu":
        return "tpu"
    hopper = device.platform == "gpu" and 9 <= float(device.compute_capability) < 10
    return "gpu" if hopper else None


def median_seconds(call: Callable[[], jax.Array]) -> float:
    """Returns the median of REPEATS timings after two warm-ups."""
    times = []
    for repeat in range(REPEATS + 2):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        if repeat >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
