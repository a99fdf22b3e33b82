"""Seconds that no choice about a step goes below: products, links, and what must follow what."""

from collections.abc import Mapping

from parallel.partition import Collective, compositions, flat
from parallel.planner import cost
from parallel.planner.graph import wanted
from parallel.planner.workload import Step


def bound(step: Step) -> float:
    """Returns the largest of several lower bounds of a step, seconds.

    * Products are never quicker than whole ones, and slower while something is sent.
    * What is sent crosses every level at least as often as in the composition that suits the level
      best; starts and hops are left out.
    * A pipeline's last micro-batch has passed all stages before it, and comes back through them.
    * Without a pipeline: weights that are gathered once are all there before the last layer's first
      product, and gradients that are reduced once leave after the last micro-batch's first.
    """
    chip, job, pipe, parts = step.where.cluster.chip, step.job, step.pipe, step.parts()
    count, layers = job.micro_batches, step.layers
    forward = layers * sum(part.into + part.between + part.out for part in parts)
    attention = layers * sum(part.between for part in parts)
    # Backward: gradients of inputs, and of weights; attention twice, without weights.
    weights, inputs = forward - attention, forward + attention
    again = forward - layers * parts[-1].out if job.again else 0.0  # not the last product
    head = step.head() if pipe == 1 else 0.0
    update = step.update(layers * step.layer_weights / step.sharded)
    busy = count * (forward + again + inputs + weights + 3 * head) + update

    often = _often(step)
    sent = _least(step, often)
    slowed = busy + sent * (1 - 1 / chip.beside)
    back = inputs + again
    through = pipe - 1
    path = (through + count) * (forward + back) + 2 * through * _send(step)
    late = through * (forward + _send(step)) + count * (forward + back + weights)
    if pipe > 1:
        return max(slowed, sent, path, late)
    once = {c: n for c, n in often.items() if c.kind != "all_gather" and c.axes != ("tensor",)}
    layer = step.gather(step.layer_weights) if job.shard else None
    gathered = {c: n for c, n in often.items() if c == layer}
    between = forward / layers
    if step.tensor == 1 or job.zero == 3:  # passes do not interleave
        between = (count - 1) * (forward + back + weights * (1 - 2 / layers))
        between += forward if job.zero in (0, 3) else forward / layers
    elif count > 2:
        between += (count - 2) * (forward + back)
    first = _least(step, gathered) if job.zero in (1, 2) else 0.0
    return max(slowed, sent, late, first + max(between, 0.0) + _least(step, once))


def _often(step: Step) -> dict[Collective, int]:
    """Returns the collectives of a stage, and how often a step cannot do without each."""
    out = {}
    for collective, times in wanted(step.resized(step.layers, 1)).items():
        each = collective.axes in (("tensor",), ("pipe",))
        each |= step.job.zero == 3 and collective.kind == "all_gather"
        out[collective] = times * (step.job.micro_batches if each else 1)
    return out


def _least(step: Step, often: Mapping[Collective, int]) -> float:
    """Returns the least time of the busier level, starts and hops left out.

    A collective has one composition for both levels, so any weighting of their times, the least of
    each collective summed, is a bound; the largest of some is returned.
    """
    return max(
        (
            sum(times * _weighted(step, each, weight / 8) for each, times in often.items())
            for weight in range(9)
        ),
        default=0.0,
    )


def _weighted(step: Step, wanted: Collective, weight: float) -> float:
    where, least = step.where, float("inf")
    for how in compositions(wanted.kind, {axis: where.sizes[axis] for axis in wanted.axes}):
        took = 0.0
        for piece in cost.pieces(wanted, how, where):
            for level in piece.levels:
                link = where.cluster.links[level]
                wires = where.span(piece.op.axes).wires if link.torus else 1
                seconds = piece.nbytes[level] / (link.rate * link.reached * wires)
                took += (weight if level == 0 else 1 - weight) * seconds
        least = min(least, took)
    return least


def _send(step: Step) -> float:
    """Returns the seconds in which activations reach the next stage."""
    if step.pipe == 1:
        return 0.0
    return cost.seconds(step.passed(), flat("send", ("pipe",)), step.where)
