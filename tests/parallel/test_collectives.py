"""Compositions of every collective give what the plain one gives, forward and backward."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from parallel import collectives
from parallel.partition import Collective, Composition, Op, check, compositions, flat, legal
from tests.common import toys

# Groups of 2, 3, 4, 6 and 8; the outer axis first.
MESHES = [
    {"a": 2},
    {"a": 3},
    {"a": 4},
    {"a": 2, "b": 3},
    {"a": 4, "b": 2},
    {"a": 2, "b": 2, "c": 2},
]
CHUNKS = (1, 2, 3)


def mesh_of(sizes):
    count = int(np.prod([*sizes.values()]))
    devices = np.asarray(jax.devices()[:count]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def run(sizes, function, x, out):
    """Runs under shard_map; x [g, ...] gives each device x[i]."""
    axes = tuple(sizes)

    def local(x):
        return jax.tree.map(lambda y: y[None] if out else y, function(x[0]))

    specs = PartitionSpec(axes) if out else PartitionSpec()
    mapped = jax.shard_map(
        local, mesh=mesh_of(sizes), in_specs=PartitionSpec(axes), out_specs=specs
    )
    return jax.tree.map(np.asarray, toys.quick(mapped)(x))


def some(sizes, kind, most=12):
    """All compositions, or an even choice of many, with different numbers of chunks."""
    found = list(compositions(kind, sizes))
    found = found[:: -(-len(found) // most)]
    return [Composition(how.ops, CHUNKS[i % 3]) for i, how in enumerate(found)]


def data(sizes, *shape):
    g = int(np.prod([*sizes.values()]))
    return np.random.default_rng(g).integers(-8, 8, (g, *shape)).astype(np.float32)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_reduce(sizes):
    """Padded where the group does not divide 7 elements; replicas are equal by their type."""
    x, every = data(sizes, 7), some(sizes, "all_reduce")
    found = run(sizes, lambda x: [collectives.all_reduce(x, how) for how in every], x, out=False)
    for how, got in zip(every, found, strict=True):
        np.testing.assert_array_equal(got, x.sum(0), err_msg=str(how))


@pytest.mark.parametrize("sizes", MESHES[2:4], ids=str)
def test_gradient_of_an_all_reduce(sizes):
    """Every part moves the sum as much as the sum is asked to move."""
    x, every = data(sizes, 7), some(sizes, "all_reduce")
    weight = jnp.arange(7, dtype=jnp.float32)

    def back(x):
        pulled = [jax.vjp(lambda x, how=how: collectives.all_reduce(x, how), x)[1] for how in every]
        return [pull(weight)[0] for pull in pulled]

    for how, dx in zip(every, run(sizes, back, x, out=True), strict=True):
        np.testing.assert_array_equal(dx, np.tile(weight, (len(x), 1)), err_msg=str(how))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_gather_and_its_gradient(sizes):
    x, axes, every = data(sizes, 3, 5), tuple(sizes), some(sizes, "all_gather")
    g = len(x)
    weight = np.random.default_rng(1).integers(-4, 4, (3, 5 * g)).astype(np.float32)

    def both(x):
        out = []
        for how in every:
            y, back = jax.vjp(lambda x, how=how: collectives.all_gather(x, 1, axes, how), x)
            out.append((y, back(collectives.lax.pcast(jnp.asarray(weight), axes, to="varying"))[0]))
        return out

    want = np.concatenate([*x], axis=1)
    for how, (y, dx) in zip(every, run(sizes, both, x, out=True), strict=True):
        for device in range(g):
            np.testing.assert_array_equal(y[device], want, err_msg=str(how))
            part = weight[:, 5 * device : 5 * (device + 1)]
            np.testing.assert_array_equal(dx[device], g * part, err_msg=str(how))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_reduce_scatter_and_its_gradient(sizes):
    g = int(np.prod([*sizes.values()]))
    x, axes, every = data(sizes, 4 * g, 2), tuple(sizes), some(sizes, "reduce_scatter")

    def both(x):
        out = []
        for how in every:
            y, back = jax.vjp(lambda x, how=how: collectives.reduce_scatter(x, 0, axes, how), x)
            out.append((y, back(y)[0]))
        return out

    want = x.sum(0)
    for how, (y, dx) in zip(every, run(sizes, both, x, out=True), strict=True):
        np.testing.assert_array_equal(np.concatenate([*y]), want, err_msg=str(how))
        for device in range(g):
            np.testing.assert_array_equal(dx[device], want, err_msg=str(how))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_to_all(sizes):
    g = int(np.prod([*sizes.values()]))
    x, axes, every = data(sizes, 2, 3 * g), tuple(sizes), some(sizes, "all_to_all")
    found = run(
        sizes, lambda x: [collectives.all_to_all(x, 1, axes, how) for how in every], x, out=True
    )
    blocks = x.reshape(g, 2, g, 3)
    for how, got in zip(every, found, strict=True):
        want = blocks.transpose(2, 1, 0, 3).reshape(g, 2, 3 * g)
        np.testing.assert_array_equal(got, want, err_msg=str(how))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_one_device_and_all(sizes, kind):
    x, axes, every = data(sizes, 5), tuple(sizes), some(sizes, kind)
    one = collectives.broadcast if kind == "broadcast" else collectives.reduce
    found = run(sizes, lambda x: [one(x, axes, how) for how in every], x, out=kind == "reduce")
    for how, got in zip(every, found, strict=True):
        if kind == "broadcast":
            np.testing.assert_array_equal(got, x[0], err_msg=str(how))
        else:
            np.testing.assert_array_equal(got[0], x.sum(0), err_msg=str(how))
            assert not got[1:].any()


def test_send():
    """On to the next, or back; zeros where nobody sends to; also more chunks than entries."""
    sizes, x, g = {"a": 4}, data({"a": 4}, 3, 2), 4
    onwards, back = [(i, i + 1) for i in range(g - 1)], [(i + 1, i) for i in range(g - 1)]
    every = list(compositions("send", sizes, (1, 2, 5, 9)))
    assert [str(how) for how in every] == ["send(a)", "send(a) /2", "send(a) /5", "send(a) /9"]

    def both(x):
        return [[collectives.send(x, to, "a", how) for to in (onwards, back)] for how in every]

    nothing = np.zeros_like(x[:1])
    for how, (later, earlier) in zip(every, run(sizes, both, x, out=True), strict=True):
        np.testing.assert_array_equal(later, np.concatenate([nothing, x[:-1]]), err_msg=str(how))
        np.testing.assert_array_equal(earlier, np.concatenate([x[1:], nothing]), err_msg=str(how))


def test_a_send_goes_along_one_axis():
    assert not list(compositions("send", {"a": 2, "b": 2}))
    for axes, text in (
        (("a", "b"), "send(a) send(b)"),
        (("a",), "send(a) send(a)"),
        (("a",), "all_gather(a)"),
        (("b",), "send(a)"),
    ):
        assert not legal("send", axes, Composition.parse(text))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        assert not legal(kind, ("a",), Composition.parse("send(a)"))
    with pytest.raises(ValueError, match=r"send\(a,b\): .* a send along one"):
        flat("send", ("a", "b"))


def test_more_chunks_than_entries():
    """No piece is empty."""
    sizes, many = {"a": 2}, 5
    gather, scatter, total = (
        Composition(flat(kind, ("a",)).ops, many)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )

    def every(x):
        whole = collectives.all_gather(x, 0, ("a",), gather)
        mine = collectives.reduce_scatter(whole, 0, ("a",), scatter)
        return mine, collectives.lax.pcast(collectives.all_reduce(x, total), ("a",), to="varying")

    x = data(sizes, 2)
    mine, summed = run(sizes, every, x, out=True)
    np.testing.assert_array_equal(mine, 2 * x)
    np.testing.assert_array_equal(summed[1], x.sum(0))


@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all"])
def test_what_does_not_divide_is_refused(name):
    sizes = {"a": 2, "b": 3}
    how, function = flat(name, ("a", "b")), getattr(collectives, name)
    with pytest.raises(ValueError, match=r"Axis 0 of \(8,\) does not divide into the 6 devices"):
        run(sizes, lambda x: function(x, 0, ("a", "b"), how), data(sizes, 8), out=True)


def test_rewrites_of_an_all_reduce_over_two_levels():
    found = {str(how) for how in compositions("all_reduce", {"host": 2, "chip": 4})}
    assert {
        "all_reduce(host,chip)",
        "all_reduce(host) all_reduce(chip)",
        "reduce_scatter(host,chip) all_gather(host,chip)",
        "reduce_scatter(chip) all_reduce(host) all_gather(chip)",
        "ring_scatter(chip) all_reduce(host) all_gather(chip)",
        "reduce_scatter(chip) reduce_scatter(host) all_gather(host) all_gather(chip)",
    } <= found


WRONG = {
    "all_reduce(a)": "ends summed over",
    "all_reduce(a,b) all_reduce(b)": "sums twice",
    "all_reduce(a,b,c)": "leaves the group",
    "reduce_scatter(a,b)": "sharded over",
    "reduce_scatter(a) reduce_scatter(b) all_gather(a) all_gather(b)": "joins before b is joined",
    "all_gather(a)": "joins what is not sharded",
    "reduce_scatter(a) all_reduce(b) ring_gather(a)": "is a ring",
    "all_to_all(a,b)": "not to be exchanged",
    "broadcast(a,b)": "sends from one device",
    "scatter(a) all_gather(a) all_reduce(b)": "for broadcasts only",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_all_reduce_is_refused(text):
    with pytest.raises(ValueError, match=WRONG[text]):
        check("all_reduce", ("a", "b"), Composition.parse(text))


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_text_and_back(kind):
    for how in compositions(kind, {"a": 2, "b": 2}, CHUNKS):
        assert Composition.parse(str(how)) == how
        assert how.mirrored().mirrored() == how
        if kind != "all_to_all":
            back = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(kind)
            assert back is None or legal(back, ("a", "b"), how.mirrored())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write primitive"),
        ("all_reduce", "'all_reduce' in 'all_reduce': write primitive"),
        ("all_reduced(a)", "'all_reduced': choose one of all_reduce"),
        ("ring_gather(a,b)", "a ring runs over one mesh axis"),
        ("all_reduce(a) /0", "at least 1"),
    ],
)
def test_bad_text(text, words):
    with pytest.raises(ValueError, match=words):
        Composition.parse(text)


def test_bad_collectives():
    with pytest.raises(ValueError, match="'all_reduced': choose one of"):
        Collective("all_reduced", ("a",), 4, "float32")
    with pytest.raises(ValueError, match="each once"):
        Collective("all_reduce", ("a", "a"), 4, "float32")


def test_orders_are_not_interchangeable():
    """The check follows the data: of all short sequences over two axes it takes the right ones."""
    primitives = ("all_reduce", "reduce_scatter", "all_gather")
    ops = [Op(p, axes) for p in primitives for axes in (("a",), ("b",), ("a", "b"))]
    taken = [
        Composition(chosen)
        for length in (1, 2, 3)
        for chosen in itertools.product(ops, repeat=length)
        if legal("all_reduce", ("a", "b"), Composition(chosen))
    ]
    sizes, x = {"a": 2, "b": 3}, data({"a": 2, "b": 3}, 7)
    found = run(sizes, lambda x: [collectives.all_reduce(x, how) for how in taken], x, out=False)
    assert len(taken) >= 8
    for how, got in zip(taken, found, strict=True):
        np.testing.assert_array_equal(got, x.sum(0), err_msg=str(how))
