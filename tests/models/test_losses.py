"""HO-33: losses of training and distillation, on vectors worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.losses import Batch, FeatureBatch, Teacher, cross_entropy, divergence

TEACHER, STUDENT = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)


def teacher(rows: int = 1, tokens: int = 1) -> Teacher:
    logit = np.broadcast_to(np.log(TEACHER), (rows, tokens, 3)).astype(np.float32)
    index = np.broadcast_to(np.arange(3), (rows, tokens, 3)).astype(np.int32)
    return Teacher(jnp.asarray(index), jnp.asarray(logit))


def student(rows: int = 1, tokens: int = 1) -> jax.Array:
    return jnp.asarray(np.broadcast_to(np.log(STUDENT), (rows, tokens, 3)), jnp.float32)


@pytest.mark.parametrize(
    ("kind", "temperature", "expected"),
    [("forward", 1.0, 0.085123), ("forward", 2.0, 0.098297), ("reverse", 1.0, 0.092033)],
)
def test_divergence(kind, temperature, expected):
    total, weight = divergence(teacher(), student(), jnp.ones((1, 1)), kind, temperature)
    assert float(total / weight) == pytest.approx(expected, abs=1e-6)


def test_a_teacher_of_all_rows_needs_no_index():
    whole = divergence(Teacher(None, teacher().logit_BTk), student(), jnp.ones((1, 1)))
    assert float(whole[0]) == pytest.approx(0.085123, abs=1e-6)


def test_mean_over_valid_tokens_only():
    weight_BT = jnp.asarray([[1, 1, 1], [1, 1, 0]], jnp.float32)
    # The pad's logits are nonsense, which must not leak.
    logits = student(2, 3).at[1, 2].set(jnp.nan)
    total, weight = divergence(teacher(2, 3), logits, weight_BT)
    assert float(weight) == 5
    assert float(total / weight) == pytest.approx(0.085123, abs=1e-6)
    total, weight = cross_entropy(logits, jnp.zeros((2, 3), jnp.int32), weight_BT)
    assert float(total / weight) == pytest.approx(-np.log(0.5), abs=1e-6)


def test_teacher_has_no_gradient():
    def loss(logit: jax.Array) -> jax.Array:
        return divergence(Teacher(teacher().row_BTk, logit), student(), jnp.ones((1, 1)))[0]

    assert not np.asarray(jax.grad(loss)(teacher().logit_BTk)).any()


def test_teacher_of_fewer_rows_reads_the_whole_head():
    """Two rows kept: p is renormalised over them, q is not."""
    index = jnp.asarray([[[0, 1, 0]]], jnp.int32)
    logit = jnp.asarray([[[np.log(0.7), np.log(0.2), -np.inf]]], jnp.float32)
    total, _ = divergence(Teacher(index, logit), student(), jnp.ones((1, 1)))
    p = np.asarray([0.7, 0.2]) / 0.9
    assert float(total) == pytest.approx(float((p * np.log(p / STUDENT[:2])).sum()), abs=1e-6)
    gradient = jax.grad(lambda x: divergence(Teacher(index, logit), x, jnp.ones((1, 1)))[0])(
        student()
    )
    assert np.isfinite(np.asarray(gradient)).all()
    np.testing.assert_allclose(
        np.asarray(gradient)[0, 0], STUDENT - np.append(p, 0), rtol=1e-5, atol=1e-6
    )


def test_unknown_kind():
    with pytest.raises(ValueError, match="'sideways'"):
        divergence(teacher(), student(), jnp.ones((1, 1)), "sideways")


def packed(segments, positions, **more):
    def row(values, dtype=jnp.int32):
        return jnp.asarray([values], dtype)

    zero = row([0] * len(segments))
    kind = FeatureBatch if more else Batch
    weight = row([1] * len(segments), jnp.float32)
    return kind(zero, row(positions), row(segments), zero, weight, **more)


def seen(mask) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in np.asarray(mask)[0]]


def test_documents_do_not_see_each_other():
    mask = packed([0, 0, 1, 1, -1], [0, 1, 0, 1, 0]).mask()
    assert seen(mask) == [[0], [0, 1], [2], [2, 3], [4]]


def test_a_token_with_its_own_feature_sees_the_targets_before_it():
    """Documents of 2 and 1 tokens, and their repetition: what the second draft reads."""
    own = jnp.asarray([[False] * 3 + [True] * 3])
    mask = packed(
        [0, 0, 1] * 2, [0, 1, 0] * 2, own_feature_BTD=jnp.zeros((1, 3, 1)), own_BT=own
    ).mask()
    assert seen(mask) == [[0], [0, 1], [2], [3], [0, 4], [5]]
