"""Exact enumeration: every draft that a drafter can make, through the shipped laws, in float64.

A world is a vocabulary with a target and drafter distribution for every context. `outcomes` lists
all drafts of a shape with their probabilities; `sequence_law` runs a rule's `law` on all of them
in one batch and extends every outcome by the target to full length.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spec.draws import Children, Draws, Kind, merge_drawn
from spec.tree import TokenTree
from spec.tree_shapes import TreeShape, expansion

KIND = {
    Children.IID: Kind.IID,
    Children.WITHOUT_REPLACEMENT: Kind.WITHOUT_REPLACEMENT,
    Children.TOP_K: Kind.POINT_MASS,
}


@dataclasses.dataclass(frozen=True)
class World:
    """`p[context]` and `q[context]` for every tuple of tokens up to the horizon."""

    vocab: int
    p: dict
    q: dict

    @classmethod
    def random(cls, vocab, depth, seed, spread=0.9, zeros=0):
        """`zeros` tokens of each distribution, not the same in p and q, get no probability."""
        rng = np.random.default_rng(seed)
        p, q = {}, {}
        for length in range(depth + 1):
            for context in itertools.product(range(vocab), repeat=length):
                log_p = 1.5 * rng.standard_normal(vocab)
                log_q = log_p + spread * rng.standard_normal(vocab)
                for log, of in ((log_p, p), (log_q, q)):
                    weight = np.exp(log)
                    weight[rng.permutation(vocab)[:zeros]] = 0
                    of[context] = weight / weight.sum()
        return cls(vocab, p, q)

    def target_law(self, length):
        law = np.zeros((self.vocab,) * length)
        for sequence in itertools.product(range(self.vocab), repeat=length):
            law[sequence] = np.prod([self.p[sequence[:i]][t] for i, t in enumerate(sequence)])
        return law


def groups(q, width, children):
    """Lists (tokens, probability, kinds, row of q) of every way to draw `width` children."""
    vocab = len(q)
    if children is Children.TOP_K:
        best = tuple(np.argsort(-q, kind="stable")[:width].tolist())
        return [(best, 1.0, [Kind.POINT_MASS] * width, q)]
    if children is Children.GREEDY_PLUS_ONE:
        fixed = tuple(np.argsort(-q, kind="stable")[: width - 1].tolist())
        rest = q.copy()
        rest[list(fixed)] = 0
        rest /= rest.sum()
        kinds = [Kind.IID] + [Kind.POINT_MASS] * (width - 1)
        return [((x, *fixed), rest[x], kinds, rest) for x in range(vocab) if rest[x] > 0]
    out = []
    for tokens in itertools.product(range(vocab), repeat=width):
        left, chance = q.copy(), 1.0
        for token in tokens:
            chance *= left[token]
            if children is Children.WITHOUT_REPLACEMENT:
                left[token] = 0
                left = left / left.sum() if left.sum() > 0 else left
        if chance > 0:
            out.append((tokens, chance, [KIND[children]] * width, q))
    return out


def outcomes(world, shape: TreeShape, children, drafter=None):
    """Returns every draft of a shape: probabilities, TokenTree and Draws with a row each."""
    q_of = world.q if drafter is None else drafter
    kids = {n: [c for c in range(1, shape.size) if shape.parent[c] == n] for n in range(shape.size)}
    inner = [n for n in range(shape.size) if kids[n]]

    def expand(partial, nodes):
        if not nodes:
            yield partial
            return
        node, *rest = nodes
        context, chance, token, kind, rows = partial
        for tokens, p, kinds, row in groups(q_of[context[node]], len(kids[node]), children):
            deeper = dict(context)
            named, kinded = dict(token), dict(kind)
            for child, t, k in zip(kids[node], tokens, kinds, strict=True):
                deeper[child], named[child], kinded[child] = (*context[node], t), t, k
            yield from expand((deeper, chance * p, named, kinded, [*rows, row]), rest)

    found = list(expand(({0: ()}, 1.0, {0: 0}, {}, []), inner))
    B, N = len(found), shape.size
    chance = np.array([f[1] for f in found])
    token = np.array([[f[2][n] for n in range(N)] for f in found], np.int32)
    kind = np.array([[f[3][n] for n in range(1, N)] for f in found], np.int32).reshape(B, N - 1)
    q = np.array([f[4] for f in found], np.float64).reshape(B, len(inner), world.vocab)
    row = np.array([inner.index(shape.parent[n]) for n in range(1, N)], np.int32)

    def tile(values):
        return jnp.asarray(np.broadcast_to(np.asarray(values, np.int32), (B, len(values))))

    tree = TokenTree(
        jnp.asarray(token), tile(shape.parent), tile(shape.depth), jnp.ones((B, N), bool)
    )
    draws = Draws(
        tile(range(1, N)), tile(shape.parent[1:]), jnp.asarray(kind), tile(row), jnp.asarray(q)
    )
    return chance, tree, draws


def contexts(tree: TokenTree):
    """Returns for every row the tuple of drafts that leads to each node."""
    token, parent = np.asarray(tree.token_BN), np.asarray(tree.parent_BN)
    out = []
    for t, up in zip(token, parent, strict=True):
        paths = {0: ()}
        for n in range(1, len(t)):
            paths[n] = (*paths[int(up[n])], int(t[n]))
        out.append([paths[n] for n in range(len(t))])
    return out


def run_law(rule, world, tree, draws):
    """Returns (stop_BN, bonus_BNV) of a rule in float64, and each node's context."""
    where = contexts(tree)
    zero = np.full(world.vocab, 1 / world.vocab)
    p = np.array([[world.p.get(c, zero) for c in row] for row in where])
    stop, bonus = jax.jit(rule.law)(jnp.asarray(p), tree, draws)
    assert stop.dtype == jnp.float64
    return np.asarray(stop), np.asarray(bonus), where


def sequence_law(world, chance, stop, bonus, where, length):
    """Returns the law of the first `length` tokens and the mean number of accepted drafts."""
    law = np.zeros((world.vocab,) * length)
    accepted = 0.0
    for c, row_stop, row_bonus, paths in zip(chance, stop, bonus, where, strict=True):
        for s, b, path in zip(row_stop, row_bonus, paths, strict=True):
            if c * s == 0:
                continue
            accepted += c * s * len(path)
            for v in range(world.vocab):
                extend(world, law, (*path, v), c * s * b[v], length)
    return law, accepted


def extend(world, law, sequence, weight, length):
    if weight == 0:
        return
    if len(sequence) == length:
        law[sequence] += weight
        return
    for v in range(world.vocab):
        extend(world, law, (*sequence, v), weight * world.p[sequence][v], length)


def total_variation(a, b):
    return 0.5 * float(np.abs(a - b).sum())


def tv_and_accepted(rule, world, widths, children):
    """Enumerates one drafter: TV to the target's sequence law, and mean accepted drafts."""
    shape = expansion(widths)
    chance, tree, draws = outcomes(world, shape, children)
    length = len(widths) + 1
    law, accepted = sequence_law(world, chance, *run_law(rule, world, tree, draws), length)
    return total_variation(law, world.target_law(length)), accepted


def merged(world, parts):
    """Every joint draft of several (shape, children, q) drafters, merged; draws all kept."""
    every = [outcomes(world, shape, children, q) for shape, children, q in parts]
    index = list(itertools.product(*[range(len(chance)) for chance, _, _ in every]))
    chance = np.array([np.prod([every[i][0][k] for i, k in enumerate(pick)]) for pick in index])
    trees, drawn = [], []
    for i, (_, tree, draws) in enumerate(every):
        rows = jnp.asarray([pick[i] for pick in index])
        trees.append(jax.tree.map(lambda a, rows=rows: a[rows], tree))
        drawn.append(jax.tree.map(lambda a, rows=rows: a[rows], draws))
    tree, draws, _ = jax.jit(merge_drawn)(trees, drawn)
    return chance, tree, draws
