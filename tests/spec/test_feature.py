"""The feature drafter: lossless whatever it drafts, and what it reads is what was trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.feature import feature_model
from models.losses import Batch
from models.prune import prune
from models.stages import (
    join,
    llama_stages,
    split,
    with_own_features,
    with_teacher,
)
from models.transformer import causal_mask
from parallel.comm import LOCAL
from parallel.stages import forward, forward_loss
from parallel.train import init_state, make_train_step
from spec.drafters import EnsembleDrafter, FeatureDrafter, NGramDrafter
from spec.draws import Children
from spec.generate import Request, generate, trace
from spec.tree_shapes import expansion
from tests.common import toys

IDS = np.arange(0, toys.VOCAB2, 2, dtype=np.int32)
PROMPTS = [[5, 9, 60], [3], [7] * 40]
LONG = 24


def untrained(target, ids=IDS):
    """Reads the target's taps, each as much as its last state."""
    model = feature_model(prune(target, [0], ids), nnx.Rngs(0), target.taps)
    if target.taps:
        D = target.config.d_model
        model.mix_IDD[...] = jnp.tile(jnp.eye(D)[None], (len(target.taps) + 1, 1, 1))
    return model


def drafter(model, shape=(2, 1, 1), how=Children.TOP_K, ids=IDS):
    return FeatureDrafter(model, expansion(shape), toys.VOCAB2, jnp.asarray(ids), how)


@pytest.fixture(scope="module", params=[(), (0,)], ids=["last", "tapped"])
def target(request):
    model = toys.tiny(3)
    model.taps = request.param
    return model


def test_output_equals_plain_decoding(target):
    plain = toys.decode(target, toys.PLAIN, PROMPTS, 24)
    mine = drafter(untrained(target))
    assert toys.decode(target, mine, PROMPTS, 24) == plain
    assert toys.decode(target, EnsembleDrafter((NGramDrafter(), mine)), PROMPTS, 24) == plain


def test_features_and_teacher_come_from_the_targets_states(target):
    """Two documents in a row: each token beside the state before it, and what follows it."""
    model = untrained(target)
    token = jnp.asarray([[5, 9, 60, 3, 7]], jnp.int32)
    position = jnp.asarray([[0, 1, 2, 0, 1]], jnp.int32)
    zero = jnp.zeros_like(token)
    plain = Batch(token, position, zero, zero, jnp.ones(token.shape))
    batch = dataclasses.replace(plain, hidden_BTID=hidden_of(target, token))
    stages, params = llama_stages(model.config, frozen=("embed_VD",)), split(model)
    final = batch.hidden_BTID.sum(2)  # see `untrained`; alone, it is the last
    before = jnp.stack([jnp.zeros_like(final[:, 0]), final[:, 0], final[:, 1]] * 2, axis=1)[:, :5]
    before = before.at[:, 4].set(final[:, 3])
    fused = model.fuse(model.decoder.embed(token), before, LOCAL)
    found = stages.embed(params.outer, batch, LOCAL)
    np.testing.assert_allclose(found, fused, rtol=1e-5, atol=1e-5)
    taught = with_teacher(params, batch)
    logits = target(token, zero + jnp.arange(5, dtype=jnp.int32)[None], causal_mask(1, 5))
    np.testing.assert_allclose(
        taught.teacher.logit_BTk, logits.logits_BNV[..., IDS], rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ValueError, match="no hidden_BTID"):
        with_teacher(params, plain)


@toys.quick
def hidden_of(target, token_BT):
    n = token_BT.shape[1]
    position = jnp.arange(n, dtype=jnp.int32)[None]
    return target(token_BT, position, causal_mask(1, n)).hidden_BNID


def test_taps_are_the_states_between_blocks():
    """The final norm of a decoder that ends there is the tap, scaled."""
    target = toys.tiny(3)
    target.taps = (0, 1)
    token = jnp.asarray([PROMPTS[0]], jnp.int32)
    states = hidden_of(target, token)
    assert states.shape == (1, 3, 3, target.config.d_model)
    for block in target.taps:
        ends = prune(target, range(block + 1), IDS)
        scale_D = ends.final_norm.scale_D[...][None, None]
        last = hidden_of(ends, token)[:, :, -1]
        np.testing.assert_allclose(states[:, :, block] * scale_D, last, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(states[:, :, 1] * scale_D, states[:, :, 2], rtol=1e-5, atol=1e-5)


def batch_of(target, text, ids):
    """One row as training sees it."""
    row = {int(token): i for i, token in enumerate(ids)}
    token = np.asarray([text[:-1]], np.int32)
    hidden = hidden_of(target, jnp.asarray(token))
    label = [row.get(t, 0) for t in text[1:]]
    return Batch(
        token_BT=jnp.asarray(token),
        position_BT=jnp.arange(token.shape[1], dtype=jnp.int32)[None],
        segment_BT=jnp.zeros(token.shape, jnp.int32),
        label_BT=jnp.asarray([label], jnp.int32),
        weight_BT=jnp.asarray([[float(t in row) for t in text[1:]]]),
        hidden_BTID=hidden,
    )


def test_what_is_drafted_is_what_training_computes(target):
    """First drafts from the target's features, second drafts from the drafter's own."""
    model = untrained(target)
    text = list(PROMPTS[0])
    stages = llama_stages(model.config, frozen=("embed_VD",))
    params = split(model)

    @toys.quick
    def logits_of(batch):
        both = with_own_features(stages, params, batch)
        return stages.head(params.outer, forward(stages, params, both), LOCAL)[0]

    for count, step in enumerate(trace(target, drafter(model, (1, 1)), [text], Request(12))):
        drafted = [int(token) for token in step.tree.token_BN[0, 1:]]
        # One program for all lengths: what follows the drafts is masked.
        n = len(text)
        batch = batch_of(target, [*text, drafted[0], *[0] * (LONG - n)], IDS)
        logits = logits_of(batch)
        assert (
            int(IDS[logits[n - 1].argmax()]) == drafted[0]
        )  # after the root, the target's feature
        assert int(IDS[logits[LONG + n].argmax()]) == drafted[1]  # after the draft, its own
        accepted = int(step.accepted.count_B[0]) - 1
        text += [*drafted[:accepted], int(step.accepted.bonus_B[0])]
        if count == 4:
            break


def test_it_learns_to_draft(target):
    """Overfits one text of the target: every draft is right, tree levels included."""
    (plain,) = generate(target, toys.PLAIN, [PROMPTS[0]], Request(40))
    text = [*PROMPTS[0], *plain.token_ids]
    ids = np.unique(np.asarray(text, np.int32))
    model = untrained(target, ids)
    stages = llama_stages(model.config, frozen=("embed_VD",))
    batch, optimizer = batch_of(target, text, ids), optax.adam(1e-2)
    step = make_train_step(stages, optimizer)
    prepare = jax.jit(lambda params: with_own_features(stages, params, batch))
    state = init_state(split(model), optimizer)
    for _ in range(150):
        state, metrics = step(state, prepare(state.params))
    assert float(metrics.loss) < 0.05
    trained = drafter(join(state.params), (1, 1), ids=ids)
    (done,) = generate(target, trained, [PROMPTS[0]], Request(40))
    assert done.token_ids == plain.token_ids
    assert done.metrics.acceptance_rate > 0.9


def test_needs_the_targets_states(target):
    model = untrained(target)
    stages = llama_stages(model.config, frozen=("embed_VD",))
    batch = dataclasses.replace(batch_of(target, [1, 2, 3], IDS), hidden_BTID=None)
    for use in (forward_loss, with_own_features):
        with pytest.raises(ValueError, match="hidden_BTID"):
            use(stages, split(model), batch)


def test_refuses_a_target_with_other_taps(target):
    mine = drafter(feature_model(prune(target, [0], IDS), nnx.Rngs(0), (0, 1)))
    with pytest.raises(
        ValueError, match=r"reads the target's blocks \(0, 1\).*set the target's taps"
    ):
        toys.decode(target, mine, PROMPTS, 4)
