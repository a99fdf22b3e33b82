"""The drafter's context and the target's: HO-05 and HO-06."""

import numpy as np
import pytest

from models.transformer import Transformer
from spec.drafters import ModelDrafter
from spec.generate import Request, generate
from spec.tree_shapes import TreeShape, expansion
from tests.common import toys

# 12 nodes; the deepest path, by ranks, is 1 0 1 0 0.
TREE12 = TreeShape((0, 0, 0, 1, 2, 2, 3, 4, 4, 6, 8, 10), (0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0))
DEEP = (1, 0, 1, 0, 0)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 97, length).tolist()


def with_limit(max_positions: int) -> Transformer:
    """The same weights, another limit."""
    return toys.tiny(1, tied_embeddings=True, max_positions=max_positions)


@pytest.fixture(scope="module")
def roomy():
    """By length of the prompt: what the weights say when no limit is near."""
    lengths = sorted({*LENGTHS, *range(26, 33)})
    return dict(
        zip(
            lengths,
            toys.plain_uncached(with_limit(128), [prompt(n) for n in lengths], NEW),
            strict=True,
        )
    )


DRAFTER_LIMIT, NEW = 24, 20
LENGTHS = (4, 20, 23, 24, 30)


def expected_counts(length: int, depth: int) -> tuple[int, int]:
    """Steps and accepted drafts of the target drafting for itself up to `DRAFTER_LIMIT`.

    A draft of depth d after a root at position r is read off position r + d - 1, which must exist.
    """
    root, left, steps, accepted = length - 1, NEW, 0, 0
    while left:
        drafts = max(min(depth, DRAFTER_LIMIT - root, left - 1), 0)
        steps, accepted = steps + 1, accepted + drafts
        root, left = root + drafts + 1, left - drafts - 1
    return steps, accepted


def test_a_drafter_with_a_shorter_context(roomy):
    """HO-05: a row past the drafter's limit goes on without drafts, its neighbours with theirs."""
    target = with_limit(64)
    drafter = ModelDrafter(with_limit(DRAFTER_LIMIT), expansion((2, 1)), 97)
    prompts = [prompt(length) for length in LENGTHS]
    want = [roomy[length] for length in LENGTHS]
    request = Request(NEW, reserve=64)
    together = generate(target, drafter, prompts, request)
    assert [(done.token_ids, done.finish_reason) for done in together] == want
    for length, row, beside in zip(LENGTHS, prompts, together, strict=True):
        # The whole completion, accept counts included, is that of the row among its likes.
        assert generate(target, drafter, [row] * 5, request) == [beside] * 5
        counts = beside.metrics
        assert (counts.steps, counts.accepted) == expected_counts(length, 2)
        assert counts.proposed_depth == counts.accepted, "only real drafts are counted"
    assert [done.metrics.proposed_nodes > 0 for done in together] == [True] * 4 + [False]
    assert together[0].metrics.accepted > 10 > together[2].metrics.accepted


@pytest.fixture(scope="module")
def at_the_limit(roomy):
    prompts = [prompt(length) for length in range(26, 33)]
    return with_limit(32), prompts, [roomy[len(row)] for row in prompts]


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [(toys.chain(5), (0,) * 5), (TREE12, DEEP)],
)
def test_the_output_ends_exactly_at_the_limit(at_the_limit, shape, ranks):
    """HO-06: k = 5 and a tree of 12 nodes, with 6, 5, .. 0 free positions.

    A prompt of exactly the limit gives 0 tokens in 0 steps.
    """
    target, prompts, roomy = at_the_limit
    assert toys.accepted_levels(shape, 5, ranks) == 5
    sequences = [(*row, *tokens) for row, (tokens, _) in zip(prompts, roomy, strict=True)]
    drafter = toys.scripted(sequences, shape, 97, rank=[ranks] * 7)
    for row, (tokens, _), done in zip(
        prompts, roomy, generate(target, drafter, prompts, Request(100)), strict=True
    ):
        room = 32 - len(row)
        assert len(row) + len(done.token_ids) == 32
        assert done.token_ids == tokens[:room]
        assert done.finish_reason == "length"
        counts = done.metrics
        assert counts.steps == -(-room // 6)
        assert counts.proposed_depth == counts.accepted == room - counts.steps


@pytest.mark.parametrize(
    ("prompts", "request_", "words"),
    [
        ([prompt(33)], Request(1), "Prompt 0 has 33 tokens, the limit is 32"),
        ([[1], prompt(9)], Request(1, max_length=8), "Prompt 1 has 9 tokens, the limit is 8"),
        ([[1]], Request(1, max_length=0), "Prompt 0 has 1 tokens, the limit is 0"),
        ([[1]], Request(1, max_length=33), "max_length = 33 exceeds the model's 32"),
        ([[1], []], Request(1), "Prompt 1 has no tokens"),
        ([], Request(1), "No prompts"),
    ],
)
def test_what_does_not_fit_is_refused(prompts, request_, words):
    with pytest.raises(ValueError, match=words):
        generate(with_limit(32), toys.PLAIN, prompts, request_)
