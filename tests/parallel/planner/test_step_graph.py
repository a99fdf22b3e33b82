"""What a step's graph of tasks holds: collectives, products, dependencies; what is refused."""

import collections
import dataclasses
import math

import numpy as np
import pytest

from parallel.overlap import Overlap
from parallel.partition import Composition
from parallel.plan import KINDS
from parallel.planner import cost, graph, schedule
from parallel.planner.choice import Choice
from parallel.planner.cluster import Cluster, Placement
from parallel.planner.graph import build
from parallel.planner.schedule import DIMENSIONS, TIERS
from parallel.planner.simulate import simulate
from parallel.planner.workload import Job, Model, Step

GPT = Model("gpt", 4, 2048, 8192, 16, 16, 51200, False)
LLAMA = Model("llama", 4, 4096, 11008, 32, 8, 32000, True)
L, M = 4, 3  # layers and micro-batches of `step_of`
NOTHING: frozenset[str] = frozenset()


def step_of(cluster, sizes, **changes):
    """A step of L layers and M micro-batches, one sequence a device and micro-batch."""
    job = Job(GPT, 2048, 0, M, (), 0, "1f1b", again=False, clips=True)
    job = dataclasses.replace(job, **changes)
    groups = math.prod(sizes.get(axis, 1) for axis in ("host", "data", "fsdp"))
    job = dataclasses.replace(job, sequences=job.sequences or groups * job.micro_batches)
    where = cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster)
    return Step(job, Placement(where, sizes))


FSDP, BOTH = ("fsdp",), ("host", "fsdp")
JOBS = {
    "data": lambda: step_of("a100:4x8", {"host": 4, "data": 8}),
    "slow data": lambda: step_of("a100-25g:4x8", {"host": 4, "data": 8}, model=LLAMA),
    "zero 1": lambda: step_of("a100-25g:4x8", {"host": 4, "fsdp": 8}, shard=FSDP, zero=1),
    "zero 2": lambda: step_of("a100:4x8", {"host": 4, "fsdp": 8}, shard=FSDP, zero=2),
    "zero 3": lambda: step_of("a100-25g:4x8", {"host": 4, "fsdp": 8}, shard=FSDP, zero=3),
    "zero 3 across": lambda: step_of("h100:2x8", {"host": 2, "fsdp": 8}, shard=BOTH, zero=3),
    "tensor": lambda: step_of("a100:4x8", {"data": 4, "tensor": 8}, model=LLAMA),
    "fsdp x tensor": lambda: step_of(
        "v5e:4x4", {"fsdp": 4, "tensor": 4}, shard=FSDP, zero=3, again=True, micro_batches=2
    ),
    "gpipe": lambda: step_of(
        "h100:2x8", {"host": 2, "data": 4, "pipe": 2}, schedule="gpipe", zero=1, shard=("data",)
    ),
    "1f1b": lambda: step_of(
        "a100-25g:4x8", {"data": 4, "pipe": 2, "tensor": 4}, shard=("data",), zero=1
    ),
}


@pytest.fixture(params=JOBS)
def step(request):
    return JOBS[request.param]()


@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        (
            {"host": 4, "data": 2, "pipe": 4},
            {"model": "layers=6"},
            "6 layers do not divide by pipe = 4",
        ),
        ({"data": 4, "tensor": 8}, {"model": "heads=12"}, "12 heads do not divide by tensor = 8"),
        ({"data": 4, "tensor": 8}, {"model": "kv_heads=4"}, "4 kv heads do not divide by tensor"),
        ({"data": 4, "tensor": 8}, {"model": "vocab=50257"}, "50257 vocabulary do not divide"),
        ({"data": 4, "tensor": 8}, {"model": "hidden=100"}, "100 feed-forward width do not"),
        ({"data": 4, "tensor": 8}, {"tokens": 2044}, "2044 tokens do not divide by tensor = 8"),
        ({"host": 4, "data": 8}, {"sequences": 128}, "128 sequences do not divide by data x micro"),
        ({"host": 4, "fsdp": 8}, {"zero": 3}, r"zero = 3 with shards over \(\): name some"),
        ({"host": 4, "fsdp": 8}, {"shard": FSDP}, r"zero = 0 with shards over \('fsdp',\)"),
        ({"host": 4, "data": 8}, {"shard": FSDP, "zero": 1}, r"name some of the mesh's \('host',"),
        ({"host": 4, "expert": 8}, {}, r"Mesh axes \['expert'\]: choose of"),
        ({"host": 4, "data": 4}, {}, "has 16 devices, a100:4x8 has 32"),
    ],
)
def test_impossible_jobs(sizes, changes, words):
    if "model" in changes:
        name, value = changes["model"].split("=")
        changes = {"model": dataclasses.replace(GPT, **{name: int(value)})}
    with pytest.raises(ValueError, match=words):
        step_of("a100:4x8", sizes, **changes)


# ---------------------------------------------------------------------- the graph

# Blocks: layers, table and head. Gathers of zero = 3: forward all, backward all but the table.
# Over tensor, a layer's two halves each gather and scatter, both ways, and gather their input
# once more for its weights' gradient; the table scatters what it looked up, the head gathers, the
# loss adds two sums over the vocabulary.
ENDS = {"table": 2 * M, "head": 2 * M, "loss": 2 * M}
COUNTS = {
    "data": ({"host": 4, "data": 8}, {}, {}, {"reduce": L + 2}),
    "buckets of 3": ({"host": 4, "data": 8}, {}, {"bucket": 3}, {"reduce": 2 + 2}),
    "zero 1": (
        {"host": 4, "fsdp": 8},
        {"shard": FSDP, "zero": 1},
        {},
        {"gather": L + 2, "scatter": L + 2, "reduce": L + 2},
    ),
    "zero 2, at the end": (
        {"host": 4, "fsdp": 8},
        {"shard": BOTH, "zero": 2},
        {"bucket": 4},
        {"gather": L + 2, "scatter": 1 + 2},
    ),
    "zero 2, each time": (
        {"host": 4, "fsdp": 8},
        {"shard": FSDP, "zero": 2},
        {"when": "each"},
        {"gather": L + 2, "scatter": M * (L + 2), "reduce": L + 2},
    ),
    "zero 3, each time": (
        {"host": 4, "fsdp": 8},
        {"shard": FSDP, "zero": 3},
        {"when": "each"},
        {"gather": M * (2 * L + 3), "scatter": M * (L + 2), "reduce": L + 2},
    ),
    "zero 3, at the end": (
        {"host": 4, "fsdp": 8},
        {"shard": BOTH, "zero": 3},
        {"ahead": 1},
        {"gather": M * (2 * L + 3), "scatter": L + 2},
    ),
    "tensor": (
        {"data": 4, "tensor": 8},
        {},
        {},
        {"reduce": L + 2, "column": M * 6 * L, "row": M * 4 * L, **ENDS},
    ),
    # The forward pass again, but for the last product: no more gathers for gradients of weights.
    "tensor, again": (
        {"data": 4, "tensor": 8},
        {"again": True},
        {},
        {"reduce": L + 2, "column": M * 6 * L, "row": M * 5 * L, **ENDS},
    ),
}


def count(tasks, stage=0):
    found = collections.Counter(task.site for task in tasks if task.stage == stage)
    del found[""]
    return dict(found)


@pytest.mark.parametrize("name", COUNTS)
def test_collectives_are_those_of_the_job(name):
    sizes, job, choice, want = COUNTS[name]
    assert count(build(step_of("a100:4x8", sizes, **job), Choice(**choice))) == want


@pytest.mark.parametrize("how", ["gpipe", "1f1b"])
def test_collectives_of_a_pipeline(how):
    """One layer a stage; the first has the table, the last the head."""
    tasks = build(step_of("a100:4x8", {"host": 4, "data": 2, "pipe": 4}, schedule=how), Choice())
    for stage in range(4):
        ends = stage in (0, 3)
        want = {"send": M * (1 if ends else 2), "reduce": 1 + ends}
        assert count(tasks, stage) == want


def test_chunks_and_rings_are_tasks_of_their_own():
    step = JOBS["tensor"]()
    plain = count(build(step, Choice()))
    ways = {"tokens/4": 4, "ring": 7}
    for way, times in ways.items():
        found = count(build(step, Choice(row=Overlap.parse(way))))
        assert found["row"] >= times * M * 4 * L
        assert found["column"] == plain["column"]
    reduce = Composition.parse("reduce_scatter(data) all_reduce(host) all_gather(data) /2")
    found = count(build(JOBS["data"](), Choice(reduce=reduce)))
    assert found == {"reduce": 6 * (L + 2)}


@pytest.mark.parametrize(
    ("site", "how", "times"),
    [
        ("table", "ring_scatter(tensor) /3", 3),
        ("head", "all_gather(tensor) /2", 2),
        ("loss", "reduce_scatter(tensor) all_gather(tensor) /2", 4),
        ("send", "send(pipe) /4", 4),
    ],
)
def test_sites_beside_the_layers_are_composed(site, how, times):
    """Forward as chosen, back as mirrored; on one link it only costs, so nobody chooses it."""
    step, chosen = JOBS["1f1b"](), Composition.parse(how)
    plain = [task for task in build(step, Choice()) if task.site == site]
    tasks = [task for task in build(step, Choice(**{site: chosen})) if task.site == site]
    assert len(tasks) == times * len(plain) > 0
    words = {task.name.split()[-1] for task in tasks}
    both = (chosen, chosen.mirrored()) if site in ("table", "head") else (chosen,)
    assert words == {str(op) for each in both for op in each.ops}
    taken = (sum(task.seconds for task in each) for each in (tasks, plain))
    assert next(taken) > next(taken)  # chunks and rings start more often
    assert schedule.searched(step)[0].how(site, step.wanted(site)).chunks == 1


def fast(name):
    """A cluster whose products cost operations only, and collectives bytes only."""
    cluster = Cluster.parse(name)
    chip = dataclasses.replace(cluster.chip, launch=0.0, memory_rate=math.inf, memory=math.inf)
    links = tuple(dataclasses.replace(link, start=0.0, hop=0.0) for link in cluster.links)
    return dataclasses.replace(cluster, chip=chip, links=links)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_seconds_of_products(model, tensor, again):
    """Six operations a weight and token, as many as 6 T D for causal scores; then once more."""
    sizes = {"data": 16, "tensor": tensor} if tensor > 1 else {"host": 4, "data": 16}
    cluster = fast("v5e:8x8" if tensor > 1 else "v5e:4*4x4")
    step = step_of(cluster, sizes, model=model, again=again)
    T, D = step.job.tokens, model.width
    weights = model.layer + T * D
    each = 6 * (L * weights + model.vocab * D)
    if again:
        each += L * (2 * weights - 2 * model.hidden * D)
    want = M * step.rows * each / tensor / (cluster.chip.flops * cluster.chip.reached)
    for choice in (Choice(), Choice(apart=True, waits=NOTHING, order="way")):
        tasks = build(step, choice)
        assert sum(t.seconds for t in tasks if not t.site) == pytest.approx(want, rel=1e-9)
    result = schedule.simulated(step, Choice())
    assert result.computing == pytest.approx(want, rel=1e-9)  # without what it only waits for
    assert result.seconds == pytest.approx(result.computing + result.exposed, rel=1e-9)


@pytest.mark.parametrize("name", ["data", "zero 2", "zero 3 across", "tensor", "1f1b"])
def test_no_choice_sends_less(name):
    """Where only bytes cost, order, chunks, buckets and rings change nothing: no byte is lost."""
    step = JOBS[name]()
    step = Step(step.job, Placement(fast(step.where.cluster.name), step.where.sizes))

    def sent(choice):
        out: dict[tuple, float] = collections.defaultdict(float)
        for task in build(step, choice):
            if task.site:
                links = tuple(r for r in task.resources if r)
                out[task.stage, task.site, links] += task.seconds
        return out

    plain = sent(Choice(bucket=L))
    for choice in structures(step):
        bare = dataclasses.replace(choice, **dict.fromkeys(KINDS))
        want = {k: v * (M if k[1] == "scatter" and bare.when == "each" else 1)
                for k, v in plain.items()}  # fmt: skip
        assert sent(bare) == pytest.approx(want, rel=1e-6)


def structures(step):
    """The planner's candidates, each once: orders are priorities, not dependencies."""
    every = schedule._candidates(step, DIMENSIONS, TIERS)
    return [choice for choice in every if choice.order == "program"]


def ancestors(tasks):
    """By task, a set of bits: all that must have ended before it starts."""
    out: list[int] = []
    for task in tasks:
        mine = 0
        for earlier in task.after:
            mine |= out[earlier] | 1 << earlier
        out.append(mine)
    return out


def bits(numbers):
    return sum(1 << number for number in numbers)


def test_gradients_are_whole_before_they_are_used(step):
    """Sums over micro-batches are ready before they are sent, and sent before the optimiser."""
    step = step.resized(min(step.layers, 2), M)
    for choice in structures(step):
        tasks = build(step, choice)
        assert all(earlier < i for i, task in enumerate(tasks) for earlier in task.after)
        before = ancestors(tasks)
        products, sent = collections.defaultdict(list), collections.defaultdict(list)
        for i, task in enumerate(tasks):
            phase, block, *rest = task.name.split()
            if phase != "update" and task.site in ("scatter", "reduce"):
                sent[task.stage, block].append(i)
            elif rest[-1:] == ["dW"]:
                products[task.stage, block].append(i)
        for i, task in enumerate(tasks):
            phase, block, *rest = task.name.split()
            needed = 0
            if phase == "update":
                of = task.stage, rest[0]
                needed = bits(products[of]) | bits(sent[of])
            elif task.site == "reduce" or (task.site == "scatter" and choice.when == "end"):
                needed = bits(products[task.stage, block])
            assert before[i] & needed == needed, f"{choice}: {task.name} is too early"


def test_gradients_of_weights_lag_by_two_layers(step):
    """Or the activations that they need, the head's above all, would be kept for longer."""
    last = step.pipe - 1
    for choice in structures(step):
        tasks = build(step, choice)
        before = ancestors(tasks)
        heads = {task.name: i for i, task in enumerate(tasks) if task.name.endswith("head dW")}
        assert len(heads) == step.job.micro_batches
        for i, task in enumerate(tasks):
            micro, block, *_ = task.name.split()
            third = block == f"L{step.layers - 2}" and task.name.endswith("dX")
            if task.stage == last and third:
                assert before[i] >> heads[f"{micro} head dW"] & 1, f"{choice}: {task.name}"


# ---------------------------------------------------------------------- its size


def test_tasks_grow_with_layers_and_micro_batches(step):
    """a + b layers + c micro-batches + d both: no square of either."""
    for choice in (Choice(), structures(step)[-1]):
        found = np.array(
            [[len(build(step.resized(x, y), choice)) for y in (4, 6, 8)] for x in (2, 4, 6)]
        )
        assert not np.diff(found, 2, axis=0).any()
        assert not np.diff(found, 2, axis=1).any()


def test_stages_that_lie_apart_on_a_torus_share_wires():
    """Beside each other, and eight devices apart, where every wire carries eight messages."""
    cluster = Cluster.parse("v5e:16x16")
    near = cost.send(2**20, "pipe", Placement(cluster, {"data": 64, "pipe": 4}))
    far = cost.send(2**20, "pipe", Placement(cluster, {"data": 16, "pipe": 2, "tensor": 8}))
    start = cluster.links[0].start
    assert far.seconds - start == pytest.approx(8 * (near.seconds - start))


@pytest.mark.parametrize(("gpus", "published"), [(4, 212e-6), (8, 436e-6)])
def test_the_planners_ring_against_the_published_kernel(gpus, published):
    """The in-kernel collective matmul on H100: 1024 rows a GPU, 4096 x 4096, 43 us a shard.

    Nothing is fitted to these rows: starts, hops and rates are those of `h100`.
    """
    model = Model("one product", 1, 4096, 4096, 32, 32, 32000, False)
    job = Job(model, 1024 * gpus, 1, 1, (), 0, "1f1b", False, True)
    step = Step(job, Placement(Cluster.parse(f"h100:1x{gpus}"), {"tensor": gpus}))
    builder = graph._Builder(step, Choice(column=Overlap("ring"), waits=frozenset()))
    builder.chip = dataclasses.replace(builder.chip, waves=None, split={"tokens": {gpus: 1.0}})
    shape = (1024 * gpus, 4096)
    builder._pair(0, "product", "column", "all_gather", 43e-6 * gpus, shape, ())
    assert simulate(builder.tasks).seconds == pytest.approx(published, rel=0.2)
