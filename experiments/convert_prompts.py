"""Converts a public prompt set to our JSON-lines format (see load.py); seconds on a CPU.

    python -m experiments.convert_prompts --format gsm8k --input test.jsonl --out gsm8k.jsonl

No public set is part of this repository: fetch one under its own licence, then convert it.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable

from absl import app, flags

from experiments.prompts import load

Row = dict[str, object]
Reader = Callable[[str, Row], tuple[str, str]]  # ("file:line", row) -> (kind, text)

_SPEC_BENCH_KINDS = {
    **dict.fromkeys(("writing", "roleplay", "reasoning", "stem", "humanities"), "chat"),
    **dict.fromkeys(("extraction", "qa"), "chat"),
    **dict.fromkeys(("math", "math_reasoning"), "math"),
    "coding": "code",
    "translation": "translation",
    "summarization": "summary",
    "rag": "retrieval",
}


def _one_field(key: str, kind: str) -> Reader:
    return lambda where, row: (kind, load.text_field(where, row, key))


def _spec_bench(where: str, row: Row) -> tuple[str, str]:
    category = load.text_field(where, row, "category")
    if category not in _SPEC_BENCH_KINDS:
        raise ValueError(f"{where}: category {category!r}; use one of {sorted(_SPEC_BENCH_KINDS)}")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: field 'turns' is {turns!r}; make it a list of strings")
    # A later turn only makes sense after the model's own answer to the first.
    return _SPEC_BENCH_KINDS[category], load.text_field(where, {"turns[0]": turns[0]}, "turns[0]")


def _self_instruct(where: str, row: Row) -> tuple[str, str]:
    instruction = load.text_field(where, row, "instruction")
    match row.get("instances"):
        case [{"input": str(given)}, *_]:
            return "chat", f"{instruction}\n\n{given}" if given.strip() else instruction
        case other:
            raise ValueError(
                f"{where}: field 'instances' is {other!r}; "
                "make it a list of objects with a string 'input'"
            )


@dataclasses.dataclass(frozen=True)
class _Format:
    read: Reader
    id_key: str  # "": the set has no unique names, so its rows are numbered
    has_training_part: bool


_FORMATS = {
    "spec_bench": _Format(_spec_bench, "question_id", False),
    "human_eval": _Format(_one_field("prompt", "code"), "task_id", False),
    "chatgpt_prompts": _Format(_one_field("prompt", "chat"), "", False),
    "webquestions": _Format(_one_field("qText", "chat"), "qId", True),
    "gsm8k": _Format(_one_field("question", "math"), "", True),
    "self_instruct": _Format(_self_instruct, "id", True),
}


def convert(format_name: str, path: pathlib.Path) -> list[dict[str, str]]:
    """Reads a public prompt set as rows of our format.

    Args:
        format_name: a name in the table above, such as "gsm8k".
        path: the set's own file. ".csv" and ".json" (a list) are read as such, anything else as
            JSON lines. A name that starts with "train", or "seed_tasks", marks a training part.

    Returns:
        One dict with id, kind, split and text per row, in file order, ids unique.

    Raises:
        ValueError: unknown format, malformed row (with its place), repeated id or no rows.
    """
    if format_name not in _FORMATS:
        raise ValueError(f"format {format_name!r} is unknown; use one of {sorted(_FORMATS)}")
    form = _FORMATS[format_name]
    in_training = path.stem.startswith("train") or path.stem == "seed_tasks"
    split = "train" if form.has_training_part and in_training else "eval"
    prompts: dict[str, dict[str, str]] = {}
    for number, (where, row) in enumerate(load.rows(path), 1):
        kind, text = form.read(where, row)
        # In a made-up name the file's stem keeps the train and test rows of a set apart.
        name = f"{format_name}-{row.get(form.id_key, f'{path.stem}-{number}')}"
        if name in prompts:
            raise ValueError(f"{where}: id {name!r} occurs twice; remove one of the rows")
        prompts[name] = {"id": name, "kind": kind, "split": split, "text": text}
    if not prompts:
        raise ValueError(f"{path}: no rows; give the {format_name} file itself")
    return list(prompts.values())


def _run(format_name: str, source: pathlib.Path, target: pathlib.Path, limit: int | None) -> None:
    try:
        prompts = convert(format_name, source)[:limit]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    lines = (json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
    target.write_text("".join(lines), encoding="utf-8")
    print(f"{len(prompts)} prompts written to {target}")


def main(_: list[str]) -> None:
    """Converts the file that the flags name."""
    args = flags.FLAGS
    if args.smoke:
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "test.jsonl")
            source.write_text('{"question": "What is 2 + 3?"}\n', encoding="utf-8")
            _run("gsm8k", source, pathlib.Path(folder, "out.jsonl"), None)
    elif args.format and args.input and args.out:
        _run(args.format, pathlib.Path(args.input), pathlib.Path(args.out), args.limit)
    else:
        sys.exit("give --format, --input and --out, or --smoke")


if __name__ == "__main__":  # flags live here: names such as --out would clash between scripts
    flags.DEFINE_enum("format", None, sorted(_FORMATS), "Which public set the input is.")
    flags.DEFINE_string("input", None, "The set's file.")
    flags.DEFINE_string("out", None, "JSON-lines file to write.")
    flags.DEFINE_integer("limit", None, "Keep only the first rows.", lower_bound=1)
    flags.DEFINE_bool("smoke", False, "Convert one made-up row in a temporary folder.")
    app.run(main)
