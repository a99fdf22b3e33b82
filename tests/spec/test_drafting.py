"""What is drafted: degenerate trees (HO-13), children of their real parents (HO-15), their law."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from models.transformer import causal_mask
from spec.drafters import EnsembleDrafter, ModelDrafter, NGramDrafter
from spec.drafters.children import choose
from spec.drafters.protocol import View
from spec.draws import Children, Kind
from spec.generate import Request, begin, generate, trace
from spec.tree_shapes import TreeShape, expansion
from tests.common import toys

PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5]]
N = 24


@pytest.fixture(scope="module")
def model():
    return toys.tiny()


@pytest.fixture(scope="module")
def plain(model):
    return toys.plain_uncached(model, PROMPTS, N)


@pytest.mark.parametrize(
    "shape",
    [expansion((1,)), expansion((4,)), expansion((1, 1, 1, 1)), expansion((2, 1, 3))],
    ids=["<1>", "<4>", "<1,1,1,1>", "<2,1,3>"],
)
def test_degenerate_trees_draft_what_plain_decoding_says(model, plain, shape):
    """HO-13: one draft, a star, a chain, a comb; sizes that are no power of two.

    The 11-node unbalanced tree goes through every branch in test_lossless.
    """
    drafter = ModelDrafter(model, shape, toys.VOCAB2)
    assert toys.decode(model, drafter, PROMPTS, N) == plain


def test_a_chain_in_a_larger_tree_accepts_as_the_chain_alone(model, plain):
    """HO-13: right for two levels, merged with itself: padded to twice its size, round by round."""
    alone = toys.scripted(
        [(*prompt, *want) for prompt, (want, _) in zip(PROMPTS, plain, strict=True)],
        toys.chain(4),
        toys.VOCAB2,
        right=[2, 4, 0],
    )
    rounds = [
        [np.asarray(step.accepted.count_B)[:3].tolist() for step in trace(*run)]
        for run in (
            (model, alone, PROMPTS, Request(N)),
            (model, EnsembleDrafter((alone, alone)), PROMPTS, Request(N)),
        )
    ]
    assert rounds[0] == rounds[1]
    assert rounds[0][0] == [3, 5, 1]


@pytest.mark.parametrize("how", [Children.TOP_K, Children.WITHOUT_REPLACEMENT])
def test_a_child_is_drafted_after_its_own_ancestors(model, how):
    """HO-15(a): every node's q is that of a fresh pass over the prompt and its own path."""
    shape = expansion((3, 3, 3))
    drafter = ModelDrafter(model, shape, toys.VOCAB2, how)
    temperature = 0.0 if how is Children.TOP_K else 1.0
    state, settings = begin(model, drafter, PROMPTS[:1], Request(N, temperature=temperature))
    length_B = state.cache.length_B
    view = View(
        state.root_B, length_B, state.budget_B, state.budget_B > 0, model, state.cache,
        settings.sampling,
    )  # fmt: skip
    tree, draws, _ = jax.jit(ModelDrafter.propose)(drafter, state.drafter, view, state.key_B)
    spelled = toys.paths(tree)
    inner = sorted(set(shape.parent[1:]))
    T = len(PROMPTS[0]) + shape.depth[-1]
    token_BT = np.zeros((len(inner), T), np.int32)
    last_B = []
    for row, node in enumerate(inner):
        whole = [*PROMPTS[0][:-1], *spelled[node]]
        token_BT[row, : len(whole)] = whole
        last_B.append(len(whole) - 1)

    @jax.jit
    def fresh(model, token_BT):
        B = token_BT.shape[0]
        position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        return model(token_BT, position_BT, causal_mask(B, T)).logits_BNV

    logits_BV = fresh(model, token_BT)[np.arange(len(inner)), np.asarray(last_B)]
    want = np.asarray(jax.nn.log_softmax(logits_BV[:, : toys.VOCAB2]))
    checked = 0
    for m, child in enumerate(np.asarray(draws.child_BM)[0].tolist()):
        row = inner.index(shape.parent[child])
        token = int(tree.token_BN[0, child])
        if how is Children.TOP_K:
            best = np.argsort(-want[row])[: len(set(shape.rank))]
            assert token == best[shape.rank[child]]
        else:
            q_V = np.asarray(draws.q_BQV)[0, int(draws.row_BM[0, m])]
            np.testing.assert_allclose(np.log(q_V), want[row], atol=1e-4)
        checked += 1
    assert checked == shape.size - 1 == 39


def test_equal_paths_of_several_drafters_are_one_node():
    """HO-15(c): 7-0, 7-8 and 8 after 2: four drafts, two accepted, 7 0 1 emitted."""
    model = toys.chain11()
    assert toys.chain11_greedy(2, 3) == (7, 0, 1)
    scripts = [(2, 7, 0), (2, 7, 8), (2, 8)]
    drafter = EnsembleDrafter(
        tuple(toys.scripted([s], toys.chain(len(s) - 1), toys.VOCAB1, width=16) for s in scripts)
    )
    step = next(trace(model, drafter, [[2]], Request(8)))
    assert set(toys.paths(step.tree).values()) == {(2,), (2, 7), (2, 7, 0), (2, 7, 8), (2, 8)}
    assert int(step.tree.valid_BN.sum()) == 5
    assert step.accepted.count_B.tolist() == [3]
    assert generate(model, drafter, [[2]], Request(3))[0].token_ids == (7, 0, 1)


def test_a_budget_leaves_out_what_does_not_fit():
    """The first row's lookup takes all five nodes, the second's leaves room for the other two."""
    model = toys.chain11()
    lookup = NGramDrafter(window=2, depth=4, sizes=(1, 5), unsure=3)
    script = toys.scripted([(2, 7, 0), (2, 7, 0)], toys.chain(2), toys.VOCAB1, width=16)
    prompts = [[2, 8, 4, 5, 6, 2, 8], [8, 4, 5, 3, 8]]
    both, kept = EnsembleDrafter((lookup, script)), EnsembleDrafter((lookup, script), 5)
    assert (both.buckets, kept.buckets) == ((1, 3, 5, 7), (1, 3, 5))
    looked_up = [{(8, 4), (8, 4, 5), (8, 4, 5, 6), (8, 4, 5, 6, 2)}, {(8, 4), (8, 4, 5)}]
    whole, cut = (next(trace(model, each, prompts, Request(8))).tree for each in (both, kept))
    for row, found in enumerate(looked_up):
        scripted = {*toys.paths(whole, row).values()} - found
        assert len(scripted) == 3  # the root, and the two drafts of the script
        assert {*toys.paths(cut, row).values()} - found == (scripted if row else {(8,)})
    assert cut.size == 5
    plain = toys.decode(model, toys.PLAIN, prompts, 20)
    assert toys.decode(model, kept, prompts, 20) == plain


def test_no_draw_is_left_of_a_member_that_was_left_out(model):
    """Its children were sampled: a trial without its node would be made with another's token."""
    lookup = NGramDrafter(window=2, depth=5, sizes=(1, 6), unsure=2)
    sampled = ModelDrafter(model, expansion((2, 1)), toys.VOCAB2, Children.IID)
    drafter = EnsembleDrafter((lookup, sampled), 6)
    prompts = [[1, 2, 3, 4, 5, 6, 1, 2], [5, 9, 3, 5]]
    state, settings = begin(model, drafter, prompts, Request(8, temperature=1.0))
    view = View(
        state.root_B, state.cache.length_B, state.budget_B, state.budget_B > 0, model, state.cache,
        settings.sampling,
    )  # fmt: skip
    tree, draws, _ = jax.jit(EnsembleDrafter.propose)(drafter, state.drafter, view, state.key_B)
    kinds = [[Kind(kind) for kind in row if kind] for row in np.asarray(draws.kind_BM)[:2].tolist()]
    assert kinds == [[Kind.POINT_MASS] * 5, [Kind.POINT_MASS, *[Kind.IID] * 4]]
    assert tree.size == 6
    assert int(draws.child_BM.max()) < 6


def test_a_member_that_was_left_out_keeps_up(model):
    """The target drafts for itself: right whenever it is asked, also after long copies."""
    lookup = NGramDrafter(window=2, depth=5, sizes=(1, 6), unsure=1)
    drafter = EnsembleDrafter((lookup, ModelDrafter(model, toys.chain(2), toys.VOCAB2)), 6)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    steps = [
        (int(step.tree.valid_BN[0].sum()), int(step.accepted.count_B[0]))
        for step in trace(model, drafter, [prompt], Request(40))
    ]
    assert steps[0][0] == 6  # the lookup, and nothing else
    asked = [count for size, count in steps[:-1] if size == 3]
    assert len(asked) > 3
    assert set(asked) == {3}


def test_a_budget_below_one_members_nodes_is_refused():
    with pytest.raises(ValueError, match="budget 7 is less than the 8 nodes of one member"):
        EnsembleDrafter((NGramDrafter(), NGramDrafter()), 7)


def test_gaps_between_ranks_are_refused_where_they_would_bias(model):
    """A draw without replacement that is tried before, or without, the draws before it."""
    for shape in (TreeShape((0, 0), (0, 1)), TreeShape((0, 0, 0), (0, 1, 0))):
        with pytest.raises(ValueError, match="tried in draw order"):
            ModelDrafter(model, shape, toys.VOCAB2, Children.WITHOUT_REPLACEMENT)
        ModelDrafter(model, shape, toys.VOCAB2, Children.IID)


def test_more_children_than_tokens_are_refused(model):
    with pytest.raises(ValueError, match="12 children needs as many tokens, the vocabulary has 11"):
        ModelDrafter(model, expansion((12,)), 11)


def test_another_vocabulary_of_the_request_is_named(model):
    drafter = ModelDrafter(model, expansion((1,)), 90, Children.IID)
    with pytest.raises(ValueError, match="q has 90 tokens, the target's p 97"):
        generate(model, drafter, PROMPTS, Request(2, temperature=1.0))


def successive(q: np.ndarray) -> dict[tuple[int, ...], float]:
    """Law of two draws without replacement: q[a] q[b] / (1 - q[a])."""
    pairs = itertools.permutations(range(len(q)), 2)
    return {(a, b): q[a] * q[b] / (1 - q[a]) for a, b in pairs if q[a] * q[b] > 0}


Q = np.array([0.45, 0.3, 0.0, 0.2, 0.05])
# Two children each: the law of (first, second).
LAWS = {
    Children.IID: {
        (a, b): Q[a] * Q[b] for a, b in itertools.product(range(5), repeat=2) if Q[a] * Q[b] > 0
    },
    Children.WITHOUT_REPLACEMENT: successive(Q),
    # A sample from outside the best one, then the best one.
    Children.GREEDY_PLUS_ONE: {(a, 0): Q[a] / (1 - Q[0]) for a in (1, 3, 4)},
    Children.TOP_K: {(0, 1): 1.0},
}


@pytest.mark.parametrize("how", LAWS, ids=lambda how: how.value)
def test_children_have_their_law(how):
    """40,000 rows of two nodes with one q: each has the law, and the two are independent."""
    B = 40_000
    key_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(B))
    q_BnV = jnp.broadcast_to(jnp.asarray(Q, jnp.float32), (B, 2, 5))
    chosen = jax.jit(choose, static_argnums=(0, 2))(how, q_BnV, 2, key_B)
    assert bool(chosen.some_Bnk.all())
    token_Bnk = np.asarray(chosen.token_Bnk)
    law = LAWS[how]
    assert sum(law.values()) == pytest.approx(1)
    for node in range(2):
        seen = collections.Counter(map(tuple, token_Bnk[:, node].tolist()))
        assert set(seen) <= set(law)
        if len(law) > 1:
            want = [B * chance for chance in law.values()]
            assert stats.chisquare([seen[pair] for pair in law], want).pvalue > 1e-3
    if len(law) > 1:
        table = np.zeros((5, 5))
        np.add.at(table, (token_Bnk[:, 0, 0], token_Bnk[:, 1, 0]), 1)
        table = table[table.sum(1) > 0][:, table.sum(0) > 0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_too_few_tokens_for_a_draw_are_said_so():
    """Without replacement a third child of a q with two tokens does not exist."""
    q_BnV = jnp.asarray([[[0.5, 0.0, 0.5]]])
    key_B = jax.random.split(jax.random.key(0), 1)
    chosen = choose(Children.WITHOUT_REPLACEMENT, q_BnV, 3, key_B)
    assert chosen.some_Bnk.tolist() == [[[True, True, False]]]
    assert sorted(chosen.token_Bnk[0, 0, :2].tolist()) == [0, 2]
