"""Controls that shape p and q, and draws from them (HO-08, HO-09, HO-10)."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.drafters import ModelDrafter
from spec.draws import Children, Draws, Kind
from spec.generate import Request, begin, finish, generate
from spec.sampling import draw, probabilities, rows
from spec.tree import TokenTree
from spec.tree_shapes import expansion
from spec.verify import RULES, Keys
from spec.verify.rule import _WHY, check_fit
from spec.verify.top_down import law_at
from tests.common import toys
from tests.common.toys import PLAIN, VOCAB1, chain, chain11, chain11_greedy, scripted

N_DRAWS, TOLERANCE = 40_000, 0.012


def star(tokens, kinds, q):
    """One root with a child a token, a row for each given list."""
    B, k = np.shape(tokens)

    def whole(values):
        return jnp.asarray(np.broadcast_to(np.asarray(values, np.int32), (B, len(values))))

    tree = TokenTree(
        jnp.concatenate([jnp.zeros((B, 1), jnp.int32), jnp.asarray(tokens, jnp.int32)], axis=1),
        whole([0] * (k + 1)),
        whole([0] + [1] * k),
        jnp.ones((B, k + 1), bool),
    )
    q_BQV = jnp.broadcast_to(jnp.asarray([q], jnp.float32), (B, 1, len(q)))
    return tree, Draws(whole(range(1, k + 1)), whole([0] * k), whole(kinds), whole([0] * k), q_BQV)


def first_token_law(rule, p, tokens, kinds, q):
    """Frequencies of the first emitted token over the rows of `tokens`, through `sample`."""
    B = len(tokens)
    tree, draws = star(tokens, kinds, q)
    p_BV = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (B, len(p)))
    row_keys = jax.vmap(jax.random.key)(jnp.arange(B))
    keys = Keys(row_keys, jnp.full(B, 5, jnp.int32))

    @jax.jit
    def run(tree, draws):
        done = RULES[rule].sample(lambda node_B: p_BV, tree, draws, keys, 2)
        index_B = jnp.minimum(done.node_BP[:, 1:2], tree.size - 1)
        child_B = jnp.take_along_axis(tree.token_BN, index_B, axis=1)[:, 0]
        return jnp.where(done.count_B > 1, child_B, done.bonus_B)

    return np.bincount(np.asarray(run(tree, draws)), minlength=len(p)) / B


def test_residual_is_normalised_not_softmaxed():
    """HO-08: p = (.5,.3,.2), q = (.2,.2,.6); a rejected token 2 leaves (.75, .25, 0)."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    tree, draws = star([[2]], [Kind.IID], q)
    here = law_at(jnp.asarray([p]), jnp.zeros(1, jnp.int32), tree, draws)
    np.testing.assert_allclose(here.residual_BV[0], [0.75, 0.25, 0], atol=1e-6)
    np.testing.assert_allclose(here.accept_BM[0], [1 / 3], atol=1e-6)
    tokens = np.random.default_rng(0).choice(3, (N_DRAWS, 1), p=q)
    got = first_token_law("top_down", p, tokens, [Kind.IID], q)
    np.testing.assert_allclose(got, p, atol=TOLERANCE)


def test_a_greedy_drafter_is_a_point_mass():
    """HO-09 a: always drafting token 0 and testing with the raw q gives (.6, .4, 0)."""
    p, q = [0.3, 0.5, 0.2], [0.5, 0.3, 0.2]
    tokens = np.zeros((N_DRAWS, 1), int)
    for rule in ("naive", "top_down"):
        got = first_token_law(rule, p, tokens, [Kind.POINT_MASS], q)
        np.testing.assert_allclose(got, p, atol=TOLERANCE)
    wrong = first_token_law("top_down", p, tokens, [Kind.IID], q)
    np.testing.assert_allclose(wrong, [0.6, 0.4, 0], atol=TOLERANCE)


def test_q_is_the_distribution_that_was_sampled():
    """HO-09 b: q sampled at top_k 3; the ratio with the raw q has total variation .122."""
    raw = np.array([0.4017, 0.2692, 0.1805, 0.0544, 0.0364, 0.0244, 0.02, 0.0134])
    p = [0.30, 0.25, 0.15, 0.10, 0.08, 0.06, 0.04, 0.02]
    q = np.asarray(probabilities(jnp.log(jnp.asarray([[raw]], jnp.float32)), rows(1, 3, 1, 1)))[
        0, 0
    ]
    np.testing.assert_allclose(q, [*(raw[:3] / raw[:3].sum()), 0, 0, 0, 0, 0], atol=1e-6)
    q = q.astype(float)
    q /= q.sum()
    tokens = np.random.default_rng(1).choice(8, (N_DRAWS, 1), p=q)
    np.testing.assert_allclose(
        first_token_law("top_down", p, tokens, [Kind.IID], q), p, atol=TOLERANCE
    )
    wrong = first_token_law("top_down", p, tokens, [Kind.IID], raw)
    assert 0.5 * np.abs(wrong - p).sum() == pytest.approx(0.122, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("rule", "children"),
    [
        ("mss", Children.TOP_K),
        ("mss", Children.WITHOUT_REPLACEMENT),
        ("without_replacement", Children.IID),
        ("without_replacement", Children.TOP_K),
        ("greedy_plus_one", Children.TOP_K),
        ("top_down", Children.FUSED),
        ("top_down", Children.RERANKED),
        ("traversal", Children.MERGED),
        ("block", Children.WITHOUT_REPLACEMENT),
    ],
)
def test_rules_refuse_trees_for_which_they_are_biased(rule, children):
    words = rf"'{rule}' is not exact for '{children.value}' children: {re.escape(_WHY[children])}"
    with pytest.raises(ValueError, match=words):
        check_fit(RULES[rule], frozenset({children}))
    check_fit(RULES["naive"], frozenset({children}))


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 1e-3])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.1])
@pytest.mark.parametrize("top_k", [0, 1, 3])
def test_cold_is_greedy(temperature, top_k, top_p):
    """HO-10: no NaN, no other threshold in another path."""
    target = chain11()
    request = Request(8, temperature=temperature, top_k=top_k, top_p=top_p)
    want = chain11_greedy(2, 8)
    perfect = scripted([(2, *chain11_greedy(2, 20))], chain(3), VOCAB1)
    for drafter in (PLAIN, perfect):
        assert generate(target, drafter, [[2]], request)[0].token_ids == want


@pytest.mark.parametrize(
    "children", [Children.IID, Children.WITHOUT_REPLACEMENT, Children.GREEDY_PLUS_ONE]
)
@pytest.mark.parametrize("controls", [{"temperature": 1e-6}, {"temperature": 1.0, "top_k": 1}])
def test_certain_drafters_and_targets(children, controls):
    """p and q are one-hot: nothing is left to draw, no logarithm or quotient may be NaN."""
    drafter = ModelDrafter(chain11(), expansion((2, 1)), VOCAB1, children)
    (done,) = generate(chain11(), drafter, [[2]], Request(8, **controls))
    assert done.token_ids == chain11_greedy(2, 8)
    if children is Children.IID:  # its draws are the target's own tokens
        assert done.metrics.accepted == 5


def test_a_batch_of_greedy_and_sampled_rows():
    """Each row has its own controls: neither sees the other's."""
    target, request = chain11(), Request(16, temperature=1.5, seed=3)
    (alone,) = generate(target, PLAIN, [[2]], dataclasses.replace(request, seed=(4,)))
    both = dataclasses.replace(request, seed=(9, 4))
    state, settings = begin(target, PLAIN, [[2], [2]], both)
    mixed = dataclasses.replace(
        settings.sampling, temperature_B=jnp.asarray([0.0, 1.5], jnp.float32)
    )
    settings = dataclasses.replace(settings, sampling=mixed)
    cold, warm = finish(target, PLAIN, state, settings, 2, both)
    assert cold.token_ids == chain11_greedy(2, 16)
    assert warm.token_ids == alone.token_ids


def test_temperature_one_and_two():
    """HO-10: T1 after token 2: 7 with .652, 8 with .240, others .012; at T = 2 all are seen."""
    target = chain11()
    prompts = [[2]] * 8192
    for temperature in (1.0, 2.0):
        done = generate(target, PLAIN, prompts, Request(1, temperature=temperature, seed=3))
        got = np.bincount([c.token_ids[0] for c in done], minlength=VOCAB1) / len(prompts)
        logits = np.zeros(VOCAB1)
        logits[7], logits[8] = 4 / temperature, 3 / temperature
        want = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(got, want, atol=0.02)
        if temperature == 1:
            np.testing.assert_allclose(want[[7, 8, 0]], [0.652435, 0.240017, 0.011950], atol=1e-6)
        else:
            assert (got > 0).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_meaningless_controls_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Request(1, **bad)


@settings(max_examples=60, deadline=None)
@given(
    # Few lengths: each is a compilation.
    st.sampled_from((2, 7, 12)).flatmap(
        lambda n: st.lists(st.floats(-6, 6), min_size=n, max_size=n)
    ),
    st.integers(0, 12),
    st.floats(0.05, 1),
)
def test_top_k_and_top_p_against_a_sort(logits, top_k, top_p):
    got = np.asarray(
        toys.quick(probabilities)(jnp.asarray([[logits]], jnp.float32), rows(0.8, top_k, top_p, 1))
    )[0, 0]
    p = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32) / jnp.float32(0.8)))
    ordered = np.sort(p)[::-1]
    if 0 < top_k < len(p):
        p = np.where(p >= ordered[top_k - 1], p, 0)
        p = p / p.sum(dtype=np.float32)
    if top_p < 1:
        ordered = np.sort(p)[::-1]
        sums = np.cumsum(ordered.astype(float))
        near = np.abs(sums - top_p * sums[-1]).min()
        if near < 1e-5:
            return  # which token crosses is a matter of rounding
        cut = ordered[np.argmax(sums >= top_p * sums[-1])]
        p = np.where(p >= cut, p, 0)
    np.testing.assert_allclose(got, p / p.sum(), atol=1e-5)


def test_draw_follows_p_and_never_takes_what_has_none():
    p = np.zeros(600, np.float32)
    p[[3, 255, 256, 599]] = [0.1, 0.2, 0.3, 0.4]
    keys = jax.vmap(jax.random.key)(jnp.arange(N_DRAWS))
    got = np.bincount(
        np.asarray(jax.jit(draw)(keys, jnp.broadcast_to(jnp.asarray(p), (N_DRAWS, 600)))),
        minlength=600,
    )
    assert got[p == 0].sum() == 0
    np.testing.assert_allclose(got / N_DRAWS, p, atol=TOLERANCE)
