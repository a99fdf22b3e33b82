"""This machine as a `Cluster`, and whether its cost model foretells what a real network does.

    python -m experiments.calibrate            (Linux, root, two idle cores; about five minutes)
    python -m experiments.calibrate --smoke    (any machine, not root; two processes, 15 s)

Two rigs of `common.shaped_network`: *pair*, 2 hosts of 1 process on a link of 2 Gbit/s, and
*square*, 2 hosts of 2 processes, 200 Mbit/s between them. In each, case after case in every round:

* calibration: products alone, whole and in chunks; all-reduce, reduce-scatter and all-gather of one
  level alone, in three sizes; products beside smaller and larger all-reduces. Start, hop and rate
  are the least squares of relative errors, none negative. After a pause 128 KiB pass unshaped, 0.5
  and 5 ms worth, so messages have a MB at least, and a start of less than that is fitted as zero.
  They have 12 MB at most (all-reduces: 24): larger reduce-scatters are several times slower a
  byte, which no start and rate can say. Their buffers are new memory every time; glibc keeps it
  with MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ both at 1000000000, which pass from here
  to the processes, and then they are not.
* what is to be foretold, in sizes, counts or programs that calibration did not see. pair: twelve
  products and a 16 MB all-reduce: each alone, one after the other, one beside the other. square:
  8.4 MB summed by a flat all-reduce, in two levels, and by a scatter and a gather over all.

Seconds are medians over rounds of the slowest process. Writes clusters (`this_machine.json` is the
square, of two levels) and network.csv; wanted: simulated within 20% of measured.
"""

import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.common import command, report, timed_cases
from experiments.common.report import RESULTS
from experiments.common.shaped_network import HERE, Host, two_hosts
from experiments.common.timed_cases import Case, Measured, Talk, Work, summed
from parallel.partition import Composition, Kind
from parallel.planner import cost
from parallel.planner.chips import Chip, Cut, Link
from parallel.planner.cluster import Cluster, Placement
from parallel.planner.simulate import COMPUTE, Task, simulate

CUTS: tuple[Cut, ...] = ("tokens", "features", "contract")
COLUMNS = ("rig", "case", "role", "measured", "simulated", "ratio", "sent", "simulated sent")
TINY, TINIES, SPLIT_PRODUCTS = 8, 64, 3


@dataclasses.dataclass(frozen=True)
class Rig:
    """Where cases run, and in what sizes.

    Attributes:
        name: of the rig.
        mesh: processes along each axis: `host` between hosts, `data` inside one.
        mbit: rate between hosts, Mbit/s; None for processes on the machine itself.
        sizes: by axis, bytes of the messages that its links are calibrated with.
        mixes: bytes of the all-reduces beside which products run.
        edge: of the matrices.
        counts: products alone, for their rate.
        mixed: products beside an all-reduce.
        chunks: pieces for the split table.
        targets: what is to be foretold.
    """

    name: str
    mesh: Mapping[str, int]
    mbit: int | None
    sizes: Mapping[str, tuple[int, ...]]
    mixes: tuple[int, ...]
    edge: int
    counts: tuple[int, ...]
    mixed: int
    chunks: tuple[int, ...]
    targets: tuple[Case, ...]


def both(work: Work, talk: Talk) -> tuple[Case, ...]:
    """Returns work and talk: each alone, one after the other, one beside the other."""
    return (
        Case("compute", work),
        Case("all-reduce", talk=talk),
        Case("dependent", work, talk, after=True),
        Case("independent", work, talk),
    )


_BOTH, _ALL = ("host", "data"), 8_388_608
_TWO_LEVELS = "reduce_scatter(data) all_reduce(host) all_gather(data)"
_HALVES = "reduce_scatter(host,data) all_gather(host,data)"
PAIR = Rig(
    "pair",
    mesh={"host": 2},
    mbit=2000,
    sizes={"host": (2_000_000, 6_000_000, 12_000_000)},
    mixes=(8_000_000, 24_000_000),
    edge=1024,
    counts=(4, 24),
    mixed=6,
    chunks=(2, 4, 8, 16),
    targets=both(Work(12, 1024), summed(("host",), 16_000_000)),
)
SQUARE = dataclasses.replace(
    PAIR,
    name="square",
    mesh={"host": 2, "data": 2},
    mbit=200,
    sizes={"host": (1_000_000, 3_000_000, 6_000_000), "data": (2_000_000, 6_000_000, 12_000_000)},
    mixes=(1_000_000, 2_000_000),
    targets=(
        Case("flat", talk=summed(_BOTH, _ALL)),
        Case("two levels", talk=summed(_BOTH, _ALL, _TWO_LEVELS)),
        Case("scatter, gather", talk=summed(_BOTH, _ALL, _HALVES)),
    ),
)
SMOKE = Rig(
    "smoke",
    mesh={"data": 2},
    mbit=None,
    sizes={"data": (40_000, 2_000_000)},
    mixes=(200_000,),
    edge=64,
    counts=(2, 6),
    mixed=3,
    chunks=(2,),
    targets=both(Work(4, 64), summed(("data",), 100_000)),
)


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("out", "out", "Folder for the clusters.")
    flags.DEFINE_string("rows", str(RESULTS), "Folder for the rows; with --smoke it is --out.")
    flags.DEFINE_integer("rounds", 9, "Timings of every case.", lower_bound=1)
    flags.DEFINE_bool("smoke", False, "Two processes of this machine, tiny sizes.")
    flags.DEFINE_string("worker", None, "Used by the script itself: folder of its job.")
    flags.DEFINE_integer("rank", 0, "Used by the script itself: number of the process.")


def calibration(rig: Rig) -> list[Case]:
    """Returns the cases that the cluster is made from."""
    axes = tuple(rig.mesh)
    outer = axes[:1]
    cases = [Case(f"products {n}", Work(n, rig.edge)) for n in (*rig.counts, rig.mixed)]
    cases += [
        Case("tiny products", Work(TINIES, TINY)),
        Case("copy", Work(1, 4 * rig.edge, "copy")),
        Case("whole", Work(SPLIT_PRODUCTS, rig.edge)),
    ]
    cases += [
        Case(f"{cut} in {k}", Work(SPLIT_PRODUCTS, rig.edge, cut, k))
        for cut in CUTS
        for k in rig.chunks
    ]
    for nbytes in rig.mixes:
        talk = summed(outer, nbytes)
        cases.append(Case(f"alone {nbytes}", talk=talk))
        cases.append(Case(f"beside {nbytes}", Work(rig.mixed, rig.edge), talk))
    kinds: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather")
    for axis, sizes in rig.sizes.items():
        for kind in kinds:
            for nbytes in sizes:
                talk = Talk(kind, (axis,), nbytes, f"{kind}({axis})")
                cases.append(Case(f"{talk.how} {nbytes}", talk=talk))
    return cases


def least_squares(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Returns factors, none negative, whose sums of columns have the least relative errors.

    Args:
        columns: one a measurement, none negative; the last gets a factor in any case.
        seconds: measured.
    """
    scaled = np.array(columns) / np.array(seconds)[:, None]
    kept = list(range(scaled.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, kept], np.ones(len(scaled)))[0]
        if len(kept) == 1 or found.min() >= 0:
            break
        del kept[int(found[:-1].argmin())]
    out = [0.0] * scaled.shape[1]
    for column, factor in zip(kept, found, strict=True):
        out[column] = float(factor)
    return out


def fit_chip(rig: Rig, seen: Mapping[str, Measured], memory: float, source: str) -> Chip:
    """Returns one process' share of the machine.

    Args:
        rig: what was measured.
        seen: by case.
        memory: bytes of the whole machine.
        source: machine and command.
    """
    tiny = seen["tiny products"].median / TINIES
    products = [(n, seen[f"products {n}"].median) for n in rig.counts]
    one = 2.0 * rig.edge**3
    [inverse] = least_squares([[n * one] for n, _ in products], [t - n * tiny for n, t in products])
    whole = seen["whole"].median - SPLIT_PRODUCTS * tiny
    split = {
        cut: {
            k: max((seen[f"{cut} in {k}"].median - k * SPLIT_PRODUCTS * tiny) / whole, 1.0)
            for k in rig.chunks
        }
        for cut in CUTS
    }
    # Part of the all-reduce's time that products beside it lose, see `beside_each_other`.
    lost, alone = 0.0, 0.0
    for nbytes in rig.mixes:
        mixed = np.array(seen[f"beside {nbytes}"].seconds)
        extra = np.median(mixed - np.array(seen[f"products {rig.mixed}"].seconds))
        talk = seen[f"alone {nbytes}"].median
        lost, alone = lost + float(extra) * talk, alone + talk**2
    part = min(max(lost / alone, 0.0), 0.99)
    if part == 0.99:
        print(f"{rig.name}: products beside an all-reduce lose all of its time: no overlap here")
    slow = 1 / (1 - part)
    return Chip(
        "one process' share of this machine",
        flops=1 / inverse,
        reached=1.0,
        memory=memory / np.prod(list(rig.mesh.values())),
        memory_rate=2 * 4 * (4 * rig.edge) ** 2 / seen["copy"].median,
        launch=tiny,
        beside=slow,
        split=split,
        waves=None,
        source=f"float32, all processes at once; {source}",
    )


def beside_each_other(compute: float, talk: float, slow: float) -> float:
    """Returns the simulated seconds of products and a collective that start together.

    Args:
        compute: seconds of the products alone.
        talk: seconds of the collective alone.
        slow: `Chip.beside`.
    """
    products = Task("products", 0, (COMPUTE,), compute, ())
    collective = Task("collective", 0, (COMPUTE + 1,), talk, (), site="reduce")
    return simulate([products, collective], slow).seconds


def fit_cluster(rig: Rig, seen: Mapping[str, Measured], memory: float, source: str) -> Cluster:
    """Returns the rig as a cluster, innermost links first; arguments as of `fit_chip`."""
    chip = fit_chip(rig, seen, memory, source)
    axes = list(rig.mesh)[::-1]
    nominal = [rig.mbit * 1e6 / 8 if rig.mbit and axis == "host" else None for axis in axes]
    names = [f"{rig.mbit} Mbit/s" if rate else "loopback" for rate in nominal]
    links = tuple(
        Link(name, rig.mesh[axis], 1.0, 1.0, 0.0, 0.0)
        for name, axis in zip(names, axes, strict=True)
    )
    where = Placement(Cluster(rig.name, chip, links), rig.mesh)
    fitted = []
    for level, axis in enumerate(axes):
        columns: list[list[float]] = []
        seconds = []
        for case in calibration(rig):
            if case.talk and case.talk.axes == (axis,) and case.work is None:
                wanted, how = case.talk.wanted(), Composition.parse(case.talk.how)
                rounds = sum(where.span((axis,)).rounds) * (2 if wanted.kind == "all_reduce" else 1)
                columns.append([1.0, rounds, cost.traffic(wanted, how, where)[level]])
                seconds.append(seen[case.name].median)
        start, hop, a_byte = least_squares(columns, seconds)
        rate = nominal[level] or 1 / a_byte
        link = dataclasses.replace(
            links[level], rate=rate, reached=1 / a_byte / rate, start=start, hop=hop, source=source
        )
        fitted.append(link)
    return Cluster(rig.name, chip, tuple(fitted))


def simulated(case: Case, where: Placement) -> tuple[float, float]:
    """Returns seconds, and bytes out of one host (of one level: out of one process)."""
    chip, compute, talk, sent = where.cluster.chip, 0.0, 0.0, 0.0
    if case.work:
        one = chip.launch + 2.0 * case.work.edge**3 / (chip.flops * chip.reached)
        compute = case.work.products * one
    if case.talk:
        wanted, how = case.talk.wanted(), Composition.parse(case.talk.how)
        talk = cost.seconds(wanted, how, where)
        sent = cost.traffic(wanted, how, where)[-1]
    together = case.work and case.talk and not case.after
    took = beside_each_other(compute, talk, chip.beside) if together else compute + talk
    return took, sent


def run(rig: Rig, hosts: Sequence[Host], rounds: int) -> tuple[Cluster, list[dict]]:
    """Measures a rig; returns it as a cluster, and rows of what was foretold for its targets."""
    print(f"{rig.name}: measuring {rounds} rounds", flush=True)
    seen = timed_cases.measure(rig.mesh, [*calibration(rig), *rig.targets], hosts, rounds)
    machine = report.provenance()["machine"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    source = f"experiments.calibrate, rig {rig.name} on {machine}"
    cluster = fit_cluster(rig, seen, memory, source)
    where = Placement(cluster, rig.mesh)
    rows = []
    for case in [*rig.targets, *(case for case in calibration(rig) if case.talk)]:
        took, sent = simulated(case, where)
        found = seen[case.name]
        rows.append(
            {
                "rig": rig.name,
                "case": case.name,
                "role": "foretold" if case in rig.targets else "fitted",
                "measured_s": found.median,
                "simulated_s": took,
                "ratio": took / found.median,
                "sent_bytes": found.sent,
                "simulated_bytes": sent,
                "fastest_s": min(found.seconds),
                "slowest_s": max(found.seconds),
                "rounds": rounds,
            }
        )
    return cluster, rows


def shown(cluster: Cluster) -> str:
    """Returns a cluster's numbers as text."""
    chip, lines = cluster.chip, []
    for link in cluster.links:
        lines.append(
            f"{link.name}: {link.rate * link.reached / 1e6:.1f} MB/s ({link.reached:.2f} of its "
            f"rate), start {1e3 * link.start:.2f} ms, hop {1e3 * link.hop:.2f} ms"
        )
    lines.append(
        f"process: {chip.flops / 1e9:.1f} Gflop/s, memory {chip.memory_rate / 1e9:.1f} GB/s, "
        f"launch {1e6 * chip.launch:.1f} us, {chip.beside:.2f} times slower beside a collective"
    )
    for cut, table in chip.split.items():
        lines.append(f"  {cut}: " + ", ".join(f"{x:.2f} in {k}" for k, x in table.items()))
    return "\n".join(lines)


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row as the table shows it."""
    return {
        **row,
        "measured": f"{row['measured_s']:.4f} s",
        "simulated": f"{row['simulated_s']:.4f} s",
        "sent": f"{row['sent_bytes'] / 1e6:.2f} MB",
        "simulated sent": f"{row['simulated_bytes'] / 1e6:.2f} MB",
    }


def stop(*_: object) -> None:
    """Ends the script, once, so that its processes and hosts are removed in peace."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.exit("Error: stopped.")


def main(args: flags.FlagValues) -> None:
    """Measures every rig, writes clusters and rows."""
    jax.config.update("jax_platforms", "cpu")
    if args.worker:
        timed_cases.work_as(args.rank, pathlib.Path(args.worker))
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    out, rows = pathlib.Path(args.out), []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for rig in (SMOKE,) if args.smoke else (PAIR, SQUARE):
            if rig.mbit is None:
                cluster, found = run(rig, (HERE,), args.rounds)
            else:
                with two_hosts(rig.mbit) as hosts:
                    cluster, found = run(rig, hosts, args.rounds)
            # The last one, of two levels, is what plans are for.
            cluster.save(out / f"this_machine_{rig.name}.json")
            cluster.save(out / "this_machine.json")
            print(shown(cluster), flush=True)
            rows += found
    except (OSError, RuntimeError) as error:
        sys.exit(f"Error: {error}")
    folder = out if args.smoke else pathlib.Path(args.rows)
    report.write_csv(folder / "network.csv", rows)
    print(report.table([readable(row) for row in rows], COLUMNS))
    for role in ("foretold", "fitted"):
        ratios = [row["ratio"] for row in rows if row["role"] == role]
        near = sum(0.8 <= ratio <= 1.2 for ratio in ratios)
        print(f"simulated within 20% of measured: {near} of {len(ratios)} {role} cases")


if __name__ == "__main__":
    command.run(main, define_flags)
