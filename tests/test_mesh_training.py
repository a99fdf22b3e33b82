"""Every mode and product of parallel training takes the step that one device takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from models.stages import llama_stages, split
from parallel import pipeline
from parallel.overlap import Overlap
from parallel.partition import Composition, compositions
from parallel.plan import Plan
from parallel.stages import Params, Stages
from parallel.train import init_state, make_train_step
from tests import toys
from tests.test_train_step import assert_close, batch

V = 96
MODEL = {"vocab_size": V, "num_layers": 4}
TWO_LEVEL = Composition.parse("reduce_scatter(data) all_reduce(host) all_gather(data) /2")

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
    "pipe, fewer micro-batches than stages": (
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
        Plan(zero=2, schedule="1f1b"),
        {"accumulate": 2},
    ),
}


def mesh_of(sizes):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


@pytest.fixture(scope="module")
def model():
    return toys.tiny(**MODEL)


@pytest.fixture(scope="module")
def oracle(model):
    """The state after one and after five plain SGD steps, and the first step's metrics."""
    optimizer = optax.sgd(0.1)
    step = make_train_step(llama_stages(model.config), optimizer)
    state, metrics = step(init_state(split(model), optimizer), batch(0, vocab=V))
    first = jax.tree.map(np.asarray, state.params)
    for seed in range(1, 5):
        state, _ = step(state, batch(seed, vocab=V))
    return first, jax.tree.map(np.asarray, state.params), metrics


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(model, oracle, name):
    """Loss, gradient norm and weights after one SGD step and after five, to 1e-5."""
    sizes, plan, how = CASES[name]
    mesh, optimizer = mesh_of(sizes), optax.sgd(0.1)
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, **how)
    state, metrics = step(init_state(split(model), optimizer, mesh), batch(0, vocab=V))
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


def test_adam_in_float64(model):
    """Five Adam steps, whose quotients would amplify rounding: mesh and one device to 1e-10."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), split(model))
        optimizer, stages = optax.adam(1e-2), llama_stages(model.config)
        mesh = mesh_of({"data": 2, "fsdp": 2, "tensor": 2})
        plain, hybrid = (
            make_train_step(stages, optimizer, at, **({} if at is None else {"accumulate": 2}))
            for at in (None, mesh)
        )
        one, many = init_state(wide, optimizer), init_state(wide, optimizer, mesh)
        for seed in range(5):
            data = batch(seed, vocab=V)
            one, many = plain(one, data)[0], hybrid(many, data)[0]
        assert_close(many.params, one.params, 1e-10)
        assert_close(many.opt_state, one.opt_state, 1e-10)
        moments = jax.tree.leaves(many.opt_state)
        assert max(leaf.nbytes / leaf.addressable_shards[0].data.nbytes for leaf in moments) >= 4


@pytest.mark.parametrize("order", ["free", "chained"])
def test_any_split_of_the_same_sequences(model, oracle, order):
    """Eight sequences over data x accumulation: 8 x 1, 4 x 2, 2 x 4 give one gradient."""
    optimizer = optax.sgd(0.1)
    for devices, accumulate in ((8, 1), (4, 2), (2, 4)):
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
    mesh, optimizer = mesh_of({"pipe": 2}), optax.sgd(0.1)
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
    mesh, optimizer = mesh_of({"pipe": stages}), optax.sgd(0.1)
    step = make_train_step(
        llama_stages(model.config), optimizer, mesh, Plan(schedule=schedule), accumulate=micro
    )
    state, metrics = step(init_state(split(model), optimizer, mesh), batch(0, vocab=V))
    assert_close(state.params, oracle[0], 1e-5)
    assert_close(metrics, oracle[2], 1e-5)


def sampled_plans(count):
    """Meshes and plans drawn at random from everything that fits them."""
    rng = np.random.default_rng(0)

    def one_of(values):
        return values[rng.integers(len(values))]

    overlaps = [
        Overlap.parse(text) for text in ("plain", "tokens/2", "features/4", "tokens/3", "ring")
    ]
    meshes = [
        {"data": 4},
        {"host": 2, "data": 2},
        {"host": 2, "data": 2, "fsdp": 2},
        {"fsdp": 4},
        {"data": 2, "fsdp": 2},
        {"data": 2, "tensor": 2},
        {"fsdp": 2, "tensor": 2},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"data": 2, "pipe": 2},
        {"fsdp": 2, "pipe": 2, "tensor": 2},
    ]
    for _ in range(count):
        sizes = one_of(meshes)
        plan = Plan(
            column=one_of(overlaps) if "tensor" in sizes else overlaps[0],
            row=one_of(overlaps) if "tensor" in sizes else overlaps[0],
            zero=one_of([1, 2, 3]),
            bucket=one_of(["leaf", "block"]),
            prefetch=one_of([False, True]),
            when=one_of(["end", "each"]),
            order=one_of(["free", "chained"]),
            schedule=one_of(["gpipe", "1f1b"]),
        )
        for site, kind, axes in (
            ("gather", "all_gather", ("fsdp",)),
            ("scatter", "reduce_scatter", ("fsdp",)),
            ("reduce", "all_reduce", ("host", "data")),
        ):
            mine = {axis: sizes[axis] for axis in axes if axis in sizes}
            if mine:
                how = one_of(list(compositions(kind, mine, (1, 2, 3))))
                plan = dataclasses.replace(plan, **{site: how})
        how = {"accumulate": one_of([1, 2]), "remat": one_of([False, True])}
        yield sizes, plan, {**how, "scan": one_of([False, True])}


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "plan", "how"), list(sampled_plans(200)), ids=range(200))
def test_sampled_plans(model, oracle, sizes, plan, how):
    """Two hundred plans take the same step."""
    assert Plan.from_json(plan.to_json()) == plan
    mesh, optimizer = mesh_of(sizes), optax.sgd(0.1)
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, **how)
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


def test_norm_counts_every_element_once():
    """HO-27: gradient [3 | 4] in shards and 12 whole: 13, and clipping to 1 divides by it."""
    rows = jnp.asarray([3.0, 4.0])
    stages = toy(
        lambda outer, data: data["d_B"][:, None] * (rows * outer["w_D"] + 6 * outer["c"])[None]
    )
    data = {"d_B": jnp.ones(2), "weight_B": jnp.ones(2)}
    params = Params({"w_D": jnp.zeros(2), "c": jnp.zeros(())}, {"none_L": jnp.zeros(1)})
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    mesh = mesh_of({"fsdp": 2})
    state = init_state(params, optimizer, mesh)
    assert state.params.outer["w_D"].addressable_shards[0].data.shape == (1,)
    state, metrics = make_train_step(stages, optimizer, mesh)(state, data)
    assert float(metrics.grad_norm) == pytest.approx(13)
    np.testing.assert_allclose(state.params.outer["w_D"], [-3 / 13, -4 / 13], rtol=1e-6)
    np.testing.assert_allclose(state.params.outer["c"], -12 / 13, rtol=1e-6)


def toy(embed):
    """A model whose loss sum is the sum of what `embed` gives."""
    return Stages(
        embed=lambda outer, data, comm: embed(outer, data),
        context=lambda data: None,
        block=lambda weights, x, ctx, comm: (x, None),
        head=lambda outer, x, comm: x,
        loss=lambda outer, x, data, comm: (x.sum(), data["weight_B"].sum()),
    )


EIGHT = {"num_heads": 8, "num_kv_heads": 8}
REFUSED = {  # HO-28
    "6 sequences on 4 devices": ({"data": 4}, {}, 6, {}, "6 sequences does not divide into 4 dev"),
    "micro-batches of 3": (
        {"data": 2},
        {"accumulate": 3},
        8,
        {},
        "does not divide into 2 devices x 3",
    ),
    "kv heads": ({"tensor": 4}, {}, 8, {}, r"k_DKA.*axis K has 2 entries.*4 devices"),
    "heads": ({"tensor": 4}, {}, 8, {"num_kv_heads": 6}, r"k_DKA.*axis K has 6 entries"),
    "layers": ({"pipe": 2}, {}, 8, {"num_layers": 5}, "axis L has 5 entries.*2 devices"),
    "vocabulary": ({"tensor": 2}, {}, 8, {"vocab_size": 97}, "axis V has 97 entries"),
    "tokens": (
        {"tensor": 8},
        {},
        8,
        {"num_heads": 8, "num_kv_heads": 8},
        "12 tokens do not divide",
    ),
    "unknown axis": ({"rows": 2}, {}, 8, {}, r"Mesh axes \('rows',\): choose of"),
    "a site without its axis": (
        {"data": 2},
        {"plan": Plan(gather=Composition.parse("all_gather(fsdp)"))},
        8,
        {},
        "gather = .*has no",
    ),
    "a wrong composition": (
        {"data": 2},
        {"plan": Plan(reduce=Composition.parse("reduce_scatter(data)"))},
        8,
        {},
        "reduce: reduce_scatter.data. is no all_reduce",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_meshes_are_refused(name):
    """One error each, before anything is compiled."""
    sizes, how, rows, changes, message = REFUSED[name]
    model, optimizer = toys.tiny(**{**MODEL, **changes}), optax.sgd(0.1)
    mesh = mesh_of(sizes)

    def build():
        step = make_train_step(llama_stages(model.config), optimizer, mesh, **how)
        step.lower(init_state(split(model), optimizer, mesh), batch(0, rows, V))

    with pytest.raises(ValueError, match=message):
        build()


def test_bad_plans():
    for bad, words in (
        ({"zero": 4}, "zero = 4"),
        ({"bucket": "all"}, "bucket = 'all'"),
        ({"when": "never"}, "when = 'never'"),
    ):
        with pytest.raises(ValueError, match=words):
            Plan(**bad)
    for text, words in (
        ("[]", "No plan"),
        ("{", "No plan"),
        ('{"speed": 9}', "its sites are"),
        ('{"row": "spiral"}', "Plan: row: Overlap"),
        ('{"gather": "all(x)"}', "Plan: gather"),
    ):
        with pytest.raises(ValueError, match=words):
            Plan.from_json(text)
