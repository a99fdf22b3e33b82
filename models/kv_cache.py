"""The cache protocol: a plain pytree of committed keys and values, and the functions that fill it.

A cache is read by attention and never written there. K/V of tree nodes live apart (`LayerKV`)
until `commit` writes those of the accepted path behind each row's length. Rows have their own
lengths. Every function returns a new cache; under `jit` with donation XLA updates it in place.

A paged cache will keep these names and signatures, with pages as the first axis and a block table.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from models.attention import LayerKV
from models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Committed keys (rotated) and values of all layers.

    Attributes:
        k_BKSA: one array a layer. This axis order compiles for Pallas TPU without a relayout.
        v_BKSA: one array a layer.
        length_B: int32, tokens cached in each row; slots from there on hold nothing.
    """

    k_BKSA: tuple[jax.Array, ...]
    v_BKSA: tuple[jax.Array, ...]
    length_B: jax.Array

    @property
    def capacity(self) -> int:
        """S, slots a row."""
        return self.k_BKSA[0].shape[2]

    @classmethod
    def empty(
        cls, config: ModelConfig, batch: int, capacity: int, dtype: jax.typing.DTypeLike
    ) -> Self:
        """Returns a cache of `batch` rows of length 0 with `capacity` slots each (tokens)."""
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)

        def zeros() -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

        return cls(zeros(), zeros(), jnp.zeros(batch, jnp.int32))


def commit(cache: KVCache, path: Sequence[LayerKV], count_B: jax.Array) -> KVCache:
    """Appends the K/V of each row's accepted path.

    Args:
        cache: the cache.
        path: per layer, K/V along the path, [B, P, K, A]; node p of the path at index p.
        count_B: int32, how many of the P are real; 0 leaves the row as it is.

    Returns:
        The cache, `count_B` longer. Tokens beyond the capacity are dropped (lengths included):
        callers choose a capacity that holds prompt and budget, and inside jit bound the path.
    """
    S = cache.capacity
    B, P = path[0].k_BNKA.shape[0], min(path[0].k_BNKA.shape[1], S)
    # One window of P slots a row, read, merged and written back: unlike a scatter, XLA does it in
    # place in the layout that attention reads (a scatter costs a relayout of the cache on TPUs).
    start_B = jnp.minimum(cache.length_B, S - P)
    shift_B = cache.length_B - start_B  # a window at the end of the cache begins before the row's
    index_P = jnp.arange(P, dtype=jnp.int32)[None, :]
    new_BP = (index_P >= shift_B[:, None]) & (index_P < (shift_B + count_B)[:, None])

    def put(row: jax.Array, slots: jax.Array, new_BPKA: jax.Array) -> jax.Array:
        new_KPA = new_BPKA[row, :P].swapaxes(0, 1).astype(slots.dtype)
        new_KPA = jnp.roll(new_KPA, shift_B[row], axis=1)
        K, A = new_KPA.shape[0], new_KPA.shape[2]
        at = (row, 0, start_B[row], 0)
        old_KPA = jax.lax.dynamic_slice(slots, at, (1, K, P, A))[0]
        merged_KPA = jnp.where(new_BP[row][None, :, None], new_KPA, old_KPA)
        return jax.lax.dynamic_update_slice(slots, merged_KPA[None], at)

    def body(row: jax.Array, slots: tuple[tuple[jax.Array, ...], ...]) -> Any:
        k_BKSA, v_BKSA = slots
        return (
            tuple(put(row, k, kv.k_BNKA) for k, kv in zip(k_BKSA, path, strict=True)),
            tuple(put(row, v, kv.v_BNKA) for v, kv in zip(v_BKSA, path, strict=True)),
        )

    k_BKSA, v_BKSA = jax.lax.fori_loop(0, B, body, (cache.k_BKSA, cache.v_BKSA))
    return KVCache(k_BKSA, v_BKSA, jnp.minimum(cache.length_B + count_B, S))


def take_path(tree_kv: Sequence[LayerKV], node_BP: jax.Array) -> tuple[LayerKV, ...]:
    """Gathers the K/V of the nodes on each row's path: [B, N, K, A] -> [B, P, K, A] a layer."""
    index = jnp.clip(node_BP, 0, tree_kv[0].k_BNKA.shape[1] - 1)[:, :, None, None]
    return tuple(
        LayerKV(*(jnp.take_along_axis(array, index, axis=1) for array in kv)) for kv in tree_kv
    )


def insert(cache: KVCache, row: jax.Array, other: KVCache) -> KVCache:
    """Copies the single row of `other` (batch 1, same capacity) over row `row` of `cache`."""

    def put(slots: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(slots, new[0], row, 0)

    return jax.tree.map(put, cache, other)
