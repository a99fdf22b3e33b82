"""The shipped `sample`, end to end through `generate` in float32, on a Markov chain of 5 tokens.

1,000,000 fixed-seed draws a rule (slow), 8,192 in the fast suite. The chain's law is known: first
token, second given first, third given second are chi-square tested; the p-values of all must look
uniform (Kolmogorov-Smirnov).
"""

import numpy as np
import pytest
from scipy import stats

from spec.drafters import EnsembleDrafter, ModelDrafter, NGramDrafter, RootDrafter
from spec.draws import Children
from spec.generate import Request, generate
from spec.tree_shapes import expansion
from tests.toys import lookup

V, BATCH = 5, 16_384
RNG = np.random.default_rng(12)
P = 1.2 * RNG.standard_normal((V, V))
TARGET = lookup(P)
DRAFTS = [lookup(P + 0.8 * RNG.standard_normal((V, V))) for _ in range(2)]


def model(how, widths, which=0):
    return ModelDrafter(DRAFTS[which], expansion(widths), V, how)


RUNS = {
    "plain": (RootDrafter(), "naive"),
    "mss": (model(Children.IID, (2, 1)), "mss"),
    "without_replacement": (model(Children.WITHOUT_REPLACEMENT, (2, 2)), "without_replacement"),
    "greedy_plus_one": (model(Children.GREEDY_PLUS_ONE, (3, 1)), "greedy_plus_one"),
    "top-k, naive": (model(Children.TOP_K, (2, 2)), "naive"),
    "n-gram": (NGramDrafter(), "naive"),
    "block": (model(Children.IID, (1, 1)), "block"),
    "traversal": (model(Children.WITHOUT_REPLACEMENT, (2, 1)), "traversal"),
    "two drafters, merged": (
        EnsembleDrafter((model(Children.IID, (2, 1)), model(Children.IID, (1, 1), 1))),
        "mss",
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
    """First token after token 2, then each second given first and third given second."""
    out = []
    for position in range(3):
        before = np.full(len(tokens), 2) if position == 0 else tokens[:, position - 1]
        for token in range(V):
            mine = tokens[before == token, position]
            possible = p[token] * len(mine) >= 5
            if possible.sum() < 2:
                continue
            counts = np.bincount(mine, minlength=V)
            assert counts[p[token] == 0].sum() == 0
            want = p[token][possible]
            seen = counts[possible]
            out.append(stats.chisquare(seen, want * seen.sum() / want.sum()).pvalue)
    return out


def run(name, draws, temperature, top_p):
    drafter, rule = RUNS[name]
    tokens, size = [], min(draws, BATCH)
    for batch in range(draws // size):
        request = Request(3, temperature=temperature, top_p=top_p, rule=rule, seed=1000 + batch)
        prompts = [[0, 1, 2, 0, 1, 2]] * size
        done = generate(TARGET, drafter, prompts, request)
        tokens.append(np.array([c.token_ids for c in done]))
    return p_values(np.concatenate(tokens), law(temperature, top_p))


def check(draws, names):
    values = [v for name in names for v in run(name, draws, 1.0, 1.0) + run(name, draws, 0.7, 0.9)]
    uniform = stats.kstest(values, "uniform").pvalue
    print(f"\n{names}: {len(values)} p-values, smallest {min(values):.2e}, KS {uniform:.3f}")
    assert uniform > 0.01
    assert min(values) > 1e-3 / len(values)


@pytest.mark.parametrize("name", ["traversal", "two drafters, merged"])
def test_quick(name):
    check(8192, [name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_million_draws(name):
    check(61 * BATCH, [name])


def test_a_biased_rule_is_seen():
    """Top-k children tried with p/q, which `check_fit` refuses: forced, the test must fail."""
    from spec.draws import Kind
    from tests.test_sampling import first_token_law

    p, q = law(1.0, 1.0)[2], np.full(V, 1 / V)
    tokens = np.tile(np.argsort(-p)[:2], (BATCH, 1))
    got = first_token_law("top_down", p, tokens, [Kind.IID] * 2, q)
    assert stats.chisquare(got * BATCH, p * BATCH / p.sum()).pvalue < 1e-6
