"""The token tree: masks, depth limits, compaction, and the tokens that a path emits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec.tree import (
    TokenTree,
    ancestor_mask,
    compact,
    emitted_tokens,
    limit_depth,
    root_only,
)
from tests.common import toys


def test_mask_of_the_drawn_tree():
    # Read off the drawing in spec/tree.py, row by row.
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    np.testing.assert_array_equal(ancestor_mask(toys.drawn_tree())[0], np.array(expected, bool))


def test_drawn_tree_is_the_drawing():
    assert toys.paths(toys.drawn_tree()) == {
        0: (7,),
        1: (7, 0),
        2: (7, 8),
        3: (7, 0, 1),
        4: (7, 0, 2),
        5: (7, 0, 1, 4),
    }


@pytest.mark.parametrize(("size", "padding"), [(1, 0), (2, 0), (3, 1), (16, 0), (33, 9)])
def test_mask_equals_a_walk_by_parent_pointers(size, padding):
    tree = toys.random_tree(np.random.default_rng(size), size, 5, batch=16, padding=padding)
    mask = np.asarray(toys.quick(ancestor_mask)(tree))
    np.testing.assert_array_equal(mask, toys.walked_mask(tree))
    real = size - padding
    assert not mask[:, :real, real:].any(), "a node sees padding"
    assert (mask[:, real:].sum(axis=2) == 2).all(), "padding sees more than itself and the root"


@pytest.mark.parametrize("size", [2, 9, 64])
def test_mask_of_a_chain_is_causal(size):
    """The longest walks: log2(N) doublings must reach the root."""
    index = jnp.arange(size, dtype=jnp.int32)[None]
    tree = TokenTree(index, jnp.maximum(index - 1, 0), index, jnp.ones((1, size), jnp.bool_))
    np.testing.assert_array_equal(toys.quick(ancestor_mask)(tree)[0], np.tri(size, dtype=bool))


def test_a_node_of_depth_d_needs_room_for_d_plus_one_tokens():
    tree = jax.tree.map(lambda x: jnp.repeat(x, 6, axis=0), toys.drawn_tree())
    limited = limit_depth(tree, jnp.arange(6, dtype=jnp.int32))
    for room, valid in enumerate(np.asarray(limited.valid_BN)):
        # The root always stays: without room the row is idle, not empty.
        np.testing.assert_array_equal(valid, np.asarray(tree.depth_BN[0]) <= max(room - 1, 0))
    np.testing.assert_array_equal(limited.token_BN, tree.token_BN)


@pytest.mark.parametrize("size", [12, 7])
def test_compaction_keeps_paths_and_order(size):
    rng = np.random.default_rng(0)
    tree = toys.random_tree(rng, 12, 4, batch=32)
    keep_BN = rng.random((32, 12)) < 0.7
    keep_BN[:, 0] = True
    for b in range(32):
        for i in range(1, 12):
            keep_BN[b, i] &= keep_BN[b, int(tree.parent_BN[b, i])]
            keep_BN[b, i] &= keep_BN[b, :i].sum() < size
    small, slot_BN = toys.quick(compact, static_argnums=2)(tree, jnp.asarray(keep_BN), size)
    assert small.size == size
    for b in range(32):
        kept = np.flatnonzero(keep_BN[b])
        before, after = toys.paths(tree, b), toys.paths(small, b)
        assert list(after) == list(range(len(kept)))
        assert [after[new] for new in range(len(kept))] == [before[int(old)] for old in kept]
        wanted = np.where(keep_BN[b], np.cumsum(keep_BN[b]) - 1, size)
        np.testing.assert_array_equal(slot_BN[b], wanted)
        depth = np.asarray(small.depth_BN[b])
        assert [len(after[i]) - 1 for i in after] == depth[: len(kept)].tolist()


def test_first_and_root_only():
    tree = toys.drawn_tree()
    assert tree.size == 6
    assert toys.paths(tree.first(3)) == {0: (7,), 1: (7, 0), 2: (7, 8)}
    assert toys.paths(root_only(jnp.asarray([5], jnp.int32))) == {0: (5,)}


def test_emitted_tokens_are_the_drafts_and_then_the_bonus():
    path_P, bonus = [9, 1, 2, 3], 7
    token_BP = jnp.asarray([path_P] * 5, jnp.int32)
    count_B = jnp.arange(5, dtype=jnp.int32)
    out_BP = np.asarray(emitted_tokens(token_BP, count_B, jnp.full(5, bonus, jnp.int32)))
    # `count` nodes on the path, the root first: count - 1 drafts, then the bonus.
    expected = [[], [7], [1, 7], [1, 2, 7], [1, 2, 3, 7]]
    assert [out_BP[row, :count].tolist() for row, count in enumerate(range(5))] == expected
