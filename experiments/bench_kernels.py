"""Is the tree-attention kernel right, and how near is it to the memory's speed? One accelerator.

    python -m experiments.bench_kernels        (an accelerator; under five minutes)
    python -m experiments.bench_kernels --smoke   (any machine: numerics of tiny shapes only)

Each shape is checked against the float32 reference, then timed: the kernel, XLA's attention (the
faster of two formulations), and the floor, K/V bytes over the measured copy bandwidth. Calls walk
over several caches, more than the chip's own cache holds. Where there is no kernel (GPUs that are
not Hopper) the reference is checked and XLA's attention timed. Rows go to
experiments/results/kernels.csv. No device has been measured yet: these kernels have been compiled
and interpreted only. Aim on an H200: 80% of the floor for S >= 8k and N <= 64.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental.pallas import tpu as pltpu
from tqdm import tqdm

from experiments.common import command, kernel_cases, report
from experiments.common.report import RESULTS
from pallas_kernels.tree_attention import Implementation, tree_attention

COLUMNS = (
    "heads",
    "kernel",
    "nodes",
    "slots",
    "error",
    "kernel_us",
    "xla_us",
    "floor_us",
    "of_floor",
)


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("out", str(RESULTS), "Folder for the rows.")
    flags.DEFINE_bool("smoke", False, "Tiny shapes, numerics only; the TPU kernel is interpreted.")


def plain_xla(
    q_BNHA: jax.Array,
    k_BKSA: jax.Array,
    v_BKSA: jax.Array,
    length_B: jax.Array,
    tree_k_BNKA: jax.Array,
    tree_v_BNKA: jax.Array,
    mask_BNN: jax.Array,
) -> jax.Array:
    """Attention as one writes it for XLA: bfloat16 products, one softmax in float32.

    The reference widens its inputs to be exact; this is the fairer opponent. Unused slots must
    not hold NaN here.
    """
    B, N, H, A = q_BNHA.shape
    K, S = k_BKSA.shape[1:3]
    q_BNKGA = q_BNHA.reshape(B, N, K, H // K, A)
    wide = {"preferred_element_type": jnp.float32}
    prefix = jnp.einsum("BNKGA,BKSA->BKGNS", q_BNKGA, k_BKSA, **wide) * A**-0.5
    tree = jnp.einsum("BNKGA,BMKA->BKGNM", q_BNKGA, tree_k_BNKA, **wide) * A**-0.5
    used_BS = jnp.arange(S, dtype=jnp.int32)[None, :] < length_B[:, None]
    prefix = jnp.where(used_BS[:, None, None, None, :], prefix, -jnp.inf)
    tree = jnp.where(mask_BNN[:, None, None, :, :], tree, -jnp.inf)
    weight = jax.nn.softmax(jnp.concatenate((prefix, tree), axis=-1), axis=-1)
    weight = weight.astype(q_BNHA.dtype)
    out = jnp.einsum("BKGNS,BKSA->BNKGA", weight[..., :S], v_BKSA, **wide)
    out += jnp.einsum("BKGNM,BMKA->BNKGA", weight[..., S:], tree_v_BNKA, **wide)
    return out.reshape(B, N, H, A).astype(q_BNHA.dtype)


def copy_bandwidth() -> float:
    """Returns bytes read and written a second by a large copy that adds one."""
    x = jnp.zeros(2**28, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / kernel_cases.median_seconds(lambda: add(x))


def smoke() -> list[dict]:
    """Checks the reference, and the TPU kernel in interpret mode, on tiny shapes."""
    rows: list[dict] = []
    for N, S in ((1, 64), (5, 128)):
        args = kernel_cases.arguments((2, 1, 64), N, S)
        with pltpu.force_tpu_interpret_mode():
            interpreted, _ = tree_attention(*args, implementation="tpu")
        plain, _ = tree_attention(*args, implementation="reference")
        for name, out in (("reference", plain), ("tpu, interpreted", interpreted)):
            rows.append(
                {"kernel": name, "nodes": N, "slots": S, "error": kernel_cases.error_of(out, args)}
            )
    return rows


def bench(kernel: Implementation | None) -> list[dict]:
    """Checks and times every shape; without a kernel, XLA's attention alone."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    rows = []
    cases = [
        (name, N, S)
        for name in kernel_cases.HEADS
        for S in kernel_cases.SLOTS
        for N in kernel_cases.NODES
    ]
    for name, N, S in tqdm(cases, desc="shapes"):
        args = kernel_cases.arguments(kernel_cases.HEADS[name], N, S)
        checked = kernel_cases.by(kernel or "reference")
        out = jax.jit(checked)(*args)
        floor = 1e6 * (args[1].nbytes + args[2].nbytes) / bandwidth
        xla_us = min(
            kernel_cases.microseconds(kernel_cases.by("reference"), args),
            kernel_cases.microseconds(plain_xla, args),
        )
        kernel_us = kernel_cases.microseconds(checked, args) if kernel else float("nan")
        rows.append(
            {
                "heads": name,
                "kernel": kernel or "none",
                "nodes": N,
                "slots": S,
                "error": kernel_cases.error_of(out, args),
                "kernel_us": kernel_us,
                "xla_us": xla_us,
                "floor_us": floor,
                "of_floor": floor / kernel_us,
                "bandwidth_gb_s": bandwidth / 1e9,
            }
        )
    return rows


def main(args: flags.FlagValues) -> None:
    """Runs the checks, and on an accelerator the timings."""
    if args.smoke:
        rows = smoke()
        print(report.table([{**r, "error": f"{r['error']:.1e}"} for r in rows], tuple(rows[0])))
    elif jax.default_backend() == "cpu":
        sys.exit("Error: no accelerator here. Use --smoke, or run on a TPU or a GPU.")
    else:
        rows = bench(kernel_cases.kernel_here())
        report.write_csv(pathlib.Path(args.out) / "kernels.csv", rows)
        print(report.table(rows, COLUMNS))
    # NaN is no error that `max` would see.
    wrong = [row["error"] for row in rows if not row["error"] <= 2e-2]
    if wrong:
        sys.exit(f"Error: errors of {wrong}, wanted at most 2e-2.")


if __name__ == "__main__":
    command.run(main, define_flags)
