"""Chips and the links between them: numbers, each with its source.

Sources: [book] the scaling book's chapters on TPUs and GPUs; [cloud] Google Cloud's TPU pages;
[nccl] the defaults of XLA's speed-of-light model for H100; [pallas] the collective-matmul table of
JAX's Mosaic GPU documentation; [concerto] Concerto, ASPLOS 2025; [aot] estimated cycles of programs
compiled for the chip without owning one (jax 0.10.2, libtpu 0.0.42), copies included, so an upper
bound; [assumed] nothing better was found.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

# What a product is cut along: rows of the input, columns of the output, what is summed over.
Cut = Literal["tokens", "features", "contract"]
GB, GiB = 1e9, 2.0**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        name: of the chip.
        flops: bfloat16 operations a second.
        reached: part of `flops` that a large product reaches.
        memory: bytes of HBM.
        memory_rate: B/s of HBM.
        launch: seconds to start a kernel.
        beside: factor by which a product slows down while a collective runs beside it.
        split: by cut and number of chunks, the time of all chunks over the time of the whole.
        waves: rows and columns of the tiles that a product is made of, and how many are made at
            once; tokens and features that `split` lacks are counted in such waves. Or None.
        source: of each number.
    """

    name: str
    flops: float
    reached: float
    memory: float
    memory_rate: float
    launch: float
    beside: float
    split: Mapping[Cut, Mapping[int, float]]
    waves: tuple[int, int, int] | None
    source: str

    def slow_down(self, cut: Cut, chunks: int, rows: int, columns: int) -> float:
        """Returns the time of a product in chunks over its time whole; launches come on top.

        Args:
            cut: along what.
            chunks: number of pieces.
            rows: of the output, whole.
            columns: of the output, whole.

        Raises:
            ValueError: for a number of chunks that the chip has no figure for.
        """
        if chunks == 1:
            return 1.0
        table = self.split.get(cut, {})
        if chunks not in table and self.waves is not None and cut != "contract":
            whole = self._waves(rows, columns)
            some = (rows / chunks, columns) if cut == "tokens" else (rows, columns / chunks)
            return chunks * self._waves(*some) / whole
        if chunks not in table:
            raise ValueError(
                f"{self.name} has no figure for {cut} in {chunks} chunks: choose of "
                f"{[1, *sorted(table)]}."
            )
        return table[chunks]

    def _waves(self, rows: float, columns: float) -> int:
        assert self.waves is not None
        height, width, at_once = self.waves
        return math.ceil(math.ceil(rows / height) * math.ceil(columns / width) / at_once)


@dataclasses.dataclass(frozen=True)
class Link:
    """One level of links.

    Attributes:
        name: of the link.
        size: units of the level below that it joins.
        rate: B/s out of one unit of the level below (level 0: one device), one way. Of a torus:
            of one of its wires, one way.
        reached: part of `rate` that a large collective reaches.
        start: seconds to start one collective.
        hop: seconds that each of its rounds adds.
        torus: lengths of the rings, outermost first; empty for a switch.
        wraps: whether a torus closes its rings (one of each length).
        source: of each number.
    """

    name: str
    size: int
    rate: float
    reached: float
    start: float
    hop: float
    torus: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    source: str = ""


# Time of all chunks over that of the whole. Products of 4096 x 4096 x 16384 [aot].
_V5E: dict[Cut, dict[int, float]] = {
    "tokens": {2: 1.37, 4: 1.45, 8: 1.06, 16: 1.59},
    "features": {2: 1.52, 4: 2.02, 8: 1.54, 16: 1.54},
    "contract": {2: 1.25, 4: 1.39, 8: 2.42, 16: 4.66},
}
_V5P: dict[Cut, dict[int, float]] = {
    "tokens": {2: 1.29, 4: 1.37, 8: 1.07, 16: 1.36},
    "features": {2: 1.29, 4: 1.37, 8: 1.07, 16: 1.36},
}
_V6E: dict[Cut, dict[int, float]] = {
    "tokens": {2: 1.67, 4: 1.95, 8: 1.79, 16: 2.97},
    "features": {2: 1.67, 4: 1.95, 8: 1.79, 16: 2.97},
    "contract": {2: 1.98, 4: 2.52, 8: 4.72, 16: 9.22},
}


def _gpu(
    name: str, flops: float, memory: float, rate: float, cores: int, nvlink: float, nics: float
) -> tuple[Chip, Link, Link]:
    chip = Chip(
        name,
        flops=flops,
        reached=0.81,
        memory=memory,
        memory_rate=rate,
        launch=4e-6,
        beside=1.18,
        split={},
        waves=(128, 256, cores),
        source="flops, memory_rate [book]; memory: makers' data sheets; reached: 43 us for 1024 x "
        "4096 x 4096 on H100 [pallas]; beside: products [concerto]; launch [assumed]; tiles as "
        "CUTLASS's largest [assumed]",
    )
    inner = Link(
        "NVLink",
        size=8,
        rate=nvlink,
        reached=0.82,
        start=32e-6,
        hop=6e-6,
        source="rate [book]; reached: 370 of 450 GB/s in the largest all-reduce on H100 [book]; "
        "hop: a round of the collective matmul [pallas]; start: what its 2-GPU row leaves; all but "
        "the rate are H100's, for other GPUs [assumed]",
    )
    outer = Link(
        "NIC",
        size=2,
        rate=nics,
        reached=0.82,
        start=45e-6,
        hop=15.5e-6,
        source="rate [book]; start, hop (half a round trip) [nccl]; reached as NVLink [assumed]",
    )
    return chip, inner, outer


def _tpu(
    name: str,
    flops: float,
    memory: float,
    rate: float,
    split: Mapping[Cut, Mapping[int, float]],
    wire: float,
    network: float,
) -> tuple[Chip, Link, Link]:
    chip = Chip(
        name,
        flops=flops,
        reached=0.97,
        memory=memory,
        memory_rate=rate,
        launch=1e-6,
        beside=1.0,
        split=split,
        waves=None,
        source="flops, memory, memory_rate [cloud]; reached: the book's clock over that at which "
        "the compiler expects the peak [aot], a ceiling; split [aot], v4 as v5p, features of v5p "
        "and v6e as their tokens [assumed]; launch, beside [assumed]: collectives are DMA",
    )
    ring = Link(
        "ICI",
        size=4,
        rate=wire,
        reached=0.82,
        start=5e-6,
        hop=1e-6,
        source="rate, hop [book]; reached: 560 of 680 us, start: 8 us seen for 3 us (v5e) [book]",
    )
    outer = Link(
        "DCN",
        size=2,
        rate=network,
        reached=0.82,
        start=45e-6,
        hop=15.5e-6,
        source="rate a chip [cloud], v4 as v5e; the rest as a GPU's NIC [assumed]",
    )
    return chip, ring, outer


GPUS = {
    "a100": _gpu("A100", 312e12, 80 * GiB, 2.0e12, 108, 300 * GB, 200 * GB),
    "a100-25g": _gpu("A100", 312e12, 80 * GiB, 2.0e12, 108, 300 * GB, 25 / 8 * GB),
    "h100": _gpu("H100", 990e12, 80 * GiB, 3.4e12, 132, 450 * GB, 400 * GB),
    "h200": _gpu("H200", 990e12, 141 * GB, 4.8e12, 132, 450 * GB, 400 * GB),
}
# Chip, wires, network of a chip, dimensions of the torus, and which rings close.
TPUS = {
    "v4": (*_tpu("TPU v4", 275e12, 32 * GiB, 1.2e12, _V5P, 45 * GB, 25 / 8 * GB), 3, 4),
    "v5e": (*_tpu("TPU v5e", 197e12, 16 * GB, 819e9, _V5E, 45 * GB, 25 / 8 * GB), 2, 16),
    "v5p": (*_tpu("TPU v5p", 459e12, 95 * GiB, 2.765e12, _V5P, 90 * GB, 50 / 8 * GB), 3, 4),
    "v6e": (*_tpu("TPU v6e", 918e12, 32 * GB, 1.638e12, _V6E, 90 * GB, 100 / 8 * GB), 2, 16),
}
