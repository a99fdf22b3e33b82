"""Programs of products and collectives, timed round after round in processes that meet.

Which is alone, beside or after which is data dependency, since XLA:CPU strips barriers: to make a
collective wait, an element of the product is written into its message (one more copy of it). The
compiled text is asked for the number of collectives, which XLA:CPU is known to merge.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.common.shaped_network import Host, free_port, run_together, sent
from parallel import collectives, launch
from parallel.partition import Collective, Composition, Kind
from parallel.planner.chips import Cut

# Rounds that do not count, and seconds after which processes are given up.
WARM, LIMIT = 2, 1200


@dataclasses.dataclass(frozen=True)
class Work:
    """Products [edge, edge] x [edge, edge] in float32, each of the one before.

    Attributes:
        products: how many.
        edge: of the matrices.
        cut: along what each is cut; "copy" stands for one pass over a matrix instead.
        chunks: pieces.
    """

    products: int
    edge: int
    cut: Cut | Literal["copy"] = "tokens"
    chunks: int = 1


@dataclasses.dataclass(frozen=True)
class Talk:
    """A collective in float32 and how it is carried out; attributes as of `Collective`."""

    kind: Kind
    axes: tuple[str, ...]
    nbytes: int
    how: str

    def wanted(self) -> Collective:
        """Returns what the cost model takes."""
        return Collective(self.kind, self.axes, self.nbytes, "float32")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program; with work and talk, `after` says that the talk waits for the work."""

    name: str
    work: Work | None = None
    talk: Talk | None = None
    after: bool = False


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one case: seconds of the slowest process in each round, and bytes that a host sent."""

    seconds: tuple[float, ...]
    sent: float

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def summed(axes: tuple[str, ...], nbytes: int, how: str = "") -> Talk:
    """Returns an all-reduce, flat unless `how` says otherwise."""
    return Talk("all_reduce", axes, nbytes, how or f"all_reduce({','.join(axes)})")


def product(x: jax.Array, w: jax.Array, work: Work) -> jax.Array:
    """Returns x [edge, edge] times w [edge, edge], in chunks."""
    k = work.chunks
    if work.cut == "copy":
        return x + w[0, 0]
    if work.cut == "tokens":
        return jnp.concatenate([part @ w for part in jnp.split(x, k, 0)], 0)
    if work.cut == "features":
        return jnp.concatenate([x @ part for part in jnp.split(w, k, 1)], 1)
    parts = zip(jnp.split(x, k, 1), jnp.split(w, k, 0), strict=True)
    total, *rest = [left @ right for left, right in parts]
    for part in rest:
        total += part
    return total


def carried(x: jax.Array, talk: Talk) -> jax.Array:
    """Returns the collective's result, known as different on every device; x: [n]."""
    how = Composition.parse(talk.how)
    if talk.kind == "all_reduce":
        return lax.pcast(collectives.all_reduce(x, how), talk.axes, to="varying")
    if talk.kind == "all_gather":
        return collectives.all_gather(x, 0, talk.axes, how)
    return collectives.reduce_scatter(x, 0, talk.axes, how)


def compiled(case: Case, mesh: Mesh) -> Callable[[], Any]:
    """Returns a case as a call without arguments.

    Raises:
        RuntimeError: if the compiler merged or added collectives or products.
    """
    work, talk, everywhere = case.work, case.talk, PartitionSpec(mesh.axis_names)

    def run(x: jax.Array, w: jax.Array, message: jax.Array) -> list[jax.Array]:
        x, w, message, out = x[0], w[0], message[0], []
        if work:
            for _ in range(work.products):
                x = product(x, w, work)
            out.append(x[None])
        if talk:
            if case.after:
                message = lax.dynamic_update_slice(message, x[0, :1], (0,))
            out.append(carried(message, talk)[None])
        return out

    n = talk.nbytes // 4 if talk else 1
    if talk and talk.kind == "all_gather":
        n //= int(np.prod([mesh.shape[axis] for axis in talk.axes]))
    edge = work.edge if work else 1
    args = (
        _filled(mesh, (edge, edge), 1.0),
        _filled(mesh, (edge, edge), 1 / edge),
        _filled(mesh, (n,), 1.0),
    )
    mapped = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    program = jax.jit(mapped).lower(*args).compile()
    kinds = r"\b(?:all-reduce|reduce-scatter|all-gather|all-to-all)(?:-start)?\("
    found = len(re.findall(kinds, program.as_text() or ""))
    wanted = len(Composition.parse(talk.how).ops) if talk else 0
    if found != wanted:
        raise RuntimeError(f"{case.name}: {found} collectives in the program, not {wanted}.")
    return lambda: jax.block_until_ready(program(*args))


@functools.cache
def _filled(mesh: Mesh, shape: tuple[int, ...], value: float) -> jax.Array:
    """Returns an array of this shape on every device, [devices, *shape]."""
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    make = functools.partial(jnp.full, (mesh.size, *shape), value, jnp.float32)
    return jax.jit(make, out_shardings=everywhere)()


def work_as(rank: int, folder: pathlib.Path) -> None:
    """Measures all cases of a job as one of its processes; writes what it saw beside the job.

    Args:
        rank: number of this process.
        folder: with `job.json`.
    """
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    launch.start(job["coordinator"], len(job["interfaces"]), rank)
    mesh = launch.make_mesh(job["mesh"])
    launch.check_collectives(mesh)
    meet = compiled(Case("meet", talk=summed(mesh.axis_names, 4)), mesh)
    programs = {}
    for raw in job["cases"]:
        work = Work(**raw["work"]) if raw["work"] else None
        talk = Talk(**{**raw["talk"], "axes": tuple(raw["talk"]["axes"])}) if raw["talk"] else None
        programs[raw["name"]] = compiled(Case(raw["name"], work, talk, raw["after"]), mesh)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for count in range(WARM + job["rounds"]):
        for name, program in programs.items():
            meet()
            before, begin = sent(job["interfaces"][rank]), time.perf_counter()
            program()
            took = time.perf_counter() - begin
            meet()
            if count >= WARM:
                seen[name].append((took, sent(job["interfaces"][rank]) - before))
    (folder / f"{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def measure(
    mesh: Mapping[str, int], cases: Sequence[Case], hosts: Sequence[Host], rounds: int
) -> dict[str, Measured]:
    """Runs cases in processes, each on a core of its own as far as there are cores.

    Args:
        mesh: processes along each axis, hosts outermost.
        cases: all of them run once in every round.
        hosts: each gets as many processes.
        rounds: that count; WARM more come first.

    Raises:
        RuntimeError: if a process fails.
    """
    processes = int(np.prod(list(mesh.values())))
    places = [hosts[rank * len(hosts) // processes] for rank in range(processes)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    one = "--xla_force_host_platform_device_count=1"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one}",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        job = {
            "coordinator": f"{hosts[0].address}:{free_port()}",
            "interfaces": [place.interface for place in places],
            "mesh": dict(mesh),
            "rounds": rounds,
            "cases": [dataclasses.asdict(case) for case in cases],
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        words = [sys.executable, "-m", "experiments.calibrate", f"--worker={folder}"]
        commands = [
            place.command(cores[rank % len(cores)], [*words, f"--rank={rank}"])
            for rank, place in enumerate(places)
        ]
        run_together(commands, environment, LIMIT)
        seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    out = {}
    for case in cases:
        every = np.array([one_rank[case.name] for one_rank in seen])  # [process, round, 2]
        sent = float(np.median(every[..., 1], axis=1).max())
        out[case.name] = Measured(tuple(every[..., 0].max(axis=0).tolist()), sent)
    return out
