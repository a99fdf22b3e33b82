"""Products beside collectives: every way gives what the plain one gives, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from parallel.overlap import Overlap, gather_matmul, matmul_scatter
from tests.common import toys
from tests.parallel.test_collectives import mesh_of

WAYS = [Overlap.parse(text) for text in ("plain", "tokens/2", "features/4", "tokens/3", "ring")]
B, D = 2, 6


def integers(seed, *shape):
    """Small whole numbers: sums are exact in any order."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def run(g, function, in_specs, out_specs, *args):
    mapped = jax.shard_map(function, mesh=mesh_of({"x": g}), in_specs=in_specs, out_specs=out_specs)
    return jax.tree.map(np.asarray, toys.quick(mapped)(*args))


@pytest.mark.parametrize("g", [2, 3, 4, 6, 8])
def test_gather_matmul(g):
    """x [B, g t, D] split by tokens, two weights split by output features; t = 5."""
    tokens, features, heads = (PartitionSpec(*at) for at in ((None, "x"), (None, "x"), (None, "x")))
    x, w = integers(0, B, 5 * g, D), integers(1, D, 2 * g)
    v, dy, dz = integers(2, D, g, 3), integers(3, B, 5 * g, 2 * g), integers(4, B, 5 * g, g, 3)
    out = PartitionSpec(None, None, "x")

    def plain(x, w, v):
        y, z = x @ w, jnp.einsum("BTD,DHA->BTHA", x, v)
        return (y, z), (dy * y).sum() + (dz * z).sum()

    (want, _), grads = plain(x, w, v), jax.grad(lambda *a: plain(*a)[1], (0, 1, 2))(x, w, v)

    def local(x, w, v, dy, dz):
        found = []
        for how in WAYS:
            y, back = jax.vjp(lambda *a, how=how: gather_matmul(a[0], a[1:], "x", how), x, w, v)
            found.append((y, back((dy, dz))))
        return found

    specs = (tokens, features, heads)
    each = ((out, out), specs)
    every = run(g, local, (*specs, out, out), [each] * len(WAYS), x, w, v, dy, dz)
    for how, (y, dx) in zip(WAYS, every, strict=True):
        jax.tree.map(lambda a, b, how=how: np.testing.assert_array_equal(a, b, str(how)), y, want)
        jax.tree.map(lambda a, b, how=how: np.testing.assert_array_equal(a, b, str(how)), dx, grads)


@pytest.mark.parametrize("g", [2, 3, 4, 6, 8])
def test_matmul_scatter(g):
    """h [B, g t, g, 3] split by features, its result by tokens."""
    features, rows, tokens = (
        PartitionSpec(None, None, "x"),
        PartitionSpec("x"),
        PartitionSpec(None, "x"),
    )
    h, w, dy = integers(0, B, 4 * g, g, 3), integers(1, g, 3, D), integers(2, B, 4 * g, D)

    def plain(h, w):
        return jnp.einsum("BTHA,HAD->BTD", h, w)

    want = plain(h, w)
    grads = jax.grad(lambda h, w: (dy * plain(h, w)).sum(), (0, 1))(h, w)

    def local(h, w, dy):
        found = []
        for how in WAYS:
            y, back = jax.vjp(lambda h, w, how=how: matmul_scatter(h, w, "x", how), h, w)
            found.append((y, back(dy)))
        return found

    each = (tokens, (features, rows))
    every = run(g, local, (features, rows, tokens), [each] * len(WAYS), h, w, dy)
    for how, (y, dx) in zip(WAYS, every, strict=True):
        np.testing.assert_array_equal(y, want, str(how))
        jax.tree.map(lambda a, b, how=how: np.testing.assert_array_equal(a, b, str(how)), dx, grads)


def test_tokens_that_do_not_divide_are_refused():
    features, rows = PartitionSpec(None, None, "x"), PartitionSpec("x")
    h, w = integers(0, B, 7, 4), integers(1, 4, D)
    with pytest.raises(ValueError, match="7 tokens do not divide among the 4 devices of 'x'"):
        run(4, lambda h, w: matmul_scatter(h, w, "x", WAYS[0]), (features, rows), features, h, w)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spiral", "choose plain"),
        ("ring/2", "take 2 or more"),
        ("tokens", "2 or more"),
        ("/", "write"),
    ],
)
def test_bad_text(text, words):
    with pytest.raises(ValueError, match=words):
        Overlap.parse(text)


def test_text_and_back():
    assert [Overlap.parse(str(how)) for how in WAYS] == WAYS
