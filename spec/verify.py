"""Which drafts does the target accept, and what does it say after them?"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec.tree import TokenTree


class Accepted(NamedTuple):
    """The accepted path of each row, before end-of-sequence and budget cut it.

    Attributes:
        node_BP: int32 slots of the root and the accepted drafts; N past the path's end.
        count_B: int32 nodes on the path, at least 1: tokens that the step emits.
        bonus_B: int32 token that the target puts after the path.
    """

    node_BP: jax.Array
    count_B: jax.Array
    bonus_B: jax.Array


def best_token(logits_BNV: jax.Array) -> jax.Array:
    """Returns the most probable token of each node, int32 [B, N]; the lowest id among equals.

    `top_k` instead of `argmax`: the same answer, four times faster on XLA:CPU at V = 49152.
    """
    return jax.lax.top_k(logits_BNV, 1)[1][..., 0].astype(jnp.int32)


def accept_greedy(
    tree: TokenTree, mask_BNN: jax.Array, logits_BNV: jax.Array, path_size: int
) -> Accepted:
    """Walks from the root to the child that holds the target's token, as long as there is one.

    SpecInfer algorithm 2, VerifyGreedy. A node is accepted iff it and all its ancestors hold the
    best token of their parents: parent pointers decide, never slot positions.

    Args:
        tree: the drafts.
        mask_BNN: its ancestor mask.
        logits_BNV: the target's logits at every node.
        path_size: P, at least the tree's depth + 1.
    """
    N = tree.size
    best_BN = best_token(logits_BNV)
    index_N = jnp.arange(N, dtype=jnp.int32)[None, :]
    wanted_BN = jnp.take_along_axis(best_BN, tree.parent_BN, axis=1)
    match_BN = (tree.token_BN == wanted_BN) | (index_N == 0)
    broken_BN = jnp.any(mask_BNN & ~match_BN[:, None, :], axis=2)
    depth_BN = jnp.where(tree.valid_BN & ~broken_BN, tree.depth_BN, -1)
    # Equal siblings (an unmerged tree) give several deepest nodes; argmax takes the first.
    leaf_B1 = jnp.argmax(depth_BN, axis=1).astype(jnp.int32)[:, None]
    node_BP = path_to(tree, mask_BNN, leaf_B1, path_size)
    count_B = jnp.take_along_axis(tree.depth_BN, leaf_B1, axis=1)[:, 0] + 1
    return Accepted(node_BP, count_B, jnp.take_along_axis(best_BN, leaf_B1, axis=1)[:, 0])


def path_to(tree: TokenTree, mask_BNN: jax.Array, leaf_B1: jax.Array, path_size: int) -> jax.Array:
    """Returns int32 [B, P]: slots from the root to `leaf_B1` [B, 1], then N."""
    above_BN = jnp.take_along_axis(mask_BNN, leaf_B1[:, :, None], axis=1)[:, 0]
    step_P = jnp.arange(path_size, dtype=jnp.int32)
    at_BPN = above_BN[:, None, :] & (tree.depth_BN[:, None, :] == step_P[None, :, None])
    index_N = jnp.arange(tree.size, dtype=jnp.int32)
    node_BP = jnp.sum(jnp.where(at_BPN, index_N[None, None, :], 0), axis=2)
    return jnp.where(at_BPN.any(axis=2), node_BP, tree.size)
