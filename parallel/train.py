"""One optimiser step, for any model that comes as `Stages`, on one device or a mesh.

Without a mesh it is the oracle of every other. On a mesh the gradient is computed under `shard_map`
(`parallel.hybrid`), every collective named by a plan; the optimiser then updates each device's
shards. What an optimiser needs of the whole gradient (a norm, to clip it) the compiler reduces.
Weights whose axes do not divide over `tensor` are brought to their seats and back by the compiler
too, once a step (`parallel.seats`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallel.comm import LOCAL
from parallel.hybrid import Layout, sharded_sums
from parallel.launch import placed
from parallel.plan import AXES, BATCH, Plan
from parallel.seats import resting_specs, seated, unseated
from parallel.sharding import shardings, training_specs
from parallel.stages import Params, Stages, forward_loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and all that exact resumption needs of a model.

    Attributes:
        params: master weights, float32 unless the caller chose otherwise.
        opt_state: the optimiser's.
        step: int32, optimiser steps tried so far, skipped ones included: it also says how many
            batches were read.
        skipped: int32, steps whose loss or gradient was not finite and that changed nothing.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    skipped: jax.Array


class StepMetrics(NamedTuple):
    """What one step reports; scalars.

    Attributes:
        loss: mean loss over the weight of the step, nats a token.
        weight: sum of the tokens' weights.
        grad_norm: Euclidean norm of the mean gradient over distinct elements, before clipping.
        finite: bool, whether the step was taken.
    """

    loss: jax.Array
    weight: jax.Array
    grad_norm: jax.Array
    finite: jax.Array


Step = Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
) -> TrainState:
    """Returns the state before the first step. The weights are copied: a step donates its state.

    Args:
        params: weights.
        optimizer: any optax transformation.
        mesh: where the state lies, see `seats.resting_specs`; None for one device.
        plan: of the training: its `shard`; None for `Plan()`.

    Raises:
        ValueError: if blocks do not divide over the stages of a pipeline.
    """
    zero = jnp.zeros((), jnp.int32)
    if mesh is None:
        params = jax.tree.map(jnp.copy, params)
        return TrainState(params, optimizer.init(params), zero, jnp.copy(zero))
    # Moments are made where they stay: no device ever holds all of them.
    shapes = TrainState(params, jax.eval_shape(optimizer.init, params), zero, zero)
    where = state_shardings(shapes, optimizer, mesh, plan)
    params = jax.tree.map(lambda leaf, to: placed(leaf, mesh, to.spec), params, where.params)
    opt_state = jax.jit(optimizer.init, out_shardings=where.opt_state)(params)
    counters = [placed(np.zeros((), np.int32), mesh, PartitionSpec()) for _ in range(2)]
    return TrainState(params, opt_state, *counters)


def state_shardings(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    plan: Plan | None = None,
) -> Any:
    """Returns where every leaf of a state lies: moments with their weights, the rest everywhere.

    Args:
        state: arrays or shapes.
        optimizer: whose state it holds.
        mesh: of the training.
        plan: likewise.
    """
    shard = (plan or Plan()).shard
    weights = shardings(mesh, resting_specs(state.params, dict(mesh.shape), shard=shard))
    everywhere = NamedSharding(mesh, PartitionSpec())
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        # Weights that an optimiser leaves alone have no moments.
        lambda leaf, where: leaf if isinstance(leaf, optax.MaskedNode) else where,
        state.opt_state,
        weights,
        transform_non_params=lambda _: everywhere,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    out: Any = TrainState(weights, moments, everywhere, everywhere)  # type: ignore[arg-type]
    return out


def make_train_step(
    stages: Stages,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    *,
    accumulate: int = 1,
    compute_dtype: jax.typing.DTypeLike | None = None,
    remat: bool = False,
    scan: bool = False,
) -> Step:
    """Returns a compiled `(state, batch) -> (state, metrics)`; the state is donated.

    The gradient is that of the mean over all valid tokens of the step, however they are split
    over devices and micro-batches: sums of losses and weights are added first and divided once.
    Micro-batch gradients are summed in the master dtype. Clipping, if the optimiser clips, sees
    the final gradient.

    Args:
        stages: the model.
        optimizer: any optax transformation.
        mesh: None for one device; else axes of `plan.AXES`: the batch is split over `host`, `data`
            and `fsdp`, weights over the plan's `shard`, heads, widths and vocabulary over `tensor`
            (padded or with copies where they do not divide, see `Stages.seats`), blocks over
            `pipe`. The state comes from `init_state` with the same mesh and plan.
        plan: which collective is carried out how; None for `Plan()`.
        accumulate: micro-batches a device computes one after the other.
        compute_dtype: what the weights are cast to in the forward and backward pass, such as
            bfloat16; None for the master dtype.
        remat: see `forward_loss`.
        scan: see `forward_loss`.

    Raises:
        ValueError: for another mesh, more tensor ranks than the model can use, or (at the first
            call) a batch that does not divide by devices and micro-batches.
    """
    sizes = {} if mesh is None else dict(mesh.shape)
    if mesh is None and plan is not None:
        raise ValueError("A plan says what devices send each other: give a mesh with it.")
    if not set(sizes) <= set(AXES):
        raise ValueError(f"Mesh axes {tuple(sizes)}: choose of {AXES}.")
    plan = plan or Plan()
    plan.check(sizes, scan)
    devices = math.prod(sizes.get(axis, 1) for axis in BATCH)
    seats = stages.seats(sizes["tensor"]) if "tensor" in sizes else {}
    if accumulate < 1:
        raise ValueError(f"accumulate = {accumulate} must be at least 1.")

    def loss_sum(params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        if compute_dtype is not None:
            params = jax.tree.map(lambda leaf: leaf.astype(compute_dtype), params)
        return forward_loss(stages, params, batch, LOCAL, remat=remat, scan=scan)

    def sums(params: Params, batch: Any) -> tuple[jax.Array, jax.Array, Params]:
        """Returns loss sum, weight sum and gradient of the loss sum on this device."""
        gradient_of = jax.value_and_grad(loss_sum, has_aux=True)
        if accumulate == 1:
            (loss, weight), gradient = gradient_of(params, batch)
            return loss, weight, gradient
        micro = jax.tree.map(lambda a: a.reshape(accumulate, -1, *a.shape[1:]), batch)
        zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient_of, params, _first(micro)))

        def body(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient_of(params, part)), None

        ((loss, weight), gradient), _ = jax.lax.scan(body, zero, micro)
        return loss, weight, gradient

    def mapped(params: Params, batch: Any) -> tuple[jax.Array, jax.Array, Params]:
        params = seated(params, seats)
        specs = training_specs(params, sizes, plan.shard)
        layout = Layout(specs, sizes, plan, compute_dtype)
        whole = PartitionSpec()
        parts = PartitionSpec(tuple(axis for axis in BATCH if axis in sizes))
        run = functools.partial(sharded_sums, stages, layout, accumulate, remat, scan)
        loss, weight, gradient = jax.shard_map(
            run, mesh=mesh, in_specs=(specs, parts), out_specs=(whole, whole, specs)
        )(params, batch)
        return loss, weight, unseated(gradient, seats)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        _check_batch(batch, devices, accumulate)
        total = sums if mesh is None else mapped
        loss, weight, gradient = total(state.params, batch)
        # A step without a single valid token has nothing to learn and must not divide by zero.
        share = 1 / jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)
        gradient = jax.tree.map(lambda g: g * share.astype(g.dtype), gradient)
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        taken = TrainState(
            jax.tree.map(keep, params, state.params),
            jax.tree.map(keep, opt_state, state.opt_state),
            state.step + 1,
            state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32),
        )
        if mesh is not None:  # or the compiler might move the optimiser's state elsewhere
            where = state_shardings(taken, optimizer, mesh, plan)
            taken = jax.lax.with_sharding_constraint(taken, where)
        return taken, StepMetrics(loss * share, weight, norm, finite)

    return jax.jit(step, donate_argnames=("state",))


def _first(micro: Any) -> Any:
    return jax.tree.map(lambda a: a[0], micro)


def _check_batch(batch: Any, devices: int, accumulate: int) -> None:
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(f"The batch's leaves have first axes {sorted(sizes)}: they must agree.")
    (size,) = sizes
    if size % (devices * accumulate):
        raise ValueError(
            f"A batch of {size} sequences does not divide into {devices} devices x {accumulate} "
            "micro-batches: change the batch size or `accumulate`."
        )
