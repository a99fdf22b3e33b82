"""Which chips do the kernels compile for, and how much of their memory do they take? Nothing runs.

    python -m experiments.compile_kernels      (extras aot-tpu, aot-gpu; `make test-aot` has them)

Heads of SmolLM2, LLaMA-7B, Llama-3-8B and Llama-3-70B (a tensor-parallel eighth of it). Compiling
proves that block and scratch memory fit. Rows go to experiments/results/kernels_compiled.csv. About
a minute on 2 CPU cores.
"""

import functools
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from experiments.common import command, report
from experiments.common.report import RESULTS
from pallas_kernels.tree_attention import Implementation, gpu, tpu, tree_attention
from pallas_kernels.tree_attention.block_sizes import DEFAULT
from parallel.aot import gpu_devices, tpu_devices

MODELS = {
    "smollm2-135m": (9, 3, 64),
    "llama-7b": (32, 32, 128),
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b, 1/8": (8, 1, 128),
}
SIZES = [(1, 1024), (21, 8192), (64, 32768), (256, 131072)]
# Bytes of the chip's memory; of a v5e kernel by default; of a Hopper block.
MEMORY = {"v5e:2x2": 16e9, "v5p:2x2x1": 95e9, "v6e:2x2": 32e9, "h100": 80e9, "h200": 141e9}
VMEM, SMEM = 16 * 2**20, 232_448


class Case(NamedTuple):
    """One compilation; `pages` > 1 spreads a row's slots over pages behind a table."""

    target: str
    heads: str
    nodes: int
    slots: int
    pages: int = 1

    @property
    def kernel(self) -> Implementation:
        """The backend of the target."""
        return "gpu" if self.target in ("h100", "h200") else "tpu"


def cases() -> Iterator[Case]:
    """Every model at every size on the smallest TPU and on one GPU; one model on the others."""
    for target in MEMORY:
        names = MODELS if target in ("v5e:2x2", "h100") else ("llama-3-8b",)
        for name in names:
            for nodes, slots in SIZES:
                yield Case(target, name, nodes, slots)
    yield Case("v5e:2x2", "llama-3-8b", 64, 32768, pages=128)
    yield Case("h100", "llama-3-8b", 64, 32768, pages=128)
    # A drafter's cache: one token more than a power of two, rounded up to whole blocks.
    yield Case("v5e:2x2", "smollm2-135m", 8, 576)


@functools.cache
def device(target: str) -> jax.Device:
    """Returns a device that is not here."""
    found = gpu_devices(target) if target in ("h100", "h200") else tpu_devices(target)
    return found[0]


def compiled(case: Case, heads: tuple[int, int, int], dtype: jax.typing.DTypeLike) -> Any:
    """Compiles one call with `heads` (H, K, A)."""
    H, K, A = heads
    N, S, X = case.nodes, case.slots // case.pages, case.pages
    where = SingleDeviceSharding(device(case.target))

    def array(*shape: int, dtype: jax.typing.DTypeLike = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    args = [
        array(1, N, H, A),
        *[array(X, K, S, A)] * 2,
        array(1, dtype=jnp.int32),
        *[array(1, N, K, A)] * 2,
        array(1, N, N, dtype=jnp.bool_),
    ]
    if X > 1:
        args.append(array(1, X, dtype=jnp.int32))
    run = functools.partial(tree_attention, implementation=case.kernel, device_kind="absent")
    return jax.jit(run).lower(*args).compile()


def on_chip_bytes(case: Case, heads: tuple[int, int, int], dtype: jax.typing.DTypeLike) -> int:
    """Returns the VMEM of a TPU kernel, or the shared memory of a GPU's block of threads."""
    H, K, A = heads
    if case.kernel == "gpu":
        blocks = gpu.block_of(case.slots // case.pages, A, DEFAULT.kv)
        return gpu.smem_bytes(*blocks, A, dtype)
    return tpu.vmem_bytes(DEFAULT, case.nodes * H // K, case.nodes, A, jnp.dtype(dtype))


def main(args: flags.FlagValues) -> None:
    """Compiles all cases and writes their rows."""
    # Nothing runs; with a plug-in for absent GPUs installed JAX would look for them.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # how long compilers take is a column
    rows = []
    chosen = list(cases())[:1] if args.smoke else list(cases())
    for case in tqdm(chosen, desc="compile"):
        begin = time.perf_counter()
        memory = compiled(case, MODELS[case.heads], jnp.bfloat16).memory_analysis()
        rows.append(
            {
                **case._asdict(),
                "dtype": "bfloat16",
                "on_chip_bytes": on_chip_bytes(case, MODELS[case.heads], jnp.bfloat16),
                "on_chip_limit": SMEM if case.kernel == "gpu" else VMEM,
                "temporary_bytes": memory.temp_size_in_bytes,
                "compile_s": time.perf_counter() - begin,
            }
        )
    report.write_csv(pathlib.Path(args.out) / "kernels_compiled.csv", rows)
    print(report.table(rows, ("target", "heads", "nodes", "slots", "pages", "on_chip_bytes")))


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("out", str(RESULTS), "Folder for the rows.")
    flags.DEFINE_bool("smoke", False, "One compilation.")


if __name__ == "__main__":
    command.run(main, define_flags)
