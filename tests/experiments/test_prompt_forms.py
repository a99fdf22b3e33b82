"""Prompts in the forms that others publish, all content made up; any file is read or refused."""

import gzip
import json

import hypothesis
import pytest
from hypothesis import strategies

from experiments.prompts import formats
from experiments.prompts.load import load
from experiments.prompts.prompt import Message, Prompt
from models.tokenizer import load_tokenizer
from tests.models.test_tokenizer import CHATML, byte_level, write_folder

TEA = [{"from": "system", "value": ""}, {"from": "human", "value": "Tea?"}]
MORE = [{"from": "gpt", "value": "Hot."}, {"from": "human", "value": "Why?"}]
CHAT = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Hot."}]

# A row of every form and the prompt that it is; "x-1" is made of the file's name and the number.
ROWS = [
    (
        {"id": "a", "kind": "chat", "split": "dev", "text": "Hi", "prompt": "no"},
        Prompt("a", "chat", "dev", "Hi"),
    ),
    (
        {"question_id": 7, "category": "rag", "turns": ["Is tea hot?", "Why?", "So?"]},
        Prompt("7", "retrieval", "eval", "Is tea hot?", later=("Why?", "So?")),
    ),
    (
        {"question_id": "q", "category": "translation", "turns": ["Say tea in Welsh."]},
        Prompt("q", "translation", "eval", "Say tea in Welsh."),
    ),
    (
        {"question_id": 8, "category": "poems", "turns": ["A verse."], "reference": ["no"]},
        Prompt("8", "poems", "eval", "A verse."),
    ),
    (
        {"task_id": "Toy/0", "prompt": "def one():\n    ", "test": "no"},
        Prompt("Toy/0", "code", "eval", "def one():\n    ", continued=True),
    ),
    (
        {"id": "t_0", "conversations": [*TEA, *MORE, {"from": "gpt", "value": "no"}]},
        Prompt(
            "t_0",
            "chat",
            "eval",
            "Why?",
            before=(Message("system", ""), Message("user", "Tea?"), Message("assistant", "Hot.")),
        ),
    ),
    ({"conversations": CHAT}, Prompt("x-1", "chat", "eval", "Tea?")),
    (
        {"messages": [*CHAT, CHAT[0]], "category": "coding"},
        Prompt(
            "x-1",
            "code",
            "eval",
            "Tea?",
            before=(Message("user", "Tea?"), Message("assistant", "Hot.")),
        ),
    ),
    ({"instruction": "Go.", "output": "no"}, Prompt("x-1", "chat", "eval", "Go.")),
    ({"instruction": "Go.", "input": " "}, Prompt("x-1", "chat", "eval", "Go.")),
    (
        {"instruction": "Cut.", "input": "A long line.", "output": "no"},
        Prompt("x-1", "chat", "eval", "Cut.\n\nA long line."),
    ),
    (
        {"instruction": "Cut.", "context": "A line.", "category": "summarization"},
        Prompt("x-1", "summary", "eval", "Cut.\n\nA line."),
    ),
    (
        {"id": "seed_0", "instruction": "Cut.", "instances": [{"input": "A line."}]},
        Prompt("seed_0", "chat", "eval", "Cut.\n\nA line."),
    ),
    ({"qId": "w0", "qText": "où ?", "answers": ["no"]}, Prompt("w0", "chat", "eval", "où ?")),
    ({"question": "2 + 3?", "answer": "So\n#### 5"}, Prompt("x-1", "math", "eval", "2 + 3?")),
    ({"question": "Tea?", "answer": "Hot."}, Prompt("x-1", "chat", "eval", "Tea?")),
    ({"act": "Cook", "prompt": "Be a cook."}, Prompt("x-1", "chat", "eval", "Be a cook.")),
]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(("row", "prompt"), ROWS, ids=lambda value: getattr(value, "id", None))
def test_every_form(tmp_path, row, prompt):
    assert load(write(tmp_path / "x.jsonl", json.dumps(row))) == [prompt]
    assert load(write(tmp_path / "x.json", json.dumps([row], indent=1))) == [prompt]


def test_the_rows_above_are_of_all_forms():
    told = [next(f for f in formats.FORMS if row.keys() >= {*f.fields}) for row, _ in ROWS]
    assert {form.title for form in told} == {form.title for form in formats.FORMS}
    guide = formats.__doc__
    assert guide
    for form in formats.FORMS:
        assert all(field in guide for field in form.fields)


def test_forms_may_be_mixed_and_names_must_differ(tmp_path):
    mixed = [ROWS[0][0], ROWS[1][0], ROWS[-1][0], {**ROWS[-1][0], "act": "Baker"}]
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, mixed)))
    assert [prompt.id for prompt in load(path)] == ["a", "7", "x-3", "x-4"]
    write(path, "\n".join(map(json.dumps, [ROWS[1][0], ROWS[0][0] | {"id": "7"}])))
    with pytest.raises(ValueError, match=r"x\.jsonl:2: id '7' was used in .*x\.jsonl:1; give"):
        load(path)


def test_bytes_around_the_text(tmp_path):
    """Byte order marks, ends of lines as on Windows, blank lines, other separators, gzip."""
    rows = [{"qId": i, "qText": "a\u2028b"} for i in range(2)]
    first, second = (json.dumps(row, ensure_ascii=False).encode() for row in rows)
    many = {
        "plain.jsonl": first + b"\n" + second,
        "marked.jsonl": b"\xef\xbb\xbf" + first + b"\r\n\r\n" + second + b"\r\n",
        "list.jsonl": b"\xef\xbb\xbf \r\n[" + first + b" ,\r\n" + second + b"]\r\n",
        "lines.json": first + b"\n" + second + b"\n",
    }
    many |= {f"{name}.gz": gzip.compress(content) for name, content in many.items()}
    for name, content in many.items():
        found = load(write(tmp_path / name, content))
        assert [(prompt.id, prompt.text) for prompt in found] == [
            ("0", "a\u2028b"),
            ("1", "a\u2028b"),
        ]
    table = (
        b'\xef\xbb\xbf"act","prompt"\r\n"Cook","Be a cook.\nBe ""brief""."\r\n\r\nBaker,Bake.\r\n'
    )
    found = load(write(tmp_path / "acts.csv", table))
    assert found == load(write(tmp_path / "acts.csv.gz", gzip.compress(table)))
    assert [(prompt.id, prompt.text) for prompt in found] == [
        ("acts-1", 'Be a cook.\nBe "brief".'),
        ("acts-2", "Bake."),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"prompt": "p"}', r"x\.jsonl:1: fields \['prompt'\] are no prompt; use id\+"),
        ("x.jsonl", '\n{"question_id": 1, "category": "qa", "turns": []}', r":2: field 'turns' is"),
        ("x.jsonl", '{"question_id": 1, "category": "qa", "turns": ["a", " "]}', r"'turns\[1\]'"),
        ("x.jsonl", '{"question_id": true, "category": "qa", "turns": ["a"]}', "'question_id' is"),
        ("x.jsonl", '{"question_id": 1, "category": 2, "turns": ["a"]}', "'category' is 2; make"),
        ("x.jsonl", '{"task_id": 1, "prompt": "p"}\n' * 2, r"x\.jsonl:2: id '1' was used in"),
        ("x.jsonl", '{"task_id": 1, "prompt": "\\ud83d"}', "the character that it holds half of"),
        (
            "x.jsonl",
            '{"instruction": "Go.", "instances": []}',
            r"'instances\[0\]\[input\]' is None",
        ),
        ("x.jsonl", '{"instruction": "Go.", "input": 3}', "'input' is 3; make it a string"),
        ("x.jsonl", '{"conversations": [{"from": "gpt", "value": "a"}]}', "message of the user's"),
        ("x.jsonl", '{"conversations": [{"from": "me", "value": "a"}]}', "is 'me'; use one of"),
        (
            "x.jsonl",
            '{"conversations": [{"from": "human", "value": ""}]}',
            r"\[0\]\[value\]' is ''",
        ),
        ("x.jsonl", '{"messages": [{"content": "a"}]}', r"'messages\[0\]\[role\]' is None"),
        ("x.jsonl", '{"messages": ["a"]}', r"'messages\[0\]\[role\]' is None"),
        ("x.jsonl", '{"question": "?", "answer": 0, "choices": []}', "'choices' is .* one `text`"),
        ("x.json", "[\n{]", r"x\.json:2: not JSON .* correct the line"),
        ("x.json", '[\n{"qId": 1, "qText": "a"},\n\n3]', r"x\.json:4: found 3; write an object"),
        ("x.json", "[]", r"x\.json: no prompts"),
        ("x.json", "[" * 100_000, r"x\.json:1: not JSON \(.*recursion"),
        ("x.csv", "act,prompt\na,b,c\nd\n", r"x\.csv:3: field 'prompt' is None"),
        ("x.csv", 'act,prompt\na,"b', r"x\.csv:2: not CSV \(unexpected end"),
        ("x.jsonl", b"\n\n\xff", r"x\.jsonl:3: not UTF-8 \(invalid start byte\); save it as UTF-8"),
        ("x.jsonl.gz", b"{}", r"x\.jsonl\.gz cannot be read as prompts \(Not a gzipped"),
        (
            "x.jsonl.gz",
            gzip.compress(b"{}", mtime=0)[:-9],
            "cannot be read as prompts .*ended before",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        load(write(tmp_path / name, content))
    assert "\n" not in str(error.value)


JSON = strategies.recursive(
    strategies.none() | strategies.integers() | strategies.floats() | strategies.text(max_size=4),
    lambda inner: (
        strategies.lists(inner, max_size=2)
        | strategies.dictionaries(strategies.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
SAID = strategies.fixed_dictionaries(
    {}, optional={key: JSON | strategies.just("human") for key in ("from", "value", "role")}
)
VALUES = JSON | strategies.lists(SAID | JSON, max_size=3) | strategies.just("Hi")


@strategies.composite
def lines(draw):
    """Rows that have the fields of a form, whatever the fields hold."""
    rows = []
    for _ in range(draw(strategies.integers(0, 3))):
        form = draw(strategies.sampled_from(formats.FORMS))
        more = draw(strategies.sampled_from(["category", "input", "instances", "id", "choices"]))
        rows.append({key: draw(VALUES) for key in (*form.fields, more)})
    text = json.dumps(rows) if draw(strategies.booleans()) else "\n".join(map(json.dumps, rows))
    return text.encode()


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.jsonl.gz"])
@hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=[*hypothesis.HealthCheck]
)
@hypothesis.given(content=strategies.binary(max_size=60) | lines(), pack=strategies.booleans())
def test_any_bytes_are_prompts_or_one_line(tmp_path, name, content, pack):
    """Which can be encoded and written, or which says where."""
    path = write(tmp_path / name, gzip.compress(content) if pack and name[-1] == "z" else content)
    try:
        found = load(path)
    except ValueError as error:
        kind, said = type(error), str(error)
        assert said.startswith((f"{path}:", f"{path} cannot be read"))
        assert len(said.splitlines()) == 1
        assert kind is ValueError
    else:
        assert found
        for prompt in found:
            assert prompt.text.strip()
            json.dumps([prompt.id, prompt.kind, prompt.text], ensure_ascii=False).encode()


def test_ids_of_a_prompt(tmp_path):
    """A message goes through the template, its conversation before it; a beginning does not."""
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    plain = load_tokenizer(
        write_folder(tmp_path / "plain", byte_level(), tokenizer_config=settings)
    )
    settings |= {"chat_template": CHATML, "add_bos_token": True}
    chat = load_tokenizer(write_folder(tmp_path / "chat", byte_level(), tokenizer_config=settings))
    message = Prompt("a", "chat", "eval", "Tea?", later=("Why?", "So?"))
    assert message.encode(chat) == chat.encode("<s>user:Tea?bot:", add_bos=False)
    assert message.encode(plain) == plain.encode("Tea?")
    start = Prompt("b", "code", "eval", "def one():", continued=True)
    assert start.encode(chat) == chat.encode("<s>def one():", add_bos=False)
    second = message.next_turn("Hot.")
    said = "<s>user:Tea?<s>assistant:Hot.<s>user:Why?bot:"
    assert second.encode(chat) == chat.encode(said, add_bos=False)
    assert (second.id, second.later) == ("a turn 2", ("So?",))
    assert second.next_turn("").id == "a turn 3"
    with pytest.raises(ValueError, match=r"'a turn 2' is a conversation, .* --turns 1"):
        second.encode(plain)
