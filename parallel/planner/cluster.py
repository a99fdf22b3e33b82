"""What a step runs on: chips, and links in levels. Every number says where it is from.

A cluster is written as text: `a100:4x8` is four nodes of eight GPUs, `v5e:16x16` a torus of TPUs,
`v5e:2*16x16` two such slices over the data-centre network. Level 0 joins devices (NVLink, ICI),
level 1 joins units of level 0 (NICs, DCN). The numbers are in `parallel.planner.chips`.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Self

from parallel.plan import AXES
from parallel.planner.chips import GPUS, TPUS, Chip, Link


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Chips and their links, innermost level first.

    Attributes:
        name: the text that it was made from.
        chip: of all devices.
        links: levels; sizes multiply to the number of devices.
    """

    name: str
    chip: Chip
    links: tuple[Link, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(link.size for link in self.links)

    def below(self, level: int) -> int:
        """Returns the number of devices in one unit that links of this level join."""
        return math.prod(link.size for link in self.links[:level])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a cluster's text, see the module, or a JSON file written by `save`.

        Raises:
            ValueError: for an unknown chip, or a shape that it cannot have.
        """
        if text.endswith(".json"):
            return cls.load(text)
        name, _, shape = text.partition(":")
        if name in GPUS:
            found = re.fullmatch(r"(\d+)x(\d+)", shape)
            if found is None:
                raise ValueError(f"Cluster {text!r}: write {name}:NODESxGPUS, such as {name}:4x8.")
            nodes, devices = map(int, found.groups())
            chip, inner, outer = GPUS[name]
            links = [dataclasses.replace(inner, size=devices)]
            if nodes != 1:
                links.append(dataclasses.replace(outer, size=nodes))
        elif name in TPUS:
            found = re.fullmatch(r"(?:(\d+)\*)?(\d+(?:x\d+)*)", shape)
            chip, ring, network, dimensions, closes = TPUS[name]
            torus = tuple(map(int, found[2].split("x"))) if found else ()
            if len(torus) != dimensions:
                example = "x".join(["4"] * dimensions)
                raise ValueError(
                    f"Cluster {text!r}: {name} is a torus of {dimensions} dimensions, write "
                    f"{name}:{example}, or {name}:2*{example} for two slices."
                )
            slices = int(found[1] or 1) if found else 1
            # v4 and v5p close rings in whole cubes of 4, v5e and v6e only the whole ring of 16.
            whole = all(length % 4 == 0 for length in torus)
            wraps = tuple(length == 16 if closes == 16 else whole for length in torus)
            links = [dataclasses.replace(ring, size=math.prod(torus), torus=torus, wraps=wraps)]
            if slices != 1:
                rate = network.rate * math.prod(torus)
                links.append(dataclasses.replace(network, size=slices, rate=rate))
        else:
            known = ", ".join([*GPUS, *TPUS])
            raise ValueError(f"Cluster {text!r}: chip {name!r} is unknown, choose of {known}.")
        if min(link.size for link in links) < 1:
            raise ValueError(f"Cluster {text!r}: no size can be 0.")
        return cls(text, chip, tuple(links))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster as JSON, for numbers that were measured."""
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Raises:
            ValueError: if the file cannot be read or lacks a number.
        """
        try:
            raw: dict[str, Any] = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            split = {
                cut: {int(chunks): float(slow) for chunks, slow in table.items()}
                for cut, table in raw["chip"].pop("split").items()
            }
            links = tuple(
                Link(**{**link, "torus": tuple(link["torus"]), "wraps": tuple(link["wraps"])})
                for link in raw["links"]
            )
            waves = raw["chip"].pop("waves")
            chip = Chip(**raw["chip"], split=split, waves=waves and tuple(waves))
            return cls(raw["name"], chip, links)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no cluster ({error}): calibrate one anew.") from error


@dataclasses.dataclass(frozen=True)
class Span:
    """Where a group of devices lies.

    Attributes:
        sizes: members along each level, innermost first; 1 where it does not leave a unit.
        wires: of a torus, how many rings it covers, twice those that close, less where members
            lie apart and wires are shared with other groups; 1 for a switch.
        rounds: by level, messages one after the other until a ring collective ends.
        far: of a torus, wires that an exchanged byte uses up on its way.
    """

    sizes: tuple[int, ...]
    wires: float
    rounds: tuple[int, ...]
    far: float = 1.0


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh laid over a cluster: neighbours along the last axis are neighbours on level 0.

    Attributes:
        cluster: the machine.
        sizes: devices along each mesh axis.
    """

    cluster: Cluster
    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        """Refuses meshes of another size, and axes that cross the border of a level."""
        unknown = set(self.sizes) - set(AXES)
        if unknown:
            raise ValueError(f"Mesh axes {sorted(unknown)}: choose of {AXES}.")
        size = math.prod(self.sizes.values())
        if size != self.cluster.size:
            raise ValueError(
                f"Mesh {dict(self.sizes)} has {size} devices, {self.cluster.name} has "
                f"{self.cluster.size}: change one of them."
            )
        for axis in self.sizes:
            self.level(axis)

    def stride(self, axis: str) -> int:
        """Returns the distance of neighbours along an axis, in devices."""
        inner = [name for name in AXES[AXES.index(axis) + 1 :] if name in self.sizes]
        return math.prod(self.sizes[name] for name in inner)

    def level(self, axis: str) -> int:
        """Returns the level whose links an axis uses.

        Raises:
            ValueError: if it uses two.
        """
        stride, size = self.stride(axis), self.sizes[axis]
        for level, link in enumerate(self.cluster.links):
            below = self.cluster.below(level)
            unit = below * link.size
            if stride % below == 0 and unit % (stride * size) == 0:
                return level
        raise ValueError(
            f"Mesh axis {axis}={size}, neighbours {stride} devices apart, crosses the border of a "
            f"unit of {self.cluster.links[0].size} devices of {self.cluster.name}: split it in "
            "two, such as host and fsdp."
        )

    def span(self, axes: tuple[str, ...]) -> Span:
        """Returns where the group over mesh axes lies."""
        sizes = [1] * len(self.cluster.links)
        for axis in axes:
            sizes[self.level(axis)] *= self.sizes[axis]
        # A ring passes through all members of a unit before it leaves the unit.
        above = [math.prod(sizes[level:]) for level in range(len(sizes) + 1)]
        rounds = [one - more for one, more in itertools.pairwise(above)]
        if not self.cluster.links[0].torus or sizes[0] == 1:
            return Span(tuple(sizes), 1, tuple(rounds))
        wires, far, rounds[0] = 0.0, 0.0, 0
        for axis in axes:
            if self.level(axis) == 0:
                for length, closed, spacing in self._rings(axis):
                    ring = (2 if closed else 1) / spacing
                    wires += ring
                    rounds[0] += spacing * (length // 2 if closed else length - 1)
                    far = max(far, length / 4 / ring)
        return Span(tuple(sizes), wires, tuple(rounds), far)

    def spacing(self, axis: str) -> int:
        """Returns how many wires of a torus lie between neighbours along an axis; else 1."""
        if not self.cluster.links[0].torus or self.level(axis):
            return 1
        return max((spacing for _, _, spacing in self._rings(axis)), default=1)

    def _rings(self, axis: str) -> list[tuple[int, bool, int]]:
        """Returns what an axis covers of the torus' dimensions: length, closed, spacing.

        Members `spacing` devices apart share wires with the groups in between.
        """
        link, stride, left = self.cluster.links[0], self.stride(axis), self.sizes[axis]
        found, inner = [], 1
        for length, wraps in zip(reversed(link.torus), reversed(link.wraps), strict=True):
            # Devices along this dimension at distance `inner`; the axis may begin inside it.
            free = length if stride <= inner else max(length * inner // stride, 1)
            if stride < inner * length and left > 1:
                part = math.gcd(left, free)
                if part > 1:
                    spacing = max(stride // inner, 1)
                    found.append((part, wraps and part * spacing == length, spacing))
                    left //= part
                    stride = max(stride, inner) * part
            inner *= length
        if left > 1:  # lies askew
            found.append((left, False, 1))
        return found
