"""One process or many: JAX's own multi-controller runtime, started, checked, and fed.

Every process runs the same program over its own devices; collectives go through XLA's transports
(ICI, NCCL, on CPUs Gloo). Nothing here writes transport.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from parallel import collectives
from parallel.partition import Composition, Op, flat
from parallel.plan import AXES, BATCH

# Seconds after which a process that says nothing counts as dead, and the others end.
HEARTBEAT = 10


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    detect: bool = False,
) -> None:
    """Joins the other processes; does nothing for a single one.

    Args:
        coordinator: host:port of process 0.
        num_processes: processes in all.
        process_id: number of this one, from 0.
        detect: let JAX find all three in the environment of a cluster that it knows (TPU pods,
            Slurm, MPI, Kubernetes).

    Raises:
        ValueError: if only some of the three are given, or the number is out of range.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        if detect:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT)
        return
    if None in given or detect:
        raise ValueError(
            f"coordinator, num_processes, process_id = {given}: give all three, or let them be "
            "detected, or none."
        )
    assert num_processes is not None
    assert process_id is not None
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id = {process_id} must lie in 0..{num_processes - 1}.")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=60,
        heartbeat_timeout_seconds=HEARTBEAT,
    )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Runs a part of the program in which all processes need each other.

    Raises:
        RuntimeError: in plain words, if a collective fails since another process has ended. (If
            the coordinator ends, JAX itself ends the process, with its own message.)
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise RuntimeError(
            f"Process {jax.process_index()} of {jax.process_count()} lost the others: one has "
            "ended or cannot be reached. Start all of them again; the newest checkpoint is "
            f"whole. ({str(error).splitlines()[0]})"
        ) from error


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """Yields once in process 0, and only then in the others: for files that all read."""
    if jax.process_index():
        multihost_utils.sync_global_devices("first process first")
    yield
    if not jax.process_index() and jax.process_count() > 1:
        multihost_utils.sync_global_devices("first process first")


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh over all devices of all processes, axes in the order of `plan.AXES`.

    Args:
        sizes: devices along each axis.

    Raises:
        ValueError: for an unknown axis, or if the product is not the number of devices.
    """
    if not sizes or not set(sizes) <= set(AXES):
        raise ValueError(f"Mesh {dict(sizes)}: its axes must be of {AXES}.")
    devices = jax.devices()
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"Mesh {dict(sizes)} has {math.prod(sizes.values())} devices, there are "
            f"{len(devices)}: change the mesh, or start more processes."
        )
    axes = [axis for axis in AXES if axis in sizes]
    grid = np.asarray(devices).reshape([sizes[axis] for axis in axes])
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def parse_mesh(text: str) -> dict[str, int]:
    """Reads "data=2,fsdp=4".

    Raises:
        ValueError: for anything else.
    """
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {axis.strip(): int(size) for axis, size in pairs}
    except ValueError:
        raise ValueError(f"Mesh {text!r}: write data=2,fsdp=4.") from None


def check_collectives(mesh: Mesh, shard: tuple[str, ...] = ()) -> None:
    """Runs each collective over each axis, over shards, and over all, on this backend, once.

    Args:
        mesh: of the training.
        shard: axes over which shards lie, see `plan.Plan.sharded`.

    Raises:
        RuntimeError: naming the collective and axes whose result is wrong.
    """
    groups = [(axis,) for axis in mesh.axis_names]
    for names in dict.fromkeys((*groups, shard or mesh.axis_names, mesh.axis_names)):
        g = math.prod(mesh.shape[name] for name in names)
        x = np.arange(g * g * 2, dtype=np.float32).reshape(g, g * 2) % 7
        wanted = {
            "all_reduce": np.tile(x.sum(0), (g, 1)),
            "all_gather": np.tile(x.ravel(), (g, 1)),
            "reduce_scatter": x.sum(0).reshape(g, 2),
            "all_to_all": x.reshape(g, g, 2).swapaxes(0, 1).reshape(g, g * 2),
        }
        if len(names) == 1:
            wanted["ring_gather"] = wanted["all_gather"]
            wanted["ring_scatter"] = wanted["reduce_scatter"]
        spec = PartitionSpec(names)
        run = functools.partial(_one_of_each, names=names)
        mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
        for name, got in mapped(placed(x, mesh, spec)).items():
            for part in got.addressable_shards:
                if not np.array_equal(part.data, wanted[name][part.index]):
                    raise RuntimeError(
                        f"{name} over mesh axes {names} ({g} devices) gives wrong values on "
                        f"{jax.default_backend()}: do not train on this machine."
                    )


def _one_of_each(x: jax.Array, names: tuple[str, ...]) -> dict[str, jax.Array]:
    mine = x[0]
    total = collectives.all_reduce(mine, flat("all_reduce", names))
    found = {
        "all_reduce": jax.lax.pcast(total, names, to="varying"),
        "all_gather": collectives.all_gather(mine, 0, names, flat("all_gather", names)),
        "reduce_scatter": collectives.reduce_scatter(mine, 0, names, flat("reduce_scatter", names)),
        "all_to_all": collectives.all_to_all(mine, 0, names, flat("all_to_all", names)),
    }
    if len(names) == 1:
        gather, scatter = (Composition((Op(p, names),)) for p in ("ring_gather", "ring_scatter"))
        found["ring_gather"] = collectives.all_gather(mine, 0, names, gather)
        found["ring_scatter"] = collectives.reduce_scatter(mine, 0, names, scatter)
    return {name: value[None] for name, value in found.items()}


def placed(array: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Returns a global array of which each process gives its devices their parts."""
    whole = np.asarray(array)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def spread(batch: Any, mesh: Mesh | None) -> Any:
    """Spreads a global batch, the same in every process, over the axes that split it.

    Raises:
        ValueError: if it does not divide.
    """
    if mesh is None:
        return batch
    axes = tuple(axis for axis in BATCH if axis in mesh.axis_names)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % devices:
            raise ValueError(
                f"A batch of {leaf.shape[0]} sequences does not divide into {devices} devices: "
                "change the batch size, or the mesh."
            )
    return jax.tree.map(lambda leaf: placed(leaf, mesh, PartitionSpec(axes)), batch)


def collected(tree: Any, mesh: Mesh | None) -> Any:
    """Returns whole copies of global arrays on this process's first device."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), _everywhere(mesh)(tree))


@functools.lru_cache(maxsize=4)
def _everywhere(mesh: Mesh) -> Callable[[Any], Any]:
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=everywhere)
