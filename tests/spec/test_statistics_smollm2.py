"""Sampling on the real model has the target's distribution (make exact-smollm2).

Eight prompts. p_0, p_1, p_2 are SmolLM2's distributions after a prompt, after it and its likeliest
first token, after its likeliest two: computed once. The law under test puts p_i at position i, so
that every draw counts, and the drafter q_i, which is p_i at temperature 1.5. Each of 20,000
fixed-seed draws runs one step of the shipped `choose`, `order` and `sample` over a tree <2,1> (or
what the n-gram drafter finds in the prompt), and is extended to three tokens by the target. Tested
are the first token, the second given the likeliest first, the third given the likeliest second, at
temperature 1 and at 0.7 with top-p 0.9. Cells that expect fewer than five are pooled. The p-values
of correct sampling are uniform: a Kolmogorov-Smirnov test must not say otherwise, of each rule's
and of all.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from experiments.common.setup import encode
from experiments.prompts.load import load
from models.transformer import causal_mask
from spec.drafters import NGramDrafter
from spec.drafters.children import choose
from spec.drafters.protocol import View
from spec.draws import Children, Draws, Kind, point_mass
from spec.sampling import Use, draw, fold, probabilities, rows
from spec.tree import TokenTree, emitted_tokens
from spec.tree_shapes import expansion
from spec.verify import RULES, Keys

pytestmark = pytest.mark.slow

# A chunk's arrays [CHUNK, V] fit into the processor's cache.
DRAWS, CHUNK, SHAPE = 20_000, 8, expansion((2, 1))
SETTINGS = {"T=1": (1.0, 0, 1.0), "T=0.7, top-p 0.9": (0.7, 0, 0.9)}
# What drafts, and the rule.
RUNS = {
    "mss": (Children.IID, "mss"),
    "without_replacement": (Children.WITHOUT_REPLACEMENT, "without_replacement"),
    "greedy_plus_one": (Children.GREEDY_PLUS_ONE, "greedy_plus_one"),
    "traversal": (Children.WITHOUT_REPLACEMENT, "traversal"),
    "top-k": (Children.TOP_K, "naive"),
    "n-gram": (None, "top_down"),
}


@pytest.fixture(scope="module")
def prefixes(smollm2):
    """Of each prompt: logits [3, V], and the tokens of the n-gram drafter's tree, or None."""
    model, tokenizer = smollm2
    forward = jax.jit(
        lambda m, t, last: m(
            t, jnp.arange(t.shape[1], dtype=jnp.int32)[None, :], causal_mask(1, t.shape[1])
        ).logits_BNV[0, last]
    )
    # The shortest of each kind, then more: those whose last token occurs before have n-grams.
    chosen = sorted(load(split="eval"), key=lambda prompt: len(prompt.text))[:8]
    out = []
    for ids in encode(tokenizer, chosen):
        found, logits = looked_up(ids), []
        for _ in range(3):
            padded = np.zeros((1, 128), np.int32)
            padded[0, : len(ids)] = ids
            logits.append(np.asarray(forward(model, padded, len(ids) - 1)))
            ids = [*ids, int(logits[-1].argmax())]
        out.append((np.stack(logits), found))
    return out


def looked_up(ids):
    """Tokens of the tree <2,1> that the n-gram drafter's chains fill, repeated if it has fewer."""
    drafter = NGramDrafter(depth=2, sizes=(SHAPE.size,))
    state = drafter.init(jnp.asarray([ids]), jnp.asarray([len(ids)]), None, len(ids), 3)
    view = View(jnp.asarray(ids[-1:]), None, None, None, None, None, None)
    tree, _, _ = drafter.propose(state, view, None)
    return jax.tree.map(np.asarray, tree) if np.asarray(tree.valid_BN)[0, 1:].any() else None


@functools.partial(jax.jit, static_argnames=("name",))
def emit(name, p_PV, q_PV, found, seed):
    """The first three tokens of DRAWS independent steps, int32 [DRAWS, 3]."""
    first = jnp.arange(0, DRAWS, CHUNK)
    tokens = jax.lax.map(lambda at: emit_chunk(name, p_PV, q_PV, found, seed, at), first)
    return tokens.reshape(DRAWS, 3)


def grown(how, q_PV, key_B):
    """A tree of SHAPE in every row of the chunk, drafted with q_i at depth i."""
    B, V = CHUNK, q_PV.shape[1]
    tokens, kinds, valid = [jnp.zeros((B, 1), jnp.int32)], [], [jnp.ones((B, 1), jnp.bool_)]
    for depth, (parents, width) in enumerate(((1, 2), (2, 1))):
        q_BnV = jnp.broadcast_to(q_PV[depth], (B, parents, V))
        chosen = choose(how, q_BnV, width, fold(key_B, depth))
        tokens.append(chosen.token_Bnk.reshape(B, -1))
        valid.append(chosen.some_Bnk.reshape(B, -1))
        kinds += [kind.value for kind in chosen.kind_k] * parents
        q_PV = q_PV.at[depth].set(chosen.q_BnV[0, 0]) if how is Children.GREEDY_PLUS_ONE else q_PV

    def line(values):
        return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (B, len(values)))

    valid_BN = jnp.concatenate(valid, axis=1)
    valid_BN &= jnp.take_along_axis(valid_BN, line(SHAPE.parent), axis=1)
    token_BN = jnp.concatenate(tokens, axis=1)
    tree = TokenTree(token_BN, line(SHAPE.parent), line(SHAPE.depth), valid_BN)
    if how is Children.TOP_K:
        return tree, point_mass(tree)
    kind_BM = jnp.where(valid_BN[:, 1:], line(kinds), Kind.PADDING.value)
    q_BQV = jnp.broadcast_to(q_PV[:2], (B, 2, V))
    row_BM = line([SHAPE.depth[node] - 1 for node in range(1, SHAPE.size)])
    nodes = [*range(1, SHAPE.size)]
    return tree, Draws(line(nodes), line(SHAPE.parent[1:]), kind_BM, row_BM, q_BQV)


def emit_chunk(name, p_PV, q_PV, found, seed, at):
    (how, rule), B = RUNS[name], CHUNK
    key_B = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), at + i))(jnp.arange(B))
    keys = Keys(key_B, jnp.zeros(B, jnp.int32))
    if how is None:
        tree = jax.tree.map(lambda array: jnp.broadcast_to(array, (B, array.shape[1])), found)
        draws = point_mass(tree)
    else:
        tree, draws = grown(how, q_PV, keys.step(Use.DRAFT))
    draws = RULES[rule].order(draws, keys.step(Use.ORDER))

    def p_at(node_B):
        depth_B = jnp.take_along_axis(tree.depth_BN, node_B[:, None], axis=1)[:, 0]
        return p_PV[depth_B]

    done = RULES[rule].sample(p_at, tree, draws, keys, 3)
    index_BP = jnp.minimum(done.node_BP, tree.size - 1)
    token_BP = jnp.take_along_axis(tree.token_BN, index_BP, axis=1)
    emitted_BP = emitted_tokens(token_BP, done.count_B, done.bonus_B)
    # Beyond the step the target goes on, with randomness of its own.
    more = [draw(fold(key_B, 99, i), jnp.broadcast_to(p_PV[i], (B, p_PV.shape[1]))) for i in (1, 2)]
    step_P = jnp.arange(3, dtype=jnp.int32)[None, :]
    later_BP = jnp.stack([emitted_BP[:, 0], *more], axis=1)
    return jnp.where(step_P < done.count_B[:, None], emitted_BP, later_BP)


def possible(p_PV, q_PV, found):
    """Leaves out tokens that have no part in it, which no rule can tell from absent ones.

    What is left is padded to one of four sizes, each a compilation.
    """
    part = ((p_PV > 0) | (q_PV > 0)).any(0)
    if found is not None:
        part[found.token_BN] = True
    kept = np.flatnonzero(part)
    size = next(size for size in (64, 1024, 8192, p_PV.shape[1]) if size >= len(kept))
    p_PV, q_PV = (np.pad(x[:, kept], ((0, 0), (0, size - len(kept)))) for x in (p_PV, q_PV))
    if found is not None:
        token_BN = np.searchsorted(kept, found.token_BN).astype(np.int32)
        found = TokenTree(token_BN, found.parent_BN, found.depth_BN, found.valid_BN)
    return p_PV, q_PV, found


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


def p_values(tokens, p_PV):
    """First token; second given the likeliest first; third given the likeliest second."""
    p = np.asarray(p_PV, np.float64)
    p /= p.sum(1, keepdims=True)
    for position in range(3):
        given = slice(None)
        if position:
            given = tokens[:, position - 1] == p[position - 1].argmax()
        counts = np.bincount(tokens[given, position], minlength=p.shape[1])
        assert counts[p[position] == 0].sum() == 0
        yield chi_square(counts, p[position])


@pytest.mark.parametrize("name", RUNS)
def test_p_values_are_uniform(prefixes, name, tmp_path_factory):
    values = []
    for where, (logits, found) in enumerate(prefixes):
        if name == "n-gram" and found is None:
            continue
        for number, controls in enumerate(SETTINGS.values()):
            one, hot = (rows(t, *controls[1:], batch=3) for t in (controls[0], 1.5))
            p_PV, q_PV = (
                np.array(probabilities(jnp.asarray(logits)[:, None], how)[:, 0])
                for how in (one, hot)
            )
            p_PV, q_PV, tree = possible(p_PV, q_PV, found if name == "n-gram" else None)
            seed = 10_000 * [*RUNS].index(name) + 100 * where + number
            tokens = np.asarray(emit(name, p_PV, q_PV, tree, seed))
            values += [value for value in p_values(tokens, p_PV) if value is not None]
    test = stats.kstest(values, "uniform")
    print(f"\n{name}: {len(values)} p-values, smallest {min(values):.4f}, KS {test.pvalue:.3f}")
    assert len(values) >= (12 if name == "n-gram" else 30)
    assert test.pvalue > 0.01
    # The last to finish tests all of them together, in whatever process.
    folder = shared(tmp_path_factory)
    (folder / f"{name}.json").write_text(json.dumps(values))
    every = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if len(every) == len(RUNS):
        whole = [value for some in every for value in some]
        pooled = stats.kstest(whole, "uniform").pvalue
        print(f"all: {len(whole)} p-values, smallest {min(whole):.5f}, KS {pooled:.3f}")
        assert pooled > 0.01


def shared(tmp_path_factory) -> pathlib.Path:
    """A folder that pytest-xdist's processes have in common."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if root.name.startswith("popen-") else root) / "p_values"
    folder.mkdir(exist_ok=True)
    return folder
