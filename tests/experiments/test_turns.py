"""Conversations: every answer becomes part of what is asked next."""

import json
from types import SimpleNamespace

import pytest

from experiments import bench_drafter
from experiments import generate as job
from experiments.common import turns
from experiments.common.setup import Loaded
from experiments.data import answers
from experiments.prompts import load
from experiments.prompts.prompt import Message, Prompt
from models.tokenizer import load_tokenizer
from spec.generate import Request
from tests.common import toys
from tests.models.test_tokenizer import CHATML, byte_level, write_folder

PROMPTS = [
    Prompt("a", "chat", "eval", "Tea?", later=("Why?", "So?")),
    Prompt("b", "chat", "eval", "Poem."),
    Prompt("c", "chat", "eval", "Rain?", later=("Why?",)),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(write_folder(folder, byte_level(), tokenizer_config=settings))


def test_turn_by_turn(tokenizer):
    """The smallest ids are printable ASCII: an answer's text has as many tokens as it had."""
    target = Loaded(toys.tiny(vocab_size=258), tokenizer)
    reserve = turns.room(tokenizer, PROMPTS, 6, 512)
    request = Request(6, vocab_size=96, reserve=reserve)
    asked, rows, done, best = job.converse(target, toys.PLAIN, PROMPTS, 0, request, 1)
    ids = [prompt.encode(tokenizer) for prompt in asked]
    assert [prompt.id for prompt in asked] == ["a", "b", "c", "a turn 2", "c turn 2", "a turn 3"]
    assert [row["prompt"] for row in rows] == [prompt.id for prompt in asked]
    assert {row["identical"] for row in rows} == {"yes"}
    assert max(map(len, ids)) + 6 <= reserve
    assert [row["prompt_tokens"] for row in rows] == [*map(len, ids)]
    assert best.tokens_per_step == 1
    said = [tokenizer.decode(answer.token_ids) for answer in done]
    assert all(said)
    assert asked[5].before == (
        Message("user", "Tea?"),
        Message("assistant", said[0]),
        Message("user", "Why?"),
        Message("assistant", said[3]),
    )
    text = f"<s>user:Rain?<s>assistant:{said[2]}<s>user:Why?bot:"
    assert ids[4] == tokenizer.encode(text)


def test_room_is_known_before_the_first_answer(tokenizer):
    [cut] = turns.cut(PROMPTS[:1], 2)
    assert cut.later == ("Why?",)
    assert turns.cut(PROMPTS, None) == PROMPTS
    assert [prompt.later for prompt in turns.cut(PROMPTS, 1)] == [(), (), ()]
    given = len(tokenizer.encode("<s>user:Tea?<s>assistant:<s>user:Why?bot:"))
    assert turns.room(tokenizer, [cut], 10, given + 10) == given + 20
    with pytest.raises(ValueError, match=r"'a turn 2' can come to .* --turns below 2 or fewer new"):
        turns.room(tokenizer, [cut], 10, given + 9)
    with pytest.raises(ValueError, match=r"'b' can come to 15 tokens .* reads 9: leave it out\.$"):
        turns.room(tokenizer, PROMPTS[1:2], 10, 9)


def test_answers_keep_what_was_asked(tokenizer, tmp_path):
    """A drafter learns from the conversation, or the bare text, that the answer was given to."""
    asked = [
        PROMPTS[0],
        PROMPTS[0].next_turn("Hot."),
        Prompt("d", "code", "eval", "x =", (), (), True),
    ]
    lines = [answers.Answer(prompt, (5, 1)).line() for prompt in asked]
    assert json.loads(lines[0]) == {"kind": "chat", "prompt": "Tea?", "answer_ids": [5, 1]}
    path = tmp_path / "answers-000000.jsonl"
    path.write_text("\n".join(lines) + "\n")
    for prompt, document in zip(
        asked, answers.documents(answers.read(path), tokenizer), strict=True
    ):
        given = prompt.encode(tokenizer)
        assert document == ((*given, 5, 1), len(given))
    path.write_text('{"prompt": "Hi", "answer_ids": [1], "before": [["user"]]}\n')
    with pytest.raises(ValueError, match=r"answers-000000\.jsonl:1 is no answer"):
        [*answers.read(path)]


def test_a_file_without_dev_prompts_is_measured_and_another_tunes(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"task_id": "Toy/0", "prompt": "x ="}')
    args = {"prompts": str(path), "dev_prompts": str(load.DEFAULT)}
    dev, test = bench_drafter.choose_prompts(SimpleNamespace(**args))
    assert dev == load.load(split="dev")
    assert [prompt.id for prompt in test] == ["Toy/0"]
    with pytest.raises(ValueError, match=r"no prompts with split 'dev'; the file has \['eval'\]"):
        bench_drafter.choose_prompts(SimpleNamespace(**args | {"dev_prompts": None}))
    assert bench_drafter.choose_prompts(SimpleNamespace(prompts=None, dev_prompts=None))[0] == dev


def test_only_the_turns_asked_for(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"question_id": 1, "category": "qa", "turns": ["Tea?", "Why?"]}\n')
    args = {"prompt": None, "prompts": str(path), "split": None, "smoke": False}
    for most, later in ((None, ("Why?",)), (1, ())):
        [prompt] = job.choose_prompts(SimpleNamespace(**args, turns=most))
        assert prompt.later == later
