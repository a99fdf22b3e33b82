"""Sampling on the real model has the target's distribution (make exact-smollm2).

The drafter is the target itself at temperature 1.5 with two children, chosen in four ways, or the
n-gram drafter with what it finds in the prompt. p and q are computed once a prefix; the shipped
`choose`, `order` and `sample` then run 20,000 times with fixed seeds. Tested is the first token of
a step after eight prompts, after each with its likeliest first token, and with its likeliest two
(whole paths are tested on small vocabularies), at temperature 1 and at 0.7 with top-p 0.9. Cells
that expect fewer than five are pooled. The p-values of correct sampling are uniform: a
Kolmogorov-Smirnov test over all of them must not say otherwise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments.prompts.load import load
from experiments.setup import encode
from models.transformer import causal_mask
from spec.drafters import NGramDrafter
from spec.drafters.children import choose
from spec.drafters.protocol import View
from spec.draws import Children, Draws, Kind, point_mass
from spec.sampling import Use, probabilities, rows
from spec.tree import TokenTree
from spec.verify import RULES, Keys

pytestmark = pytest.mark.slow

# A chunk's arrays [CHUNK, V] fit into the processor's cache.
DRAWS, CHUNK, WIDTH = 20_000, 8, 2
SETTINGS = {"T=1": (1.0, 0, 1.0), "T=0.7, top-p 0.9": (0.7, 0, 0.9)}
RULE_OF = {
    "mss": Children.IID,
    "without_replacement": Children.WITHOUT_REPLACEMENT,
    "greedy_plus_one": Children.GREEDY_PLUS_ONE,
    "traversal": Children.WITHOUT_REPLACEMENT,
    "naive": Children.TOP_K,
    "n-gram": Children.TOP_K,  # by `naive`; its children come from a lookup
}


@pytest.fixture(scope="module")
def prefixes(smollm2):
    """Logits after 8 prompts, after each with its best token, and with its best two: [24, V]."""
    model, tokenizer = smollm2
    forward = jax.jit(
        lambda m, t, last: m(
            t, jnp.arange(t.shape[1], dtype=jnp.int32)[None, :], causal_mask(1, t.shape[1])
        ).logits_BNV[0, last]
    )
    chosen = [p for p in load(split="eval") if p.kind in ("chat", "math")][:8]
    out = []
    for ids in encode(tokenizer, chosen):
        for _ in range(3):
            padded = np.zeros((1, 128), np.int32)
            padded[0, : len(ids)] = ids
            logits = np.asarray(forward(model, padded, len(ids) - 1))
            out.append((logits, looked_up(ids)))
            ids = [*ids, int(logits.argmax())]
    return out


def looked_up(ids):
    """The n-gram drafter's first two children of the root; the first twice if there is one."""
    drafter = NGramDrafter(depth=1, sizes=(1 + WIDTH,))
    state = drafter.init(jnp.asarray([ids]), jnp.asarray([len(ids)]), None, len(ids), 2)
    view = View(jnp.asarray(ids[-1:]), None, None, None, None, None, None)
    tree, _, _ = drafter.propose(state, view, None)
    found = np.asarray(tree.token_BN)[0, 1:][np.asarray(tree.valid_BN)[0, 1:]]
    return np.resize(found, WIDTH).astype(np.int32) if len(found) else None


@functools.partial(jax.jit, static_argnames=("name",))
def emit(name, p_V, q_V, found_k, seed):
    """Emits the first token of DRAWS independent steps: root, WIDTH children, the rule."""
    first = jnp.arange(0, DRAWS, CHUNK)
    return jax.lax.map(lambda at: emit_chunk(name, p_V, q_V, found_k, seed, at), first).ravel()


def emit_chunk(name, p_V, q_V, found_k, seed, at):
    rule, children = RULES["naive" if name == "n-gram" else name], RULE_OF[name]
    key_B = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), at + i))(jnp.arange(CHUNK))
    keys = Keys(key_B, jnp.zeros(CHUNK, jnp.int32))
    B = CHUNK
    q_BnV = jnp.broadcast_to(q_V, (B, 1, q_V.shape[0]))
    chosen = choose(children, q_BnV, WIDTH, keys.step(Use.DRAFT))
    zero_B1 = jnp.zeros((B, 1), jnp.int32)
    line = jnp.broadcast_to(jnp.asarray([0] + [1] * WIDTH, jnp.int32), (B, WIDTH + 1))
    valid_BN = jnp.concatenate([zero_B1 == 0, chosen.some_Bnk[:, 0]], axis=1)
    token_Bk = chosen.token_Bnk[:, 0]
    if name == "n-gram":
        token_Bk = jnp.broadcast_to(found_k, token_Bk.shape)
    token_BN = jnp.concatenate([zero_B1, token_Bk], axis=1)
    tree = TokenTree(token_BN, jnp.zeros_like(line), line, valid_BN)
    draws = point_mass(tree)
    if children is not Children.TOP_K:
        kind_M = jnp.asarray([kind.value for kind in chosen.kind_k], jnp.int32)
        kind_BM = jnp.where(valid_BN[:, 1:], kind_M[None, :], Kind.PADDING.value)
        draws = Draws(
            draws.child_BM, draws.parent_BM, kind_BM, jnp.zeros_like(kind_BM), chosen.q_BnV
        )
    draws = rule.order(draws, keys.step(Use.ORDER))
    p_BV = jnp.broadcast_to(p_V, (B, p_V.shape[0]))
    done = rule.sample(lambda node_B: p_BV, tree, draws, keys, 2)
    child_B1 = jnp.minimum(done.node_BP[:, 1:2], WIDTH)
    drafted_B = jnp.take_along_axis(token_BN, child_B1, axis=1)[:, 0]
    return jnp.where(done.count_B > 1, drafted_B, done.bonus_B)


def possible(p_V, q_V, found_k):
    """Leaves out tokens that have no part in it, which no rule can tell from absent ones.

    What is left is padded to one of four sizes, each a compilation.
    """
    part = (p_V > 0) | (q_V > 0)
    part[found_k] = True
    kept = np.flatnonzero(part)
    size = next(size for size in (64, 1024, 8192, len(p_V)) if size >= len(kept))
    p_V, q_V = (np.pad(each[kept], (0, size - len(kept))) for each in (p_V, q_V))
    return p_V, q_V, np.searchsorted(kept, found_k).astype(np.int32)


def chi_square(counts, p):
    """p-value of the counts; cells that expect fewer than 5 are one cell."""
    expected = p * counts.sum()
    big = expected >= 5
    seen = np.append(counts[big], counts[~big].sum())
    want = np.append(expected[big], expected[~big].sum())
    if want[-1] < 5:  # too small even together: into the smallest of the others
        seen[-2], want[-2] = seen[-2] + seen[-1], want[-2] + want[-1]
        seen, want = seen[:-1], want[:-1]
    if len(want) < 2:
        return None
    return stats.chisquare(seen, want * seen.sum() / want.sum()).pvalue


@pytest.mark.parametrize("name", RULE_OF)
def test_p_values_are_uniform(prefixes, name):
    values = []
    drafted = [found for _, found in prefixes if found is not None]
    assert len(drafted) >= 8
    for where, (logits, found_k) in enumerate(prefixes):
        if name == "n-gram" and found_k is None:
            continue
        found_k = np.zeros(WIDTH, np.int32) if found_k is None else found_k
        for number, controls in enumerate(SETTINGS.values()):
            one = rows(*controls, batch=1)
            hot = rows(1.5, *controls[1:], batch=1)
            p_V = probabilities(jnp.asarray(logits)[None, None], one)[0, 0]
            q_V = probabilities(jnp.asarray(logits)[None, None], hot)[0, 0]
            p_V, q_V, found = possible(np.asarray(p_V), np.asarray(q_V), found_k)
            tokens = np.asarray(emit(name, p_V, q_V, found, 100 * where + number))
            p = np.asarray(p_V, np.float64)
            counts = np.bincount(tokens, minlength=len(p))
            assert counts[p == 0].sum() == 0
            values.append(chi_square(counts, p / p.sum()))
    values = [value for value in values if value is not None]
    test = stats.kstest(values, "uniform")
    print(f"\n{name}: {len(values)} p-values, smallest {min(values):.4f}, KS {test.pvalue:.3f}")
    assert len(values) >= (8 if name == "n-gram" else 24)
    assert test.pvalue > 0.01
