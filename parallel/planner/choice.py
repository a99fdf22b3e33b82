"""What may be chosen about a training step: how it is partitioned, in which order it runs."""

import dataclasses
from typing import Literal

from parallel.overlap import PLAIN, Overlap
from parallel.partition import Collective, Composition, flat
from parallel.plan import KINDS

SITES = (*KINDS, "column", "row")
# Where computation may stand still. Back through a column product, its input is gathered again
# beside one product, and the gradient scattered beside another.
WAITS = frozenset({*SITES, "column back"})


@dataclasses.dataclass(frozen=True)
class Choice:
    """What may be chosen about a step; None is one flat collective.

    Attributes:
        gather: of weights over their shards.
        scatter: of gradients over their shards.
        reduce: of gradients over the replicas.
        column: how column products gather tokens; back, how they scatter them.
        row: how row products scatter tokens.
        table: of the rows that devices looked up; back, of their gradients.
        head: of tokens before the head; back, of their gradients.
        loss: of each token's sums over the vocabulary.
        send: of activations to the next stage, and of their gradients back.
        ahead: blocks whose weights may be gathered before they are needed (zero = 3).
        apart: gradients of weights may wait while the gradient of the input goes on.
        strands: passes of different micro-batches may interleave, one computing while another
            sends; a stage then keeps the activations of twice as many micro-batches.
        when: gradients go over their shards after "each" micro-batch, or at the "end".
        bucket: layers whose gradients are sent together.
        deferred: updated weights (zero = 1, 2) are gathered layer by layer, beside the forward
            pass; else all of them before it.
        waits: of `WAITS`, where computation stands still.
        order: of tasks that could start, the first of the "program" does; or the one with the
            longest "way" to the end; or, "justified", the one that may least be late.
    """

    gather: Composition | None = None
    scatter: Composition | None = None
    reduce: Composition | None = None
    column: Overlap = PLAIN
    row: Overlap = PLAIN
    table: Composition | None = None
    head: Composition | None = None
    loss: Composition | None = None
    send: Composition | None = None
    ahead: int = 0
    apart: bool = False
    strands: bool = False
    when: Literal["end", "each"] = "end"
    bucket: int = 1
    deferred: bool = False
    waits: frozenset[str] = WAITS
    order: Literal["program", "way", "justified"] = "program"

    def how(self, site: str, wanted: Collective) -> Composition:
        """Returns the composition of a collective at a site, or of the one back through it."""
        chosen = getattr(self, site) if site in KINDS else None
        if chosen is None:
            return flat(wanted.kind, wanted.axes)
        return chosen if wanted.kind == KINDS[site] else chosen.mirrored()
