"""The only way a model block talks to other devices.

Blocks never call a collective. They ask a `Comm` for the operations below; which collective that
is (or none) is decided by whoever built the `Comm`: `LOCAL` on one device, and under `shard_map`
what a plan chose (`parallel.sequence`). Every block takes `comm`, so a model written once runs on
any mesh. Weights that are kept in shards are gathered before a block sees them: a layer at a time,
together and ahead of time if a plan says so, which no block could decide.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax


def full_precision(dtype: jax.typing.DTypeLike) -> lax.Precision:
    """Returns the matmul precision under which `dtype` means what it says.

    TPUs and GPUs multiply float32 in bfloat16 or tf32 unless told otherwise, which would break
    token-for-token equality; lower dtypes are exact products of their inputs already.
    """
    return lax.Precision.HIGHEST if jax.numpy.dtype(dtype).itemsize >= 4 else lax.Precision.DEFAULT


class Comm(Protocol):
    """Communication seen by a model. Shapes are those of the local device.

    A *column* product has its output features split over devices, a *row* product its input
    features, so that a column product, a pointwise function and a row product need one exchange
    before and one after (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Between them a device
    may hold all tokens of a sequence or only its own part (T here, t there).
    """

    def column_matmul(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        """Contracts last with first axis: x [B, t, D], each w [D, *out] -> [B, T, *out].

        All products of one input in one call, so that its tokens are gathered once.
        """
        ...

    def row_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiplies all but the last axis of `w` with the last axes of `x`, then reduces.

        [B, T, *in] x [*in, D] -> [B, t, D].
        """
        ...

    def lookup(self, table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
        """Returns the rows of an embedding table: a row product with one-hot vectors; [B, t, D]."""
        ...

    def whole_sequence(self, x: jax.Array) -> jax.Array:
        """[B, t, ...] -> [B, T, ...]."""
        ...

    def scatter_sequence(self, x: jax.Array) -> jax.Array:
        """Returns this device's part of what all devices have: [B, T, ...] -> [B, t, ...]."""
        ...

    def log_sum_exp(self, logits_BTV: jax.Array) -> jax.Array:
        """Returns the log-sum-exp over the whole vocabulary, of which a device may have a part."""
        ...

    def logits_at(self, logits_BTV: jax.Array, row_BTk: jax.Array) -> jax.Array:
        """Returns the logits of k rows of the whole head at each token; [B, T, k]."""
        ...

    def without_padding(self, logits_BTV: jax.Array, size: int) -> jax.Array:
        """Returns the logits with -inf at rows that only make the head divide: from `size` on."""
        ...

    def own_rows(self, x_BTV: jax.Array, rows: int) -> jax.Array:
        """Returns this device's part of what all devices have for the whole vocabulary.

        As many rows as its part of the logits has; -inf at those that are padding.
        """
        ...

    def total(self, x: jax.Array) -> jax.Array:
        """Sums what the devices found over their parts of the vocabulary."""
        ...


@dataclasses.dataclass(frozen=True)
class LocalComm:
    """`Comm` of a single device: plain products, nothing sent."""

    def column_matmul(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        """See `Comm.column_matmul`."""
        return tuple(contract(x, w, 1) for w in weights)

    def row_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """See `Comm.row_matmul`."""
        return contract(x, w, w.ndim - 1)

    def lookup(self, table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
        """See `Comm.lookup`."""
        return table_VD[token_BT]

    def whole_sequence(self, x: jax.Array) -> jax.Array:
        """Returns `x`."""
        return x

    def scatter_sequence(self, x: jax.Array) -> jax.Array:
        """Returns `x`."""
        return x

    def log_sum_exp(self, logits_BTV: jax.Array) -> jax.Array:
        """See `Comm.log_sum_exp`."""
        return jax.nn.logsumexp(logits_BTV, axis=-1)

    def logits_at(self, logits_BTV: jax.Array, row_BTk: jax.Array) -> jax.Array:
        """See `Comm.logits_at`."""
        return jnp.take_along_axis(logits_BTV, row_BTk, axis=2)

    def without_padding(self, logits_BTV: jax.Array, size: int) -> jax.Array:
        """Returns the logits: a whole head has no padding."""
        return logits_BTV

    def own_rows(self, x_BTV: jax.Array, rows: int) -> jax.Array:
        """Returns `x_BTV`."""
        return x_BTV

    def total(self, x: jax.Array) -> jax.Array:
        """Returns `x`."""
        return x


@dataclasses.dataclass(frozen=True)
class TensorComm(LocalComm):
    """`Comm` under `shard_map` with heads and feed-forward width split over one mesh axis.

    For decoding: blocking, the reduction behind each row product is waited for. What is not split
    (tokens, embedding, head, norms) is replicated.

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
