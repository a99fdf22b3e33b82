"""What is counted: HO-17 exactly, cuts, trees, sums, and acceptance by rank."""

import itertools
import math

import numpy as np
import pytest

from spec.generate import Request, generate, stream
from spec.metrics import Metrics, record_size, total
from spec.tree_shapes import expansion
from tests.common import toys
from tests.common.scripted import ScriptedDrafter

CYCLE = toys.chain11_greedy(2, 60)


@pytest.fixture(scope="module")
def model():
    return toys.chain11()


def spoiled(*positions: int) -> tuple[int, ...]:
    """The target's sequence after [2], wrong at these absolute positions."""
    script = [2, *CYCLE]
    for at in positions:
        script[at] = (script[at] + 1) % 11
    return tuple(script)


RIGHT = (2, *CYCLE)
# Root at 0: positions 1-4 accepted, 5 is the bonus. Root at 5: 6 is wrong, so 0 accepted and 6 is
# emitted. Root at 6: 7-9 accepted, 10 is wrong and emitted. Accepts 4, 0, 3 with k = 4.
HO17 = spoiled(6, 10)
# The same round by round as records: accepted, rank, drafts at each of four depths.
HO17_RECORDS = {0: (4, 0, 1, 1, 1, 1), 5: (0, -1, 1, 1, 1, 1), 6: (3, 0, 1, 1, 1, 1)}


def chain4(script: tuple[int, ...], right: list[int] | None = None) -> ScriptedDrafter:
    """k = 4 in two rows: one program for all tests."""
    return toys.scripted([script] * 2, toys.chain(4), 11, right)


def records(steps: dict[int, tuple[int, ...]], tokens: int) -> np.ndarray:
    out = np.full((tokens, record_size(4)), -1, np.int32)
    for at, record in steps.items():
        out[at] = record
    return out


def assert_ho17(counts: Metrics) -> None:
    """The numbers of case HO-17, which derives them: 12 proposed, 7 accepted in 3 rounds."""
    assert (counts.proposed_depth, counts.accepted, counts.tokens, counts.steps) == (12, 7, 10, 3)
    assert counts.acceptance_rate == pytest.approx(0.583333, abs=1e-6)
    assert counts.mean_accept_length == pytest.approx(3.333333, abs=1e-6)
    assert counts.tokens_per_step == pytest.approx(10 / 3)
    assert counts.position_rates() == pytest.approx((2 / 3, 2 / 3, 2 / 3, 1 / 3))
    assert counts.accept_histogram == (1, 0, 0, 1, 1)


def test_ho17_from_records():
    assert_ho17(Metrics.from_records(records(HO17_RECORDS, 10)))


def test_ho17_in_a_real_run(model):
    """The first three steps of a longer run."""
    third = next(itertools.islice(stream(model, chain4(HO17), [[2]] * 2, Request(16)), 2, None))[0]
    assert third.token_ids == CYCLE[:10]
    assert_ho17(third.metrics)
    assert third.metrics.proposed_nodes == 12, "a chain's nodes are its depth"


def test_ho17_at_the_end_of_the_budget(model):
    """With 10 tokens to emit, the last round has room for 3 drafts: 11 proposed, all else as is."""
    counts = generate(model, chain4(HO17), [[2]] * 2, Request(10))[0].metrics
    assert (counts.proposed_depth, counts.accepted, counts.tokens, counts.steps) == (11, 7, 10, 3)


def test_a_run_cut_by_eos(model):
    """7 0 1 4 accepted, EOS 1: three drafts count as both, the fourth as neither."""
    counts = generate(model, chain4(RIGHT), [[2]] * 2, Request(16, (1,)))[0].metrics
    assert (counts.tokens, counts.steps) == (3, 1)
    assert (counts.accepted, counts.proposed_depth, counts.proposed_nodes) == (3, 3, 3)
    assert counts.acceptance_rate == 1
    assert counts.position_rates() == (1, 1, 1)


def test_eos_as_the_token_after_the_drafts_cuts_nothing(model):
    """One right draft, then the target's own 0 ends the row: three drafts were refused."""
    counts = generate(model, chain4(spoiled(2)), [[2]] * 2, Request(16, (0,)))[0].metrics
    assert (counts.tokens, counts.steps, counts.accepted, counts.proposed_depth) == (2, 1, 1, 4)


@pytest.mark.parametrize(
    ("kept", "accepted", "depth"),
    [
        (0, 0, 0),
        (1, 1, 1),  # the token is the first draft of a step that accepted four
        (4, 4, 4),
        (5, 4, 4),  # whole: the fifth is the target's own
        (6, 4, 8),  # whole again, the second step accepted none of four
        (8, 6, 10),  # two of the third step's three
        (9, 7, 11),
        (10, 7, 12),
    ],
)
def test_a_run_cut_by_a_stop_string(model, kept, accepted, depth):
    """Only whole tokens before the string are kept; records say what their steps did."""
    counts = Metrics.from_records(records(HO17_RECORDS, 10)[:kept])
    assert counts.tokens == kept
    assert (counts.accepted, counts.proposed_depth) == (accepted, depth)
    assert counts.steps == sum(at < kept for at in HO17_RECORDS)
    assert sum(counts.accept_histogram) == counts.steps


def test_a_stop_string_cuts_the_drafts_beyond_it(model):
    """ "bc" in "abcd": one token is kept, one draft counts."""
    letters = {7: b"a", 0: b"b", 1: b"c", 4: b"d", 2: b"e"}
    request = Request(16, stop=("bc",), token_bytes=letters.__getitem__)
    counts = generate(model, chain4(RIGHT), [[2]] * 2, request)[0].metrics
    assert (counts.tokens, counts.steps, counts.accepted, counts.proposed_depth) == (1, 1, 1, 1)
    assert counts.proposed_nodes == 1


def test_a_cut_counts_the_whole_levels_of_a_tree():
    """<3,2>: 3 drafts, then 6. Cut after the first draft 3 count, uncut 9."""
    record = {0: (2, 1, 3, 6, 0, 0)}
    cut, whole = (Metrics.from_records(records(record, 3)[:kept]) for kept in (1, 3))
    assert (cut.accepted, cut.proposed_depth, cut.proposed_nodes) == (1, 1, 3)
    assert (whole.accepted, whole.proposed_depth, whole.proposed_nodes) == (2, 2, 9)


def test_trees_report_nodes_and_depth_apart(model):
    """<2,2>: 6 drafts of depth 2; the right path by ranks 1, 0; 7 tokens in steps of 3, 3, 1."""
    drafter = toys.scripted([RIGHT], expansion((2, 2)), 11, rank=[(1, 0)])
    counts = generate(model, drafter, [[2]], Request(7))[0].metrics
    assert (counts.steps, counts.accepted, counts.tokens) == (3, 4, 7)
    # The last step has room for one token, hence no draft.
    assert (counts.proposed_depth, counts.proposed_nodes) == (4, 12)
    assert counts.acceptance_rate == 1
    assert counts.rank_histogram == (0, 3)


def test_totals_are_sums_not_means_of_means(model):
    """A row that accepts all and a longer one that accepts nothing."""
    drafter = chain4(RIGHT, right=[4, 0])
    rows = [done.metrics for done in generate(model, drafter, [[2]] * 2, Request(10))]
    both = total(rows)
    # Row 0: two steps of 4 drafts. Row 1: ten steps, with 4 4 4 4 4 4 3 2 1 0 drafts.
    assert [row.proposed_depth for row in rows] == [8, 30]
    assert (both.tokens, both.steps, both.accepted, both.proposed_depth) == (20, 12, 8, 38)
    assert both.acceptance_rate == 8 / 38 != sum(row.acceptance_rate for row in rows) / 2
    assert both.accept_histogram == (10, 0, 0, 0, 2)
    assert both.mean_accept_length == 1 + 8 / 12
    assert total([]) == Metrics(0, 0, 0, 0, 0, (), ())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_success_within_k_on_the_targets_own_path(model, rank):
    """One token a step: every position is a root, and the right child always is the same one."""
    drafter = toys.scripted([RIGHT], expansion((3,)), 11, rank=[(rank,)])
    done = generate(model, drafter, [[2]], Request(9, run_limit=1))[0]
    assert done.token_ids == CYCLE[:9]
    counts = done.metrics
    assert counts.steps == 9
    assert counts.rank_histogram == (0,) * rank + (9,), "the last one too, though none fits there"
    assert [counts.success_within(k) for k in range(4)] == [float(k > rank) for k in range(4)]
    assert counts.accepted == 8, "what did not fit was not accepted"


def test_nothing_proposed_and_nothing_emitted(model):
    plain = generate(model, toys.PLAIN, [[2]], Request(5))[0].metrics
    assert (plain.tokens, plain.steps, plain.accepted, plain.proposed_depth) == (5, 5, 0, 0)
    assert plain.tokens_per_step == plain.mean_accept_length == 1
    assert math.isnan(plain.acceptance_rate)
    assert plain.position_rates() == ()
    empty = Metrics.from_records(records({}, 0))
    assert (empty.tokens, empty.steps, empty.accept_histogram) == (0, 0, ())
    assert math.isnan(empty.mean_accept_length)
    assert math.isnan(empty.tokens_per_step)
    assert math.isnan(empty.success_within(1))
    assert empty.position_rates() == ()
