"""Centauri's planner: chooses how a step is partitioned and ordered, in three tiers.

*Operation tier*: for each site the composition, and for each product with a collective beside it
how both are cut. *Layer tier*: weights gathered ahead, gradients of weights in the gaps, gradients
sent beside the layers before, in buckets, order by the longest way to the end. *Model tier*: when
gradients leave, micro-batches that interleave, updated weights gathered beside the next forward
pass. The first tier keeps the few best of each
site; the others are tried together on a short version of the step, by simulation. The paper's own
algorithm was not available to us. Nothing here is measured: all seconds are simulated.
"""

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from parallel.overlap import PLAIN, Overlap
from parallel.partition import Collective, Composition, Op, compositions
from parallel.plan import BATCH, KINDS, Plan
from parallel.planner import cost
from parallel.planner.bound import bound
from parallel.planner.choice import WAITS, Choice
from parallel.planner.graph import build, pair_seconds
from parallel.planner.predict import Simulated, extended, is_short, simulated
from parallel.planner.simulate import simulate
from parallel.planner.workload import Step

DIMENSIONS = frozenset({"primitive", "group", "workload"})
TIERS = frozenset({"operation", "layer", "model"})
CHUNKS = (1, 2, 4, 8, 16)
AHEAD = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Planned:
    """The planner's answer.

    Attributes:
        name: "plan", or the baseline that nothing was faster than.
        choice: see `choice.Choice`.
        result: of the choice, simulated.
        baselines: of the steps that it was compared with, simulated.
        bound: seconds that no choice can go below, see `parallel.planner.bound`.
    """

    name: str
    choice: Choice
    result: Simulated
    baselines: dict[str, Simulated]
    bound: float

    @property
    def share(self) -> float:
        """Part of the attainable gain over the blocking step; 1 if there is nothing to gain."""
        blocking = self.baselines["blocking"].seconds
        left = blocking - self.bound
        return (blocking - self.result.seconds) / left if left > 1e-12 else 1.0


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    """Stops the search for cycles: graphs are many tuples without any, and it takes a third."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_quickly()
def plan(step: Step) -> Planned:
    """Plans a step.

    Returns:
        The best choice found. It is never slower, simulated, than the best baseline, which it
        falls back to.

    Raises:
        ValueError: if the step does not fit into memory.
    """
    step.check_memory(Choice(when="each" if step.job.zero >= 2 else "end"))
    known = baselines(step)
    found = {name: simulated(step, choice) for name, choice in known.items()}
    name = "plan"
    choice, result = searched(step)
    strongest = min(found, key=lambda each: found[each].seconds)
    # Seconds of a long step are off by up to 1.5% each, so less than that is no gain.
    if found[strongest].seconds * (1 if is_short(step) else 0.97) < result.seconds:
        name, choice, result = strongest, known[strongest], found[strongest]
    return Planned(name, choice, result, found, bound(step))


@_quickly()
def searched(
    step: Step, dimensions: frozenset[str] = DIMENSIONS, tiers: frozenset[str] = TIERS
) -> tuple[Choice, Simulated]:
    """Returns the best choice of the planner's space, whatever baselines do.

    Args:
        step: the job on its placed mesh.
        dimensions: of the partition space, those that may be used; fewer for ablations.
        tiers: of the schedule, likewise.
    """
    choice = _best(step, _candidates(step, dimensions, tiers))
    if "layer" in tiers:
        choice = _best_bucket(step, choice)
    return choice, simulated(step, choice)


def baselines(step: Step) -> dict[str, Choice]:
    """Returns what is done without a planner.

    "blocking": every collective alone. "buckets": gradients beside the backward pass, so many
    layers at a time as is best (DDP). "prefetch": beside that, the next layer's weights gathered
    one layer ahead, updated ones beside the forward pass, and back through a column product its two
    collectives beside other products, as Megatron and XLA do; forward, products over tensor wait.
    Collectives are flat, but on a torus in two levels where they leave it, as XLA makes them.
    """
    plain = Choice(when=_whens(step)[0])
    if step.where.cluster.links[0].torus:
        plain = _two_level(step, plain)
    ahead = dataclasses.replace(plain, ahead=1)
    background = dataclasses.replace(plain, waits=WAITS - {"scatter", "reduce"})
    prefetch = dataclasses.replace(
        ahead if step.job.zero == 3 and step.fits(ahead) else plain,
        deferred=True,
        waits=WAITS - {"gather", "scatter", "reduce", "send", "column back"},
    )
    return {
        "blocking": plain if step.pipe > 1 else _best_bucket(step, plain),
        "buckets": _best_bucket(step, background),
        "prefetch": _best_bucket(step, prefetch),
    }


def _two_level(step: Step, choice: Choice) -> Choice:
    """Returns a choice whose collectives go level by level where they leave the first one."""

    def split(axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        outer = tuple(axis for axis in axes if step.where.level(axis))
        inner = tuple(axis for axis in axes if axis not in outer)
        return (outer, inner) if outer and inner else None

    if shard := split(step.job.shard):
        outer, inner = shard
        gather = Composition((Op("all_gather", outer), Op("all_gather", inner)))
        choice = dataclasses.replace(choice, gather=gather, scatter=gather.mirrored())
    if replicas := split(step.replicas):
        outer, inner = replicas
        ops = (Op("reduce_scatter", inner), Op("all_reduce", outer), Op("all_gather", inner))
        choice = dataclasses.replace(choice, reduce=Composition(ops))
    return choice


def _whens(step: Step) -> list[Literal["end", "each"]]:
    """Returns when gradients may go over their shards: at the end if all of them, whole, fit."""
    if step.job.zero < 2:
        return ["end"]
    return ["end", "each"] if step.fits(Choice(when="end")) else ["each"]


def _best_bucket(step: Step, choice: Choice) -> Choice:
    """Returns a choice with the quickest size of buckets that fits, judged with all layers."""
    # Gradients leave after the last micro-batch, or beside one more.
    count = 2 if choice.when == "each" and step.pipe == 1 else 1
    short = step.resized(step.layers, min(step.job.micro_batches, count))
    sizes = sorted({min(size, step.layers) for size in (1, 2, 4, 8, step.layers)})
    tried = [dataclasses.replace(choice, bucket=size) for size in sizes]
    tried = [each for each in tried if each.bucket == 1 or step.fits(each)]
    beside = step.where.cluster.chip.beside
    return min(tried, key=lambda each: simulate(build(short, each), beside).seconds)


def _best(step: Step, choices: Iterable[Choice]) -> Choice:
    """Returns the quickest choice, judged by two short versions of the step."""
    layers = min(step.layers, 2 if step.pipe > 1 else 4)
    first = step.pipe + 1 if step.pipe > 1 else 2
    second = first + 2
    counts = tuple(min(step.job.micro_batches, count) for count in (first, second))
    short = [step.resized(layers, count) for count in dict.fromkeys(counts)]
    beside = step.where.cluster.chip.beside

    def took(choice: Choice) -> float:
        ends = [simulate(build(each, choice), beside).seconds for each in short]
        return extended(counts, (ends[0], ends[-1]), step.job.micro_batches)

    return min(choices, key=took)


def _candidates(step: Step, dimensions: frozenset[str], tiers: frozenset[str]) -> Iterator[Choice]:
    job = step.job
    operation = dimensions if "operation" in tiers else frozenset()
    ways = [_ways(step, site, operation) for site in KINDS]
    pairs = [tuple(_overlap(step, site, operation) for site in ("column", "row"))]
    layer, model = "layer" in tiers, "model" in tiers
    aheads = AHEAD if layer and job.zero == 3 else (0,)
    orders: tuple[Literal["program", "way", "justified"], ...] = ("program",)
    if layer:  # a pipeline has too many tasks to run it backwards as well
        orders = ("program", "way") if step.pipe > 1 else ("program", "way", "justified")
    whens = _whens(step)[: 2 if model and step.pipe == 1 else 1]
    # Interleaved passes would each need gathered weights, so not with weights in shards.
    strands = model and step.tensor > 1 and job.zero != 3
    if strands and pairs != [(PLAIN, PLAIN)]:  # another strand may hide what is not cut
        pairs.append((PLAIN, PLAIN))
    for ways_of, (column, row), ahead, when, order, two in itertools.product(
        dict.fromkeys(zip(*ways, strict=True)),
        pairs,
        aheads,
        whens,
        orders,
        (True, False) if strands else (False,),
    ):
        choice = Choice(
            **dict(zip(KINDS, ways_of, strict=True)),
            column=column,
            row=row,
            ahead=ahead,
            apart=layer,
            strands=two,
            when=when,
            deferred=model,
            waits=frozenset() if layer else frozenset({"reduce", "scatter"}),
            order=order,
        )
        if not step.fits(choice):  # gradients of weights that are put off keep what they read
            choice = dataclasses.replace(choice, apart=False)
        least = not ahead and not two and when == whens[0]
        if step.fits(choice) or least:
            yield choice


def _allowed(how: Composition, wanted: Collective, dimensions: frozenset[str]) -> bool:
    """Says whether a composition uses only some dimensions of the partition space."""
    kinds = {op.primitive for op in how.ops}
    if "primitive" not in dimensions and kinds != {wanted.kind}:
        return False
    if "group" not in dimensions and any(set(op.axes) != set(wanted.axes) for op in how.ops):
        return False
    return "workload" in dimensions or how.chunks == 1


def _ways(
    step: Step, site: str, dimensions: frozenset[str]
) -> tuple[Composition | None, Composition | None]:
    """Returns a site's quickest composition, and the one that keeps its busiest link least busy."""
    wanted, where = step.wanted(site), step.where
    if wanted is None:
        return None, None
    sizes = {axis: where.sizes[axis] for axis in wanted.axes}
    ways = [
        how for how in compositions(wanted.kind, sizes, CHUNKS) if _allowed(how, wanted, dimensions)
    ]
    if not ways:
        return None, None

    def busiest(how: Composition) -> float:
        every = cost.pieces(wanted, how, where)
        levels = {level for piece in every for level in piece.levels}
        return how.chunks * max(
            (sum(p.seconds for p in every if level in p.levels) for level in levels), default=0.0
        )

    quickest = min(ways, key=lambda how: cost.seconds(wanted, how, where))
    return quickest, min(ways, key=lambda how: (busiest(how), cost.seconds(wanted, how, where)))


def _overlap(step: Step, site: str, dimensions: frozenset[str]) -> Overlap:
    """Returns how a layer's products and the collectives beside them are quickest."""
    if step.tensor == 1:
        return PLAIN
    ways = [PLAIN]
    if "workload" in dimensions:
        ways += [Overlap(cut, n) for cut in ("tokens", "features") for n in CHUNKS[1:]]
    if "primitive" in dimensions:
        ways.append(Overlap("ring"))
    best, least = PLAIN, float("inf")
    for way in ways:
        try:
            took = pair_seconds(step, site, way, step.where.cluster.chip.beside)
        except ValueError:  # the chip has no figure for so many chunks
            continue
        if took < least:
            best, least = way, took
    return best


def executable(choice: Choice, step: Step) -> Plan:
    """Returns what `parallel.train` runs of a choice.

    Compositions of every site, overlap, where shards lie, and one block of prefetch. Order,
    buckets, interleaved micro-batches and when gradients leave are not: XLA orders, and training
    sends each block's gradients after each micro-batch (zero = 2, 3) or at the end.

    Raises:
        ValueError: for whole weights on a mesh that has `fsdp`, where training has shards, and
            for what training cannot keep (zero = 2 in a pipeline).
    """
    job, sizes = step.job, step.where.sizes
    if "fsdp" in sizes and not job.shard:
        raise ValueError(f"zero = 0 on {dict(sizes)}: call the axis fsdp data, or say 1, 2 or 3.")
    made = Plan(
        **{site: getattr(choice, site) for site in KINDS},
        column=choice.column,
        row=choice.row,
        shard=tuple(axis for axis in BATCH if axis in job.shard) or Plan().shard,
        zero=job.zero or 3,
        bucket="block" if job.zero == 3 else "leaf",
        prefetch=job.zero == 3 and choice.ahead > 0,
        order="chained",
        schedule=job.schedule if "pipe" in sizes else "gpipe",
    )
    made.check(sizes, scan=made.prefetch)
    return made
