"""Tree merge, SpecInfer definition 3.2: the set of sequences is the union, each one once."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec.merge import join, merge, same_path
from spec.tree import TokenTree, ancestor_mask
from spec.verify import Accepted, Greedy
from tests.common import toys

SIZES = (7, 5, 4)
_merge, _join, _same_path = map(toys.quick, (merge, join, same_path))


@st.composite
def trees(draw: st.DrawFn, size: int, root: int) -> TokenTree:
    """A tree of `size` slots, some of them padding; few tokens, so that siblings collide."""
    nodes = draw(st.integers(1, size))
    token, parent, depth = [root], [0], [0]
    for i in range(1, nodes):
        parent.append(draw(st.integers(0, i - 1)))
        token.append(draw(st.integers(0, 2)))
        depth.append(depth[parent[-1]] + 1)
    fill = [0] * (size - nodes)
    row = [np.asarray([values + fill], np.int32) for values in (token, parent, depth)]
    return TokenTree(*map(jnp.asarray, row), jnp.asarray([[i < nodes for i in range(size)]]))


def assert_well_formed(tree: TokenTree) -> None:
    """Valid slots first, parents valid and before their children, depths along them."""
    valid, parent = np.asarray(tree.valid_BN[0]), np.asarray(tree.parent_BN[0])
    depth = np.asarray(tree.depth_BN[0])
    nodes = valid.sum()
    assert valid[:nodes].all()
    assert parent[0] == depth[0] == 0
    for i in range(1, nodes):
        assert parent[i] < i
        assert depth[i] == depth[parent[i]] + 1
    assert not parent[nodes:].any(), "padding has parent 0"


def cases(count: int):
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


PARTS = st.tuples(*(trees(size, root=1) for size in SIZES))


def check_union(parts: tuple[TokenTree, ...]) -> None:
    joined = _join(parts)
    merged, slot_BN = _merge(parts)
    union = {path for part in parts for path in toys.paths(part).values()}
    after = toys.paths(merged)
    assert set(after.values()) == union
    assert len(after) == len(union), "two nodes spell the same sequence"
    assert merged.size == 1 + sum(size - 1 for size in SIZES)
    assert_well_formed(merged)
    before, slot = toys.paths(joined), np.asarray(slot_BN[0])
    for i in range(joined.size):
        if i in before:
            assert after[int(slot[i])] == before[i]
        else:
            assert slot[i] == merged.size


@cases(100)
@given(PARTS)
def test_merge_is_the_union(parts):
    check_union(parts)


@pytest.mark.slow
@cases(1000)
@given(PARTS)
def test_a_thousand_merges_are_the_union(parts):
    check_union(parts)


@toys.quick
def _greedy(tree: TokenTree, best_BN: jax.Array) -> Accepted:
    return Greedy().accept(tree, ancestor_mask(tree), best_BN, tree.size)


def accepted_tokens(tree: TokenTree, best_of: Callable[[tuple[int, ...]], int]) -> tuple[int, ...]:
    """The drafts that a target accepts whose best token after a sequence is `best_of`."""
    spelled = toys.paths(tree)
    best_BN = np.array([[best_of(spelled.get(i, ())) for i in range(tree.size)]], np.int32)
    done = _greedy(tree, best_BN)
    return spelled[int(done.node_BP[0, done.count_B[0] - 1])][1:]


def check_greedy(parts: tuple[TokenTree, ...], seed: int) -> None:
    def best_of(path: tuple[int, ...]) -> int:
        return int(np.random.default_rng([seed, *path]).integers(3))

    merged, _ = _merge(parts)
    alone = [accepted_tokens(part, best_of) for part in parts]
    assert accepted_tokens(merged, best_of) == max(alone, key=len)


@cases(100)
@given(PARTS, st.integers(0, 9))
def test_greedy_accepts_from_a_merge_what_the_best_part_would_give(parts, seed):
    """Never less than any input tree, and nothing that no input tree holds."""
    check_greedy(parts, seed)


@pytest.mark.slow
@cases(1000)
@given(PARTS, st.integers(0, 9))
def test_greedy_on_a_thousand_merges(parts, seed):
    check_greedy(parts, seed)


@cases(50)
@given(trees(SIZES[0], root=1))
def test_same_path_says_which_nodes_spell_the_same(tree):
    same, spelled = np.asarray(_same_path(tree)[0]), toys.paths(tree)
    for i in range(tree.size):
        for j in range(tree.size):
            wanted = i in spelled and j in spelled and spelled[i] == spelled[j]
            assert same[i, j] == wanted


def row(tokens: list[int], parents: list[int], size: int | None = None) -> TokenTree:
    """A tree from its tokens and parents, padded to `size`."""
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    fill = [0] * ((size or len(tokens)) - len(tokens))
    arrays = [jnp.asarray([values + fill], jnp.int32) for values in (tokens, parents, depth)]
    return TokenTree(*arrays, jnp.arange(len(tokens) + len(fill))[None] < len(tokens))


def merge_rows(*rows: tuple[list[int], list[int]]) -> tuple[TokenTree, list[int]]:
    """Merges up to three small trees; the slots of their real nodes."""
    rows += (([rows[0][0][0]], [0]),) * (len(SIZES) - len(rows))
    parts = tuple(row(*values, size) for values, size in zip(rows, SIZES, strict=True))
    merged, slot_BN = _merge(parts)
    return merged, np.asarray(slot_BN)[np.asarray(_join(parts).valid_BN)].tolist()


def test_join_hangs_every_tree_under_one_root():
    joined = join([row([1, 5, 6], [0, 0, 1]), row([1, 5, 7, 8], [0, 0, 1, 0]), row([1], [0])])
    assert joined.token_BN.tolist() == [[1, 5, 6, 5, 7, 8]]
    assert joined.parent_BN.tolist() == [[0, 0, 1, 0, 3, 0]]
    assert joined.depth_BN.tolist() == [[0, 1, 2, 1, 2, 1]]
    assert joined.valid_BN.all()


def test_equal_tokens_at_equal_depth_under_other_parents_stay_apart():
    """Nodes keyed by (token, depth), as FlexFlow's were, would be 3 drafts here instead of 4.

    HO-15(c): drafters give 7-0, 7-8 and 8 after 2, and a second parent gives the 8 of depth 2.
    """
    merged, slots = merge_rows(
        ([2, 7, 0], [0, 0, 1]), ([2, 7, 8], [0, 0, 1]), ([2, 8, 8], [0, 0, 1])
    )
    assert set(toys.paths(merged).values()) == {
        (2,), (2, 7), (2, 7, 0), (2, 7, 8), (2, 8), (2, 8, 8)
    }  # fmt: skip
    assert int(merged.valid_BN.sum()) == 6
    # 2 7 0 | 7 8 | 8 8: the 7s are one node, the three 8s are three.
    assert slots == [0, 1, 2, 1, 3, 4, 5]


def test_a_tree_with_equal_siblings_merges_with_itself():
    merged, slots = merge_rows(([3, 1, 1, 2, 4], [0, 0, 0, 1, 2]))
    assert set(toys.paths(merged).values()) == {(3,), (3, 1), (3, 1, 2), (3, 1, 4)}
    assert slots == [0, 1, 1, 2, 3]


def test_rows_merge_independently():
    rng = np.random.default_rng(3)
    parts = tuple(
        dataclasses.replace(part, token_BN=part.token_BN.at[:, 0].set(1))
        for part in (toys.random_tree(rng, size, 3, batch=8) for size in SIZES)
    )
    together = jax.tree.leaves(_merge(parts))
    for b in range(8):
        alone = jax.tree.leaves(_merge(jax.tree.map(lambda x, b=b: x[b : b + 1], parts)))
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], other[b])
