"""Tree attention on a Hopper GPU (Mosaic GPU): the cache streamed by TMA, split over S.

One block of threads takes 64 rows (queries times heads of a kv head) and a stretch of the cache: a
warp group only fetches, the other multiplies (wgmma) with an online softmax. With few rows and kv
heads the cache is split among many blocks, flash decoding's answer to an idle chip. Each split
gives a normalised output and a log-sum-exp; XLA combines them with the tree's own part, which is
small and dense, by the same rule. Blocks of the cache beyond a row's length are not fetched. More
than 64 rows read the cache again, from the chip's own cache as far as it holds it.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import reference
from pallas_kernels.tree_attention.block_sizes import Blocks
from pallas_kernels.tree_attention.rows import HEAD_SIZES, to_rows

ROWS = 64  # of one wgmma
# Blocks of threads that the cache is split into at least: two for each multiprocessor of an H100,
# whether they run at once (heads of 64) or in two rounds.
_BUSY = 264
_NOTHING = -1e30  # finite: a row that has seen nothing subtracts it from itself without NaN
_LOG2E = math.log2(math.e)


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
    interpret: Any = None,
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
        blocks: block sizes; `blocks.rows` is not used, a wgmma has 64.
        interpret: run on a CPU instead, for tests.

    Returns:
        The output [B, N, H, A] and the log-sum-exp of the scores [B, N, H], float32.
    """
    B, N, H, A = q_BNHA.shape
    K, S = k_PKSA.shape[1:3]
    X, G = table_BX.shape[1], H // K
    block_kv, stages = block_of(S, A, blocks.kv)
    R = -(-N * G // ROWS) * ROWS
    # A single block of rows writes only tiles that hold queries.
    kept = ROWS if R > ROWS else -(-N * G // 8) * 8
    R_out = R - ROWS + kept
    q_BKRA = to_rows(q_BNHA, K)
    q_BKRA = jnp.pad(q_BKRA, ((0, 0), (0, 0), (0, R - N * G), (0, 0)))
    per_page = S // block_kv
    splits, per_split = split(B * K * (R // ROWS), X * per_page)
    # A block is one index, not a slice with a start that is only known at run time.
    k, v = (array.reshape(-1, K, per_page, block_kv, A) for array in (k_PKSA, v_PKSA))

    body = functools.partial(
        _kernel,
        per_page=per_page,
        per_split=per_split,
        scale=A**-0.5,
        interpreted=interpret is not None,
    )
    tile, out_tile = _tiled(A, q_BNHA.dtype), _tiled(A, jnp.dtype(jnp.float32))
    out_ZBKRA, lse_ZBKrR = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((splits, B, K, R_out, A), jnp.float32),
            jax.ShapeDtypeStruct((splits, B, K, R // ROWS, ROWS), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((ROWS, A), q_BNHA.dtype, transforms=tile),
            plgpu.SMEM((stages, block_kv, A), q_BNHA.dtype, transforms=tile),
            plgpu.SMEM((stages, block_kv, A), q_BNHA.dtype, transforms=tile),
            plgpu.SMEM((ROWS, A), jnp.float32, transforms=out_tile),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(splits, R // ROWS, K, B),
        grid_names=("split", "rows", "head", "batch"),
        num_threads=2,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(length_B, table_BX, q_BKRA, k, v)

    def by_node(array: jax.Array) -> jax.Array:  # [Z, B, K, R, ...] -> [Z, B, N, H, ...]
        rest = array.shape[4:]
        array = array[:, :, :, : N * G].reshape(splits, B, K, N, G, *rest)
        return jnp.moveaxis(array, 3, 2).reshape(splits, B, N, H, *rest)

    no_cache = jnp.zeros((B, K, 0, A), k.dtype)
    tree_out, tree_lse = reference.tree_attention(
        q_BNHA, no_cache, no_cache, jnp.zeros_like(length_B), tree_k_BMKA, tree_v_BMKA, mask_BNM
    )
    return combine(
        jnp.concatenate([by_node(out_ZBKRA), tree_out.astype(jnp.float32)[None]]),
        jnp.concatenate([by_node(lse_ZBKrR.reshape(splits, B, K, R)), tree_lse[None]]),
        q_BNHA.dtype,
    )


def combine(
    out_ZBNHA: jax.Array, lse_ZBNH: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Joins attention over Z disjoint sets of keys: a mean weighted by exp(log-sum-exp).

    Args:
        out_ZBNHA: float32 output over each set.
        lse_ZBNH: float32 log-sum-exp over each set, -inf (or a very small number) for none.
        dtype: of the result.
    """
    top_BNH = jnp.max(lse_ZBNH, axis=0)
    blind_BNH = top_BNH < _NOTHING / 2  # in whatever base of the logarithm
    weight_ZBNH = jnp.exp(lse_ZBNH - jnp.where(blind_BNH, 0.0, top_BNH)[None])
    weight_ZBNH = jnp.where(blind_BNH[None], 0.0, weight_ZBNH)
    total_BNH = jnp.where(blind_BNH, 1.0, weight_ZBNH.sum(0))
    out_BNHA = jnp.einsum("ZBNH,ZBNHA->BNHA", weight_ZBNH, out_ZBNHA, precision="highest")
    out_BNHA /= total_BNH[..., None]
    lse_BNH = jnp.where(blind_BNH, -jnp.inf, top_BNH + jnp.log(total_BNH))
    return out_BNHA.astype(dtype), lse_BNH


def _kernel(
    length_B: Any,
    table_BX: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    q_RA: Any,
    k_ZSA: Any,
    v_ZSA: Any,
    out_RA: Any,
    q_ready: Any,
    k_ready: Any,
    v_ready: Any,
    k_free: Any,
    v_free: Any,
    *,
    per_page: int,
    per_split: int,
    scale: float,
    interpreted: bool,
) -> None:
    """One stretch of the cache for 64 rows. Group 0 computes, group 1 fetches."""
    z, r, head, b = (lax.axis_index(name) for name in ("split", "rows", "head", "batch"))
    stages, block_kv, A = k_ZSA.shape
    first = z * per_split
    length = length_B[b]

    def laid(array: jax.Array, layout: Any) -> jax.Array:  # layouts mean nothing to the interpreter
        return array if interpreted else plgpu.layout_cast(array, layout)

    used = lax.div(length + (block_kv - 1), block_kv)
    steps = jnp.clip(used - first, 0, per_split)

    @pl.when(lax.axis_index("group") == 1)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            slot = lax.rem(step, stages)
            at = first + step
            page, part = table_BX[b, lax.div(at, per_page)], lax.rem(at, per_page)
            for source, target, ready, free in (
                (k, k_ZSA, k_ready, k_free),
                (v, v_ZSA, v_ready, v_free),
            ):

                @pl.when(step >= stages)
                def _(free: Any = free) -> None:
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(
                    source.at[page, head, part], target.at[slot], ready.at[slot]
                )

    @pl.when(lax.axis_index("group") == 0)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        plgpu.copy_gmem_to_smem(q.at[b, head, pl.ds(r * ROWS, ROWS)], q_RA, q_ready)
        plgpu.barrier_wait(q_ready)

        def release(free: Any, step: jax.Array) -> None:
            # Said only where the other group will wait for it: a barrier must not end with a phase
            # that nobody has seen.
            @pl.when(step + stages < steps)
            def _() -> None:
                plgpu.barrier_arrive(free.at[lax.rem(step, stages)])

        def step_(step: jax.Array, carry: tuple) -> tuple:
            mixed_RA, top_R, total_R = carry
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(k_ready.at[slot])

            score_RS = _scores(q_RA, k_ZSA.at[slot], interpreted)
            release(k_free, step)
            left = length - (first + step) * block_kv
            at_RS = lax.broadcasted_iota(jnp.int32, (ROWS, block_kv), 1)
            at_RS = laid(at_RS, plgpu.Layout.WGMMA)
            score_RS = jnp.where(at_RS < left, score_RS * (scale * _LOG2E), _NOTHING)
            new_R = jnp.maximum(top_R, score_RS.max(axis=1))
            shrink_R = jnp.exp2(top_R - new_R)
            weight_RS = jnp.exp2(score_RS - lax.broadcast_in_dim(new_R, score_RS.shape, [0]))
            mixed_RA *= lax.broadcast_in_dim(shrink_R, mixed_RA.shape, [0])
            total_R = total_R * shrink_R + weight_RS.sum(axis=1)
            plgpu.barrier_wait(v_ready.at[slot])

            @pl.when(left < block_kv)
            def _() -> None:
                # Unused slots may hold anything, NaN included, and 0 * NaN is NaN.
                at_SA = laid(lax.broadcasted_iota(jnp.int32, (block_kv, A), 0), plgpu.Layout.WGMMA)
                v_SA = v_ZSA[slot]
                v_ZSA[slot] = jnp.where(at_SA < left, v_SA, jnp.zeros_like(v_SA))
                plgpu.commit_smem()

            weight_RS = weight_RS.astype(v_ZSA.dtype)
            mixed_RA = _mix(mixed_RA, weight_RS, v_ZSA.at[slot], interpreted)
            release(v_free, step)
            return mixed_RA, new_R, total_R

        def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
            return laid(jnp.full(shape, value, jnp.float32), layout)

        begin = (
            full((ROWS, A), 0, plgpu.Layout.WGMMA),
            full((ROWS,), _NOTHING, plgpu.Layout.WGMMA.reduce(1)),
            full((ROWS,), 0, plgpu.Layout.WGMMA.reduce(1)),
        )
        mixed_RA, top_R, total_R = lax.fori_loop(0, steps, step_, begin)
        safe_R = jnp.where(total_R > 0, total_R, 1.0)
        out_RA[...] = mixed_RA / lax.broadcast_in_dim(safe_R, mixed_RA.shape, [0])
        # No step: total is 0 and top the finite nothing, which `combine` weighs as nothing.
        lse[z, b, head, r] = (top_R + jnp.log2(safe_R)) * (1 / _LOG2E)
        plgpu.commit_smem()
        kept = min(ROWS, out.shape[3])
        rows = pl.ds(r * ROWS, kept)
        plgpu.copy_smem_to_gmem(out_RA.at[pl.ds(0, kept)], out.at[z, b, head, rows])
        plgpu.wait_smem_to_gmem(0)


def _scores(q_RA: Any, k_SA: Any, interpreted: bool) -> jax.Array:
    """Returns q k^T.

    The interpreter of jax 0.10.2 knows neither a transposed operand, nor one in registers, nor
    `run_state`: there XLA multiplies the same arrays.
    """
    if interpreted:
        return jnp.dot(q_RA[...].astype(jnp.float32), k_SA[...].astype(jnp.float32).T)

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, q_RA, plgpu.transpose_ref(k_SA, (1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((q_RA.shape[0], k_SA.shape[0]), jnp.float32))


def _mix(mixed_RA: jax.Array, weight_RS: jax.Array, v_SA: Any, interpreted: bool) -> jax.Array:
    """Returns mixed + weight v, in place."""
    if interpreted:
        return mixed_RA + jnp.dot(weight_RS.astype(jnp.float32), v_SA[...].astype(jnp.float32))

    def multiply(acc: Any) -> None:
        plgpu.wgmma(acc, weight_RS, v_SA)

    return pl.run_state(multiply)(plgpu.ACC.init(mixed_RA))


def block_of(slots: int, head_size: int, wanted: int) -> tuple[int, int]:
    """Returns cached tokens a block, 64 or 128, and how many blocks are in flight.

    Shared memory stays below the 227 KiB of a Hopper block (see `smem_bytes`) with some 100 KiB of
    the cache on their way.
    """
    block = 128 if head_size <= 64 and wanted >= 128 and slots % 128 == 0 else 64
    return block, 2 if head_size > 128 else 3


def split(blocks: int, steps: int) -> tuple[int, int]:
    """Returns how many parts the cache is cut into, and how many of its blocks a part has."""
    parts = min(max(1, -(-_BUSY // blocks)), steps)
    per_split = -(-steps // parts)
    return -(-steps // per_split), per_split


def smem_bytes(block_kv: int, stages: int, head_size: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the shared memory of a block of threads, whatever the cache's length."""
    size = jnp.dtype(dtype).itemsize
    cached = 2 * stages * block_kv * head_size * size
    return cached + ROWS * head_size * (size + 4) + 8 * (1 + 4 * stages)


def refusal(q_BNHA: jax.Array, k_PKSA: jax.Array) -> str | None:
    """Returns why the kernel does not take these arrays, or None."""
    A, dtype, S = q_BNHA.shape[3], q_BNHA.dtype, k_PKSA.shape[2]
    if A not in HEAD_SIZES:
        return f"heads of {A}: the GPU kernel takes {HEAD_SIZES}; use the reference."
    if dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"{dtype} queries: the GPU kernel takes bfloat16 and float16 (float32 would be tf32 in "
            "Hopper's matrix units); use the reference."
        )
    if k_PKSA.dtype != dtype:
        return f"a cache of {k_PKSA.dtype} for queries of {dtype}: the GPU kernel takes one dtype."
    if not S or S % 64:
        return f"{S} slots a page: the GPU kernel takes a multiple of 64; use the reference."
    return None


def _tiled(head_size: int, dtype: jnp.dtype) -> tuple:
    """Returns the layout in shared memory that wgmma reads: tiles of 8 rows, swizzled."""
    bits = 8 * dtype.itemsize
    swizzle = plgpu.find_swizzle(head_size * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return tiling, plgpu.SwizzleTransform(swizzle)
