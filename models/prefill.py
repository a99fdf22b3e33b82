"""Fills a cache from prompts, a chunk at a time, with the same forward pass as everything else."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.feature import FeatureModel
from models.kv_cache import KVCache, commit
from models.transformer import Output, Transformer, causal_mask

# On a CPU prompts padded to fewer tokens than this are read in shorter chunks.
LONG = 2048


def longest_chunk() -> int:
    """Returns the most tokens of a prompt that one pass reads.

    It bounds the scores of a chunk against itself, [H, chunk, chunk].
    """
    return 256


def blank(
    model: Transformer | FeatureModel, batch: int, length: int, capacity: int
) -> tuple[KVCache, jax.Array]:
    """Returns what `read_chunk` fills: an empty cache, and zeros for hidden states [B, T, I, D].

    Args:
        model: the decoder.
        batch: rows.
        length: T, tokens of the padded prompts.
        capacity: slots of the cache.
    """
    states = (batch, length, len(model.taps) + 1, model.config.d_model)
    cache = KVCache.empty(model.config, batch, capacity, model.dtype)
    return cache, jnp.zeros(states, model.dtype)


def chunk_of(length: int) -> int:
    """Returns how many tokens of prompts padded to `length` one pass reads.

    A chunk is paid for in full, however little of it is prompt. On an accelerator that is little
    more than reading the weights. On a CPU it is its tokens, each about 8% dearer in 128 than in
    256 (SmolLM2-135M, float32, 2 cores), which short prompts would waste.

    Raises:
        ValueError: if the length does not divide into chunks.
    """
    short = jax.default_backend() == "cpu" and length < LONG
    chunk = min(length, longest_chunk() // 2 if short else longest_chunk())
    if length % chunk:
        raise ValueError(
            f"Padded prompt length {length} must be at most {chunk} or a multiple of it."
        )
    return chunk


def read_chunk(
    model: Transformer | FeatureModel,
    token_BT: jax.Array,
    length_B: jax.Array,
    start: jax.Array,
    cache: KVCache,
    hidden_BTID: jax.Array,
    feature_BTD: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Reads the chunk that begins at token `start`, a multiple of `chunk_of(T)`; see `prefill`.

    A chunk is a chain tree behind the cached prefix. One program serves every chunk, so a loop on
    the device and a host that wants to see how far it is run the same.

    Returns:
        The cache and the hidden states, this chunk's written.
    """
    read: Callable[..., Output] = model
    B, T = token_BT.shape
    chunk = chunk_of(T)
    index_C = jnp.arange(chunk, dtype=jnp.int32)[None, :]
    here = [
        jax.lax.dynamic_slice_in_dim(array, start, chunk, axis=1)
        for array in (token_BT, feature_BTD)
        if array is not None
    ]
    position_BC = jnp.broadcast_to(start + index_C, (B, chunk))
    out = read(*here, position_BC, causal_mask(B, chunk), cache)
    # The last token is not cached: it is the first tree's root.
    count_B = jnp.clip(jnp.maximum(length_B - 1, 0) - start, 0, chunk)
    count_B += _zero_after(out.final_BND)
    real_BC11 = (index_C < count_B[:, None])[:, :, None, None]
    hidden_BCID = jnp.where(real_BC11, out.hidden_BNID, jnp.zeros_like(out.hidden_BNID))
    hidden_BTID = jax.lax.dynamic_update_slice_in_dim(hidden_BTID, hidden_BCID, start, axis=1)
    return commit(cache, out.tree_kv, count_B), hidden_BTID


def prefill(
    model: Transformer | FeatureModel,
    token_BT: jax.Array,
    length_B: jax.Array,
    capacity: int,
    feature_BTD: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Caches prompt[:-1] of each row; the last token is the first tree's root.

    So every emitted token comes from a counted target step, and a one-token prompt starts at
    length 0. The number of chunks run follows the longest prompt; the program depends on the
    padded shape only.

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
    chunk = chunk_of(T)

    def body(i: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        return read_chunk(model, token_BT, length_B, i * chunk, *carry, feature_BTD)

    chunks = (jnp.max(jnp.maximum(length_B - 1, 0)) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, chunks, body, blank(model, B, T, capacity))


def _zero_after(x_BND: jax.Array) -> jax.Array:
    """Returns int32 zeros [B] that are known only when `x_BND` is.

    XLA writes into the cache in place only where it can prove that attention has read it before;
    else it copies all of it for each chunk and layer. (A barrier is gone before it asks.)
    """
    bits_B = jax.lax.bitcast_convert_type(x_BND[:, 0, 0].astype(jnp.float32), jnp.int32)
    return (bits_B & 1) >> 1
