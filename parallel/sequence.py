"""`Comm` for training with tensor parallelism: features, tokens and vocabulary split over one axis.

Between blocks each device holds its part of the tokens (sequence parallelism, Korthikanti et al.
2022, arXiv 2205.05198); inside, all tokens and its part of the heads or of the feed-forward width.
Embedding table and head are split by vocabulary. How products and exchanges overlap, and how what
embedding, head and loss send is composed, is the plan's.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from parallel import collectives
from parallel.overlap import PLAIN, Overlap, gather_matmul, matmul_scatter
from parallel.partition import Composition, flat


@dataclasses.dataclass(frozen=True)
class SequenceComm:
    """Implements `Comm`, under `shard_map`; compositions that are None are one flat collective.

    Attributes:
        axis: mesh axis.
        column: how column products gather their tokens.
        row: how row products reduce and scatter theirs.
        table: how the rows that devices looked up are summed and scattered over tokens.
        head: how tokens are gathered before the head.
        loss: how sums over the vocabulary are added.
    """

    axis: str = "tensor"
    column: Overlap = PLAIN
    row: Overlap = PLAIN
    table: Composition | None = None
    head: Composition | None = None
    loss: Composition | None = None

    def column_matmul(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        """Gathers tokens and multiplies, see `overlap.gather_matmul`."""
        return gather_matmul(x, weights, self.axis, self.column)

    def row_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiplies, sums and scatters, see `overlap.matmul_scatter`."""
        return matmul_scatter(x, w, self.axis, self.row)

    def lookup(self, table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
        """Every device looks up the tokens of its rows; the sum is scattered over tokens.

        Raises:
            ValueError: if the tokens do not divide among the devices.
        """
        T, g = token_BT.shape[1], lax.axis_size(self.axis)
        if T % g:
            raise ValueError(
                f"{T} tokens do not divide among the {g} devices of {self.axis!r}: change the "
                "length of the rows, or the mesh."
            )
        index_BT, mine_BT = self._own(table_VD.shape[0], token_BT)
        rows_BTD = jnp.where(mine_BT[:, :, None], table_VD[index_BT], 0)
        how = self.table or flat("reduce_scatter", (self.axis,))
        return collectives.reduce_scatter(rows_BTD, 1, (self.axis,), how)

    def whole_sequence(self, x: jax.Array) -> jax.Array:
        """Gathers tokens; its gradient is summed and scattered."""
        how = self.head or flat("all_gather", (self.axis,))
        return collectives.all_gather(x, 1, (self.axis,), how)

    def scatter_sequence(self, x: jax.Array) -> jax.Array:
        """Cuts this device's tokens out of what all have."""
        t = x.shape[1] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * t, t, axis=1)

    def log_sum_exp(self, logits_BTV: jax.Array) -> jax.Array:
        """Joins the parts' log-sum-exps."""
        top_BT = lax.pmax(lax.stop_gradient(logits_BTV.max(-1)), self.axis)
        total_BT = self.total(jnp.exp(logits_BTV - top_BT[..., None]).sum(-1))
        return top_BT + jnp.log(total_BT)

    def logits_at(self, logits_BTV: jax.Array, row_BTk: jax.Array) -> jax.Array:
        """Sums what the devices that have the rows' logits find."""
        index_BTk, mine_BTk = self._own(logits_BTV.shape[2], row_BTk)
        found_BTk = jnp.take_along_axis(logits_BTV, index_BTk, axis=2)
        return self.total(jnp.where(mine_BTk, found_BTk, 0))

    def without_padding(self, logits_BTV: jax.Array, size: int) -> jax.Array:
        """Hides what stands behind the last row on the last devices."""
        rows = logits_BTV.shape[2]
        if rows * lax.axis_size(self.axis) == size:
            return logits_BTV
        row_V = lax.axis_index(self.axis) * rows + jnp.arange(rows, dtype=jnp.int32)
        return jnp.where(row_V[None, None] < size, logits_BTV, -jnp.inf)

    def own_rows(self, x_BTV: jax.Array, rows: int) -> jax.Array:
        """Pads and cuts."""
        more = rows * lax.axis_size(self.axis) - x_BTV.shape[2]
        whole = jnp.pad(x_BTV, ((0, 0), (0, 0), (0, more)), constant_values=-jnp.inf)
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(self.axis) * rows, rows, axis=2)

    def total(self, x: jax.Array) -> jax.Array:
        """Sums over devices."""
        return collectives.all_reduce(x, self.loss or flat("all_reduce", (self.axis,)))

    def _own(self, rows: int, id_: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns each id's place among this device's rows, and whether it has one."""
        index = id_ - lax.axis_index(self.axis) * rows
        mine = (index >= 0) & (index < rows)
        return jnp.where(mine, index, 0), mine
