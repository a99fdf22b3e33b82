"""Adaptive control: whatever it chooses the text is the target's, and it chooses what pays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.feature import feature_model
from models.prune import prune
from spec.control import LEARN, AdaptiveDrafter, Odds, Option, _fallen_back, _learned
from spec.decode import advance
from spec.drafters import FeatureDrafter, ModelDrafter, NGramDrafter
from spec.draws import Children
from spec.generate import Request, begin, generate
from spec.metrics import total
from spec.tree_shapes import expansion
from tests.common import toys

PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 9, 8, 7, 9, 8], [96, 0]]
N = 32
OPTIONS = (Option(1, False), Option(4, False), Option(8, False), Option(1, True), Option(4, True))
IDS = np.arange(0, toys.VOCAB2, 2, dtype=np.int32)


@pytest.fixture(scope="module")
def target():
    return toys.tiny(0)


@pytest.fixture(scope="module")
def plain(target):
    return toys.decode(target, toys.PLAIN, PROMPTS, N)


def adaptive(model, seconds=(1.0, 1.2, 1.5, 1.3, 1.6), forced=-1, first=0.5, **changes):
    window = 3
    lookup = NGramDrafter(window=window, depth=7, sizes=(1, 8))
    odds = Odds(jnp.full(window + 1, first), jnp.full(window + 1, 0.5))
    prior = Odds(jnp.asarray(0.5), jnp.asarray(0.5))
    options = OPTIONS if model is not None else OPTIONS[:3]
    given = {
        "lookup": lookup,
        "model": model,
        "lookup_prior": odds,
        "model_prior": prior,
        "seconds_O": jnp.asarray(seconds[: len(options)], jnp.float32),
        "forced": jnp.asarray(forced, jnp.int32),
        "options": options,
    }
    return AdaptiveDrafter(**{**given, **changes})


def models(target):
    feature = feature_model(prune(target, [0], IDS), nnx.Rngs(0))
    shape = expansion((2, 1))
    yield ModelDrafter(toys.tiny(1), shape, toys.VOCAB2, lag=5)
    yield FeatureDrafter(feature, shape, toys.VOCAB2, jnp.asarray(IDS), lag=5)


@pytest.mark.parametrize("which", range(2))
def test_every_option_gives_the_targets_text(target, plain, which):
    model = list(models(target))[which]
    drafter = adaptive(model)
    assert toys.decode(target, drafter, PROMPTS, N) == plain
    for forced in range(len(OPTIONS)):
        fixed = dataclasses.replace(drafter, forced=jnp.asarray(forced, jnp.int32))
        assert toys.decode(target, fixed, PROMPTS, N) == plain, OPTIONS[forced]


def test_lookups_alone(target, plain):
    assert toys.decode(target, adaptive(None), PROMPTS, N) == plain


def test_a_model_that_waited_drafts_as_if_it_had_read_all_along(target):
    """Off for a while (its queue overflows and must be read), then on: accepts all again."""
    model = ModelDrafter(target, expansion((1, 1)), toys.VOCAB2, lag=5)
    # Free steps at first: drafting nothing looks best until the model's odds are looked at.
    off = adaptive(model, forced=0)
    on = adaptive(model, forced=3)
    always = total(d.metrics for d in generate(target, on, PROMPTS, Request(N)))
    assert always.mean_accept_length == pytest.approx(3, abs=0.2)

    state, settings = begin(target, off, PROMPTS, Request(N))
    run = jax.jit(advance)
    state, _ = run(target, off, state, settings, np.int32(17))
    assert int(state.drafter.model.count_B.max()) <= 5 + 8  # never more than its queue holds
    before = np.asarray(state.emitted_B)
    state, _ = run(target, on, state, settings, np.int32(4))
    np.testing.assert_array_equal(np.asarray(state.emitted_B) - before, [12] * 4)


def test_odds_follow_what_was_seen_and_fall_back():
    """A lookup right again and again, then wrong: its worth rises, falls, and recovers unused."""
    prior = Odds(jnp.asarray(0.5), jnp.asarray(0.5))
    now = prior

    def after(odds, right, steps):
        for _ in range(steps):
            odds = _fallen_back(odds, prior, jnp.asarray(True))
            some = [jnp.asarray(x) for x in (max(right, 0), 7, 4, right >= 0)]
            odds = _learned(odds, *some)
        return odds

    good = after(now, 4, 30)
    assert good.first > 0.9
    assert good.next > 0.9
    bad = after(good, 0, 30)
    assert bad.first < 0.1
    # A miss at the first guess says nothing about the next ones, which only fall back.
    assert 0.5 < bad.next < good.next
    rested = after(bad, -1, 60)
    assert rested.first > 0.3


def test_a_trial_needs_a_token_to_compare_with():
    """Four tokens emitted, all guessed right: no miss. Two guessed right of four: one miss."""
    odds = Odds(jnp.asarray(0.5), jnp.asarray(0.5))
    yes = jnp.asarray(True)
    some = [jnp.asarray(x) for x in (4, 7, 4)]
    assert _learned(odds, *some, yes).next == pytest.approx(1 - 0.5 * (1 - LEARN) ** 3)
    some = [jnp.asarray(x) for x in (2, 7, 4)]
    share = 0.5  # one hit, one miss
    assert _learned(odds, *some, yes).next == pytest.approx(share)
    some = [jnp.asarray(x) for x in (1, 7, 1)]
    assert _learned(odds, *some, yes).next == 0.5
    assert _learned(odds, *some, yes).first == pytest.approx(0.5 + 0.5 * LEARN)


def test_costs_decide(target):
    """Where a step of eight nodes costs what one does, it drafts; where it costs eight, never."""
    cheap = adaptive(None, seconds=(1.0, 1.0, 1.0))
    dear = adaptive(None, seconds=(1.0, 4.0, 8.0))
    prompts = [[4, 5, 6] * 8]
    drafted = [
        generate(target, drafter, prompts, Request(N))[0].metrics.proposed_nodes
        for drafter in (cheap, dear)
    ]
    assert drafted[0] > 0
    assert drafted[1] == 0


def test_sampled_tokens_do_not_depend_on_what_is_chosen(target):
    """The point-mass rule: equal draws whatever the tree (and so the target's law)."""
    request = Request(N, temperature=0.9, seed=5)
    want = generate(target, toys.PLAIN, PROMPTS, dataclasses.replace(request, rule="naive"))
    got = generate(target, adaptive(next(models(target))), PROMPTS, request)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]


def test_one_program_serves_all_costs_and_choices(target):
    """Costs and forced options are arrays: measuring and decoding share what was compiled."""
    compiled = []
    run = jax.jit(lambda drafter: compiled.append(1) or drafter.seconds_O.sum())
    for forced, cost in ((-1, 1.0), (2, 3.0)):
        run(adaptive(None, seconds=(1.0, cost, 2.0), forced=forced))
    assert len(compiled) == 1


def test_refusals(target):
    sampled = ModelDrafter(target, expansion((2, 1)), toys.VOCAB2, Children.IID, lag=5)
    with pytest.raises(ValueError, match="top_k"):
        adaptive(sampled)
    with pytest.raises(ValueError, match="lag is 0"):
        adaptive(dataclasses.replace(sampled, how=Children.TOP_K, lag=0))
    with pytest.raises(ValueError, match="draft nothing"):
        adaptive(None, options=(Option(4, False), Option(8, False)))
    with pytest.raises(ValueError, match="8 nodes of the lookup"):
        adaptive(None, options=(Option(1, False), Option(4, False)))
    with pytest.raises(ValueError, match="ask for a model"):
        adaptive(None, options=OPTIONS)
