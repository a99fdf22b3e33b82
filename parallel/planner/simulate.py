"""Runs a graph of tasks on the resources of every stage: discrete events, nothing is measured.

A stage (all devices that do the same at the same time) has three resources or fewer: one that
computes, and one a link level. A resource does one task at a time; of the tasks that could start,
the one of least rank does. While something is sent, a product beside it runs slower. What comes out
is a prediction, and must be called simulated wherever it is printed.
"""

import dataclasses
import heapq
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

COMPUTE = 0  # resource of a stage; link level i is resource 1 + i


class Task(NamedTuple):
    """What occupies resources for a while.

    Attributes:
        name: for pictures.
        stage: whose resources.
        resources: `COMPUTE`, 1 + level of links, or several at once.
        seconds: alone.
        after: numbers of the tasks that must have ended.
        rank: the least goes first; ties by number.
        site: "" for computation, else what is sent, as in `parallel.plan`.
    """

    name: str
    stage: int
    resources: tuple[int, ...]
    seconds: float
    after: tuple[int, ...]
    rank: float = 0.0
    site: str = ""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When every task started and ended.

    Attributes:
        tasks: as given.
        start: seconds, by task.
        end: seconds, by task.
    """

    tasks: Sequence[Task]
    start: list[float]
    end: list[float]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(self.end, default=0.0)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return 1 + max((task.stage for task in self.tasks), default=-1)

    def busy(self, stage: int, resource: int) -> float:
        """Returns the seconds in which a stage's resource is held, waiting for a link or not."""
        return _length(self._intervals(stage, lambda task: resource in task.resources))

    def computing(self, stage: int) -> float:
        """Returns the seconds in which a stage computes."""
        return _length(self._intervals(stage, lambda task: not task.site))

    def exposed(self, stage: int) -> float:
        """Returns the seconds in which a stage sends and does not compute.

        A union of intervals: what is sent on two links at once counts once.
        """
        sent = self._intervals(stage, lambda task: bool(task.site))
        products = self._intervals(stage, lambda task: not task.site)
        return _length(sent + products) - _length(products)

    def _intervals(self, stage: int, wanted: Callable[[Task], bool]) -> list[tuple[float, float]]:
        rows = zip(self.tasks, self.start, self.end, strict=True)
        return [(start, end) for task, start, end in rows if task.stage == stage and wanted(task)]

    def save_trace(self, path: str | os.PathLike[str], levels: Sequence[str]) -> None:
        """Writes the trace-event JSON that Perfetto and Chrome open, marked as simulated.

        Args:
            path: of the file.
            levels: names of the link levels, innermost first.
        """
        events: list[dict] = []
        for stage in range(self.stages):
            name = {"name": f"stage {stage} (simulated)"}
            events.append({"ph": "M", "pid": stage, "name": "process_name", "args": name})
            for resource, text in enumerate(("compute", *levels)):
                where = {"pid": stage, "tid": resource}
                events.append({"ph": "M", **where, "name": "thread_name", "args": {"name": text}})
        for task, start, end in zip(self.tasks, self.start, self.end, strict=True):
            events += [
                {
                    "ph": "X",
                    "pid": task.stage,
                    "tid": resource,
                    "name": task.name,
                    "cat": task.site or "compute",
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                }
                for resource in task.resources
            ]
        pathlib.Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of a union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


@dataclasses.dataclass
class _Stage:
    """What a stage is doing.

    Attributes:
        waiting: tasks that could start, a heap for each set of resources.
        held: resources in use.
        product: number of the task that computes, or -1.
        left: seconds of it, alone, at time `since`.
        since: when `left` was written.
        sending: tasks that send without holding the computing resource.
    """

    waiting: dict[tuple[int, ...], list[tuple[float, int]]]
    held: set[int]
    product: int = -1
    left: float = 0.0
    since: float = 0.0
    sending: int = 0


def simulate(tasks: Sequence[Task], beside: float = 1.0) -> Timeline:
    """Returns when every task runs.

    Args:
        tasks: the graph.
        beside: factor by which computation slows down while its stage sends.

    Raises:
        ValueError: if tasks wait for each other, or for one that does not exist.
    """
    return _Run(tasks, beside).run()


class _Run:
    def __init__(self, tasks: Sequence[Task], beside: float):
        self.tasks, self.beside = tasks, beside
        self.start, self.end = [-1.0] * len(tasks), [-1.0] * len(tasks)
        self.missing = [len(task.after) for task in tasks]
        self.next: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for earlier in task.after:
                if not 0 <= earlier < len(tasks):
                    raise ValueError(f"{task.name} waits for task {earlier}, which does not exist.")
                self.next[earlier].append(number)
        count = 1 + max((task.stage for task in tasks), default=-1)
        self.stages = [_Stage({}, set()) for _ in range(count)]
        # When what ends; a product whose pace changed has newer entries, so ends are checked.
        self.events: list[tuple[float, int]] = []

    def run(self) -> Timeline:
        for number, missing in enumerate(self.missing):
            if not missing:
                self._ready(number)
        for stage in self.stages:
            self._begin(stage, 0.0)
        done = 0
        while self.events:
            now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == now:
                _, number = heapq.heappop(self.events)
                if self.end[number] != now or self.missing[number] < 0:
                    continue  # its pace has changed since
                done += 1
                touched |= self._finish(number, now)
            for index in sorted(touched):
                self._begin(self.stages[index], now)
        if done < len(self.tasks):
            names = [t.name for t, end in zip(self.tasks, self.missing, strict=True) if end > 0]
            raise ValueError(f"{len(names)} tasks wait for each other, {names[:3]} among them.")
        return Timeline(self.tasks, self.start, self.end)

    def _ready(self, number: int) -> None:
        task = self.tasks[number]
        heap = self.stages[task.stage].waiting.setdefault(task.resources, [])
        heapq.heappush(heap, (task.rank, number))

    def _begin(self, stage: _Stage, now: float) -> None:
        """Starts what can start."""
        while True:
            first: tuple[float, int] | None = None
            resources: tuple[int, ...] = ()
            for wanted, heap in stage.waiting.items():
                if heap and (first is None or heap[0] < first) and stage.held.isdisjoint(wanted):
                    first, resources = heap[0], wanted
            if first is None:
                return
            number = first[1]
            heapq.heappop(stage.waiting[resources])
            stage.held.update(resources)
            self.start[number] = now
            if resources == (COMPUTE,):
                stage.product, stage.left, stage.since = number, self.tasks[number].seconds, now
                self._pace(stage, now)
                continue
            self._ends(number, now + self.tasks[number].seconds)
            if COMPUTE not in resources:
                self._settle(stage, now)
                stage.sending += 1
                self._pace(stage, now)

    def _finish(self, number: int, now: float) -> set[int]:
        task = self.tasks[number]
        stage = self.stages[task.stage]
        stage.held.difference_update(task.resources)
        self.missing[number] = -1
        if number == stage.product:
            stage.product = -1
        elif COMPUTE not in task.resources:
            self._settle(stage, now)
            stage.sending -= 1
            self._pace(stage, now)
        touched = {task.stage}
        for later in self.next[number]:
            self.missing[later] -= 1
            if not self.missing[later]:
                self._ready(later)
                touched.add(self.tasks[later].stage)
        return touched

    def _settle(self, stage: _Stage, now: float) -> None:
        """Subtracts what the running product has done since its pace was set."""
        if stage.product >= 0:
            slow = self.beside if stage.sending else 1.0
            stage.left -= (now - stage.since) / slow
            stage.since = now

    def _pace(self, stage: _Stage, now: float) -> None:
        """Says anew when the running product ends."""
        if stage.product >= 0:
            slow = self.beside if stage.sending else 1.0
            self._ends(stage.product, now + max(stage.left, 0.0) * slow)

    def _ends(self, number: int, at: float) -> None:
        if self.end[number] != at:
            self.end[number] = at
            heapq.heappush(self.events, (at, number))
