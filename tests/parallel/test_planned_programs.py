"""The compiled step holds exactly the collectives that its plan names: kinds and groups (HO-32)."""

import collections
import functools
import re

import jax
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from models.stages import llama_stages, split
from parallel.overlap import Overlap
from parallel.partition import Collective, Composition, Op
from parallel.plan import Plan
from parallel.planner.cluster import Cluster, Placement
from parallel.planner.cost import traffic
from parallel.train import init_state, make_train_step
from tests.common import toys
from tests.parallel.test_mesh_training import MODEL, V, mesh_of
from tests.parallel.test_train_step import batch

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def groups_of(sizes, axes):
    """Device numbers of the groups over some mesh axes."""
    names = [*sizes]
    grid = np.arange(int(np.prod([*sizes.values()]))).reshape(*sizes.values())
    inner = np.moveaxis(grid, [names.index(axis) for axis in axes], range(len(axes)))
    count = int(np.prod([sizes[axis] for axis in axes]))
    return frozenset(map(frozenset, inner.reshape(count, -1).T.tolist()))


def collectives_in(text):
    """Counts (kind, groups) of a compiled program's text."""
    found = collections.Counter()
    for line in text.splitlines():
        kind = re.search(rf"= \S.* ({'|'.join(KINDS)})(?:-start)?\(", line)
        if kind is None:
            continue
        plain = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
        iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
        if plain:
            rows = [list(map(int, row.split(","))) for row in re.findall(r"\{([\d,]+)\}", plain[1])]
        elif iota:
            shape, of, order = ([*map(int, (x or "0").split(","))] for x in iota.groups())
            grid = np.arange(np.prod(of)).reshape(of)
            rows = (grid.transpose(order) if iota[3] else grid).reshape(shape).tolist()
        else:
            rows = []
        found[kind[1], frozenset(map(frozenset, rows))] += 1
    return found


@pytest.fixture(scope="module")
def model():
    return toys.tiny(**MODEL, tied_embeddings=True)


def program(model, sizes, plan, **how):
    mesh, optimizer = mesh_of(sizes), optax.sgd(0.1)
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, **how)
    state = init_state(split(model), optimizer, mesh, plan)
    return step.lower(state, batch(0, vocab=V)), len(jax.tree.leaves(state.params))


def test_two_level_reduction_of_every_weight(model):
    """Chained by data dependencies, XLA:CPU can merge nothing: a composition for each weight."""
    sizes = {"host": 2, "data": 2}
    how = Composition.parse("reduce_scatter(data) all_reduce(host) all_gather(data)")
    lowered, weights = program(model, sizes, Plan(reduce=how, order="chained"))
    found = collectives_in(lowered.compile().as_text())
    assert found["reduce-scatter", groups_of(sizes, ["data"])] == weights
    assert found["all-gather", groups_of(sizes, ["data"])] == weights
    assert found["all-reduce", groups_of(sizes, ["host"])] == weights
    # Loss and weight of the step, over all four, in one or two.
    rest = found["all-reduce", groups_of(sizes, ["host", "data"])]
    assert 1 <= rest <= 2
    assert sum(found.values()) == 3 * weights + rest


def test_sharded_weights(model):
    """ZeRO-3: a gather of each weight forward and backward, a scatter of each gradient."""
    sizes = {"fsdp": 2}
    lowered, weights = program(model, sizes, Plan())
    text = lowered.as_text()  # before XLA merges equal gathers of what no checkpoint protects
    gathers = len(re.findall('"stablehlo.all_gather"', text))
    scatters = len(re.findall('"stablehlo.reduce_scatter"', text))
    blocks = MODEL["num_layers"]
    each = (weights - 2) * blocks  # leaves of blocks are stacked; two are outside of them
    assert gathers == 2 * each + 2
    assert scatters == each + 2
    bucket, _ = program(model, sizes, Plan(bucket="block"))
    text = bucket.as_text()
    assert len(re.findall('"stablehlo.all_gather"', text)) == 2 * blocks + 1
    assert len(re.findall('"stablehlo.reduce_scatter"', text)) == blocks + 1


def test_rings_and_chunks(model):
    """Compiled: a ring of weights is permutations only; products in chunks are collectives each."""
    ring = Composition.parse("ring_gather(fsdp)"), Composition.parse("ring_scatter(fsdp)")
    sizes = {"fsdp": 4}
    lowered, _ = program(model, sizes, Plan(gather=ring[0], scatter=ring[1], bucket="block"))
    found = collectives_in(lowered.compile().as_text())
    kinds = {kind for kind, _ in found}
    assert kinds <= {"collective-permute", "all-reduce"}
    permutes = sum(n for (kind, _), n in found.items() if kind == "collective-permute")
    blocks = MODEL["num_layers"]
    # Three steps around: outer weights and blocks forward, blocks again, all gradients back.
    assert permutes == 3 * (1 + blocks + blocks + 1 + blocks)
    sizes = {"tensor": 2}
    plain, cut = (
        collectives_in(program(model, sizes, plan)[0].compile().as_text())
        for plan in (Plan(), Plan(row=Overlap.parse("tokens/3")))
    )
    group = groups_of(sizes, ["tensor"])
    # A row product scatters in three parts; so does the gradient of a column product's input not.
    assert cut["reduce-scatter", group] - plain["reduce-scatter", group] == 2 * 2 * blocks
    assert cut["all-gather", group] - plain["all-gather", group] == 2 * 2 * blocks


def test_the_default_reduction_is_one_for_each_weight_when_lowered(model):
    """XLA:CPU then merges them into one, which can hide behind nothing."""
    lowered, weights = program(model, {"data": 4}, Plan())
    assert len(re.findall('"stablehlo.all_reduce"', lowered.as_text())) >= weights
    found = collectives_in(lowered.compile().as_text())
    assert sum(found.values()) < weights


def inputs_of(jaxpr, wanted):
    """Equations that lead to an equation, within its jaxpr."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    seen, todo = [], [wanted]
    while todo:
        eqn = todo.pop()
        seen.append(eqn)
        todo += [made[v] for v in eqn.invars if not hasattr(v, "val") and v in made]
    return seen


def gathers_in(jaxpr):
    """Every gather of weights, with the equations before it in its own jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_gather":
            yield inputs_of(jaxpr, eqn)
        for inner in jaxprs_in_params(eqn.params):
            yield from gathers_in(inner)


def loops(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from loops(inner)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"remat": True},
        {"scan": True},
        {"scan": True, "prefetch": True},
        {"scan": True, "prefetch": True, "shard": ("host", "fsdp")},
    ],
    ids=str,
)
def test_a_gather_of_weights_waits_for_no_product(model, how):
    """The next block's weights can be fetched while this one is computed, over both levels too."""
    how, optimizer = dict(how), optax.sgd(0.1)
    shard = how.pop("shard", ("fsdp",))
    mesh = mesh_of(dict.fromkeys(shard, 2))
    gather = Composition(tuple(Op("all_gather", (axis,)) for axis in shard))
    plan = Plan(gather=gather, shard=shard, prefetch=how.pop("prefetch", False))
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, **how)
    traced = step.trace(init_state(split(model), optimizer, mesh, plan), batch(0, vocab=V))
    found = list(gathers_in(traced.jaxpr.jaxpr))
    assert len(found) > 10
    if how.get("scan"):  # what a loop carries was gathered by the iteration before
        bodies = [eqn.params["jaxpr"].jaxpr for eqn in loops(traced.jaxpr.jaxpr)]
        carried = [body for body in bodies if any(v.aval.shape == (48, 6, 8) for v in body.outvars)]
        assert bool(carried) == plan.prefetch
    for before in found:
        assert not [eqn for eqn in before if eqn.primitive.name in ("dot_general", "scan")]


# ---------------------------------------------------------------------- shards over two levels

SLOW = pytest.mark.slow
LEVELS = {"host": 2, "fsdp": 2}
WAYS = {
    "flat": "all_gather(host,fsdp)",
    "outside first": "all_gather(host) all_gather(fsdp)",
    "inside first": "all_gather(fsdp) all_gather(host)",
}


def bytes_in(text, sizes, node):
    """Bytes out of a device to its node and out of a node, of a program's gathers and scatters.

    A ring through each group, node by node, as in `parallel.planner.cost`.
    """
    widths, sent = {"f32": 4, "bf16": 2}, np.zeros(2)
    for line in text.splitlines():
        kind = re.search(r"= (\w+)\[([\d,]*)\]\S* (all-gather|reduce-scatter)\(", line)
        if kind is None:
            assert not re.search(r"= \(.* (all-gather|reduce-scatter)\(", line), "merged"
            continue
        ((_, groups),) = collectives_in(line)
        members = len(next(iter(groups)))
        whole = widths[kind[1]] * np.prod([int(n) for n in kind[2].split(",")])
        whole *= members if kind[3] == "reduce-scatter" else 1
        each = whole * (members - 1) / members
        nodes = [{device // node for device in group} for group in groups]
        inside = any(len(at) < members for at in nodes)  # some neighbours share a node
        # Groups that leave a node leave it side by side.
        leaving = sum(1 for at in nodes if 0 in at and len(at) > 1)
        sent += [each * inside, each * leaving]
    return sent


@pytest.mark.parametrize(
    "way", [way if way == "outside first" else pytest.param(way, marks=SLOW) for way in WAYS]
)
def test_shards_over_two_levels(way):
    """Groups of each step, and bytes on each level, are those that the planner counts."""
    model = toys.tiny(vocab_size=V, num_layers=1)
    gather = Composition.parse(WAYS[way])
    plan = Plan(
        shard=("host", "fsdp"), gather=gather, scatter=gather.mirrored(), zero=1, order="chained"
    )
    lowered, weights = program(model, LEVELS, plan)
    text = lowered.compile().as_text()
    found = collectives_in(text)
    for kind, ops in (("all-gather", gather.ops), ("reduce-scatter", gather.mirrored().ops)):
        mine = [groups_of(LEVELS, op.axes) for op in ops]
        assert {groups for name, groups in found if name == kind} == set(mine)
        assert all(found[kind, groups] == weights for groups in mine)
    where = Placement(Cluster.parse("a100:2x2"), LEVELS)
    want = np.zeros(2)
    for leaf in jax.tree.leaves(split(model)):
        for kind, how in (("all_gather", gather), ("reduce_scatter", gather.mirrored())):
            wanted = Collective(kind, ("host", "fsdp"), leaf.nbytes, str(leaf.dtype))
            want += traffic(wanted, how, where)
    np.testing.assert_allclose(bytes_in(text, LEVELS, 2), want)
    if way != "flat":  # outside first: each byte leaves the node once, not with every device
        share = {"outside first": 1.0, "inside first": 2.0}[way]
        total = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(split(model)))
        assert want[1] == share * total / 2


# ---------------------------------------------------------------------- embedding, loss, sends

# A ring takes the place of one collective each way.
RING = {"all-gather": -1, "reduce-scatter": -1}
ALONE = {
    "table": ({"tensor": 2}, "ring_scatter(tensor)", {"collective-permute": 2, **RING}),
    "head": ({"tensor": 2}, "ring_gather(tensor) /2", {"collective-permute": 4, **RING}),
    "loss": (
        {"tensor": 2},
        "reduce_scatter(tensor) all_gather(tensor) /3",
        {"reduce-scatter": 6, "all-gather": 6},
    ),
    "send": ({"pipe": 2}, "send(pipe) /3", {"collective-permute": 4}),
}


@pytest.fixture(scope="module")
def kinds():
    """Counts the kinds of collectives of a small compiled step; each plan is compiled once."""
    model = toys.tiny(vocab_size=V)

    @functools.cache
    def of(axis, plan):
        scan = axis == "pipe"
        lowered, _ = program(model, {axis: 2}, plan, scan=scan)
        found: collections.Counter = collections.Counter()
        for (kind, _), count in collectives_in(lowered.compile().as_text()).items():
            found[kind] += count
        return found

    return of


@pytest.mark.parametrize(
    "sites",
    [
        ("table", "head", "loss"),
        ("send",),
        *(pytest.param((site,), marks=SLOW) for site in ("table", "head", "loss")),
    ],
    ids=str,
)
def test_sites_beside_the_blocks_are_read(kinds, sites):
    """Changed in the plan, and so in the compiled program, forward and backward."""
    ((axis, _),) = ALONE[sites[0]][0].items()
    plan = Plan(**{site: Composition.parse(ALONE[site][1]) for site in sites})
    assert Plan.from_json(plan.to_json()) == plan
    plain, found = kinds(axis, Plan()), kinds(axis, plan)
    more: collections.Counter = collections.Counter()
    for site in sites:
        more.update(ALONE[site][2])
    for kind in ("collective-permute", "all-gather", "reduce-scatter"):
        assert found[kind] - plain[kind] == more[kind], kind
