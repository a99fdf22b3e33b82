"""Static topologies: counts that the paper gives, structure, and what is refused."""

import numpy as np
import pytest

from spec.tree_shapes import TreeShape, expansion, parse_expansion
from tests.common import toys


@pytest.mark.parametrize(
    ("widths", "nodes", "leaves"),
    [
        # SpecInfer sections 3 and 6.4; counts are level sizes added up.
        ((2, 2, 1), 1 + 2 + 4 + 4, 4),
        ((1, 1, 3, 1, 1, 1, 1, 1), 21, 3),
        ((3, 1, 1, 1, 1, 1, 1, 1), 25, 3),
        ((1, 1, 5, 1, 1, 1, 1, 1), 33, 5),
        ((4,), 5, 4),
        ((), 1, 1),
    ],
)
def test_expansion_counts(widths, nodes, leaves):
    shape = expansion(widths)
    assert shape.size == nodes
    assert shape.depth[-1] == len(widths)
    assert len(set(range(shape.size)) - set(shape.parent[1:])) == leaves or not widths
    sizes = [len(level) for level in shape.levels()]
    assert sizes == np.cumprod([1, *widths]).tolist()


def test_every_leaf_grows_k_children_with_ranks_from_zero():
    shape = expansion((2, 3))
    assert shape.parent == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert shape.rank == (0, 0, 1, 0, 1, 2, 0, 1, 2)
    assert shape.depth == (0, 1, 1, 2, 2, 2, 2, 2, 2)


@pytest.mark.parametrize("shape", [toys.UNBALANCED, expansion((2, 1, 3)), expansion(())])
def test_ancestors_by_walking(shape):
    wanted = np.zeros((shape.size, shape.size), bool)
    for i in range(shape.size):
        j = i
        while j:
            wanted[i, j] = True
            j = shape.parent[j]
        wanted[i, i] = wanted[i, 0] = True
    np.testing.assert_array_equal(shape.ancestors(), wanted)


def test_levels_list_every_slot_by_depth():
    assert toys.UNBALANCED.depth == (0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4)
    assert toys.UNBALANCED.levels() == [[0], [1, 2, 3], [4, 5, 6], [7, 8, 9], [10]]


def test_shapes_are_hashable_values():
    assert expansion((2, 1)) == TreeShape((0, 0, 0, 1, 2), (0, 0, 1, 0, 0))
    assert hash(expansion((2, 1))) == hash(parse_expansion("2,1"))
    assert expansion((2, 1)) != expansion((1, 2))


@pytest.mark.parametrize("text", ["1,1,3,1", "<1,1,3,1>", " <1, 1, 3, 1> ", "1,1,3,1,"])
def test_texts_that_mean_the_same_shape(text):
    assert parse_expansion(text) == expansion((1, 1, 3, 1))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: expansion((2, 0)), r"\(2, 0\).*at least 1"),
        (lambda: parse_expansion("2,x"), "'2,x' is no list"),
        (lambda: parse_expansion("2,-1"), "at least 1"),
        (lambda: TreeShape((), ()), "0 entries|0 and rank 0"),
        (lambda: TreeShape((0, 0), (0,)), "parent has 2 and rank 1"),
        (lambda: TreeShape((0, 2, 0), (0, 0, 0)), "before its child"),
        (lambda: TreeShape((0, 1), (0, 0)), "before its child"),
        (lambda: TreeShape((0, 0), (0, -1)), ">= 0"),
        (lambda: TreeShape((0, 0), (1, 0)), "root is node 0"),
        (lambda: TreeShape((0, 0, 1, 0), (0, 0, 0, 1)), "level order"),
        (lambda: TreeShape((0, 0, 0), (0, 1, 1)), "siblings share a rank"),
    ],
)
def test_what_is_no_tree_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
