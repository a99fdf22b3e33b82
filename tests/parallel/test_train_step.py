"""The training step on one device: one answer however it is composed (HO-27, HO-30, HO-31)."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.losses import Batch, Teacher
from models.stages import join, llama_stages, split
from models.transformer import Transformer, causal_mask
from parallel.plan import Plan
from parallel.stages import Params, Stages, forward_loss
from parallel.train import init_state, make_train_step
from spec.drafters import ModelDrafter
from spec.generate import Request, generate
from tests.common import toys

B, T = 8, 12


def batch(seed: int = 0, rows: int = B, vocab: int = toys.VOCAB2) -> Batch:
    """Packed rows: two documents each, then padding; some tokens without weight."""
    rng = np.random.default_rng(seed)
    token_BT = rng.integers(0, vocab, (rows, T)).astype(np.int32)
    ends = rng.integers(3, 6, rows)
    index = np.arange(T)[None, :]
    first = index < ends[:, None]
    real = index < T - rng.integers(0, 3, rows)[:, None]
    return Batch(
        token_BT=jnp.asarray(token_BT),
        position_BT=jnp.asarray(np.where(first, index, index - ends[:, None]), jnp.int32),
        segment_BT=jnp.asarray(np.where(real, np.where(first, 0, 1), -1), jnp.int32),
        label_BT=jnp.asarray(rng.integers(0, vocab, (rows, T)), jnp.int32),
        weight_BT=jnp.asarray(real & (rng.random((rows, T)) < 0.8), jnp.float32),
    )


def one_step(state, data, stages, optimizer=None, **how):
    return make_train_step(stages, optimizer or optax.sgd(0.1), **how)(state, data)


def assert_close(a, b, tolerance=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=tolerance, rtol=tolerance)


def test_loss_is_that_of_the_decoder():
    """Packed documents give what each gives alone, through the model's own __call__."""
    model = toys.tiny()
    data = batch(rows=2)
    total, weight = forward_loss(llama_stages(model.config), split(model), data)
    expected = 0.0
    for row in range(2):
        for document in (0, 1):
            at = np.flatnonzero(np.asarray(data.segment_BT)[row] == document)
            if not len(at):
                continue
            n = len(at)
            token, position = data.token_BT[row, at][None], jnp.arange(n, dtype=jnp.int32)[None]
            out = toys.quick(Transformer.__call__)(model, token, position, causal_mask(1, n))
            log_q = jax.nn.log_softmax(out.logits_BNV)[0, np.arange(n), data.label_BT[row, at]]
            expected -= float((log_q * data.weight_BT[row, at]).sum())
    assert float(weight) == np.asarray(data.weight_BT).sum()
    assert float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_split_and_join(tied):
    model = toys.tiny(tied_embeddings=tied, attention_bias=True)
    again = join(split(model))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert_close(again, model, 0)


def test_every_composition_takes_the_same_step():
    model = toys.tiny(tied_embeddings=True)
    stages, data = llama_stages(model.config), batch()
    plain, metrics = one_step(init_state(split(model), optax.sgd(0.1)), data, stages)
    assert bool(metrics.finite)
    assert int(plain.step) == 1
    assert int(plain.skipped) == 0
    moved = [
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(split(model)), strict=True)
    ]
    assert min(moved) > 0  # every parameter learns
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for how in (
        {"scan": True},
        {"remat": True},
        {"scan": True, "remat": True},
        {"accumulate": 4},
        {"mesh": mesh},
        {"mesh": mesh, "accumulate": 2, "scan": True, "remat": True},
    ):
        state, other = one_step(init_state(split(model), optax.sgd(0.1)), data, stages, **how)
        assert_close(state.params, plain.params)
        assert_close(other, metrics, 1e-5)


def test_mean_is_over_tokens_not_over_parts():
    """Micro-batches of very different weight: a mean of means would be another gradient."""
    model = toys.tiny()
    stages, data = llama_stages(model.config), batch()
    weight_BT = jnp.zeros_like(data.weight_BT).at[0].set(1).at[5, 2].set(1)
    data = Batch(data.token_BT, data.position_BT, data.segment_BT, data.label_BT, weight_BT)
    whole, _ = one_step(init_state(split(model), optax.sgd(0.1)), data, stages)
    parts, _ = one_step(init_state(split(model), optax.sgd(0.1)), data, stages, accumulate=2)
    assert_close(parts.params, whole.params)


def linear() -> tuple[Stages, Params]:
    """Loss sum = w . g of each row, weight as given: gradients can be chosen."""

    def loss(outer, x, data, comm):
        return x.sum().astype(jnp.float32), data["weight_B"].sum()

    stages = Stages(
        embed=lambda outer, data, comm: (
            data["g_BD"].astype(outer["w_D"].dtype)
            * jnp.broadcast_to(outer["w_D"], data["g_BD"].shape)
        ),
        context=lambda data: None,
        block=lambda weights, x, ctx, comm: (x, None),
        head=lambda outer, x, comm: x,
        loss=loss,
    )
    return stages, Params({"w_D": jnp.zeros(2)}, {"none_L": jnp.zeros(1)})


def rows(gradients, weights):
    return {
        "g_BD": jnp.asarray(gradients, jnp.float32),
        "weight_B": jnp.asarray(weights, jnp.float32),
    }


def test_micro_gradients_are_summed_in_the_master_dtype():
    stages, params = linear()
    data = rows(np.ones((300, 2)), [1] + [0] * 299)
    state, _ = one_step(
        init_state(params, optax.sgd(1.0)),
        data,
        stages,
        optax.sgd(1.0),
        accumulate=300,
        compute_dtype=jnp.bfloat16,
    )
    np.testing.assert_array_equal(state.params.outer["w_D"], [-300, -300])


def test_clipping_sees_the_final_gradient():
    stages, params = linear()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    data = rows([[3, 4], [0, -4]], [1, 1])
    state, metrics = one_step(init_state(params, optimizer), data, stages, optimizer, accumulate=2)
    np.testing.assert_allclose(state.params.outer["w_D"], [-1, 0], atol=1e-6)
    assert float(metrics.grad_norm) == pytest.approx(1.5)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    stages, params = linear()
    optimizer = optax.adam(0.1)
    step = make_train_step(stages, optimizer)
    state, _ = step(init_state(params, optimizer), rows([[1, 2]], [1]))
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = step(state, rows([[1, bad]], [1]))
    assert not bool(metrics.finite)
    assert (int(state.step), int(state.skipped)) == (2, 1)
    for a, b in zip(
        jax.tree.leaves(before), jax.tree.leaves((state.params, state.opt_state)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    _, metrics = step(state, rows([[1, 2]], [1]))
    assert bool(metrics.finite)


def test_a_step_without_tokens_changes_nothing():
    stages, params = linear()
    state, metrics = one_step(
        init_state(params, optax.sgd(1.0)), rows([[0, 0]], [0]), stages, optax.sgd(1.0)
    )
    np.testing.assert_array_equal(state.params.outer["w_D"], [0, 0])
    assert float(metrics.loss) == 0


def test_bfloat16_compute_keeps_float32_masters():
    model = toys.tiny()
    stages, data = llama_stages(model.config), batch()
    how = {"compute_dtype": jnp.bfloat16}
    state, metrics = one_step(init_state(split(model), optax.sgd(0.1)), data, stages, **how)
    _, exact = one_step(init_state(split(model), optax.sgd(0.1)), data, stages)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    assert float(metrics.loss) == pytest.approx(float(exact.loss), rel=0.05)
    assert float(metrics.loss) != float(exact.loss)


def test_the_callers_weights_survive_donation():
    model = toys.tiny()
    params = split(model)
    optimizer = optax.adam(1e-3)
    step = make_train_step(llama_stages(model.config), optimizer)
    state, _ = step(init_state(params, optimizer), batch())
    step(state, batch(1))
    assert np.isfinite(np.asarray(params.outer.embed_VD[...])).all()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.params.outer.embed_VD[...])


@pytest.mark.parametrize("frozen", ["embed_VD", "head_DU"])
def test_what_is_frozen_gets_no_gradient(frozen):
    model = toys.tiny(draft_vocab_size=24)
    stages = llama_stages(model.config, frozen=(frozen,))
    data = batch()
    data = Batch(
        data.token_BT, data.position_BT, data.segment_BT, data.label_BT % 24, data.weight_BT
    )
    state, _ = one_step(init_state(split(model), optax.sgd(0.1)), data, stages)
    for name in ("embed_VD", "head_DU"):
        moved = getattr(state.params.outer, name)[...] - getattr(model, name)[...]
        assert (np.abs(moved).max() == 0) == (name == frozen)


def test_unknown_frozen_names_are_refused():
    config = toys.tiny(draft_vocab_size=24).config
    with pytest.raises(ValueError, match=r"\['norm'\]"):
        llama_stages(config, frozen=("norm",))
    with pytest.raises(ValueError, match="untie"):
        llama_stages(toys.tiny(tied_embeddings=True).config, frozen=("embed_VD",))


def test_distillation_learns_the_teacher():
    """HO-33's end check: KL below .01 after training on a teacher's distribution."""
    teacher, student = toys.chain11(), toys.tiny(1, vocab_size=toys.VOCAB1)
    optimizer = optax.adam(1e-2)
    step = make_train_step(llama_stages(student.config, "forward_kl"), optimizer)
    state = init_state(split(student), optimizer)
    rng = np.random.default_rng(0)
    token = jnp.asarray(rng.integers(0, toys.VOCAB1, (16, 24)), jnp.int32)
    zero = jnp.zeros_like(token)
    position = zero + jnp.arange(24, dtype=jnp.int32)[None]
    logits = teacher(token, position, causal_mask(16, 24)).logits_BNV
    every = jnp.broadcast_to(jnp.arange(toys.VOCAB1, dtype=jnp.int32), logits.shape)
    data = Batch(token, position, zero, zero, jnp.ones(token.shape), Teacher(every, logits))
    for _ in range(400):
        state, metrics = step(state, data)
        if float(metrics.loss) < 0.01:
            break
    assert float(metrics.loss) < 0.01
    drafter = ModelDrafter(join(state.params), toys.chain(4), toys.VOCAB1)
    (done,) = generate(teacher, drafter, [[2]], Request(20))
    assert done.token_ids == toys.chain11_greedy(2, 20)
    assert done.metrics.acceptance_rate == 1


def test_scanned_blocks_compile_once():
    """HO-31: 24 layers compile in less than three times what 2 take."""

    def seconds(layers: int) -> float:
        model = toys.tiny(num_layers=layers)
        stages = llama_stages(model.config)
        state = init_state(split(model), optax.sgd(0.1))
        clock = time.perf_counter()
        make_train_step(stages, optax.sgd(0.1), scan=True).lower(state, batch()).compile()
        return time.perf_counter() - clock

    seconds(2)
    assert seconds(24) < 3 * seconds(2)


@pytest.mark.parametrize(
    ("how", "data", "message"),
    [
        ({"accumulate": 3}, batch(), "8 sequences does not divide"),
        ({"accumulate": 0}, batch(), "accumulate = 0"),
        ({"plan": Plan()}, batch(), "give a mesh with it"),
    ],
)
def test_refused(how, data, message):
    model = toys.tiny()
    with pytest.raises(ValueError, match=message):
        one_step(init_state(split(model), optax.sgd(0.1)), data, llama_stages(model.config), **how)


def test_loss_needs_its_teacher():
    model = toys.tiny()
    with pytest.raises(ValueError, match=r"Batch\.teacher"):
        forward_loss(llama_stages(model.config, "forward_kl"), split(model), batch())
    with pytest.raises(ValueError, match="'hinge'"):
        llama_stages(model.config, "hinge")
