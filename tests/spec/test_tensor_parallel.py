"""Heads and feed-forward width over a mesh: one `shard_map` around the whole speculation step."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from models.seats import on_ranks
from parallel.comm import TensorComm
from parallel.sharding import TENSOR_PARALLEL, shardings, spec_of, specs_by_name
from spec.decode import advance
from spec.drafters import NGramDrafter
from spec.generate import Request, begin, generate
from tests.common import toys


def test_specs_follow_the_letters():
    model = toys.tiny()
    specs = specs_by_name(model, TENSOR_PARALLEL)
    assert specs.blocks[0].attention.q_DHA.get_value() == PartitionSpec(None, "tensor", None)
    assert specs.blocks[0].attention.o_HAD.get_value() == PartitionSpec("tensor", None, None)
    assert specs.blocks[0].mlp.down_FD.get_value() == PartitionSpec("tensor", None)
    assert specs.embed_VD.get_value() == PartitionSpec(None, None)


def test_two_axes_of_an_array_on_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match="twice on one mesh axis"):
        spec_of("HK", TENSOR_PARALLEL)


NINE = {"num_heads": 9, "num_kv_heads": 3}


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (1, {}),
        (2, {}),
        # The default target's heads, and one key/value head that every rank needs.
        (2, {**NINE, "attention_bias": True}),
        pytest.param(3, NINE, marks=pytest.mark.slow),
        pytest.param(4, NINE, marks=pytest.mark.slow),
        pytest.param(6, NINE, marks=pytest.mark.slow),
        (3, {"num_kv_heads": 1}),
    ],
    ids=str,
)
def test_the_whole_step_on_a_mesh_equals_one_device(devices, changes):
    """Prompts that repeat themselves, so that drafts are accepted."""
    model = toys.tiny(**changes)
    drafter = NGramDrafter(min_match=1, depth=3, sizes=(1, 4))
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 9, 9]]
    want = [done.token_ids for done in generate(model, drafter, prompts, Request(12))]
    model = on_ranks(model, devices)
    state, settings = begin(model, drafter, prompts, Request(12))
    settings = dataclasses.replace(settings, comm=TensorComm())
    mesh = jax.make_mesh((devices,), ("tensor",), axis_types=(AxisType.Auto,))
    specs = specs_by_name((model, state), TENSOR_PARALLEL)
    assert specs[1].cache.k_BKSA[0] == PartitionSpec(None, "tensor", None, None)
    model, state = jax.device_put((model, state), shardings(mesh, specs))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs[1])
    def run(model, state):
        return advance(model, drafter, state, settings, np.int32(100))[0]

    done = run(model, state)
    assert [tuple(row[:12]) for row in np.asarray(done.token_BE).tolist()] == want
    assert (np.asarray(done.record_BER)[:, :, 0] > 0).any(), "some draft was accepted"
