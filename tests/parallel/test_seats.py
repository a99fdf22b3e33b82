"""What does not divide over tensor ranks takes the step that one device takes.

One key/value head on two ranks, nine and three on any, a vocabulary of 97: padded or with copies.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models.feature import feature_model
from models.losses import Teacher, divergence
from models.prune import prune
from models.seats import seats_of
from models.stages import llama_stages, split, with_teacher
from parallel.overlap import Overlap
from parallel.partition import Composition
from parallel.plan import Plan
from parallel.seats import resting_specs, seated
from parallel.sequence import SequenceComm
from parallel.stages import Stages
from parallel.train import init_state, make_train_step
from tests.common import toys
from tests.parallel.test_mesh_training import large_then_small, mesh_of
from tests.parallel.test_train_step import assert_close, batch

V = toys.VOCAB2
# One key/value head; the default target's heads, biases, a tied table, a width that is odd.
ONE = {"num_heads": 2, "num_kv_heads": 1}
NINE = {"num_heads": 9, "num_kv_heads": 3, "tied_embeddings": True, "attention_bias": True}
NINE |= {"d_ff": 63}

MESHES = {
    "tensor 2": ({"tensor": 2}, Plan(), {}),
    "tensor 2, chunks": (
        {"data": 2, "tensor": 2},
        Plan(column=Overlap.parse("ring"), row=Overlap.parse("features/2")),
        {"remat": True},
    ),
    "fsdp x tensor": ({"fsdp": 2, "tensor": 2}, Plan(bucket="block"), {"accumulate": 2}),
    "fsdp x tensor, fetched ahead": (
        {"fsdp": 2, "tensor": 2},
        Plan(prefetch=True),
        {"scan": True},
    ),
    "pipe x tensor, gpipe": ({"pipe": 2, "tensor": 2}, Plan(), {"accumulate": 2}),
    "pipe x tensor, 1f1b": (
        {"pipe": 2, "tensor": 2},
        Plan(schedule="1f1b"),
        {"accumulate": 2, "scan": True},
    ),
    "fsdp x pipe x tensor": (
        {"fsdp": 2, "pipe": 2, "tensor": 2},
        Plan(zero=1, schedule="1f1b"),
        {"accumulate": 2},
    ),
    "host x data x tensor": ({"host": 2, "data": 2, "tensor": 2}, Plan(), {}),
    "host x fsdp x tensor": (
        {"host": 2, "fsdp": 2, "tensor": 2},
        Plan(
            shard=("host", "fsdp"),
            table=Composition.parse("ring_scatter(tensor)"),
            loss=Composition.parse("reduce_scatter(tensor) all_gather(tensor)"),
        ),
        {},
    ),
}
MORE_RANKS = {
    "tensor 3": ({"tensor": 3}, Plan(), {}),
    "tensor 4": ({"tensor": 4}, Plan(), {"scan": True}),
    "fsdp x tensor 4": ({"fsdp": 2, "tensor": 4}, Plan(zero=2), {"accumulate": 2}),
    "pipe x tensor 3": ({"pipe": 2, "tensor": 3}, Plan(schedule="1f1b"), {"accumulate": 2}),
    "tensor 6": ({"tensor": 6}, Plan(), {}),
}
CASES = [("one", name, *case) for name, case in MESHES.items()]
CASES += [("nine", name, *case) for name, case in (MESHES | MORE_RANKS).items()]
# A head of its own, and a key/value head for each query head.
UNTIED = {"tied_embeddings": False, "num_kv_heads": 9}
CASES += [("untied", "tensor 4", *MORE_RANKS["tensor 4"])]
CHANGES = {"one": ONE, "nine": NINE, "untied": {**NINE, **UNTIED}}
NOW = {("one", "tensor 2"), ("nine", "fsdp x tensor 4"), ("nine", "pipe x tensor 3")}


def of(cases, now):
    """`make test` runs the cases in `now`, `make test-plans` all."""
    return [
        pytest.param(
            which,
            *case,
            id=f"{which}, {name}",
            marks=[] if (which, name) in now else [pytest.mark.slow],
        )
        for which, name, *case in cases
    ]


@functools.lru_cache(maxsize=4)
def model_of(which):
    return toys.tiny(**CHANGES[which])


@functools.lru_cache(maxsize=4)
def three_steps(which):
    """Weights after one plain step and after three, and the first one's metrics."""
    model, optimizer = model_of(which), large_then_small()
    step = make_train_step(llama_stages(model.config), optimizer)
    state, metrics = step(init_state(split(model), optimizer), batch(0))
    first = jax.tree.map(np.asarray, state.params)
    for seed in (1, 2):
        state, _ = step(state, batch(seed))
    return first, jax.tree.map(np.asarray, state.params), metrics


@pytest.mark.parametrize(("which", "sizes", "plan", "how"), of(CASES, NOW))
def test_equals_one_device(which, sizes, plan, how):
    """Loss, gradient and its norm, weights after one step and after three, to 1e-5."""
    model, mesh, optimizer = model_of(which), mesh_of(sizes), large_then_small()
    assert seats_of(model.config, sizes["tensor"])
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, **how)
    state, metrics = step(init_state(split(model), optimizer, mesh, plan), batch(0))
    first, last, wanted = three_steps(which)
    assert_close(metrics, wanted, 1e-5)
    assert_close(state.params, first, 1e-5)
    for seed in (1, 2):
        state, _ = step(state, batch(seed))
    assert_close(state.params, last, 1e-5)
    assert step._cache_size() == 1
    # Weights keep their shapes; seated, copies are the same bits and empty seats zeros.
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.params)]
    assert shapes == [leaf.shape for leaf in jax.tree.leaves(split(model))]
    seats = seats_of(model.config, sizes["tensor"])
    k = np.asarray(seated(state.params, seats).blocks.attention.k_DKA)
    for seat, head in enumerate(seats.get("K", range(model.config.num_kv_heads))):
        wanted_k = state.params.blocks.attention.k_DKA[:, :, head] if head >= 0 else 0 * k[:, :, 0]
        np.testing.assert_array_equal(k[:, :, seat], wanted_k)


@pytest.mark.parametrize(
    ("which", "sizes", "plan", "how"), of(CASES, {("one", "fsdp x tensor, fetched ahead")})
)
def test_any_optimiser_in_float64(which, sizes, plan, how):
    """Clipped by the norm of distinct elements, Adam, decay: copies and padding change nothing."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    model, mesh = model_of(which), mesh_of(sizes)
    stages = llama_stages(model.config)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), split(model))
        plain = make_train_step(stages, optimizer)
        hybrid = make_train_step(stages, optimizer, mesh, plan, **how)
        one, many = init_state(wide, optimizer), init_state(wide, optimizer, mesh, plan)
        for seed in range(3):
            one, many = plain(one, batch(seed))[0], hybrid(many, batch(seed))[0]
        assert_close((many.params, many.opt_state), (one.params, one.opt_state), 1e-10)


def test_weights_rest_in_shards():
    """Along another axis where their own does not divide: every device keeps a part."""
    params = split(model_of("nine"))
    specs = resting_specs(params, {"fsdp": 2, "tensor": 4})
    assert specs.outer.embed_VD.get_value() == PartitionSpec(None, ("fsdp", "tensor"))
    attention = specs.blocks.attention
    assert attention.q_DHA.get_value() == PartitionSpec(None, "fsdp", None, "tensor")
    assert attention.o_HAD.get_value() == PartitionSpec(None, None, "fsdp", "tensor")
    assert attention.k_bias_KA.get_value() == PartitionSpec(None, None, ("fsdp", "tensor"))
    assert resting_specs({"q_HA": np.zeros((3, 5))}, {"tensor": 2}) == {"q_HA": PartitionSpec()}
    assert resting_specs({"q_HA": np.zeros((3, 5))}, {"tensor": 3}) == {
        "q_HA": PartitionSpec("tensor")
    }


def test_each_is_sent_once_each_way():
    """Table, head, keys and values: an all-to-all to their seats, one back, for all layers."""
    model, mesh, optimizer = model_of("one"), mesh_of({"tensor": 2}), optax.sgd(0.1)
    step = make_train_step(llama_stages(model.config), optimizer, mesh)
    state = init_state(split(model), optimizer, mesh)
    text = step.lower(state, batch(0)).compile().as_text()
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 2 * 4


def test_a_model_that_has_no_seats_is_refused():
    stages = llama_stages(model_of("one").config)
    plain = Stages(stages.embed, stages.context, stages.block, stages.head, stages.loss)
    mesh, optimizer = mesh_of({"tensor": 2}), optax.sgd(0.1)
    step = make_train_step(plain, optimizer, mesh)
    with pytest.raises(ValueError, match=r"embed_VD.*axis V has 97 entries.*2 devices"):
        step.lower(init_state(split(model_of("one")), optimizer, mesh), batch(0))


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_divergences_over_parts_of_the_vocabulary(kind, rows):
    """Sum and gradient over four devices' logits, 97 rows: those of one device."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 3, V)).astype(np.float32)
    index, size = None, V
    if rows:
        index, size = rng.permuted(np.tile(np.arange(V), (2, 3, 1)), axis=2)[..., :rows], rows
    wanted = rng.standard_normal((2, 3, size)).astype(np.float32)
    wanted[..., -2:] = -np.inf  # slots that are not used
    teacher = Teacher(None if index is None else jnp.asarray(index, jnp.int32), jnp.asarray(wanted))
    weight = jnp.asarray([[1, 0, 2], [1, 1, 1]], jnp.float32)

    def one(logits):
        return divergence(teacher, logits, weight, kind, 1.5)[0]

    comm = SequenceComm("tensor")

    def part(logits, teacher, weight):
        def loss(logits):
            return divergence(teacher, comm.without_padding(logits, V), weight, kind, 1.5, comm)[0]

        return jax.value_and_grad(loss)(logits)

    mesh, whole = mesh_of({"tensor": 4}), PartitionSpec()
    split_rows = PartitionSpec(None, None, "tensor")
    run = jax.shard_map(
        part, mesh=mesh, in_specs=(split_rows, whole, whole), out_specs=(whole, split_rows)
    )
    # What padding holds must not matter.
    padded = np.pad(logits, ((0, 0), (0, 0), (0, 3)), constant_values=50.0)
    found, gradient = toys.quick(run)(padded, teacher, weight)
    expected, slope = toys.quick(jax.value_and_grad(one))(logits)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient[..., :V], slope, rtol=1e-4, atol=1e-6)
    assert not np.asarray(gradient[..., V:]).any()


@pytest.mark.parametrize("loss", ["forward_kl", pytest.param("reverse_kl", marks=pytest.mark.slow)])
def test_a_drafter_learns_on_tensor_ranks(loss):
    """Of the target's distribution over the 50 rows of its head, on three ranks."""
    drafter = feature_model(prune(model_of("nine"), [0], np.arange(50)), nnx.Rngs(0))
    stages, optimizer = llama_stages(drafter.config, loss), large_then_small()
    plain = batch(0)
    shape = (*plain.token_BT.shape, 1, drafter.config.d_model)
    data = dataclasses.replace(plain, hidden_BTID=jax.random.normal(jax.random.key(2), shape))
    data = jax.jit(lambda params: with_teacher(params, data))(split(drafter))
    found = []
    for mesh in (None, mesh_of({"tensor": 3})):
        step = make_train_step(stages, optimizer, mesh)
        state, metrics = step(init_state(split(drafter), optimizer, mesh), data)
        found.append((jax.tree.map(np.asarray, state.params), metrics))
    assert_close(found[1], found[0], 1e-5)
