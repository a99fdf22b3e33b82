"""A prompt is read once: by chunks that the host counts, for whoever decodes it how often."""

import dataclasses

import jax
import numpy as np
import pytest

import spec.generate
import spec.reading
from experiments import generate as job
from experiments.common.setup import Loaded
from experiments.prompts.prompt import Prompt
from models.prefill import chunk_of, prefill
from spec.drafters import ModelDrafter, NGramDrafter, RootDrafter
from spec.generate import Request, finish, follow, generate, start, trace, warm_up
from spec.reading import read
from tests.common import toys

CHUNK = chunk_of(1024)
REQUEST = Request(8)


@pytest.fixture(scope="module")
def model():
    return toys.tiny()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 97, length).tolist() for length in (CHUNK + 9, 1, 7)]


@pytest.fixture
def chunks(monkeypatch):
    """Where the chunks began that the target has read."""
    seen: list[int] = []
    program = spec.reading._read_chunk

    def counted(*args):
        seen.append(int(args[3]))
        return program(*args)

    counted.lower, counted.eval_shape = program.lower, program.eval_shape
    monkeypatch.setattr(spec.reading, "_read_chunk", counted)
    return seen


def test_chunk_by_chunk_equals_at_once(model, prompts, chunks):
    told: list[int] = []
    prefilled = read(model, prompts, REQUEST, told.append)
    assert chunks == [0, CHUNK]
    assert told == [CHUNK + 6, 8]
    assert sum(told) == sum(len(prompt) - 1 for prompt in prompts)
    capacity = prefilled.cache.capacity
    whole = toys.quick(prefill, static_argnums=3)(
        model, prefilled.token_BT, prefilled.length_B, capacity
    )
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(
        (prefilled.cache, prefilled.hidden_BTID)), strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_nothing_is_read_of_one_token(model, chunks):
    prefilled = read(model, [[5]], REQUEST)
    assert not chunks
    assert prefilled.cache.length_B.tolist() == [0]


def test_one_reading_serves_everyone(model, prompts, chunks):
    """Plain, by a model that drafts, sampled, and step by step; in any order."""
    drafter = ModelDrafter(toys.tiny(1), toys.chain(3), 97)
    sampled = dataclasses.replace(REQUEST, temperature=1.0, seed=(3, 4, 5))
    sides = [(RootDrafter(), REQUEST), (drafter, REQUEST), (drafter, sampled)]
    want = [generate(model, each, prompts, request) for each, request in sides]
    steps = [*trace(model, drafter, prompts, REQUEST)]
    chunks.clear()
    prefilled = read(model, prompts, REQUEST)
    got = []
    for each, request in sides:
        state, settings = start(model, each, prefilled.copy(), request)
        got.append(finish(model, each, state, settings, 3, request))
    assert got == want
    last = [*follow(model, drafter, *start(model, drafter, prefilled, REQUEST))]
    assert chunks == [0, CHUNK]
    for a, b in zip(jax.tree.leaves(steps), jax.tree.leaves(last), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_budget_beyond_the_cache_is_refused(model):
    prefilled = read(model, [[1] * 60], Request(4))
    with pytest.raises(ValueError, match="budget of 69 tokens exceed the cache of 64"):
        start(model, RootDrafter(), prefilled, Request(9))


def test_warm_up_reads_nothing(model, prompts, chunks):
    warm_up(model, RootDrafter(), prompts, REQUEST)
    assert not chunks


@pytest.mark.parametrize("batch", [1, 2])
def test_the_command_reads_each_prompt_once(model, prompts, chunks, batch):
    """Both runs and the picture."""
    target = Loaded(model, None)
    asked = [Prompt(name, "chat", "eval", "") for name in "abc"]
    drafter = NGramDrafter(min_match=1, depth=3, sizes=(1, 4))
    request = dataclasses.replace(REQUEST, reserve=2 * CHUNK)
    rows, answers, best = job.run(target, drafter, asked, prompts, [0, 1, 2], request, batch)
    shown = [*best.steps(target, drafter)]
    assert chunks == [0, CHUNK, 0]  # b has one token; beside a it is read with it
    assert [row["prompt_tokens"] for row in rows] == [CHUNK + 9, 1, 7]
    assert [row["prefill_ms"] > 0 for row in rows] == [True, False, True]
    assert {row["identical"] for row in rows} == {"yes"}
    figures = [answer.metrics.tokens_per_step for answer in answers]
    assert best.tokens_per_step == max(figures)
    done = answers["abc".index(best.id)]
    assert sum(int(step.accepted.count_B[0]) for step in shown) == len(done.token_ids)
