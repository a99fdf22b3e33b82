"""Compilations: one program a bucket, whatever is accepted (HO-31); nothing returns to the host."""

import contextlib

import jax
import numpy as np
import pytest

from spec.decode import spec_step
from spec.drafters import ModelDrafter, NGramDrafter
from spec.generate import Request, begin, generate, stream, warm_up
from spec.tree_shapes import expansion
from tests.common import toys
from tests.common.scripted import ScriptedDrafter

# What jax 0.10.2 records for each program handed to XLA.
EVENT = "/jax/core/compile/backend_compile_duration"
CYCLE = toys.chain11_greedy(2, 100)


@contextlib.contextmanager
def compilations():
    """Yields a list that grows by one for every program compiled meanwhile."""
    seen: list[str] = []

    def listen(event: str, duration: float, **values: object) -> None:
        if event == EVENT:
            seen.append(str(values))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_counter_counts():
    with compilations() as seen:
        jax.jit(lambda x: x * 31 + 17)(np.float32(1))
        jax.jit(lambda x: x * 31 + 18)(np.float32(1))
    assert len(seen) == 2


@pytest.fixture(scope="module")
def model():
    return toys.chain11()


def pattern(right: int) -> ScriptedDrafter:
    return toys.scripted([(2, *CYCLE)], toys.chain(4), 11, right)


def prompts() -> list[list[int]]:
    """Twenty prompts of lengths 5 to 30 along the cycle, so that the script fits them."""
    return [[2, *CYCLE][:length] for length in np.linspace(5, 30, 20).astype(int)]


def test_accept_lengths_do_not_compile(model):
    """Accepts 0..4 in every step, prompts in two buckets, `generate` and `stream`."""
    for length in (5, 30):
        warm_up(model, pattern(4), [[2, *CYCLE][:length]], Request(20))
    steps = set()
    with compilations() as seen:
        for i, prompt in enumerate(prompts()):
            request = Request(17 + i % 16, (5,) * (i % 4))
            whole = generate(model, pattern(i % 5), [prompt], request)
            parts = list(stream(model, pattern(i % 5), [prompt], request, 1 + i % 3))
            assert parts[-1] == whole
            assert whole[0].token_ids == CYCLE[len(prompt) - 1 :][: 17 + i % 16]
            steps.add(len(whole[0].metrics.accept_histogram))
    assert steps == {1, 2, 3, 4, 5}, "all accept patterns occurred"
    assert not seen


def test_ragged_proposals_do_not_compile(model):
    """The n-gram drafter proposes 0 to 4 tokens; its small bucket is in the same program."""
    drafter = NGramDrafter(window=3, min_match=1, matches=2, depth=4, sizes=(1, 8))
    for length in (5, 30):
        warm_up(model, drafter, [[2, *CYCLE][:length]], Request(20))
    with compilations() as seen:
        for prompt in prompts():
            generate(model, drafter, [prompt], Request(20))
            generate(model, drafter, [[*prompt[:3], 3, 5]], Request(20))
    assert not seen


def test_batches_round_up(model):
    """Three rows run the program of four, in another mix of lengths."""
    drafter = toys.scripted([(2, *CYCLE)] * 4, toys.chain(4), 11, right=[0, 1, 2, 4])
    warm_up(model, drafter, [[2]] * 4, Request(20))
    with compilations() as seen:
        three = generate(model, drafter, [[2], [2, 7, 0], [2, 7]], Request(20))
    assert not seen
    assert [done.token_ids for done in three] == [CYCLE[:20], CYCLE[2:22], CYCLE[1:21]]


def test_stop_strings_run_the_same_program(model):
    """Segments, and rows finished by the host, need no program of their own."""
    drafter = pattern(0)
    warm_up(model, drafter, [[2]], Request(32))
    request = Request(32, stop=("zz",), token_bytes=lambda i: b"x")
    with compilations() as seen:
        done = generate(model, drafter, [[2]], request)[0]
    assert done.metrics.steps == 32, "two segments"
    assert not seen


def primitives(jaxpr) -> set[str]:
    """Names of all primitives of a jaxpr, those of its inner jaxprs included."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= primitives(inner)
    return names


def test_the_walk_sees_inner_programs():
    def body(x):
        jax.debug.callback(lambda y: None, x)
        return x + 1

    looped = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: body(y), x))
    nested = jax.make_jaxpr(jax.jit(lambda x: jax.lax.cond(x > 0, body, lambda y: y, x)))
    for made in (looped(1.0), nested(1.0)):
        assert any("callback" in name for name in primitives(made.jaxpr))


@pytest.mark.parametrize("kind", ["root", "n-gram", "model"])
def test_a_step_never_calls_the_host(kind):
    target = toys.tiny()
    drafter = {
        "root": toys.PLAIN,
        "n-gram": NGramDrafter(),
        "model": ModelDrafter(toys.tiny(1), expansion((2, 2)), 97),
    }[kind]
    state, settings = jax.eval_shape(lambda: begin(target, drafter, [[1, 2, 3]], Request(4)))
    made = jax.make_jaxpr(lambda *args: spec_step(*args)[0])(target, drafter, state, settings)
    names = primitives(made.jaxpr)
    assert {"dot_general", "scatter"} <= names, "the walk saw the target pass and the commit"
    assert not {
        name for name in names for word in ("callback", "infeed", "outfeed") if word in name
    }
    assert all(np.size(const) < 97 for const in made.consts), "a weight was closed over"
