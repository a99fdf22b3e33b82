"""Prompts in: checked, padded to few shapes, and read by the target a chunk at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from models.kv_cache import KVCache
from models.prefill import blank, chunk_of, read_chunk
from models.transformer import Transformer
from spec.request import Request

_blank = jax.jit(blank, static_argnames=("batch", "length", "capacity"))
# One program for every chunk, so that the host sees how far it is.
_read_chunk = jax.jit(read_chunk, donate_argnames=("cache", "hidden_BTID"))
_copy = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A batch of prompts that the target has read, whatever drafts or draws come after.

    Decoding consumes the arrays; whoever decodes the same prompts again decodes a `copy`.

    Attributes:
        cache: the target's, with prompt[:-1] of each row.
        hidden_BTID: the target's hidden states there, see `transformer.Output`.
        token_BT: int32 right-padded prompts, on the host.
        length_B: int32 prompt lengths, 0 for padding rows, on the host.
        rows: prompts; the rows after them are padding.
    """

    cache: KVCache
    hidden_BTID: jax.Array
    token_BT: np.ndarray
    length_B: np.ndarray
    rows: int

    def copy(self) -> Self:
        """Returns the same with arrays of its own."""
        cache, hidden_BTID = _copy((self.cache, self.hidden_BTID))
        return dataclasses.replace(self, cache=cache, hidden_BTID=hidden_BTID)


def read(
    target: Transformer,
    prompts: Sequence[Sequence[int]],
    request: Request,
    progress: Callable[[int], object] | None = None,
) -> Prefilled:
    """Reads prompts; any drafter can be started on the result.

    Args:
        target: the model.
        prompts: token ids, at least one a prompt.
        request: see `Request`; its budget and `reserve` size the cache.
        progress: told after each chunk how many tokens it held; the host then waits for each.

    Raises:
        ValueError: for an empty prompt, one beyond the limit, or ids outside the vocabulary.
    """
    token_BT, length_B, capacity = _padded(target, prompts, request)
    B, T = token_BT.shape
    chunk = chunk_of(T)
    cache, hidden_BTID = _blank(target, batch=B, length=T, capacity=capacity)
    given = jax.device_put((token_BT, length_B))
    for start in range(0, int(length_B.max()) - 1, chunk):
        cache, hidden_BTID = _read_chunk(target, *given, np.int32(start), cache, hidden_BTID)
        if progress is not None:
            jax.block_until_ready(cache.length_B)
            progress(int(np.clip(length_B - 1 - start, 0, chunk).sum()))
    return Prefilled(cache, hidden_BTID, token_BT, length_B, len(prompts))


def compile_reading(
    target: Transformer, prompts: Sequence[Sequence[int]], request: Request
) -> Prefilled:
    """Compiles what `read` would run; returns shapes in place of arrays. Nothing is read."""
    token_BT, length_B, capacity = _padded(target, prompts, request)
    B, T = token_BT.shape
    cache, hidden_BTID = compiled(_blank, target, batch=B, length=T, capacity=capacity)
    compiled(_read_chunk, target, token_BT, length_B, np.int32(0), cache, hidden_BTID)
    return Prefilled(cache, hidden_BTID, token_BT, length_B, len(prompts))


def compiled(program: Any, *args: Any, **static: Any) -> Any:
    """Compiles a jitted function for arguments or their shapes; returns the shapes it returns.

    A later call with such arguments finds the program.
    """
    program.lower(*args, **static).compile()
    return program.eval_shape(*args, **static)


def round_up(size: int, least: int) -> int:
    """Returns the smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def _padded(
    target: Transformer, prompts: Sequence[Sequence[int]], request: Request
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the prompts [B, T], their lengths, and the capacity that their cache needs."""
    limit = request.limit(target.config)
    _check(target, prompts, limit, request.vocab(target.config))
    lengths = [len(prompt) for prompt in prompts]
    needed = max(min(length + request.max_new_tokens, limit) for length in lengths)
    reserve = min(request.reserve, limit)  # nothing longer can come
    B = round_up(len(prompts), 1)
    token_BT = np.zeros((B, round_up(max(*lengths, reserve), 16)), np.int32)
    for row, prompt in enumerate(prompts):
        token_BT[row, : len(prompt)] = prompt
    length_B = np.asarray(lengths + [0] * (B - len(prompts)), np.int32)
    return token_BT, length_B, round_up(max(needed, reserve), 64)


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
