"""What tree attention takes and refuses, and which implementation the platform gets."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from pallas_kernels.tree_attention import _has_hopper, tree_attention
from tests.pallas_kernels.test_attention_kernels import arguments


@pytest.mark.parametrize(
    ("implementation", "A", "dtype", "words"),
    [
        ("tpu", 16, jnp.float32, "heads of 16: the TPU kernel takes"),
        ("tpu", 64, jnp.float16, "float16 queries"),
        ("gpu", 64, jnp.float32, "tf32"),
        ("gpu", 16, jnp.bfloat16, "heads of 16: the GPU kernel takes"),
        ("cuda", 64, jnp.float32, "choose reference or"),
    ],
)
def test_an_explicit_choice_is_kept_or_refused(implementation, A, dtype, words):
    args = arguments(3, 64, A, (6, 2), dtype)
    with pytest.raises(ValueError, match=words):
        tree_attention(*args, implementation=implementation)


def test_the_platform_decides_by_default():
    """Lowered for a TPU the kernel, for a CPU what XLA makes; where it does not fit, never."""
    for case, kernel in (((3, 64, 64, (6, 2)), True), ((3, 64, 16, (6, 2)), False)):
        args = arguments(*case)
        for platform, expected in (("tpu", kernel), ("cpu", False)):
            exported = jax.export.export(jax.jit(tree_attention), platforms=[platform])(*args)
            assert ("tpu_custom_call" in exported.mlir_module()) == expected


@pytest.mark.parametrize(
    ("position", "change", "words"),
    [
        (0, lambda a: a[:, :, 0], r"q_BNHA has shape \(3, 3, 64\), wanted 4 axes"),
        (0, lambda a: a[:, :0], "none empty"),
        (0, lambda a: jnp.int32(a), "q_BNHA has dtype int32"),
        (0, lambda a: a[:, :, :5], "5 query heads do not divide into 2"),
        (1, lambda a: a[:, :, :, :8], "k_BKSA has shape"),
        (2, lambda a: a.astype(jnp.bfloat16), "v_BKSA has dtype bfloat16, wanted float32"),
        (3, lambda a: a.astype(jnp.int16), "length_B has dtype int16, wanted int32"),
        (3, lambda a: a[:2], r"length_B has shape \(2,\)"),
        (4, lambda a: a[:, :2], "3 queries for 2 tree nodes"),
        (5, lambda a: a.astype(jnp.bfloat16), "tree_v_BMKA has dtype bfloat16"),
        (6, lambda a: a.astype(jnp.int32), "mask_BNM is int32"),
        (6, lambda a: a[0, 0], "wanted bool"),
        (6, lambda a: a[:, :, :2], "M >= N"),
        (7, lambda a: jnp.zeros(3, jnp.int32), r"table_BX has shape \(3,\), wanted \(3, 1\)"),
        (7, lambda a: jnp.zeros((3, 0), jnp.int32), r"table_BX .*wanted \(3, 1\)"),
    ],
)
def test_bad_arguments_are_refused(position, change, words):
    """One error each, by name, before anything is computed."""
    args = [*arguments(3, 64, 64, (6, 2)), None]
    args[position] = change(args[position])
    with pytest.raises(ValueError, match=words):
        tree_attention(*args)


def test_trees_beyond_the_kernels_width():
    args = arguments(257, 64, 64, (1, 1))
    with pytest.raises(ValueError, match="257 queries, 257 tree nodes: the kernels take 256"):
        tree_attention(*args, implementation="tpu")
    exported = jax.export.export(jax.jit(tree_attention), platforms=["tpu"])(*args)
    assert "tpu_custom_call" not in exported.mlir_module()


@pytest.mark.parametrize(("capability", "kernel"), [("8.0", False), ("9.0", True), ("10.0", False)])
def test_the_gpu_kernel_is_hoppers(monkeypatch, capability, kernel):
    """Its matrix instruction is in no other architecture: not on an A100, not on Blackwell."""
    gpus = [SimpleNamespace(platform="gpu", compute_capability=capability)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    assert _has_hopper() == kernel


@pytest.mark.parametrize("ndim", [2, 3])
def test_a_constant_mask_is_checked_under_jit_too(ndim):
    args = arguments(3, 64, 64, (6, 2))[:6]
    broken = np.tril(np.ones((3, 3, 3), bool))
    broken[:, 2, 0] = False
    mask = broken if ndim == 3 else broken[0]
    with pytest.raises(ValueError, match="not closed under ancestors"):
        jax.jit(lambda *args: tree_attention(*args, mask))(*args)


def test_a_mask_that_forgets_an_ancestor_is_refused():
    """Node 2 sees 1, which sees 0, but not 0: at trace time if constant, else when checked."""
    args = list(arguments(3, 64, 64, (6, 2)))
    broken = np.tril(np.ones((3, 3, 3), bool))
    broken[1, 2, 0] = False
    args[6] = jnp.asarray(broken)
    with pytest.raises(ValueError, match="not closed under ancestors"):
        tree_attention(*args)
    checked = jax.jit(checkify.checkify(lambda *a: tree_attention(*a, checked=True)))
    error, _ = checked(*args)
    with pytest.raises(checkify.JaxRuntimeError, match="not closed under ancestors"):
        error.throw()


def test_lengths_and_tables_out_of_range_are_refused_when_checked():
    args = list(arguments(3, 64, 64, (6, 2)))
    checked = jax.jit(checkify.checkify(lambda *a: tree_attention(*a, checked=True)))
    checked(*args)[0].throw()
    args[3] = jnp.asarray([0, 65, 64], jnp.int32)
    with pytest.raises(checkify.JaxRuntimeError, match=r"length_B = .*wanted 0\.\.64"):
        checked(*args)[0].throw()
    args[3] = jnp.asarray([0, 1, 64], jnp.int32)
    with pytest.raises(checkify.JaxRuntimeError, match=r"(?s)table_BX = .*wanted 0\.\.2"):
        checked(*args, jnp.asarray([[0], [1], [3]], jnp.int32))[0].throw()
