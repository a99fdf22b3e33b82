"""SpecInfer theorem 4.3, and which way of drafting is accepted how often."""

import numpy as np
import pytest

from spec.draws import Children, Kind
from spec.tree_shapes import expansion
from spec.verify import RULES
from tests.common.enumeration import World, groups, tv_and_accepted


def reject_mss(p, q, k):
    """Product over draws of 1 - sum min(r, q), r the residual."""
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
    return by_trials(p, groups(q, k, children))[1]


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


def by_trials(p, found):
    """Law of the first token and chance that a child is accepted, by scalar trials.

    `found`: (tokens, probability, kinds, q) of every draft; q is zeroed where the kind says so.
    """
    out, accepted = np.zeros(len(p)), 0.0
    for tokens, chance, kinds, row in found:
        r, left, missed = p.copy(), row.copy(), 1.0
        for token, kind in zip(tokens, kinds, strict=True):
            q_now = np.eye(len(p))[token] if kind == Kind.POINT_MASS else left
            a = min(1.0, r[token] / q_now[token]) if q_now[token] > 0 else 0.0
            out[token] += chance * missed * a
            missed *= 1 - a
            after = np.maximum(r - q_now, 0)
            r = after / after.sum() if after.sum() > 0 else r
            if kind == Kind.WITHOUT_REPLACEMENT:
                left = left.copy()
                left[token] = 0
                left = left / left.sum() if left.sum() > 0 else left
        out += chance * missed * r
        accepted += chance * (1 - missed)
    return out, accepted


def as_kind(found, kind):
    return [(tokens, chance, [kind] * len(tokens), row) for tokens, chance, _, row in found]


def re_ranked(q, kind):
    """Four sampled without replacement, the best three of them by their own probability."""
    return [
        (tuple(sorted(tokens, key=lambda token: -q[token])[:3]), chance, [kind] * 3, row)
        for tokens, chance, _, row in groups(q, 4, Children.WITHOUT_REPLACEMENT)
    ]


def random_first(found):
    """Greedy plus one with the fixed children before the random one."""
    return [((*t[1:], t[0]), chance, [*k[1:], k[0]], row) for t, chance, k, row in found]


SCHEMES = {  # draft and test; max TV and mean acceptance of speculation.md section 2
    "with replacement, as such": (
        lambda p, q: groups(q, 3, Children.IID), 0, 0.883),
    "without replacement, as such": (
        lambda p, q: groups(q, 3, Children.WITHOUT_REPLACEMENT), 0, 0.957),
    "top-k as point masses": (
        lambda p, q: groups(q, 3, Children.TOP_K), 0, 0.872),
    "greedy plus one, random first": (
        lambda p, q: groups(q, 3, Children.GREEDY_PLUS_ONE), 0, 0.992),
    "greedy plus one, random last": (
        lambda p, q: random_first(groups(q, 3, Children.GREEDY_PLUS_ONE)), 0, 0.945),
    "re-ranked, as point masses": (
        lambda p, q: re_ranked(q, Kind.POINT_MASS), 0, 0.867),
    "without replacement, q unchanged": (
        lambda p, q: as_kind(groups(q, 3, Children.WITHOUT_REPLACEMENT), Kind.IID), 0.166, 0.975),
    "top-k by p/q": (
        lambda p, q: as_kind(groups(q, 3, Children.TOP_K), Kind.IID), 0.697, 0.977),
    "top-k, q zeroed": (
        lambda p, q: as_kind(groups(q, 3, Children.TOP_K), Kind.WITHOUT_REPLACEMENT), 0.697, 0.956),
    "re-ranked, q zeroed": (
        lambda p, q: re_ranked(q, Kind.WITHOUT_REPLACEMENT), 0.626, 0.956),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_right_and_wrong_schemes_of_one_node(name):
    """200 pairs, V = 5, k = 3: the wrong ones look better, and are seen as wrong."""
    draft, tv, mean = SCHEMES[name]
    found = [(p, by_trials(p, draft(p, q))) for p, q in pairs(200, 0)]
    worst = max(0.5 * np.abs(law - p).sum() for p, (law, _) in found)
    assert np.mean([accepted for _, (_, accepted) in found]) == pytest.approx(mean, abs=0.001)
    assert worst < 1e-12 if tv == 0 else worst == pytest.approx(tv, abs=0.001)


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
        (Children.WITHOUT_REPLACEMENT, (3, 1), 1.785, 1.810),
        (Children.TOP_K, (2, 2), None, None),
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
    if traversal is None:  # no figure, but "equal"
        assert gap == pytest.approx(0, abs=1e-9)
        return
    assert gap == pytest.approx(traversal - top_down, abs=0.03)
    assert (gap > 1e-4) == (traversal > top_down), "a traversal that is top-down gains nothing"
