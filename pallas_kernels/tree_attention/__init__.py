"""Attention of the nodes of a token tree over a cached prefix and over the tree itself.

One function, four backends of one signature: `reference` (XLA, anywhere), `blocked` (XLA, which
follows the lengths and not the capacity), `tpu` (Mosaic) and `gpu` (Mosaic GPU, Hopper; its matrix
instruction exists on no other architecture, Blackwell included).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from pallas_kernels.tree_attention import blocked, gpu, reference, tpu
from pallas_kernels.tree_attention.block_sizes import blocks_for

__all__ = ["Implementation", "tree_attention"]

# Widest tree that the kernels are built for (their memory on the chip grows with it).
MOST_NODES = 256

Implementation = Literal["reference", "blocked", "tpu", "gpu"]


def tree_attention(
    q_BNHA: jax.Array,
    k_BKSA: jax.Array,
    v_BKSA: jax.Array,
    length_B: jax.Array,
    tree_k_BMKA: jax.Array,
    tree_v_BMKA: jax.Array,
    mask_BNM: jax.Array,
    table_BX: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    checked: bool = False,
    device_kind: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from N tree nodes to a cached prefix and to the M nodes of the tree so far.

    Equals ordinary causal attention along every root-to-node path (tree attention, SpecInfer
    definition 4.1) when the mask is the ancestor mask. One function serves four callers: M = N a
    tree under verification or (mask lower triangular) a chunk of a prompt; N = 1 plain decoding;
    S = 0 training; M > N a tree grown level by level, the queries being its last level.

    Args:
        q_BNHA: queries, already rotated; H = K * G query heads, head h reads kv head h // G.
        k_BKSA: cached keys, slots >= length_B unread. With a table [pages, K, page, A].
        v_BKSA: cached values, laid out as the keys.
        length_B: int32, number of cached tokens of each row, 0..S.
        tree_k_BMKA: keys of the tree nodes.
        tree_v_BMKA: values of the tree nodes.
        mask_BNM: bool, True where query n may see tree node m; or [N, M], the same for all rows.
        table_BX: int32, page that holds tokens x * page ... of a row; None for a dense cache,
            whose rows are the pages.
        implementation: "reference" and "blocked" run anywhere, the latter without a gradient;
            "tpu" and "gpu" are kernels, and an argument that they do not take is an error. None
            picks by the platform that the program is lowered for: the TPU kernel on TPUs, the GPU
            kernel if this machine's GPUs are Hopper, blocked on CPUs, the reference elsewhere, for
            arguments that the kernel does not take, and for S = 0, where gradients are wanted. To
            build for a GPU that is not here, name it.
        checked: under `checkify.checkify`, verify at run time what is only known then: lengths
            within 0..S, a table within the pages, a mask closed under ancestors.
        device_kind: whose tuned block sizes to use, as `jax.Device.device_kind`; None for the
            default device's. For programs that are compiled for a device that is not here.

    Returns:
        The output [B, N, H, A] in the dtype of `q_BNHA`, and the log-sum-exp of each query's
        scores, float32 [B, N, H], natural logarithm. A query that may see nothing gives zeros and
        -inf.

    Raises:
        ValueError: for shapes, dtypes or (if constant) masks that do not fit, and for what an
            explicitly chosen implementation does not take. The message names value and fix.
    """
    _check_mask(mask_BNM)
    if mask_BNM.ndim == 2:
        mask_BNM = jnp.broadcast_to(mask_BNM, (q_BNHA.shape[0], *mask_BNM.shape))
    _check(q_BNHA, k_BKSA, v_BKSA, length_B, tree_k_BMKA, tree_v_BMKA, mask_BNM, table_BX)
    if checked:
        _check_values(k_BKSA, length_B, mask_BNM, table_BX)
    dense = table_BX is None
    if table_BX is None:
        table_BX = jnp.arange(q_BNHA.shape[0], dtype=jnp.int32)[:, None]
    args = (q_BNHA, k_BKSA, v_BKSA, length_B, tree_k_BMKA, tree_v_BMKA, mask_BNM, table_BX)

    rows = q_BNHA.shape[1] * q_BNHA.shape[2] // k_BKSA.shape[1]
    slots = table_BX.shape[1] * k_BKSA.shape[2]
    kind = device_kind or jax.devices()[0].device_kind
    itemsize = q_BNHA.dtype.itemsize
    blocks = blocks_for(kind, rows, tree_k_BMKA.shape[1], q_BNHA.shape[3], slots, itemsize)
    plain = functools.partial(_plain, dense=dense)
    kernels: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
        "blocked": functools.partial(blocked.tree_attention, dense=dense),
        "tpu": functools.partial(tpu.tree_attention, blocks=blocks),
        "gpu": functools.partial(gpu.tree_attention, blocks=blocks),
    }
    refusals = {name: each.refusal(q_BNHA, k_BKSA) for name, each in (("tpu", tpu), ("gpu", gpu))}
    if max(q_BNHA.shape[1], tree_k_BMKA.shape[1]) > MOST_NODES:
        what = f"{q_BNHA.shape[1]} queries, {tree_k_BMKA.shape[1]} tree nodes: the kernels take "
        refusals = dict.fromkeys(refusals, f"{what}{MOST_NODES}; use the reference.")
    refusals["blocked"] = ""
    if implementation == "reference":
        return plain(*args)
    if implementation is not None:
        if implementation not in kernels:
            raise ValueError(
                f"implementation = {implementation!r}: choose reference or {', '.join(kernels)}."
            )
        if refusals[implementation]:
            raise ValueError(f"implementation = {implementation!r}: {refusals[implementation]}")
        return kernels[implementation](*args)
    fit = {}
    if slots:
        fit["cpu"] = kernels["blocked"]
    if not refusals["tpu"]:
        fit["tpu"] = kernels["tpu"]
    if not refusals["gpu"] and _has_hopper():
        fit["cuda"] = kernels["gpu"]
    if not fit:
        return plain(*args)
    return jax.lax.platform_dependent(*args, **fit, default=plain)


def _has_hopper() -> bool:
    """Says whether this machine's GPUs run the GPU kernel: compute capability 9.x."""
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    return bool(gpus) and all(9 <= float(gpu.compute_capability) < 10 for gpu in gpus)


def _plain(
    q_BNHA: jax.Array,
    k_PKSA: jax.Array,
    v_PKSA: jax.Array,
    length_B: jax.Array,
    tree_k_BMKA: jax.Array,
    tree_v_BMKA: jax.Array,
    mask_BNM: jax.Array,
    table_BX: jax.Array,
    *,
    dense: bool,
) -> tuple[jax.Array, jax.Array]:
    """The reference behind the signature of the kernels."""
    if not dense:
        k_PKSA, v_PKSA = (reference.gather_pages(pages, table_BX) for pages in (k_PKSA, v_PKSA))
    return reference.tree_attention(
        q_BNHA, k_PKSA, v_PKSA, length_B, tree_k_BMKA, tree_v_BMKA, mask_BNM
    )


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    tree_k: jax.Array,
    tree_v: jax.Array,
    mask: jax.Array,
    table: jax.Array | None,
) -> None:
    for name, array, rank in (("q_BNHA", q, 4), ("k_BKSA", k, 4), ("tree_k_BMKA", tree_k, 4)):
        if array.ndim != rank or 0 in (array.shape[:2] + array.shape[3:]):
            raise ValueError(
                f"{name} has shape {array.shape}, wanted {rank} axes, none empty but the slots."
            )
    B, N, H, A = q.shape
    K, S = k.shape[1:3]
    M = tree_k.shape[1]
    if N > M:
        raise ValueError(
            f"{N} queries for {M} tree nodes: the queries are the last of the nodes, so M >= N."
        )
    if H % K:
        raise ValueError(
            f"{H} query heads do not divide into {K} key/value heads: give a multiple of {K}."
        )
    pages = B if table is None else k.shape[0]
    wanted: dict[str, tuple[jax.Array, tuple[int, ...]]] = {
        "k_BKSA": (k, (pages, K, S, A)),
        "v_BKSA": (v, (pages, K, S, A)),
        "length_B": (length, (B,)),
        "tree_k_BMKA": (tree_k, (B, M, K, A)),
        "tree_v_BMKA": (tree_v, (B, M, K, A)),
        "mask_BNM": (mask, (B, N, M)),
    }
    if table is not None:
        wanted["table_BX"] = (table, (B, max([1, *table.shape[1:2]])))
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, wanted {shape} for queries {q.shape}."
            )
    for name, whole in (("length_B", length), ("table_BX", table)):
        if whole is not None and whole.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {whole.dtype}, wanted int32.")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q_BNHA has dtype {q.dtype}, wanted a floating one.")
    for name, array, like in (
        ("v_BKSA", v, k),
        ("tree_v_BMKA", tree_v, tree_k),
        ("tree_k_BMKA", tree_k, q),
    ):
        if array.dtype != like.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}, wanted {like.dtype}.")


def _check_mask(mask: jax.Array) -> None:
    """Looks at the mask as the caller gave it: once broadcast under jit it is no constant."""
    if mask.ndim not in (2, 3) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask_BNM is {mask.dtype} of shape {mask.shape}, wanted bool [B, N, M] or [N, M]."
        )
    if mask.shape[-2] > mask.shape[-1]:
        raise ValueError(f"mask_BNM has shape {mask.shape}: M >= N, the queries are nodes too.")
    if not isinstance(mask, jax.core.Tracer):
        constant = np.asarray(mask)
        if not np.all(_closed(constant if constant.ndim == 3 else constant[None])):
            raise ValueError(f"mask_BNM {_NOT_CLOSED}")


_NOT_CLOSED = (
    "is not closed under ancestors: a node sees another but not all that the other sees. Use "
    "`spec.tree.ancestor_mask`."
)


def _closed(mask_BNM: Any) -> Any:
    """Returns whether each row's queries see all that their visible fellow queries see.

    In NumPy for a NumPy mask, which is a constant even while the caller is traced.
    """
    N, M = mask_BNM.shape[1:]
    fellows_BNN = mask_BNM[:, :, M - N :].astype(np.float32)
    reach_BNM = fellows_BNN @ mask_BNM.astype(np.float32) > 0
    return (~reach_BNM | mask_BNM).all(axis=(1, 2))


def _check_values(
    k: jax.Array, length: jax.Array, mask: jax.Array, table: jax.Array | None
) -> None:
    slots = k.shape[2] * (1 if table is None else table.shape[1])
    checkify.check(
        jnp.all((length >= 0) & (length <= slots)),
        "length_B = {length}: wanted 0.." + f"{slots}, the slots of a row.",
        length=length,
    )
    checkify.check(jnp.all(_closed(mask)), f"mask_BNM {_NOT_CLOSED}")
    if table is not None:
        checkify.check(
            jnp.all((table >= 0) & (table < k.shape[0])),
            "table_BX = {table}: wanted 0.." + f"{k.shape[0] - 1}, the pages.",
            table=table,
        )
