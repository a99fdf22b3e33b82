"""Prompts in, completions out: batching, bucketing, stop strings. The host side of `decode`."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from models.prefill import prefill
from models.transformer import Transformer
from spec.decode import (
    EOS,
    LENGTH,
    RUNNING,
    DecodeState,
    Settings,
    Trace,
    advance,
    spec_step,
    start,
)
from spec.drafters.protocol import Drafter
from spec.draws import Children
from spec.metrics import Metrics
from spec.sampling import GREEDY_BELOW, check_controls, rows
from spec.stop import StopScanner
from spec.verify import Rule, rule
from spec.verify.rule import check_fit

# With stop strings the host looks at the text after at most this many steps.
SEGMENT = 16
_EVER = np.int32(np.iinfo(np.int32).max)

# Apart from `_start`, so that one program serves every drafter.
_prefill = jax.jit(prefill, static_argnames=("capacity",))
_start = jax.jit(start, static_argnames=("out_size", "logprobs"), donate_argnames=("cache",))
_advance = jax.jit(advance, donate_argnames=("state",))
_traced_step = jax.jit(spec_step, donate_argnames=("state",))


@dataclasses.dataclass(frozen=True)
class Request:
    """How to continue a batch of prompts.

    Attributes:
        max_new_tokens: budget of every row, >= 0 tokens.
        eos_ids: ids that end a row; may be empty.
        vocab_size: ids that the tokenizer knows; None for the whole table. Ids from here on are
            padding of the embedding table and are never chosen.
        max_length: most tokens of prompt and output together; None for the model's own limit.
        stop: strings that end a row; neither they nor anything after is returned.
        token_bytes: bytes of a token id, needed for `stop` (`Tokenizer.token_bytes`).
        temperature: 0 decodes greedily; more samples.
        top_k: most probable tokens kept, 0 for all.
        top_p: least probability kept, in (0, 1].
        rule: name of the verification rule; None for the usual one of the drafter's children.
        logprobs: return log-probabilities.
        seed: of the random keys. A number: row i is request i of that seed, and a caller who
            gives none has seed 0. A tuple: one seed a row, whose tokens then depend on nothing
            but it, the prompt and the settings.
        run_limit: most tokens a step may emit; None for as many as are accepted.
        reserve: tokens (prompt and output) to pad for at least, so that batches of different
            lengths share one compiled program.
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    max_length: int | None = None
    stop: tuple[str, ...] = ()
    token_bytes: Callable[[int], bytes] | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    rule: str | None = None
    logprobs: bool = False
    seed: int | tuple[int, ...] = 0
    run_limit: int | None = None
    reserve: int = 1

    def __post_init__(self) -> None:
        """Refuses what cannot be done."""
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens} must be 0 or more.")
        if self.stop and (self.token_bytes is None or "" in self.stop):
            raise ValueError(f"stop = {self.stop}: give token_bytes with it, and no empty string.")
        check_controls(self.temperature, self.top_k, self.top_p)
        for seed in self.seed if isinstance(self.seed, tuple) else (self.seed,):
            if not 0 <= operator.index(seed) < 2**32:
                raise ValueError(f"seed = {seed} must lie in 0..{2**32 - 1}.")
        if self.rule is not None:
            rule(self.rule)
        if self.rule == "greedy" and self.temperature >= GREEDY_BELOW:
            raise ValueError(
                f"The rule 'greedy' takes the best token, temperature = {self.temperature} asks "
                "for draws: leave one of them out."
            )
        if self.run_limit is not None and self.run_limit < 1:
            raise ValueError(f"run_limit = {self.run_limit} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Completion:
    """Continuation of one prompt.

    Attributes:
        token_ids: emitted tokens, an ending end-of-sequence token included. After a stop string:
            the tokens that begin before it.
        finish_reason: "eos", "length" (budget or the model's limit) or "stop".
        metrics: counts of the target steps that made these tokens.
        logprobs: natural log-probability of each token under the target's own softmax (before
            temperature, top-k and top-p); empty unless asked for.
        stop_bytes: with finish reason "stop", how many bytes of the tokens' text to keep.
    """

    token_ids: tuple[int, ...]
    finish_reason: Literal["eos", "length", "stop"]
    metrics: Metrics
    logprobs: tuple[float, ...] = ()
    stop_bytes: int | None = None


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


def finish(
    target: Transformer,
    drafter: Drafter,
    state: DecodeState,
    settings: Settings,
    rows: int,
    request: Request,
) -> list[Completion]:
    """Decodes the first `rows` rows of what `begin` made to their end; consumes `state`."""
    stops = StopScanner(request.stop, request.token_bytes, rows)
    running = True
    while running:
        steps = np.int32(SEGMENT) if request.stop else _EVER
        state, running = _scan(stops, _advance(target, drafter, state, settings, steps))
    return _completions(state, stops)


def warm_up(
    target: Transformer, drafter: Drafter, prompts: Sequence[Sequence[int]], request: Request
) -> None:
    """Compiles what `generate` would run for these arguments, and runs one step of it."""
    state, settings = begin(target, drafter, prompts, request)
    jax.block_until_ready(_advance(target, drafter, state, settings, np.int32(1)))


def trace(
    target: Transformer, drafter: Drafter, prompts: Sequence[Sequence[int]], request: Request
) -> Iterator[Trace]:
    """Yields the tree of each step and what was accepted, a step at a time, until all is done."""
    state, settings = begin(target, drafter, prompts, request)
    while (np.asarray(state.finish_B) == RUNNING).any():
        state, step = _traced_step(target, drafter, state, settings)
        yield step


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
    stops = StopScanner(request.stop, request.token_bytes, len(prompts))
    running = True
    while running:
        state = _advance(target, drafter, state, settings, np.int32(steps))
        state, running = _scan(stops, state)
        yield _completions(state, stops, hold_back=bool(request.stop))


def begin(
    target: Transformer, drafter: Drafter, prompts: Sequence[Sequence[int]], request: Request
) -> tuple[DecodeState, Settings]:
    """Checks and pads the prompts and prefills them; see `generate` for the arguments."""
    config = target.config
    limit = config.max_positions if request.max_length is None else request.max_length
    vocab = config.vocab_size if request.vocab_size is None else request.vocab_size
    _check(target, prompts, limit, vocab)
    lengths = [len(prompt) for prompt in prompts]
    budgets = [min(request.max_new_tokens, limit - length) for length in lengths]
    B = round_up(len(prompts), 1)
    reserve = min(request.reserve, limit)  # nothing longer can come
    token_BT = np.zeros((B, round_up(max(*lengths, reserve), 16)), np.int32)
    for row, prompt in enumerate(prompts):
        token_BT[row, : len(prompt)] = prompt
    needed = max(length + budget for length, budget in zip(lengths, budgets, strict=True))
    capacity = round_up(max(needed, reserve), 64)
    verifier = rule_of(drafter, request)
    check_fit(verifier, drafter.children)
    pad = [0] * (B - len(prompts))
    length_B = np.asarray(lengths + pad, np.int32)
    cache, hidden_BTID = _prefill(target, token_BT, length_B, capacity=capacity)
    state = _start(
        drafter,
        cache,
        hidden_BTID,
        token_BT,
        length_B,
        np.asarray(budgets + pad, np.int32),
        _row_keys(request.seed, len(prompts), B),
        out_size=round_up(max(budgets), 16),
        logprobs=request.logprobs,
    )
    eos = [*request.eos_ids, *[-1] * (round_up(len(request.eos_ids), 4) - len(request.eos_ids))]
    run_limit = _EVER if request.run_limit is None else np.int32(request.run_limit)
    return state, Settings(
        jnp.asarray(eos, jnp.int32),
        jnp.asarray(run_limit),
        rows(request.temperature, request.top_k, request.top_p, B),
        vocab,
        verifier,
    )


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


def _row_keys(seed: int | tuple[int, ...], rows: int, batch: int) -> jax.Array:
    """Returns a key a row from (seed, request)."""
    if not isinstance(seed, tuple):
        pairs = [(seed, row) for row in range(batch)]
    elif len(seed) == rows:
        pairs = [(each, 0) for each in (*seed, *[0] * (batch - rows))]
    else:
        raise ValueError(f"{len(seed)} seeds for {rows} prompts: give one seed, or one a prompt.")
    seeds, requests = (jnp.asarray(column, jnp.uint32) for column in zip(*pairs, strict=True))
    return jax.vmap(lambda s, r: jax.random.fold_in(jax.random.key(s), r))(seeds, requests)


def round_up(size: int, least: int) -> int:
    """Returns the smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def _check(target: Transformer, prompts: Sequence[Sequence[int]], limit: int, vocab: int) -> None:
    config = target.config
    if not prompts:
        raise ValueError("No prompts: give at least one.")
    if limit > config.max_positions:
        raise ValueError(
            f"max_length = {limit} exceeds the model's {config.max_positions} positions."
        )
    if vocab > config.vocab_size:
        raise ValueError(
            f"vocab_size = {vocab} exceeds the target's table of {config.vocab_size} rows."
        )
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"Prompt {row} has no tokens: give at least one (for example BOS).")
        if len(prompt) > limit:
            raise ValueError(
                f"Prompt {row} has {len(prompt)} tokens, the limit is {limit}: shorten it."
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise ValueError(
                f"Prompt {row} holds ids {min(prompt)}..{max(prompt)}, the vocabulary is "
                f"0..{vocab - 1}: use the target's tokenizer."
            )


def _scan(stops: StopScanner, state: DecodeState) -> tuple[DecodeState, bool]:
    """Reads new tokens; waits for the device.

    Returns the state, rows that met a stop string finished, and whether any row goes on.
    """
    finish = np.array(state.finish_B)
    if any(cut is None for cut in stops.cut):
        tokens, emitted = np.asarray(state.token_BE), np.asarray(state.emitted_B)
        for row in range(len(stops.cut)):
            stops.read(row, tokens[row, : emitted[row]])
        stopped = [row for row, cut in enumerate(stops.cut) if cut is not None]
        finish[stopped] = np.where(finish[stopped] == RUNNING, LENGTH, finish[stopped])
        state = dataclasses.replace(state, finish_B=jnp.asarray(finish))
    return state, bool((finish == RUNNING).any())


def _completions(
    state: DecodeState, stops: StopScanner, hold_back: bool = False
) -> list[Completion]:
    """Cuts each row at its stop string, or, on request, where one may still come to begin."""
    tokens, emitted, finish, record, logprob = jax.device_get(
        (state.token_BE, state.emitted_B, state.finish_B, state.record_BER, state.logprob_BE)
    )
    out = []
    for row, cut in enumerate(stops.cut):
        count = int(emitted[row]) if cut is None else stops.kept(row)
        if hold_back and finish[row] == RUNNING:
            count = min(count, stops.certain(row))
        reason: Literal["eos", "length", "stop"] = "eos" if finish[row] == EOS else "length"
        out.append(
            Completion(
                tuple(tokens[row, :count].tolist()),
                reason if cut is None else "stop",
                Metrics.from_records(record[row, :count]),
                tuple(logprob[row, :count].tolist()),
                cut,
            )
        )
    return out
