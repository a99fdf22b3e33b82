"""SpecInfer theorem 4.3, and which way of drafting is accepted how often."""

import numpy as np
import pytest

from spec.draws import Children, Kind
from spec.tree_shapes import expansion
from spec.verify import RULES
from tests.enumeration import World, groups, tv_and_accepted


def reject_mss(p, q, k):
    """Product over draws of 1 - sum min(r, q), r the residual (specinfer.md 1.10)."""
    chance, r = 1.0, p.copy()
    for _ in range(k):
        chance *= 1 - np.minimum(r, q).sum()
        left = np.maximum(r - q, 0)
        r = left / left.sum() if left.sum() > 0 else r
    return chance


def pairs(count, seed, vocab=5):
    """As speculation.md's appendix draws them."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        log_p = 1.5 * rng.standard_normal(vocab)
        log_q = np.log(np.exp(log_p) / np.exp(log_p).sum()) + 0.8 * rng.standard_normal(vocab)
        yield (np.exp(x) / np.exp(x).sum() for x in (log_p, log_q))


def test_multi_step_rejects_no_more_than_naive_on_the_same_tree():
    """Theorem 4.3: no violation in 400 pairs; a top-k tree may reject less than either."""
    top_k_wins = 0
    for p, q in pairs(400, 0, vocab=4):
        mss, naive = reject_mss(p, q, 2), float((p * (1 - q) ** 2).sum())
        assert mss <= naive + 1e-12
        top_k_wins += 1 - p[np.argsort(-q)[:2]].sum() < mss
    assert 0 < top_k_wins < 400


@pytest.mark.parametrize("seed", range(3))
def test_the_shipped_laws_reject_as_the_formulas_say(seed):
    import jax

    with jax.enable_x64(True):
        world = World.random(4, 1, seed)
        p, q = world.p[()], world.q[()]
        for rule, want in (
            ("mss", 1 - reject_mss(p, q, 2)),
            ("naive", 1 - float((p * (1 - q) ** 2).sum())),
        ):
            assert tv_and_accepted(RULES[rule], world, (2,), Children.IID)[1] == pytest.approx(want)
        best = 1 - p[np.argsort(-q)[:2]].sum()
        got = tv_and_accepted(RULES["naive"], world, (2,), Children.TOP_K)[1]
        assert got == pytest.approx(1 - best)


def accept_one_node(p, q, k, children):
    """Chance that one of k children is accepted, by enumeration of `groups` and scalar trials."""
    total = 0.0
    for tokens, chance, kinds, row in groups(q, k, children):
        r, left, missed = p.copy(), row.copy(), 1.0
        for token, kind in zip(tokens, kinds, strict=True):
            q_now = np.eye(len(p))[token] if kind == Kind.POINT_MASS else left
            missed *= 1 - min(1.0, r[token] / q_now[token]) if q_now[token] > 0 else 1.0
            after = np.maximum(r - q_now, 0)
            r = after / after.sum() if after.sum() > 0 else r
            if kind == Kind.WITHOUT_REPLACEMENT:
                left = left.copy()
                left[token] = 0
                left = left / left.sum() if left.sum() > 0 else left
        total += chance * (1 - missed)
    return total


def test_mean_acceptance_of_one_node():
    """V = 5, k = 3, 200 pairs: .992 > .957 > .883 > .872 (speculation.md section 2; +-.03)."""
    means = {}
    for children in (
        Children.GREEDY_PLUS_ONE,
        Children.WITHOUT_REPLACEMENT,
        Children.IID,
        Children.TOP_K,
    ):
        means[children] = np.mean([accept_one_node(p, q, 3, children) for p, q in pairs(200, 0)])
    values = list(means.values())
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx([0.992, 0.957, 0.883, 0.872], abs=0.03)


RULE_OF = {
    Children.GREEDY_PLUS_ONE: "greedy_plus_one",
    Children.WITHOUT_REPLACEMENT: "without_replacement",
    Children.IID: "mss",
    Children.TOP_K: "naive",
}


@pytest.mark.parametrize("children", RULE_OF, ids=lambda children: children.value)
def test_the_shipped_laws_accept_as_often_as_the_trials_above(children):
    """So that the ordering above is one of the shipped rules."""
    import jax

    with jax.enable_x64(True):
        for p, q in pairs(3, 7):
            where = [(), *[(token,) for token in range(5)]]
            world = World(5, dict.fromkeys(where, p), dict.fromkeys(where, q))
            got = tv_and_accepted(RULES[RULE_OF[children]], world, (3,), children)[1]
            assert got == pytest.approx(accept_one_node(p, q, 3, children), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("children", "widths", "top_down", "traversal"),
    [  # E[accepted drafts], V = 3, horizon 3, speculation.md section 2
        (Children.IID, (2, 1), 1.563, 1.584),
        (Children.IID, (2, 2), 1.630, 1.652),
        (Children.WITHOUT_REPLACEMENT, (2, 1), 1.679, 1.704),
        (Children.WITHOUT_REPLACEMENT, (2, 2), 1.824, 1.839),
        (Children.TOP_K, (2, 1), 1.313, 1.313),
        (Children.GREEDY_PLUS_ONE, (2, 1), 1.756, 1.809),
        (Children.GREEDY_PLUS_ONE, (2, 2), 1.955, 1.959),
    ],
)
def test_traversal_accepts_no_less_than_top_down(children, widths, top_down, traversal):
    import jax

    assert expansion(widths).depth[-1] == 2
    found = {"top_down": [], "traversal": []}
    with jax.enable_x64(True):
        for seed in range(15):
            world = World.random(3, 2, seed)
            for rule, values in found.items():
                tv, accepted = tv_and_accepted(RULES[rule], world, widths, children)
                assert tv < 1e-12
                values.append(accepted)
            assert found["traversal"][-1] >= found["top_down"][-1] - 1e-12
    # The reference's contexts go one token deeper than a root's children, drawn in another order.
    print(children, widths, np.mean(found["top_down"]), np.mean(found["traversal"]))
    gap = np.mean(found["traversal"]) - np.mean(found["top_down"])
    assert gap == pytest.approx(traversal - top_down, abs=0.03)
    assert (gap > 1e-4) == (traversal > top_down), "a traversal that is top-down gains nothing"
