"""What a decoder is trained on, and its losses: sums over tokens, divided by nobody here."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from parallel.comm import LOCAL, Comm


class Teacher(NamedTuple):
    """The target's distribution after each token, at k rows of the drafter's head.

    Attributes:
        row_BTk: int32, rows of the head, distinct within a token; None for all U in their order.
        logit_BTk: float32, the target's logits there; -inf for a slot that is not used.
    """

    row_BTk: jax.Array | None
    logit_BTk: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed sequences. Several documents may share a row; none sees another.

    Attributes:
        token_BT: int32 input ids.
        position_BT: int32, counted from the start of the token's own document.
        segment_BT: int32, which document of its row a token belongs to; -1 for padding.
        label_BT: int32, what to predict after the token: a row of the head, which is a token id
            but in drafters of a reduced vocabulary.
        weight_BT: float32; 0 where there is nothing to learn: padding, the last token of a
            document, a label that the head does not have, the prompt of an answer.
        teacher: for distillation of probabilities, else None.
        hidden_BTID: the target's hidden states at each token, see `transformer.Output`, which the
            teacher (`models.stages.with_teacher`) and the features are made of; None without.
    """

    token_BT: jax.Array
    position_BT: jax.Array
    segment_BT: jax.Array
    label_BT: jax.Array
    weight_BT: jax.Array
    teacher: Teacher | None = None
    hidden_BTID: jax.Array | None = None

    def mask(self) -> jax.Array:
        """Returns bool [B, T, T]: which tokens of its own document each token sees.

        Padding sees padding, so that no query is blind.
        """
        T = self.token_BT.shape[1]
        return self._same_document() & jnp.tril(jnp.ones((T, T), jnp.bool_))[None]

    def _same_document(self) -> jax.Array:
        return self.segment_BT[:, :, None] == self.segment_BT[:, None, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureBatch(Batch):
    """Every row twice: with the target's features, and with the drafter's own; 2T tokens.

    `hidden_BTID` has T: the second half of a row repeats the first. See `models.feature`.

    Attributes:
        own_feature_BTD: the drafter's final-norm output before each token of the second half.
        own_BT: bool, 2T: the second half. Its tokens see the first half's before them and
            themselves: what the second draft of a proposal sees (EAGLE-3's training-time test,
            arXiv 2503.01840, section 3.2, one step of it).
    """

    own_feature_BTD: jax.Array
    own_BT: jax.Array

    def mask(self) -> jax.Array:
        """Returns bool [B, 2T, 2T], see `own_BT`."""
        before_BTT = self.position_BT[:, :, None] > self.position_BT[:, None, :]
        itself_TT = jnp.eye(self.token_BT.shape[1], dtype=jnp.bool_)[None]
        return self._same_document() & before_BTT & ~self.own_BT[:, None, :] | itself_TT


def cross_entropy(
    logits_BTU: jax.Array, label_BT: jax.Array, weight_BT: jax.Array, comm: Comm = LOCAL
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of -log q(label) in nats, and the sum of the weights.

    On the target's own answers this is hard distillation, that is sequence-level distillation
    (Kim and Rush 2016, arXiv 1606.07947). With `comm` the logits may be a part of the vocabulary.
    """
    nats_BT = comm.log_sum_exp(logits_BTU)
    nats_BT -= comm.logits_at(logits_BTU, label_BT[:, :, None])[..., 0]
    return _weighted(nats_BT, weight_BT)


def divergence(
    teacher: Teacher,
    logits_BTU: jax.Array,
    weight_BT: jax.Array,
    kind: Literal["forward", "reverse"] = "forward",
    temperature: float = 1.0,
    comm: Comm = LOCAL,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of temperature^2 KL(p, q) in nats, and the sum of the weights.

    Forward is KL(p || q), which spreads q over all that the target may say; reverse is KL(q || p).
    p is the teacher's distribution over its k rows; it gets no gradient. The forward one reads q
    over the whole head, so that mass outside of the k rows costs; the reverse one is only finite
    for q over the same rows, and renormalises q over them. The square of the temperature keeps
    the size of the gradient (Hinton et al. 2015, arXiv 1503.02531, section 2). With `comm`
    the logits may be a part of the vocabulary; the teacher is whole.
    """
    teacher_BTk = jax.lax.stop_gradient(teacher.logit_BTk)
    scaled_BTU = logits_BTU / temperature
    if teacher.row_BTk is None:  # over the rows that this device has, of its part of the logits
        over, q_log = comm, scaled_BTU
        teacher_BTk = comm.own_rows(teacher_BTk, scaled_BTU.shape[2])
    else:  # over k rows that every device knows
        over, q_log = LOCAL, comm.logits_at(scaled_BTU, teacher.row_BTk)
    used = teacher_BTk > -jnp.inf
    p_log = teacher_BTk / temperature
    p_log -= over.log_sum_exp(p_log)[..., None]
    if kind == "forward":
        q_log -= comm.log_sum_exp(scaled_BTU)[..., None]
    elif kind == "reverse":
        q_log -= over.log_sum_exp(jnp.where(used, q_log, -jnp.inf))[..., None]
    else:
        raise ValueError(f"Divergence {kind!r}: use 'forward' or 'reverse'.")
    q_log, p_log = (jnp.where(used, x, jnp.zeros_like(x)) for x in (q_log, p_log))
    of, to = (p_log, q_log) if kind == "forward" else (q_log, p_log)
    nats_BT = over.total((jnp.exp(of) * (of - to)).sum(-1))
    return _weighted(temperature**2 * nats_BT, weight_BT)


def _weighted(nats_BT: jax.Array, weight_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Selected, not multiplied: what has no weight may be anything, and 0 * inf is NaN.
    weight_BT = weight_BT.astype(nats_BT.dtype)
    nats_BT = jnp.where(weight_BT > 0, nats_BT * weight_BT, jnp.zeros_like(nats_BT))
    return nats_BT.sum(), weight_BT.sum()
