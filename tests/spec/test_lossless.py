"""Whatever drafts, tokens and finish reason are those of plain decoding and of the uncached oracle.

Tiny random models, float32. Scripted drafters go through every branch of a shape: each row of one
batch has its own levels that are right and its own sibling that holds the right token at each
level. That the drafts are accepted as far as they are right is asserted too: a verifier that
accepts nothing would be lossless as well.
"""

import itertools
from collections.abc import Iterator

import pytest

from models.transformer import Transformer
from spec.drafters import ModelDrafter, NGramDrafter
from spec.drafters.protocol import Drafter
from spec.generate import Request, generate
from spec.tree_shapes import TreeShape, expansion
from tests.common import toys

PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3, 2, 1], [96, 0]]
N = 24
SHAPES = {
    "2,2,2": expansion((2, 2, 2)),
    "3,2": expansion((3, 2)),
    "1,1,3,1,1": expansion((1, 1, 3, 1, 1)),
    "4": expansion((4,)),
    "1,1,1,1": expansion((1, 1, 1, 1)),
    "2,1,3": expansion((2, 1, 3)),
    "unbalanced": toys.UNBALANCED,
}


def target(tied: bool) -> Transformer:
    return toys.tiny(0, tied_embeddings=tied)


def oracle(model: Transformer, eos: tuple[int, ...] = ()) -> list[toys.Continuation]:
    return toys.plain_uncached(model, PROMPTS, N, eos)


def branches(shape: TreeShape) -> Iterator[tuple[int, ...]]:
    """Every sequence of ranks that a script can put right: all prefixes of all combinations.

    Some lead out of an unbalanced shape: then what lies in it is right.
    """
    depth = shape.depth
    widths = [
        1 + max(rank for rank, at in zip(shape.rank, depth, strict=True) if at == level)
        for level in range(1, depth[-1] + 1)
    ]
    for right in range(depth[-1] + 1):
        yield from itertools.product(*map(range, widths[:right]))


def check_every_branch(model: Transformer, shape: TreeShape) -> None:
    want = oracle(model)
    ways = list(branches(shape))
    rows = [i % len(PROMPTS) for i in range(len(ways))]
    drafter = toys.scripted(
        [(*PROMPTS[row], *want[row][0]) for row in rows],
        shape,
        toys.VOCAB2,
        right=[len(way) for way in ways],
        rank=[(*way, *[0] * (shape.depth[-1] - len(way))) for way in ways],
    )
    done = generate(model, drafter, [PROMPTS[row] for row in rows], Request(N))
    for way, row, completion in zip(ways, rows, done, strict=True):
        assert (completion.token_ids, completion.finish_reason) == want[row], way
        levels = toys.accepted_levels(shape, len(way), way)
        assert completion.metrics.accept_histogram == toys.accept_histogram(levels, N), way


def test_branches_are_all_there():
    assert list(branches(expansion((2, 1)))) == [(), (0,), (1,), (0, 0), (1, 0)]
    assert len(set(branches(toys.UNBALANCED))) == 1 + 3 + 6 + 12 + 12


def test_plain_decoding_equals_the_oracle():
    """Ragged prompts in one batch, a cache, one token a step."""
    model = target(tied=False)
    want = oracle(model)
    assert toys.decode(model, toys.PLAIN, PROMPTS, N) == want
    end = want[2][0][9]  # a token in the middle of a text
    ended = oracle(model, (end, 95))
    assert {reason for _, reason in ended} == {"eos", "length"}
    assert toys.decode(model, toys.PLAIN, PROMPTS, N, eos_ids=(end, 95)) == ended


def test_every_branch_of_an_unbalanced_tree():
    check_every_branch(target(tied=True), toys.UNBALANCED)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_branch(name, tied):
    check_every_branch(target(tied), SHAPES[name])


def check_drafter(model: Transformer, drafter: Drafter) -> int:
    """Without and with end-of-sequence; returns the accepted drafts."""
    want = oracle(model)
    accepted = 0
    for eos in ((), (want[2][0][9],)):
        done = generate(model, drafter, PROMPTS, Request(N, eos))
        got = [(completion.token_ids, completion.finish_reason) for completion in done]
        assert got == oracle(model, eos)
        accepted += sum(completion.metrics.accepted for completion in done)
    return accepted


def test_ngram_drafter():
    drafter = NGramDrafter(window=3, min_match=1, matches=2, depth=4, sizes=(8,))
    assert check_drafter(target(tied=False), drafter) > 10


def test_the_target_as_its_own_drafter():
    """Its best guess is always right: each step accepts the whole depth, or what is left."""
    model = target(tied=False)
    shape = expansion((2, 2))
    drafter = ModelDrafter(model, shape, toys.VOCAB2)
    check_drafter(model, drafter)
    for completion in generate(model, drafter, PROMPTS, Request(N)):
        counts = completion.metrics
        assert counts.accept_histogram == toys.accept_histogram(2, N)
        assert counts.rank_histogram == (counts.steps,)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_another_model_as_drafter(name):
    """HO-13: one node, star, chain, comb; a model of other sizes that is seldom right."""
    draft = toys.tiny(5, num_layers=1, d_model=32)
    check_drafter(target(tied=True), ModelDrafter(draft, SHAPES[name], toys.VOCAB2))


@pytest.mark.slow
def test_the_tied_target_as_its_own_drafter():
    """A comb: the deepest path begins at the third child, all others end early."""
    model = target(tied=True)
    assert check_drafter(model, ModelDrafter(model, toys.UNBALANCED, toys.VOCAB2)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(1, 1, 8, 1, (1, 4, 16)), (4, 2, 8, 7, (1, 8))], ids=str)
def test_ngram_settings(settings):
    check_drafter(target(tied=True), NGramDrafter(*settings))


@pytest.mark.slow
def test_row_order_and_batch_size_do_not_matter():
    """Forwards, backwards and one prompt alone: counts included."""
    model = target(tied=False)
    drafter = ModelDrafter(toys.tiny(5), expansion((2, 1, 3)), toys.VOCAB2)
    want = generate(model, drafter, PROMPTS, Request(N, reserve=64))
    assert generate(model, drafter, PROMPTS[::-1], Request(N, reserve=64)) == want[::-1]
    for i, prompt in enumerate(PROMPTS):
        assert generate(model, drafter, [prompt], Request(N, reserve=64)) == [want[i]]
