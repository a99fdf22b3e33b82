"""Lets the target answer many prompts: the data that its drafters learn from. Resumable.

    python -m experiments.make_answers [--prompts FILE] [--out out/answers]

Cost: not measured at full length yet; the bar shows the tokens made. Without
--prompts it asks about the functions of Python's standard library, which is on every machine.
Every finished batch is one shard; the same command goes on where it was interrupted.
"""

import ast
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator

from absl import flags
from tqdm import tqdm

from experiments.common import command, setup
from experiments.data import text
from experiments.data.answers import Answer
from experiments.prompts import load as prompt_set
from experiments.prompts.prompt import Prompt
from spec.drafters import NGramDrafter
from spec.generate import Request, generate


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("target", setup.DEFAULT_TARGET, "Model: name, .gguf file or folder.")
    flags.DEFINE_string("prompts", None, f"{prompt_set.HELP} Of turns the first.")
    flags.DEFINE_integer("limit", None, "Most prompts to answer.", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", 160, "Budget of each answer.", lower_bound=1)
    flags.DEFINE_integer("batch", 16, "Prompts answered together.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.0, "0 answers greedily, more samples.", lower_bound=0.0)
    flags.DEFINE_integer("seed", 0, "Of the first prompt; the next has the next.", lower_bound=0)
    flags.DEFINE_string("out", "out/answers", "Folder for the shards.")
    flags.DEFINE_bool("smoke", False, "Two short answers.")


def library_prompts() -> Iterator[Prompt]:
    """Yields a question about every documented function of the standard library."""
    for number, source in enumerate(text.documents("stdlib")):
        try:
            tree = ast.parse(source)
        except SyntaxError:  # templates that are no Python
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            purpose = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            if 20 <= len(purpose) <= 300:
                place = f"{number}-{node.lineno}"
                yield Prompt(
                    f"write-{place}",
                    "code",
                    "train",
                    f"Write a Python function `{node.name}`. {purpose}",
                )
                yield Prompt(
                    f"explain-{place}",
                    "chat",
                    "train",
                    f"In a few sentences, when would I need a function that does this? {purpose}",
                )


def main(args: flags.FlagValues) -> None:
    """Runs the job."""
    try:
        prompts = (
            prompt_set.load(pathlib.Path(args.prompts)) if args.prompts else [*library_prompts()]
        )
        answer_all(args, prompts[: 2 if args.smoke else args.limit])
    except ValueError as error:
        sys.exit(f"Error: {error}")


def answer_all(args: flags.FlagValues, prompts: list[Prompt]) -> None:
    """Answers what has no shard yet.

    Raises:
        ValueError: if the shards there were made with other flags or prompts.
    """
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    budget = 8 if args.smoke else args.max_new_tokens
    check_same_job(args, prompts, budget, out / "job.json")
    target = setup.load(args.target, setup.default_dtype())
    # Prompts of like length share a batch, so that few tokens are padding.
    ids = setup.encode(target.tokenizer, prompts)
    order = sorted(range(len(prompts)), key=lambda i: (len(ids[i]), i))
    groups = [order[i : i + args.batch] for i in range(0, len(order), args.batch)]
    drafter = NGramDrafter(window=4, min_match=2, depth=3, sizes=(1, 4))
    request = Request(
        budget,
        eos_ids=target.tokenizer.eos_ids,
        vocab_size=target.tokenizer.vocab_size,
        temperature=args.temperature,
        compact=True,  # of many batches: what short answers save outweighs the programs
    )
    tokens = 0
    with tqdm(groups, unit="batch") as bar:
        for number, group in enumerate(bar):
            shard = out / f"answers-{number:06d}.jsonl"
            if shard.exists():
                continue
            asked = dataclasses.replace(request, seed=tuple(args.seed + i for i in group))
            done = generate(target.model, drafter, [ids[i] for i in group], asked)
            lines = [
                Answer(prompts[i], completion.token_ids).line()
                for i, completion in zip(group, done, strict=True)
            ]
            temporary = shard.with_suffix(".tmp")
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
            os.replace(temporary, shard)
            tokens += sum(len(completion.token_ids) for completion in done)
            bar.set_postfix(tokens=tokens)
    print(f"wrote {len(groups)} shards to {out}")


def check_same_job(
    args: flags.FlagValues, prompts: list[Prompt], budget: int, path: pathlib.Path
) -> None:
    """Notes what the folder's answers are made with, and refuses to mix jobs.

    Raises:
        ValueError: if the note at `path` says otherwise.
    """
    texts = (repr((prompt.before, prompt.text, prompt.continued)) for prompt in prompts)
    asked = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    job = {
        "target": args.target,
        "prompts": asked,
        "max_new_tokens": budget,
        "batch": args.batch,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != job:
        raise ValueError(
            f"{path.parent} holds answers of another job (see job.json): give the same flags and "
            "prompts to go on, or another --out."
        )
    path.write_text(json.dumps(job, indent=1), encoding="utf-8")


if __name__ == "__main__":
    command.run(main, define_flags)
