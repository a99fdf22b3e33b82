"""What does bookkeeping cost? Merge, accept and commit of one step, no model pass.

    make bench-verify        (python -m experiments.bench_verify)

Batch 1, N = 32 nodes, V = 49152, float32; SmolLM2's cache of 30 layers, 512 slots. Aim on
2 CPU cores: greedy below 3 ms, stochastic top-down below 12 ms. Rows go to
experiments/results/verify.csv.
"""

import dataclasses
import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
from absl import flags
from tqdm import tqdm

from experiments.common import command, report
from experiments.common.report import RESULTS
from models.attention import LayerKV
from models.kv_cache import KVCache, commit, take_path
from models.presets import preset
from spec.drafters.children import choose
from spec.draws import Children, Draws, Kind, merge_drawn, point_mass
from spec.sampling import Sampling, Use, best_token, fold, probabilities, rows
from spec.tree import TokenTree, ancestor_mask
from spec.tree_shapes import TreeShape, expansion
from spec.verify import RULES, Accepted, Greedy, Keys
from spec.verify.rule import pick

# Two trees of 17 and 16 nodes with one root: 32 slots when merged.
FIRST, SECOND = (
    expansion((4, 1, 1, 1)),
    TreeShape((0, 0, 0, 0, *range(1, 13)), (0, 0, 1, 2, *[0] * 12)),
)
# A merge may hold two draws in a node, or different kinds: not for the last three.
RUNS = (
    ("greedy", Children.TOP_K, (FIRST, SECOND)),
    ("naive", Children.TOP_K, (FIRST, SECOND)),
    ("mss", Children.IID, (FIRST, SECOND)),
    ("without_replacement", Children.WITHOUT_REPLACEMENT, (FIRST, SECOND)),
    ("top_down", Children.GREEDY_PLUS_ONE, (FIRST, SECOND)),
    ("greedy_plus_one", Children.GREEDY_PLUS_ONE, (expansion((2, 2, 2, 2)),)),
    ("block", Children.IID, (expansion((1,) * 7),)),
    ("traversal", Children.IID, (expansion((2, 2, 2, 2)),)),
)
# How far q is from p, as the deviation of the difference of their logits: a good drafter, about as
# near as one whose best token is the target's half of the time, and a perfect one, whose paths are
# accepted to the end: the most nodes that a step can visit.
DRAFTERS = {"good": 1.5, "perfect": 0.0}


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_integer("repeats", 101, "Steps timed of each rule.", lower_bound=5)
    flags.DEFINE_string("out", str(RESULTS), "Folder for the rows.")
    flags.DEFINE_bool("smoke", False, "Five steps, a small vocabulary, two layers.")


@functools.partial(jax.jit, static_argnames=("shape", "children"))
def tree_of(
    shape: TreeShape, q_BNV: jax.Array, children: Children, key_B: jax.Array
) -> tuple[TokenTree, Draws]:
    """Draws a tree whose every node has the distribution `q_BNV` [1, N, V] after it."""
    token, kind, row = {0: jnp.zeros(1, jnp.int32)}, {}, {}
    inner = sorted(set(shape.parent[1:]))
    for i, node in enumerate(inner):
        kids = [c for c in range(1, shape.size) if shape.parent[c] == node]
        key = jax.vmap(jax.random.fold_in, (0, None))(key_B, node)
        chosen = choose(children, q_BNV[:, node : node + 1], len(kids), key)
        for child in kids:
            rank = shape.rank[child]
            token[child] = chosen.token_Bnk[:, 0, rank]
            kind[child], row[child] = chosen.kind_k[rank], i

    def line(values: list[int] | tuple[int, ...]) -> jax.Array:
        return jnp.asarray([values], jnp.int32)

    token_BN = jnp.stack([token[node] for node in range(shape.size)], axis=1)
    valid_BN = jnp.ones(token_BN.shape, jnp.bool_)
    tree = TokenTree(token_BN, line(shape.parent), line(shape.depth), valid_BN)
    if children is Children.TOP_K:
        return tree, point_mass(tree)
    drafts = range(1, shape.size)
    draws = Draws(
        line([*drafts]),
        line(shape.parent[1:]),
        line([Kind(kind[node]).value for node in drafts]),
        line([row[node] for node in drafts]),
        q_BNV[:, jnp.asarray(inner)],
    )
    return tree, draws


@functools.partial(jax.jit, static_argnames=("name", "merging"), donate_argnames=("cache",))
def step(
    name: str,
    merging: bool,
    trees: list[TokenTree],
    drawn: list[Draws],
    logits_BNV: jax.Array,
    tree_kv: tuple[LayerKV, ...],
    cache: KVCache,
    keys: Keys,
    sampling: Sampling,
) -> tuple[KVCache, Accepted, jax.Array]:
    """Merges, accepts and commits, as `spec_step` does around the target pass."""
    if merging:
        tree, draws, _ = merge_drawn(trees, drawn)
    else:
        tree, draws = trees[0], drawn[0]
    rule, depth = RULES[name], 8
    if isinstance(rule, Greedy):
        done = rule.accept(tree, ancestor_mask(tree), best_token(logits_BNV), depth + 1)
    else:

        def p_at(node_B: jax.Array) -> jax.Array:
            return probabilities(pick(logits_BNV, node_B)[:, None], sampling)[:, 0]

        ordered = rule.order(draws, keys.step(Use.ORDER))
        done = rule.sample(p_at, tree, ordered, keys, depth + 1)
    index_BP = jnp.minimum(done.node_BP, tree.size - 1)
    nodes = jnp.sum(tree.valid_BN, dtype=jnp.int32)
    return commit(cache, take_path(tree_kv, index_BP), done.count_B), done, nodes


def bench(repeats: int, vocab: int, layers: int, smoke: bool) -> list[dict]:
    """Times every rule, the controls of sampling included."""
    config = dataclasses.replace(preset("smollm2-135m"), num_layers=layers)
    size = FIRST.size + SECOND.size - 1
    noise = [jax.random.normal(jax.random.key(i), (1, 1, vocab)) for i in range(2)]
    # The same distribution after every node, so that a node means the same whatever its slot.
    logits_BNV = jnp.broadcast_to(3 * noise[0], (1, size, vocab))
    kv_shape = (1, size, config.num_kv_heads, config.head_dim)
    tree_kv = tuple(
        LayerKV(jnp.ones(kv_shape), jnp.ones(kv_shape)) for _ in range(config.num_layers)
    )
    lines = []
    cases = [(*run, quality) for run in RUNS for quality in DRAFTERS]
    if smoke:
        cases = [case for case in cases if case[0] in ("greedy", "mss", "traversal")][::2]
    for name, children, shapes, quality in tqdm(cases, desc="rules"):
        merging = len(shapes) > 1
        for controls in ((1.0, 0, 1.0), (0.7, 0, 0.9)):
            sampling, times, emitted, nodes = rows(*controls, batch=1), [], 0, []
            hot = logits_BNV + DRAFTERS[quality] * noise[1]
            q_BNV = probabilities(hot, sampling)
            cache = KVCache.empty(config, 1, 512, jnp.float32)
            for repeat in range(repeats + 2):
                key_B = jax.vmap(jax.random.key)(jnp.asarray([repeat]))
                pairs = [
                    tree_of(shape, q_BNV[:, : shape.size], children, fold(key_B, member))
                    for member, shape in enumerate(shapes)
                ]
                trees, drawn = map(list, zip(*pairs, strict=True))
                keys = Keys(key_B, jnp.asarray([repeat], jnp.int32))
                cache = KVCache(cache.k_BKSA, cache.v_BKSA, jnp.zeros(1, jnp.int32))
                jax.block_until_ready((trees, drawn, keys, cache))
                begin = time.perf_counter()
                cache, done, count = step(
                    name, merging, trees, drawn, logits_BNV, tree_kv, cache, keys, sampling
                )
                jax.block_until_ready((cache, done))
                if repeat >= 2:
                    times.append(1e3 * (time.perf_counter() - begin))
                    emitted += int(done.count_B[0])
                    nodes.append(int(count))
            lines.append(
                {
                    "rule": name,
                    "children": children.value,
                    "drafter": quality,
                    "temperature": controls[0],
                    "top_p": controls[2],
                    "slots": 1 + sum(shape.size - 1 for shape in shapes),
                    "nodes": statistics.fmean(nodes),
                    "vocab": vocab,
                    "ms_median": statistics.median(times),
                    "ms_low": min(times),
                    "ms_high": max(times),
                    "repeats": repeats,
                    "tokens_per_step": emitted / repeats,
                }
            )
    return lines


def main(args: flags.FlagValues) -> None:
    """Runs the benchmark and writes its rows."""
    lines = bench(5, 997, 2, True) if args.smoke else bench(args.repeats, 49152, 30, False)
    report.write_csv(pathlib.Path(args.out) / "verify.csv", lines)
    print(
        report.table(
            lines,
            ("rule", "children", "drafter", "top_p", "nodes", "ms_median", "tokens_per_step"),
        )
    )


if __name__ == "__main__":
    command.run(main, define_flags)
