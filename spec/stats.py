"""Counters kept on the device while decoding; `spec/metrics.py` turns them into figures."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from spec.tree import TokenTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Sums over the target steps of each row. Idle rows add nothing.

    Where end-of-sequence or a budget cuts a step, drafts beyond the cut count neither as
    proposed nor as accepted.

    Attributes:
        steps_B: int32 target passes in which the row was active.
        accepted_BP: int32 histogram: steps in which exactly p drafts were accepted.
        proposed_depth_B: int32 sum of the depths of the proposed trees (a chain's length).
        proposed_nodes_B: int32 sum of the drafts in them.
        rank_BN: int32 histogram: steps in which the first emitted token was the root's r-th
            child (0 = first); steps in which it was no child are not counted.
    """

    steps_B: jax.Array
    accepted_BP: jax.Array
    proposed_depth_B: jax.Array
    proposed_nodes_B: jax.Array
    rank_BN: jax.Array

    @classmethod
    def empty(cls, batch: int, path_size: int, tree_size: int) -> Self:
        """Returns zeros."""

        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros((batch, *shape), jnp.int32)

        return cls(zeros(), zeros(path_size), zeros(), zeros(), zeros(tree_size))

    def add(
        self, tree: TokenTree, first_B: jax.Array, path_B: jax.Array, emitted_B: jax.Array
    ) -> Self:
        """Counts one step.

        Args:
            tree: the proposal.
            first_B: int32 first token emitted.
            path_B: int32 nodes on the accepted path before any cut, the root included.
            emitted_B: int32 tokens emitted after the cut; 0 for an idle row.
        """
        active_B = emitted_B > 0
        one_B = active_B.astype(jnp.int32)
        cut_B = emitted_B < path_B
        counted_BN = tree.valid_BN & (tree.depth_BN > 0) & active_B[:, None]
        counted_BN &= ~cut_B[:, None] | (tree.depth_BN <= emitted_B[:, None])
        # A cut turns the last accepted draft into the last emitted token: it was accepted too.
        accepted_B = jnp.minimum(path_B - 1, emitted_B)
        is_child_BN = tree.valid_BN & (tree.depth_BN == 1)
        hit_BN = is_child_BN & (tree.token_BN == first_B[:, None])
        rank_BN = jnp.cumsum(is_child_BN, axis=1) - 1
        rank_B = jnp.min(jnp.where(hit_BN, rank_BN, tree.size), axis=1)

        def one_hot(index_B: jax.Array, size: int) -> jax.Array:
            hot = index_B[:, None] == jnp.arange(size, dtype=jnp.int32)[None, :]
            return (hot & active_B[:, None]).astype(jnp.int32)

        return type(self)(
            self.steps_B + one_B,
            self.accepted_BP + one_hot(accepted_B, self.accepted_BP.shape[1]),
            self.proposed_depth_B + jnp.max(jnp.where(counted_BN, tree.depth_BN, 0), axis=1),
            self.proposed_nodes_B + jnp.sum(counted_BN, axis=1, dtype=jnp.int32),
            self.rank_BN + one_hot(rank_B, self.rank_BN.shape[1]),
        )
