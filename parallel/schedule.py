"""Centauri's planner: chooses how a step is partitioned and ordered, in three tiers.

*Operation tier*: for each site the composition, and for each product with a collective beside it
how both are cut. *Layer tier*: weights gathered ahead, gradients of weights in the gaps, order by
the longest way to the end. *Model tier*: gradients sent beside later micro-batches and in buckets,
updated weights gathered beside the next forward pass. The first tier keeps the few best of each
site; the others are tried together on a short version of the step, by simulation. The paper's own
algorithm was not available to us. Nothing here is measured: all seconds are simulated.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from parallel import cost
from parallel.bound import bound
from parallel.choice import SITES, Choice
from parallel.graph import build, pair_seconds
from parallel.overlap import PLAIN, Overlap
from parallel.partition import Collective, Composition, compositions
from parallel.plan import Plan
from parallel.simulate import simulate
from parallel.workload import Step

DIMENSIONS = frozenset({"primitive", "group", "workload"})
TIERS = frozenset({"operation", "layer", "model"})
CHUNKS = (1, 2, 4, 8, 16)
AHEAD = (1, 2, 3)
# Tasks up to which a step is simulated whole; longer ones are extended, see `simulated`.
WHOLE = 8_000
TASKS = 25  # of a layer and a micro-batch, about


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What the simulator says of a step.

    Attributes:
        seconds: of the step.
        computing: of them the first stage computes.
        exposed: of them the first stage sends and does not compute.
    """

    seconds: float
    computing: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class Planned:
    """The planner's answer.

    Attributes:
        name: "plan", or the baseline that nothing was faster than.
        choice: see `choice.Choice`.
        result: of the choice, simulated.
        baselines: of the steps that it was compared with, simulated.
        bound: seconds that no choice can go below, see `parallel.bound`.
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


def simulated(step: Step, choice: Choice) -> Simulated:
    """Simulates a step, a long one from four short ones.

    With layers and micro-batches the time grows along planes once the first and last of them are
    told apart, so four short steps give the long one: a + b layers + c micro-batches + d both.
    """
    layers, count = step.layers, step.job.micro_batches
    # What is strictly in order repeats from the first layer on.
    strict = not (choice.apart or choice.strands) and choice.waits == frozenset(SITES)
    short = (step.pipe + 2 if strict else 2 * step.pipe) if step.pipe > 1 else 3
    if step.pipe * layers * count * TASKS <= WHOLE:
        return _simulated(step, choice)
    # One size in a direction that is short anyway.
    least = -(-(2 if strict else 3) // choice.bucket) * choice.bucket  # whole buckets
    by_layers = (least, 2 * least)
    by_layers = by_layers if layers > by_layers[1] else (layers, layers)
    by_count = (short, short + (2 if strict else 6))
    by_count = by_count if count > by_count[1] else (count, count)
    corners = {
        (some, many): _simulated(step.resized(some, many), choice)
        for some in set(by_layers)
        for many in set(by_count)
    }

    def value(name: str) -> float:
        def along(many: int) -> float:
            ends = [getattr(corners[some, many], name) for some in by_layers]
            return _extended(by_layers, ends, layers)

        return _extended(by_count, [along(many) for many in by_count], count)

    return Simulated(value("seconds"), value("computing"), value("exposed"))


def _extended(at: Sequence[int], values: Sequence[float], wanted: int) -> float:
    """Returns the value on the line through two points."""
    if at[0] == at[1]:
        return values[0]
    slope = (values[1] - values[0]) / (at[1] - at[0])
    return values[1] + slope * (wanted - at[1])


def _simulated(step: Step, choice: Choice) -> Simulated:
    timeline = simulate(build(step, choice), step.where.cluster.chip.beside)
    return Simulated(timeline.seconds, timeline.computing(0), timeline.exposed(0))


def plan(step: Step) -> Planned:
    """Plans a step.

    Returns:
        The best choice found. It is never slower, simulated, than the best baseline, which it
        falls back to.

    Raises:
        ValueError: if the step does not fit into memory.
    """
    step.check_memory(0)
    known = baselines(step)
    found = {name: simulated(step, choice) for name, choice in known.items()}
    name = "plan"
    choice, result = searched(step)
    strongest = min(found, key=lambda each: found[each].seconds)
    if found[strongest].seconds < result.seconds:
        name, choice, result = strongest, known[strongest], found[strongest]
    return Planned(name, choice, result, found, bound(step))


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
    if "model" in tiers:
        buckets = [dataclasses.replace(choice, bucket=bucket) for bucket in _buckets(step)]
        choice = _best(step, buckets)
    return choice, simulated(step, choice)


def baselines(step: Step) -> dict[str, Choice]:
    """Returns what is done without a planner.

    "blocking": every collective alone. "buckets": gradients of some layers at a time beside the
    backward pass (DDP), the best number of layers. "prefetch": every layer's gradients so, the
    next layer's weights gathered one layer ahead, and updated ones beside the forward pass, as XLA
    and Megatron do; products over tensor wait.
    """
    background = frozenset(SITES) - {"scatter", "reduce"}
    when = _whens(step)[0]
    buckets = [Choice(bucket=bucket, when=when, waits=background) for bucket in _buckets(step)]
    prefetch = Choice(
        ahead=int(_fits(step, 1, when=when)),
        when=when,
        deferred=True,
        waits=frozenset({"column", "row"}),
    )
    return {
        "blocking": Choice(bucket=step.layers, when=when),
        "buckets": _best(step, buckets),
        "prefetch": prefetch,
    }


def _fits(step: Step, ahead: int, strands: bool = False, when: str = "each") -> bool:
    whole = when == "end" and step.job.micro_batches > 1
    return sum(step.memory(ahead, strands, whole).values()) <= step.where.cluster.chip.memory


def _whens(step: Step) -> list[Literal["end", "each"]]:
    """Returns when gradients may go over their shards: at the end if all of them, whole, fit."""
    if step.job.zero < 2:
        return ["end"]
    return ["end", "each"] if _fits(step, 0, when="end") else ["each"]


def _buckets(step: Step) -> list[int]:
    return sorted({min(size, step.layers) for size in (1, 2, 4, 8, step.layers)})


def _best(step: Step, choices: Iterable[Choice]) -> Choice:
    """Returns the quickest choice, judged by two short versions of the step."""
    layers = min(step.layers, 2 if step.pipe > 1 else 4)
    first = step.pipe + 1 if step.pipe > 1 else 2
    second = first + step.pipe if step.pipe > 1 else 4
    counts = tuple(min(step.job.micro_batches, count) for count in (first, second))
    short = [step.resized(layers, count) for count in dict.fromkeys(counts)]
    beside = step.where.cluster.chip.beside

    def took(choice: Choice) -> float:
        ends = [simulate(build(each, choice), beside).seconds for each in short]
        return _extended(counts, (ends[0], ends[-1]), step.job.micro_batches)

    return min(choices, key=took)


def _candidates(step: Step, dimensions: frozenset[str], tiers: frozenset[str]) -> Iterator[Choice]:
    job = step.job
    operation = dimensions if "operation" in tiers else frozenset()
    ways = [_ways(step, site, operation) for site in ("gather", "scatter", "reduce")]
    pairs = [tuple(_overlap(step, site, operation) for site in ("column", "row"))]
    layer, model = "layer" in tiers, "model" in tiers
    aheads = [n for n in AHEAD if _fits(step, n)] if layer and job.zero == 3 else [0]
    orders: tuple[Literal["program", "way", "justified"], ...] = ("program",)
    if layer:  # a pipeline has too many tasks to run it backwards as well
        orders = ("program", "way") if step.pipe > 1 else ("program", "way", "justified")
    whens = _whens(step)[: 2 if model and step.pipe == 1 else 1]
    # Interleaved passes would each need gathered weights, so not with weights in shards.
    strands = model and step.tensor > 1 and job.zero != 3 and _fits(step, 0, strands=True)
    if strands and pairs != [(PLAIN, PLAIN)]:  # another strand may hide what is not cut
        pairs.append((PLAIN, PLAIN))
    for (gather, scatter, reduce), (
        column,
        row,
    ), ahead, when, order, two in itertools.product(
        dict.fromkeys(zip(*ways, strict=True)),
        pairs,
        aheads or [0],
        whens,
        orders,
        (True, False) if strands else (False,),
    ):
        if ahead and not _fits(step, ahead, when=when):
            continue
        yield Choice(
            gather,
            scatter,
            reduce,
            column,
            row,
            ahead=ahead,
            apart=layer,
            strands=two,
            when=when,
            bucket=1 if model else step.layers,
            deferred=model,
            waits=frozenset() if model else frozenset({"reduce", "scatter"}),
            order=order,
        )


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
    axes = step.replicas if site == "reduce" else step.job.shard
    if not axes:
        return None, None
    make = {"gather": step.gather, "scatter": step.scatter, "reduce": step.reduce}[site]
    wanted, where = make(step.layer_weights), step.where
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
    """Returns what `parallel.train` runs of a choice: its order is left to XLA.

    Raises:
        ValueError: for shards over other axes than `fsdp`, which training does not have, and for
            whole weights on a mesh that has it, where training always has shards.
    """
    job, sizes = step.job, step.where.sizes
    if "fsdp" in sizes and not job.shard:
        raise ValueError(f"zero = 0 on {dict(sizes)}: call the axis fsdp data, or say 1, 2 or 3.")
    if job.shard not in ((), ("fsdp",)):
        raise ValueError(f"Shards over {job.shard} cannot be run: training shards over fsdp.")
    made = Plan(
        gather=choice.gather if job.shard else None,
        scatter=choice.scatter if job.shard else None,
        reduce=choice.reduce,
        column=choice.column,
        row=choice.row,
        zero=job.zero or 3,
        bucket="block" if job.zero == 3 else "leaf",
        prefetch=job.zero == 3 and choice.ahead > 0,
        order="chained",
        schedule=job.schedule if "pipe" in sizes else "gpipe",
    )
    made.check(sizes, scan=made.prefetch)
    return made
