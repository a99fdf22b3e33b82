"""What a partitioned collective costs on a cluster: bytes of every link level, and seconds.

Alpha-beta-hop: a primitive costs its start, a hop for every round, and its bytes over the rate of
the slowest link it crosses. Large messages only: rings, and trees where rings would be silly, are
not told apart. All groups of a mesh talk at the same time, so the devices of a node share its NICs.
Formulas: the scaling book's chapter on sharding; two-level rules as in `parallel.partition`.
"""

import dataclasses
import math

from parallel.partition import Collective, Composition, Op
from parallel.planner.cluster import Placement, Span

_PERMUTES = ("ring_gather", "ring_scatter", "pairwise")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One primitive of one chunk.

    Attributes:
        op: the primitive.
        nbytes: by level, bytes out of the busiest unit (level 0: device; level 1: node).
        seconds: from its start to its end, alone.
        levels: whose links it uses.
    """

    op: Op
    nbytes: tuple[float, ...]
    seconds: float
    levels: tuple[int, ...]


def pieces(wanted: Collective, how: Composition, where: Placement) -> tuple[Piece, ...]:
    """Returns the primitives that one chunk passes through, in order.

    Args:
        wanted: the whole collective.
        how: its composition; not checked here, see `partition.check`.
        where: the mesh on its cluster.
    """
    held = wanted.nbytes / how.chunks
    if wanted.kind == "all_gather":
        held /= math.prod(where.sizes[axis] for axis in wanted.axes)
    out = []
    for op in how.ops:
        if op.primitive == "send":
            out.append(send(held, op.axes[0], where))
            continue
        group = math.prod(where.sizes[axis] for axis in op.axes)
        if op.primitive in ("all_gather", "ring_gather"):
            held *= group
        out.append(_piece(op, held, where))
        if op.primitive in ("reduce_scatter", "ring_scatter", "scatter"):
            held /= group
    return tuple(out)


def traffic(wanted: Collective, how: Composition, where: Placement) -> tuple[float, ...]:
    """Returns, by level, the bytes out of the busiest unit (level 0: a device; level 1: a node)."""
    every = [piece.nbytes for piece in pieces(wanted, how, where)]
    return tuple(how.chunks * sum(level) for level in zip(*every, strict=True))


def seconds(wanted: Collective, how: Composition, where: Placement) -> float:
    """Returns the time of a collective alone: chunks follow each other through the levels."""
    return pipelined(pieces(wanted, how, where), how.chunks)


def pipelined(stages: tuple[Piece, ...], chunks: int) -> float:
    """Returns when the last of `chunks` chunks has passed all stages; a link serves one at a time.

    With two stages on two links this is max(T1, T2) + min(T1, T2) / k.
    """
    free: dict[int, float] = {}
    ready = [0.0] * chunks
    # A link prefers the chunk that came first, then its earlier stage.
    for wave in range(chunks + len(stages) - 1):
        for stage in range(min(wave, len(stages) - 1), -1, -1):
            chunk = wave - stage
            if chunk >= chunks:
                continue
            piece = stages[stage]
            start = max([ready[chunk], *(free.get(level, 0.0) for level in piece.levels)])
            ready[chunk] = start + piece.seconds
            for level in piece.levels:
                free[level] = ready[chunk]
    return ready[-1]


def send(nbytes: float, axis: str, where: Placement) -> Piece:
    """Returns what it costs that every device passes an array on to its neighbour."""
    level = where.level(axis)
    link = where.cluster.links[level]
    out = [0.0] * len(where.cluster.links)
    out[level] = nbytes * where.cluster.below(level)
    wires = where.spacing(axis)  # all of them also carry what other neighbours send
    took = link.start + wires * (link.hop + out[level] / (link.rate * link.reached))
    return Piece(Op("send", (axis,)), tuple(out), took, (level,))


def _piece(op: Op, held: float, where: Placement) -> Piece:
    span = where.span(op.axes)
    nbytes = _bytes(op, held, span, where)
    levels = tuple(level for level, size in enumerate(span.sizes) if size > 1)
    if not levels:  # a group of one
        return Piece(op, nbytes, 0.0, ())
    links = where.cluster.links
    times = []
    for level in levels:
        link = links[level]
        rate = link.rate * link.reached
        if link.torus:
            slow = max(span.far, 1 / span.wires) if _exchanges(op) else 1 / span.wires
        else:
            slow = 1
        times.append(nbytes[level] * slow / rate)
    start = max(links[level].start for level in levels)
    if op.primitive in _PERMUTES:  # every round is a collective of its own
        start *= sum(span.rounds)
    hops = sum(span.rounds[level] * links[level].hop for level in levels)
    hops *= 2 if op.primitive == "all_reduce" else 1
    return Piece(op, nbytes, start + hops + max(times), levels)


def _exchanges(op: Op) -> bool:
    return op.primitive in ("all_to_all", "pairwise")


def _bytes(op: Op, held: float, span: Span, where: Placement) -> tuple[float, ...]:
    """Returns bytes out of a unit of every level.

    A ring runs through all members of a unit before it leaves the unit, so one of them sends on
    every level that the group spans. Exchanged and scattered parts go where they belong.
    """
    group = math.prod(span.sizes)
    out = [0.0] * len(span.sizes)
    inside = 1  # members of the group in one unit of the level
    for level, size in enumerate(span.sizes):
        groups = where.cluster.below(level) // inside
        if size > 1 and (_exchanges(op) or op.primitive == "scatter"):
            # All members of a unit exchange; of a scatter only the first one of a group sends.
            senders = inside if _exchanges(op) else 1
            out[level] = groups * senders * held * inside * (size - 1) / group
        elif size > 1:
            share = 1.0 if op.primitive in ("broadcast", "reduce") else (group - 1) / group
            out[level] = groups * held * share * (2 if op.primitive == "all_reduce" else 1)
        inside *= size
    return tuple(out)
