"""Loads prompt files of every form that `formats` knows, and checks them as a whole."""

import pathlib
from collections.abc import Iterable

from experiments.prompts import formats, records
from experiments.prompts.prompt import Prompt

DEFAULT = pathlib.Path(__file__).with_name("prompts.jsonl")
KINDS = ("chat", "summary", "translation", "math", "retrieval", "code")
# What the flag --prompts says in every command.
HELP = (
    "Prompt file, .jsonl, .json or .csv, also .gz: ours (id, kind, split, text), or as Spec-Bench, "
    "MT-Bench, HumanEval, Alpaca, ShareGPT, GSM8K and others publish theirs (all of it `eval`)."
)


def load(path: pathlib.Path = DEFAULT, split: str | None = None) -> list[Prompt]:
    """Reads and checks a prompt file.

    Args:
        path: see `records.read`, by default the committed one. Every row may be of another form.
        split: keep only the prompts of this split; None keeps all.

    Returns:
        The prompts in file order, at least one.

    Raises:
        ValueError: a row cannot be read, an id occurs twice, or no prompt is left.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for row in records.read(path):
        prompt = formats.prompt(row)
        if prompt.id in seen:
            raise ValueError(
                f"{row.where}: id {prompt.id!r} was used in {seen[prompt.id]}; "
                "give each line its own"
            )
        seen[prompt.id] = row.where
        prompts.append(prompt)
    kept = [prompt for prompt in prompts if split is None or prompt.split == split]
    # An empty list would pass through a measurement as an average over nothing.
    if not prompts:
        raise ValueError(f"{path}: no prompts; write at least one")
    if not kept:
        splits = sorted({prompt.split for prompt in prompts})
        raise ValueError(f"{path}: no prompts with split {split!r}; the file has {splits}")
    return kept


def first_of_each(prompts: Iterable[Prompt], count: int = 1) -> list[Prompt]:
    """Returns the first `count` prompts of every kind, in the order of the kinds' appearance."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.kind, []).append(prompt)
    return [prompt for same in found.values() for prompt in same[:count]]
