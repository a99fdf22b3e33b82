"""How fast is decoding? Five comparisons, each side by side in this process.

    make bench-decode        (python -m experiments.bench_decode)

1. plain    plain decoding against the minimal hand-written loop, interleaved pairs;
2. peer     plain and speculative, against transformers' generate: plain, prompt lookup and (if a
            drafter is a model that it can read) assisted; same weights, float32, 2 threads,
            every `eval` prompt or --each of them (extra `parity`);
3. width    a target pass over n = 1..64 nodes, against the minimal loop's pass;
4. kinds    speculative against plain decoding, every `eval` prompt;
5. prefill  tokens a second that a prompt of 128..4096 tokens is read at, against transformers.

The drafter is what --drafter and its companions describe. Rows go to
experiments/results/decode_*.csv, with names of a --target and of --drafters other than the default
in the name of the file; medians with spread are printed from them.
"""

import dataclasses
import functools
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.common import command, drafting, hf_baseline, minimal_loop, report, setup
from experiments.common.prefill_bench import bench_prefill
from experiments.common.report import RESULTS
from experiments.common.timing import compile_all, timed, timed_read
from experiments.prompts import load as prompt_set
from models.kv_cache import KVCache
from models.transformer import Transformer, causal_mask
from spec.drafters import Drafter, RootDrafter
from spec.generate import Request, generate, round_up
from spec.sampling import best_token

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
SLOTS, CACHED = 512, 100
JOBS = ["plain", "peer", "width", "kinds", "prefill"]
PEERS = ("peer", "prefill")  # against transformers


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("target", setup.DEFAULT_TARGET, "Model: name, .gguf file or folder.")
    drafting.define_flags()
    flags.DEFINE_string("prompts", None, f"{prompt_set.HELP} Of turns the first.")
    flags.DEFINE_multi_enum("only", [], JOBS, "Some of the five.")
    flags.DEFINE_integer("each", 100, "Most prompts of a kind, `peer` and `kinds`.", lower_bound=1)
    flags.DEFINE_integer("pairs", 21, "Interleaved pairs of `plain` and `width`.", lower_bound=5)
    flags.DEFINE_string("out", str(RESULTS), "Folder for the rows.")
    flags.DEFINE_bool("smoke", False, "Few tokens, few pairs, no transformers, one prompt.")


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Returns the median and its 95% interval from order statistics (sign test).

    The interval runs between the k-th smallest and k-th largest value, k the largest rank whose
    two tails together hold at most 5% of Binomial(n, 1/2).
    """
    ordered, n = sorted(values), len(values)
    tail, k = 0.5**n, 0
    while k < n // 2 and 2 * (tail + math.comb(n, k + 1) * 0.5**n) <= 0.05:
        tail += math.comb(n, k + 1) * 0.5**n
        k += 1
    return statistics.median(ordered), ordered[k], ordered[-1 - k]


def clock(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes, its arrays ready."""
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def bench_plain(target: setup.Loaded, ids: list[int], request: Request, pairs: int) -> list[dict]:
    """Times both loops over the same tokens, in pairs whose order alternates."""
    model = target.model
    slots = round_up(len(ids) + request.max_new_tokens, 64)
    eos = request.eos_ids[0] if request.eos_ids else -1

    def ours() -> tuple[int, ...]:
        return generate(model, RootDrafter(), [ids], request)[0].token_ids

    def minimal() -> list[int]:
        return minimal_loop.decode(model, ids, eos, request.max_new_tokens, slots)

    if list(ours()) != minimal():
        raise ValueError("The minimal loop and plain decoding give different tokens.")
    tokens = len(ours())
    rows = []
    for pair in tqdm(range(pairs), desc="plain", unit="pair"):
        order = (ours, minimal) if pair % 2 else (minimal, ours)
        seconds = {call: clock(call) for call in order}
        rows.append(
            {
                "pair": pair,
                "tokens": tokens,
                "ours_ms_per_token": 1e3 * seconds[ours] / tokens,
                "minimal_ms_per_token": 1e3 * seconds[minimal] / tokens,
                "ratio": seconds[ours] / seconds[minimal],
            }
        )
    median, low, high = median_interval([row["ratio"] for row in rows])
    print(f"plain/minimal: median {median:.3f}, 95% interval {low:.3f}..{high:.3f}, {pairs} pairs")
    return rows


def bench_peer(
    target: setup.Loaded,
    drafter: Drafter,
    paths: Sequence[pathlib.Path],
    prompts: Sequence[prompt_set.Prompt],
    request: Request,
) -> list[dict]:
    """Times our greedy decoding and transformers' in turn, from the prompt to the last token.

    Transformers runs its own defaults: prompt lookup of 10 tokens, up to 20 assistant tokens.
    Every method reads a prompt once before it is timed; who comes first alternates. Prompts with
    answers of fewer than 8 tokens are left out. torch has as many threads as XLA.

    Args:
        target: ours.
        drafter: ours.
        paths: the target's, and that of a drafter that transformers can read too, if there is one.
        prompts: each is timed once.
        request: see `Request`.
    """
    peer, *assistants = [hf_baseline.load(path) for path in paths]
    how: dict[str, dict] = {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}}
    if assistants:
        how["assisted"] = {"assistant_model": assistants[0]}
    ours = {"plain": RootDrafter(), "speculative": drafter}
    threads = len(os.sched_getaffinity(0))
    rows = []
    for number, prompt in enumerate(tqdm(prompts, desc="peer", unit="prompt")):
        (ids,) = setup.encode(target.tokenizer, [prompt])
        (plain,) = generate(target.model, ours["plain"], [ids], request)
        if len(plain.token_ids) < 8:
            print(f"{prompt.id}: an answer of {len(plain.token_ids)} tokens is left out.")
            continue
        found: dict[tuple[str, str], tuple[tuple[int, ...], float]] = {}

        def time_ours(ids: list[int] = ids, found: dict = found) -> None:
            for name, each in ours.items():
                (done,) = generate(target.model, each, [ids], request)
                ms = 1e3 * clock(functools.partial(generate, target.model, each, [ids], request))
                found["ours", name] = done.token_ids, ms

        def time_theirs(ids: list[int] = ids, found: dict = found) -> None:
            for name, settings in how.items():
                timing = hf_baseline.time_greedy(
                    peer, ids, request.max_new_tokens, threads, **settings
                )
                found["transformers", name] = timing.token_ids, timing.total_ms

        for side in (time_ours, time_theirs) if number % 2 else (time_theirs, time_ours):
            side()
        least = found["ours", "speculative"][1] / len(found["ours", "speculative"][0])
        rows += [
            {
                "prompt": prompt.id,
                "kind": prompt.kind,
                "side": side,
                "method": name,
                "tokens": len(token_ids),
                "ms_per_token": ms / len(token_ids),
                "over_our_speculative": ms / len(token_ids) / least,
                "same_tokens": token_ids == plain.token_ids,
            }
            for (side, name), (token_ids, ms) in found.items()
        ]
    if not rows:
        raise ValueError("No prompt has an answer of 8 tokens or more: give others.")
    print(report.table(by_method(rows), tuple(by_method(rows)[0])))
    return rows


def by_method(rows: list[dict]) -> list[dict]:
    """Returns a line for each way of decoding: how many times as long as our speculative one."""
    lines = []
    for side, name in dict.fromkeys((row["side"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["side"], row["method"]) == (side, name)]
        ratios = [row["over_our_speculative"] for row in mine]
        lines.append(
            {
                "side": side,
                "method": name,
                "prompts": len(mine),
                "same_tokens": sum(row["same_tokens"] for row in mine),
                "ms_per_token": statistics.median(row["ms_per_token"] for row in mine),
                "over_our_speculative": math.exp(statistics.fmean(map(math.log, ratios))),
                "low": min(ratios),
                "high": max(ratios),
            }
        )
    return lines


@jax.jit
def _ours(model: Transformer, token_BN: jax.Array, cache: KVCache) -> jax.Array:
    n = token_BN.shape[1]
    position_BN = cache.length_B[:, None] + jnp.arange(n, dtype=jnp.int32)[None, :]
    return best_token(model(token_BN, position_BN, causal_mask(1, n), cache).logits_BNV)


@jax.jit
def _minimal(model: Transformer, token_N: jax.Array, ks: list, vs: list) -> jax.Array:
    hidden, _, _ = minimal_loop.forward(model, token_N, jnp.int32(CACHED), ks, vs)
    return best_token(model.head(hidden[None]))


def bench_width(target: setup.Loaded, pairs: int) -> list[dict]:
    """Times a target pass over n nodes behind 100 cached tokens, 512 slots."""
    model = target.model
    cache = KVCache.empty(model.config, 1, SLOTS, model.dtype)
    cache = KVCache(cache.k_BKSA, cache.v_BKSA, jnp.full(1, CACHED, jnp.int32))
    ks, vs = [k[0] for k in cache.k_BKSA], [v[0] for v in cache.v_BKSA]
    rows = []
    for n in tqdm(WIDTHS, desc="width"):
        token_N = jnp.arange(n, dtype=jnp.int32) + 1000
        calls = (
            functools.partial(_ours, model, token_N[None], cache),
            functools.partial(_minimal, model, token_N, ks, vs),
        )
        for call in calls:
            clock(call), clock(call)
        seconds = [[clock(call) for call in calls] for _ in range(pairs)]
        ours, minimal = (1e3 * np.asarray(side) for side in zip(*seconds, strict=True))
        rows.append(
            {
                "nodes": n,
                "ours_ms": float(np.median(ours)),
                "ours_ms_low": float(ours.min()),
                "ours_ms_high": float(ours.max()),
                "minimal_ms": float(np.median(minimal)),
                "repeats": pairs,
            }
        )
    for row in rows:
        row["ours_over_one"] = row["ours_ms"] / rows[0]["ours_ms"]
    print(report.table(rows, ("nodes", "ours_ms", "minimal_ms", "ours_over_one")))
    return rows


def bench_kinds(
    target: setup.Loaded,
    drafter: Drafter,
    prompts: list[prompt_set.Prompt],
    request: Request,
) -> list[dict]:
    """Times plain and speculative decoding of every prompt, in alternating order."""
    ids = setup.encode(target.tokenizer, prompts)
    compile_all(target, ids[:1], [(RootDrafter(), request), (drafter, request)])
    rows = []
    for i, prompt in enumerate(tqdm(prompts, desc="kinds")):
        sides = {"plain": RootDrafter(), "grown": drafter}
        runs = {}
        prefilled, _ = timed_read(target, [ids[i]], request)
        for name in sides if i % 2 else [*sides][::-1]:
            runs[name] = timed(target, sides[name], prefilled, request)
        (plain,), _, plain_s = runs["plain"]
        (grown,), _, grown_s = runs["grown"]
        rows.append(
            {
                "prompt": prompt.id,
                "kind": prompt.kind,
                "tokens": grown.metrics.tokens,
                "steps": grown.metrics.steps,
                "tokens_per_step": grown.metrics.tokens_per_step,
                "plain_ms_per_token": 1e3 * plain_s / grown.metrics.tokens,
                "spec_ms_per_token": 1e3 * grown_s / grown.metrics.tokens,
                "speed_ratio": plain_s / grown_s,
                "identical": plain.token_ids == grown.token_ids,
            }
        )
    print(report.table(by_kind(rows), tuple(by_kind(rows)[0])))
    return rows


def by_kind(rows: list[dict]) -> list[dict]:
    """Returns one line a kind, and all: medians of the ratio with its range."""
    lines = []
    for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
        mine = [row for row in rows if kind in (row["kind"], "all")]
        ratios = [row["speed_ratio"] for row in mine]
        lines.append(
            {
                "kind": kind,
                "prompts": len(mine),
                "tokens_per_step": sum(r["tokens"] for r in mine) / sum(r["steps"] for r in mine),
                "ratio_median": statistics.median(ratios),
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
                "ratio_geomean": math.exp(statistics.fmean(map(math.log, ratios))),
                "identical": sum(row["identical"] for row in mine),
            }
        )
    return lines


def main(args: flags.FlagValues) -> None:
    """Runs the benchmarks asked for and writes their rows."""
    try:
        path = pathlib.Path(args.prompts) if args.prompts else prompt_set.DEFAULT
        prompts = prompt_set.load(path, "eval")
        drafting.check_flags(args)
        target = setup.load(args.target, setup.default_dtype())
        drafter = drafting.from_flags(args, target, setup.default_dtype())
    except ValueError as error:
        sys.exit(f"Error: {error}")
    tokens, pairs = (8, 5) if args.smoke else (64, args.pairs)
    tokenizer = target.tokenizer
    ids = setup.encode(tokenizer, prompts)
    request = Request(
        max_new_tokens=tokens, eos_ids=tokenizer.eos_ids, vocab_size=tokenizer.vocab_size
    )
    reserve = max(map(len, ids)) + 2 * tokens
    reserved = dataclasses.replace(request, reserve=reserve)
    long = dataclasses.replace(reserved, max_new_tokens=2 * tokens)
    chosen = prompts[:1] if args.smoke else prompt_set.first_of_each(prompts, args.each)
    readable = [setup.find(args.target), *drafting.readable(args.drafter)]
    jobs: dict[str, Callable[[], list[dict]]] = {
        "plain": lambda: bench_plain(target, ids[0], request, pairs),
        "peer": lambda: bench_peer(target, drafter, readable, chosen, reserved),
        "width": lambda: bench_width(target, pairs),
        "kinds": lambda: bench_kinds(target, drafter, chosen, long),
        "prefill": lambda: bench_prefill(target, readable[0], pairs),
    }
    names = args.only or [name for name in jobs if not (args.smoke and name in PEERS)]
    try:
        pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
        if set(PEERS) & set(names):
            hf_baseline.import_peers()  # before any work
        for name in names:
            about = [] if args.target == setup.DEFAULT_TARGET else [args.target]
            if name in ("peer", "kinds") and args.drafter != ["ngram"]:
                about += args.drafter
            label = "_".join(["decode", name, *map(setup.title, about)])
            report.write_csv(pathlib.Path(args.out) / f"{label}.csv", jobs[name]())
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    command.run(main, define_flags)
