"""The main job: answer prompts twice, by plain decoding and by token tree, and compare.

    python -m experiments.generate [--prompt "..."] [--drafter ngram] [--out out/generate]

Cost with the defaults (SmolLM2-135M, one prompt of each kind, 128 tokens): about a minute and a
half on 2 CPU cores, most of it plain decoding and compilation; run again, it finds the programs on
disk. The target reads every prompt once, for both runs and the picture. Writes generate.csv,
trees.png and texts.jsonl to --out, and prints a table. Exits with status 1 if any text differs.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.common import command, drafting, report, setup, turns
from experiments.common.plots import plot_run
from experiments.common.timing import compile_all, per_token, timed, timed_read
from experiments.prompts import load as prompt_set
from spec.decode import Trace
from spec.drafters import Drafter, RootDrafter
from spec.generate import Completion, Request, follow, rule_of, start
from spec.metrics import total
from spec.reading import Prefilled
from spec.sampling import GREEDY_BELOW
from spec.verify import RULES

COLUMNS = (
    "prompt",
    "prompt_tokens",
    "prefill_ms",
    "tokens",
    "steps",
    "tokens_per_step",
    "plain_ms_per_token",
    "spec_ms_per_token",
    "ratio",
    "finish",
    "identical",
)
# Rules whose tokens do not depend on the tree. The others keep the distribution, not the draws.
SAME_DRAWS = ("greedy", "naive")


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("target", setup.DEFAULT_TARGET, "Model: name, .gguf file or folder.")
    drafting.define_flags()
    flags.DEFINE_string("prompt", None, "One prompt to answer, instead of a set.")
    flags.DEFINE_string("prompts", None, prompt_set.HELP)
    flags.DEFINE_enum("split", None, ["dev", "eval"], "All of a split, not one of each kind.")
    flags.DEFINE_integer("turns", None, "Most turns of a conversation; else all.", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", 128, "Budget of each prompt.", lower_bound=1)
    flags.DEFINE_integer("batch", 1, "Prompts decoded together.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.0, "0 decodes greedily, more samples.", lower_bound=0.0)
    flags.DEFINE_integer("top_k", 0, "Most probable tokens kept, 0 for all.", lower_bound=0)
    flags.DEFINE_float("top_p", 1.0, "Least probability kept, in (0, 1].")
    flags.DEFINE_enum("rule", None, [*RULES], "Verification; by default what suits the children.")
    flags.DEFINE_integer("seed", 0, "Seed of the first prompt; the next has the next.")
    flags.DEFINE_string("out", "out/generate", "Folder for the table, the texts and the picture.")
    flags.DEFINE_bool("smoke", False, "One short prompt, 16 tokens.")


def check_flags(args: flags.FlagValues) -> None:
    """Refuses flags that contradict each other, and creates the output folder before any work."""
    if args.prompt is not None and (args.prompts or args.split):
        raise ValueError("--prompt is one prompt: leave out --prompts and --split.")
    if not 0 <= args.seed <= 2**31:
        raise ValueError(f"--seed {args.seed} must lie in 0..{2**31}.")
    try:
        pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {args.out} cannot be a folder ({error}): choose another."
        ) from error


def choose_prompts(args: flags.FlagValues) -> list[prompt_set.Prompt]:
    """Returns what to answer: --prompt, else a whole --split, else one of each kind."""
    if args.prompt is not None:
        return [prompt_set.Prompt("prompt", "prompt", "eval", args.prompt)]
    path = pathlib.Path(args.prompts) if args.prompts else prompt_set.DEFAULT
    prompts = turns.cut(prompt_set.load(path, args.split), args.turns)
    if args.smoke:
        return prompts[:1]
    return prompts if args.split else prompt_set.first_of_each(prompts)


@dataclasses.dataclass(frozen=True)
class Shown:
    """A prompt whose drafts did well, as the target has read it: what the picture shows."""

    id: str
    tokens_per_step: float
    prefilled: Prefilled
    row: int
    request: Request

    def steps(self, target: setup.Loaded, drafter: Drafter) -> Iterator[Trace]:
        """Decodes it once more, alone in what it yields; consumes `prefilled`."""
        state, settings = start(target.model, drafter, self.prefilled, self.request)
        here = slice(self.row, self.row + 1)
        for step in follow(target.model, drafter, state, settings):
            yield jax.tree.map(lambda array: np.asarray(array)[here], step)


def run(
    target: setup.Loaded,
    drafter: Drafter,
    prompts: list[prompt_set.Prompt],
    ids: list[list[int]],
    seeds: list[int],
    request: Request,
    batch: int,
) -> tuple[list[dict], list[Completion], Shown]:
    """Answers all prompts both ways; the target reads each once.

    Each prompt has its own seed, so that a text does not depend on the batch it is decoded in.

    Returns:
        A row each, the speculative completions, and the one with most tokens a step.
    """
    rows, answers, best = [], [], []
    rule = rule_of(drafter, request).name
    comparable = rule in SAME_DRAWS or request.temperature < GREEDY_BELOW
    plainly = dataclasses.replace(request, rule=rule if rule in SAME_DRAWS else None)
    sides = [(RootDrafter(), plainly), (drafter, request)]
    groups = [slice(i, i + batch) for i in range(0, len(ids), batch)]
    compile_all(target, ids[groups[0]], sides)
    with tqdm(total=3 * len(groups), unit="run") as bar:
        for group in groups:
            bar.set_description(prompts[group][0].id)
            prefilled, read_s = timed_read(target, ids[group], request)
            bar.update()
            runs = []
            for each, asked in sides:
                asked = dataclasses.replace(asked, seed=tuple(seeds[group]))
                runs.append(timed(target, each, prefilled, asked))
                bar.update()
            plain, grown = runs
            plain_ms, grown_ms = (per_token(each.done, each.decode_s) for each in runs)
            total = max(sum(len(prompt) - 1 for prompt in ids[group]), 1)
            for i, (prompt, tokens) in enumerate(zip(prompts[group], ids[group], strict=True)):
                a, b = plain.done[i], grown.done[i]
                same = (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
                part = 1e3 * (len(tokens) - 1) / total
                reading = (len(tokens), part * read_s, part * grown.ready_s)
                verdict = same if comparable else None
                rows.append(row(prompt, b, reading, plain_ms, grown_ms, verdict))
                speed = b.metrics.tokens_per_step if b.metrics.steps else 0.0
                best.append(Shown(prompt.id, speed, prefilled, i, asked))
                best = [max(best, key=lambda shown: shown.tokens_per_step)]  # frees the others
            answers += grown.done
    return rows, answers, best[0]


def converse(
    target: setup.Loaded,
    drafter: Drafter,
    prompts: list[prompt_set.Prompt],
    seed: int,
    request: Request,
    batch: int,
) -> tuple[list[prompt_set.Prompt], list[dict], list[Completion], Shown]:
    """Answers all prompts, then the next turns of those that have some, and so on.

    Returns:
        The prompts of all turns, and what `run` returns for them. Seeds count on.
    """
    asked: list[prompt_set.Prompt] = []
    rows: list[dict] = []
    answers: list[Completion] = []
    best: list[Shown] = []
    while prompts:
        ids = setup.encode(target.tokenizer, prompts)
        seeds = [seed + len(asked) + i for i in range(len(ids))]
        new_rows, new, shown = run(target, drafter, prompts, ids, seeds, request, batch)
        asked, rows, answers = asked + prompts, rows + new_rows, answers + new
        best = [max([*best, shown], key=lambda shown: shown.tokens_per_step)]
        prompts = turns.following(target.tokenizer, prompts, new)
    return asked, rows, answers, best[0]


def row(
    prompt: prompt_set.Prompt,
    done: Completion,
    reading: tuple[int, float, float],
    plain_ms: float,
    grown_ms: float,
    same: bool | None,
) -> dict:
    """Lays one prompt's figures out.

    Args:
        prompt: what was asked.
        done: what came of it.
        reading: tokens of the prompt, milliseconds in which the target and the drafter read them;
            of a batch its share.
        plain_ms: a token, after the reading.
        grown_ms: a token, after the reading.
        same: None where other draws were to be expected.
    """
    metrics = done.metrics
    prompt_tokens, prefill_ms, drafter_ms = reading
    return {
        "prompt": prompt.id,
        "kind": prompt.kind,
        "prompt_tokens": prompt_tokens,
        "prefill_ms": prefill_ms,
        "drafter_prefill_ms": drafter_ms,
        "tokens": metrics.tokens,
        "steps": metrics.steps,
        "tokens_per_step": metrics.tokens_per_step,
        "plain_ms_per_token": plain_ms,
        "spec_ms_per_token": grown_ms,
        "ratio": plain_ms / grown_ms,
        "proposed_nodes": metrics.proposed_nodes,
        "accepted": metrics.accepted,
        "finish": done.finish_reason,
        "identical": {True: "yes", False: "NO", None: "-"}[same],
    }


def summary(rows: list[dict], answers: list[Completion]) -> dict:
    """Returns the line of totals: sums of tokens, steps and milliseconds."""
    some = [r for r in rows if r["tokens"]]

    def mean(column: str) -> float:
        tokens = sum(r["tokens"] for r in some)
        return sum(r[column] * r["tokens"] for r in some) / tokens if tokens else math.nan

    everything = prompt_set.Prompt("total", "total", "", "")
    whole = dataclasses.replace(answers[0], metrics=total(a.metrics for a in answers))
    verdicts = {r["identical"] for r in rows}
    same = None if verdicts == {"-"} else verdicts == {"yes"}
    reading = ("prompt_tokens", "prefill_ms", "drafter_prefill_ms")
    prompt_tokens, target_ms, drafter_ms = (sum(r[column] for r in rows) for column in reading)
    read = prompt_tokens, target_ms, drafter_ms
    plain_ms, grown_ms = mean("plain_ms_per_token"), mean("spec_ms_per_token")
    line = row(everything, whole, read, plain_ms, grown_ms, same)
    return {**line, "finish": ""}


def main(args: flags.FlagValues) -> None:
    """Runs the job."""
    try:
        check_flags(args)
        drafting.check_flags(args)
        prompts = choose_prompts(args)
        dtype = setup.default_dtype()
        print(f"Loading {args.target} ({dtype}) ...", flush=True)
        target = setup.load(args.target, dtype)
        drafter = drafting.from_flags(args, target, dtype)
        budget = 16 if args.smoke else args.max_new_tokens
        limit = target.model.config.max_positions
        request = Request(
            max_new_tokens=budget,
            eos_ids=target.tokenizer.eos_ids,
            vocab_size=target.tokenizer.vocab_size,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            rule=args.rule,
            reserve=turns.room(target.tokenizer, prompts, budget, limit),
        )
        prompts, rows, answers, best = converse(
            target, drafter, prompts, args.seed, request, args.batch
        )
    except ValueError as error:
        sys.exit(f"Error: {error}")
    rows.append(summary(rows, answers))

    out = pathlib.Path(args.out)
    report.write_csv(out / "generate.csv", rows)
    texts = [target.tokenizer.decode(answer.token_ids) for answer in answers]
    with (out / "texts.jsonl").open("w", encoding="utf-8") as file:
        for prompt, text in zip(prompts, texts, strict=True):
            file.write(json.dumps({"id": prompt.id, "text": text}, ensure_ascii=False) + "\n")
    # The picture shows the prompt whose drafts did best; its first steps are decoded once more.
    steps = best.steps(target, drafter)
    plot_run(out / "trees.png", best.id, steps, answers, target.tokenizer)

    for prompt, text in zip(prompts, texts, strict=True):
        line = " ".join(text.split())
        print(f"\n[{prompt.id}] {line[:160]}{' ...' if len(line) > 160 else ''}")
    print(f"\n{report.table(rows, COLUMNS)}\n")
    verdict = rows[-1]["identical"]
    if verdict == "-":
        verdict = "not compared (this rule keeps the distribution, not the draws: see make exact)"
    print(f"identical: {verdict}    wrote {out}/generate.csv, texts.jsonl, trees.png")
    if verdict == "NO":
        sys.exit(1)


if __name__ == "__main__":
    command.run(main, define_flags)
