"""Is the tree-attention kernel right, and how near is it to the memory's speed? One accelerator.

    python -m experiments.bench_kernels        (an accelerator; under five minutes)
    python -m experiments.bench_kernels --smoke   (any machine: numerics of tiny shapes only)

Each shape is checked against the float32 reference, then timed: the kernel, XLA's attention (the
reference in bfloat16), and the floor, K/V bytes over the measured copy bandwidth. Rows go to
experiments/results/kernels.csv. No device has been measured yet: these kernels have been compiled
and interpreted only. Aim on an H200: 80% of the floor for S >= 8k and N <= 64.
"""

import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.experimental.pallas import tpu as pltpu
from tqdm import tqdm

from experiments import report
from pallas_kernels.tree_attention import Implementation, tree_attention

RESULTS = pathlib.Path(__file__).parent / "results"
HEADS = {"llama-7b": (32, 32, 128), "llama-3-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
NODES, SLOTS, LOOP, REPEATS = (1, 16, 64, 256), (1024, 8192, 32768), 16, 5
COLUMNS = ("heads", "nodes", "slots", "error", "kernel_us", "xla_us", "floor_us", "of_floor")


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("out", str(RESULTS), "Folder for the rows.")
    flags.DEFINE_bool("smoke", False, "Tiny shapes, numerics only; the TPU kernel is interpreted.")


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


def microseconds(implementation: Implementation, args: tuple) -> float:
    """Returns the median time of a call, from runs of LOOP calls that wait for each other."""
    rest = args[1:]

    @jax.jit
    def run(q: jax.Array, rest: tuple) -> jax.Array:
        def body(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            return tree_attention(q, *rest, implementation=implementation)[0], None

        return jax.lax.scan(body, q, None, length=LOOP)[0]

    return 1e6 / LOOP * median_seconds(lambda: run(args[0], rest))


def median_seconds(call: Callable[[], jax.Array]) -> float:
    """Returns the median of REPEATS timings after two warm-ups."""
    times = []
    for repeat in range(REPEATS + 2):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        if repeat >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Returns bytes read and written a second by a large copy that adds one."""
    x = jnp.zeros(2**28, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_seconds(lambda: add(x))


def smoke() -> list[dict]:
    """Checks the reference, and the TPU kernel in interpret mode, on tiny shapes."""
    rows: list[dict] = []
    for N, S in ((1, 64), (5, 128)):
        args = arguments((2, 1, 64), N, S)
        with pltpu.force_tpu_interpret_mode():
            interpreted, _ = tree_attention(*args, implementation="tpu")
        plain, _ = tree_attention(*args, implementation="reference")
        for name, out in (("reference", plain), ("tpu, interpreted", interpreted)):
            rows.append({"kernel": name, "nodes": N, "slots": S, "error": error_of(out, args)})
    return rows


def bench(kernel: Implementation) -> list[dict]:
    """Checks and times every shape."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    rows = []
    cases = [(name, N, S) for name in HEADS for S in SLOTS for N in NODES]
    for name, N, S in tqdm(cases, desc="shapes"):
        args = arguments(HEADS[name], N, S)
        out, _ = jax.jit(lambda *a: tree_attention(*a, implementation=kernel))(*args)
        floor = 1e6 * (args[1].nbytes + args[2].nbytes) / bandwidth
        kernel_us, xla_us = microseconds(kernel, args), microseconds("reference", args)
        rows.append(
            {
                "heads": name,
                "nodes": N,
                "slots": S,
                "error": error_of(out, args),
                "kernel_us": kernel_us,
                "xla_us": xla_us,
                "floor_us": floor,
                "of_floor": floor / kernel_us,
                "bandwidth_gb_s": bandwidth / 1e9,
            }
        )
    return rows


def main(argv: list[str]) -> None:
    """Runs the checks, and on an accelerator the timings."""
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments {argv[1:]}: use flags.")
    logging.set_verbosity(logging.WARNING)
    kernels: dict[str, Implementation] = {"tpu": "tpu", "gpu": "gpu"}
    kernel = kernels.get(jax.default_backend())
    if flags.FLAGS.smoke:
        rows = smoke()
        print(report.table([{**r, "error": f"{r['error']:.1e}"} for r in rows], tuple(rows[0])))
    elif kernel is None:
        sys.exit("Error: no accelerator here. Use --smoke, or run on a TPU or a Hopper GPU.")
    else:
        rows = bench(kernel)
        report.write_csv(pathlib.Path(flags.FLAGS.out) / "kernels.csv", rows)
        print(report.table(rows, COLUMNS))
    worst = max(row["error"] for row in rows)
    if not worst <= 2e-2:
        sys.exit(f"Error: the largest error is {worst}, wanted at most 2e-2.")


if __name__ == "__main__":
    define_flags()
    app.run(main)
