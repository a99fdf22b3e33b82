"""The main job: answer prompts twice, by plain decoding and by token tree, and compare.

    python -m experiments.generate [--prompt "..."] [--drafter ngram] [--out out/generate]

Cost with the defaults (SmolLM2-135M, one prompt of each kind, 128 tokens): about a minute and a
half on 2 CPU cores, most of it plain decoding and compilation. Writes generate.csv, trees.png and
texts.jsonl to --out, and prints a table. Exits with status 1 if any text differs.
"""

import dataclasses
import json
import math
import pathlib
import sys

from absl import app, flags, logging
from tqdm import tqdm

from experiments.common import drafting, report, setup, turns
from experiments.common.plots import plot_run
from experiments.common.timing import per_token, timed
from experiments.prompts import load as prompt_set
from spec.drafters import Drafter, RootDrafter
from spec.generate import Completion, Request, rule_of, trace, warm_up
from spec.metrics import total
from spec.sampling import GREEDY_BELOW
from spec.verify import RULES

COLUMNS = (
    "prompt",
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


def run(
    target: setup.Loaded,
    drafter: Drafter,
    prompts: list[prompt_set.Prompt],
    ids: list[list[int]],
    seeds: list[int],
    request: Request,
    batch: int,
) -> tuple[list[dict], list[Completion]]:
    """Answers all prompts both ways; returns a row each and the speculative completions.

    Each prompt has its own seed, so that a text does not depend on the batch it is decoded in.
    """
    rows, answers = [], []
    rule = rule_of(drafter, request).name
    comparable = rule in SAME_DRAWS or request.temperature < GREEDY_BELOW
    plainly = dataclasses.replace(request, rule=rule if rule in SAME_DRAWS else None)
    sides = ((RootDrafter(), plainly), (drafter, request))
    groups = [slice(i, i + batch) for i in range(0, len(ids), batch)]
    with tqdm(total=2 * len(groups) + 2, desc="compile", unit="batch") as bar:
        for each, asked in sides:
            warm_up(target.model, each, ids[groups[0]], asked)
            bar.update()
        for group in groups:
            bar.set_description(prompts[group][0].id)
            runs = []
            for each, asked in sides:
                asked = dataclasses.replace(asked, seed=tuple(seeds[group]))
                runs.append(timed(target, each, ids[group], asked))
                bar.update()
            (plain, plain_s), (grown, grown_s) = runs
            plain_ms, grown_ms = per_token(plain, plain_s), per_token(grown, grown_s)
            for prompt, a, b in zip(prompts[group], plain, grown, strict=True):
                same = (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
                rows.append(row(prompt, b, plain_ms, grown_ms, same if comparable else None))
            answers += grown
    return rows, answers


def converse(
    target: setup.Loaded,
    drafter: Drafter,
    prompts: list[prompt_set.Prompt],
    seed: int,
    request: Request,
    batch: int,
) -> tuple[list[prompt_set.Prompt], list[list[int]], list[dict], list[Completion]]:
    """Answers all prompts, then the next turns of those that have some, and so on.

    Returns:
        The prompts of all turns, their ids, and what `run` returns for them. Seeds count on.
    """
    asked: list[prompt_set.Prompt] = []
    ids: list[list[int]] = []
    rows: list[dict] = []
    answers: list[Completion] = []
    while prompts:
        now = setup.encode(target.tokenizer, prompts)
        seeds = [seed + len(asked) + i for i in range(len(now))]
        new_rows, new = run(target, drafter, prompts, now, seeds, request, batch)
        asked, ids, rows, answers = asked + prompts, ids + now, rows + new_rows, answers + new
        prompts = turns.following(target.tokenizer, prompts, new)
    return asked, ids, rows, answers


def row(
    prompt: prompt_set.Prompt, done: Completion, plain_ms: float, grown_ms: float, same: bool | None
) -> dict:
    """Lays one prompt's figures out; `same` is None where other draws were to be expected."""
    metrics = done.metrics
    return {
        "prompt": prompt.id,
        "kind": prompt.kind,
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
    line = row(everything, whole, mean("plain_ms_per_token"), mean("spec_ms_per_token"), same)
    return {**line, "finish": ""}


def main(argv: list[str]) -> None:
    """Runs the job."""
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments {argv[1:]}: use flags.")
    args = flags.FLAGS
    logging.set_verbosity(logging.WARNING)  # JAX tells at INFO which accelerators are absent
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
        prompts, ids, rows, answers = converse(
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
    best = max(range(len(answers)), key=lambda i: answers[i].metrics.tokens_per_step)
    same_seed = dataclasses.replace(request, seed=(args.seed + best,))
    steps = trace(target.model, drafter, [ids[best]], same_seed)
    plot_run(out / "trees.png", prompts[best].id, steps, answers, target.tokenizer)

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
    define_flags()
    app.run(main)
