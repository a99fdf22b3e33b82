"""The shipped `sample`, end to end as `generate` runs it in float32, on a Markov chain of 5 tokens.

1,000,000 fixed-seed draws a rule and setting (slow), 8,192 in the fast suite, at temperature 1 and
at 0.7 with top-p 0.9. The chain's law is known: first token, second given first, third
given second are chi-square tested; the p-values of all must look uniform (Kolmogorov-Smirnov).
"""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

from spec.decode import advance
from spec.drafters import EnsembleDrafter, ModelDrafter, NGramDrafter, RootDrafter
from spec.draws import Children, Kind
from spec.generate import Request, begin, row_keys, row_seeds
from spec.tree_shapes import expansion
from spec.verify import TopDown
from tests.common.toys import lookup
from tests.spec.test_sampling import first_token_law

V, BATCH = 5, 16_384
RNG = np.random.default_rng(12)
P = 1.2 * RNG.standard_normal((V, V))
TARGET = lookup(P)
DRAFTS = [lookup(P + 0.8 * RNG.standard_normal((V, V))) for _ in range(2)]


def model(how, widths, which=0):
    return ModelDrafter(DRAFTS[which], expansion(widths), V, how)


# The rule None is the drafter's usual one.
RUNS = {
    "plain": (RootDrafter(), "naive"),
    "mss": (model(Children.IID, (2, 1)), "mss"),
    "without_replacement": (model(Children.WITHOUT_REPLACEMENT, (2, 2)), "without_replacement"),
    "greedy_plus_one": (model(Children.GREEDY_PLUS_ONE, (3, 1)), "greedy_plus_one"),
    "top-k": (model(Children.TOP_K, (2, 2)), "traversal"),
    "n-gram": (NGramDrafter(), "top_down"),
    "block": (model(Children.IID, (1, 1)), "block"),
    "traversal": (model(Children.WITHOUT_REPLACEMENT, (2, 1)), "traversal"),
    "two drafters, merged": (
        EnsembleDrafter((model(Children.IID, (2, 1)), model(Children.IID, (1, 1), 1))),
        "mss",
    ),
    "sampled and looked up, merged": (
        EnsembleDrafter((model(Children.IID, (2, 1)), NGramDrafter())),
        None,
    ),
    # The model is left out where the lookup is sure of three tokens, and drafts beside one.
    "looked up or sampled, within a budget": (
        EnsembleDrafter(
            (NGramDrafter(window=2, sizes=(1, 6), unsure=2), model(Children.IID, (2, 1))), 6
        ),
        None,
    ),
}


def law(temperature, top_p):
    """Processed transition probabilities, by sorting."""
    p = np.exp(P / temperature)
    p /= p.sum(1, keepdims=True)
    for row in p:
        order = np.argsort(-row)
        kept = order[: 1 + int((np.cumsum(row[order]) < top_p).sum())]
        row[[t for t in range(V) if t not in kept]] = 0
    return p / p.sum(1, keepdims=True)


def p_values(tokens, p):
    """First token after token 2, then each second given first and third given second.

    Cells that expect fewer than five are one cell.
    """
    out = []
    for position in range(3):
        before = np.full(len(tokens), 2) if position == 0 else tokens[:, position - 1]
        for token in range(V):
            mine = tokens[before == token, position]
            counts, want = np.bincount(mine, minlength=V), p[token] * len(mine)
            assert counts[p[token] == 0].sum() == 0
            big = want >= 5
            seen, want = (np.append(x[big], x[~big].sum()) for x in (counts, want))
            seen, want = (x[want > 0] for x in (seen, want))
            if len(want) > 1 and want.min() >= 1:
                out.append(stats.chisquare(seen, want * seen.sum() / want.sum()).pvalue)
    return out


# Without the donation of `generate`: every batch starts from the same prefilled state.
steps = jax.jit(advance)


def run(name, draws, temperature, top_p, other_rule=None):
    drafter, rule = RUNS[name]
    tokens, size = [], min(draws, BATCH)
    request = Request(3, temperature=temperature, top_p=top_p, rule=rule)
    state, settings = begin(TARGET, drafter, [[0, 1, 2, 0, 1, 2]] * size, request)
    if other_rule is not None:
        settings = dataclasses.replace(settings, rule=other_rule)
    for batch in range(draws // size):
        seed = 1000 * round(10 * temperature) + batch  # the two settings share no number
        fresh = dataclasses.replace(state, key_B=row_keys(*row_seeds(seed, size, size)))
        done, _ = steps(TARGET, drafter, fresh, settings, np.int32(3))
        assert (np.asarray(done.emitted_B) == 3).all()
        tokens.append(np.asarray(done.token_BE)[:, :3])
    return p_values(np.concatenate(tokens), law(temperature, top_p))


def check(draws, names, other_rule=None):
    values = [
        value
        for name in names
        for controls in ((1.0, 1.0), (0.7, 0.9))
        for value in run(name, draws, *controls, other_rule)
    ]
    uniform = stats.kstest(values, "uniform").pvalue
    print(f"\n{names}: {len(values)} p-values, smallest {min(values):.2e}, KS {uniform:.3f}")
    assert uniform > 0.01
    assert min(values) > 1e-3 / len(values)


def test_quick():
    check(8192, ["traversal"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_million_draws(name):
    check(61 * BATCH, [name])


@dataclasses.dataclass(frozen=True)
class RandomOrder(TopDown):
    """Draws without replacement tried in random order: total variation of some hundredths."""


def test_a_slightly_biased_rule_is_seen():
    wrong = RandomOrder("random_order", frozenset(Children), True)
    with pytest.raises(AssertionError):
        check(4096, ["without_replacement"], wrong)


def test_a_biased_rule_is_seen():
    """Top-k children tried with p/q, which `check_fit` refuses: forced, the test must fail."""
    p, q = law(1.0, 1.0)[2], np.full(V, 1 / V)
    tokens = np.tile(np.argsort(-p)[:2], (BATCH, 1))
    got = first_token_law("top_down", p, tokens, [Kind.IID] * 2, q)
    assert stats.chisquare(got * BATCH, p * BATCH / p.sum()).pvalue < 1e-6
