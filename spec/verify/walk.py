"""The walk that top-down rules share: from the root to a child, until none is accepted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec.tree import TokenTree
from spec.verify.rule import Accepted

# (depth, node_B) -> the child to go on with, or -1, and the token to emit if it is -1.
Visit = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def walk(visit: Visit, tree: TokenTree, path_size: int) -> Accepted:
    """Follows `visit` down each row's tree; only visited nodes cost anything.

    Args:
        visit: called with the depth (int32 scalar) and each row's node (int32).
        tree: the drafts.
        path_size: P, at least the tree's depth + 1.
    """
    B = tree.token_BN.shape[0]
    node_BP = jnp.full((B, path_size), tree.size, jnp.int32).at[:, 0].set(0)
    zero_B = jnp.zeros(B, jnp.int32)
    Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

    def more(carry: Carry) -> jax.Array:
        _, _, going_B, _, _ = carry
        return going_B.any()

    def step(carry: Carry) -> Carry:
        depth, at_B, going_B, node_BP, bonus_B = carry
        child_B, token_B = visit(depth, at_B)
        descend_B = going_B & (child_B >= 0)
        bonus_B = jnp.where(going_B & (child_B < 0), token_B, bonus_B)
        at_B = jnp.where(descend_B, child_B, at_B)
        put_B = jnp.where(descend_B, child_B, tree.size)
        node_BP = node_BP.at[:, depth + 1].set(put_B, mode="drop")
        return depth + 1, at_B, descend_B, node_BP, bonus_B

    begin = (jnp.zeros((), jnp.int32), zero_B, zero_B == 0, node_BP, zero_B)
    _, _, _, node_BP, bonus_B = jax.lax.while_loop(more, step, begin)
    count_B = jnp.sum(node_BP < tree.size, axis=1, dtype=jnp.int32)
    return Accepted(node_BP, count_B, bonus_B)
