"""How fast is a prompt read? Ours and transformers in turn, the same tokens."""

import functools
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.common import hf_baseline, report, setup
from models.prefill import chunk_of, prefill
from models.transformer import Transformer
from spec.generate import round_up

LENGTHS = (128, 512, 1024, 2048, 4096)

_prefill = jax.jit(prefill, static_argnames="capacity")


def _seconds(model: Transformer, token_BT: jax.Array, length_B: jax.Array, capacity: int) -> float:
    """Returns the seconds of one prefill."""
    begin = time.perf_counter()
    jax.block_until_ready(_prefill(model, token_BT, length_B, capacity=capacity))
    return time.perf_counter() - begin


def bench_prefill(target: setup.Loaded, path: pathlib.Path, repeats: int) -> list[dict]:
    """Times the pass over a prompt by its length; torch has as many threads as XLA.

    Both cache as many tokens as the row says, random ones. Transformers also computes the logits
    after the last, one row of the head, which ours leaves to the first step. The last column is the
    share of our time that attention to earlier chunks takes: what a token costs beyond one of the
    first chunk.

    Args:
        target: ours.
        path: where transformers finds the same weights.
        repeats: timed pairs a length, after one of each that is not; who comes first alternates.
    """
    peer, threads = hf_baseline.load(path), len(os.sched_getaffinity(0))
    rows = []
    for n in tqdm(LENGTHS, desc="prefill", unit="length"):
        ids = np.random.default_rng(n).integers(0, target.model.config.vocab_size, n)
        # Ours leaves the last token to the first step: one more makes n cached.
        token_BT = jnp.zeros((1, 2 * n), jnp.int32).at[0, :n].set(jnp.asarray(ids, jnp.int32))
        length_B, capacity = jnp.full(1, n + 1, jnp.int32), round_up(n + 64, 64)

        chunk = chunk_of(2 * n)  # alone it sees no prefix: what is more a token, the prefix costs
        first_B = jnp.full(1, min(n, chunk) + 1, jnp.int32)
        sides = {
            "first": functools.partial(_seconds, target.model, token_BT, first_B, capacity),
            "ours": functools.partial(_seconds, target.model, token_BT, length_B, capacity),
            "transformers": functools.partial(
                hf_baseline.time_prefill, peer, ids.tolist(), threads
            ),
        }
        for side in sides.values():
            side()
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for pair in range(repeats):
            for name in sides if pair % 2 else [*sides][::-1]:
                seconds[name].append(sides[name]())
        ratios = [t / o for o, t in zip(seconds["ours"], seconds["transformers"], strict=True)]
        row: dict = {"tokens": n, "threads": threads, "pairs": repeats}
        first_s = statistics.median(seconds.pop("first")) / min(n, chunk)
        for name, each in seconds.items():
            row[f"{name}_tokens_per_s"] = n / statistics.median(each)
            row[f"{name}_low"], row[f"{name}_high"] = n / max(each), n / min(each)
        row |= {"speed_ratio": statistics.median(ratios), "ratio_low": min(ratios)}
        prefix = 1 - n * first_s / statistics.median(seconds["ours"])
        rows.append(row | {"ratio_high": max(ratios), "share_of_the_prefix": prefix})
    print(report.table(rows, tuple(rows[0])))
    return rows
