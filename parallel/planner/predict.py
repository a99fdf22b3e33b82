"""What the simulator says of a step; of a long one, from short ones like it."""

import dataclasses
from collections.abc import Sequence

from parallel.planner.choice import WAITS, Choice
from parallel.planner.graph import build
from parallel.planner.simulate import simulate
from parallel.planner.workload import Step

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


def is_short(step: Step) -> bool:
    """Says whether a step is simulated whole."""
    return step.pipe * step.layers * step.job.micro_batches * TASKS <= WHOLE


def simulated(step: Step, choice: Choice) -> Simulated:
    """Simulates a step, a long one from four short ones.

    With layers and micro-batches the time grows along planes once the first and last of them are
    told apart, so four short steps give the long one: a + b layers + c micro-batches + d both.
    """
    layers, count = step.layers, step.job.micro_batches
    # What is strictly in order repeats from the first layer on.
    strict = not (choice.apart or choice.strands) and choice.waits == WAITS
    free = choice.apart or choice.strands
    short = (max(2 * step.pipe - 2, 6) if free else step.pipe + 2) if step.pipe > 1 else 3
    if is_short(step):
        return _simulated(step, choice)
    # One size in a direction that is short anyway.
    least = -(-(2 if strict else 3) // choice.bucket) * choice.bucket  # whole buckets
    by_layers = (least, 2 * least)
    by_layers = by_layers if layers > by_layers[1] else (layers, layers)
    by_count = (short, short + 2)
    by_count = by_count if count > by_count[1] else (count, count)
    corners = {
        (some, many): _simulated(step.resized(some, many), choice)
        for some in set(by_layers)
        for many in set(by_count)
    }

    def value(name: str) -> float:
        def along(many: int) -> float:
            ends = [getattr(corners[some, many], name) for some in by_layers]
            return extended(by_layers, ends, layers)

        return extended(by_count, [along(many) for many in by_count], count)

    return Simulated(value("seconds"), value("computing"), value("exposed"))


def extended(at: Sequence[int], values: Sequence[float], wanted: int) -> float:
    """Returns the value on the line through two points."""
    if at[0] == at[1]:
        return values[0]
    slope = (values[1] - values[0]) / (at[1] - at[0])
    return values[1] + slope * (wanted - at[1])


def _simulated(step: Step, choice: Choice) -> Simulated:
    timeline = simulate(build(step, choice), step.where.cluster.chip.beside)
    return Simulated(timeline.seconds, timeline.computing(0), timeline.exposed(0))
