"""Reading and decoding with a clock: what `generate` and `bench_decode` compare."""

import math
import time
from typing import NamedTuple

import jax
from tqdm import tqdm

from experiments.common import compilation, setup
from spec.drafters import Drafter
from spec.generate import Completion, Request, finish, start, warm_up
from spec.reading import Prefilled, read


class Timed(NamedTuple):
    """A decoded batch.

    Attributes:
        done: what came of each row.
        ready_s: seconds in which the drafter got ready, which is its own reading of the prompts.
        decode_s: seconds from then to the last token.
    """

    done: list[Completion]
    ready_s: float
    decode_s: float


def timed_read(
    target: setup.Loaded, ids: list[list[int]], request: Request
) -> tuple[Prefilled, float]:
    """Reads a batch of prompts, with a bar of tokens if it takes long; returns the seconds too."""
    total = sum(len(prompt) - 1 for prompt in ids)
    clock = time.perf_counter()
    with tqdm(total=total, desc="read", unit="token", leave=False, delay=1) as bar:
        prefilled = read(target.model, ids, request, bar.update)
        jax.block_until_ready(prefilled.cache.length_B)
        return prefilled, time.perf_counter() - clock


def timed(target: setup.Loaded, drafter: Drafter, prefilled: Prefilled, request: Request) -> Timed:
    """Decodes a batch that the target has read, which stays as it is."""
    mine = jax.block_until_ready(prefilled.copy())
    clock = time.perf_counter()
    state, settings = jax.block_until_ready(start(target.model, drafter, mine, request))
    ready = time.perf_counter()
    done = finish(target.model, drafter, state, settings, prefilled.rows, request)
    return Timed(done, ready - clock, time.perf_counter() - ready)


def compile_all(
    target: setup.Loaded, ids: list[list[int]], sides: list[tuple[Drafter, Request]]
) -> None:
    """Compiles what decoding these prompts will run, with a bar that says what was on disk."""
    programs = compilation.programs()
    made, found = programs.compiled, programs.cached
    with tqdm(sides, desc="compile", unit="drafter") as bar:
        for drafter, request in bar:
            warm_up(target.model, drafter, ids, request)
            new = programs.compiled - made
            bar.set_description("compile" if new else "cached")
            bar.set_postfix(compiled=new, cached=programs.cached - found)


def per_token(done: list[Completion], seconds: float) -> float:
    """Returns milliseconds a token; NaN if there is none."""
    tokens = sum(len(completion.token_ids) for completion in done)
    return 1e3 * seconds / tokens if tokens else math.nan
