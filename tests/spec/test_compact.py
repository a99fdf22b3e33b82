"""Rows that are finished leave the batch: the same tokens from fewer rows."""

import dataclasses

import numpy as np
import pytest

import spec.generate
from spec.drafters import EnsembleDrafter, ModelDrafter, NGramDrafter
from spec.draws import Children
from spec.generate import Request, generate, stream, warm_up
from tests.common import toys
from tests.spec.test_compiles import compilations

# In T1 the token 4 ends the cycle of 2 after 5 tokens at most; that of 3 never meets it.
PROMPTS = [[1], [3], [7, 0], [10]]
EOS = Request(24, (4,), vocab_size=11)


@pytest.fixture
def sizes(monkeypatch):
    """Rows of every call of the decoding program."""
    seen: list[int] = []
    program = spec.generate._advance

    def counted(*args):
        seen.append(args[2].root_B.shape[0])
        return program(*args)

    counted.lower, counted.eval_shape = program.lower, program.eval_shape
    monkeypatch.setattr(spec.generate, "_advance", counted)
    return seen


def compacted(request: Request) -> Request:
    return dataclasses.replace(request, compact=True)


def scripted():
    scripts = [(*p, *toys.chain11_greedy(p[-1], 60)) for p in PROMPTS]
    return toys.scripted(scripts, toys.chain(4), 11, right=[0, 1, 2, 3])


@pytest.mark.parametrize("how", ["greedy", "drawn"])
def test_the_same_completions(sizes, how):
    """Tokens, reasons, metrics, log-probabilities; with lookups, scripts, and each row's draws."""
    model, lookup = toys.chain11(), NGramDrafter(min_match=1, depth=2, sizes=(1, 3))
    drafter, request = EnsembleDrafter((scripted(), lookup)), EOS
    if how == "drawn":
        drafter = ModelDrafter(model, toys.chain(2), 11, Children.IID)
        request = dataclasses.replace(EOS, temperature=1.0, seed=5, logprobs=True)
    want = generate(model, drafter, PROMPTS, request)
    assert sizes == [4]
    assert generate(model, drafter, PROMPTS, compacted(request)) == want
    assert sizes[1:] == [4, 2, 1], "rows left one after the other"
    if how == "greedy":
        assert {done.finish_reason for done in want} == {"eos", "length"}


def test_attention_follows_the_rows(sizes):
    """A model with a cache that matters, rows of different lengths, and the limit as their end."""
    model = toys.tiny(max_positions=64)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 97, length).tolist() for length in (60, 3, 55, 40, 62)]
    drafter = ModelDrafter(toys.tiny(), toys.chain(2), 97)
    want = generate(model, drafter, prompts, Request(20))
    assert [len(done.token_ids) for done in want] == [4, 20, 9, 20, 2]
    got = generate(model, drafter, prompts, compacted(Request(20)))
    assert [done.token_ids for done in got] == [done.token_ids for done in want]
    assert sizes == [8, 8, 4, 2]


def test_stop_strings_and_streams(sizes):
    """The host ends rows as well; a stream keeps all rows and its pace."""
    model, drafter = toys.chain11(), scripted()
    names = {i: chr(97 + i).encode() for i in range(11)}
    request = dataclasses.replace(EOS, max_new_tokens=40, stop=("be",), token_bytes=names.get)
    want = generate(model, drafter, PROMPTS, request)
    assert [done.finish_reason for done in want] == ["eos", "length", "stop", "length"]
    sizes.clear()
    assert generate(model, drafter, PROMPTS, compacted(request)) == want
    assert sizes == [4, 1], "two segments"
    plain = [*stream(model, drafter, PROMPTS, request, 2)]
    sizes.clear()
    assert [*stream(model, drafter, PROMPTS, compacted(request), 2)] == plain
    assert (sizes[0], sizes[-1]) == (4, 1)
    assert plain[-1] == want


def test_warm_up_compiles_every_size():
    model, drafter = toys.chain11(), toys.scripted(
        [(token, *toys.chain11_greedy(token, 60)) for token in (1, 3, 0, 2)], toys.chain(3), 11
    )  # fmt: skip
    prompts = [[1], [3], [0], [2]]
    with compilations() as seen:
        warm_up(model, drafter, prompts, compacted(EOS))
    assert sum("advance" in each for each in seen) == 3
    seen.clear()
    with compilations() as seen:
        generate(model, drafter, prompts, compacted(EOS))
    assert not seen
