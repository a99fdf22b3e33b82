"""Every implementation of tree attention against a dense float64 softmax.

The TPU kernel runs in interpret mode with race detection. The GPU kernel goes through the same
suite where there is a Hopper GPU (`make test-kernels PLATFORM=cuda`), in half precision; elsewhere
it is interpreted on a few shapes, since the interpreter of Mosaic GPU is slow and multiplies
outside (see gpu.py): fetching, waiting, masks, splits and their combination are what it tests.
`make test-kernels` runs the whole grid, `make test` a part of it.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention import block_sizes, gpu, tpu, tree_attention
from pallas_kernels.tree_attention.block_sizes import Blocks
from tests.common import toys
from tests.pallas_kernels.test_attention_reference import dense, inputs

HEADS = ((6, 2), (7, 1), (4, 4))
ON_GPU = any(device.platform == "gpu" for device in jax.devices())
IMPLEMENTATIONS = ("reference", "blocked", "tpu", *(("gpu",) if ON_GPU else ()))
SMALL, SQUARE = Blocks(kv=64, rows=32), Blocks(kv=64, rows=64)


def races_found(kind) -> bool:
    """Of the last interpreted call; jax 0.10.2 has no public way to ask."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpret_gpu

    races = interpret_pallas_call.races if kind == "tpu" else interpret_gpu.get_races()
    return bool(races.races_found)


@dataclasses.dataclass(frozen=True)
class Attend:
    """One implementation, and the dtype that stands for float32 there."""

    name: str

    @property
    def dtype(self):
        return jnp.bfloat16 if self.name == "gpu" else jnp.float32

    def __call__(self, *args, **options):
        return run(self.name, *args, **options)


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request, monkeypatch):
    """The public function with small blocks, so that small shapes have several."""
    monkeypatch.setattr(block_sizes, "DEFAULT", SMALL)
    return Attend(request.param)


def run(implementation, *args, races=True, **options):
    if implementation != "tpu":
        return tree_attention(*args, implementation=implementation, **options)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=races)):
        out = jax.block_until_ready(tree_attention(*args, implementation="tpu", **options))
    assert not (races and races_found("tpu"))
    return out


def scale_of(args):
    """The largest value: a weighted mean of values is at most that."""
    return max(float(jnp.abs(args[i].astype(jnp.float32)).max(initial=1)) for i in (2, 5))


def run_gpu(*args, blocks=SQUARE):
    """On the GPU if it can, else interpreted."""
    if ON_GPU:
        return tree_attention(*args, implementation="gpu")
    # jax 0.10.2 does not export the parameters of this interpreter.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    table_BX = jnp.arange(len(args[0]), dtype=jnp.int32)[:, None] if len(args) == 7 else args[7]
    interpret = InterpretGPUParams(detect_races=True)
    run = gpu.tree_attention(*args[:7], table_BX, blocks=blocks, interpret=interpret)
    out = jax.block_until_ready(run)
    assert not races_found("gpu")
    return out


def assert_right(got, args):
    out, lse = got
    tolerance = 2e-6 if args[0].dtype == jnp.float32 else 2e-2
    assert out.dtype == args[0].dtype
    want, want_lse = dense(*args, with_lse=True)
    assert np.abs(np.asarray(out, np.float64) - want).max() <= tolerance * scale_of(args)
    blind = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), blind)
    assert not np.asarray(out, np.float32)[blind].any(), "a blind query gives zeros"
    np.testing.assert_allclose(
        np.asarray(lse)[~blind], want_lse[~blind], rtol=tolerance, atol=10 * tolerance
    )


def arguments(N, S, A, heads, dtype=jnp.float32, M=None, seed=0):
    return inputs(np.random.default_rng(seed + N + S), N, S, A, *heads, M=M, dtype=dtype)


# Widths, ratios, one node, lengths that end inside a block.
SOME = [(1, 64, 64, (6, 2)), (21, 192, 80, (7, 1)), (5, 130, 128, (4, 4))]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_float32(attend, case):
    args = arguments(*case, attend.dtype)
    assert_right(attend(*args), args)


def test_bfloat16(attend):
    args = arguments(9, 128, 96, (6, 2), jnp.bfloat16)
    assert_right(attend(*args), args)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("A", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("N", "S"), [(1, 4096), (3, 1000), (64, 1024), (256, 128), (130, 96)])
def test_every_width(attend, N, S, A, dtype):
    dtype = jnp.float16 if attend.name == "gpu" and dtype == jnp.float32 else dtype
    args = arguments(N, S, A, HEADS[(N + A) % 3], dtype)
    assert_right(attend(*args), args)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 40),
    st.integers(1, 330),
    st.sampled_from([64, 80]),
    st.sampled_from(HEADS),
    st.integers(0, 99),
)
def test_any_shape(attend, N, S, A, heads, seed):
    """Several blocks of the cache and of rows, whatever they are cut from."""
    S = S if attend.name != "gpu" else 64 * -(-S // 64)
    args = arguments(N, S, A, heads, attend.dtype, seed=seed)
    assert_right(attend(*args), args)


@pytest.mark.slow
def test_a_long_cache(attend):
    """One head, 128k slots, without race detection."""
    args = inputs(np.random.default_rng(0), 2, 131072, 64, 1, 1, batch=2)
    assert_right(attend(*args, races=False), args)


def dirty(args):
    """NaN in all slots that hold nothing."""
    args = list(args)
    unused = np.arange(args[1].shape[2])[None, :] >= np.asarray(args[3])[:, None]
    for i in (1, 2):
        array = np.array(args[i])
        array[np.broadcast_to(unused[:, None, :, None], array.shape)] = np.nan
        args[i] = jnp.asarray(array)
    return args


def test_gpu_kernel():
    """Rows of length 0 and 96 of 192, several splits, NaN in unused slots."""
    args = inputs(np.random.default_rng(3), 3, 192, 64, 2, 1, dtype=jnp.bfloat16, batch=2)
    assert gpu.split(2, 3) == (3, 1)
    assert_right(run_gpu(*dirty(args)), args)


@pytest.mark.parametrize(
    ("blocks", "S", "steps"), [(Blocks(64, 64), 320, 5), (Blocks(128, 64), 512, 4)], ids=str
)
def test_gpu_kernel_walks_over_many_blocks(monkeypatch, blocks, S, steps):
    """One part of more blocks than fit at once: slots are used again, the last block is partial."""
    monkeypatch.setattr(gpu, "_BUSY", 1)
    args = list(inputs(np.random.default_rng(4), 3, S, 64, 2, 1, dtype=jnp.bfloat16, batch=2))
    args[3] = jnp.asarray([S - 30, 70], jnp.int32)
    block, stages = gpu.block_of(S, 64, blocks.kv)
    assert gpu.split(2, S // block) == (1, steps)
    assert steps > stages
    assert_right(run_gpu(*dirty(args), blocks=blocks), args)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("N", "S", "A", "heads"),
    [(1, 256, 128, (7, 1)), (21, 128, 80, (6, 2)), (33, 64, 96, (2, 1)), (5, 128, 256, (4, 4))],
)
def test_gpu_kernel_widths(N, S, A, heads, dtype):
    """One node, several blocks of rows, every head size."""
    args = arguments(N, S, A, heads, dtype)
    assert_right(run_gpu(*dirty(args)), args)


@pytest.mark.slow
def test_gpu_kernel_with_a_block_table():
    """Pages of two blocks, lengths that end inside either page."""
    q, k, v, _, tree_k, tree_v, mask = arguments(3, 256, 64, (2, 1), jnp.bfloat16)
    length = jnp.asarray([0, 100, 200], jnp.int32)
    table_BX, pages = paged(k, v)
    got = run_gpu(q, *pages, length, tree_k, tree_v, mask, table_BX)
    assert_right(got, (q, k, v, length, tree_k, tree_v, mask))


@pytest.mark.parametrize("N", [1, 8, 64, 130])
@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 129, 300), (128, 5, 256)], ids=str)
def test_blocked_walks_as_far_as_the_longest_row(N, lengths):
    """No block, ends inside and on the edge of a block, a last block that begins earlier."""
    args = list(arguments(N, 300, 64, (6, 2)))
    args[3] = jnp.asarray(lengths, jnp.int32)
    got = run("blocked", *dirty(args))
    assert_right(got, args)
    for mine, plain in zip(got, run("reference", *args), strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)


def test_blocked_never_scores_the_whole_cache():
    """Queries by slots is what the reference makes, so that its cost follows the capacity."""
    args = arguments(8, 1000, 64, (6, 2))
    for name, made in (("reference", True), ("blocked", False)):
        attend = functools.partial(tree_attention, implementation=name)
        text = jax.jit(attend).lower(*args).as_text()
        assert ("8x1000x" in text) == made


def test_more_tree_nodes_than_queries(attend):
    """A level of a tree behind the levels before it."""
    args = arguments(3, 64, 64, (6, 2), attend.dtype, M=11)
    assert_right(attend(*args), args)


def test_unused_slots_may_hold_anything(attend):
    args = arguments(4, 128, 64, (6, 2), attend.dtype)
    jax.tree.map(np.testing.assert_array_equal, attend(*dirty(args)), attend(*args))


def paged(k, v):
    """The halves of three rows on pages in any order, one page unused."""
    table_BX = jnp.asarray([[4, 0], [2, 6], [1, 5]], jnp.int32)
    B, K, S, A = k.shape
    pages = [
        jnp.zeros((7, K, S // 2, A), k.dtype)
        .at[table_BX.ravel()]
        .set(array.reshape(B, K, 2, S // 2, A).swapaxes(1, 2).reshape(6, K, S // 2, A))
        for array in (k, v)
    ]
    return table_BX, pages


@pytest.mark.parametrize(("S", "lengths"), [(128, (0, 64, 128)), (320, (70, 200, 310))], ids=str)
def test_a_block_table(attend, S, lengths):
    """Pages in any order give what the same tokens give side by side.

    Pages of one block, and of two and a half, so that the last stands out over its page's end.
    """
    S = S if attend.name != "gpu" else 2 * 64 * -(-S // 128)
    q, k, v, _, tree_k, tree_v, mask = arguments(5, S, 64, (6, 2), attend.dtype)
    length = jnp.asarray(lengths, jnp.int32)
    table_BX, pages = paged(k, v)
    got = attend(q, *pages, length, tree_k, tree_v, mask, table_BX)
    assert_right(got, (q, k, v, length, tree_k, tree_v, mask))


def test_equals_causal_attention_along_each_path(attend):
    """SpecInfer definition 4.1: node by node, its ancestors as an ordinary sequence."""
    q, k, v, length, tree_k, tree_v, _ = arguments(7, 64, 64, (6, 2), attend.dtype)
    mask = toys.walked_mask(toys.random_tree(np.random.default_rng(8), 7, 9, batch=3))
    out, _ = attend(q, k, v, length, tree_k, tree_v, jnp.asarray(mask))
    for b, n in itertools.product(range(3), range(7)):
        path = np.flatnonzero(mask[b, n])
        causal = np.tril(np.ones((len(path), len(path)), bool))[None]
        alone = dense(
            q[b : b + 1, path], k[b : b + 1], v[b : b + 1], length[b : b + 1],
            tree_k[b : b + 1, path], tree_v[b : b + 1, path], causal,
        )  # fmt: skip
        tolerance = 1e-5 if attend.dtype == jnp.float32 else 2e-2 * scale_of((q, k, v) * 2)
        np.testing.assert_allclose(np.float32(out[b, n]), alone[0, -1], atol=tolerance)


def test_one_mask_for_all_rows(attend):
    q, k, v, length, tree_k, tree_v, _ = arguments(5, 64, 64, (6, 2), attend.dtype)
    mask = jnp.tril(jnp.ones((5, 5), jnp.bool_))
    args = (q, k, v, length, tree_k, tree_v)
    assert_right(attend(*args, mask), (*args, jnp.broadcast_to(mask, (3, 5, 5))))


def launched_bytes(N, S, A, heads, dtype):
    """VMEM of the blocks and scratch of the launch itself, two blocks in flight, 128 lanes."""
    H, K = heads
    shapes = [(1, N, H, A), (1, K, S, A), (1, K, S, A), (1, N, K, A), (1, N, K, A)]
    q, k, v, tree_k, tree_v = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    length = jax.ShapeDtypeStruct((1,), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, N, N), jnp.bool_)
    run = functools.partial(tree_attention, implementation="tpu")
    jaxpr = jax.make_jaxpr(run)(q, k, v, length, tree_k, tree_v, mask)
    (call,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    grid = call.params["grid_mapping"]

    def size(shape, dtype):
        return math.prod(shape[:-1]) * -(-shape[-1] // 128) * 128 * dtype.itemsize

    blocks = 0
    for each in grid.block_mappings:
        shape = [n.block_size for n in each.block_shape if hasattr(n, "block_size")]
        blocks += 2 * size(shape, each.array_aval.dtype)
    return blocks + sum(size(ref.shape, ref.dtype) for ref in grid.scratch_avals)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (8, 1)], ids=str)
def test_memory_on_the_chip(heads, dtype):
    """What a launch asks for does not grow with the cache, and `vmem_bytes` counts it all."""
    for N, A in ((1, 64), (21, 128), (256, 256)):
        short, long = (launched_bytes(N, S, A, heads, dtype) for S in (1024, 131072))
        assert short == long
        rows = N * heads[0] // heads[1]
        counted = tpu.vmem_bytes(block_sizes.DEFAULT, rows, N, A, jnp.dtype(dtype))
        scores = 3 * min(256, -(-rows // 16) * 16) * max(512, -(-N // 128) * 128) * 4
        assert short <= counted <= short + scores + 2 * 256 * 128 * 4
