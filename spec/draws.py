"""How the nodes of a tree were drawn: what a verification rule must know to stay exact."""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spec.merge import merge
from spec.tree import TokenTree


class Kind(enum.IntEnum):
    """How a child token came about, given its parent."""

    PADDING = 0
    IID = 1  # drawn with replacement from its row of q
    WITHOUT_REPLACEMENT = 2  # drawn from its row of q with the row's earlier draws zeroed
    POINT_MASS = 3  # a deterministic function of the context; it has no row of q


class Children(enum.Enum):
    """How a drafter chooses the children of a node: what decides which rules stay exact."""

    TOP_K = "top_k"  # the most probable tokens, or a lookup: deterministic
    IID = "iid"  # sampled with replacement, every draw kept
    WITHOUT_REPLACEMENT = "without_replacement"  # sampled, in draw order (Gumbel top-k)
    GREEDY_PLUS_ONE = "greedy_plus_one"  # one sample outside the top k-1, then the top k-1
    RERANKED = "reranked"  # sampled, then reordered or pruned by the samples' own scores
    FUSED = "fused"  # sampled, equal draws kept as a single trial
    MERGED = "merged"  # nodes may hold draws of several drafters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """M trials a row, in the order in which they were drawn.

    A node can hold several draws (equal paths of a merge); each stays one trial.

    Attributes:
        child_BM: int32 node of each draw.
        parent_BM: int32 node it was drawn under.
        kind_BM: int32, see `Kind`.
        row_BM: int32 row of `q_BQV` that it was drawn from; unused for point masses.
        q_BQV: float32, one distribution for each expanded parent and drafter (not for each node),
            processed exactly as it was sampled.
    """

    child_BM: jax.Array
    parent_BM: jax.Array
    kind_BM: jax.Array
    row_BM: jax.Array
    q_BQV: jax.Array


def at_least_one(draws: Draws) -> Draws:
    """Returns the draws, with one padding trial if there is none at all."""
    if draws.child_BM.shape[1]:
        return draws
    nothing_B1 = jnp.zeros((draws.child_BM.shape[0], 1), jnp.int32)
    return Draws(nothing_B1, nothing_B1, nothing_B1, nothing_B1, draws.q_BQV)


def point_mass(tree: TokenTree) -> Draws:
    """Returns the draws of a tree whose every draft is a deterministic choice: one a node."""
    B, N = tree.token_BN.shape
    child_BM = jnp.broadcast_to(jnp.arange(1, N, dtype=jnp.int32)[None, :], (B, N - 1))
    kind_BM = jnp.where(tree.valid_BN[:, 1:], Kind.POINT_MASS.value, Kind.PADDING.value)
    return Draws(
        child_BM,
        tree.parent_BN[:, 1:],
        kind_BM.astype(jnp.int32),
        jnp.zeros_like(child_BM),
        jnp.zeros((B, 0, 0), jnp.float32),
    )


def drop_invalid(draws: Draws, tree: TokenTree) -> Draws:
    """Turns draws of invalid nodes into padding.

    Exact as long as nodes are cut by their depth or position alone, or all that one drafter drew
    are, by something that no draw decides; never by their tokens.
    """
    valid_BM = jnp.take_along_axis(tree.valid_BN, draws.child_BM, axis=1)
    kind_BM = jnp.where(valid_BM, draws.kind_BM, Kind.PADDING.value)
    return dataclasses.replace(draws, kind_BM=kind_BM)


def merge_drawn(
    trees: Sequence[TokenTree], drawn: Sequence[Draws]
) -> tuple[TokenTree, Draws, jax.Array]:
    """Merges trees and keeps every draw as a trial of its own.

    Args:
        trees: with equal roots.
        drawn: the draws of each tree.

    Returns:
        The union, all draws in the order of the trees, and `merge`'s slot map.
    """
    merged, slot_BN = merge(trees)
    columns: list[tuple[jax.Array, ...]] = []
    base, q_base = 0, 0
    vocab = max(draws.q_BQV.shape[2] for draws in drawn)
    for tree, draws in zip(trees, drawn, strict=True):
        # Node i >= 1 of this tree is node base + i of the join; all roots are node 0.
        child_BM = jnp.take_along_axis(slot_BN, draws.child_BM + base, axis=1)
        joined_BM = jnp.where(draws.parent_BM == 0, 0, draws.parent_BM + base)
        parent_BM = jnp.take_along_axis(slot_BN, joined_BM, axis=1)
        # Point masses alone have no row: theirs must not point beyond the last.
        row_BM = draws.row_BM + (q_base if draws.q_BQV.shape[1] else 0)
        columns.append((child_BM, parent_BM, draws.kind_BM, row_BM))
        base += tree.size - 1
        q_base += draws.q_BQV.shape[1]
    joined = [jnp.concatenate(column, axis=1) for column in zip(*columns, strict=True)]
    # Drafters without rows of q (point masses) come with vocabulary 0.
    q_BQV = jnp.concatenate(
        [
            jnp.pad(draws.q_BQV, ((0, 0), (0, 0), (0, vocab - draws.q_BQV.shape[2])))
            for draws in drawn
        ],
        axis=1,
    )
    child_BM = jnp.minimum(joined[0], merged.size - 1)
    return merged, Draws(child_BM, joined[1], joined[2], joined[3], q_BQV), slot_BN
