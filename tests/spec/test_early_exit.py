"""HO-16: the target's first layers draft for it."""

import jax.numpy as jnp
import pytest

from models.transformer import Transformer, causal_mask
from spec.drafters import EarlyExitDrafter
from spec.drafters.early_exit import first_layers
from spec.draws import Children
from spec.generate import Request, generate, trace
from spec.tree_shapes import expansion
from tests.common import toys

PROMPTS = [[5, 9, 60], [3], [7] * 40]


@pytest.fixture(scope="module")
def target():
    return toys.tiny(3, num_layers=3)


def drafter(target, layers, shape=(2, 1, 1), how=Children.TOP_K):
    return EarlyExitDrafter(target.config, layers, expansion(shape), toys.VOCAB2, how)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_output_equals_plain_decoding(target, layers):
    plain = toys.decode(target, toys.PLAIN, PROMPTS, 24)
    assert toys.decode(target, drafter(target, layers), PROMPTS, 24) == plain


def test_all_layers_are_always_right(target):
    for done in generate(target, drafter(target, 3, (1, 1, 1)), PROMPTS, Request(24)):
        assert done.metrics.acceptance_rate == 1
        assert done.metrics.steps == 6


def test_it_reads_the_targets_own_history(target):
    """What is drafted, also after a rejection, is what the layers say of the text, uncached."""
    uncached = toys.quick(Transformer.__call__)
    text, short, rejected = list(PROMPTS[2]), first_layers(target, 1), 0
    for step in trace(target, drafter(target, 1, (1,)), [text], Request(12)):
        n = len(text)
        # One program for all lengths: what follows the text is masked.
        token_BT = jnp.asarray([[*text, *[0] * (64 - n)]], jnp.int32)
        out = uncached(short, token_BT, jnp.arange(64, dtype=jnp.int32)[None], causal_mask(1, 64))
        drafted = int(step.tree.token_BN[0, 1])
        assert int(out.logits_BNV[0, n - 1].argmax()) == drafted
        accepted = int(step.accepted.count_B[0]) == 2
        text += [drafted] * accepted + [int(step.accepted.bonus_B[0])]
        rejected += not accepted
        if len(text) > len(PROMPTS[2]) + 10:
            break
    assert rejected


def test_beyond_the_last_layer(target):
    with pytest.raises(ValueError, match="has 3, choose"):
        drafter(target, 4)
