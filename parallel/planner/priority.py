"""In which order a stage does things: its passes, and of tasks that could start the first."""

from parallel.planner.simulate import Task, simulate
from parallel.planner.workload import Step


def ranked(tasks: list[Task]) -> list[Task]:
    """Orders tasks by the longest way from their start to the end of the step, longest first."""
    way = [0.0] * len(tasks)
    for number in range(len(tasks) - 1, -1, -1):
        way[number] += tasks[number].seconds
        for earlier in tasks[number].after:
            way[earlier] = max(way[earlier], way[number])
    return [task._replace(rank=-length) for task, length in zip(tasks, way, strict=True)]


def justified(tasks: list[Task]) -> list[Task]:
    """Orders tasks by when they start if all start as late as they can.

    Double justification, the field's way to better a list schedule: the better of the two simple
    orders is run backwards, last task first, and gives the order forwards (Valls et al. 2005).
    """
    orders = [tasks, ranked(tasks)]
    best = min((simulate(each) for each in orders), key=lambda timeline: timeline.seconds)
    last = len(tasks) - 1
    after: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for earlier in task.after:
            after[last - earlier].append(last - number)
    backwards = [
        tasks[last - at]._replace(after=tuple(after[at]), rank=-best.end[last - at])
        for at in range(len(tasks))
    ]
    late = simulate(backwards).end
    orders.append([task._replace(rank=-late[last - n]) for n, task in enumerate(tasks)])
    return min(orders, key=lambda each: simulate(each).seconds)


def order(step: Step, stage: int) -> list[tuple[str, int]]:
    """Returns a stage's passes, ("F" or "B", micro-batch), in the order of its schedule."""
    job, count = step.job, step.job.micro_batches
    forward, backward = [("F", m) for m in range(count)], [("B", m) for m in range(count)]
    if step.pipe == 1:
        return [each for pair in zip(forward, backward, strict=True) for each in pair]
    if job.schedule == "gpipe":
        return forward + backward
    first = min(step.pipe - stage, count)
    rest = [each for pair in zip(backward, forward[first:], strict=False) for each in pair]
    return forward[:first] + rest + backward[count - first :]
