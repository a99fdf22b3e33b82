"""Logits of one sequence from both implementations, each in one pass and from a cache.

All functions return float32 arrays [T, V]. "Step by step" means that the last `steps` tokens come
one at a time from behind a prefilled cache; the rows are those of these tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.hf_baseline import import_peers
from models.kv_cache import KVCache, commit
from models.prefill import prefill
from models.transformer import Transformer, causal_mask
from spec.generate import round_up

_prefill = jax.jit(prefill, static_argnames="capacity")


@jax.jit
def _whole(model: Transformer, token_BT: jax.Array) -> jax.Array:
    B, T = token_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    return model(token_BT, position_BT, causal_mask(B, T)).logits_BNV


@functools.partial(jax.jit, donate_argnames="cache")
def _step(model: Transformer, token_B1: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    see_itself = jnp.ones((1, 1, 1), jnp.bool_)
    out = model(token_B1, cache.length_B[:, None], see_itself, cache)
    return out.logits_BNV[:, 0], commit(cache, out.tree_kv, jnp.ones(1, jnp.int32))


def _padded(tokens: list[int]) -> np.ndarray:
    """One row of few possible lengths: few programs. A causal model does not see the padding."""
    token_1T = np.zeros((1, round_up(len(tokens), 256)), np.int32)
    token_1T[0, : len(tokens)] = tokens
    return token_1T


def ours_in_one_pass(model: Transformer, tokens: list[int]) -> np.ndarray:
    return np.asarray(_whole(model, _padded(tokens)))[0, : len(tokens)]


def ours_step_by_step(model: Transformer, tokens: list[int], steps: int) -> np.ndarray:
    capacity = round_up(len(tokens), 1024)
    # Prefill caches all but the last of its tokens, which becomes the first step.
    prompt = tokens[: len(tokens) - steps + 1]
    cache, _ = _prefill(model, _padded(prompt), np.array([len(prompt)], np.int32), capacity)
    rows = []
    for token in tokens[-steps:]:
        logits_BV, cache = _step(model, np.array([[token]], np.int32), cache)
        rows.append(np.asarray(logits_BV)[0])
    return np.stack(rows)


def _single_threaded():
    torch, transformers = import_peers()
    # Two threads spin while they wait: 4 to 8 times slower (measured) beside a busy process.
    torch.set_num_threads(1)
    return torch, transformers


def theirs_in_one_pass(model, tokens: list[int]) -> np.ndarray:
    torch, _ = _single_threaded()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def theirs_step_by_step(model, tokens: list[int], steps: int) -> np.ndarray:
    torch, transformers = _single_threaded()
    cache = transformers.DynamicCache()  # filled in place
    rows = []
    with torch.no_grad():
        for part in (tokens[:-steps], *([token] for token in tokens[-steps:])):
            # The fourth argument is called past_key_values in older versions, cache in newer ones.
            rows.append(model(torch.tensor([part]), None, None, cache).logits[0, -1].numpy())
    return np.stack(rows[1:])
