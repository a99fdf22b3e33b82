"""Vocabularies that are padded differently, and vocabularies that differ (HO-07)."""

import pytest
import tokenizers
from tokenizers import models

from models.tokenizer import Tokenizer, check_same_vocabulary
from spec.drafters import ModelDrafter
from spec.generate import Request, generate
from tests.common import toys

CYCLE = toys.chain11_greedy(2, 12)


@pytest.fixture(scope="module")
def target():
    """T1 padded to 16 rows, whose padding has the highest logit (9) everywhere."""
    return toys.chain11(16)


def test_padding_rows_are_never_chosen(target):
    """HO-07(a), plain: the same head without the tokenizer's size says 11 at once."""
    assert toys.decode(target, toys.PLAIN, [[2]], 12, vocab_size=11) == [(CYCLE, "length")]
    assert toys.plain_uncached(target, [[2]], 12, vocab=11) == [(CYCLE, "length")]
    assert toys.decode(target, toys.PLAIN, [[2]], 3)[0][0] == (11, 11, 11)


@pytest.mark.parametrize(
    ("rows", "known", "accepted"),
    [
        (11, 11, 6),
        (14, 11, 6),
        # The drafter's own padding, taken for tokens, is drafted and refused: only time is lost.
        (14, 14, 0),
    ],
)
def test_tables_of_other_heights_draft_alike(target, rows, known, accepted):
    """HO-07(a), drafters of 11 and of 14 rows: full acceptance, one draft in each of 6 steps."""
    drafter = ModelDrafter(toys.chain11(rows), toys.chain(1), known)
    done = generate(target, drafter, [[2]], Request(12, vocab_size=11))[0]
    assert (done.token_ids, done.finish_reason) == (CYCLE, "length")
    assert done.metrics.accepted == accepted


@pytest.mark.parametrize(
    ("prompt", "vocab", "words"),
    [
        ([2, 11], 11, r"Prompt 0 holds ids 2\.\.11, the vocabulary is 0\.\.10"),
        ([2, -1], 11, r"holds ids -1\.\.2"),
        ([2], 17, "vocab_size = 17 exceeds the target's table of 16 rows"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(target, prompt, vocab, words):
    with pytest.raises(ValueError, match=words):
        generate(target, toys.PLAIN, [prompt], Request(1, vocab_size=vocab))


def tokenizer(*words: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, words[0]))
    return Tokenizer(backend, bos_id=None, eos_ids=(), add_bos=False, chat_template=None)


def test_other_vocabularies_are_refused_by_name():
    """HO-07(b): both sizes and the first id that differs."""
    ours = tokenizer("<unk>", "a", "b", "c")
    check_same_vocabulary(ours, tokenizer("<unk>", "a", "b", "c"))
    for theirs, words in (
        (("<unk>", "a", "c", "b"), r"\(4 and 4 tokens\): token 2 is 'b' .* 'c' for the drafter"),
        (("<unk>", "a", "b"), r"\(4 and 3 tokens\): token 3 is 'c' .* None"),
        (("<unk>", "a", "b", "c", "d"), r"\(4 and 5 tokens\): token 4 is None .* 'd'"),
    ):
        with pytest.raises(ValueError, match=words):
            check_same_vocabulary(ours, tokenizer(*theirs))
