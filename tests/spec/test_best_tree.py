"""The best static tree: the dynamic program against all trees there are."""

import numpy as np
import pytest

from spec.best_tree import best_tree, expected_tokens, fastest
from spec.tree_shapes import TreeShape, expansion

# Depth-conditioned, falling with rank, as drafters have them.
FALLING = np.array([[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.7, 0.1, 0.1]])


def all_trees(size, ranks):
    """Yields every tree of `size` nodes in level order whose siblings have ranks 0, 1, 2, ..."""

    def more(parent, rank):
        if len(parent) == size:
            yield TreeShape(tuple(parent), tuple(rank))
            return
        for node in range(parent[-1], len(parent)):  # level order: parents do not go back
            kids = parent[1:].count(node)
            if kids < ranks:
                yield from more([*parent, node], [*rank, kids])

    yield from more([0], [0])


def test_all_trees_are_counted():
    # Ordered trees of n + 1 nodes: the Catalan numbers.
    assert [sum(1 for _ in all_trees(n, n)) for n in range(1, 9)] == [1, 1, 2, 5, 14, 42, 132, 429]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", range(1, 9))
def test_equals_brute_force(size, seed):
    rate_LR = np.random.default_rng(seed).uniform(size=(3, 3))  # in no order at all
    for depth in (1, 2, 7):
        shape = best_tree(rate_LR, size, depth)
        assert shape.size <= size
        assert shape.depth[-1] <= depth
        candidates = [
            tree
            for smaller in range(1, size + 1)
            for tree in all_trees(smaller, 3)
            if tree.depth[-1] <= depth
        ]
        most = max(expected_tokens(tree, rate_LR) for tree in candidates)
        np.testing.assert_allclose(expected_tokens(shape, rate_LR), most, rtol=1e-12)


@pytest.mark.parametrize("widths", [(1, 1, 3, 1, 1, 1, 1, 1), (3, 1, 1, 1, 1, 1, 1, 1)])
def test_never_below_the_papers_trees(widths):
    paper = expansion(widths)
    for seed in range(20):
        rates = np.sort(np.random.default_rng(seed).dirichlet(np.ones(6), size=8))[:, ::-1]
        best = best_tree(rates, paper.size, 8)
        assert expected_tokens(best, rates) >= expected_tokens(paper, rates) - 1e-12


def test_expected_tokens_by_hand():
    # Root with two children, the first with one: 1 + .6 + .2 + .6 * .5.
    assert expected_tokens(TreeShape((0, 0, 0, 1), (0, 0, 1, 0)), FALLING) == pytest.approx(2.1)
    # A fourth level has the third's rates; a rank that was not measured adds nothing.
    assert expected_tokens(expansion((1, 1, 1, 1)), FALLING) == pytest.approx(
        1 + 0.6 + 0.3 + 0.21 + 0.147
    )
    assert expected_tokens(TreeShape((0, 0), (0, 3)), FALLING) == 1


def test_nothing_is_drafted_that_is_never_right():
    assert best_tree(np.zeros((2, 4)), 8, 3).size == 1
    assert best_tree(np.array([[1.0, 0.0]]), 8, 3) == expansion((1, 1, 1))


def test_the_machine_decides_how_much_pays():
    cheap = fastest(FALLING, 0.0, {1: 1.0, 8: 1.0, 64: 1.0}, 8)
    assert cheap.shape.size > 8
    steep = fastest(FALLING, 0.0, {1: 1.0, 8: 1.5, 64: 5.4}, 8)
    assert 1 < steep.shape.size <= 8
    assert fastest(FALLING, 0.0, {1: 1.0, 8: 3.0}, 8).shape.size == 1
    slow_drafter = fastest(FALLING, 0.2, {1: 1.0, 8: 1.5}, 8)
    assert slow_drafter.shape.depth[-1] < steep.shape.depth[-1]
    assert slow_drafter.speed == pytest.approx(slow_drafter.tokens / slow_drafter.seconds)


def test_refusals():
    for rates in (np.zeros(3), np.zeros((0, 2)), np.array([[1.2]]), np.array([[np.nan]])):
        with pytest.raises(ValueError, match="levels by ranks"):
            best_tree(rates, 4, 2)
    with pytest.raises(ValueError, match="size 0"):
        best_tree(FALLING, 0, 2)
    with pytest.raises(ValueError, match="plain decoding"):
        fastest(FALLING, 0.1, {8: 1.0}, 2)
