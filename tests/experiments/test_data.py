"""The data room: documents, packing, vocabulary, batches by number."""

import gzip
import json

import numpy as np
import pytest

from experiments.data import answers, bpe, sources, text
from experiments.data.batches import Batches, Rows
from experiments.data.corpus import Corpus, Document, frequent_tokens, row_of_token
from experiments.data.sources import HELD
from models.tokenizer import Tokenizer
from tests.models.test_tokenizer import byte_level

CORPUS = Corpus.of([Document([5, 6, 7, 8]), Document([9, 5, 6, 5, 2], given=2), Document([3, 2])])


def test_what_is_to_be_learned():
    assert CORPUS.token_n.tolist() == [5, 6, 7, 8, 9, 5, 6, 5, 2, 3, 2]
    assert CORPUS.document_n.tolist() == [0] * 4 + [1] * 5 + [2] * 2
    assert CORPUS.learn_n.tolist() == [0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1]


def test_rows():
    """The label is the next token of the same document (HO-33: next token, at t + 1)."""
    rows = Rows(CORPUS, 5, None)
    assert len(rows) == 2
    first, second = rows[0], rows[1]
    assert first["token_BT"].tolist() == [5, 6, 7, 8, 9]
    assert first["position_BT"].tolist() == [0, 1, 2, 3, 0]
    assert first["segment_BT"].tolist() == [0, 0, 0, 0, 1]
    assert first["label_BT"][:3].tolist() == [6, 7, 8]
    # No label across documents; the prompt of an answer is not learned.
    assert first["weight_BT"].tolist() == [1, 1, 1, 0, 0]
    assert second["token_BT"].tolist() == [5, 6, 5, 2, 3]
    assert second["label_BT"].tolist() == [6, 5, 2, 3, 2]
    assert second["weight_BT"].tolist() == [1, 1, 1, 0, 1]
    counting = Rows(Corpus.of([Document(range(10))]), 9, None)[0]
    np.testing.assert_array_equal(counting["label_BT"], counting["token_BT"] + 1)


def test_reduced_vocabulary():
    ids = frequent_tokens(CORPUS, 3, [2])
    assert ids.tolist() == [2, 5, 6]  # 6 twice; 5, 7, 8 once each: ties go to the smaller id
    row_V = row_of_token(ids, 10)
    assert row_V[[2, 5, 6]].tolist() == [0, 1, 2]
    assert (row_V[[0, 1, 3, 4, 7, 8, 9]] == -1).all()
    first = Rows(CORPUS, 5, row_V)[0]
    assert first["label_BT"][0] == 2
    assert first["weight_BT"].tolist() == [1, 0, 0, 0, 0]  # 7 and 8 have no row
    with pytest.raises(ValueError, match="2 ids must be kept"):
        frequent_tokens(CORPUS, 1, [2, 3])


def test_batches_are_found_by_number():
    corpus = Corpus.of([Document(range(i, i + 9)) for i in range(40)])
    batches = Batches(Rows(corpus, 8, None), 4, seed=3)
    again = Batches(Rows(corpus, 8, None), 4, seed=3)
    for number in (0, 7, 23, 100):
        np.testing.assert_array_equal(batches[number].token_BT, again[number].token_BT)
    other = Batches(Rows(corpus, 8, None), 4, seed=4)
    assert not np.array_equal(batches[0].token_BT, other[0].token_BT)

    def epoch(n):
        rows = np.concatenate(
            [batches[i].token_BT for i in range(n * batches.epoch, (n + 1) * batches.epoch)]
        )
        return sorted(map(tuple, rows.tolist())), rows.tolist()

    assert epoch(0)[0] == epoch(1)[0]
    assert epoch(0)[1] != epoch(1)[1]


def test_too_little_text():
    with pytest.raises(ValueError, match="a row of 11 needs one more"):
        Rows(CORPUS, 11, None)
    with pytest.raises(ValueError, match="do not make a batch of 3"):
        Batches(Rows(CORPUS, 5, None), 3, seed=0)
    with pytest.raises(ValueError, match="No document"):
        Corpus.of([])


def test_saved_and_joined(tmp_path):
    CORPUS.save(tmp_path / "corpus.npz")
    loaded = Corpus.load(tmp_path / "corpus.npz")
    np.testing.assert_array_equal(loaded.token_n, CORPUS.token_n)
    both = loaded + CORPUS
    assert both.document_n.tolist() == [*CORPUS.document_n, *(CORPUS.document_n + 3)]


def test_text_sources(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"no text")
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe no text either")
    assert [*text.documents(str(tmp_path))] == ["one", "two"]
    library = text.documents("stdlib")
    assert "def " in next(library) + next(library)
    with pytest.raises(ValueError, match="'nowhere' is no folder"):
        next(text.documents("nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no document"):
        next(text.documents(str(tmp_path / "empty")))


def test_answers(tmp_path):
    line = json.dumps({"kind": "chat", "prompt": "Hi", "answer_ids": [4, 2]})
    (tmp_path / "answers-000000.jsonl").write_text(f"{line}\n{line}\n{line[:20]}")

    def found(path):
        return [(answer.prompt.text, answer.answer_ids) for answer in answers.read(path)]

    assert found(tmp_path) == [("Hi", (4, 2))] * 2
    (tmp_path / "all.jsonl.gz").write_bytes(gzip.compress(f"{line}\n".encode()))
    assert found(tmp_path / "all.jsonl.gz") == [("Hi", (4, 2))]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Hi"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1 is no answer"):
        [*answers.read(tmp_path / "bad.jsonl")]
    with pytest.raises(ValueError, match="absent cannot be read"):
        [*answers.read(tmp_path / "absent")]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="make_answers"):
        [*answers.read(tmp_path / "none")]


def test_held_out_texts(tmp_path):
    for number in range(HELD + 2):
        (tmp_path / f"{number:03d}.txt").write_text(f"{number}\nnext\n")

    def some(kind):
        return [int(text.split()[0]) for text in sources.texts((f"{kind}:{tmp_path}",))]

    assert some("held") == [0, HELD]
    assert sorted(some("held") + some("train")) == some("text") == list(range(HELD + 2))
    with pytest.raises(ValueError, match="held:SOURCE"):
        list(sources.texts(("answers:nowhere",)))


def test_prefixes_end_with_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("aaa\nbbb\nccc\nddd\n")
    source, tokenizer = f"text:{tmp_path}", Tokenizer(byte_level(), None, (), False, None)
    assert sources.prefixes(source, tokenizer, 1, tokens=6) == ["aaa\nbbb\n"]
    with pytest.raises(ValueError, match="1 texts of 6 tokens, not 2"):
        sources.prefixes(source, tokenizer, 2, tokens=6)


def test_own_tokenizer(tmp_path):
    texts = ["def one(): return 11\n" * 20]
    tokenizer = bpe.trained(tmp_path, texts, 280)
    ids = tokenizer.encode("def one(): return 11\n")
    assert tokenizer.decode(ids) == "def one(): return 11\n"
    assert len(ids) < 21
    assert tokenizer.encode("11") == [*tokenizer.encode("1")] * 2  # digits stand alone
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.eos_ids] == [bpe.END]
    assert tokenizer.encode("é\x00") != []  # any byte
    again = bpe.trained(tmp_path, iter(()), 280)
    assert again.encode("return") == tokenizer.encode("return")
    with pytest.raises(ValueError, match="choose another folder"):
        bpe.trained(tmp_path, texts, 200)


def test_unknown_source():
    with pytest.raises(ValueError, match="write text:SOURCE or answers:PATH"):
        sources.load(["music:bach"], None)
