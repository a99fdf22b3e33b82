"""The planner: its bound, its fallback, its memory, what training can run of it, ablations."""

import dataclasses
import time

import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.stages import llama_stages, split
from parallel.overlap import PLAIN
from parallel.plan import KINDS, Plan
from parallel.planner import predict, schedule
from parallel.planner.choice import Choice
from parallel.planner.cluster import Placement
from parallel.planner.graph import build
from parallel.planner.schedule import (
    DIMENSIONS,
    TIERS,
    baselines,
    bound,
    executable,
    plan,
    searched,
)
from parallel.planner.simulate import simulate
from parallel.planner.workload import USABLE, Model, Step
from parallel.stages import Params
from parallel.train import init_state, make_train_step
from tests.common import toys
from tests.parallel.planner.test_step_graph import BOTH, FSDP, GPT, JOBS, LLAMA, NOTHING, step_of
from tests.parallel.test_mesh_training import MODEL, V, mesh_of, toy
from tests.parallel.test_train_step import assert_close, batch


@pytest.fixture(params=JOBS)
def step(request):
    return JOBS[request.param]()


def check_plan(step):
    """Never slower than what needs no planner; never below the bound."""
    best = plan(step)
    assert set(best.baselines) == {"blocking", "buckets", "prefetch"}
    least = min(result.seconds for result in best.baselines.values())
    assert best.result.seconds <= least
    for result in (best.result, *best.baselines.values()):
        assert best.bound <= result.seconds * (1 + 1e-9)
        assert result.exposed <= result.seconds * (1 + 1e-9)
    assert best.bound == bound(step) > 0
    assert 0 <= best.share <= 1 + 1e-9
    if best.name != "plan":
        assert best.choice == baselines(step)[best.name]
        assert best.result == best.baselines[best.name]
    return best


def test_never_slower_than_the_strongest_baseline(step):
    check_plan(step)


@pytest.mark.parametrize("name", ["data", "zero 3", "1f1b"])
def test_no_candidate_is_below_the_bound(name):
    step = JOBS[name]()
    least, beside = bound(step), step.where.cluster.chip.beside
    every = list(schedule._candidates(step, DIMENSIONS, TIERS))
    assert len(every) >= 3
    for choice in [*every, *baselines(step).values()]:
        assert simulate(build(step, choice), beside).seconds >= least * (1 - 1e-9)


@st.composite
def steps(draw):
    """Models, clusters, meshes and hybrids that divide and fit."""
    cluster = draw(st.sampled_from(["a100:4x8", "a100-25g:4x8", "h100:2x8", "v5e:4x4"]))
    one, inner = {"h100:2x8": (2, 8), "v5e:4x4": (4, 4)}.get(cluster, (4, 8))
    tensor = draw(st.sampled_from([1, 1, 2, 4]))
    outer, middle = draw(
        st.sampled_from([("host", "data"), ("host", "fsdp"), ("data", "fsdp"), ("data", "pipe")])
    )
    sizes = {outer: one, middle: inner // tensor}
    if tensor > 1:
        sizes["tensor"] = tensor
    batch_axes = [axis for axis in ("host", "data", "fsdp") if axis in sizes]
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    shard = draw(st.sampled_from([(batch_axes[-1],), tuple(batch_axes)])) if zero else ()
    return step_of(
        cluster,
        sizes,
        model=dataclasses.replace(draw(st.sampled_from([GPT, LLAMA])), layers=8),
        tokens=draw(st.sampled_from([512, 2048])),
        micro_batches=draw(st.sampled_from([1, 2, 4, 6])),
        zero=zero,
        shard=shard,
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        again=draw(st.booleans()),
        clips=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(steps())
def test_never_slower_than_the_strongest_baseline_of_many(step):
    if step.fits(Choice(when="each" if step.job.zero >= 2 else "end")):
        check_plan(step)


LONG = {
    "data": ("a100:4x8", {"host": 4, "data": 8}, 12, 14, {}),
    "zero 3": ("a100-25g:4x8", {"host": 4, "fsdp": 8}, 12, 12, {"shard": FSDP, "zero": 3}),
    "tensor": ("a100:4x8", {"data": 4, "tensor": 8}, 10, 12, {}),
    "1f1b": ("h100:1x8", {"data": 2, "pipe": 2, "tensor": 2}, 18, 16, {}),
    "gpipe": ("a100:4x8", {"host": 4, "data": 2, "pipe": 4}, 32, 24, {"schedule": "gpipe"}),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "data" else pytest.param(name, marks=pytest.mark.slow) for name in LONG],
)
def test_long_steps_are_extended(name, monkeypatch):
    """Four short steps say of a long one what its own simulation says."""
    cluster, sizes, layers, micro, how = LONG[name]
    model = dataclasses.replace(GPT, layers=layers)
    step = step_of(cluster, sizes, model=model, micro_batches=micro, **how)
    choices = {**baselines(step), "plan": searched(step)[0]}
    found = {}
    for whole in (0, 10**9):
        monkeypatch.setattr(predict, "WHOLE", whole)
        found[whole] = {name: predict.simulated(step, each) for name, each in choices.items()}
    for name in choices:
        short, long = found[0][name], found[10**9][name]
        assert short.seconds == pytest.approx(long.seconds, rel=0.015), name
        assert short.computing == pytest.approx(long.computing, rel=0.015), name
        assert short.exposed == pytest.approx(long.exposed, abs=0.015 * long.seconds), name


# ---------------------------------------------------------------------- memory


def roomy(step, choice, more=1.0):
    """The same step with just so much memory a device as a choice needs."""
    cluster, nbytes = step.where.cluster, sum(step.memory(choice).values())
    chip = dataclasses.replace(cluster.chip, memory=nbytes * more / USABLE)
    where = Placement(dataclasses.replace(cluster, chip=chip), step.where.sizes)
    return Step(step.job, where)


def test_what_does_not_fit_is_refused():
    model = dataclasses.replace(LLAMA, layers=64)
    step = step_of("a100:4x8", {"host": 4, "data": 8}, model=model)
    words = r"llama on a100:4x8 .* needs \d+ GB of 77 a device, \d+ of it state: use more devices"
    with pytest.raises(ValueError, match=words):
        plan(step)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_weights_are_gathered_ahead_while_there_is_room(ahead):
    step = JOBS["zero 3 across"]()
    small = roomy(step, Choice(ahead=ahead, when="each"), 1 + 1e-9)
    every = list(schedule._candidates(small, DIMENSIONS, TIERS))
    assert max(choice.ahead for choice in every) == ahead
    assert baselines(small)["prefetch"].ahead == min(ahead, 1)
    with pytest.raises(ValueError, match="use more devices"):
        plan(roomy(step, Choice(when="each"), 1 - 1e-9))


def test_passes_interleave_while_there_is_room():
    step = JOBS["tensor"]()
    for strands, allowed in ((True, {False, True}), (False, {False})):
        small = roomy(step, Choice(strands=strands), 1 + 1e-9)
        every = schedule._candidates(small, DIMENSIONS, TIERS)
        assert {choice.strands for choice in every} == allowed


@pytest.mark.parametrize("zero", [2, 3])
def test_whole_gradients_are_kept_only_where_they_fit(zero):
    """Sent over their shards at the end, all micro-batches' gradients are whole until then."""
    step = step_of("h100:2x8", {"host": 2, "fsdp": 8}, shard=BOTH, zero=zero)
    small = roomy(step, Choice(when="each"), 1.01)
    assert 4 * 4 * step.layer_weights > 0.01 * small.where.cluster.chip.memory
    choices = [*schedule._candidates(small, DIMENSIONS, TIERS), *baselines(small).values()]
    assert {choice.when for choice in choices} == {"each"}


def waiting(step, choice):
    """Most layers whose gradients, computed or begun, wait for their scatter at one time."""
    tasks = build(step, choice)
    timeline = simulate(tasks, step.where.cluster.chip.beside)
    events = []
    for task, start, end in zip(tasks, timeline.start, timeline.end, strict=True):
        # Names begin with the micro-batch and the layer; buckets are sent with their last layer.
        where = task.name.split()
        if where[0][0] == "B" and where[1][0] == "L":
            layer = int(where[1][1:])
            if where[-1] == "dW" and where[-2] == "out":
                events.append((start, 1))
            elif task.site == "scatter":
                count = min(choice.bucket, step.layers - layer)
                events.append((end, -count))
    most = alive = 0
    for _, change in sorted(events):
        alive += change
        most = max(most, alive)
    assert alive == 0
    return most


@pytest.mark.parametrize("bucket", [1, 2])
def test_gradients_that_wait_for_their_link_are_counted(bucket):
    """A slow link does not pile up gradients: two buckets, as `memory` says."""
    model = dataclasses.replace(GPT, layers=12)
    step = step_of(
        "a100-25g:4x8", {"host": 4, "fsdp": 8}, model=model, shard=BOTH, zero=3, micro_batches=2
    )
    for apart in (False, True):
        choice = Choice(when="each", bucket=bucket, apart=apart, waits=NOTHING)
        assert bucket <= waiting(step, choice) <= 2 * bucket


# ---------------------------------------------------------------------- what training runs


def test_executable_plans(step):
    """What the planner found is a plan of this mesh, site by site, wherever its shards lie."""
    choice, _ = searched(step)
    made, sizes = executable(choice, step), step.where.sizes
    made.check(sizes, scan=made.prefetch)
    assert Plan.from_json(made.to_json()) == made
    assert (made.column, made.row) == (choice.column, choice.row)
    assert made.sharded(sizes) == step.job.shard
    for site in KINDS:
        how = getattr(made, site)
        assert how == getattr(choice, site)
        # Chosen wherever the mesh has something to send.
        assert (how is not None) == bool(made.axes(site, sizes)), site
    assert made.zero == (step.job.zero or 3)
    assert made.prefetch == (step.job.zero == 3 and choice.ahead > 0)
    # Training's "each" is of the replicas; what the planner sends each time goes over shards.
    assert made.when == "end"


def test_two_stages_of_zero_2_cannot_be_run():
    sizes = {"host": 2, "data": 4, "pipe": 2}
    step = step_of("h100:2x8", sizes, shard=("data",), zero=2)
    with pytest.raises(ValueError, match="zero = 2 in a pipeline"):
        executable(Choice(), step)


def test_whole_weights_on_a_mesh_of_shards_cannot_be_run():
    with pytest.raises(ValueError, match="fsdp"):
        executable(Choice(), step_of("a100:4x8", {"host": 4, "fsdp": 8}))


MESHES = [
    ("a100-25g:2x2", {"host": 2, "fsdp": 2}, {"shard": FSDP, "zero": 3}),
    ("a100-25g:2x2", {"host": 2, "data": 2}, {}),
    ("a100-25g:2x2", {"host": 2, "fsdp": 2}, {"shard": BOTH, "zero": 3}),
    ("h100:2x2", {"host": 2, "data": 2}, {"shard": ("host", "data"), "zero": 1}),
    ("h100:1x4", {"pipe": 2, "tensor": 2}, {}),
    ("h100:1x4", {"data": 2, "tensor": 2}, {}),
]


def check_run(mesh, stages, params, data):
    """A plan does not depend on sizes: that of a large model runs a small one."""
    cluster, sizes, how = mesh
    step, optimizer = step_of(cluster, sizes, micro_batches=2, model=LLAMA, **how), optax.sgd(1.0)
    made = executable(searched(step)[0], step)
    plain, _ = make_train_step(stages, optimizer)(init_state(params, optimizer), data)
    take = make_train_step(
        stages, optimizer, mesh_of(sizes), made, accumulate=2, scan=made.prefetch
    )
    state, _ = take(init_state(params, optimizer, mesh_of(sizes), made), data)
    assert_close(state.params, plain.params, 1e-5)


@pytest.mark.parametrize("mesh", MESHES[:4], ids=str)
def test_a_planned_step_is_the_plain_one(mesh):
    """A model of one weight, whose gradient is the mean of d w, 8 different d."""
    stages = toy(lambda outer, data: data["d_B"][:, None] * outer["w_D"][None] ** 2)
    data = {"d_B": jnp.arange(8.0), "weight_B": jnp.ones(8)}
    params = Params({"w_D": jnp.arange(4.0)}, {"none_L": jnp.zeros(2)})
    check_run(mesh, stages, params, data)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_planned_step_of_a_model_is_the_plain_one(mesh):
    model = toys.tiny(**MODEL)
    check_run(mesh, llama_stages(model.config), split(model), batch(0, vocab=V))


# ---------------------------------------------------------------------- ablations


REST = ("data", "zero 1", "zero 3 across", "fsdp x tensor", "1f1b")


def sites_of(choice):
    return [how for site in KINDS if (how := getattr(choice, site)) is not None]


@pytest.mark.parametrize(
    "name", ["zero 3", "tensor", *(pytest.param(n, marks=pytest.mark.slow) for n in REST)]
)
def test_ablations(name):
    """What is left out is not used, and leaving it out does not help."""
    step = JOBS[name]()
    _, best = searched(step)
    for gone in sorted(DIMENSIONS):
        choice, result = searched(step, dimensions=DIMENSIONS - {gone})
        overlaps = {choice.column.kind, choice.row.kind}
        for site, kind in KINDS.items():
            how, wanted = getattr(choice, site), step.wanted(site)
            assert (how is None) == (wanted is None)
            if wanted is None:
                continue
            axes = wanted.axes
            if gone == "workload":
                assert how.chunks == 1
                assert overlaps <= {"plain", "ring"}
            elif gone == "group":
                assert {op.axes for op in how.ops} <= {axes, axes[::-1]}
            else:
                assert {op.primitive for op in how.ops} == {kind}
                assert "ring" not in overlaps
    for gone in sorted(TIERS):
        choice, result = searched(step, tiers=TIERS - {gone})
        assert result.seconds >= best.seconds * 0.98
        if gone == "operation":
            assert all(len(how.ops) == how.chunks == 1 for how in sites_of(choice))
            assert choice.column == choice.row == PLAIN
        elif gone == "layer":
            assert (choice.ahead, choice.apart, choice.order) == (0, False, "program")
            assert choice.waits >= {"reduce", "scatter"}
        else:
            assert (choice.strands, choice.deferred) == (False, False)
    none, _ = searched(step, NOTHING, NOTHING)
    assert none.waits == {"reduce", "scatter"}


# ---------------------------------------------------------------------- time


@pytest.mark.slow
def test_a_large_model_is_planned_in_seconds():
    """Gate: GPT-3 175B on 1,024 devices in 10 s, on an idle core."""
    model = Model("GPT-3 175B", 96, 12288, 49152, 96, 96, 51200, False)
    sizes = {"data": 16, "pipe": 8, "tensor": 8}
    step = step_of("a100:128x8", sizes, model=model, micro_batches=64, sequences=1024,
                   shard=("data",), zero=1, again=True)  # fmt: skip
    before = time.process_time()
    best = check_plan(step)
    took = time.process_time() - before
    assert best.result.seconds < best.baselines["blocking"].seconds
    assert took < 10, f"{took:.1f} s"
