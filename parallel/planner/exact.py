"""One layer's backward pass scheduled exactly: what the planner's greedy order is held against.

A mixed-integer program (HiGHS, through scipy): a start for every task, and for any two tasks that
share a resource a binary that says which is first. Concerto (ASPLOS 2025) states overlap as such a
resource-constrained scheduling problem, over two resources; here there are three. Computation is
not slowed down by what is sent beside it: that would not be linear.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from parallel.planner.choice import Choice
from parallel.planner.graph import build
from parallel.planner.priority import justified
from parallel.planner.simulate import Task, simulate
from parallel.planner.workload import Step


@dataclasses.dataclass(frozen=True)
class Exact:
    """What the solver found.

    Attributes:
        seconds: from the first start to the last end.
        bound: seconds that no order goes below; equal to `seconds` if it is proven best.
        start: of every task, seconds.
    """

    seconds: float
    bound: float
    start: tuple[float, ...]

    @property
    def gap(self) -> float:
        """Part of `seconds` that may still be gained."""
        return 1 - self.bound / self.seconds if self.seconds else 0.0


def period(step: Step, choice: Choice) -> list[Task]:
    """Returns the backward pass of two layers, of one micro-batch, with all that it sends.

    The second layer's gathers and the first one's gradients lie beside each other's products, as
    between any two layers of a long step.
    """
    if step.pipe > 1:
        raise ValueError(f"A pipeline of {step.pipe} stages: a period is one stage's.")
    whole = build(step.resized(2, 1), choice)
    kept = {number: task for number, task in enumerate(whole) if task.name.startswith("B0 L")}
    place = {number: at for at, number in enumerate(kept)}
    return [
        task._replace(after=tuple(place[earlier] for earlier in task.after if earlier in place))
        for task in kept.values()
    ]


def greedy(tasks: Sequence[Task]) -> float:
    """Returns the seconds of the planner's order, nothing slowed down."""
    return simulate(justified(list(tasks))).seconds


def solve(tasks: Sequence[Task], limit: float = 60.0) -> Exact:
    """Returns the best order of a few tasks (about 30: the binaries grow with their square).

    Args:
        tasks: of one stage; every task comes after those that it waits for.
        limit: seconds for the solver, after which its best order and bound are returned.

    Raises:
        ValueError: if no order was found in time.
    """
    count = len(tasks)
    # Twice as long as some order: with bounds that touch a solution, HiGHS has called worse orders
    # best (seen with scipy 1.17).
    horizon = 2 * simulate(tasks).seconds
    before = _reach(tasks)
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(count), 2)
        if not before[i, j] and set(tasks[i].resources) & set(tasks[j].resources)
    ]
    # Variables: starts, then the end of all, then a binary a pair. Times are parts of the horizon.
    took = np.array([task.seconds for task in tasks]) / horizon
    rows: list[tuple[dict[int, float], float]] = []  # sum of coefficients >= value
    for j, task in enumerate(tasks):
        rows.append(({count: 1.0, j: -1.0}, took[j]))
        rows += [({j: 1.0, i: -1.0}, took[i]) for i in task.after]
    for number, (i, j) in enumerate(pairs, count + 1):
        # Binary 1: i first. Two horizons are enough to make the other row hold by itself.
        rows.append(({j: 1.0, i: -1.0, number: -2.0}, took[i] - 2.0))
        rows.append(({i: 1.0, j: -1.0, number: 2.0}, took[j]))
    size = count + 1 + len(pairs)
    matrix = np.zeros((len(rows), size))
    for row, (coefficients, _) in enumerate(rows):
        for column, value in coefficients.items():
            matrix[row, column] = value
    objective = np.zeros(size)
    objective[count] = 1.0
    integer = np.zeros(size)
    integer[count + 1 :] = 1
    listed = simulate(justified(list(tasks)))
    found = milp(
        objective,
        integrality=integer,
        bounds=Bounds(np.zeros(size), np.ones(size)),
        constraints=LinearConstraint(matrix, np.array([value for _, value in rows]), np.inf),
        options={"time_limit": limit},
    )
    if found.x is None:
        raise ValueError(f"No order of {count} tasks in {limit} s ({found.message}): allow more.")
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else found.fun
    starts = tuple(float(start) * horizon for start in found.x[:count])
    if listed.seconds < found.fun * horizon:  # the solver had no time to find it
        return Exact(listed.seconds, float(bound) * horizon, tuple(listed.start))
    return Exact(float(found.fun) * horizon, float(bound) * horizon, starts)


def _reach(tasks: Sequence[Task]) -> np.ndarray:
    """Returns whether task i must end before task j may start, directly or not."""
    out = np.zeros((len(tasks), len(tasks)), bool)
    for j, task in enumerate(tasks):
        for i in task.after:
            out[:, j] |= out[:, i]
            out[i, j] = True
    return out
