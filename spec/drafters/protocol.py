"""The drafter protocol: what a stranger implements to speculate for any target.

A drafter is a pytree: its weights are leaves, its settings static fields, so it is passed to
jitted functions and never closed over. Its state is a pytree whose leaves all have B first. The
three functions below are traced into one program; they may not read a device value on the host.

What differs from row to row lives in the state, never in the drafter: a batch may lose rows.

The order of calls for each row: `init` once, then `propose`, `observe`, `propose`, ... Whatever
a drafter proposes, the output is the target's; a bad drafter only costs time.
"""

import dataclasses
from typing import Any, Protocol

import jax

from models.kv_cache import KVCache
from models.transformer import Transformer
from spec.draws import Children, Draws
from spec.sampling import Sampling
from spec.tree import TokenTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """What a drafter may see of the decoder when it proposes. Read only.

    Attributes:
        root_B: int32, last emitted token, the tree's root.
        length_B: int32, cached tokens of the target, which is the root's absolute position.
        room_B: int32, tokens the row may still emit; nodes deeper than room - 1 are cut off.
        active_B: bool, False for rows that are finished or padding: propose anything, cheaply.
        target: the target's weights (an early-exit drafter runs some of its layers).
        cache: the target's committed K/V.
        sampling: temperature, top-k and top-p of each row; sampled children come from q shaped by
            the same controls as p.
    """

    root_B: jax.Array
    length_B: jax.Array
    room_B: jax.Array
    active_B: jax.Array
    target: Transformer
    cache: KVCache
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What happened to a proposal. P = depth + 1 of the whole tree.

    Attributes:
        node_BP: int32, slots (of this drafter's own tree) of the root and the accepted drafts; N
            past the end of the path.
        token_BP: int32, their tokens.
        count_B: int32, nodes on the path, which is also how many tokens were emitted: the
            accepted drafts and the bonus. 0 marks an idle row, for which `observe` does nothing.
        hidden_BPID: the target's hidden states at these nodes, see `transformer.Output`.
        bonus_B: int32, the token after the path, the next root.
    """

    node_BP: jax.Array
    token_BP: jax.Array
    count_B: jax.Array
    hidden_BPID: jax.Array
    bonus_B: jax.Array


class Drafter(Protocol):
    """Grows a token tree for each row and follows what was accepted.

    Attributes:
        depth: deepest node it may propose; static.
        buckets: ascending tree sizes to compile the target pass for; the last is N. A step uses
            the smallest that holds the valid nodes of every row; static.
        children: how it chooses children, which decides the rules that stay exact; static.
    """

    @property
    def depth(self) -> int:
        """See the class."""
        ...

    @property
    def buckets(self) -> tuple[int, ...]:
        """See the class."""
        ...

    @property
    def children(self) -> frozenset[Children]:
        """See the class."""
        ...

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTID: jax.Array,
        capacity: int,
        path_size: int,
    ) -> Any:
        """Returns the state before the first proposal.

        Args:
            token_BT: int32 prompts, right-padded; the last real token is the first root.
            length_B: int32, tokens of each prompt, >= 1 (0 for a padding row).
            hidden_BTID: the target's hidden states at prompt[:-1], see `transformer.Output`;
                zeros elsewhere.
            capacity: most tokens (prompt and output) a row can reach.
            path_size: P of every step to come; depth + 1, or more beside deeper drafters.
        """
        ...

    def propose(self, state: Any, view: View, key_B: jax.Array) -> tuple[TokenTree, Draws, Any]:
        """Returns a tree of `buckets[-1]` slots, how its nodes were drawn, and the new state.

        Args:
            state: from `init` or `observe`.
            view: see `View`.
            key_B: one random key a row, from (seed, request, position of the root, drafting).
        """
        ...

    def observe(self, state: Any, step: Step) -> Any:
        """Returns the state after a step; rows with count 0 are left as they are."""
        ...
