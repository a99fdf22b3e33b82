"""The feature drafter: lossless whatever it drafts, and what it reads is what was trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.feature import feature_model
from models.losses import Batch, FeatureBatch
from models.prune import prune
from models.stages import (
    join,
    llama_stages,
    split,
    with_features,
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
from tests import toys

IDS = np.arange(0, toys.VOCAB2, 2, dtype=np.int32)
PROMPTS = [[5, 9, 60], [3], [7] * 40]
LONG = 24


def untrained(target, ids=IDS):
    return feature_model(prune(target, [0], ids), nnx.Rngs(0))


def drafter(model, shape=(2, 1, 1), how=Children.TOP_K, ids=IDS):
    return FeatureDrafter(model, expansion(shape), toys.VOCAB2, jnp.asarray(ids), how)


@pytest.fixture(scope="module")
def target():
    return toys.tiny(3)


def test_output_equals_plain_decoding(target):
    plain = toys.decode(target, toys.PLAIN, PROMPTS, 24)
    mine = drafter(untrained(target))
    assert toys.decode(target, mine, PROMPTS, 24) == plain
    assert toys.decode(target, EnsembleDrafter((NGramDrafter(), mine)), PROMPTS, 24) == plain


def test_features_and_teacher_come_from_the_targets_states(target):
    """Two documents in a row: each token beside the state before it, and what follows it."""
    tied = prune(target, [0], IDS)
    token = jnp.asarray([[5, 9, 60, 3, 7]], jnp.int32)
    position = jnp.asarray([[0, 1, 2, 0, 1]], jnp.int32)
    zero = jnp.zeros_like(token)
    plain = Batch(token, position, zero, zero, jnp.ones(token.shape))
    hidden = hidden_of(target, token)
    batch = with_features(dataclasses.replace(plain, hidden_BTD=hidden))
    np.testing.assert_array_equal(batch.feature_BTD[0, [1, 2, 4]], hidden[0, [0, 1, 3]])
    assert not np.asarray(batch.feature_BTD[0, [0, 3]]).any()
    taught = with_teacher(split(tied), batch)
    logits = target(token, zero + jnp.arange(5, dtype=jnp.int32)[None], causal_mask(1, 5))
    np.testing.assert_allclose(
        taught.teacher.logit_BTk, logits.logits_BNV[..., IDS], rtol=1e-5, atol=1e-5
    )
    for build in (with_features, lambda batch: with_teacher(split(tied), batch)):
        with pytest.raises(ValueError, match="no hidden_BTD"):
            build(plain)


@toys.quick
def hidden_of(target, token_BT):
    n = token_BT.shape[1]
    position = jnp.arange(n, dtype=jnp.int32)[None]
    return target(token_BT, position, causal_mask(1, n)).hidden_BND


def batch_of(target, text, ids):
    """One row as training sees it."""
    row = {int(token): i for i, token in enumerate(ids)}
    token = np.asarray([text[:-1]], np.int32)
    hidden = hidden_of(target, jnp.asarray(token))
    label = [row.get(t, 0) for t in text[1:]]
    return FeatureBatch(
        token_BT=jnp.asarray(token),
        position_BT=jnp.arange(token.shape[1], dtype=jnp.int32)[None],
        segment_BT=jnp.zeros(token.shape, jnp.int32),
        label_BT=jnp.asarray([label], jnp.int32),
        weight_BT=jnp.asarray([[float(t in row) for t in text[1:]]]),
        feature_BTD=jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))),
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


def test_needs_features(target):
    model = untrained(target)
    stages = llama_stages(model.config, frozen=("embed_VD",))
    batch = dataclasses.replace(batch_of(target, [1, 2, 3], IDS), feature_BTD=None)
    with pytest.raises(ValueError, match="feature_BTD"):
        forward_loss(stages, split(model), batch)
    with pytest.raises(ValueError, match="feature_BTD"):
        with_own_features(stages, split(model), batch)
