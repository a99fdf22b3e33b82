"""Tree merge (SpecInfer definition 3.2): the trie union of token trees.

Two nodes are one iff their root-to-node token sequences are equal; (token, depth) is not enough.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spec.tree import TokenTree, compact


def same_path(tree: TokenTree) -> jax.Array:
    """Returns bool [B, N, N]: valid nodes i and j spell the same sequence from the root.

    Doubling as in `ancestor_mask`: nodes agree on their last 2s tokens iff they agree on the last
    s and their s-th ancestors do too. Equal depth makes both walks reach the root together.
    """
    N = tree.size

    def equal(array_BN: jax.Array) -> jax.Array:
        return array_BN[:, :, None] == array_BN[:, None, :]

    same = equal(tree.token_BN) & equal(tree.depth_BN)
    same &= tree.valid_BN[:, :, None] & tree.valid_BN[:, None, :]
    jump_BN = tree.parent_BN
    for _ in range(math.ceil(math.log2(N)) if N > 1 else 0):
        up = jnp.take_along_axis(same, jump_BN[:, :, None], axis=1)
        same &= jnp.take_along_axis(up, jump_BN[:, None, :], axis=2)
        jump_BN = jnp.take_along_axis(jump_BN, jump_BN, axis=1)
    return same


def join(trees: Sequence[TokenTree]) -> TokenTree:
    """Hangs trees with equal roots under the first one's root: 1 + sum(N_i - 1) slots, unmerged.

    The result may hold equal paths and padding between valid nodes.
    """
    parents = [trees[0].parent_BN]
    base = trees[0].size  # slot of the next tree's first draft
    for tree in trees[1:]:
        own = tree.parent_BN[:, 1:]
        parents.append(jnp.where(own == 0, 0, own + base - 1))
        base += tree.size - 1

    def chain(name: str) -> jax.Array:
        rest = [getattr(tree, name)[:, 1:] for tree in trees[1:]]
        return jnp.concatenate([getattr(trees[0], name), *rest], axis=1)

    parent_BN = jnp.concatenate(parents, axis=1)
    return TokenTree(chain("token_BN"), parent_BN, chain("depth_BN"), chain("valid_BN"))


def merge(trees: Sequence[TokenTree]) -> tuple[TokenTree, jax.Array]:
    """Returns the union of trees that share their root, and where every node went.

    Nothing is truncated: the result has 1 + sum(N_i - 1) slots.

    Args:
        trees: at least one; equal roots.

    Returns:
        The merged tree, and int32 [B, N]: for each node of `join(trees)` its slot there (N for
        padding). Equal paths share a slot, so every draft can still be traced to its node.
    """
    joined = join(trees)
    same = same_path(joined)
    first_BN = jnp.argmax(same, axis=2).astype(jnp.int32)
    index_N = jnp.arange(joined.size, dtype=jnp.int32)
    keep_BN = joined.valid_BN & (first_BN == index_N[None, :])
    # A later tree may hang a new node under a fused one: its parent is the one that was kept.
    parent_BN = jnp.take_along_axis(first_BN, joined.parent_BN, axis=1)
    joined = TokenTree(joined.token_BN, parent_BN, joined.depth_BN, joined.valid_BN)
    merged, slot_BN = compact(joined, keep_BN, joined.size)
    slot_BN = jnp.take_along_axis(slot_BN, first_BN, axis=1)
    return merged, jnp.where(joined.valid_BN, slot_BN, joined.size)
