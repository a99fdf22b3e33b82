"""Loads prompts from JSON-lines files: one object a line with the keys id, kind, split and text."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator

DEFAULT = pathlib.Path(__file__).with_name("prompts.jsonl")
KINDS = ("chat", "summary", "translation", "math", "retrieval", "code")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One user message, to be sent through the target's chat template."""

    id: str  # unique in its file
    kind: str  # what the message asks for, one of KINDS in the committed file
    split: str  # "dev" to tune on, "eval" to report, "train" in converted training parts
    text: str


def json_lines(path: pathlib.Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields ("file:line", object) for every line of a JSON-lines file that is not blank.

    Args:
        path: a UTF-8 file.

    Raises:
        ValueError: a line is not a JSON object.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: not JSON ({error.msg}, column {error.colno}); "
                    "write one JSON object a line"
                ) from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{where}: found a {type(record).__name__}; write one JSON object a line"
                )
            yield where, record


def text_field(where: str, record: dict[str, object], key: str) -> str:
    """Returns `record[key]`, which must be a string with more in it than white space.

    Args:
        where: "file:line" of the record, for the error message.
        record: one row of a prompt file.
        key: the field's name.

    Raises:
        ValueError: the field is missing, not a string or empty.
    """
    if key not in record:
        raise ValueError(
            f"{where}: field {key!r} is missing (found {sorted(record)}); add it as a string"
        )
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: field {key!r} is {value!r}; make it a non-empty string")
    return value


def load(path: pathlib.Path = DEFAULT, split: str | None = None) -> list[Prompt]:
    """Reads and checks a prompt file.

    Args:
        path: a JSON-lines file, by default the committed one.
        split: keep only the prompts of this split; None keeps all.

    Returns:
        The prompts in file order, at least one.

    Raises:
        ValueError: a line is not a JSON object with the four string fields, an id occurs twice,
            or no prompt is left.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for where, record in json_lines(path):
        prompt = Prompt(*(text_field(where, record, f.name) for f in dataclasses.fields(Prompt)))
        if prompt.id in seen:
            raise ValueError(
                f"{where}: id {prompt.id!r} was used in {seen[prompt.id]}; give each line its own"
            )
        seen[prompt.id] = where
        prompts.append(prompt)
    kept = [prompt for prompt in prompts if split is None or prompt.split == split]
    # An empty list would pass through a measurement as an average over nothing.
    if not kept:
        splits = sorted({prompt.split for prompt in prompts})
        raise ValueError(f"{path}: no prompts with split {split!r}; the file has {splits}")
    return kept


def one_of_each(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Returns the first prompt of every kind, in order of first appearance."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.kind, prompt)
    return list(first.values())
