"""Tree attention on a TPU (Mosaic): cached keys and values stream through VMEM, one online softmax.

The N queries of the G heads that share a key/value head are R = N * G rows of one matrix. A cached
block is read once for each block of them (256 by default: the cache is read once for 64 nodes of
Llama-3-8B), so a tree costs little more than a token: both wait for the same bytes. Grid: row of
the batch, kv head, block of rows, block of the cache; the last step of the innermost axis does the
tree itself and writes the result. VMEM holds two blocks of the cache (Pallas fetches the next while
this one is used), whatever the cache's length. Blocks beyond a row's length are not fetched: their
index repeats the last needed one (the first, for an empty row).

The mask lies as [rows, tree nodes], tree nodes along the lanes like the scores they select from:
in another layout each score tile would need a relayout.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention.block_sizes import Blocks
from pallas_kernels.tree_attention.rows import HEAD_SIZES, to_rows

# Finite, so that a row which has seen nothing yet subtracts it from itself without NaN.
_NOTHING = -1e30


def tree_attention(
    q_BNHA: jax.Array,
    k_PKSA: jax.Array,
    v_PKSA: jax.Array,
    length_B: jax.Array,
    tree_k_BMKA: jax.Array,
    tree_v_BMKA: jax.Array,
    mask_BNM: jax.Array,
    table_BX: jax.Array,
    *,
    blocks: Blocks,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.tree_attention`; S slots a page here, X pages a row.

    Args:
        q_BNHA: queries.
        k_PKSA: cached keys by page.
        v_PKSA: cached values by page.
        length_B: int32, cached tokens of each row.
        tree_k_BMKA: keys of tree nodes.
        tree_v_BMKA: values of tree nodes.
        mask_BNM: bool.
        table_BX: int32, page of each X-th stretch of S slots of a row.
        blocks: block sizes.
        interpret: run on a CPU instead, for tests.

    Returns:
        The output [B, N, H, A] and the log-sum-exp of the scores [B, N, H], float32, -inf for
        queries that see nothing.
    """
    B, N, H, A = q_BNHA.shape
    K, S = k_PKSA.shape[1:3]
    X, M, G = table_BX.shape[1], tree_k_BMKA.shape[1], H // K
    block_kv = min(S, blocks.kv)
    rows = _round_up(min(blocks.rows, N * G), 32 // q_BNHA.dtype.itemsize)
    R = _round_up(N * G, rows)
    q_BKRA = to_rows(q_BNHA, K)
    q_BKRA = _pad(q_BKRA, 2, R)
    nodes = _round_up(M, 128)  # whole lanes
    mask_BRM = _pad(_pad(jnp.repeat(mask_BNM, G, axis=1).astype(jnp.int32), 1, R), 2, nodes)
    tree_k_BKMA, tree_v_BKMA = (
        _pad(array.swapaxes(1, 2), 2, nodes) for array in (tree_k_BMKA, tree_v_BMKA)
    )
    per_page = pl.cdiv(S, block_kv)  # the last block of a page may stand out over its end
    steps = X * per_page

    Index = tuple[jax.Array | int, ...]

    def cached(
        b: jax.Array, k: jax.Array, r: jax.Array, s: jax.Array, length: Any, table: Any
    ) -> Index:
        last = jnp.maximum(length[b] - 1, 0)
        needed = lax.div(last, S) * per_page + lax.div(lax.rem(last, S), block_kv)
        at = jnp.minimum(s, needed)
        return table[b, lax.div(at, per_page)], k, lax.rem(at, per_page), 0

    def by_rows(b: jax.Array, k: jax.Array, r: jax.Array, s: jax.Array, *_: Any) -> Index:
        return b, k, r, 0

    def whole(b: jax.Array, k: jax.Array, r: jax.Array, s: jax.Array, *_: Any) -> Index:
        return b, k, 0, 0

    varying = jax.typeof(q_BNHA).manual_axis_type
    out_BKRA, lse_BKR1 = pl.pallas_call(
        functools.partial(
            _kernel, page=S, per_page=per_page, block_kv=block_kv, steps=steps, scale=A**-0.5
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, K, R // rows, steps + 1),
            in_specs=[
                pl.BlockSpec((None, None, rows, A), by_rows),
                pl.BlockSpec((None, None, block_kv, A), cached),
                pl.BlockSpec((None, None, block_kv, A), cached),
                pl.BlockSpec((None, None, nodes, A), whole),
                pl.BlockSpec((None, None, nodes, A), whole),
                pl.BlockSpec((None, rows, nodes), lambda b, k, r, s, *_: (b, r, 0)),
            ],
            out_specs=[
                pl.BlockSpec((None, None, rows, A), by_rows),
                pl.BlockSpec((None, None, rows, 1), by_rows),
            ],
            scratch_shapes=[
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, A), jnp.float32),
            ],
        ),
        out_shape=[
            # Under `shard_map` the result varies over the mesh as the queries do.
            jax.ShapeDtypeStruct((B, K, R, A), q_BNHA.dtype, manual_axis_type=varying),
            jax.ShapeDtypeStruct((B, K, R, 1), jnp.float32, manual_axis_type=varying),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="tree_attention",
    )(length_B, table_BX, q_BKRA, k_PKSA, v_PKSA, tree_k_BKMA, tree_v_BKMA, mask_BRM)

    def by_node(array_BKRx: jax.Array) -> jax.Array:
        last = array_BKRx.shape[3]
        array = array_BKRx[:, :, : N * G].reshape(B, K, N, G, last)
        return array.transpose(0, 2, 1, 3, 4).reshape(B, N, H, last)

    return by_node(out_BKRA), by_node(lse_BKR1)[..., 0]


def _kernel(
    length_B: Any,
    table_BX: Any,
    q: Any,
    k: Any,
    v: Any,
    tree_k: Any,
    tree_v: Any,
    mask: Any,
    out: Any,
    lse: Any,
    top: Any,
    total: Any,
    mixed: Any,
    *,
    page: int,
    per_page: int,
    block_kv: int,
    steps: int,
    scale: float,
) -> None:
    """One step: a block of the cache, or at the end the tree. `top`, `total`, `mixed` carry over.

    `top` is the largest score so far, `total` the sum of exp(score - top), `mixed` that of
    exp(score - top) * value.
    """
    del table_BX  # the index maps have used it
    s = pl.program_id(3)
    length = length_B[pl.program_id(0)]

    @pl.when(s == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, _NOTHING, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)

    def add(keys: jax.Array, values: jax.Array, seen: jax.Array) -> None:
        exact = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT
        dot = functools.partial(
            lax.dot_general, precision=exact, preferred_element_type=jnp.float32
        )
        score = dot(q[...], keys, (((1,), (1,)), ((), ()))) * scale
        score = jnp.where(seen, score, _NOTHING)
        new = jnp.maximum(top[...], jnp.max(score, axis=1, keepdims=True))
        weight = jnp.where(seen, jnp.exp(score - new), 0.0)
        shrink = jnp.exp(top[...] - new)
        top[...] = new
        total[...] = shrink * total[...] + jnp.sum(weight, axis=1, keepdims=True)
        mixed[...] = shrink * mixed[...] + dot(
            weight.astype(values.dtype), values, (((1,), (0,)), ((), ()))
        )

    begin = lax.div(s, per_page) * page
    left = jnp.minimum(length - begin, page) - lax.rem(s, per_page) * block_kv

    @pl.when((s < steps) & (left > 0))
    def _() -> None:
        # Unused slots may hold anything, NaN included, and 0 * NaN is NaN.
        used = lax.broadcasted_iota(jnp.int32, v.shape, 0) < left
        values = jnp.where(used, v[...], jnp.zeros(v.shape, v.dtype))
        slot = lax.broadcasted_iota(jnp.int32, (q.shape[0], block_kv), 1)
        add(k[...], values, slot < left)

    @pl.when(s == steps)
    def _() -> None:
        add(tree_k[...], tree_v[...], mask[...] != 0)
        blind = total[...] == 0
        safe = jnp.where(blind, 1.0, total[...])
        out[...] = (mixed[...] / safe).astype(out.dtype)
        lse[...] = jnp.where(blind, -jnp.inf, top[...] + jnp.log(safe))


def refusal(q_BNHA: jax.Array, k_PKSA: jax.Array) -> str | None:
    """Returns why the kernel does not take these arrays, or None."""
    A, dtype = q_BNHA.shape[3], q_BNHA.dtype
    if A not in HEAD_SIZES:
        return f"heads of {A}: the TPU kernel takes {HEAD_SIZES}; use the reference."
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"{dtype} queries: the TPU kernel takes float32 and bfloat16; cast them."
    if not k_PKSA.shape[2]:
        return "no cache slots: the TPU kernel streams a cache; use the reference."
    if k_PKSA.dtype != dtype:
        return f"a cache of {k_PKSA.dtype} for queries of {dtype}: the TPU kernel takes one dtype."
    return None


def vmem_bytes(blocks: Blocks, rows: int, nodes: int, head_size: int, dtype: jnp.dtype) -> int:
    """Returns the VMEM that a launch asks for: its blocks, twice each, its scratch, its scores.

    It does not depend on the cache's length. Lanes are padded to 128.

    Args:
        blocks: block sizes.
        rows: queries times heads of a kv head (R).
        nodes: tree nodes (M).
        head_size: A.
        dtype: of queries, keys and values.
    """
    size = jnp.dtype(dtype).itemsize
    rows = _round_up(min(blocks.rows, rows), 32 // size)
    nodes, lanes = _round_up(nodes, 128), _round_up(head_size, 128)
    piped = rows * lanes * size * 2 + 2 * (blocks.kv + nodes) * lanes * size  # q, out, k, v, tree
    piped += rows * nodes * 4 + rows * 128 * 4  # mask, log-sum-exp
    scratch = 2 * rows * 128 * 4 + rows * lanes * 4
    scores = 3 * rows * max(blocks.kv, nodes) * 4  # scores, weights, the weights rounded
    return 2 * piped + scratch + scores


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _pad(array: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths)
