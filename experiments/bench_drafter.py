"""What a trained drafter adds: target steps saved, by tree, by chain, and by n-grams alone.

    python -m experiments.bench_drafter [--drafter smollm2_feature] [--nodes 16]

At temperatures 0 and 1, systems with at most --nodes nodes a step: n-grams alone, merged trees
of n-grams and the drafter, and chains. Of each the shape is chosen on the `dev` prompts by tokens a
step (of trees that lose nothing to n-grams alone on any kind of prompt, if there are such), then
measured on all `eval` prompts. Rows go to experiments/results/drafter_t*.csv, with the name of a
--target other than the default. Steps are counted, nothing is timed: speed is what
experiments.bench_decode measures.
"""

import dataclasses
import itertools
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

from absl import flags
from tqdm import tqdm

from experiments.common import command, drafting, report, setup
from experiments.common.report import RESULTS
from experiments.prompts import load as prompt_set
from experiments.prompts.prompt import Prompt
from spec.drafters import Drafter, NGramDrafter
from spec.draws import Children
from spec.generate import Completion, Request, generate
from spec.metrics import Metrics, total
from spec.tree_shapes import expansion

# Longest match that n-grams look for, tokens; such a match makes them sure.
WINDOW = 8
COLUMNS = ("temperature", "system", "shape", "kind", "tokens", "steps", "tokens_per_step")


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("target", setup.DEFAULT_TARGET, "Model: name, .gguf file or folder.")
    flags.DEFINE_string("drafter", "smollm2_feature", "Shipped drafter, or a file of weights.")
    flags.DEFINE_integer("nodes", 16, "N: most nodes of a tree, root included.", lower_bound=8)
    flags.DEFINE_multi_float("temperature", [0.0, 1.0], "Repeat for several.")
    flags.DEFINE_string("prompts", None, f"{prompt_set.HELP} Of turns the first.")
    flags.DEFINE_string("dev_prompts", None, "File whose `dev` prompts tune, if not --prompts.")
    flags.DEFINE_integer("max_new_tokens", 128, "Budget of each `eval` prompt.", lower_bound=1)
    flags.DEFINE_integer("tuned_tokens", 48, "Budget of each `dev` prompt.", lower_bound=1)
    flags.DEFINE_integer("batch", 4, "Prompts decoded together, alike in length.", lower_bound=1)
    flags.DEFINE_string("only", "", "Systems to try: a regular expression found in their shape.")
    flags.DEFINE_multi_enum(
        "children",
        [Children.TOP_K.value, Children.WITHOUT_REPLACEMENT.value],
        [Children.TOP_K.value, Children.WITHOUT_REPLACEMENT.value],
        "How the drafter chooses children, at temperatures above 0. Repeat for several.",
    )
    flags.DEFINE_string("out", str(RESULTS), "Folder for the rows.")
    flags.DEFINE_bool("smoke", False, "Two prompts, 8 tokens, few shapes.")


@dataclasses.dataclass(frozen=True)
class System:
    """What drafts.

    Attributes:
        name: "n-gram", "merged tree" or "chain".
        ngram: nodes of the n-gram tree, root included; 1 for none.
        matches: continuations that the n-gram tree merges; 1 makes it a chain.
        sure: its nodes behind a match as long as its window, the drafter's being left out if they
            do not fit; `ngram` for no such difference.
        widths: expansion of the drafter's tree; () for none.
        children: how the drafter chooses them.
    """

    name: str
    ngram: int
    sure: int
    matches: int
    widths: tuple[int, ...]
    children: Children

    @property
    def shape(self) -> str:
        """The choice that was tuned, in words."""
        nodes = f"{self.ngram}" if self.sure == self.ngram else f"{self.ngram} or {self.sure}"
        parts = [f"n-gram {nodes} from {self.matches}"] if self.ngram > 1 else []
        if self.widths:
            parts.append(f"<{','.join(map(str, self.widths))}> {self.children.value}")
        return " + ".join(parts)

    def build(self, target: setup.Loaded, drafter: str) -> Drafter:
        """Returns the drafter."""
        names = ["ngram"] * (self.ngram > 1) + [drafter] * bool(self.widths)
        ngram = NGramDrafter(
            window=WINDOW,
            min_match=1,
            matches=self.matches,
            depth=max(self.sure - 1, 1),
            sizes=(1, max(self.sure, 2)),
            unsure=self.ngram,
        )
        tree = ",".join(map(str, self.widths)) or "1"
        budget = self.sure if self.sure > self.ngram else None
        dtype = setup.default_dtype()
        how = self.children.value
        return drafting.make(names, [tree], how, ngram, target, dtype, budget)


def expansions(size: int) -> list[tuple[int, ...]]:
    """Returns the expansions of narrowing widths (at most 6), 1 to 6 levels, of `size` nodes."""
    found: list[tuple[int, ...]] = []
    for depth in range(1, 7):
        for widths in itertools.combinations_with_replacement(range(6, 0, -1), depth):
            if expansion(widths).size == size:
                found.append(widths)
    return found


def systems(nodes: int, draws: Sequence[Children], smoke: bool) -> list[System]:
    """Returns everything to try at `nodes` nodes, with children chosen in each of these ways."""
    top = Children.TOP_K
    out = [System("n-gram", nodes, nodes, matches, (), top) for matches in (4, 8)]
    out.append(System("chain", nodes, nodes, 1, (), top))
    for how in draws:
        # A longer chain never accepts less, so the longest is the best one.
        out.append(System("chain", 1, 1, 1, (1,) * (nodes - 1), how))
        for ngram, sure in itertools.product((nodes // 4, nodes // 2, 3 * nodes // 4), (0, nodes)):
            sure = sure or ngram
            out.append(System("chain", ngram, sure, 1, (1,) * (nodes - ngram), how))
            shapes = [widths for widths in expansions(nodes - ngram + 1) if widths[0] > 1]
            out += [System("merged tree", ngram, sure, 4, widths, how) for widths in shapes]
    if smoke:
        some = [s for s in out if s.name != "merged tree" or s.sure > s.ngram]
        return [
            next(s for s in some if s.name == name) for name in dict.fromkeys(s.name for s in some)
        ]
    return out


def decode(
    target: setup.Loaded, drafter: Drafter, ids: Sequence[list[int]], request: Request, batch: int
) -> list[Completion]:
    """Decodes all prompts in batches of like lengths, which share programs; prompt i has seed i."""
    longest_first = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    reserve = max(map(len, ids)) + request.max_new_tokens
    out: dict[int, Completion] = {}
    for start in range(0, len(ids), batch):
        at = longest_first[start : start + batch]
        asked = dataclasses.replace(request, seed=tuple(at), reserve=reserve)
        done = generate(target.model, drafter, [ids[i] for i in at], asked)
        out |= zip(at, done, strict=True)
    return [out[i] for i in range(len(ids))]


def lines(
    system: System, temperature: float, kinds: Sequence[str], done: Sequence[Completion]
) -> list[dict]:
    """Returns a row a kind and one for all."""
    rows = []
    for kind in [*dict.fromkeys(kinds), "all"]:
        mine = [c.metrics for k, c in zip(kinds, done, strict=True) if kind in (k, "all")]
        rows.append(
            {
                "temperature": temperature,
                "system": system.name,
                "shape": system.shape,
                "kind": kind,
                **figures(total(mine)),
            }
        )
    return rows


def figures(metrics: Metrics) -> dict[str, float]:
    """Returns what a row says of its steps."""
    return {
        "tokens": metrics.tokens,
        "steps": metrics.steps,
        "tokens_per_step": metrics.tokens_per_step,
        "accepted": metrics.accepted,
        "proposed_nodes": metrics.proposed_nodes,
    }


def chosen(judged: Mapping[System, Sequence[Mapping]]) -> list[System]:
    """Returns the best system of each name: most tokens a step over all kinds of prompts.

    Args:
        judged: rows of each system, see `lines`. Merged trees that make fewer tokens a step than
            n-grams alone on a kind of prompt are left out, unless all of them do.
    """
    speed = {s: [row["tokens_per_step"] for row in rows] for s, rows in judged.items()}
    best: dict[str, System] = {}
    for name in dict.fromkeys(system.name for system in judged):
        mine = [system for system in judged if system.name == name]
        if name == "merged tree" and "n-gram" in best:
            least = speed[best["n-gram"]]
            safe = [s for s in mine if all(a >= b for a, b in zip(speed[s], least, strict=True))]
            mine = safe or mine
        best[name] = max(mine, key=lambda system: speed[system][-1])
    return [*best.values()]


def choose_prompts(args: flags.FlagValues) -> tuple[list[Prompt], list[Prompt]]:
    """Returns what tunes and what is measured; a file of another's form has only the latter."""
    path = pathlib.Path(args.prompts) if args.prompts else prompt_set.DEFAULT
    tuned = pathlib.Path(args.dev_prompts) if args.dev_prompts else path
    return prompt_set.load(tuned, "dev"), prompt_set.load(path, "eval")


def bench(args: flags.FlagValues, target: setup.Loaded, temperature: float) -> list[dict]:
    """Chooses on `dev`, measures on `eval`; returns the rows of both."""
    dev, test = choose_prompts(args)
    if args.smoke:
        dev = test = dev[:2]
    tokenizer = target.tokenizer
    rows: list[dict] = []
    request = Request(
        8 if args.smoke else args.tuned_tokens,
        eos_ids=tokenizer.eos_ids,
        vocab_size=tokenizer.vocab_size,
        temperature=temperature,
    )
    ids = setup.encode(tokenizer, dev)
    judged: dict[System, list[dict]] = {}
    draws = [Children(how) for how in args.children] if temperature else [Children.TOP_K]
    tried = [s for s in systems(args.nodes, draws, args.smoke) if re.search(args.only, s.shape)]
    if not tried:
        raise ValueError(f"--only {args.only!r} is found in no shape: leave it out to see all.")
    with tqdm(tried, desc=f"T={temperature} dev") as bar:
        for system in bar:
            drafter = system.build(target, args.drafter)
            done = decode(target, drafter, ids, request, args.batch)
            judged[system] = lines(system, temperature, [p.kind for p in dev], done)
            rows += [{"split": "dev", **line} for line in judged[system]]
            speed = judged[system][-1]["tokens_per_step"]
            bar.write(f"{system.name} {system.shape}: {speed:.3f}")
    request = dataclasses.replace(request, max_new_tokens=8 if args.smoke else args.max_new_tokens)
    ids = setup.encode(tokenizer, test)
    for system in tqdm(chosen(judged), desc=f"T={temperature} eval"):
        drafter = system.build(target, args.drafter)
        done = decode(target, drafter, ids, request, args.batch)
        found = lines(system, temperature, [p.kind for p in test], done)
        rows += [{"split": "eval", **line} for line in found]
    return rows


def main(args: flags.FlagValues) -> None:
    """Runs the comparison and writes its rows."""
    try:
        pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
        re.compile(args.only)
        if args.drafter in ("ngram", "none"):
            raise ValueError(f"--drafter {args.drafter} is no model: it is compared in any case.")
        target = setup.load(args.target, setup.default_dtype())
        drafting.make([args.drafter], ["1"], "top_k", NGramDrafter(), target, target.model.dtype)
        other = [] if args.target == setup.DEFAULT_TARGET else [setup.title(args.target)]
        for temperature in args.temperature:
            rows = bench(args, target, temperature)
            name = "_".join(["drafter", *other, f"t{temperature:g}"])
            report.write_csv(pathlib.Path(args.out) / f"{name}.csv", rows)
            print(report.table([row for row in rows if row["split"] == "eval"], COLUMNS))
    except (OSError, ValueError, re.error) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    command.run(main, define_flags)
