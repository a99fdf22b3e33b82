"""No drafter at all: plain decoding is speculation with one-node trees."""

import dataclasses

import jax

from spec.drafters.protocol import Step, View
from spec.draws import Children, Draws, point_mass
from spec.tree import TokenTree, root_only


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RootDrafter:
    """Proposes the root alone. Implements `Drafter`."""

    @property
    def depth(self) -> int:
        """0."""
        return 0

    @property
    def buckets(self) -> tuple[int, ...]:
        """One slot."""
        return (1,)

    @property
    def children(self) -> frozenset[Children]:
        """None."""
        return frozenset()

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTID: jax.Array,
        capacity: int,
        path_size: int,
    ) -> tuple[()]:
        """No state."""
        return ()

    def propose(
        self, state: tuple[()], view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, tuple[()]]:
        """Returns the root."""
        tree = root_only(view.root_B)
        return tree, point_mass(tree), state

    def observe(self, state: tuple[()], step: Step) -> tuple[()]:
        """No state."""
        return state
