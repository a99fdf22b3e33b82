"""End of sequence, budgets and the first draft: HO-01, HO-02, HO-03."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec.decode import EOS, LENGTH, spec_step
from spec.drafters import NGramDrafter
from spec.generate import Request, begin, generate, stream
from tests.common import toys

CYCLE = toys.chain11_greedy(2, 60)  # 7 0 1 4 2 7 ...
NGRAM = NGramDrafter(window=3, matches=2, depth=4, sizes=(1, 8))
# The path to the deepest leaf of UNBALANCED, by ranks.
DEEP = (2, 1, 1, 0)
one_step = toys.quick(spec_step)


@pytest.fixture(scope="module")
def model():
    return toys.chain11()


def perfect(ks) -> toys.Limited:
    """A chain of the target's own tokens, k of them in each row. The script goes on after EOS."""
    depth_B = np.zeros(8, np.int32)
    depth_B[: len(ks)] = ks
    inner = toys.scripted([(2, *CYCLE)] * 8, toys.chain(6), 11)
    return toys.Limited(inner, jnp.asarray(depth_B))


KS = (0, 1, 2, 3, 4, 5, 6)


def test_the_table(model):
    assert CYCLE[:10] == (7, 0, 1, 4, 2, 7, 0, 1, 4, 2)  # written out by hand
    assert toys.plain_uncached(model, [[2], [3]], 5) == [
        ((7, 0, 1, 4, 2), "length"),
        ((10, 9, 6, 8, 3), "length"),
    ]


@pytest.mark.parametrize("eos", [(7,), (0,), (1,), (4,), (2,), (3, 1, 2), (5,), ()])
def test_eos_inside_an_accepted_run_ends_the_row(model, eos):
    """HO-01(a), k = 0..6 as rows: nothing after the first EOS is emitted or counted."""
    want = toys.plain_uncached(model, [[2]], 8, eos)[0]
    if eos == (1,):
        assert want == ((7, 0, 1), "eos")
    done = generate(model, perfect(KS), [[2]] * 7, Request(8, eos))
    for k, completion in zip(KS, done, strict=True):
        assert (completion.token_ids, completion.finish_reason) == want, f"k = {k}"
        counts = completion.metrics
        assert counts.tokens == len(want[0])
        assert counts.accepted <= counts.proposed_depth <= counts.tokens
        assert counts.steps == -(-counts.tokens // (k + 1))


def test_nothing_after_eos_stays_in_the_state(model):
    """HO-01(a): the cache ends where the output ends, its last token being the next root."""
    request = Request(8, (1,))
    state, settings = begin(model, perfect(KS), [[2]] * 7, request)
    for _ in range(3):
        end = state = one_step(model, perfect(KS), state, settings)[0]
    assert end.emitted_B.tolist() == [3] * 7 + [0]
    assert end.cache.length_B.tolist() == [3] * 7 + [0]  # the prompt 2, then 7 and 0
    assert end.root_B.tolist() == [1] * 7 + [0]
    assert end.finish_B.tolist() == [EOS] * 7 + [LENGTH]


def test_ngram_may_copy_eos_from_the_prompt(model):
    """HO-01(b): an EOS inside the prompt is history, a copied one ends the row."""
    drafted = toys.decode(model, NGRAM, [[2, 7, 0, 1, 4, 2, 7, 0]], 8, eos_ids=(1,))
    assert drafted == [((1,), "eos")]


def test_ngram_without_eos(model):
    """HO-01(c)."""
    drafted = toys.decode(model, NGRAM, [[2, 7, 0, 1, 4, 2, 7]], 5)
    assert drafted == [((0, 1, 4, 2, 7), "length")]


@pytest.mark.parametrize("n", range(8))
def test_exactly_the_budget(model, n):
    """HO-02: chain k = 4 and a tree of depth 4; no draft that could not be emitted."""
    chain = perfect((4,) * 5)
    tree = toys.scripted([(2, *CYCLE)], toys.UNBALANCED, 11, rank=[DEEP])
    for drafter, prompts in ((chain, [[2]] * 5), (tree, [[2]])):
        completion = generate(model, drafter, prompts, Request(n))[0]
        assert completion.token_ids == CYCLE[:n]
        assert completion.finish_reason == "length"
        counts = completion.metrics
        assert counts.steps == -(-n // 5)
        # All is accepted, so each step emits its drafts and one token more.
        assert counts.accepted == counts.proposed_depth == n - counts.steps


def test_past_the_path_stands_n(model):
    """As `Step` says, in a small bucket and after a cut: an ensemble looks these ids up."""
    state, settings = begin(model, NGRAM, [[3, 10, 5]], Request(8))  # no match: bucket 1 of 8
    node_BP = toys.quick(spec_step)(model, NGRAM, state, settings)[1].accepted.node_BP
    assert node_BP.tolist() == [[0, 8, 8, 8, 8]]
    state, settings = begin(model, perfect(KS), [[2]] * 7, Request(8, (1,)))
    node_BP = one_step(model, perfect(KS), state, settings)[1].accepted.node_BP
    # EOS is the third token: at most the root and two drafts are on the path.
    wanted = [[node if node <= min(k, 2) else 7 for node in range(7)] for k in KS]
    assert node_BP.tolist() == [*wanted, [7] * 7]


def test_no_draft_deeper_than_the_room_left(model):
    """HO-02, looked at node by node: with room r drafts have depth <= r - 1."""
    state, settings = begin(model, perfect(KS), [[2]] * 7, Request(8))
    room_B = np.array([8] * 7 + [0])
    for _ in range(8):
        state, step = one_step(model, perfect(KS), state, settings)
        depth_B = np.where(step.tree.valid_BN, step.tree.depth_BN, 0).max(axis=1)
        np.testing.assert_array_equal(depth_B, np.clip(room_B - 1, 0, [*KS, 0]))
        room_B -= np.asarray(step.accepted.count_B)
    assert not room_B.any()


def test_the_first_draft_is_verified(model):
    """HO-03: n-gram drafts 2 after 2 2 2, the target wants 7."""
    assert toys.decode(model, NGRAM, [[2, 2, 2]], 6) == [(CYCLE[:6], "length")]


def test_a_single_wrong_draft_is_never_kept(model):
    """HO-03: with k = 1 each round accepts nothing and emits one token."""
    wrong = toys.Limited(
        toys.scripted([(2, *CYCLE)] * 8, toys.chain(6), 11, right=0), jnp.ones(8, jnp.int32)
    )
    completion = generate(model, wrong, [[2]] * 5, Request(6))[0]
    assert completion.token_ids == CYCLE[:6]
    assert completion.metrics.accept_histogram == (6,)
    assert completion.metrics.steps == 6
    assert completion.metrics.proposed_depth == 5, "the last token leaves no room for a draft"


def test_rows_end_each_for_its_own_reason(model):
    """Budget, EOS at once, EOS later and an endless row side by side."""
    prompts = [[2], [4], [3], [5]]
    want = toys.plain_uncached(model, prompts, 9, eos=(2,))
    assert [reason for _, reason in want] == ["eos", "eos", "length", "length"]
    sequences = [(p, *toys.chain11_greedy(p, 30)) for (p,) in prompts]
    drafter = toys.Limited(
        toys.scripted([*sequences, *sequences], toys.chain(6), 11), jnp.full(8, 5, jnp.int32)
    )
    assert toys.decode(model, drafter, [*prompts, [2]], 9, eos_ids=(2,)) == [*want, want[0]]


def test_stream_yields_prefixes_and_ends_like_generate(model):
    request = Request(8, (2,))
    prompts = [[2]] * 4 + [[3]]
    sequences = [(2, *CYCLE)] * 4 + [(3, *toys.chain11_greedy(3, 30))] * 4
    inner = toys.scripted(sequences, toys.chain(6), 11)
    drafter = toys.Limited(inner, jnp.asarray([0, 1, 2, 3, 4, 0, 0, 0], jnp.int32))
    whole = generate(model, drafter, prompts, request)
    for steps in (1, 3):
        items = list(stream(model, drafter, prompts, request, steps))
        assert items[-1] == whole
        for item in items:
            for part, row in zip(item, whole, strict=True):
                assert row.token_ids[: len(part.token_ids)] == part.token_ids
    # The slowest row drafts nothing and takes a step for each of its five tokens.
    assert len(list(stream(model, drafter, prompts, request))) == 5
    with pytest.raises(ValueError, match="steps = 17"):
        next(stream(model, drafter, prompts, request, 17))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens = -1"),
        ({"max_new_tokens": 1, "run_limit": 0}, "run_limit = 0"),
        ({"max_new_tokens": 1, "stop": ("x",)}, "give token_bytes"),
        ({"max_new_tokens": 1, "stop": ("",), "token_bytes": lambda i: b""}, "no empty string"),
    ],
)
def test_requests_that_make_no_sense_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        Request(**values)
