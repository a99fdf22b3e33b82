"""The simulator: closed forms exactly, properties of random graphs, one published table."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.planner.choice import Choice
from parallel.planner.cluster import Cluster, Placement
from parallel.planner.graph import build
from parallel.planner.simulate import COMPUTE, Task, simulate
from parallel.planner.workload import Job, Model, Step

FAST, SLOW = 1, 2  # links


def product(seconds, *after, **how):
    return Task("product", 0, (COMPUTE,), seconds, after, **how)


def send(seconds, *after, link=FAST, **how):
    return Task("send", 0, (link,), seconds, after, site="gather", **how)


def test_nothing_takes_no_time():
    timeline = simulate([])
    assert (timeline.seconds, timeline.stages) == (0, 0)


def test_a_chain_takes_the_sum():
    timeline = simulate([product(1.5), send(2.25, 0), send(4.0, 1, link=SLOW), product(0.5, 2)])
    assert timeline.start == [0, 1.5, 3.75, 7.75]
    assert timeline.seconds == 8.25


def test_tasks_of_no_duration():
    timeline = simulate([product(0.0), send(0.0, 0), product(1.0, 1), send(0.0, 2)])
    assert timeline.start == [0, 0, 0, 1]
    assert timeline.seconds == 1


def test_independent_tasks_fill_three_resources():
    """The longest resource decides, whatever the order they are named in."""
    tasks = [product(1.0), product(2.0), send(4.0), send(1.0), send(1.5, link=SLOW)]
    for order in itertools.permutations(tasks):
        timeline = simulate(order)
        assert timeline.seconds == 5
        assert [timeline.busy(0, resource) for resource in range(3)] == [3, 5, 1.5]
        assert timeline.exposed(0) == 2


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize(("first", "second"), [(8.0, 8.0), (8.0, 3.0), (2.0, 8.0)])
def test_chunks_in_two_stages(first, second, chunks):
    """max(T1, T2) + min(T1, T2) / k, on two links and on a link beside products."""
    for make in (lambda took, i: send(took, i, link=SLOW), product):
        tasks = []
        for i in range(chunks):
            tasks += [send(first / chunks), make(second / chunks, 2 * i)]
        want = max(first, second) + min(first, second) / chunks
        assert simulate(tasks).seconds == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("beside", [1.0, 1.18, 1.5, 2.0])
@pytest.mark.parametrize(("compute", "sent"), [(4.0, 1.0), (4.0, 3.5), (1.0, 4.0), (2.0, 4.0)])
def test_contention(compute, sent, beside):
    """C + M (1 - 1 / c); M if the product, slowed down, ends before."""
    want = max(compute + sent * (1 - 1 / beside), sent)
    alone = simulate([product(compute), send(sent)], beside)
    assert alone.seconds == pytest.approx(want, rel=1e-12)
    # Several in a row slow down as one that is as long as all of them.
    row = [send(sent / 4), send(sent / 4, 1), send(sent / 4, 2), send(sent / 4)]
    assert simulate([product(compute), *row], beside).seconds == pytest.approx(want, rel=1e-12)
    # Both links at once slow down only once.
    both = [product(compute), send(sent), send(sent / 2, link=SLOW)]
    assert simulate(both, beside).seconds == pytest.approx(want, rel=1e-12)


def test_contention_that_begins_in_the_middle():
    """1 s alone, 1 s (of 2 s) beside a message, 1 s alone."""
    timeline = simulate([product(3.0), send(1.0, link=SLOW), send(2.0, 1)], 2.0)
    assert timeline.seconds == pytest.approx(3 + 3 / 2)
    timeline = simulate([product(1.0), product(2.0), send(2.0, 0)], 2.0)
    assert timeline.end == pytest.approx([1, 4, 3])


def test_other_stages_do_not_slow_down():
    tasks = [product(2.0), send(2.0)._replace(stage=1)]
    assert simulate(tasks, 2.0).seconds == 2


def test_what_holds_both_contends_with_nothing():
    """A blocking collective keeps compute and link; nothing is slowed down by it, nor it."""
    blocking = Task("blocking", 0, (COMPUTE, FAST), 2.0, (), site="gather")
    tasks = [product(1.0), blocking, product(1.0)]
    timeline = simulate(tasks, 2.0)
    assert timeline.seconds == timeline.busy(0, COMPUTE) == 4
    assert timeline.exposed(0) == timeline.computing(0) == 2
    # A message on the other link goes on beside it, and slows down only products.
    timeline = simulate([*tasks, send(4.0, link=SLOW)], 2.0)
    assert timeline.end == pytest.approx([2, 4, 5, 4])
    # Neither starts while the other's link is in use.
    timeline = simulate([blocking, send(1.0)], 2.0)
    assert timeline.start == [0, 2]


def test_the_least_rank_goes_first_and_ties_by_number():
    tasks = [product(1.0, rank=rank) for rank in (0, 1, -1, 0, -1)]
    assert simulate(tasks).start == [2, 4, 0, 3, 1]
    # What runs is not interrupted by what becomes ready.
    late = [send(1.0), product(3.0), product(1.0, 0, rank=-9), product(1.0, rank=2)]
    assert simulate(late).start == [0, 0, 3, 4]


def test_exposed_is_a_union():
    overlapping = [send(3.0), send(4.0, link=SLOW)]
    assert simulate(overlapping).exposed(0) == 4  # not 7
    # Partly hidden: from 2 s on.
    assert simulate([*overlapping, product(2.0)]).exposed(0) == 2
    # Hidden in the middle: 1 s before and 1 s after the product.
    timeline = simulate([send(1.0), send(2.0, 0), product(1.0, 0)])
    assert timeline.exposed(0) == 2
    # Only that stage's products hide, and only its messages count.
    others = [send(3.0), product(3.0)._replace(stage=1)]
    timeline = simulate(others)
    assert (timeline.exposed(0), timeline.exposed(1), timeline.stages) == (3, 0, 2)


def test_impossible_graphs():
    with pytest.raises(ValueError, match="product waits for task 7, which does not exist"):
        simulate([product(1.0, 7)])
    with pytest.raises(ValueError, match="send waits for task -1, which"):
        simulate([product(1.0), send(1.0, -1)])
    loop = [product(1.0), product(1.0, 2), send(1.0, 1), product(1.0, 2)]
    with pytest.raises(ValueError, match=r"3 tasks wait for each other, .*'product', 'send'"):
        simulate(loop)


def test_traces_can_be_opened(tmp_path):
    path = tmp_path / "trace.json"
    both = Task("both", 1, (COMPUTE, SLOW), 2.0, (0,), site="reduce")
    simulate([product(1.5), send(1.0), both]).save_trace(path, ["NVLink", "NIC"])
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 4  # one for each resource of a task
    for event in spans:
        assert {"ts", "dur", "pid", "tid", "name"} <= set(event)
    assert {(e["pid"], e["tid"], e["ts"], e["dur"]) for e in spans if e["name"] == "both"} == {
        (1, 0, 1.5e6, 2e6),
        (1, 2, 1.5e6, 2e6),
    }
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    assert names[1, None] == "stage 1 (simulated)"
    assert [names[0, resource] for resource in range(3)] == ["compute", "NVLink", "NIC"]


# ---------------------------------------------------------------------- pipelines


def free(name):
    """A cluster that only products take time on."""
    cluster = Cluster.parse(name)
    links = tuple(
        dataclasses.replace(link, rate=1e30, start=0.0, hop=0.0) for link in cluster.links
    )
    chip = dataclasses.replace(cluster.chip, launch=0.0, memory_rate=float("inf"))
    return dataclasses.replace(cluster, chip=chip, links=links)


@pytest.mark.parametrize("micro", [1, 2, 3, 8])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubbles(schedule, stages, micro, monkeypatch):
    """(m + p - 1) (tf + tb): every stage stands still for p - 1 micro-batches' passes."""
    monkeypatch.setattr(Step, "head", lambda self: 0.0)  # or the last stage has more to do
    model = Model("toy", 2 * stages, 1024, 4096, 8, 8, 1024, False)
    job = Job(model, 1024, 2 * micro, micro, (), 0, schedule, False, False)
    step = Step(job, Placement(free(f"h100:2x{stages}"), {"data": 2, "pipe": stages}))
    (part,) = step.parts()
    forward = 2 * (part.into + part.between + part.out)
    timeline = simulate(build(step, Choice()))
    assert timeline.seconds == pytest.approx((micro + stages - 1) * 3 * forward, rel=1e-9)
    for stage in range(stages):
        assert timeline.busy(stage, COMPUTE) == pytest.approx(micro * 3 * forward, rel=1e-9)


# ---------------------------------------------------------------------- properties


@st.composite
def graphs(draw, single):
    """Up to twelve tasks on up to two stages; every dependency is an earlier task."""
    sets = [(COMPUTE,), (FAST,), (SLOW,)]
    if not single:
        sets += [(FAST, SLOW), (COMPUTE, FAST), (COMPUTE, SLOW)]
    tasks = []
    for number in range(draw(st.integers(1, 12))):
        resources = draw(st.sampled_from(sets))
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else ()
        tasks.append(
            Task(
                f"task {number}",
                draw(st.integers(0, 1)),
                resources,
                draw(st.integers(0, 8)) / 4,
                tuple(after),
                float(draw(st.integers(0, 2))),
                "" if resources == (COMPUTE,) else "gather",
            )
        )
    return tasks


def covered(intervals, start, end):
    """Length of a union inside [start, end]."""
    total, reached = 0.0, start
    for begin, stop in sorted(intervals):
        total += max(min(stop, end) - max(begin, reached), 0)
        reached = max(reached, min(stop, end))
    return total


def check(tasks, beside):
    """Everything that holds of any graph, on any resources."""
    timeline = simulate(tasks, beside)
    spans = list(zip(timeline.start, timeline.end, strict=True))
    for (i, one), (j, other) in itertools.combinations(enumerate(tasks), 2):
        if one.stage == other.stage and set(one.resources) & set(other.resources):
            assert min(spans[i][1], spans[j][1]) <= max(spans[i][0], spans[j][0])
    chain: list[float] = []
    for number, task in enumerate(tasks):
        start, end = spans[number]
        assert start >= max([0.0, *(spans[earlier][1] for earlier in task.after)])
        chain.append(task.seconds + max([0.0, *(chain[earlier] for earlier in task.after)]))
        # What is done in the time that it took, beside messages of its stage and alone.
        sending = [
            span
            for other, span in zip(tasks, spans, strict=True)
            if other.stage == task.stage and COMPUTE not in other.resources
        ]
        slow = covered(sending, start, end) if task.resources == (COMPUTE,) else 0.0
        assert end - start - slow + slow / beside == pytest.approx(task.seconds, abs=1e-9)
    assert timeline.seconds >= max(chain)
    for stage, resource in itertools.product(range(timeline.stages), range(3)):
        mine = [t.seconds for t in tasks if t.stage == stage and resource in t.resources]
        assert timeline.seconds >= timeline.busy(stage, resource) >= sum(mine) - 1e-9
        assert timeline.exposed(stage) <= timeline.seconds
    return spans


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs(single=False), st.sampled_from([1.0, 1.25, 2.0]))
def test_random_graphs(tasks, beside):
    check(tasks, beside)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs(single=True), st.sampled_from([1.0, 1.25]))
def test_nothing_waits_while_its_resource_is_idle(tasks, beside):
    spans = check(tasks, beside)
    for number, task in enumerate(tasks):
        ready = max([0.0, *(spans[earlier][1] for earlier in task.after)])
        rivals = [
            span
            for other, span in zip(tasks, spans, strict=True)
            if (other.stage, other.resources) == (task.stage, task.resources)
        ]
        waited = spans[number][0] - ready
        assert covered(rivals, ready, spans[number][0]) == pytest.approx(waited, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(graphs(single=False), st.sampled_from([1.0, 1.25, 2.0]))
def test_many_more_random_graphs(tasks, beside):
    check(tasks, beside)


# ---------------------------------------------------------------------- a published table

LOCAL, US = 43e-6, 1e-6


def ring(gpus, overhead):
    """Products of one device in a collective matmul; shard i + 1 comes while i is multiplied."""
    hop = 1024 * 4096 * 2 / 370e9 + 6 * US
    sends = [send(hop, *([i - 1] if i else [])) for i in range(gpus - 1)]
    products = [product(LOCAL + overhead, *([i - 1] if i else [])) for i in range(gpus)]
    return [*sends, *products]


@pytest.mark.parametrize(("gpus", "table"), [(4, 212 * US), (8, 436 * US)])
def test_published_collective_matmul(gpus, table):
    """Pallas kernel, JAX's Mosaic GPU docs: 1024 rows a GPU, K = N = 4096, float16, H100.

    Its 2-GPU row, 102 us for two products of 43 us, gives what a product in a ring costs on top.
    """
    overhead = 102 * US / 2 - LOCAL
    assert simulate(ring(2, overhead)).seconds == pytest.approx(102 * US)
    assert simulate(ring(gpus, overhead)).seconds == pytest.approx(table, rel=0.2)
