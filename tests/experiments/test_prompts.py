"""The committed prompts are well formed; the loader and the converter name what is wrong."""

import collections
import json
import pathlib
import subprocess
import sys

import pytest

from experiments import convert_prompts, make_prompts
from experiments.data import sources
from experiments.prompts import load
from tests.common import processes
from tests.models.test_tokenizer import byte_level, write_folder

# One made-up row of every format: (format, file name, content, expected kind, split and text).
SETS = [
    (
        "spec_bench",
        "question.jsonl",
        '{"question_id": 7, "category": "rag", "turns": ["Tea is hot. Is tea hot?", "Why?"]}\n',
        ("retrieval", "eval", "Tea is hot. Is tea hot?"),
    ),
    (
        "human_eval",
        "train.jsonl",  # evaluation only, whatever the file is called
        '{"task_id": "Toy/0", "prompt": "def one():\\n"}\n',
        ("code", "eval", "def one():\n"),
    ),
    (
        "chatgpt_prompts",
        "prompts.csv",
        '"act","prompt"\n"Cook","Act as a cook.\nBe ""brief""."\n',
        ("chat", "eval", 'Act as a cook.\nBe "brief".'),
    ),
    (
        "webquestions",
        "trainmodel.json",
        '[\n {"qId": "toy1", "qText": "où dorment les hiboux ?"}\n]\n',
        ("chat", "train", "où dorment les hiboux ?"),
    ),
    (
        "gsm8k",
        "test.jsonl",
        '{"question": "What is 2 + 3?", "answer": "#### 5"}\n',
        ("math", "eval", "What is 2 + 3?"),
    ),
    (
        "self_instruct",
        "seed_tasks.jsonl",
        '{"id": "t0", "instruction": "Shorten.", "instances": [{"input": "A long line."}]}\n',
        ("chat", "train", "Shorten.\n\nA long line."),
    ),
    (
        "self_instruct",
        "user_oriented_instructions.jsonl",
        '{"id": "t1", "instruction": "Name a river.", "instances": [{"input": ""}]}\n',
        ("chat", "eval", "Name a river."),
    ),
]


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
        ("[1]\n", r"p\.jsonl:1: found \[1\]; write an object"),
        ('{"id": "a"}\n', r"p\.jsonl:1: field 'kind' is missing .* add it"),
        (line(text=" \n"), r"p\.jsonl:1: field 'text' is ' \\n'; make it a non-empty string"),
        (line(split=3), r"p\.jsonl:1: field 'split' is 3; make it a non-empty string"),
        (line() + line(), r"p\.jsonl:2: id 'a' was used in .*p\.jsonl:1; give each line its own"),
        (line(), r"no prompts with split 'eval'; the file has \['dev'\]"),
    ],
)
def test_loader_names_the_line_and_the_fix(
    tmp_path: pathlib.Path, content: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load.load(write(tmp_path / "p.jsonl", content), "eval")


@pytest.mark.parametrize(("name", "file", "content", "expected"), SETS)
def test_every_format_converts_to_loadable_prompts(
    tmp_path: pathlib.Path, name: str, file: str, content: str, expected: tuple[str, str, str]
) -> None:
    rows = convert_prompts.convert(name, write(tmp_path / file, content))
    out = write(tmp_path / "out.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    [prompt] = load.load(out)
    assert (prompt.kind, prompt.split, prompt.text) == expected
    assert prompt.id.startswith(f"{name}-")


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("alpaca", "x.jsonl", "", r"format 'alpaca' is unknown; use one of .*'gsm8k'"),
        ("gsm8k", "x.jsonl", "", r"x\.jsonl: no rows"),
        ("gsm8k", "x.jsonl", '{"q": "2?"}', r"x\.jsonl:1: field 'question' is missing"),
        ("chatgpt_prompts", "x.csv", "act,prompt\na,b,c\nd\n", r"x\.csv:3: field 'prompt' is None"),
        ("webquestions", "x.json", "[\n{]", r"x\.json:2: not JSON .* correct the line"),
        ("webquestions", "x.json", "[3]", r"x\.json: item 1: found 3; write an object"),
        ("human_eval", "x.jsonl", '{"task_id": 1, "prompt": "p"}\n' * 2, r"x\.jsonl:2: .* twice"),
        ("spec_bench", "x.jsonl", '{"category": "art"}', r":1: category 'art'; use one of"),
        ("spec_bench", "x.jsonl", '{"category": "qa", "turns": []}', r":1: field 'turns' is \[\]"),
        ("self_instruct", "x.jsonl", '{"instruction": "Go."}', r":1: field 'instances' is None"),
    ],
)
def test_converter_names_the_line_and_the_fix(
    tmp_path: pathlib.Path, name: str, file: str, content: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert_prompts.convert(name, write(tmp_path / file, content))


def test_script_writes_the_first_rows(tmp_path: pathlib.Path) -> None:
    source = write(
        tmp_path / "test.jsonl", '{"question": "2 + 3 = ?"}\n{"question": "1 + 1 = ?"}\n'
    )
    out = tmp_path / "out.jsonl"
    script = [sys.executable, "-m", "experiments.convert_prompts", "--format=gsm8k", "--limit=1"]
    subprocess.run([*script, f"--input={source}", f"--out={out}"], check=True)
    assert [prompt.text for prompt in load.load(out)] == ["2 + 3 = ?"]


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
