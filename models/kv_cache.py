"""The cache protocol: a plain pytree of committed keys and values, and the functions that fill it.

A cache is read by attention and never written there. K/V of tree nodes live apart (`LayerKV`)
until `commit` scatters those of the accepted path behind each row's length. Rows have their own
lengths. Every function returns a new cache; under `jit` with donation XLA updates it in place.

A paged cache will keep these names and signatures, with pages as the first axis and a block table.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

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
    B, P = path[0].k_BNKA.shape[:2]
    S = cache.capacity
    step_P = jnp.arange(P, dtype=jnp.int32)
    slot_BP = cache.length_B[:, None] + step_P[None, :]
    # JAX drops a scatter to S (out of range) but wraps -1 and clamps slices: S is the padding.
    slot_BP = jnp.where(step_P[None, :] < count_B[:, None], jnp.minimum(slot_BP, S), S)
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]

    def put(slots: jax.Array, new_BPKA: jax.Array) -> jax.Array:
        return slots.at[row_B1, :, slot_BP].set(new_BPKA.astype(slots.dtype), mode="drop")

    return KVCache(
        tuple(put(k, kv.k_BNKA) for k, kv in zip(cache.k_BKSA, path, strict=True)),
        tuple(put(v, kv.v_BNKA) for v, kv in zip(cache.v_BKSA, path, strict=True)),
        jnp.minimum(cache.length_B + count_B, S),
    )


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
