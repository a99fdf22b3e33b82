"""Loads prompts: one JSON object a line with the string fields id, kind, split and text."""

import csv
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


def rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields (place, row) for every row of a UTF-8 file; the place is for error messages.

    Args:
        path: ".csv" with a header, ".json" (one list of objects), else JSON lines; blank lines
            are skipped.

    Raises:
        ValueError: the text is not what the suffix promises.
    """
    try:
        yield from _rows(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read as prompts ({error}): give a text file."
        ) from error


def _rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, object]]]:
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as lines:
            table = csv.DictReader(lines, restkey="(more)")
            for row in table:
                yield f"{path}:{table.line_num}", dict(row)
    elif path.suffix == ".json":
        items = _parse(path.read_text(encoding="utf-8"), path, 1)
        for number, item in enumerate(items if isinstance(items, list) else [items], 1):
            yield _object(item, f"{path}: item {number}")
    else:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _object(_parse(line, path, number), f"{path}:{number}")


def _parse(text: str, path: pathlib.Path, first_line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{first_line + error.lineno - 1}"
        raise ValueError(f"{place}: not JSON ({error.msg}); correct the line") from error


def _object(item: object, where: str) -> tuple[str, dict[str, object]]:
    if not isinstance(item, dict):
        raise ValueError(f"{where}: found {item!r}; write an object with named fields")
    return where, item


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
    for where, record in rows(path):
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


def first_of_each(prompts: Iterable[Prompt], count: int = 1) -> list[Prompt]:
    """Returns the first `count` prompts of every kind, in the order of the kinds' appearance."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.kind, []).append(prompt)
    return [prompt for same in found.values() for prompt in same[:count]]
