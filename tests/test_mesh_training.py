"""Every mode and product of parallel training takes the step that one device takes."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from models.stages import llama_stages, split
from parallel.overlap import Overlap
from parallel.partition import Composition
from parallel.plan import Plan
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
    "hybrid sharded": ({"data": 2, "fsdp": 2}, Plan(bucket="block"), {"remat": True}),
    "tensor": ({"tensor": 2}, Plan(), {}),
    "data x tensor": (
        {"data": 2, "tensor": 2},
        Plan(column=Overlap.parse("ring"), row=Overlap.parse("chunked/2")),
        {},
    ),
    "fsdp x tensor": (
        {"fsdp": 2, "tensor": 2},
        Plan(column=Overlap.parse("chunked/3"), row=Overlap.parse("ring")),
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
