"""Fills a cache from prompts, a chunk at a time, with the same forward pass as everything else."""

import jax
import jax.numpy as jnp

from models.kv_cache import KVCache, commit
from models.transformer import Transformer, causal_mask

# Longest chunk: bounds the score matrix [H, chunk, chunk + S] and the number of programs.
CHUNK = 256


def prefill(
    model: Transformer, token_BT: jax.Array, length_B: jax.Array, capacity: int
) -> tuple[KVCache, jax.Array]:
    """Caches prompt[:-1] of each row; the last token is the first tree's root.

    So every emitted token comes from a counted target step, and a one-token prompt starts at
    length 0. A chunk is a chain tree behind the cached prefix. The number of chunks run follows
    the longest prompt; the program depends on the padded shape only.

    Args:
        model: the decoder.
        token_BT: int32, right-padded; T at most `CHUNK` or a multiple of it.
        length_B: int32, real tokens of each row, 0..T.
        capacity: slots of the new cache.

    Returns:
        The cache, and the final-norm output at the cached tokens [B, T, D], zeros elsewhere.

    Raises:
        ValueError: if T does not divide into chunks.
    """
    B, T = token_BT.shape
    chunk = min(T, CHUNK)
    if T % chunk:
        raise ValueError(f"Padded prompt length {T} must be at most {CHUNK} or a multiple of it.")
    wanted_B = jnp.maximum(length_B - 1, 0)
    mask = causal_mask(B, chunk)
    index_C = jnp.arange(chunk, dtype=jnp.int32)[None, :]

    def body(i: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        cache, hidden_BTD = carry
        start = i * chunk
        token_BC = jax.lax.dynamic_slice_in_dim(token_BT, start, chunk, axis=1)
        out = model(token_BC, jnp.broadcast_to(start + index_C, (B, chunk)), mask, cache)
        count_B = jnp.clip(wanted_B - start, 0, chunk)
        real_BC1 = (index_C < count_B[:, None])[:, :, None]
        hidden_BCD = jnp.where(real_BC1, out.hidden_BND, jnp.zeros_like(out.hidden_BND))
        hidden_BTD = jax.lax.dynamic_update_slice_in_dim(hidden_BTD, hidden_BCD, start, axis=1)
        return commit(cache, out.tree_kv, count_B), hidden_BTD

    cache = KVCache.empty(model.config, B, capacity, model.dtype)
    hidden_BTD = jnp.zeros((B, T, model.config.d_model), model.dtype)
    chunks = (jnp.max(wanted_B) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, chunks, body, (cache, hidden_BTD))
