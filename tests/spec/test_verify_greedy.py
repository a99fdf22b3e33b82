"""Greedy verification against a plain walk, and the faults that others had."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec.merge import merge
from spec.sampling import best_token
from spec.tree import TokenTree, ancestor_mask, limit_depth
from spec.tree_shapes import TreeShape, expansion
from spec.verify import Greedy
from tests.common import toys


@toys.quick
def accept(tree, logits_BNV):
    return Greedy().accept(tree, ancestor_mask(tree), best_token(logits_BNV), tree.size)


def one_hot(best_BN: np.ndarray, vocab: int) -> jax.Array:
    return jnp.asarray(np.arange(vocab) == best_BN[..., None], jnp.float32)


def walk(tree: TokenTree, best_N: np.ndarray, row: int) -> list[int]:
    """Longest path of drafts that each hold their parent's best token, lowest slots first."""
    token, parent = np.asarray(tree.token_BN)[row], np.asarray(tree.parent_BN)[row]
    valid = np.asarray(tree.valid_BN)[row]

    def longest(node: int) -> list[int]:
        found: list[int] = []
        for child in range(1, tree.size):
            if valid[child] and parent[child] == node and token[child] == best_N[node]:
                below = longest(child)
                found = below if len(below) > len(found) else found
        return [node, *found]

    return longest(0)


def best_by_path(tree: TokenTree, vocab: int, seed: int) -> np.ndarray:
    """A target: its best token is a function of the whole sequence, as a model's is."""
    B, N = tree.token_BN.shape
    best_BN = np.zeros((B, N), np.int32)
    for b in range(B):
        for node, path in toys.paths(tree, b).items():
            best_BN[b, node] = np.random.default_rng([seed, b, *path]).integers(vocab)
    return best_BN


@pytest.mark.parametrize(("size", "padding"), [(1, 0), (9, 0), (24, 6)])
def test_equals_a_walk_by_parent_pointers(size, padding):
    """Random trees with two tokens: equal siblings, dead ends and full paths all occur."""
    B, vocab, deepest = 64, 2, 0
    for seed in range(4):
        rng = np.random.default_rng([seed, size])
        tree = toys.random_tree(rng, size, vocab, batch=B, padding=padding)
        best_BN = best_by_path(tree, vocab, seed)
        node_BP, count_B, bonus_B = map(np.asarray, accept(tree, one_hot(best_BN, vocab)))
        for b in range(B):
            path = walk(tree, best_BN[b], b)
            token_N = np.asarray(tree.token_BN)[b]
            assert count_B[b] == len(path)
            # Equal siblings may be told apart by slot, never by what they say.
            got = node_BP[b, : count_B[b]]
            assert token_N[got].tolist() == token_N[path].tolist()
            assert np.asarray(tree.parent_BN)[b][got[1:]].tolist() == got[:-1].tolist()
            assert (node_BP[b, count_B[b] :] == size).all(), "past the path stands N"
            assert bonus_B[b] == best_BN[b, path[-1]]
            deepest = max(deepest, len(path))
    assert deepest >= min(size, 5), "the trees were too easy to reject"


def test_equal_siblings_give_what_their_merge_gives():
    """The first of two equal siblings ends; its twin goes on and must be found."""
    tree = TokenTree(
        token_BN=jnp.asarray([[7, 0, 0, 1, 4]], jnp.int32),
        parent_BN=jnp.asarray([[0, 0, 0, 2, 3]], jnp.int32),
        depth_BN=jnp.asarray([[0, 1, 1, 2, 3]], jnp.int32),
        valid_BN=jnp.ones((1, 5), jnp.bool_),
    )
    best_BN = np.array([[0, 1, 1, 4, 9]])
    unmerged = accept(tree, one_hot(best_BN, 11))
    assert unmerged.node_BP[0].tolist() == [0, 2, 3, 4, 5]
    merged, slot_BN = toys.quick(merge)((tree,))
    best_of_slot = np.zeros((1, 5), np.int32)
    best_of_slot[0, np.asarray(slot_BN[0])] = best_BN[0]
    fused = accept(merged, one_hot(best_of_slot, 11))
    assert fused.node_BP[0].tolist() == [0, 1, 2, 3, 5]
    assert int(unmerged.count_B[0]) == int(fused.count_B[0]) == 4
    assert int(unmerged.bonus_B[0]) == int(fused.bonus_B[0]) == 9


@pytest.mark.parametrize("widths", [(1, 1, 3, 1, 1, 1, 1, 1), (3, *[1] * 7), (2, 2, *[1] * 6)])
def test_every_branch_of_a_default_tree_can_be_accepted(widths):
    """FlexFlow accepts 8/2/2, 8/8/8 and 8/1/1/1 drafts here."""
    shape = expansion(widths)
    tree = of_shape(shape)
    leaves = [i for i, d in enumerate(shape.depth) if d == 8]
    for leaf in leaves:
        path = np.flatnonzero(shape.ancestors()[leaf])
        best_N = np.full(shape.size, 99)
        best_N[path[:-1]] = np.asarray(tree.token_BN[0])[path[1:]]
        accepted = accept(tree, one_hot(best_N[None], 100))
        assert int(accepted.count_B[0]) - 1 == 8
        assert accepted.node_BP[0, :9].tolist() == path.tolist()
        assert int(accepted.bonus_B[0]) == 99


def of_shape(shape: TreeShape) -> TokenTree:
    """A tree whose node i holds token i."""
    rows = [jnp.asarray([row], jnp.int32) for row in (range(shape.size), shape.parent, shape.depth)]
    return TokenTree(*rows, jnp.ones((1, shape.size), jnp.bool_))


def test_the_first_draft_is_checked():
    """HO-03: a draft whose successor would be right is still wrong."""
    tree = of_shape(expansion((1, 1)))
    accepted = accept(tree, one_hot(np.array([[5, 2, 3]]), 11))
    assert int(accepted.count_B[0]) == 1
    assert int(accepted.bonus_B[0]) == 5


def test_a_right_child_of_a_wrong_parent_is_not_accepted():
    """Slots 1 and 2 are siblings; 3 hangs under the wrong one and would fit the right one."""
    tree = TokenTree(
        token_BN=jnp.asarray([[7, 0, 8, 1]], jnp.int32),
        parent_BN=jnp.asarray([[0, 0, 0, 2]], jnp.int32),
        depth_BN=jnp.asarray([[0, 1, 1, 2]], jnp.int32),
        valid_BN=jnp.ones((1, 4), jnp.bool_),
    )
    accepted = accept(tree, one_hot(np.array([[0, 1, 1, 4]]), 11))
    assert accepted.node_BP[0, :2].tolist() == [0, 1]
    assert int(accepted.count_B[0]) == 2
    assert int(accepted.bonus_B[0]) == 1


def test_padding_is_never_accepted():
    """Padding holds token 0 under the root, which the target may well want."""
    tree = TokenTree(
        token_BN=jnp.asarray([[7, 8, 0]], jnp.int32),
        parent_BN=jnp.zeros((1, 3), jnp.int32),
        depth_BN=jnp.asarray([[0, 1, 0]], jnp.int32),
        valid_BN=jnp.asarray([[True, True, False]]),
    )
    accepted = accept(tree, one_hot(np.zeros((1, 3), np.int32), 11))
    assert int(accepted.count_B[0]) == 1
    assert int(accepted.bonus_B[0]) == 0


def test_a_node_that_was_cut_off_is_not_accepted():
    """`limit_depth` leaves right drafts where they are, but invalid."""
    tree = limit_depth(toys.drawn_tree(), jnp.asarray([2], jnp.int32))
    best_BN = np.array([[0, 1, 3, 4, 3, 5]])  # 7, then 0 1 4
    accepted = accept(tree, one_hot(best_BN, 11))
    assert accepted.node_BP[0].tolist() == [0, 1, 6, 6, 6, 6]
    assert int(accepted.count_B[0]) == 2
    assert int(accepted.bonus_B[0]) == 1


def test_the_lowest_id_wins_a_tie():
    logits_BNV = jnp.asarray([[[0, 3, 3, 1], [-1, -1, -1, -1], [-9, -9, -9, 0]]], jnp.float32)
    assert best_token(logits_BNV).tolist() == [[1, 0, 3]]


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1000])
def test_the_best_token_lies_wherever_it_lies(vocab):
    """Blocks and their rest; few values, so that most rows hold ties within and across blocks."""
    rng = np.random.default_rng(vocab)
    logits_BNV = rng.integers(-3, 3, (4, 50, vocab)).astype(np.float32)
    logits_BNV[:, :5] -= np.inf
    logits_BNV[3, 4, -1] = -1e30
    got = jax.jit(best_token)(logits_BNV)
    np.testing.assert_array_equal(got, logits_BNV.argmax(-1))
