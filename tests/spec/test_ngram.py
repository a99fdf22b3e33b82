"""The n-gram drafter: exact trees for known histories, its state, and HO-04."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec.drafters import NGramDrafter, Step, View
from spec.generate import Request, stream
from tests.common import toys

S = 24
SMALL = NGramDrafter(window=3, min_match=1, matches=4, depth=4, sizes=(1, 8))


def start(drafter, histories, width=S):
    token_BT = np.zeros((len(histories), width), np.int32)
    for row, history in enumerate(histories):
        token_BT[row, : len(history)] = history
    length_B = jnp.asarray([len(history) for history in histories], jnp.int32)
    return drafter.init(jnp.asarray(token_BT), length_B, None, width, drafter.depth + 1)


@toys.quick
def _propose(drafter, state):
    root_B = jnp.take_along_axis(
        state.token_BS, jnp.maximum(state.length_B - 1, 0)[:, None], axis=1
    )[:, 0]
    # The drafter looks at its own history and the root only.
    return drafter.propose(state, View(root_B, None, None, None, None, None, None), None)[0]


def drafts(drafter, *histories, state=None) -> list[list[tuple[int, ...]]]:
    """Of every row the paths of all drafts in slot order, without the root."""
    tree = _propose(drafter, start(drafter, histories) if state is None else state)
    assert tree.size == drafter.buckets[-1]
    out = []
    for row, length in enumerate(np.asarray(tree.valid_BN).sum(axis=1)):
        assert np.asarray(tree.valid_BN)[row, :length].all(), "valid slots come first"
        spelled = toys.paths(tree, row)
        depth = np.asarray(tree.depth_BN)[row]
        assert all(len(path) == depth[i] + 1 for i, path in spelled.items())
        out.append([path[1:] for i, path in spelled.items() if i])
    return out


def naive(history, window, min_match, matches, depth, size, unsure=None) -> list[tuple[int, ...]]:
    """The documented rule, one match after another."""
    found = []
    for end in range(len(history) - 1):
        run = 0
        while run < min(window, end + 1) and history[end - run] == history[-1 - run]:
            run += 1
        if run >= min_match:
            found.append((-run, -end))
    votes: dict[tuple[int, ...], int] = {}
    for run, end in sorted(found)[:matches]:
        after = history[1 - end :][:depth]
        for i in range(len(after)):
            path = tuple(after[: i + 1])
            votes[path] = votes.get(path, 0) + 4**-run
    if unsure is not None and (-window not in [run for run, _ in found]):
        size = unsure
    # A stable sort keeps earlier matches first among equals, and dicts keep their order.
    kept = set(sorted(votes, key=lambda path: -votes[path])[: size - 1])
    return [path for path in votes if path in kept]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ((1,), []),
        ((1, 2), []),
        ((1, 2, 3), []),
        # One match, its continuation runs into the suffix itself.
        ((5, 1, 5), [(1,), (1, 5)]),
        # The suffix may not match itself, but may overlap the match (HO-03): 2 after 2 2, and
        # 2 2 after the shorter match at the start.
        ((2, 2, 2), [(2,), (2, 2)]),
        # Two continuations of 1 2, the most recent first; they share the root only.
        (
            (1, 2, 5, 1, 2, 6, 1, 2),
            [(6,), (6, 1), (6, 1, 2), (5,), (5, 1), (5, 1, 2), (5, 1, 2, 6)],
        ),
        # Two continuations that begin alike are fused up to where they differ.
        ((1, 8, 5, 1, 8, 6, 1), [(8,), (8, 6), (8, 6, 1), (8, 5), (8, 5, 1), (8, 5, 1, 8)]),
    ],
)
def test_trees_of_known_histories(history, expected):
    assert drafts(SMALL, history) == [expected]


@pytest.mark.parametrize(
    ("drafter", "history", "expected"),
    [
        # Weights 4^length: 5 follows 1 twice (8), the more recent 6 once (4).
        (NGramDrafter(1, 1, 4, 1, (2,)), (1, 5, 1, 5, 1, 6, 1), [(5,)]),
        # Equal weights: the most recent.
        (NGramDrafter(1, 1, 4, 1, (2,)), (1, 5, 1, 6, 1), [(6,)]),
        # A match of two (16) outweighs three of one (12), although they are more recent ...
        (NGramDrafter(2, 1, 8, 1, (2,)), (7, 1, 5, 1, 6, 1, 6, 1, 6, 7, 1), [(5,)]),
        # ... ties with four, where the longer comes first, and loses to five.
        (NGramDrafter(2, 1, 8, 1, (2,)), (7, 1, 5, *[1, 6] * 4, 7, 1), [(5,)]),
        (NGramDrafter(2, 1, 8, 1, (2,)), (7, 1, 5, *[1, 6] * 5, 7, 1), [(6,)]),
        # Only `matches` of them are looked at: the longest, then the most recent.
        (NGramDrafter(2, 1, 1, 1, (4,)), (7, 1, 5, 1, 6, 7, 1), [(5,)]),
        (NGramDrafter(2, 1, 2, 1, (4,)), (1, 4, 7, 1, 5, 1, 6, 7, 1), [(5,), (6,)]),
        # A window of one does not tell 7 1 from 3 1.
        (NGramDrafter(1, 1, 1, 1, (4,)), (7, 1, 5, 1, 6, 7, 1), [(6,)]),
        # Matches shorter than min_match are none.
        (NGramDrafter(3, 2, 8, 1, (4,)), (7, 1, 5, 1, 6, 7, 1), [(5,)]),
        (NGramDrafter(3, 2, 8, 1, (4,)), (1, 6, 7, 1), []),
        # No deeper than `depth`, no more drafts than fit.
        (NGramDrafter(3, 1, 4, 2, (8,)), (1, 2, 3, 4, 1), [(2,), (2, 3)]),
        (NGramDrafter(3, 1, 4, 4, (3,)), (1, 2, 3, 4, 1), [(2,), (2, 3)]),
        # Fewer behind matches that are shorter than the window.
        (NGramDrafter(2, 1, 4, 4, (4,), 2), (1, 2, 3, 4, 1), [(2,)]),
        (NGramDrafter(2, 1, 4, 4, (4,), 2), (1, 2, 3, 4, 1, 2), [(3,), (3, 4), (3, 4, 1)]),
        (NGramDrafter(2, 1, 4, 4, (4,), 1), (1, 2, 3, 4, 1), []),
    ],
)
def test_each_setting(drafter, history, expected):
    assert drafts(drafter, history) == [expected]


@pytest.mark.parametrize(
    "settings", [(3, 1, 4, 4, 8), (1, 1, 8, 3, 4), (4, 2, 3, 5, 24, 3)], ids=str
)
def test_random_histories_follow_the_documented_rule(settings):
    """Two and three letters, so that matches of all lengths, fusions and ties are everywhere."""
    window, min_match, matches, depth, size, *unsure = settings
    drafter = NGramDrafter(window, min_match, matches, depth, (1, size), *unsure)
    rng = np.random.default_rng(size)
    histories = [
        tuple(rng.integers(0, rng.integers(2, 4), rng.integers(1, S)).tolist()) for _ in range(256)
    ]
    for history, got in zip(histories, drafts(drafter, *histories), strict=True):
        assert got == naive(history, *settings), history


def step(path, bonus, count) -> Step:
    width = SMALL.depth + 1
    padded = jnp.asarray([[*path, *[0] * (width - len(path))]], jnp.int32)
    return Step(padded, padded, jnp.asarray([count], jnp.int32), None, jnp.asarray([bonus]))


def test_history_follows_what_was_accepted():
    state = start(SMALL, [(1, 2, 3)])
    state = SMALL.observe(state, step([3, 4, 5], 6, 3))
    assert state.token_BS[0, : int(state.length_B[0])].tolist() == [1, 2, 3, 4, 5, 6]
    state = SMALL.observe(state, step([6], 7, 1))
    assert state.token_BS[0, : int(state.length_B[0])].tolist() == [1, 2, 3, 4, 5, 6, 7]
    idle = SMALL.observe(state, step([9, 9], 9, 0))
    np.testing.assert_array_equal(idle.token_BS, state.token_BS)
    assert idle.length_B.tolist() == [7]
    state = SMALL.observe(state, step([7], 3, 1))
    assert drafts(SMALL, state=state) == drafts(SMALL, (1, 2, 3, 4, 5, 6, 7, 3))


def test_the_longest_window_still_drafts():
    """Matches of all 32 tokens. 4^64 would be infinite, and inf * 0 would silence the drafter."""
    long = NGramDrafter(32, 1, 8, 4, (1, 4))
    state = start(long, [(3, *[2, 7, 0, 1, 4] * 14)], 96)
    assert drafts(long, state=state) == [[(2,), (2, 7), (2, 7, 0)]]


def test_a_padding_row_gets_the_root_alone():
    assert drafts(SMALL, (), (5, 1, 5)) == [[], [(1,), (1, 5)]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"window": 0}, "at least 1"),
        ({"matches": 0}, "at least 1"),
        ({"depth": 0}, "at least 1"),
        ({"min_match": 0}, "at least 1"),
        ({"window": 2, "min_match": 3}, r"window must lie in 3 \(min_match\)"),
        ({"window": 33}, r"window must lie in .*\.\.32"),
        ({"sizes": (0, 4)}, "at least 1"),
        ({"sizes": (4, 1)}, "ascending"),
        ({"sizes": (4, 4)}, "ascending"),
        ({"unsure": 9}, r"unsure 9 must lie in 1\.\.8"),
    ],
)
def test_settings_that_cannot_draft_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        NGramDrafter(**values)


def test_short_histories_in_one_batch():
    """HO-04: length 1, shorter than the window, two tokens after the match, no match.

    Rule: suffixes of at most 3 tokens, shorter ones too, so 2 7 2 7 matches 2 7 and drafts 2 7.
    """
    model = toys.chain11()
    prompts = [[2], [2, 7], [2, 7, 2, 7], [3, 10, 5]]
    items = list(stream(model, SMALL, prompts, Request(20)))
    first = [completion.metrics.proposed_nodes for completion in items[0]]
    assert first == [0, 0, 2, 0]
    want = [toys.chain11_greedy(prompt[-1], 20) for prompt in prompts]
    assert [done.token_ids for done in items[-1]] == want
    # Every cycle has five tokens: once it has been seen, whole continuations are copied.
    assert all(completion.metrics.steps < 12 for completion in items[-1])
