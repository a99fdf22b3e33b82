"""The whole speculation step of LLaMA-7B compiles for four v5e chips and for one H100."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from models.kv_cache import KVCache
from models.presets import preset
from models.transformer import Transformer
from parallel.aot import gpu_devices, tpu_devices
from parallel.comm import LOCAL, TensorComm
from parallel.sharding import TENSOR_PARALLEL, shardings, specs_by_name
from spec.decode import Settings, spec_step, start
from spec.drafters import NGramDrafter
from spec.sampling import rows
from spec.verify import rule

pytestmark = pytest.mark.aot

S, N, OUT = 2048, 16, 256


def arguments():
    """Shapes of the model and of the decoder's state; nothing is allocated."""
    config = preset("llama-7b")
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), jnp.bfloat16))
    drafter = NGramDrafter(sizes=(N,))

    def begin():
        return start(
            drafter,
            KVCache.empty(config, 1, S, jnp.bfloat16),
            jnp.zeros((1, 64, config.d_model), jnp.bfloat16),
            jnp.zeros((1, 64), jnp.int32),
            jnp.full(1, 64, jnp.int32),
            jnp.full(1, OUT, jnp.int32),
            jax.random.split(jax.random.key(0), 1),
            out_size=OUT,
            logprobs=False,
        )

    return model, drafter, jax.eval_shape(begin)


def settings_of(comm):
    return Settings(
        jnp.asarray([2], jnp.int32), jnp.asarray(2**30, jnp.int32), rows(0.0, 0, 1.0, 1),
        32000, rule("greedy"), comm,
    )  # fmt: skip


def build(devices, kernel):
    """Compiles one step with heads over all devices."""
    model, drafter, state = arguments()
    model.kernel = kernel
    comm = TensorComm() if len(devices) > 1 else LOCAL
    mesh = Mesh(np.asarray(devices), ("tensor",), axis_types=(AxisType.Auto,))
    rules = TENSOR_PARALLEL if len(devices) > 1 else {}
    specs = specs_by_name((model, state), rules)
    placed = jax.tree.map(
        lambda array, where: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
        (model, state),
        shardings(mesh, specs),
    )
    settings = settings_of(comm)

    def step(model, state):
        return spec_step(model, drafter, state, settings)[0]

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs[1])
    return jax.jit(mapped(step), donate_argnums=1).lower(*placed).compile()


def nodes_by_slots(text):
    """Arrays with both axes side by side, in either order: scores, or a mask as long."""
    return re.findall(rf"\w+\[(?:\d+,)*(?:{N},{S}|{S},{N})(?:,\d+)*\]", text)


def copies_of_the_cache(text, heads):
    """Copies and transpositions of as many elements as a layer's keys, whatever their shape.

    But for asynchronous moves between a TPU's memories (S(1) is VMEM) that keep the layout.
    """
    array = r"\w+\[([\d,]+)\](\{[^}]*\})?"
    found = []
    for line in text.splitlines():
        made = re.search(rf"= \(?{array}[^=]* (copy|copy-start|transpose)\(", line)
        if made is None or math.prod(map(int, made[1].split(","))) != heads * S * 128:
            continue
        layouts = {re.sub(r"S\(\d\)", "", each[1]) for each in re.findall(array, line)[:2]}
        if made[3] != "copy-start" or len(layouts) > 1:
            found.append(line.strip()[:120])
    return found


def check(text, call, heads):
    layers = preset("llama-7b").num_layers
    assert len(re.findall(rf'custom_call_target="{call}"', text)) == layers
    assert not nodes_by_slots(text)
    assert not copies_of_the_cache(text, heads)


def test_llama_7b_on_four_v5e_chips():
    check(build(tpu_devices("v5e:2x2"), "tpu").as_text(), "tpu_custom_call", 8)


def test_llama_7b_on_one_h100():
    check(build(gpu_devices("h100"), "gpu").as_text(), "mosaic_gpu_v2", 32)


def test_the_reference_has_what_the_kernel_avoids():
    """So that the checks above can fail."""
    text = build(gpu_devices("h100"), "reference").as_text()
    assert "mosaic_gpu" not in text
    assert nodes_by_slots(text)


def test_specs_are_not_all_replicated():
    model, _, state = arguments()
    specs = specs_by_name((model, state), TENSOR_PARALLEL)
    assert specs[1].cache.k_BKSA[0] == PartitionSpec(None, "tensor", None, None)
