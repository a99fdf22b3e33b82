"""Decoding with a clock: what `generate` and `bench_decode` compare."""

import math
import time

import jax

from experiments.common import setup
from spec.drafters import Drafter
from spec.generate import Completion, Request, begin, finish


def timed(
    target: setup.Loaded, drafter: Drafter, ids: list[list[int]], request: Request
) -> tuple[list[Completion], float]:
    """Decodes a batch; returns it with the seconds from after the prefill to the last token."""
    state, settings = jax.block_until_ready(begin(target.model, drafter, ids, request))
    clock = time.perf_counter()
    done = finish(target.model, drafter, state, settings, len(ids), request)
    return done, time.perf_counter() - clock


def per_token(done: list[Completion], seconds: float) -> float:
    """Returns milliseconds a token; NaN if there is none."""
    tokens = sum(len(completion.token_ids) for completion in done)
    return 1e3 * seconds / tokens if tokens else math.nan
