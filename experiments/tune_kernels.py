"""Finds the block sizes that suit an accelerator: rows for `block_sizes.TUNED`.

    python -m experiments.tune_kernels            (an accelerator; time not known yet)
    python -m experiments.tune_kernels --smoke    (any machine: two sizes give the same output)

Every candidate is checked against the reference before it is timed. Prints the entries to add to
pallas_kernels/tree_attention/block_sizes.py and writes all timings to kernel_blocks.csv. Not run on
hardware yet.
"""

import itertools
import pathlib
import sys

import jax
import numpy as np
from absl import flags
from jax.experimental.pallas import tpu as pltpu
from tqdm import tqdm

from experiments.common import command, kernel_cases, report
from pallas_kernels.tree_attention import Implementation, tree_attention
from pallas_kernels.tree_attention.block_sizes import DEFAULT, TUNED, Blocks, Key, key_of

CANDIDATES: dict[str, list[Blocks]] = {
    "tpu": [Blocks(*sizes) for sizes in itertools.product((256, 512, 1024, 2048), (64, 128, 256))],
    # A warp group has 64 rows; tiles of more than 128 cached tokens do not fit beside them, and
    # heads wider than 64 take 64 whatever is asked (`gpu.block_of`).
    "gpu": [Blocks(kv, 256) for kv in (64, 128)],
}


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("out", "out/tune_kernels", "Folder for kernel_blocks.csv.")
    flags.DEFINE_bool("smoke", False, "Two candidates on a tiny shape; the TPU kernel interpreted.")


def entry(heads: tuple[int, int, int], nodes: int, slots: int, kind: str) -> Key:
    """Returns the entry of `TUNED` that serves a shape in bfloat16."""
    H, K, A = heads
    return key_of(kind, nodes * (H // K), nodes, A, slots, 2)


def with_blocks(key: Key, blocks: Blocks, implementation: Implementation, args: tuple) -> jax.Array:
    """Runs the kernel with `blocks` in the table: the way any caller gets them."""
    TUNED[key] = blocks
    jax.clear_caches()  # the table is read when a program is traced
    return jax.jit(lambda *a: tree_attention(*a, implementation=implementation)[0])(*args)


def tune(kernel: Implementation, kind: str) -> tuple[list[dict], dict[Key, Blocks]]:
    """Times all candidates for all shapes; returns the rows and the best for each entry."""
    rows: list[dict] = []
    best: dict[Key, Blocks] = {}
    shapes = [
        (name, N, S)
        for name in kernel_cases.HEADS
        for S in kernel_cases.SLOTS
        for N in kernel_cases.NODES
    ]
    for name, N, S in tqdm(shapes, desc="shapes"):
        heads = kernel_cases.HEADS[name]
        key, args = entry(heads, N, S, kind), kernel_cases.arguments(heads, N, S)
        times: dict[Blocks, float] = {}
        for blocks in CANDIDATES[kernel]:
            row = {"heads": name, "nodes": N, "slots": S, "kv": blocks.kv, "rows": blocks.rows}
            try:
                error = kernel_cases.error_of(with_blocks(key, blocks, kernel, args), args)
            except jax.errors.JaxRuntimeError as failure:  # does not fit on this chip
                rows.append({**row, "us": "", "note": str(failure).splitlines()[0][:80]})
                continue
            if not error <= 2e-2:
                raise ValueError(f"{blocks} on {name}, N = {N}, S = {S}: error {error}.")
            times[blocks] = kernel_cases.microseconds(kernel_cases.by(kernel), args)
            rows.append({**row, "us": times[blocks], "note": ""})
        del TUNED[key]
        if times:
            best[key] = min(times, key=lambda blocks: times[blocks])
    return rows, best


def smoke() -> None:
    """Two block sizes, interpreted, on one shape."""
    heads, N, S = (2, 1, 64), 5, 128
    kind = jax.devices()[0].device_kind
    key, args = entry(heads, N, S, kind), kernel_cases.arguments(heads, N, S)
    outs = []
    for blocks in (Blocks(64, 32), Blocks(128, 32)):
        with pltpu.force_tpu_interpret_mode():
            outs.append(with_blocks(key, blocks, "tpu", args))
        print(f"{blocks}: error {kernel_cases.error_of(outs[-1], args):.1e}")
    del TUNED[key]
    # Another order of sums: not equal, or the table was not read; and no more than that.
    difference = float(np.abs(np.float32(outs[0]) - np.float32(outs[1])).max())
    print(f"largest difference {difference:.1e}")
    if not 0 < difference <= 2e-2:
        sys.exit("Error: block sizes change the result, or were not read.")


def main(args: flags.FlagValues) -> None:
    """Tunes for the accelerator of this machine."""
    if args.smoke:
        smoke()
        return
    kernel = kernel_cases.kernel_here()
    if kernel is None:
        sys.exit("Error: no kernel for this machine. Use --smoke, or a TPU or a Hopper GPU.")
    rows, best = tune(kernel, jax.devices()[0].device_kind)
    out = pathlib.Path(args.out)
    report.write_csv(out / "kernel_blocks.csv", rows)
    for key, blocks in best.items():
        if blocks != DEFAULT:
            print(f"    {key}: {blocks},")


if __name__ == "__main__":
    command.run(main, define_flags)
