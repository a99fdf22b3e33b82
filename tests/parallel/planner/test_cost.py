"""Bytes, order, result of every composition against messages in numpy; seconds in closed form."""

import dataclasses
import functools
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.partition import Collective, Composition, compositions, flat, legal
from parallel.plan import AXES
from parallel.planner import cost
from parallel.planner.chips import GPUS
from parallel.planner.cluster import Cluster, Placement
from tests.common import numpy_collectives

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
WORD = 4  # bytes of an entry
# Meshes with axes inside a node, across nodes, and two of either.
SMALL = [
    ("h100:1x2", {"tensor": 2}),
    ("h100:1x3", {"data": 1, "fsdp": 3}),
    ("h100:6x1", {"host": 6}),
    ("a100:2x3", {"host": 2, "fsdp": 3}),
    ("a100:3x2", {"data": 3, "tensor": 2}),
    ("v5e:2*2x2", {"host": 2, "fsdp": 4}),
    ("a100:2x4", {"host": 2, "fsdp": 2, "tensor": 2}),
    ("a100:4x2", {"host": 2, "data": 2, "fsdp": 2}),
    ("v5e:2*2x3", {"host": 2, "data": 2, "tensor": 3}),
]
LARGE = [
    ("a100:4x8", {"host": 4, "fsdp": 8}),
    ("a100:4x6", {"host": 4, "data": 2, "fsdp": 3}),
    ("h100:8x8", {"host": 8, "fsdp": 8}),
    ("v5e:8x8", {"data": 8, "fsdp": 8}),
    ("v5e:4*4x4", {"host": 4, "data": 4, "fsdp": 4}),
    ("h100:8x8", {"host": 2, "data": 4, "fsdp": 2, "tensor": 4}),
]


@functools.cache
def every(kind, axes):
    """Compositions do not depend on sizes."""
    return tuple(compositions(kind, dict.fromkeys(axes, 2)))


def check(name, sizes, kind, axes, how, block):
    """Carries a composition out, blocks of `block` entries; all that differs is an error."""
    where = Placement(Cluster.parse(name), sizes)
    g, node = math.prod(sizes[axis] for axis in axes), where.cluster.below(1)
    entries = block if kind == "all_gather" else g * block
    shape = (where.cluster.size, entries)
    x = np.random.default_rng(entries).integers(-8, 8, shape).astype(np.float32)
    got, sent = numpy_collectives.carry_out(kind, axes, how, sizes, node, x)
    want = numpy_collectives.definition(kind, axes, sizes, x)
    text = f"{kind} over {axes} as {how} on {name} {sizes}"
    for mine, right in zip(got, want, strict=True):
        assert right is None or np.array_equal(mine, right), text
    if block % how.chunks:
        return
    wanted = Collective(kind, axes, g * block * WORD, "float32")
    levels = len(where.cluster.links)
    # Whole numbers: a share such as (g - 1) / g alone is rounded.
    predicted = np.round(cost.traffic(wanted, how, where), 6)
    assert predicted.tolist() == sent.sum(0).max(1)[:levels].tolist(), text
    for piece, counted in zip(cost.pieces(wanted, how, where), sent, strict=True):
        predicted = np.round(how.chunks * np.array(piece.nbytes), 6)
        assert predicted.tolist() == counted.max(1)[:levels].tolist(), f"{text}: {piece.op}"


def groups(sizes):
    """Yields groups over one to three axes in the mesh's order, and the whole in the opposite."""
    for count in range(1, min(len(sizes), 3) + 1):
        yield from itertools.combinations(sizes, count)
    if 1 < len(sizes) <= 3:
        yield tuple(reversed(sizes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "sizes"), SMALL, ids=str)
def test_every_composition(name, sizes, kind):
    for axes in groups(sizes):
        for i, how in enumerate(every(kind, axes)):
            chunks = 1 + i % 3
            check(name, sizes, kind, axes, Composition(how.ops, chunks), chunks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "sizes"), LARGE, ids=str)
def test_every_composition_on_large_meshes(name, sizes, kind):
    for axes in groups(sizes):
        if math.prod(sizes[axis] for axis in axes) <= 64:
            for i, how in enumerate(every(kind, axes)):
                check(name, sizes, kind, axes, Composition(how.ops, 1 + i % 2), 2)


@st.composite
def cases(draw):
    """A mesh of up to 64 devices, a group over some of its axes in any order, a composition."""
    inner = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (6,), (2, 3), (8,), (4, 2)]))
    outer = draw(st.sampled_from([(), (2,), (3,), (4,), (2, 2), (6,), (3, 2), (8,), (2, 4)]))
    nodes, node = math.prod(outer), math.prod(inner)
    used = sorted(draw(st.permutations(range(len(AXES))))[: len(inner + outer)])
    sizes = {AXES[i]: size for i, size in zip(used, outer + inner, strict=True)}
    network = draw(st.sampled_from(["h100:{m}x{n}", "v5e:{m}*1x{n}"]))
    kind = draw(st.sampled_from(KINDS))
    axes = tuple(draw(st.permutations(list(sizes)))[: draw(st.integers(1, min(len(sizes), 3)))])
    how = draw(st.sampled_from(every(kind, axes)))
    ops = how.ops
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        # Numbered blocks may be joined, summed and exchanged over axes in any order.
        ops = tuple(
            dataclasses.replace(op, axes=tuple(draw(st.permutations(op.axes)))) for op in ops
        )
    how = Composition(ops, draw(st.integers(1, 4)))
    block = draw(st.sampled_from([how.chunks, 2 * how.chunks, 5]))
    return network.format(m=nodes, n=node), sizes, kind, axes, how, block


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_compositions_of_many_meshes(case):
    _, _, kind, axes, how, _ = case
    assert legal(kind, axes, how)
    check(*case)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(cases())
def test_compositions_of_many_more_meshes(case):
    check(*case)


def test_neighbours_pass_an_array_on():
    """All devices of a node send at once where the neighbour is in another."""
    where = Placement(Cluster.parse("a100:4x8"), {"host": 2, "data": 2, "fsdp": 2, "tensor": 4})
    for axis, size in where.sizes.items():
        machine = numpy_collectives.Machine(where.sizes, 8, (axis,), 1)
        for members in machine.groups((axis,)):
            for i in range(size):
                machine.send(members[i - 1], members[i], {(0, 0): np.zeros(3, np.float32)})
        assert cost.send(12, axis, where).nbytes == tuple(machine.sent[0].max(1))


def costless(name):
    """A cluster whose collectives cost their bytes only."""
    cluster = Cluster.parse(name)
    links = tuple(dataclasses.replace(link, start=0.0, hop=0.0) for link in cluster.links)
    return dataclasses.replace(cluster, links=links)


def took(kind, text, where, nbytes=2**28):
    how = Composition.parse(text)
    axes = tuple(axis for axis in AXES if any(axis in op.axes for op in how.ops))
    return cost.seconds(Collective(kind, axes, nbytes, "float32"), how, where)


# V bytes, m nodes of n devices, W1 and W2 B/s out of a device inside and out of the node.
TWO_LEVELS = {
    "all_gather(host) all_gather(fsdp)": lambda V, m, n, W1, W2: (
        V / n * (m - 1) / m / W2 + V * (n - 1) / n / W1
    ),
    "reduce_scatter(fsdp) reduce_scatter(host)": lambda V, m, n, W1, W2: (
        V / n * (m - 1) / m / W2 + V * (n - 1) / n / W1
    ),
    "reduce_scatter(fsdp) all_reduce(host) all_gather(fsdp)": lambda V, m, n, W1, W2: (
        2 * V * (n - 1) / n / W1 + 2 * V / n * (m - 1) / m / W2
    ),
    "all_to_all(fsdp) all_to_all(host)": lambda V, m, n, W1, W2: (
        V * (n - 1) / n / W1 + V * (m - 1) / m / W2
    ),
    "broadcast(host) broadcast(fsdp)": lambda V, m, n, W1, W2: V / W2 + V / W1,
    # A ring through all devices: node by node, so that one of n sends outside.
    "all_gather(host,fsdp)": lambda V, m, n, W1, W2: (
        V * (m * n - 1) / (m * n) * max(1 / W1, 1 / (n * W2))
    ),
}
KIND_OF: dict[str, Any] = {text: text.partition("(")[0] for text in TWO_LEVELS}
KIND_OF["reduce_scatter(fsdp) all_reduce(host) all_gather(fsdp)"] = "all_reduce"


@pytest.mark.parametrize("text", TWO_LEVELS)
@pytest.mark.parametrize(("m", "n"), [(2, 8), (4, 8), (3, 6)])
def test_two_levels(text, m, n):
    where = Placement(costless(f"a100:{m}x{n}"), {"host": m, "fsdp": n})
    inner, outer = (link.rate * link.reached for link in where.cluster.links)
    want = TWO_LEVELS[text](2**28, m, n, inner, outer / n)
    assert took(KIND_OF[text], text, where) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("text", [text for text in TWO_LEVELS if text.count("(") == 2])
def test_chunks_overlap_on_two_levels(text, chunks):
    """max(T1, T2) + min(T1, T2) / k."""
    where = Placement(costless("h100:4x8"), {"host": 4, "fsdp": 8})
    wanted = Collective(KIND_OF[text], ("host", "fsdp"), 2**28, "float32")
    one, other = (p.seconds for p in cost.pieces(wanted, Composition.parse(text), where))
    want = max(one, other) + min(one, other) / chunks
    got = cost.seconds(wanted, Composition(Composition.parse(text).ops, chunks), where)
    assert got == pytest.approx(want, rel=1e-9)


def test_chunks_share_a_link_in_three_stages():
    """Never less than a link is busy, never more than one after the other; more chunks, less."""
    where = Placement(costless("a100:4x8"), {"host": 4, "fsdp": 8})
    text = "reduce_scatter(fsdp) all_reduce(host) all_gather(fsdp)"
    scatter, total, gather = (
        piece.seconds
        for piece in cost.pieces(
            Collective("all_reduce", ("host", "fsdp"), 2**28, "float32"),
            Composition.parse(text),
            where,
        )
    )
    found = [took("all_reduce", f"{text} /{k}", where) for k in (1, 2, 4, 64)]
    assert found[0] == pytest.approx(scatter + total + gather)
    assert sorted(found, reverse=True) == found
    least = max(scatter + gather, total)
    assert least <= found[-1] <= least * 1.05


@pytest.mark.parametrize(
    ("axes", "wires"), [(("fsdp",), 2), (("data",), 2), (("data", "fsdp"), 4)], ids=str
)
def test_torus_without_wrap_around_takes_twice_as_long(axes, wires):
    closed = costless("v5e:16x16")
    link = closed.links[0]
    assert link.wraps == (True, True)
    open_link = dataclasses.replace(link, wraps=(False, False))
    sizes = {"data": 16, "fsdp": 16}
    g = 16 ** len(axes)
    wanted = Collective("all_gather", axes, 2**28, "float32")
    how = flat("all_gather", axes)
    ring = cost.seconds(wanted, how, Placement(closed, sizes))
    line = cost.seconds(
        wanted, how, Placement(dataclasses.replace(closed, links=(open_link,)), sizes)
    )
    assert ring == pytest.approx(2**28 * (g - 1) / g / (wires * link.rate * link.reached))
    assert line == pytest.approx(2 * ring)


def on_torus(slices, torus, wraps, sizes):
    """A mesh on tori whose network and starts cost nothing; B/s of a wire."""
    cluster = costless(f"v5e:{slices}*{torus[0]}x{torus[1]}")
    link, *network = cluster.links
    network = [dataclasses.replace(each, rate=1e30) for each in network]
    links = (dataclasses.replace(link, wraps=(wraps, wraps)), *network)
    where = Placement(dataclasses.replace(cluster, links=links), sizes)
    return where, link.rate * link.reached


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("torus", [(1, 16), (4, 4), (8, 8), (4, 8)], ids=str)
def test_exchange_on_a_torus(torus, slices, wraps):
    """The busiest wire tells how long; the model counts in quarters of a ring."""
    sizes = {"host": slices, "data": torus[0], "fsdp": torus[1]}
    where, rate = on_torus(slices, torus, wraps, sizes)
    one, g = math.prod(torus), where.cluster.size
    messages = numpy_collectives.everyone([range(one)])
    load = numpy_collectives.wire_load(torus, (wraps, wraps), messages)
    got = took("all_to_all", "all_to_all(host,data,fsdp)", where)
    assert got == pytest.approx(load * 2**28 / g / rate, rel=0.3)


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize(
    ("torus", "sizes", "axis"),
    [
        ((1, 16), {"fsdp": 16}, "fsdp"),
        ((1, 16), {"fsdp": 4, "tensor": 4}, "tensor"),
        ((4, 8), {"data": 4, "fsdp": 8}, "data"),
        ((1, 16), {"fsdp": 4, "tensor": 4}, "fsdp"),
        ((8, 4), {"data": 4, "fsdp": 8}, "data"),
    ],
    ids=str,
)
def test_rings_on_a_torus(torus, sizes, axis, wraps):
    """Groups whose members lie apart share the wires between them."""
    where, rate = on_torus(1, torus, wraps, sizes)
    groups = numpy_collectives.Machine(sizes, where.cluster.size, (axis,), 1).groups((axis,))
    load = numpy_collectives.wire_load(torus, (wraps, wraps), numpy_collectives.neighbours(groups))
    got = took("all_gather", f"all_gather({axis})", where)
    assert got == pytest.approx(load * 2**28 * (1 - 1 / sizes[axis]) / rate, rel=1e-9)


def test_tiny_messages_cost_their_rounds():
    cluster = Cluster.parse("h100:4x8")
    inner, outer = cluster.links
    where = Placement(cluster, {"host": 4, "fsdp": 8})
    tiny = functools.partial(took, where=where, nbytes=32)
    gather = inner.start + 7 * inner.hop
    assert tiny("all_gather", "all_gather(fsdp)") == pytest.approx(gather, rel=1e-3)
    assert tiny("all_reduce", "all_reduce(fsdp)") == pytest.approx(gather + 7 * inner.hop, rel=1e-3)
    # A ring through all nodes leaves each of them once.
    whole = outer.start + 28 * inner.hop + 3 * outer.hop
    assert tiny("all_gather", "all_gather(host,fsdp)") == pytest.approx(whole, rel=1e-3)
    levels = gather + outer.start + 3 * outer.hop
    assert tiny("all_gather", "all_gather(host) all_gather(fsdp)") == pytest.approx(levels, 1e-3)
    # Chunks on one link start one after the other.
    assert tiny("all_gather", "all_gather(fsdp) /8") == pytest.approx(8 * gather, rel=1e-3)


def test_a_group_of_one_costs_nothing():
    where = Placement(Cluster.parse("h100:1x8"), {"data": 1, "fsdp": 8})
    assert took("all_reduce", "all_reduce(data)", where) == 0


def test_rounds_of_a_torus_go_both_ways():
    """Half of a closed ring each way; an open one from end to end."""
    for name, rounds in [("v5e:16x16", 8), ("v5e:8x8", 7)]:
        cluster = Cluster.parse(name)
        side, link = math.isqrt(cluster.size), cluster.links[0]
        where = Placement(cluster, {"data": side, "fsdp": side})
        found = took("all_gather", "all_gather(fsdp)", where, 32)
        assert found == pytest.approx(link.start + rounds * link.hop, rel=1e-3)


@pytest.mark.parametrize(("gpus", "table"), [(4, 290e-6), (8, 565e-6)])
def test_published_collective_matmul(gpus, table):
    """NCCL and cuBLAS, JAX's Mosaic GPU docs: 1024 rows a GPU, K = N = 4096, float16, H100."""
    local = 43e-6
    where = Placement(Cluster.parse(f"h100:1x{gpus}"), {"tensor": gpus})
    gather = took("all_gather", "all_gather(tensor)", where, gpus * 1024 * 4096 * 2)
    assert gpus * local + gather == pytest.approx(table, rel=0.2)
    chip = GPUS["h100"][0]
    assert 2 * 1024 * 4096**2 / (chip.flops * chip.reached) == pytest.approx(local, rel=0.05)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a10:4x8", "chip 'a10' is unknown, choose of a100"),
        ("", "chip '' is unknown"),
        ("h100:8", "write h100:NODESxGPUS"),
        ("h100", "write h100:NODESxGPUS"),
        ("v5e:4x4x4", "torus of 2 dimensions, write v5e:4x4"),
        ("v5p:4x4", "torus of 3 dimensions, write v5p:4x4x4"),
        ("v5e:", "torus of 2 dimensions"),
        ("h100:4x0", "no size can be 0"),
        ("h100:0x8", "no size can be 0"),
        ("v5e:4x0", "no size can be 0"),
        ("v5e:0*4x4", "no size can be 0"),
    ],
)
def test_bad_clusters(text, words):
    with pytest.raises(ValueError, match=words):
        Cluster.parse(text)


@pytest.mark.parametrize("name", ["a100:4x8", "v5e:2*4x16", "v5p:4x4x8"])
def test_saved_and_loaded(tmp_path, name):
    cluster, path = Cluster.parse(name), tmp_path / "cluster.json"
    cluster.save(path)
    assert Cluster.parse(str(path)) == cluster


def test_broken_files(tmp_path):
    path = tmp_path / "cluster.json"
    with pytest.raises(ValueError, match=r"cluster\.json is no cluster .*calibrate one anew"):
        Cluster.parse(str(path))
    Cluster.parse("h100:2x8").save(path)
    whole = json.loads(path.read_text())
    less = {**whole, "links": [{**whole["links"][0]}]}
    del less["links"][0]["rate"]
    for text in [
        "{",
        "[]",
        json.dumps({**whole, "chip": {}}),
        json.dumps({**whole, "chip": {**whole["chip"], "split": 1}}),
        json.dumps(less),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=r"cluster\.json is no cluster .*calibrate one anew"):
            Cluster.parse(str(path))


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("a100:4x8", {"host": 4, "fsdp": 4}, "has 16 devices, a100:4x8 has 32: change one"),
        ("a100:4x8", {"fsdp": 32}, "fsdp=32, neighbours 1 devices apart, crosses the border"),
        ("a100:4x6", {"data": 6, "tensor": 4}, "data=6, neighbours 4 devices apart, crosses"),
        ("a100:4x8", {"hosts": 4, "fsdp": 8}, r"Mesh axes \['hosts'\]: choose of"),
    ],
)
def test_bad_placements(name, sizes, words):
    with pytest.raises(ValueError, match=words):
        Placement(Cluster.parse(name), sizes)
