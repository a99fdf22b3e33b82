"""Fills a cache from prompts, a chunk at a time, with the same forward pass as everything else."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.feature import FeatureModel
from models.kv_cache import KVCache, commit
from models.transformer import Output, Transformer, causal_mask


def longest_chunk() -> int:
    """Returns the most tokens of a prompt that one pass reads, here.

    It bounds the scores of a chunk against itself, [H, chunk, chunk]. A chunk is paid for in full,
    however little of it is prompt: on an accelerator that is little more than reading the weights;
    on a CPU it is its tokens, of which one costs 2.9 ms of a core in 64, 2.6 in 128 and as much in
    256 (SmolLM2-135M, float32), so that 128 waste less.
    """
    return 128 if jax.default_backend() == "cpu" else 256


def prefill(
    model: Transformer | FeatureModel,
    token_BT: jax.Array,
    length_B: jax.Array,
    capacity: int,
    feature_BTD: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Caches prompt[:-1] of each row; the last token is the first tree's root.

    So every emitted token comes from a counted target step, and a one-token prompt starts at
    length 0. A chunk is a chain tree behind the cached prefix. The number of chunks run follows
    the longest prompt; the program depends on the padded shape only.

    Args:
        model: the decoder.
        token_BT: int32, right-padded; T at most `longest_chunk()` or a multiple of it.
        length_B: int32, real tokens of each row, 0..T.
        capacity: slots of the new cache.
        feature_BTD: what stands before each token, for a `FeatureModel`; else None.

    Returns:
        The cache, and the hidden states of the cached tokens [B, T, I, D] (see
        `transformer.Output`), zeros elsewhere.

    Raises:
        ValueError: if T does not divide into chunks.
    """
    B, T = token_BT.shape
    chunk = min(T, longest_chunk())
    if T % chunk:
        raise ValueError(f"Padded prompt length {T} must be at most {chunk} or a multiple of it.")
    wanted_B = jnp.maximum(length_B - 1, 0)

    def body(i: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        cache, hidden_BTID = carry
        start = i * chunk
        token_BC, feature_BCD = (
            None if array is None else jax.lax.dynamic_slice_in_dim(array, start, chunk, axis=1)
            for array in (token_BT, feature_BTD)
        )
        assert token_BC is not None
        cache, hidden_BCID = read_chunk(model, token_BC, start, wanted_B, cache, feature_BCD)
        return cache, jax.lax.dynamic_update_slice_in_dim(hidden_BTID, hidden_BCID, start, axis=1)

    cache = KVCache.empty(model.config, B, capacity, model.dtype)
    hidden_BTID = jnp.zeros((B, T, len(model.taps) + 1, model.config.d_model), model.dtype)
    chunks = (jnp.max(wanted_B) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, chunks, body, (cache, hidden_BTID))


def read_chunk(
    model: Transformer | FeatureModel,
    token_BC: jax.Array,
    start: jax.Array,
    wanted_B: jax.Array,
    cache: KVCache,
    feature_BCD: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Appends one chunk of each row's prompt to the cache.

    Args:
        model: the decoder.
        token_BC: int32, tokens `start` to `start + C` of each prompt, right-padded.
        start: int32, tokens of each prompt that chunks before this one held.
        wanted_B: int32, how many tokens of each prompt shall be cached in the end.
        cache: what the chunks before this one left.
        feature_BCD: what stands before each token, for a `FeatureModel`; else None.

    Returns:
        The cache, and the hidden states [B, C, I, D] of what it gained, zeros elsewhere.
    """
    read: Callable[..., Output] = model
    B, C = token_BC.shape
    index_C = jnp.arange(C, dtype=jnp.int32)[None, :]
    here = (token_BC,) if feature_BCD is None else (token_BC, feature_BCD)
    out = read(*here, jnp.broadcast_to(start + index_C, (B, C)), causal_mask(B, C), cache)
    count_B = jnp.clip(wanted_B - start, 0, C) + _zero_after(out.final_BND)
    real_BC11 = (index_C < count_B[:, None])[:, :, None, None]
    hidden_BCID = jnp.where(real_BC11, out.hidden_BNID, jnp.zeros_like(out.hidden_BNID))
    return commit(cache, out.tree_kv, count_B), hidden_BCID


def _zero_after(x_BND: jax.Array) -> jax.Array:
    """Returns int32 zeros [B] that are known only when `x_BND` is.

    XLA writes into the cache in place only where it can prove that attention has read it before;
    else it copies all of it for each chunk and layer. (A barrier is gone before it asks.)
    """
    bits_B = jax.lax.bitcast_convert_type(x_BND[:, 0, 0].astype(jnp.float32), jnp.int32)
    return (bits_B & 1) >> 1
