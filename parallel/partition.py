"""What a collective can be rewritten into without changing its result: the partition space.

Centauri (ASPLOS 2024) spans it by three dimensions. *Primitive*: an all-reduce is a reduce-scatter
and an all-gather, a gather or a scatter is a ring of permutations. *Group*: a group over several
mesh axes is one collective a level, so that a fast and a slow link each carry their own part.
*Workload*: the data is cut into chunks, each sent on its own, so that chunks overlap with
computation and with each other. The rules are textbook algebra (the paper's own table was not
available to us); `legal` checks them by following what every device holds.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Literal, Self, get_args

Kind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send"
]
# What is sent: the kinds themselves, their halves, and rings or pairs of permutations.
Primitive = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "scatter",
    "reduce",
    "ring_gather",
    "ring_scatter",
    "pairwise",
    "send",
]
_GATHERS, _SCATTERS = ("all_gather", "ring_gather"), ("reduce_scatter", "ring_scatter")
_EXCHANGES = ("all_to_all", "pairwise")
_ONE_AXIS = ("ring_gather", "ring_scatter", "pairwise", "send")


@dataclasses.dataclass(frozen=True)
class Collective:
    """What is wanted of a group of devices.

    Attributes:
        kind: an all-reduce sums; a reduce ends on the group's first device, a broadcast starts
            there; a send goes from every device but the last to the next one.
        axes: mesh axes that span the group, outermost first: shards are numbered in this order.
        nbytes: of the whole array (all shards together) on one device.
        dtype: its name.
    """

    kind: Kind
    axes: tuple[str, ...]
    nbytes: int
    dtype: str

    def __post_init__(self) -> None:
        """Refuses what is no collective."""
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"Collective {self.kind!r}: choose one of {', '.join(get_args(Kind))}."
            )
        if not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(f"Axes {self.axes}: name at least one mesh axis, each once.")


@dataclasses.dataclass(frozen=True)
class Op:
    """One primitive over some of the axes."""

    primitive: Primitive
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.primitive}({','.join(self.axes)})"


@dataclasses.dataclass(frozen=True)
class Composition:
    """How a collective is carried out: primitives one after the other, in chunks.

    Its text, such as `reduce_scatter(chip) all_reduce(host) all_gather(chip) /4`, is what plans
    are written in; `parse` reads it.

    Attributes:
        ops: in order.
        chunks: pieces that the data is cut into; each passes through all ops on its own.
    """

    ops: tuple[Op, ...]
    chunks: int = 1

    def __post_init__(self) -> None:
        """Refuses what cannot be carried out whatever the collective."""
        if not self.ops or self.chunks < 1:
            raise ValueError(f"{self.ops} in {self.chunks} chunks: give an op and at least 1.")
        for op in self.ops:
            if op.primitive not in get_args(Primitive):
                raise ValueError(
                    f"Primitive {op.primitive!r}: choose one of {', '.join(get_args(Primitive))}."
                )
            if op.primitive in _ONE_AXIS and len(op.axes) != 1:
                raise ValueError(
                    f"{op}: a ring runs over one mesh axis, a send along one; give one op an axis."
                )

    def __str__(self) -> str:
        chunks = f" /{self.chunks}" if self.chunks > 1 else ""
        return " ".join(map(str, self.ops)) + chunks

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `str` wrote.

        Raises:
            ValueError: naming the part that is not understood.
        """
        *words, last = text.split() or [""]
        chunks = 1
        if re.fullmatch(r"/\d+", last):
            chunks = int(last[1:])
        else:
            words.append(last)
        ops = []
        for word in words:
            found = re.fullmatch(r"(\w+)\(([\w,]+)\)", word)
            if found is None:
                raise ValueError(f"{word!r} in {text!r}: write primitive(axis,axis) ... /chunks.")
            ops.append(Op(found[1], tuple(found[2].split(","))))  # type: ignore[arg-type]
        return cls(tuple(ops), chunks)

    def mirrored(self) -> "Composition":
        """Returns the composition that carries the gradient back, in the opposite order."""
        back = {
            "all_gather": "reduce_scatter",
            "ring_gather": "ring_scatter",
            "reduce_scatter": "all_gather",
            "ring_scatter": "ring_gather",
        }
        ops = (Op(back.get(op.primitive, op.primitive), op.axes) for op in reversed(self.ops))  # type: ignore[arg-type]
        return Composition(tuple(ops), self.chunks)


def flat(kind: Kind, axes: tuple[str, ...]) -> Composition:
    """Returns the collective as one primitive over the whole group."""
    return Composition((Op(kind, axes),))


def check(kind: Kind, axes: tuple[str, ...], how: Composition) -> None:
    """Refuses a composition that does not give what the collective promises.

    Follows, axis by axis, what a device holds: whether it is summed over the axis, and whether it
    is a shard along it.

    Raises:
        ValueError: naming the op and what is wrong with it.
    """
    start_sharded = kind == "all_gather"
    summed: set[str] = set()
    held: list[str] = list(axes) if start_sharded else []
    done: set[str] = set()
    private = kind in ("all_reduce", "broadcast", "reduce")

    def refuse(op: Op, why: str) -> None:
        raise ValueError(f"{how} is no {kind} over {axes}: {op} {why}.")

    for op in how.ops:
        over = set(op.axes)
        if not over <= set(axes):
            refuse(op, f"leaves the group, use {axes}")
        if op.primitive in (*_SCATTERS, "all_reduce", "reduce"):
            if kind not in ("all_reduce", "reduce_scatter", "reduce"):
                refuse(op, "sums what must not be summed")
            if over & summed:
                refuse(op, "sums twice over one axis")
            summed |= over
        if op.primitive in (*_SCATTERS, "scatter"):
            if op.primitive == "scatter" and kind != "broadcast":
                refuse(op, "is one device's to send: for broadcasts only")
            held += op.axes
            done |= over if op.primitive == "scatter" else set()
        elif op.primitive in _GATHERS:
            # What the ops sharded themselves must be joined in the opposite order; shards that the
            # caller numbered can come in any, since their number says where each belongs.
            if private and op.primitive == "ring_gather":
                refuse(op, "is a ring, whose result is not known to be the same everywhere")
            end = held[-len(op.axes) :]
            if not over <= set(held):
                refuse(op, "joins what is not sharded over it")
            if private and end != [*op.axes]:
                refuse(op, f"joins before {held[-1]} is joined")
            held = [axis for axis in held if axis not in over]
        elif op.primitive in _EXCHANGES:
            if kind != "all_to_all" or over & done:
                refuse(op, "exchanges what is not to be exchanged, or twice")
            done |= over
        elif op.primitive == "broadcast":
            if kind != "broadcast" or over & done:
                refuse(op, "sends from one device what all have")
            done |= over
        elif op.primitive == "send":
            if kind != "send" or over != set(axes) or done:
                refuse(op, "passes on to the next device along one axis, once: for sends only")
            done |= over
    wanted_sum = set(axes) if kind in ("all_reduce", "reduce_scatter", "reduce") else set()
    wanted_held = set(axes) if kind == "reduce_scatter" else set()
    wanted_done = set(axes) if kind in ("all_to_all", "broadcast", "send") else set()
    if (summed, set(held), done) != (wanted_sum, wanted_held, wanted_done):
        raise ValueError(
            f"{how} is no {kind} over {axes}: it ends summed over {sorted(summed)}, sharded over "
            f"{held}, exchanged or sent over {sorted(done)}."
        )


def legal(kind: Kind, axes: tuple[str, ...], how: Composition) -> bool:
    """Says whether `check` accepts a composition."""
    try:
        check(kind, axes, how)
    except ValueError:
        return False
    return True


def compositions(
    kind: Kind, sizes: Mapping[str, int], chunks: tuple[int, ...] = (1,)
) -> Iterator[Composition]:
    """Yields every composition of a collective: primitives times groups times chunks.

    Args:
        kind: the collective.
        sizes: devices along each mesh axis of its group, outermost first.
        chunks: numbers of pieces to offer.
    """
    axes = tuple(sizes)
    for ops in dict.fromkeys(_sequences(kind, axes)):
        for count in chunks:
            yield Composition(ops, count)


def _sequences(kind: Kind, axes: tuple[str, ...]) -> Iterator[tuple[Op, ...]]:
    """Yields op sequences: the group whole, axis by axis in any order, or in two levels.

    What does not pass `check` (such as joins in the wrong order) is left out.
    """

    def each(primitives: tuple[str, ...]) -> Iterator[tuple[Op, ...]]:
        """Yields the group covered in one op, or axis by axis in any order."""
        for primitive in primitives:
            if primitive not in _ONE_AXIS or len(axes) == 1:
                yield (Op(primitive, axes),)  # type: ignore[arg-type]
        if len(axes) > 1:
            for order in itertools.permutations(axes):
                for chosen in itertools.product(primitives, repeat=len(axes)):
                    yield tuple(Op(p, (a,)) for p, a in zip(chosen, order, strict=True))  # type: ignore[arg-type]

    found: Iterator[tuple[Op, ...]]
    if kind == "all_gather":
        found = each(_GATHERS)
    elif kind == "reduce_scatter":
        found = each(_SCATTERS)
    elif kind == "all_to_all":
        found = each(_EXCHANGES)
    elif kind == "send":
        found = (way for way in each(("send",)) if len(axes) == 1)
    elif kind == "broadcast":
        halves = ((s, g) for s in each(("scatter",)) for g in each(_GATHERS))
        found = itertools.chain(each(("broadcast",)), (s + g for s, g in halves))
    elif kind == "reduce":
        halves = ((s, g) for s in each(_SCATTERS) for g in each(_GATHERS))
        found = itertools.chain(each(("reduce",)), (s + g for s, g in halves))
    else:
        halves = ((s, g) for s in each(_SCATTERS) for g in each(_GATHERS))
        found = itertools.chain(each(("all_reduce",)), (s + g for s, g in halves), _two_level(axes))
    return (ops for ops in found if legal(kind, axes, Composition(ops)))


def _two_level(axes: tuple[str, ...]) -> Iterator[tuple[Op, ...]]:
    """Yields all-reduces that sum shards of one level over the other."""
    for split in range(1, len(axes)):
        for inner, outer in ((axes[split:], axes[:split]), (axes[:split], axes[split:])):
            for scatter in ("reduce_scatter", "ring_scatter")[: 2 if len(inner) == 1 else 1]:
                scattered = Op(scatter, inner)  # type: ignore[arg-type]
                yield (scattered, Op("all_reduce", outer), Op("all_gather", inner))
