"""Rotary positions: precision (HO-21), scalings, and what a rotation must keep."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import RopeScaling
from models.layers import rope_frequencies, rope_tables, rotate
from tests.common import toys

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def exact_frequencies(theta: float, A: int) -> np.ndarray:
    """Su et al. equation 15, float64."""
    return np.array([theta ** (-2 * i / A) for i in range(A // 2)])


def exact_llama3(freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """By wavelengths and cases, as the published description of Llama 3.1 has it."""
    assert scaling.original_positions is not None
    assert scaling.low_freq_factor is not None
    assert scaling.high_freq_factor is not None
    longest = scaling.original_positions / scaling.low_freq_factor
    shortest = scaling.original_positions / scaling.high_freq_factor
    out = []
    for f in freq:
        wavelength = 2 * np.pi / f
        if wavelength < shortest:
            out.append(f)
        elif wavelength > longest:
            out.append(f / scaling.factor)
        else:
            share = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            out.append((1 - share) * f / scaling.factor + share * f)
    return np.array(out)


def config(**changes):
    return toys.tiny_config(head_dim=128, **changes)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_default_frequencies(theta):
    freq = rope_frequencies(config(rope_theta=theta))
    assert freq.dtype == jnp.float32
    np.testing.assert_allclose(freq, exact_frequencies(theta, 128), rtol=2e-6)


def test_linear_scaling_divides_every_frequency():
    scaling = RopeScaling("linear", 4.0, None, None, None)
    freq = rope_frequencies(config(rope_scaling=scaling))
    np.testing.assert_allclose(freq, exact_frequencies(10000.0, 128) / 4, rtol=2e-6)


@pytest.mark.parametrize("scaling", [LLAMA3, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)])
def test_llama3_scaling_stretches_long_waves_only(scaling):
    exact = exact_frequencies(500000.0, 128)
    wanted = exact_llama3(exact, scaling)
    kept, stretched = np.isclose(wanted, exact), np.isclose(wanted, exact / scaling.factor)
    assert kept.any()
    assert stretched.any()
    assert (~kept & ~stretched).any(), "all three cases occur"
    freq = rope_frequencies(config(rope_theta=500000.0, rope_scaling=scaling))
    np.testing.assert_allclose(freq, wanted, rtol=1e-5)


@pytest.mark.parametrize("position", [255, 257, 4095])
def test_bfloat16_rounds_the_result_only(position):
    """HO-21: rounding positions, frequencies or the phase would be off by radians."""
    at = jnp.full((1, 1), position, jnp.int32)
    phase = position * exact_frequencies(10000.0, 128)
    for table, exact in zip(rope_tables(config(), at, jnp.bfloat16), (np.cos, np.sin), strict=True):
        assert table.dtype == jnp.bfloat16
        wide = np.asarray(table[0, 0], np.float64)
        assert np.abs(wide - exact(phase)).max() < 4e-3
    for table, exact in zip(rope_tables(config(), at, jnp.float32), (np.cos, np.sin), strict=True):
        # float32 phases near 4095 are 2.4e-4 apart.
        np.testing.assert_allclose(table[0, 0], exact(phase), atol=5e-4)


def test_the_tolerance_would_catch_rounded_frequencies():
    """The same bound, broken by the faulty order of operations (case HO-21: up to 1.68 in cos)."""
    phase = 4095 * exact_frequencies(10000.0, 128)
    low = jnp.asarray(exact_frequencies(10000.0, 128), jnp.bfloat16) * jnp.bfloat16(4095)
    assert np.abs(np.cos(np.asarray(low, np.float64)) - np.cos(phase)).max() > 1


def test_rotation_is_a_complex_product_of_pairs():
    rng = np.random.default_rng(0)
    c = toys.tiny_config()
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    at = rng.integers(0, 500, (2, 5)).astype(np.int32)
    got = rotate(jnp.asarray(x), *rope_tables(c, jnp.asarray(at), jnp.float32))
    turn = np.exp(1j * at[:, :, None, None] * exact_frequencies(c.rope_theta, 8))
    pairs = (x[..., :4] + 1j * x[..., 4:]) * turn
    np.testing.assert_allclose(got, np.concatenate([pairs.real, pairs.imag], -1), atol=2e-4)


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(m: int, n: int) -> float:
        def turned(x, at):
            return rotate(x, *rope_tables(toys.tiny_config(), jnp.full((1, 1), at), jnp.float32))

        return float(jnp.sum(turned(q, m) * turned(k, n)))

    assert score(7, 3) == pytest.approx(score(407, 403), abs=1e-3)
    assert abs(score(7, 3) - score(7, 5)) > 1e-2
