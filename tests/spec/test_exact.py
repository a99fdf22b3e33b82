"""Every rule reproduces the target's sequence law exactly; the biased variants do not.

Gate: total variation < 1e-12 by exact enumeration in float64 over all drafts.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec.draws import Children, Draws, Kind, drop_invalid, point_mass
from spec.tree import limit_depth
from spec.tree_shapes import TreeShape, expansion
from spec.verify import RULES, Block, Keys, Naive, TopDown, Traversal
from tests.common.enumeration import (
    World,
    groups,
    merged,
    outcomes,
    run_law,
    sequence_law,
    total_variation,
    tv_and_accepted,
)

EXACT = 1e-12
SLOW = pytest.mark.slow
FITS = {
    Children.IID: ("mss", "naive", "traversal", "top_down"),
    Children.WITHOUT_REPLACEMENT: ("without_replacement", "naive", "traversal", "top_down"),
    Children.TOP_K: ("naive", "top_down", "traversal"),
    Children.GREEDY_PLUS_ONE: ("greedy_plus_one", "naive", "traversal", "top_down"),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "widths", [(2, 1), *[pytest.param(w, marks=SLOW) for w in ((1, 2), (3,), (2, 2), (1, 1, 1))]]
)
@pytest.mark.parametrize(("children", "rule"), [(c, r) for c, rs in FITS.items() for r in rs])
def test_sequence_law_is_the_targets(children, rule, widths):
    # A random child outside the top 2 of 3 would be certain.
    vocab = 4 if children is Children.GREEDY_PLUS_ONE and 3 in widths else 3
    world = World.random(vocab, len(widths), seed=len(widths) + 7)
    tv, accepted = tv_and_accepted(RULES[rule], world, widths, children)
    assert tv < EXACT
    assert 0 < accepted < len(widths) + 1


@pytest.mark.parametrize(
    ("children", "rule"),
    [
        (Children.IID, "mss"),
        (Children.WITHOUT_REPLACEMENT, "without_replacement"),
        (Children.TOP_K, "top_down"),
        (Children.GREEDY_PLUS_ONE, "greedy_plus_one"),
        (Children.WITHOUT_REPLACEMENT, "traversal"),
    ],
)
def test_a_vocabulary_of_five_with_and_without_zeros(children, rule):
    """Two of five tokens impossible, others for p than for q: as top-k and top-p leave them."""
    for zeros in (0, 2):
        world = World.random(5, 2, seed=zeros, zeros=zeros)
        tv, accepted = tv_and_accepted(RULES[rule], world, (2, 1), children)
        assert tv < EXACT
        assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize(("children", "rule"), [(c, r) for c, rs in FITS.items() for r in rs])
@pytest.mark.parametrize(("vocab", "zeros"), [(4, 0), (4, 1), (5, 1)])
def test_larger_vocabularies(children, rule, vocab, zeros):
    world = World.random(vocab, 2, seed=vocab, zeros=zeros)
    assert tv_and_accepted(RULES[rule], world, (2, 1), children)[0] < EXACT


@pytest.mark.parametrize(
    ("rule", "widths", "least"),
    [("mss", (2, 1), 2), ("block", (1, 1), 2), ("without_replacement", (2, 1), 2)],
)
def test_a_drafter_that_equals_its_target_is_always_accepted(rule, widths, least):
    """p = q leaves no residual: nothing to fall back to, and nothing to need it."""
    world = World.random(4, 2, seed=8)
    world = dataclasses.replace(world, q=world.p)
    children = Children.WITHOUT_REPLACEMENT if rule == "without_replacement" else Children.IID
    tv, accepted = tv_and_accepted(RULES[rule], world, widths, children)
    assert tv < EXACT
    assert accepted == pytest.approx(least, abs=1e-9)


@pytest.mark.parametrize("children", [Children.TOP_K, Children.IID])
def test_greedy_is_the_law_of_a_certain_target(children):
    world = World.random(3, 2, seed=9)
    best = {context: np.eye(3)[p.argmax()] for context, p in world.p.items()}
    world = dataclasses.replace(world, p=best)
    assert tv_and_accepted(RULES["greedy"], world, (2, 1), children)[0] < EXACT


@pytest.mark.parametrize("rule", ["naive", "top_down", "traversal"])
def test_deterministic_draws_need_no_rows_of_q(rule):
    """As lookups and top-k drafters hand them over: Q = 0."""
    world, shape = World.random(4, 2, seed=10), expansion((2, 1))
    chance, tree, _ = outcomes(world, shape, Children.TOP_K)
    draws = point_mass(tree)
    assert not draws.q_BQV.shape[1]
    law, _ = sequence_law(world, chance, *run_law(RULES[rule], world, tree, draws), 3)
    assert total_variation(law, world.target_law(3)) < EXACT


@pytest.mark.parametrize(
    ("rule", "children"), [("mss", Children.IID), ("traversal", Children.WITHOUT_REPLACEMENT)]
)
def test_trees_cut_by_depth_stay_exact(rule, children):
    """The budget leaves room for one draft of two levels."""
    world, shape = World.random(3, 2, seed=12), expansion((2, 1))
    chance, tree, draws = outcomes(world, shape, children)
    cut = limit_depth(tree, jnp.full(len(chance), 2, jnp.int32))
    stop, bonus, where = run_law(RULES[rule], world, cut, drop_invalid(draws, cut))
    assert stop[:, 3:].max() == 0
    law, _ = sequence_law(world, chance, stop, bonus, where, 2)
    assert total_variation(law, world.target_law(2)) < EXACT


SAMPLED = [
    ("naive", Children.IID, (2, 1)),
    ("mss", Children.IID, (2, 1)),
    ("without_replacement", Children.WITHOUT_REPLACEMENT, (2, 1)),
    pytest.param("greedy_plus_one", Children.GREEDY_PLUS_ONE, (2, 1), marks=pytest.mark.slow),
    ("top_down", Children.TOP_K, (2, 1)),
    ("block", Children.IID, (1, 1)),
    ("traversal", Children.WITHOUT_REPLACEMENT, (2, 1)),
    pytest.param("traversal", Children.TOP_K, (2, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "children", "widths"), SAMPLED, ids=str)
def test_sample_draws_from_the_law(name, children, widths):
    """Where the path ends and what follows, jointly, for some fixed drafts: chi-square."""
    B, world, rule = 20_000, World.random(4, 2, seed=21), RULES[name]
    chance, trees, drawn = outcomes(world, expansion(widths), children)

    @jax.jit
    def run(p_NV, tree, draws, keys):
        return rule.sample(lambda node_B: p_NV[node_B], tree, draws, keys, len(widths) + 1)

    for pick in {0, len(chance) // 2, len(chance) - 1}:
        tree, draws = jax.tree.map(lambda a, at=pick: a[at : at + 1], (trees, drawn))
        stop, bonus, where = run_law(rule, world, tree, draws)
        want = (stop[0, :, None] * bonus[0]).ravel()
        p_NV = jnp.asarray([world.p[context] for context in where[0]], jnp.float32)

        def many(array, B=B):
            dtype = jnp.float32 if array.dtype == jnp.float64 else array.dtype
            return jnp.repeat(array, B, axis=0).astype(dtype)

        with jax.enable_x64(False):
            keys = Keys(jax.random.split(jax.random.key(pick), B), jnp.zeros(B, jnp.int32))
            done = run(p_NV, *jax.tree.map(many, (tree, draws)), keys)
        leaf = np.take_along_axis(done.node_BP, np.asarray(done.count_B)[:, None] - 1, axis=1)
        seen = np.bincount(leaf[:, 0] * 4 + np.asarray(done.bonus_B), minlength=want.size)
        big = want * B >= 5
        assert seen[want < 1e-12].sum() == 0
        seen, want = (np.append(x[big], x[~big].sum()) for x in (seen, want * B))
        kept = want > 1e-6
        if kept.sum() > 1:
            assert stats.chisquare(seen[kept], want[kept] * B / want[kept].sum()).pvalue > 1e-4


def test_block_is_exact_and_traversal_on_a_chain_is_block():
    """Section 2 (e), (f): equal laws on every chain draft; never below trial by trial."""
    for seed in range(2):
        world = World.random(3, 3, seed)
        tv, accepted = tv_and_accepted(Block(), world, (1, 1, 1), Children.IID)
        assert tv < EXACT
        _, one_by_one = tv_and_accepted(TopDown.multi_step(), world, (1, 1, 1), Children.IID)
        assert accepted >= one_by_one - 1e-12
        _, tree, draws = outcomes(world, expansion((1, 1, 1)), Children.IID)
        block_stop, block_bonus, _ = run_law(Block(), world, tree, draws)
        stop, bonus, _ = run_law(Traversal(), world, tree, draws)
        np.testing.assert_allclose(stop, block_stop, atol=1e-12)
        reached = stop > 1e-9
        np.testing.assert_allclose(bonus[reached], block_bonus[reached], atol=1e-9)


@pytest.mark.parametrize("rule", ["mss", "top_down", "naive"])
@pytest.mark.parametrize("same_q", [True, False])
def test_merged_trees_with_duplicates(rule, same_q):
    """Two drafters of shape <2,1> and <1,1>; equal paths fuse, every draw stays a trial."""
    world = World.random(3, 2, seed=3)
    other = world.q if same_q else World.random(3, 2, seed=4).q
    parts = [(expansion((2, 1)), Children.IID, world.q), (expansion((1, 1)), Children.IID, other)]
    chance, tree, draws = merged(world, parts)
    assert bool((tree.valid_BN.sum(1) < 7).any()), "no duplicates: the test tests nothing"
    law, _ = sequence_law(world, chance, *run_law(RULES[rule], world, tree, draws), 3)
    assert total_variation(law, world.target_law(3)) < EXACT


MIXED = {
    "two without replacement": (
        ("without_replacement", "top_down"),
        [((2, 1), Children.WITHOUT_REPLACEMENT), ((2,), Children.WITHOUT_REPLACEMENT)],
    ),
    "iid and top-k": (("top_down",), [((2, 1), Children.IID), ((2,), Children.TOP_K)]),
    "top-k and iid": (("top_down",), [((2,), Children.TOP_K), ((2, 1), Children.IID)]),
    "greedy plus one, without replacement, top-k": (
        ("top_down",),
        [
            ((2, 1), Children.GREEDY_PLUS_ONE),
            ((2,), Children.WITHOUT_REPLACEMENT),
            ((1, 1), Children.TOP_K),
        ],
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_merged_trees_of_different_kinds(name):
    """The default of every merge at a temperature: each draw is tried by its own kind."""
    rules, parts = MIXED[name]
    world = World.random(3, 2, seed=6)
    drafters = [
        (expansion(widths), children, World.random(3, 2, seed=6 + i).q)
        for i, (widths, children) in enumerate(parts)
    ]
    chance, tree, draws = merged(world, drafters)
    for rule in rules:
        law, _ = sequence_law(world, chance, *run_law(RULES[rule], world, tree, draws), 3)
        assert total_variation(law, world.target_law(3)) < EXACT


def test_any_trial_order_of_iid_draws_is_exact():
    world = World.random(3, 2, seed=11)
    shape = expansion((3, 1))
    chance, tree, draws = outcomes(world, shape, Children.IID)
    rule = TopDown.multi_step()
    for seed in range(2):
        # One order for all drafts: the order must not depend on what was drawn.
        keys = jax.vmap(jax.random.key)(jnp.full(len(chance), seed))
        ordered = jax.jit(rule.order)(draws, keys)
        law, _ = sequence_law(world, chance, *run_law(rule, world, tree, ordered), 3)
        assert total_variation(law, world.target_law(3)) < EXACT


def test_unbalanced_tree_of_mixed_widths():
    world = World.random(3, 3, seed=5)
    shape = TreeShape((0, 0, 0, 1, 3), (0, 0, 1, 0, 0))  # two at the root, one goes on to depth 3
    for children, name in ((Children.IID, "mss"), (Children.WITHOUT_REPLACEMENT, "traversal")):
        chance, tree, draws = outcomes(world, shape, children)
        law, _ = sequence_law(world, chance, *run_law(RULES[name], world, tree, draws), 4)
        assert total_variation(law, world.target_law(4)) < EXACT


# One node: V = 4, k = 3, vectors with known figures.
P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.3, 0.4, 0.1, 0.2])
Q2 = np.array([0.25, 0.15, 0.35, 0.25])


def one_node(found, rule=None):
    """Runs a list of (tokens, probability, kinds, rows) through a law: TV and P(no child)."""
    rule = rule or TopDown.any_order()
    out, rejected = np.zeros(4), 0.0
    for size in sorted({len(tokens) for tokens, *_ in found}):
        part = [f for f in found if len(f[0]) == size]
        B = len(part)
        shape = expansion((size,))
        world = World(4, {(): P}, {(): Q})
        _, tree, draws = outcomes(world, shape, Children.TOP_K)
        tree, draws = jax.tree.map(lambda a, B=B: jnp.repeat(a, B, axis=0), (tree, draws))
        tokens = jnp.asarray([[0, *f[0]] for f in part], jnp.int32)
        tree = dataclasses.replace(tree, token_BN=tokens)
        rows = jnp.asarray(np.array([f[3] for f in part]))  # one row of q a draw
        index = jnp.asarray(np.broadcast_to(np.arange(size, dtype=np.int32), (B, size)))
        same = [list(map(bytes, f[3])) for f in part]  # equal rows share an index
        first = np.array([[row.index(r) for r in row] for row in same], np.int32)
        kinds = jnp.asarray(np.array([f[2] for f in part], np.int32))
        draws = Draws(draws.child_BM, draws.parent_BM, kinds, jnp.asarray(first), rows)
        del index
        stop, bonus, _ = run_law(rule, world, tree, draws)
        for (toks, chance, *_), s, b in zip(part, stop, bonus, strict=True):
            out += chance * s[0] * b[0]
            rejected += chance * s[0]
            for i, token in enumerate(toks):
                out[token] += chance * s[i + 1]
    return total_variation(out, P), rejected


def drawn(children, kind, width=3, dedup=False):
    found = []
    for tokens, chance, _, _ in groups(Q, width, children):
        tokens = tuple(dict.fromkeys(tokens)) if dedup else tokens
        found.append((tokens, chance, [kind] * len(tokens), [Q] * len(tokens)))
    return found


CASES = {  # variant: draws, rule, TV, rejection
    "iid, duplicates kept": (drawn(Children.IID, Kind.IID), None, 0, 0.0900),
    "iid, deduplicated, q unchanged": (
        drawn(Children.IID, Kind.IID, dedup=True),
        None,
        0.0057,
        0.0900,
    ),
    "iid, deduplicated, q zeroed": (
        drawn(Children.IID, Kind.WITHOUT_REPLACEMENT, dedup=True),
        None,
        0,
        0.0936,
    ),
    "iid, duplicates kept, q zeroed": (
        drawn(Children.IID, Kind.WITHOUT_REPLACEMENT),
        None,
        0.0143,
        0.0952,
    ),
    "without replacement": (
        drawn(Children.WITHOUT_REPLACEMENT, Kind.WITHOUT_REPLACEMENT),
        None,
        0,
        0.0125,
    ),
    "without replacement, q not updated": (
        drawn(Children.WITHOUT_REPLACEMENT, Kind.IID),
        None,
        0.0125,
        0,
    ),
    "top-3, p/q": (drawn(Children.TOP_K, Kind.IID), None, 0.45, 0),
    "top-3, q updated": (drawn(Children.TOP_K, Kind.WITHOUT_REPLACEMENT), None, 0.45, 0),
    "top-3, point mass": (drawn(Children.TOP_K, Kind.POINT_MASS), None, 0, 0.1500),
    "iid, naive": (drawn(Children.IID, Kind.IID), Naive(), 0, 0.3712),
}


@pytest.mark.parametrize("name", CASES)
def test_one_node_vectors(name):
    """Biased variants are seen as biased, with the listed figures."""
    found, rule, tv, rejected = CASES[name]
    got_tv, got_rejected = one_node(found, rule)
    assert got_tv == pytest.approx(tv, abs=5e-5 if tv else EXACT)
    assert got_rejected == pytest.approx(rejected, abs=6e-5)


def test_without_replacement_in_random_order_is_biased():
    found = [
        (tuple(tokens[i] for i in order), chance / 6, kinds, rows)
        for tokens, chance, kinds, rows in drawn(
            Children.WITHOUT_REPLACEMENT, Kind.WITHOUT_REPLACEMENT
        )
        for order in itertools.permutations(range(3))
    ]
    tv, rejected = one_node(found)
    assert tv == pytest.approx(0.0694, abs=5e-5)
    assert rejected == pytest.approx(0.0097, abs=5e-5)


def test_re_ranked_samples_are_point_masses_or_biased():
    """Sampled without replacement, tried in the order of their own probability."""
    for kind, exact in ((Kind.POINT_MASS, True), (Kind.WITHOUT_REPLACEMENT, False)):
        found = [
            (tuple(sorted(tokens, key=lambda token: -Q[token])), chance, [kind] * 3, rows)
            for tokens, chance, _, rows in drawn(Children.WITHOUT_REPLACEMENT, kind)
        ]
        tv, _ = one_node(found)
        assert (tv < EXACT) == exact


def test_two_drafters():
    """One draw each; any order exact, a fused duplicate tried once with the first q biased."""
    fixed, turned, fused = [], [], []
    for a, b in itertools.product(range(4), repeat=2):
        chance = Q[a] * Q2[b]
        fixed.append(((a, b), chance, [Kind.IID] * 2, [Q, Q2]))
        turned.append(((b, a), chance, [Kind.IID] * 2, [Q2, Q]))
        fused.append(
            ((a,), chance, [Kind.IID], [Q]) if a == b else ((a, b), chance, [Kind.IID] * 2, [Q, Q2])
        )
    tv, rejected = one_node(fixed)
    assert tv < EXACT
    assert rejected == pytest.approx(0.1375, abs=5e-5)
    other_tv, other = one_node(turned)
    assert other_tv < EXACT
    assert (rejected + other) / 2 == pytest.approx(0.1338, abs=5e-5)
    tv, rejected = one_node(fused)
    assert tv == pytest.approx(0.0105, abs=5e-5)
    assert rejected == pytest.approx(0.1375, abs=5e-5)
