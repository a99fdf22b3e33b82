"""Tree attention is causal attention along every root-to-node path (SpecInfer definition 4.1).

Through the whole decoder, behind cached prefixes of several lengths: masks, positions and caches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import LayerKV
from models.prefill import prefill
from models.transformer import causal_mask
from spec.tree import TokenTree, ancestor_mask
from tests.common import toys

# SpecInfer figure 4: t2 is verified, t3..t9 are drafts. Slot i holds t(i + 2), depth-first order.
FIGURE_4 = ((0, 0, 1, 2, 2, 4, 1, 6), (0, 1, 2, 3, 3, 4, 2, 3))
PROMPTS = ((1, 2, 3, 50, 4), (11,), (30, 31, 32, 33, 34, 35, 36, 37, 38), (60, 61))
LENGTH = 24


@pytest.fixture(scope="module")
def model():
    return toys.tiny()


@toys.quick
def last_logits(model, token_BT, length_B):
    """Logits after each whole sequence, no cache and no tree."""
    B, T = token_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    logits_BTV = model(token_BT, position_BT, causal_mask(B, T)).logits_BNV
    return jnp.take_along_axis(logits_BTV, (length_B - 1)[:, None, None], axis=1)[:, 0]


@toys.quick
def tree_logits(model, tree, cache):
    position_BN = cache.length_B[:, None] + tree.depth_BN
    return model(tree.token_BN, position_BN, ancestor_mask(tree), cache).logits_BNV


@toys.quick
def cached(model, token_BT, length_B):
    return prefill(model, token_BT, length_B, 32)[0]


def pad(sequences) -> tuple[jax.Array, jax.Array]:
    token_BT = np.zeros((len(sequences), LENGTH), np.int32)
    for row, sequence in enumerate(sequences):
        token_BT[row, : len(sequence)] = sequence
    return jnp.asarray(token_BT), jnp.asarray([len(s) for s in sequences], jnp.int32)


def assert_equals_paths(model, tree: TokenTree, logits_BNV) -> None:
    """Every node of every row: logits equal those of prompt and path alone."""
    where, sequences = [], []
    for row, prompt in enumerate(PROMPTS):
        for node, path in toys.paths(tree, row).items():
            where.append((row, node))
            sequences.append((*prompt[:-1], *path))
    alone = last_logits(model, *pad(sequences))
    got = np.stack([logits_BNV[row, node] for row, node in where])
    np.testing.assert_allclose(got, alone, rtol=1e-4, atol=1e-4)


def with_roots(tree: TokenTree) -> TokenTree:
    """Rows continue `PROMPTS`: each root is its prompt's last token."""
    roots = jnp.asarray([prompt[-1] for prompt in PROMPTS], jnp.int32)
    return TokenTree(
        tree.token_BN.at[:, 0].set(roots), tree.parent_BN, tree.depth_BN, tree.valid_BN
    )


def repeat(parent, depth, token) -> TokenTree:
    rows = [jnp.broadcast_to(jnp.asarray(r, jnp.int32), (len(PROMPTS), len(parent))) for r in
            (token, parent, depth)]  # fmt: skip
    return with_roots(TokenTree(*rows, jnp.ones((len(PROMPTS), len(parent)), jnp.bool_)))


def test_figure_4(model):
    parent, depth = FIGURE_4
    tree = repeat(parent, depth, [2, 3, 4, 5, 6, 7, 8, 9])
    mask = np.asarray(ancestor_mask(tree)[1])
    assert not mask[5, 3], "t7 must not see t5"
    # The figure's sequences: t2 t3 t4 t5, t2 t3 t4 t6 t7 and t2 t3 t8 t9.
    assert [np.flatnonzero(mask[leaf]).tolist() for leaf in (3, 5, 7)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4, 5],
        [0, 1, 6, 7],
    ]
    logits = tree_logits(model, tree, cached(model, *pad(PROMPTS)))
    assert_equals_paths(model, tree, logits)


def test_random_trees(model):
    """Parents in any order, siblings equal or not, padding: another tree in each row."""
    cache = cached(model, *pad(PROMPTS))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        tree = with_roots(toys.random_tree(rng, 8, 97, batch=len(PROMPTS), padding=seed))
        assert_equals_paths(model, tree, tree_logits(model, tree, cache))


def test_what_a_node_does_not_see_does_not_matter(model):
    """Another token in one branch leaves the logits of all others as they are, bit for bit."""
    parent, depth = FIGURE_4
    cache = cached(model, *pad(PROMPTS))
    one = tree_logits(model, repeat(parent, depth, [2, 3, 4, 5, 6, 7, 8, 9]), cache)
    two = tree_logits(model, repeat(parent, depth, [2, 3, 4, 5, 77, 7, 8, 9]), cache)
    changed = np.abs(one - two).max(axis=(0, 2)) > 0
    assert changed.tolist() == [False, False, False, False, True, True, False, False]


@toys.quick
def grown(model, tree, cache):
    """Logits of a tree that is seen level by level, K/V of earlier levels passed along."""
    mask = ancestor_mask(tree)
    earlier, logits = None, []
    for first, last in ((0, 1), (1, 3), (3, 5), (5, 6)):  # levels of the drawn tree
        token_BN, depth_BN = tree.token_BN[:, first:last], tree.depth_BN[:, first:last]
        position_BN = cache.length_B[:, None] + depth_BN
        out = model(token_BN, position_BN, mask[:, first:last, :last], cache, earlier)
        logits.append(out.logits_BNV)
        earlier = out.tree_kv if earlier is None else _behind(earlier, out.tree_kv)
    return jnp.concatenate(logits, axis=1)


def _behind(earlier: tuple[LayerKV, ...], new: tuple[LayerKV, ...]) -> tuple[LayerKV, ...]:
    return jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), earlier, new)


def test_grown_level_by_level(model):
    drawn = toys.drawn_tree()
    rows = [np.asarray(x[0]) for x in (drawn.parent_BN, drawn.depth_BN, drawn.token_BN)]
    tree = repeat(*rows)
    assert_equals_paths(model, tree, grown(model, tree, cached(model, *pad(PROMPTS))))
