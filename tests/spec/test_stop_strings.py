"""Stop strings (HO-18): found wherever they lie, the same whatever the drafter and the segments."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec.generate import SEGMENT, Request, generate, stream
from tests.common import toys

LETTERS = {7: b"a", 0: b"b", 1: b"c", 4: b"d", 2: b"e"}
# k = 0 .. 6 drafts a step, one k a row: with k = 1 a string spans rounds, with 6 it lies in one.
KS = (0, 1, 2, 3, 4, 5, 6)
# The text of the ring, one piece a token: a character split over two tokens, a token without text,
# tokens of several characters, and repetitions.
PIECES = [
    *(b"The", b" ", b"qui", b"ck", b" b", b"row", b"n f", b"ox", b" jum", b"ps", b"\xc3", b"\xa9"),
    *(b"", b"abc", b"def", b"g", b"h", b"ij", b"k", b"\n", b"\n", b"User", b":", b" ab", b"ab"),
    *(b"abd", b"xyz", b"x", b"yz", b"", b"", b".", b".", b".", b"e", b"nd"),
]  # fmt: skip
NEXT = np.roll(np.eye(len(PIECES)), 1, axis=1)


def with_k(vocab: int, sequence: tuple[int, ...]) -> toys.Limited:
    inner = toys.scripted([sequence] * 8, toys.chain(6), vocab)
    return toys.Limited(inner, jnp.asarray([*KS, 0], jnp.int32))


def letters(**changes):
    return Request(
        **({"max_new_tokens": 12, "token_bytes": lambda i: LETTERS[i], "stop": ("bc",)} | changes)
    )


@pytest.fixture(scope="module")
def chain11():
    return toys.chain11(), with_k(11, (2, *toys.chain11_greedy(2, 60)))


@pytest.mark.parametrize(
    ("stop", "tokens", "cut"),
    [
        (("bc",), (7,), 1),
        (("a",), (), 0),
        (("e",), (7, 0, 1, 4), 4),
        (("eab", "zzz"), (7, 0, 1, 4), 4),
        (("dea", "bcd"), (7,), 1),
    ],
)
def test_letters(chain11, stop, tokens, cut):
    """HO-18: text up to "a", one id, whatever k is."""
    model, drafter = chain11
    for k, done in zip(KS, generate(model, drafter, [[2]] * 7, letters(stop=stop)), strict=True):
        assert (done.token_ids, done.finish_reason, done.stop_bytes) == (tokens, "stop", cut), k
        assert done.metrics.tokens == len(tokens), "what is cut is not counted"


@pytest.mark.parametrize(
    ("changes", "tokens", "reason"),
    [
        ({"stop": ("ca",)}, (7, 0, 1, 4, 2) * 2 + (7, 0), "length"),  # never occurs
        ({"max_new_tokens": 3}, (7,), "stop"),  # completed by the budget's last token
        ({"max_new_tokens": 2}, (7, 0), "length"),  # only its first letter fits
        ({"eos_ids": (0,)}, (7, 0), "eos"),  # the end comes before the stop string is whole
        ({"eos_ids": (4,)}, (7,), "stop"),
        ({"stop": ("bc", "abc")}, (), "stop"),  # both complete with the same token
    ],
)
def test_what_else_may_end_the_row(chain11, changes, tokens, reason):
    model, drafter = chain11
    for done in generate(model, drafter, [[2]] * 7, letters(**changes)):
        assert (done.token_ids, done.finish_reason) == (tokens, reason)
        assert (done.stop_bytes is None) == (reason != "stop")


def test_prompt_text_is_not_searched(chain11):
    """The prompt a b, the output c: "bc" has only its second half in the output."""
    model, drafter = chain11
    done = generate(model, drafter, [[7, 0]] * 7, letters(max_new_tokens=4))[6]
    assert (done.token_ids, done.finish_reason) == ((1, 4, 2, 7), "length")


def naive(pieces: list[bytes], stops: tuple[str, ...]) -> tuple[int, int] | None:
    """After each token: is any string in the text? Then tokens that begin before it, and where."""
    text = b""
    for count in range(len(pieces)):
        text += pieces[count]
        hits = [at for stop in stops if (at := text.find(stop.encode())) >= 0]
        if hits:
            begins = [sum(map(len, pieces[:i])) for i in range(count + 1)]
            return sum(begin < min(hits) for begin in begins), min(hits)
    return None


@pytest.fixture(scope="module")
def ring():
    """Token t is followed by t + 1; 36 different tokens, so a text of 36 pieces at will."""
    order = tuple(range(len(PIECES)))
    drafter = with_k(len(PIECES), (order[-1], *order))
    return toys.lookup(4 * NEXT.astype(np.float32)), drafter


STOPS = [
    ("quick",),
    ("T",),
    ("é",),  # one character, two tokens
    ("k b",),  # ends inside a token
    ("ow",),  # inside one token
    ("cdef",),  # begins and ends inside tokens
    ("\n\nUser:",),
    ("kUser", "k\n\n"),
    ("abab",),  # overlaps itself
    ("ababd",),
    ("xyzxyz.",),
    ("...",),
    ("absent", "end"),
    # The second is complete first although it begins later.
    ("defghijk", "g"),
    ("n fox jumps", "x", " jum"),
    ("The quick brown", "brow"),
]


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_equals_a_search_after_every_token(ring, stop):
    """All k, `generate` in segments and `stream` in steps agree with the naive search.

    35 tokens are more than two segments of one token a step.
    """
    model, drafter = ring
    start = len(PIECES) - 1  # so that the output is 0, 1, 2, ...
    pieces = PIECES[:-1]
    assert len(pieces) > 2 * SEGMENT
    request = Request(len(pieces), stop=stop, token_bytes=PIECES.__getitem__)
    found = naive(pieces, stop)
    whole = generate(model, drafter, [[start]] * 7, request)
    for k, done in zip(KS, whole, strict=True):
        kept, cut = (len(pieces), None) if found is None else found
        assert done.token_ids == tuple(range(kept)), k
        assert done.stop_bytes == cut
        assert done.finish_reason == ("length" if found is None else "stop")
    for steps in (1, 5):
        items = list(stream(model, drafter, [[start]] * 7, request, steps))
        assert items[-1] == whole
        for item, later in itertools.pairwise(items):
            for a, b in zip(item, later, strict=True):
                assert a.token_ids == b.token_ids[: len(a.token_ids)], (
                    "shown text is never taken back"
                )


def test_stream_holds_back_no_more_than_it_must(chain11):
    """ "abcd...": with stop "cx", c is shown once d has come."""
    model, drafter = chain11
    items = stream(model, drafter, [[2]] * 7, letters(stop=("cx",)))
    shown = [item[0].token_ids for item in items][:5]
    assert shown == [(7,), (7, 0), (7, 0), (7, 0, 1, 4), (7, 0, 1, 4, 2)]


def test_a_string_over_two_segments(ring):
    """Row 0 drafts nothing, so a segment is 16 tokens: the string lies in the last and the next."""
    model, drafter = ring
    start = len(PIECES) - 1
    text = b"".join(PIECES)
    begins = len(b"".join(PIECES[: SEGMENT - 1]))
    stop = text[begins : begins + 2].decode()
    assert text.find(stop.encode()) == begins
    assert naive(PIECES[:SEGMENT], (stop,)) is None
    request = Request(len(PIECES) - 1, stop=(stop,), token_bytes=PIECES.__getitem__)
    done = generate(model, drafter, [[start]] * 7, request)[0]
    assert (done.token_ids, done.finish_reason) == (tuple(range(SEGMENT - 1)), "stop")


def test_rows_stop_each_for_itself(chain11):
    """A row that met its string waits; its neighbours go on as if alone."""
    model, drafter = chain11
    prompts = [[2], [4], [5], [1], [3], [0], [7]]
    texts = [[LETTERS.get(i, b"?") for i in toys.chain11_greedy(p, 16)] for (p,) in prompts]
    request = letters(max_new_tokens=16, stop=("bcd",), token_bytes=lambda i: LETTERS.get(i, b"?"))
    done = generate(model, drafter, prompts, request)
    reasons = [row.finish_reason for row in done]
    assert reasons == [*("stop", "stop", "length", "stop", "length", "stop", "stop")]
    for row, text in zip(done, texts, strict=True):
        kept = naive(text, ("bcd",)) or (16, None)
        assert (len(row.token_ids), row.stop_bytes) == kept
