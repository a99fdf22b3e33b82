"""The committed prompts are well formed, the loader names what is wrong; beginnings of texts."""

import collections
import json
import pathlib

import pytest

from experiments import make_prompts
from experiments.data import sources
from experiments.prompts import load
from tests.common import processes
from tests.models.test_tokenizer import byte_level, write_folder


def write(path: pathlib.Path, content: str) -> pathlib.Path:
    path.write_text(content, encoding="utf-8")
    return path


def line(**changes: object) -> str:
    return json.dumps({"id": "a", "kind": "chat", "split": "dev", "text": "Hi"} | changes) + "\n"


def test_committed_prompts_are_balanced_and_distinct() -> None:
    prompts = load.load()
    counts = collections.Counter((prompt.kind, prompt.split) for prompt in prompts)
    assert counts == {(kind, split): 6 for kind in load.KINDS for split in ("dev", "eval")}
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert tuple(prompt.kind for prompt in load.first_of_each(prompts)) == load.KINDS


def test_split_and_first_of_each_keep_file_order(tmp_path: pathlib.Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        line(id="a", kind="math") + line(id="b") + "\n" + line(id="c", split="eval") + line(id="d"),
    )
    assert [prompt.id for prompt in load.load(path, "dev")] == ["a", "b", "d"]
    assert [prompt.id for prompt in load.first_of_each(load.load(path))] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (line() + "{oops\n", r"p\.jsonl:2: not JSON .* correct the line"),
        ("[1]\n", r"p\.jsonl:1: found 1; write an object"),
        (line() + "[1]\n", r"p\.jsonl:2: found \[1\]; write an object"),
        ('{"id": "a"}\n', r"p\.jsonl:1: fields \['id'\] are no prompt; use id\+kind\+split\+text "),
        (line(text=" \n"), r"p\.jsonl:1: field 'text' is ' \\n'; make it a non-empty string"),
        (line(split=3), r"p\.jsonl:1: field 'split' is 3; make it a non-empty string"),
        (line() + line(), r"p\.jsonl:2: id 'a' was used in .*p\.jsonl:1; give each line its own"),
        (line(), r"no prompts with split 'eval'; the file has \['dev'\]"),
        (" \n", r"p\.jsonl: no prompts; write at least one"),
    ],
)
def test_loader_names_the_line_and_the_fix(
    tmp_path: pathlib.Path, content: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load.load(write(tmp_path / "p.jsonl", content), "eval")


def test_beginnings_of_texts_are_prompts(tmp_path):
    """Every second one tunes, the others report; each ends with a line."""
    folder = write_folder(tmp_path / "model", byte_level())
    for number in range(2 * sources.HELD):
        text = f"{number}\n" + "a b c d e f g h\n" * 40
        (tmp_path / f"{number:02}.txt").write_text(text, encoding="utf-8")
    found = make_prompts.prompts(f"held:{tmp_path}", str(folder), 2)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    assert [prompt.split for prompt in load.load(path)] == ["dev", "eval"]
    assert [row["text"].split("\n")[0] for row in found] == ["0", f"{sources.HELD}"]
    assert all(row["text"].endswith("\n") for row in found)
    with pytest.raises(ValueError, match="is neither a path nor one of"):
        make_prompts.prompts("held:stdlib", "nowhere", 2)


def test_the_script_of_beginnings(tmp_path):
    """By the shipped tokenizer, from this Python's own library."""
    out = tmp_path / "new" / "prompts.jsonl"
    done = processes.python("-m", "experiments.make_prompts", "--smoke", f"--out={out}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [prompt.split for prompt in load.load(out)] == ["dev", "eval"]
