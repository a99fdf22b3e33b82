"""How the nodes of a tree were drawn: what a verification rule must know to stay exact."""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from spec.tree import TokenTree


class Kind(enum.IntEnum):
    """How a child token came about, given its parent."""

    PADDING = 0
    IID = 1  # drawn with replacement from its row of q
    WITHOUT_REPLACEMENT = 2  # drawn from its row of q with the tokens drawn before it zeroed
    POINT_MASS = 3  # a deterministic function of the context; it has no row of q


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """M trials a row, in the order in which they were drawn.

    A node can hold several draws (equal i.i.d. draws, or equal paths of a merge); each stays one
    trial.

    Attributes:
        child_BM: int32 node of each draw.
        parent_BM: int32 node it was drawn under.
        kind_BM: int32, see `Kind`.
        row_BM: int32 row of `q_BQV` that it was drawn from; unused for point masses.
        q_BQV: float32, one distribution for each expanded parent and drafter (not for each node),
            processed exactly as it was sampled.
    """

    child_BM: jax.Array
    parent_BM: jax.Array
    kind_BM: jax.Array
    row_BM: jax.Array
    q_BQV: jax.Array


def point_mass(tree: TokenTree) -> Draws:
    """Returns the draws of a tree whose every draft is a deterministic choice: one a node."""
    B, N = tree.token_BN.shape
    child_BM = jnp.broadcast_to(jnp.arange(1, N, dtype=jnp.int32)[None, :], (B, N - 1))
    kind_BM = jnp.where(tree.valid_BN[:, 1:], Kind.POINT_MASS.value, Kind.PADDING.value)
    return Draws(
        child_BM,
        tree.parent_BN[:, 1:],
        kind_BM.astype(jnp.int32),
        jnp.zeros_like(child_BM),
        jnp.zeros((B, 0, 0), jnp.float32),
    )
