"""The token tree: N slots, slot 0 the root, every parent before its children.

Drawn once, for tests and documentation (SpecInfer definition 3.1; slot:token):

    0:7 ─┬─ 1:0 ─┬─ 3:1 ── 5:4
         │       └─ 4:2
         └─ 2:8

    parent = 0 0 0 1 1 3    depth = 0 1 1 2 2 3
"""

import dataclasses
import math

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTree:
    """A batch of trees with static size N.

    The root is the last emitted token, not yet cached; the other nodes are drafts. parent[i] < i,
    padding has parent 0, a valid node's parent is valid. Valid slots come first, but where a
    sampling drafter had nothing left to draw. The absolute position of a node is the cache length
    plus its depth.

    Attributes:
        token_BN: int32 token of each node.
        parent_BN: int32 slot of each node's parent; the root's is 0.
        depth_BN: int32 distance from the root.
        valid_BN: bool, False for padding.
    """

    token_BN: jax.Array
    parent_BN: jax.Array
    depth_BN: jax.Array
    valid_BN: jax.Array

    @property
    def size(self) -> int:
        """N, slots a row."""
        return self.token_BN.shape[1]

    def first(self, size: int) -> "TokenTree":
        """Returns the tree's first `size` slots (those after must be padding or unwanted)."""
        return jax.tree.map(lambda array: array[:, :size], self)


def root_only(root_B: jax.Array) -> TokenTree:
    """Returns the one-node tree of each row: plain decoding."""
    token_BN = root_B[:, None]
    zero = jnp.zeros_like(token_BN)
    return TokenTree(token_BN, zero, zero, jnp.ones(token_BN.shape, jnp.bool_))


def ancestor_mask(tree: TokenTree) -> jax.Array:
    """Returns bool [B, N, N]: entry (i, j) says that j is i or an ancestor of i.

    Padding sees itself and the root, and nobody sees padding. Pointer doubling: after step s a
    node knows its 2^s nearest ancestors, so log2(N) gathers do.
    """
    B, N = tree.token_BN.shape
    mask = jnp.broadcast_to(jnp.eye(N, dtype=jnp.bool_), (B, N, N))
    jump_BN = tree.parent_BN
    for _ in range(math.ceil(math.log2(N)) if N > 1 else 0):
        mask |= jnp.take_along_axis(mask, jump_BN[:, :, None], axis=1)
        jump_BN = jnp.take_along_axis(jump_BN, jump_BN, axis=1)
    return mask


def limit_depth(tree: TokenTree, room_B: jax.Array) -> TokenTree:
    """Invalidates nodes deeper than room - 1: a node of depth d gives at most d + 1 tokens.

    Validity stays ancestor-closed, but valid slots may cease to be first; `compact` restores that.
    """
    return dataclasses.replace(
        tree, valid_BN=tree.valid_BN & (tree.depth_BN <= jnp.maximum(room_B[:, None] - 1, 0))
    )


def compact(tree: TokenTree, keep_BN: jax.Array, size: int) -> tuple[TokenTree, jax.Array]:
    """Moves the kept nodes to the front, in order, into a tree of `size` slots.

    Args:
        tree: the tree.
        keep_BN: bool, ancestor-closed, root included; at most `size` a row.
        size: slots of the result.

    Returns:
        The tree, and int32 [B, N]: new slot of each old node, `size` where it was dropped.
    """
    B = tree.token_BN.shape[0]
    slot_BN = jnp.cumsum(keep_BN, axis=1, dtype=jnp.int32) - 1
    slot_BN = jnp.where(keep_BN & (slot_BN < size), slot_BN, size)
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]

    def move(array_BN: jax.Array) -> jax.Array:
        out = jnp.zeros((B, size), array_BN.dtype)
        return out.at[row_B1, slot_BN].set(array_BN, mode="drop")

    parent_BN = jnp.take_along_axis(slot_BN, tree.parent_BN, axis=1)
    moved = TokenTree(
        move(tree.token_BN), move(parent_BN), move(tree.depth_BN), move(tree.valid_BN)
    )
    return moved, slot_BN


def append(buffer: jax.Array, new: jax.Array, used_B: jax.Array, count_B: jax.Array) -> jax.Array:
    """Writes the first `count` entries of each row of `new` [B, P, ...] behind `used`.

    What would go past the end of the buffer [B, E, ...] is dropped.
    """
    B, P = new.shape[:2]
    step_P = jnp.arange(P, dtype=jnp.int32)[None, :]
    slot_BP = jnp.where(step_P < count_B[:, None], used_B[:, None] + step_P, buffer.shape[1])
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    return buffer.at[row_B1, slot_BP].set(new, mode="drop")


def dropped(buffer: jax.Array, count_B: jax.Array) -> jax.Array:
    """Moves each row of [B, E, ...] to the front by `count`; the end repeats the last entry."""
    E = buffer.shape[1]
    index_BE = jnp.minimum(jnp.arange(E, dtype=jnp.int32)[None, :] + count_B[:, None], E - 1)
    return jnp.take_along_axis(
        buffer, index_BE.reshape(*index_BE.shape, *[1] * (buffer.ndim - 2)), 1
    )


def emitted_tokens(token_BP: jax.Array, count_B: jax.Array, bonus_B: jax.Array) -> jax.Array:
    """Returns int32 [B, P]: the accepted drafts, then the bonus at index count - 1."""
    shifted = jnp.roll(token_BP, -1, axis=1)
    index_P = jnp.arange(token_BP.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(index_P == count_B[:, None] - 1, bonus_B[:, None], shifted)
