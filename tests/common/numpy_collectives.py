"""Collectives carried out message by message in numpy, and what each of them is by definition.

Devices are numbered row by row over the mesh axes in the order of `AXES`; `node` of them in a row
share a node. Every device holds its own arrays, and only `Machine.send` moves one to another. Data
is kept in numbered blocks: a block's number says which device of the wanted group it belongs to
(axes outermost first), whatever way it takes. All groups of the mesh talk, as programs of one kind
for all devices do: where one device's array is wanted, other groups send theirs, which is not used.

A ring or chain runs through the members of a group by device number, so node by node. Exchanged
and scattered blocks are sent straight to where they belong.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from parallel.partition import Composition, Op
from parallel.plan import AXES

# Numbers of the device that a block is from (exchanges only, else 0) and that it belongs to.
Number = tuple[int, int]
Blocks = dict[Number, np.ndarray]


class Machine:
    """A mesh of devices in nodes that counts what is sent.

    Attributes:
        sent: bytes [op, level, unit]: out of a device inside its node, out of a node.
    """

    def __init__(self, sizes: Mapping[str, int], node: int, axes: Sequence[str], ops: int):
        self.mesh = {axis: sizes[axis] for axis in AXES if axis in sizes}
        self.node, self.axes = node, tuple(axes)
        self.size = math.prod(sizes.values())
        every = itertools.product(*(range(size) for size in self.mesh.values()))
        # Where each device lies, and each number of the wanted group.
        self.place = [dict(zip(self.mesh, at, strict=True)) for at in every]
        every = itertools.product(*(range(sizes[axis]) for axis in axes))
        self.places = [dict(zip(axes, at, strict=True)) for at in every]
        self.number = [self.places.index({a: at[a] for a in axes}) for at in self.place]
        self.sent = np.zeros((ops, 2, self.size), np.int64)
        self.op = 0

    def send(self, source: int, to: int, blocks: Blocks) -> Blocks:
        """Returns what arrives."""
        assert source != to, "a device does not send to itself"
        nbytes = sum(block.nbytes for block in blocks.values())
        inside = source // self.node == to // self.node
        self.sent[self.op, int(not inside), source if inside else source // self.node] += nbytes
        return {number: block.copy() for number, block in blocks.items()}

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Returns the groups over some axes, each by device number."""
        found: dict[tuple[int, ...], list[int]] = {}
        for device, at in enumerate(self.place):
            found.setdefault(tuple(at[a] for a in self.mesh if a not in axes), []).append(device)
        return list(found.values())

    def carry_out(self, op: Op, held: list[Blocks]) -> list[Blocks]:
        """Returns what every device holds after one primitive."""
        after = list(held)
        for members in self.groups(op.axes):
            mine = [held[device] for device in members]
            if op.primitive == "all_reduce":
                result = self._all_reduce(members, mine)
            elif op.primitive in ("reduce_scatter", "ring_scatter"):
                parts = [self._parts(blocks, members, op.axes) for blocks in mine]
                result = self._ring_sum(members, parts)
            elif op.primitive in ("all_gather", "ring_gather"):
                result = self._ring_join(members, mine)
            elif op.primitive in ("all_to_all", "pairwise"):
                parts = [self._parts(blocks, members, op.axes) for blocks in mine]
                result = self._exchange(members, parts)
            elif op.primitive == "scatter":
                first = self._parts(mine[0], members, op.axes)
                others = [self.send(members[0], to, first[i]) for i, to in enumerate(members) if i]
                result = [first[0], *others]
            elif op.primitive == "broadcast":
                result = [mine[0]]
                for source, to in itertools.pairwise(members):
                    result.append(self.send(source, to, result[-1]))
            else:
                result = self._reduce(members, mine)
            for device, blocks in zip(members, result, strict=True):
                after[device] = blocks
        return after

    def _parts(self, blocks: Blocks, members: list[int], axes: Sequence[str]) -> list[Blocks]:
        """Returns, by member, those of a device's blocks that belong where it lies along axes."""
        at = {tuple(self.place[device][a] for a in axes): i for i, device in enumerate(members)}
        parts: list[Blocks] = [{} for _ in members]
        for number, block in blocks.items():
            parts[at[tuple(self.places[number[1]][a] for a in axes)]][number] = block
        return parts

    def _all_reduce(self, members: list[int], mine: list[Blocks]) -> list[Blocks]:
        """Each member sums an equal share of the blocks, then passes it on."""
        g = len(members)
        shares = [sorted(mine[0])[j::g] for j in range(g)]
        parts = [[{n: blocks[n] for n in share} for share in shares] for blocks in mine]
        return self._ring_join(members, self._ring_sum(members, parts))

    def _ring_sum(self, members: list[int], parts: list[list[Blocks]]) -> list[Blocks]:
        """Sums parts[i][j], what member i has for member j, into one part for each member."""
        g = len(members)
        carried = [parts[i][i - 1] for i in range(g)]
        for step in range(1, g):
            arrived = [self.send(members[i - 1], members[i], carried[i - 1]) for i in range(g)]
            carried = [_sum(arrived[i], parts[i][(i - 1 - step) % g]) for i in range(g)]
        return carried

    def _ring_join(self, members: list[int], mine: list[Blocks]) -> list[Blocks]:
        """Every member passes on what it received last."""
        g, after, carried = len(members), [dict(blocks) for blocks in mine], mine
        for _ in range(1, g):
            carried = [self.send(members[i - 1], members[i], carried[i - 1]) for i in range(g)]
            for blocks, arrived in zip(after, carried, strict=True):
                _add(blocks, arrived)
        return after

    def _exchange(self, members: list[int], parts: list[list[Blocks]]) -> list[Blocks]:
        g = len(members)
        after = [dict(parts[i][i]) for i in range(g)]
        for i, j in itertools.permutations(range(g), 2):
            _add(after[j], self.send(members[i], members[j], parts[i][j]))
        return after

    def _reduce(self, members: list[int], mine: list[Blocks]) -> list[Blocks]:
        """Partial sums run from the last member to the first."""
        after = [mine[-1]]
        for to, source in reversed(list(itertools.pairwise(range(len(members))))):
            arrived = self.send(members[source], members[to], after[0])
            after.insert(0, _sum(arrived, mine[to]))
        return after


def _sum(a: Blocks, b: Blocks) -> Blocks:
    assert a.keys() == b.keys(), "sums blocks of different numbers"
    return {number: block + b[number] for number, block in a.items()}


def _add(blocks: Blocks, arrived: Blocks) -> None:
    assert not blocks.keys() & arrived.keys(), "a block arrives twice"
    blocks.update(arrived)


def _cut(x: np.ndarray, count: int, i: int) -> np.ndarray:
    """Returns piece i of an array; pieces differ by one entry at most."""
    return x[len(x) * i // count : len(x) * (i + 1) // count]


def carry_out(
    kind: str,
    axes: Sequence[str],
    how: Composition,
    sizes: Mapping[str, int],
    node: int,
    x: np.ndarray,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Carries out a composition, chunk after chunk.

    Args:
        kind: of the collective.
        axes: of its group, outermost first.
        how: the composition.
        sizes: devices along each axis of the mesh.
        node: devices in one node.
        x: [devices, entries], what every device has.

    Returns:
        What every device ends with, and the bytes sent: [op, level, unit].
    """
    machine = Machine(sizes, node, axes, len(how.ops))
    g = len(machine.places)
    start: list[Blocks] = []
    for number, mine in zip(machine.number, x, strict=True):
        if kind == "all_gather":
            start.append({(0, number): mine})
        else:
            origin = number if kind == "all_to_all" else 0
            start.append({(origin, to): _cut(mine, g, to) for to in range(g)})
    ends: list[list[Blocks]] = []
    for chunk in range(how.chunks):
        held = [
            {number: _cut(block, how.chunks, chunk) for number, block in blocks.items()}
            for blocks in start
        ]
        for machine.op, op in enumerate(how.ops):
            held = machine.carry_out(op, held)
        ends.append(held)
    results = []
    for device, number in enumerate(machine.number):
        if kind == "reduce_scatter":
            wanted = [(0, number)]
        elif kind == "all_to_all":
            wanted = [(origin, number) for origin in range(g)]
        else:
            wanted = [(0, n) for n in range(g)]
        assert all(sorted(held[device]) == wanted for held in ends), f"{how} leaves other blocks"
        whole = [np.concatenate([held[device][n] for held in ends]) for n in wanted]
        results.append(np.concatenate(whole))
    return results, machine.sent


def definition(
    kind: str, axes: Sequence[str], sizes: Mapping[str, int], x: np.ndarray
) -> list[np.ndarray | None]:
    """Returns what every device must end with; None where it does not matter."""
    mesh = [axis for axis in AXES if axis in sizes]
    order = [axis for axis in mesh if axis not in axes] + list(axes)
    shape = [sizes[axis] for axis in mesh]
    # Devices by group and number.
    devices = np.arange(len(x)).reshape(shape).transpose([mesh.index(axis) for axis in order])
    wanted: list[np.ndarray | None] = [None] * len(x)
    for members in devices.reshape(-1, math.prod(sizes[axis] for axis in axes)):
        g, mine = len(members), x[members]
        every: Sequence[np.ndarray | None]
        if kind == "all_reduce":
            every = [mine.sum(0)] * g
        elif kind == "all_gather":
            every = [mine.ravel()] * g
        elif kind == "reduce_scatter":
            every = list(mine.sum(0).reshape(g, -1))
        elif kind == "all_to_all":
            every = list(mine.reshape(g, g, -1).swapaxes(0, 1).reshape(g, -1))
        elif kind == "broadcast":
            every = [mine[0]] * g
        else:
            every = [mine.sum(0), *[None] * (g - 1)]
        for device, result in zip(members, every, strict=True):
            wanted[device] = result
    return wanted


def everyone(groups: Sequence[Sequence[int]]) -> list[tuple[int, int, float]]:
    """Returns messages (from, to, size) of an exchange: one to every other member."""
    return [(a, b, 1.0) for members in groups for a, b in itertools.permutations(members, 2)]


def neighbours(groups: Sequence[Sequence[int]]) -> list[tuple[int, int, float]]:
    """Returns messages of a ring that sends half of what it has each way."""
    pairs = [(members[i - 1], b) for members in groups for i, b in enumerate(members)]
    return [message for a, b in pairs for message in ((a, b, 0.5), (b, a, 0.5))]


def wire_load(
    lengths: Sequence[int], wraps: Sequence[bool], messages: list[tuple[int, int, float]]
) -> float:
    """Returns what the busiest wire of a torus carries in one direction.

    Messages go the shorter way along one dimension after the other, half of them each way where
    both are equally long.
    """
    load: dict[tuple[tuple[int, ...], int, int], float] = {}
    every = list(itertools.product(*map(range, lengths)))
    for source, to, size in messages:
        at, end = list(every[source]), every[to]
        for d, length in enumerate(lengths):
            ways = [(1, (end[d] - at[d]) % length), (-1, (at[d] - end[d]) % length)]
            if not wraps[d]:
                ways = [(way, far) for way, far in ways if 0 <= at[d] + way * far < length]
            nearest = min(far for _, far in ways)
            taken = [way for way, far in ways if far == nearest]
            for way, step in itertools.product(taken, range(nearest)):
                here = (*at[:d], (at[d] + way * step) % length, *at[d + 1 :])
                load[here, d, way] = load.get((here, d, way), 0) + size / len(taken)
            at[d] = end[d]
    return max(load.values())
