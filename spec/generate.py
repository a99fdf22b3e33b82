"""Prompts in, completions out. The host side of `decode`."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from models.kv_cache import KVCache
from models.transformer import Transformer
from spec import decode
from spec.batch import Batch
from spec.decode import RUNNING, DecodeState, Settings, Trace, advance
from spec.drafters.protocol import Drafter
from spec.draws import Children
from spec.reading import Prefilled, compile_reading, compiled, read, round_up
from spec.request import Completion, Request
from spec.sampling import GREEDY_BELOW, rows
from spec.verify import Rule, rule
from spec.verify.rule import check_fit

# With stop strings the host looks at the text after at most this many steps.
SEGMENT = 16
_EVER = np.int32(np.iinfo(np.int32).max)


def generate(
    target: Transformer, drafter: Drafter, prompts: Sequence[Sequence[int]], request: Request
) -> list[Completion]:
    """Continues every prompt; the output, or its distribution, is the target's own.

    One jitted `while_loop`, or segments of it where stop strings must be looked for. Batch,
    prompt length, budget and cache are rounded up to powers of two: one compiled program each.

    Args:
        target: the model.
        drafter: see `Drafter`; `RootDrafter()` is plain decoding.
        prompts: token ids, at least one a prompt. A prompt of exactly the limit gives no tokens.
        request: see `Request`.

    Raises:
        ValueError: for an empty prompt, one beyond the limit, or ids outside the vocabulary.
    """
    return finish(target, drafter, *begin(target, drafter, prompts, request), len(prompts), request)


def stream(
    target: Transformer,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    request: Request,
    steps: int = 1,
) -> Iterator[list[Completion]]:
    """Yields what every row has so far, after each `steps` target steps.

    The last item equals `generate`'s result, and the tokens of every item begin those of the next:
    text that could still become a stop string is held back. The finish reason of a running row is
    not meaningful yet.

    Args:
        target: see `generate`.
        drafter: see `generate`.
        prompts: see `generate`.
        request: see `generate`.
        steps: 1..16 target steps between items.

    Raises:
        ValueError: as `generate`, or for other `steps`.
    """
    if not 1 <= steps <= SEGMENT:
        raise ValueError(f"steps = {steps} must lie in 1..{SEGMENT}.")
    state, settings = begin(target, drafter, prompts, request)
    segments = _segments(target, drafter, state, settings, len(prompts), request, np.int32(steps))
    for batch, state in segments:
        yield batch.completions(state, hold_back=True)


def trace(
    target: Transformer, drafter: Drafter, prompts: Sequence[Sequence[int]], request: Request
) -> Iterator[Trace]:
    """Yields the tree of each step and what was accepted, a step at a time, until all is done."""
    yield from follow(target, drafter, *begin(target, drafter, prompts, request))


def warm_up(
    target: Transformer, drafter: Drafter, prompts: Sequence[Sequence[int]], request: Request
) -> None:
    """Compiles what `generate` would run for these arguments. Nothing is read or decoded."""
    prefilled = compile_reading(target, prompts, request)
    args, static, settings = _at_start(target, drafter, prefilled, request)
    state = compiled(_start, *args, **static)
    while True:
        compiled(_advance, target, drafter, state, settings, np.int32(0), np.int32(0))
        half = state.root_B.shape[0] // 2
        if not (request.compact and half):
            return
        shapes = compiled(_take, (state, settings.sampling), np.zeros(half, np.int32))
        state, settings = shapes[0], dataclasses.replace(settings, sampling=shapes[1])


def begin(
    target: Transformer, drafter: Drafter, prompts: Sequence[Sequence[int]], request: Request
) -> tuple[DecodeState, Settings]:
    """Checks, pads and reads the prompts, then starts; see `generate` for the arguments."""
    check_fit(rule_of(drafter, request), drafter.children)  # before any work
    return start(target, drafter, read(target, prompts, request), request)


def start(
    target: Transformer, drafter: Drafter, prefilled: Prefilled, request: Request
) -> tuple[DecodeState, Settings]:
    """Returns the state before the first step; consumes `prefilled`, see `Prefilled.copy`.

    Args:
        target: the model that has read the prompts.
        drafter: reads them now, if it is a model.
        prefilled: from `read`.
        request: as `read` had it, but for what concerns drafts and draws (rule, seed,
            temperature ...).

    Raises:
        ValueError: if the budget is larger than the cache was made for.
    """
    args, static, settings = _at_start(target, drafter, prefilled, request)
    return _start(*args, **static), settings


def finish(
    target: Transformer,
    drafter: Drafter,
    state: DecodeState,
    settings: Settings,
    rows: int,
    request: Request,
) -> list[Completion]:
    """Decodes the first `rows` rows of what `start` made to their end; consumes `state`."""
    steps = np.int32(SEGMENT) if request.stop else _EVER
    for batch, last in _segments(target, drafter, state, settings, rows, request, steps):
        done = batch, last
    return done[0].completions(done[1])


def follow(
    target: Transformer, drafter: Drafter, state: DecodeState, settings: Settings
) -> Iterator[Trace]:
    """Yields the trace of each step from what `start` made to its end; consumes `state`."""
    while (np.asarray(state.finish_B) == RUNNING).any():
        state, step = _advance(target, drafter, state, settings, np.int32(1), np.int32(0))
        yield step


def row_keys(seed_B: jax.Array, number_B: jax.Array) -> jax.Array:
    """Returns a key a row from (seed, request)."""
    return jax.vmap(lambda s, r: jax.random.fold_in(jax.random.key(s), r))(seed_B, number_B)


def row_seeds(seed: int | tuple[int, ...], rows: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the uint32 pair (seed, request) of every row, see `Request.seed`.

    Raises:
        ValueError: for seeds that are not one a prompt.
    """
    numbers = np.arange(batch, dtype=np.uint32)
    if not isinstance(seed, tuple):
        return np.full(batch, seed, np.uint32), numbers
    if len(seed) != rows:
        raise ValueError(f"{len(seed)} seeds for {rows} prompts: give one seed, or one a prompt.")
    return np.asarray([*seed, *[0] * (batch - rows)], np.uint32), np.zeros_like(numbers)


def rule_of(drafter: Drafter, request: Request) -> Rule:
    """Returns the rule asked for, or the usual one for such children.

    Greedy without a temperature; for deterministic children, merged or not, `naive`, whose tokens
    do not depend on the tree; for one kind of draws its own rule; for mixtures `top_down`.
    (`traversal` accepts no less than any of these, and costs more.)
    """
    if request.rule is not None:
        return rule(request.rule)
    if request.temperature < GREEDY_BELOW:
        return rule("greedy")
    usual = {
        Children.TOP_K: "naive",
        Children.IID: "mss",
        Children.WITHOUT_REPLACEMENT: "without_replacement",
        Children.GREEDY_PLUS_ONE: "greedy_plus_one",
    }
    kinds = drafter.children - {Children.MERGED}
    chosen = rule(usual.get(next(iter(kinds)), "top_down") if len(kinds) == 1 else "top_down")
    return chosen if drafter.children <= chosen.admits else rule("top_down")


def _first_state(
    drafter: Drafter,
    cache: KVCache,
    hidden_BTID: jax.Array,
    token_BT: jax.Array,
    length_B: jax.Array,
    budget_B: jax.Array,
    seed_B: jax.Array,
    number_B: jax.Array,
    **static: Any,
) -> DecodeState:
    """As `decode.start`, keys made in the same program."""
    keys = row_keys(seed_B, number_B)
    return decode.start(drafter, cache, hidden_BTID, token_BT, length_B, budget_B, keys, **static)


def _at_start(
    target: Transformer, drafter: Drafter, prefilled: Prefilled, request: Request
) -> tuple[tuple[Any, ...], dict[str, Any], Settings]:
    """Returns what `_start` takes, and the settings of the steps after it."""
    verifier = rule_of(drafter, request)
    check_fit(verifier, drafter.children)
    length_B, B = prefilled.length_B, len(prefilled.length_B)
    real_B = np.arange(B) < prefilled.rows
    room_B = np.minimum(request.max_new_tokens, request.limit(target.config) - length_B)
    budget_B = np.where(real_B, room_B, 0).astype(np.int32)
    needed, capacity = int((length_B + budget_B).max()), prefilled.cache.capacity
    if needed > capacity:
        raise ValueError(
            f"Prompts and budget of {needed} tokens exceed the cache of {capacity}: read them with "
            f"max_new_tokens = {request.max_new_tokens}."
        )
    eos = [*request.eos_ids, *[-1] * (round_up(len(request.eos_ids), 4) - len(request.eos_ids))]
    settings = Settings(
        jax.device_put(np.asarray(eos, np.int32)),
        jax.device_put(_EVER if request.run_limit is None else np.int32(request.run_limit)),
        rows(request.temperature, request.top_k, request.top_p, B),
        request.vocab(target.config),
        verifier,
    )
    arrays = prefilled.cache, prefilled.hidden_BTID, prefilled.token_BT, length_B, budget_B
    seeds = row_seeds(request.seed, prefilled.rows, B)
    static = {"out_size": round_up(int(budget_B.max()), 16), "logprobs": request.logprobs}
    return (drafter, *arrays, *seeds), static, settings


def _segments(
    target: Transformer,
    drafter: Drafter,
    state: DecodeState,
    settings: Settings,
    rows: int,
    request: Request,
    steps: np.int32,
) -> Iterator[tuple[Batch, DecodeState]]:
    """Yields the batch and its state after every `steps` steps, the last time when all is done.

    Steps without an end are cut where the batch is halved. The state is consumed by going on.
    """
    batch = Batch(rows, request)
    running = 1
    while running:
        B = state.root_B.shape[0]
        leave = np.int32(B // 2 if request.compact and steps == _EVER else 0)
        state, _ = _advance(target, drafter, state, settings, steps, leave)
        state, running = batch.look(state)
        yield batch, state
        while request.compact and running and 2 * running <= state.root_B.shape[0]:
            both = state, settings.sampling
            state, sampling = _take(both, batch.halve(state))
            settings = dataclasses.replace(settings, sampling=sampling)


def _rows_of(arrays: Any, index_b: jax.Array) -> Any:
    """Returns some rows of every array, B first."""
    return jax.tree.map(lambda array: array[index_b], arrays)


_start = jax.jit(_first_state, static_argnames=("out_size", "logprobs"), donate_argnames=("cache",))
_advance = jax.jit(advance, donate_argnames=("state",))
_take = jax.jit(_rows_of)
