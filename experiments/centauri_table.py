"""What planned communication should gain: models x hybrids x clusters, all of it simulated.

    python -m experiments.centauri_table [--cluster a100:4x8] [--gantt] [--show]

Every row is one model on one mesh of one cluster: the simulated seconds of the blocking step, of
fixed buckets (best size), of one-layer prefetch and of the plan; the bound, the plan's share of
what is attainable, and what is lost without each dimension of the partition space and each tier of
the schedule. Weights and activations are sent in bfloat16, gradients in float32 (Megatron's habit;
more than FSDP's usual bfloat16). What does not fit a device's memory is left out, and counted.
Rows go to experiments/results/centauri.csv, where those of clusters that --cluster does not name
stay as they are; notes in --out let the same command go on where it stopped. Pictures:
centauri_gains.png beside the rows; in --out the blocking and the planned schedule of one job, drawn
and as traces for Perfetto.
"""

import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from absl import flags
from tqdm import tqdm

from experiments.common import command, plots_schedule, report
from experiments.common.report import RESULTS
from parallel.planner.choice import Choice
from parallel.planner.cluster import Cluster, Placement
from parallel.planner.graph import build
from parallel.planner.predict import is_short
from parallel.planner.schedule import DIMENSIONS, TIERS, Planned, baselines, plan, searched
from parallel.planner.simulate import simulate
from parallel.planner.workload import Job, Model, Step

TOKENS = 2048
# Sizes of GPT-3 (Brown et al. 2020, table 2.1; vocabulary padded to a multiple of 128 x 8) and of
# LLaMA (Touvron et al. 2023, table 2).
MODELS = (
    Model("GPT-3 1.3B", 24, 2048, 8192, 16, 16, 51200, False),
    Model("GPT-3 6.7B", 32, 4096, 16384, 32, 32, 51200, False),
    Model("GPT-3 13B", 40, 5120, 20480, 40, 40, 51200, False),
    Model("GPT-3 175B", 96, 12288, 49152, 96, 96, 51200, False),
    Model("LLaMA 7B", 32, 4096, 11008, 32, 32, 32000, True),
    Model("LLaMA 13B", 40, 5120, 13824, 40, 40, 32000, True),
    Model("LLaMA 33B", 60, 6656, 17920, 52, 52, 32000, True),
    Model("LLaMA 65B", 80, 8192, 22016, 64, 64, 32000, True),
)
CLUSTERS = (
    "a100:4x8",
    "a100-25g:4x8",
    "v5e:16x16",
    "h100:16x8",
    "a100:128x8",
    "v6e:16x16",
    "h200:4x8",
    "v4:4x4x8",
    "v5p:4x8x8",
    "v5e:2*16x16",
)
# Seconds that the blocking step only sends, over those that it computes.
RANGES = (
    ("below 0.25", 0.0, 0.25),
    ("0.25 to 1", 0.25, 1.0),
    ("1 to 4", 1.0, 4.0),
    ("4 and more", 4.0, float("inf")),
)
COLUMNS = (
    "cluster",
    "model",
    "hybrid",
    "blocking",
    "buckets",
    "prefetch",
    "plan",
    "bound",
    "share",
    "kind",
)


@dataclasses.dataclass(frozen=True)
class Hybrid:
    """How a model is spread.

    Attributes:
        name: for the table.
        tensor: devices along `tensor`; for a torus the same.
        pipe: pipeline stages.
        shard: axes of the shards; "host" is there only where the cluster has two levels.
        zero: see `workload.Job`.
        micro: micro-batches.
    """

    name: str
    tensor: int
    pipe: int
    shard: tuple[str, ...]
    zero: Literal[0, 1, 2, 3]
    micro: int


HYBRIDS = (
    Hybrid("FSDP+DP", 1, 1, ("fsdp",), 3, 2),
    Hybrid("ZeRO-3 across nodes", 1, 1, ("host", "fsdp"), 3, 2),
    Hybrid("TP+SP", 8, 1, ("host", "data"), 1, 4),
    Hybrid("TP+PP+DP", 8, 2, ("data",), 1, 8),
    Hybrid("PP+ZeRO", 1, 4, ("host", "data"), 1, 8),
)


def define_flags() -> None:
    """Declares this script's flags."""
    flags.DEFINE_string("rows", str(RESULTS), "Folder of centauri.csv; with --smoke it is --out.")
    flags.DEFINE_string("out", "out/centauri", "Folder for traces.")
    flags.DEFINE_bool("show", False, "Only print and draw the rows that are there.")
    flags.DEFINE_bool("gantt", False, "Only draw one job's schedules.")
    flags.DEFINE_multi_string("cluster", [], "Only these clusters; repeat for several.")
    flags.DEFINE_bool("smoke", False, "Three rows.")


def mesh_of(cluster: Cluster, hybrid: Hybrid) -> dict[str, int]:
    """Returns the mesh of a hybrid on a cluster: tensor inside, replicas outside.

    Raises:
        ValueError: if the cluster's size does not divide.
    """
    inner = cluster.links[0].size
    group = hybrid.tensor * hybrid.pipe
    if cluster.size % group or (len(cluster.links) == 1 and inner % group):
        raise ValueError(f"{cluster.name} has {cluster.size} devices, no multiple of {group}.")
    mesh: dict[str, int] = {}
    if "fsdp" in hybrid.shard:
        nodes = cluster.size // inner
        mesh = {"host": nodes, "fsdp": inner} if nodes > 1 else {"fsdp": inner}
    else:
        # Tensor groups inside; their stages beside them, or across nodes; replicas outermost.
        mesh = {"data": cluster.size // group}
        nodes = cluster.size // inner
        if group < inner and nodes > 1:
            mesh = {"host": nodes, "data": inner // group}
    if hybrid.pipe > 1:
        mesh["pipe"] = hybrid.pipe
    if hybrid.tensor > 1:
        mesh["tensor"] = hybrid.tensor
    return mesh


def step_of(model: Model, cluster: Cluster, hybrid: Hybrid) -> Step:
    """Returns a step with one sequence a device and micro-batch, kept whole if there is room.

    Raises:
        ValueError: if the model does not divide, or does not fit.
    """
    # As many stages as the model needs, none where it is not to be a pipeline.
    stages = [hybrid.pipe * more for more in ((1, 2, 4, 8) if hybrid.pipe > 1 else (1,))]
    refused = ""
    for pipe, again in itertools.product(stages, (False, True)):
        try:
            step = _step(model, cluster, dataclasses.replace(hybrid, pipe=pipe), again)
            step.check_memory(Choice(when="each" if hybrid.zero >= 2 else "end"))
        except ValueError as error:
            refused = refused or str(error)
        else:
            return step
    raise ValueError(refused)


def _step(model: Model, cluster: Cluster, hybrid: Hybrid, again: bool) -> Step:
    mesh = mesh_of(cluster, hybrid)
    shard = tuple(axis for axis in hybrid.shard if axis in mesh)
    replicas = cluster.size // (hybrid.tensor * hybrid.pipe)
    sequences = replicas * hybrid.micro * (2 if hybrid.tensor == 1 else 4)
    job = Job(model, TOKENS, sequences, hybrid.micro, shard, hybrid.zero, "1f1b", again, True)
    return Step(job, Placement(cluster, mesh))


def jobs(clusters: tuple[str, ...]) -> Iterator[tuple[str, Model, Hybrid]]:
    """Yields every combination."""
    for cluster in clusters:
        for model in MODELS:
            for hybrid in HYBRIDS:
                yield cluster, model, hybrid


def row_of(cluster: str, model: Model, hybrid: Hybrid) -> dict[str, Any] | str:
    """Returns one row, or why there is none."""
    try:
        step = step_of(model, Cluster.parse(cluster), hybrid)
    except ValueError as error:
        return str(error)
    clock = time.perf_counter()
    best = plan(step)
    took = time.perf_counter() - clock
    less = {
        **{f"without {name}": {"dimensions": DIMENSIONS - {name}} for name in sorted(DIMENSIONS)},
        **{f"without {name} tier": {"tiers": TIERS - {name}} for name in sorted(TIERS)},
    }
    return {
        "cluster": cluster,
        "model": model.name,
        "hybrid": hybrid.name,
        "mesh": " ".join(f"{axis}={size}" for axis, size in step.where.sizes.items()),
        "kind": "simulated",
        **seconds(best),
        **{name: searched(step, **some)[1].seconds for name, some in less.items()},
        "whole": is_short(step),  # else extended from short steps, see parallel.planner.predict
        "recomputed": step.job.again,
        "chosen": best.name,
        "gather": str(best.choice.gather or "-"),
        "scatter": str(best.choice.scatter or "-"),
        "reduce": str(best.choice.reduce or "-"),
        "column": str(best.choice.column),
        "row": str(best.choice.row),
        "ahead": best.choice.ahead,
        "when": best.choice.when,
        "bucket": best.choice.bucket,
        "strands": best.choice.strands,
        "order": best.choice.order,
        "planned_in_s": took,
    }


def seconds(best: Planned) -> Mapping[str, float]:
    """Returns what a row says of time."""
    blocking = best.baselines["blocking"]
    return {
        "blocking": blocking.seconds,
        "buckets": best.baselines["buckets"].seconds,
        "prefetch": best.baselines["prefetch"].seconds,
        "plan": best.result.seconds,
        "bound": best.bound,
        "share": best.share,
        "sent_over_computed": blocking.exposed / blocking.computing,
        "exposed_blocking": blocking.exposed,
        "exposed_plan": best.result.exposed,
    }


def table(args: flags.FlagValues) -> list[dict[str, Any]]:
    """Returns all rows, those of an earlier run of the same commit from its notes."""
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    notes = out / f"rows-{report.provenance()['commit']}.jsonl"
    known: dict[str, Any] = {}
    if notes.exists():
        for line in notes.read_text(encoding="utf-8").splitlines():
            known.update(json.loads(line))
    every = list(jobs(tuple(args.cluster) or CLUSTERS))[: 3 if args.smoke else None]
    with notes.open("a", encoding="utf-8") as file, tqdm(every, unit="row") as bar:
        for cluster, model, hybrid in bar:
            key = f"{cluster} | {model.name} | {hybrid.name}"
            bar.set_postfix_str(key)
            if key not in known:
                known[key] = row_of(cluster, model, hybrid)
                file.write(json.dumps({key: known[key]}) + "\n")
                file.flush()
    wanted = [
        known[f"{cluster} | {model.name} | {hybrid.name}"] for cluster, model, hybrid in every
    ]
    refused = [row for row in wanted if isinstance(row, str)]
    print(f"{len(refused)} of {len(wanted)} combinations do not divide or do not fit")
    return [row for row in wanted if not isinstance(row, str)]


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns medians over rows, by how much the blocking step sends for what it computes."""
    out = []
    for name, least, most in RANGES:
        some = [row for row in rows if least <= row["sent_over_computed"] < most]
        if not some:
            continue
        gains = [row["blocking"] / row["plan"] for row in some]
        best = [min(row[name] for name in ("blocking", "buckets", "prefetch")) for row in some]
        over = [one / row["plan"] for one, row in zip(best, some, strict=True)]
        lost = {
            name: statistics.median(row[name] / row["plan"] for row in some)
            for name in some[0]
            if name.startswith("without ")
        }
        out.append(
            {
                "sent / computed": name,
                "rows": len(some),
                "over blocking": statistics.median(gains),
                "least": min(gains),
                "most": max(gains),
                "over best baseline": statistics.median(over),
                "share": statistics.median(row["share"] for row in some),
                **lost,
            }
        )
    return out


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads rows of an earlier run.

    Raises:
        ValueError: if there are none.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: leave out --show to make it.")

    def value(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    return [{name: value(text) for name, text in row.items()} for row in report.read_csv(path)]


def others(path: pathlib.Path, clusters: Sequence[str]) -> list[dict[str, str]]:
    """Returns rows of an earlier run that this one does not make again."""
    if not clusters or not path.exists():
        return []
    return [row for row in report.read_csv(path) if row["cluster"] not in clusters]


def draw(out: pathlib.Path) -> None:
    """Draws and saves the blocking and the planned schedule of one job, two layers of it."""
    step = step_of(MODELS[4], Cluster.parse("a100:4x8"), HYBRIDS[1]).resized(2, 1)
    best = plan(step)
    beside = step.where.cluster.chip.beside
    levels = [link.name for link in step.where.cluster.links]
    shown = {}
    for name, choice in (("blocking", baselines(step)["blocking"]), ("plan", best.choice)):
        shown[name] = simulate(build(step, choice), beside)
        shown[name].save_trace(out / f"{name}.trace.json", levels)
    title = f"{step.model.name}, ZeRO-3 over {step.where.cluster.name}, two layers (simulated)"
    plots_schedule.gantt(out / "gantt.png", title, shown, levels)


def main(args: flags.FlagValues) -> None:
    """Makes the table, or the pictures of one job."""
    out = pathlib.Path(args.out)
    rows = out if args.smoke else pathlib.Path(args.rows)
    try:
        if args.show:
            show(rows, read(rows / "centauri.csv"))
            return
        out.mkdir(parents=True, exist_ok=True)
        draw(out)
        print(f"wrote {out}/gantt.png and traces for Perfetto")
        if args.gantt:
            return
        path = rows / "centauri.csv"
        kept = others(path, args.cluster)
        report.write_csv(path, table(args), kept)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    show(rows, read(path))


def show(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows and their summary, and draws them."""
    plots_schedule.gains(folder / "centauri_gains.png", rows)
    print("all seconds are simulated")
    print(report.table(rows, COLUMNS))
    lines = summary(rows)
    print("\nmedians of simulated ratios")
    print(report.table(lines, list(lines[0])))


if __name__ == "__main__":
    command.run(main, define_flags)
