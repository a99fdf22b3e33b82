"""Parameters and the parts of a block that know nothing of attention: norm, RoPE, MLP."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from parallel.comm import Comm, full_precision

# Makes one parameter from its axis letters, which are also the suffix of its attribute name:
# `self.up_DF = make("DF")`. Shape, sharding axes and checkpoint checks all derive from the letters.
Maker = Callable[..., nnx.Param]


def maker(config: ModelConfig, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike) -> Maker:
    """Returns the `Maker` of one model.

    The maker takes the axis letters and `fan_in`, the number of input features: weights are
    normal with deviation 1/sqrt(fan_in), and ones (RMSNorm) where `fan_in` is None.
    """

    def make(axes: str, fan_in: int | None) -> nnx.Param:
        shape = tuple(config.sizes[letter] for letter in axes)
        if fan_in is None:
            return nnx.Param(jnp.ones(shape, dtype))
        scale = jnp.asarray(1 / math.sqrt(fan_in), dtype)
        return nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype))

    return make


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019), in float32 whatever the input is."""

    def __init__(self, make: Maker, eps: float):
        self.scale_D = make("D", None)
        self.eps = eps

    def __call__(self, x_BND: jax.Array) -> jax.Array:
        """[..., D] -> [..., D] in the input's dtype."""
        return normalised(x_BND, self.eps) * jnp.broadcast_to(self.scale_D[...], x_BND.shape)


def normalised(x_BND: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt(mean of its squares + eps), [..., D]: the norm before it is scaled."""
    wide = x_BND.astype(np.promote_types(x_BND.dtype, jnp.float32))
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x_BND.dtype)


class MLP(nnx.Module):
    """Gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, make: Maker):
        self.gate_DF = make("DF", config.d_model)
        self.up_DF = make("DF", config.d_model)
        self.down_FD = make("FD", config.d_ff)

    def __call__(self, x_BND: jax.Array, comm: Comm) -> jax.Array:
        """[B, N, D] -> [B, N, D]."""
        gate_BNF, up_BNF = comm.column_matmul(x_BND, self.gate_DF[...], self.up_DF[...])
        return comm.row_matmul(jax.nn.silu(gate_BNF) * up_BNF, self.down_FD[...])


def rope_frequencies(config: ModelConfig) -> jax.Array:
    """Returns the angular frequency of each rotated pair, float32 [A/2], radians a position.

    RoPE: Su et al. 2021 (arXiv 2104.09864), equation 15, with theta^(-2i/A); scalings as in
    `RopeScaling`.
    """
    A = config.head_dim
    freq = config.rope_theta ** -(jnp.arange(0, A, 2, dtype=jnp.float32) / A)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    assert scaling.low_freq_factor is not None  # narrowed by RopeScaling.__post_init__
    assert scaling.high_freq_factor is not None
    assert scaling.original_positions is not None
    # How many turns the pair makes within the original context decides how much it is stretched.
    turns = scaling.original_positions * freq / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * freq + (1 - keep) * freq / scaling.factor


def rope_tables(
    config: ModelConfig, position_BN: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of every position and pair, [B, N, A/2] each, in `dtype`.

    Positions (int32) and phases stay float32 until the end: bfloat16 cannot tell position 4095
    from 4096, and would put the phase off by radians.
    """
    freq = rope_frequencies(config)
    phase = position_BN.astype(jnp.float32)[:, :, None] * freq[None, None, :]
    return jnp.cos(phase).astype(dtype), jnp.sin(phase).astype(dtype)


def rotate(x_BNHA: jax.Array, cos_BNa: jax.Array, sin_BNa: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + A/2) of each head, the order of Hugging Face checkpoints."""
    first, second = jnp.split(x_BNHA, 2, axis=-1)
    cos, sin = cos_BNa[:, :, None, :], sin_BNa[:, :, None, :]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def head_logits(x_BND: jax.Array, table: jax.Array, tied: bool) -> jax.Array:
    """Multiplies hidden states with the output table, accumulating in float32.

    Args:
        x_BND: final-norm output.
        table: `embed_VD` if `tied`, else `head_DU`.
        tied: which of the two.

    Returns:
        logits [B, N, V], float32 or wider.
    """
    return jax.lax.dot_general(
        x_BND,
        table,
        (((2,), (1 if tied else 0,)), ((), ())),
        precision=full_precision(x_BND.dtype),
        preferred_element_type=np.promote_types(x_BND.dtype, jnp.float32),
    )
