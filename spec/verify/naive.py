"""Naive sampling: draw from the target, descend if the token is a child.

Exact for any tree, because the drafts do not touch the distribution (SpecInfer section 4.3's
baseline; SpecExec arXiv 2406.02532 uses it). For deterministic children it is as good as the
point-mass acceptance test, and it makes the tokens independent of the tree.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spec.draws import Children, Draws
from spec.sampling import Use, draw, fold
from spec.tree import TokenTree
from spec.verify.rule import Accepted, Keys, Law, Target, normalise, pick
from spec.verify.walk import walk


@dataclasses.dataclass(frozen=True)
class Naive:
    """Implements `Rule`. Token y at position i is drawn with the key of (seed, request, i)."""

    name: str = "naive"
    admits: frozenset[Children] = frozenset(Children)

    def order(self, draws: Draws, key_B: jax.Array) -> Draws:
        """Any order will do."""
        return draws

    def law(self, p_BNV: jax.Array, tree: TokenTree, draws: Draws) -> Law:
        """See `Rule.law`; the draws are not looked at."""
        B, N, V = p_BNV.shape
        row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
        index_N = jnp.arange(N, dtype=jnp.int32)[None, :]
        child_BN = tree.valid_BN & (index_N > 0)
        # Equal siblings: the first one is entered.
        same_BNN = (tree.token_BN[:, :, None] == tree.token_BN[:, None, :]) & (
            tree.parent_BN[:, :, None] == tree.parent_BN[:, None, :]
        )
        same_BNN &= child_BN[:, :, None] & child_BN[:, None, :]
        first_BN = child_BN & (jnp.argmax(same_BNN, axis=2).astype(jnp.int32) == index_N)
        p_child_BN = p_BNV[row_B1, tree.parent_BN, tree.token_BN]
        held_BNV = jnp.zeros((B, N, V), p_BNV.dtype)
        held_BNV = held_BNV.at[row_B1, tree.parent_BN, tree.token_BN].max(
            child_BN.astype(p_BNV.dtype)
        )
        rest_BNV = p_BNV * (1 - held_BNV)

        def enter(node: jax.Array, reach_BN: jax.Array) -> jax.Array:
            up_B = pick(reach_BN, tree.parent_BN[:, node])
            gain_B = jnp.where(first_BN[:, node], up_B * p_child_BN[:, node], 0)
            return reach_BN.at[:, node].set(gain_B)

        reach_BN = jnp.zeros((B, N), p_BNV.dtype).at[:, 0].set(1)
        reach_BN = jax.lax.fori_loop(1, N, enter, reach_BN)
        return Law(reach_BN * rest_BNV.sum(-1), normalise(rest_BNV, p_BNV))

    def sample(
        self, p_at: Target, tree: TokenTree, draws: Draws, keys: Keys, path_size: int
    ) -> Accepted:
        """See `Rule.sample`."""

        def visit(depth: jax.Array, node_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            position_B = keys.position_B + depth + 1
            y_B = draw(fold(keys.row_B, Use.TOKEN, position_B), p_at(node_B))
            hit_BN = tree.valid_BN & (tree.parent_BN == node_B[:, None]) & (tree.depth_BN > 0)
            hit_BN &= tree.token_BN == y_B[:, None]
            child_B = jnp.argmax(hit_BN, axis=1).astype(jnp.int32)
            return jnp.where(hit_BN.any(axis=1), child_B, -1), y_B

        return walk(visit, tree, path_size)
