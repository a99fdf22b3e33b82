"""Every mode and product of parallel training takes the step that one device takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from models.feature import feature_model
from models.prune import prune
from models.stages import is_frozen, llama_stages, split, with_own_features
from parallel import pipeline
from parallel.overlap import Overlap
from parallel.partition import Composition
from parallel.plan import Plan
from parallel.stages import Params, Stages
from parallel.train import init_state, make_train_step
from tests.common import toys
from tests.parallel.test_train_step import assert_close, batch

V = 96
MODEL = {"vocab_size": V, "num_layers": 4}
# A tied table is embedded on the first stage of a pipeline and the head of the last.
TIED = {**MODEL, "tied_embeddings": True, "attention_bias": True}
TWO_LEVEL = Composition.parse("reduce_scatter(data) all_reduce(host) all_gather(data) /2")
BOTH = ("host", "fsdp")
ACROSS = Composition.parse("all_gather(host) all_gather(fsdp)")  # the slow link first, on shards
# Every site beside the blocks, composed otherwise than by one collective.
SITES = Plan(
    table=Composition.parse("ring_scatter(tensor) /2"),
    head=Composition.parse("ring_gather(tensor)"),
    loss=Composition.parse("reduce_scatter(tensor) all_gather(tensor) /3"),
)

# Mesh, plan, how the step is composed.
CASES = {
    "data": ({"data": 4}, Plan(), {}),
    "data, accumulated, each": ({"data": 2}, Plan(when="each"), {"accumulate": 4}),
    "two levels": ({"host": 2, "data": 2}, Plan(reduce=TWO_LEVEL), {}),
    "zero 1": ({"fsdp": 4}, Plan(zero=1), {"accumulate": 2}),
    "zero 2": ({"fsdp": 2}, Plan(zero=2), {"accumulate": 2}),
    "zero 3": ({"fsdp": 4}, Plan(), {"scan": True}),
    "zero 3 by blocks, ring": (
        {"fsdp": 4},
        Plan(
            gather=Composition.parse("ring_gather(fsdp)"),
            scatter=Composition.parse("ring_scatter(fsdp) /2"),
            bucket="block",
        ),
        {"remat": True, "scan": True},
    ),
    "zero 3, fetched ahead": ({"fsdp": 4}, Plan(prefetch=True), {"scan": True}),
    "fsdp x tensor, fetched ahead": (
        {"fsdp": 2, "tensor": 2},
        Plan(prefetch=True, bucket="block"),
        {"scan": True, "accumulate": 2},
    ),
    "hybrid sharded": ({"data": 2, "fsdp": 2}, Plan(bucket="block"), {"remat": True}),
    "host x fsdp": ({"host": 2, "fsdp": 2}, Plan(zero=2), {"accumulate": 2}),
    "tensor": ({"tensor": 2}, Plan(), {}),
    "data x tensor": (
        {"data": 2, "tensor": 2},
        Plan(column=Overlap.parse("ring"), row=Overlap.parse("tokens/2")),
        {},
    ),
    "fsdp x tensor": (
        {"fsdp": 2, "tensor": 2},
        Plan(column=Overlap.parse("tokens/3"), row=Overlap.parse("features/2")),
        {"scan": True},
    ),
    "pipe, gpipe": ({"pipe": 4}, Plan(), {"accumulate": 4}),
    "pipe, 1f1b": ({"pipe": 4}, Plan(schedule="1f1b"), {"accumulate": 8}),
    "pipe, few micro-batches": (
        {"pipe": 4},
        Plan(schedule="1f1b"),
        {"accumulate": 2},
    ),
    "data x pipe": ({"data": 2, "pipe": 2}, Plan(), {"accumulate": 2, "remat": True}),
    "pipe x tensor": ({"pipe": 2, "tensor": 2}, Plan(schedule="1f1b"), {"accumulate": 2}),
    "fsdp x pipe": ({"fsdp": 2, "pipe": 2}, Plan(), {"accumulate": 2, "scan": True}),
    "data x fsdp x tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, Plan(), {}),
    "fsdp x pipe x tensor": (
        {"fsdp": 2, "pipe": 2, "tensor": 2},
        Plan(zero=1, schedule="1f1b"),
        {"accumulate": 2},
    ),
    "shards over two levels": (
        {"host": 2, "fsdp": 2},
        Plan(shard=BOTH, gather=ACROSS, scatter=ACROSS.mirrored(), bucket="block"),
        {"scan": True},
    ),
    "two levels, zero 2": (
        {"host": 2, "data": 2, "fsdp": 2},
        Plan(
            shard=BOTH,
            gather=Composition.parse("ring_gather(fsdp) all_gather(host) /2"),
            scatter=Composition.parse("ring_scatter(fsdp) reduce_scatter(host) /3"),
            zero=2,
            order="chained",
        ),
        {},
    ),
    "two levels x tensor, fetched ahead": (
        {"host": 2, "fsdp": 2, "tensor": 2},
        Plan(shard=BOTH, gather=ACROSS, prefetch=True, bucket="block"),
        {"scan": True},
    ),
    "two levels x pipe": (
        {"host": 2, "fsdp": 2, "pipe": 2},
        Plan(shard=BOTH, scatter=ACROSS.mirrored(), zero=1),
        {},
    ),
    "shards over hosts and data": (
        {"host": 2, "data": 2},
        Plan(shard=("host", "data"), when="each", zero=2),
        {"accumulate": 2},
    ),
    "shards over hosts, replicas inside": (
        {"host": 2, "data": 2},
        Plan(shard=("host",), reduce=Composition.parse("reduce_scatter(data) all_gather(data)")),
        {},
    ),
    "table, head, loss and sends": (
        {"pipe": 2, "tensor": 2},
        dataclasses.replace(SITES, send=Composition.parse("send(pipe) /3"), schedule="1f1b"),
        {"accumulate": 2},
    ),
    "table, head, loss, gpipe's sends": (
        {"fsdp": 2, "pipe": 2, "tensor": 2},
        dataclasses.replace(SITES, send=Composition.parse("send(pipe) /2")),
        {"accumulate": 2, "scan": True},
    ),
}


def mesh_of(sizes):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


@pytest.fixture(scope="module")
def model():
    return toys.tiny(**MODEL)


def large_then_small():
    """SGD whose first step shows the gradient itself."""
    return optax.sgd(lambda count: jnp.where(count == 0, 1.0, 0.1))


def five_steps(model):
    optimizer = large_then_small()
    step = make_train_step(llama_stages(model.config), optimizer)
    state, metrics = step(init_state(split(model), optimizer), batch(0, vocab=V))
    first = jax.tree.map(np.asarray, state.params)
    for seed in range(1, 5):
        state, _ = step(state, batch(seed, vocab=V))
    return first, jax.tree.map(np.asarray, state.params), metrics


@pytest.fixture(scope="module")
def oracle(model):
    """The weights after one and after five plain steps, and the first step's metrics."""
    return five_steps(model)


@pytest.fixture(scope="module")
def tied():
    """A model with a tied table and biases, and the same of it."""
    model = toys.tiny(**TIED)
    return model, five_steps(model)


def assert_same_steps(model, oracle, sizes, plan, how):
    mesh, optimizer = mesh_of(sizes), large_then_small()
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, **how)
    state, metrics = step(init_state(split(model), optimizer, mesh, plan), batch(0, vocab=V))
    first, last, wanted = oracle
    assert_close(metrics, wanted, 1e-5)
    assert_close(state.params, first, 1e-5)
    for seed in range(1, 5):
        state, _ = step(state, batch(seed, vocab=V))
    assert_close(state.params, last, 1e-5)
    assert step._cache_size() == 1
    for leaf in jax.tree.leaves(state.params):  # replicas are the same bits
        shards: dict = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            np.testing.assert_array_equal(shards.setdefault(str(shard.index), data), data)


# In `make test` every mode and most products; all of them in `make test-plans`.
LATER = (
    "data",
    "zero 1",
    "zero 3",
    "zero 3, fetched ahead",
    "pipe, gpipe",
    "pipe, few micro-batches",
)
LATER += ("two levels, zero 2", "two levels x tensor, fetched ahead", "two levels x pipe")
LATER += ("shards over hosts and data", "shards over hosts, replicas inside")
LATER += ("table, head, loss, gpipe's sends",)
LATER += ("hybrid sharded", "fsdp x tensor", "pipe x tensor", "fsdp x pipe", "tensor")


def some_later(names):
    slow = pytest.mark.slow
    return [pytest.param(name, marks=slow) if name in LATER else name for name in names]


@pytest.mark.parametrize("name", some_later(CASES))
def test_equals_one_device(model, oracle, tied, name):
    """Loss, gradient and weights after one step and after five, to 1e-5; every other one tied."""
    which = tied if [*CASES].index(name) % 2 else (model, oracle)
    assert_same_steps(*which, *CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device_the_other_way(model, oracle, tied, name):
    """The cases that are tied above untied, and the other way round."""
    which = (model, oracle) if [*CASES].index(name) % 2 else tied
    assert_same_steps(*which, *CASES[name])


def adam_in_float64(model, sizes, plan, how):
    """Five Adam steps, whose quotients would amplify rounding: mesh and one device to 1e-10."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), split(model))
        optimizer, stages, mesh = optax.adam(1e-2), llama_stages(model.config), mesh_of(sizes)
        plain = make_train_step(stages, optimizer)
        hybrid = make_train_step(stages, optimizer, mesh, plan, **how)
        one, many = init_state(wide, optimizer), init_state(wide, optimizer, mesh, plan)
        for seed in range(5):
            data = batch(seed, vocab=V)
            one, many = plain(one, data)[0], hybrid(many, data)[0]
        assert_close(many.params, one.params, 1e-10)
        assert_close(many.opt_state, one.opt_state, 1e-10)
    return many


def test_adam_in_float64(model):
    """Weights and moments lie in shards: an eighth of most on each device."""
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    state = adam_in_float64(model, sizes, Plan(), {"accumulate": 2})
    for tree in (state.params, state.opt_state):
        big = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim > 1]
        parts = [leaf.size // leaf.addressable_shards[0].data.size for leaf in big]
        assert min(parts) >= 2
        assert sum(part == 4 for part in parts) >= len(parts) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_adam_in_float64_everywhere(model, name):
    adam_in_float64(model, *CASES[name])


@pytest.mark.parametrize("plan", [Plan(), Plan(zero=1), Plan(zero=2)], ids=["3", "2", "1"])
def test_micro_gradients_add_up_in_float32(plan):
    """HO-27: 300 micro-gradients of 1 computed in bfloat16, whose sum would stop at 256."""
    data = {"d_B": jnp.ones(600), "weight_B": jnp.zeros(600).at[0].set(1)}
    params = Params({"w_D": jnp.zeros(2)}, {"none_L": jnp.zeros(1)})
    stages = toy(
        lambda outer, data: data["d_B"][:, None].astype(outer["w_D"].dtype) * outer["w_D"][None]
    )
    mesh, optimizer = mesh_of({"fsdp": 2}), optax.sgd(1.0)
    step = make_train_step(
        stages, optimizer, mesh, plan, accumulate=300, compute_dtype=jnp.bfloat16
    )
    state, _ = step(init_state(params, optimizer, mesh), data)
    np.testing.assert_array_equal(state.params.outer["w_D"], [-600.0, -600.0])


def test_weights_that_are_left_alone(model):
    """A drafter's optimiser has no moments for table and head, which stay as they are."""
    frozen = ("embed_VD", "head_DU")
    labels = lambda params: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, _: is_frozen(path, frozen), params
    )
    optimizer = optax.partition({True: optax.set_to_zero(), False: optax.adam(1e-2)}, labels)
    stages, mesh = llama_stages(model.config, frozen=frozen), mesh_of({"fsdp": 2, "data": 2})
    one = make_train_step(stages, optimizer)(init_state(split(model), optimizer), batch(0, vocab=V))
    state = init_state(split(model), optimizer, mesh)
    many = make_train_step(stages, optimizer, mesh)(state, batch(0, vocab=V))
    # Adam's first step is a sign, of gradients near 0 too: compared is what Adam was given.
    assert_close(many[0].opt_state, one[0].opt_state, 1e-5)
    np.testing.assert_array_equal(many[0].params.outer.embed_VD[...], model.embed_VD[...])


def test_a_step_that_is_not_finite_changes_nothing(model):
    mesh, optimizer = mesh_of({"fsdp": 2, "tensor": 2}), optax.adam(1e-2)
    state = init_state(split(model), optimizer, mesh)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    data = batch(0, vocab=V)
    bad = dataclasses.replace(data, weight_BT=data.weight_BT.at[3, 2].set(jnp.inf))
    state, metrics = make_train_step(llama_stages(model.config), optimizer, mesh)(state, bad)
    assert not bool(metrics.finite)
    assert int(state.skipped) == 1
    assert_close((state.params, state.opt_state), before, 0)


@pytest.mark.parametrize("order", ["free", "chained"])
def test_any_split_of_the_same_sequences(model, oracle, order):
    """Eight sequences over data x accumulation: 8 x 1 and 2 x 4 give one gradient."""
    optimizer = large_then_small()
    for devices, accumulate in ((8, 1), (2, 4))[: 2 if order == "free" else 1]:
        mesh = mesh_of({"data": devices})
        plan = Plan(order=order)
        step = make_train_step(
            llama_stages(model.config), optimizer, mesh, plan, accumulate=accumulate
        )
        state, metrics = step(init_state(split(model), optimizer, mesh), batch(0, vocab=V))
        assert_close(state.params, oracle[0], 1e-5)
        assert_close(metrics, oracle[2], 1e-5)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubbles_count_for_nothing(model, oracle, schedule, monkeypatch):
    """HO-29: stages without a micro-batch read NaN; the step is the same."""
    monkeypatch.setattr(pipeline, "EMPTY", np.nan)
    mesh, optimizer = mesh_of({"pipe": 2}), large_then_small()
    plan = Plan(schedule=schedule)
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, accumulate=2)
    state, metrics = step(init_state(split(model), optimizer, mesh), batch(0, vocab=V))
    assert bool(metrics.finite)
    assert_close(state.params, oracle[0], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_pipelines(model, oracle, schedule, micro, stages):
    mesh, optimizer = mesh_of({"pipe": stages}), large_then_small()
    step = make_train_step(
        llama_stages(model.config), optimizer, mesh, Plan(schedule=schedule), accumulate=micro
    )
    state, metrics = step(init_state(split(model), optimizer, mesh), batch(0, vocab=V))
    assert_close(state.params, oracle[0], 1e-5)
    assert_close(metrics, oracle[2], 1e-5)


def test_gradient_of_a_replicated_weight():
    """HO-26: loss (w^2 + 1) d with d = (0, 1) on two devices, w = 1: the gradient is 2."""
    stages = toy(lambda outer, data: (outer["w_D"] ** 2 + 1)[None] * data["d_B"][:, None])
    data = {"d_B": jnp.asarray([0.0, 1.0]), "weight_B": jnp.asarray([0.5, 0.5])}
    params = Params({"w_D": jnp.ones(1)}, {"none_L": jnp.zeros(1)})
    for sizes in ({"data": 2}, {"fsdp": 2}, {"host": 2}):
        mesh, optimizer = mesh_of(sizes), optax.sgd(1.0)
        step = make_train_step(stages, optimizer, mesh)
        state, metrics = step(init_state(params, optimizer, mesh), data)
        assert float(state.params.outer["w_D"][0]) == -1
        assert float(metrics.loss) == 2


@pytest.mark.parametrize(
    ("shard", "rows"), [(("fsdp",), [3.0, 4.0]), (BOTH, [1.0, 2.0, 2.0, 4.0])], ids=str
)
def test_norm_counts_every_element_once(shard, rows):
    """HO-27: gradient [3 | 4] or [1 | 2 | 2 | 4] in shards, 12 whole: 13; clipped to 1 over 13."""
    devices = len(rows)
    stages = toy(
        lambda outer, data: (
            data["d_B"][:, None]
            * (jnp.asarray(rows) * outer["w_D"] + 12 / devices * outer["c"])[None]
        )
    )
    data = {"d_B": jnp.ones(devices), "weight_B": jnp.ones(devices)}
    params = Params({"w_D": jnp.zeros(devices), "c": jnp.zeros(())}, {"none_L": jnp.zeros(1)})
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    mesh, plan = mesh_of(dict.fromkeys(shard, 2)), Plan(shard=shard)
    state = init_state(params, optimizer, mesh, plan)
    assert state.params.outer["w_D"].addressable_shards[0].data.shape == (1,)
    state, metrics = make_train_step(stages, optimizer, mesh, plan)(state, data)
    assert float(metrics.grad_norm) == pytest.approx(13)
    np.testing.assert_allclose(state.params.outer["w_D"], -np.asarray(rows) / 13, rtol=1e-6)
    np.testing.assert_allclose(state.params.outer["c"], -12 / 13, rtol=1e-6)


def toy(embed):
    """A model whose loss sum is the sum of what `embed` gives."""
    return Stages(
        embed=lambda outer, data, comm: embed(outer, data),
        context=lambda data: None,
        block=lambda weights, x, ctx, comm: (x, None),
        head=lambda outer, x, comm: x,
        loss=lambda outer, x, data, comm: (
            x.sum().astype(jnp.float32),
            data["weight_B"].sum(),
        ),
    )


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "pipe": 2}], ids=str)
def test_a_feature_model_on_a_mesh(model, sizes):
    """Its mixture of the target's states belongs to no block; rows hold its own features too."""
    drafter = feature_model(prune(model, [0, 1], np.arange(V)), nnx.Rngs(0), (0, 1))
    noise = jax.random.normal(jax.random.key(1), drafter.mix_IDD.shape)
    drafter.mix_IDD[...] += 0.1 * noise
    plain = batch(0, vocab=V)
    shape = (*plain.token_BT.shape, 3, model.config.d_model)
    seen = dataclasses.replace(plain, hidden_BTID=jax.random.normal(jax.random.key(2), shape))
    stages, optimizer = llama_stages(drafter.config), large_then_small()
    twice = jax.jit(lambda params: with_own_features(stages, params, seen))(split(drafter))
    found = []
    for mesh in (None, mesh_of(sizes)):
        step = make_train_step(stages, optimizer, mesh, **({"accumulate": 2} if mesh else {}))
        state, metrics = step(init_state(split(drafter), optimizer, mesh), twice)
        found.append((jax.tree.map(np.asarray, state.params), metrics))
    assert_close(found[1], found[0], 1e-5)
