"""One process or many: JAX's own multi-controller runtime, started, checked, and fed.

Every process runs the same program over its own devices; collectives go through XLA's transports
(ICI, NCCL, on CPUs Gloo). Nothing here writes transport.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from parallel import collectives
from parallel.partition import flat
from parallel.plan import AXES, BATCH

# Seconds after which a process that says nothing counts as dead, and the others end.
HEARTBEAT = 10


def start(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes; does nothing for a single one.

    Args:
        coordinator: host:port of process 0; None to let JAX detect a cluster it knows, if
            `num_processes` is given, else for one process alone.
        num_processes: processes in all.
        process_id: number of this one, from 0.

    Raises:
        ValueError: if only some of the three are given, or the number is out of range.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        return
    if None in given:
        raise ValueError(
            f"coordinator, num_processes, process_id = {given}: give all three, or none."
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


def check_collectives(mesh: Mesh) -> None:
    """Runs each collective over each axis once, on the backend at hand, against known sums.

    Raises:
        RuntimeError: naming the collective and axis whose result is wrong.
    """
    for axis in mesh.axis_names:
        g = mesh.shape[axis]
        spec = PartitionSpec(axis)
        x = np.arange(g * g * 2, dtype=np.float32).reshape(g, g * 2) % 7
        wanted = {
            "all_reduce": np.tile(x.sum(0), (g, 1)),
            "all_gather": np.tile(x.ravel(), (g, 1)),
            "reduce_scatter": x.sum(0).reshape(g, 2),
            "all_to_all": x.reshape(g, g, 2).swapaxes(0, 1).reshape(g, g * 2),
        }
        names = (axis,)

        def run(x: jax.Array, names: tuple[str, ...] = names) -> dict[str, jax.Array]:
            mine = x[0]
            found = {
                "all_reduce": collectives.all_reduce(mine, flat("all_reduce", names)),
                "all_gather": collectives.all_gather(mine, 0, names, flat("all_gather", names)),
                "reduce_scatter": collectives.reduce_scatter(
                    mine, 0, names, flat("reduce_scatter", names)
                ),
                "all_to_all": collectives.all_to_all(mine, 0, names, flat("all_to_all", names)),
            }
            found["all_reduce"] = jax.lax.pcast(found["all_reduce"], names, to="varying")
            return {name: value[None] for name, value in found.items()}

        mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
        for name, got in mapped(placed(x, mesh, spec)).items():
            for shard in got.addressable_shards:
                if not np.array_equal(shard.data, wanted[name][shard.index]):
                    raise RuntimeError(
                        f"{name} over mesh axis {axis!r} ({g} devices) gives wrong values on "
                        f"{jax.default_backend()}: do not train on this machine."
                    )


def placed(array: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Returns a global array of which each process gives its devices their parts."""
    whole = np.asarray(array)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def spread(batch: Any, mesh: Mesh | None) -> Any:
    """Spreads a global batch, the same in every process, over the axes that split it."""
    if mesh is None:
        return batch
    spec = PartitionSpec(tuple(axis for axis in BATCH if axis in mesh.axis_names))
    return jax.tree.map(lambda leaf: placed(leaf, mesh, spec), batch)


def collected(tree: Any, mesh: Mesh | None) -> Any:
    """Returns whole copies of global arrays on this process's first device."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())
    whole = jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=everywhere)(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
