"""The only way a model block talks to other devices.

Blocks never call a collective. They ask a `Comm` for the four operations below; which collective
that is (or none) is decided by whoever built the `Comm`: `LOCAL` on one device, and under
`shard_map` the composition that a plan chose. Every block takes `comm`, so a model written once
runs on any mesh.
"""

import dataclasses
from typing import Protocol

import jax
from jax import lax


def full_precision(dtype: jax.typing.DTypeLike) -> lax.Precision:
    """Returns the matmul precision under which `dtype` means what it says.

    TPUs and GPUs multiply float32 in bfloat16 or tf32 unless told otherwise, which would break
    token-for-token equality; lower dtypes are exact products of their inputs already.
    """
    return lax.Precision.HIGHEST if jax.numpy.dtype(dtype).itemsize >= 4 else lax.Precision.DEFAULT


class Comm(Protocol):
    """Communication seen by a model block. Shapes are those of the local device.

    A *column* product has its output features split over devices, a *row* product its input
    features, so that a column product, a pointwise function and a row product need one reduction
    in all (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
    """

    def gather(self, w: jax.Array) -> jax.Array:
        """Returns the whole of a parameter that is kept in shards (the identity if it is not)."""
        ...

    def column_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Contracts last with first axis: x [..., D], w [D, *out] -> [..., *out]."""
        ...

    def row_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiplies all but the last axis of `w` with the last axes of `x`, then reduces.

        [..., *in] x [*in, D] -> [..., D].
        """
        ...

    def scatter_sequence(self, x: jax.Array) -> jax.Array:
        """Returns this device's part of the sequence axis of `x` [B, T, ...]."""
        ...


@dataclasses.dataclass(frozen=True)
class LocalComm:
    """`Comm` of a single device: plain products, nothing sent."""

    def gather(self, w: jax.Array) -> jax.Array:
        """Returns `w`."""
        return w

    def column_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """See `Comm.column_matmul`."""
        return contract(x, w, 1)

    def row_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """See `Comm.row_matmul`."""
        return contract(x, w, w.ndim - 1)

    def scatter_sequence(self, x: jax.Array) -> jax.Array:
        """Returns `x`."""
        return x


@dataclasses.dataclass(frozen=True)
class TensorComm(LocalComm):
    """`Comm` under `shard_map` with heads and feed-forward width split over one mesh axis.

    Blocking: the reduction behind each row product is waited for. What is not split (embedding,
    head, norms) is replicated.

    Attributes:
        axis: mesh axis.
    """

    axis: str = "tensor"

    def row_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Sums the devices' partial products: an all-reduce."""
        return lax.psum(super().row_matmul(x, w), self.axis)


def contract(x: jax.Array, w: jax.Array, axes: int) -> jax.Array:
    """Contracts the last `axes` axes of `x` with the first `axes` of `w`; nothing is sent."""
    dims = (tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes)))
    return lax.dot_general(x, w, (dims, ((), ())), precision=full_precision(x.dtype))


LOCAL = LocalComm()
