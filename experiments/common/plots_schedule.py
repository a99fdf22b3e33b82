"""Pictures of simulated steps: who does what when, and what plans gain."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no display
import matplotlib.pyplot as plt

from parallel.planner.simulate import Timeline

COLORS = {
    "": "#33475b",
    "gather": "#2a9d5c",
    "scatter": "#e08d3c",
    "reduce": "#b5473c",
    "column": "#5b8ad6",
    "row": "#8d6bc4",
    "table": "#c2a83e",
    "head": "#3fa7a0",
    "loss": "#c76a9b",
    "send": "#888888",
}
STEPS = (("buckets", "#c9ced6"), ("prefetch", "#5b8ad6"), ("plan", "#2a9d5c"))


def gantt(
    path: pathlib.Path, title: str, shown: Mapping[str, Timeline], levels: Sequence[str]
) -> None:
    """Draws the first stage of some timelines under each other, on one scale.

    Args:
        path: PNG to write.
        title: of the picture; must say that it is simulated.
        shown: timelines by name.
        levels: names of the link levels, innermost first.
    """
    figure, every = plt.subplots(
        len(shown), 1, figsize=(13, 1.2 + 1.7 * len(shown)), sharex=True, layout="constrained"
    )
    names = ["computes", *levels]
    for axes, (name, timeline) in zip(every, shown.items(), strict=True):
        for task, start, end in zip(timeline.tasks, timeline.start, timeline.end, strict=True):
            if task.stage:
                continue
            for resource in task.resources:
                axes.barh(
                    resource,
                    (end - start) * 1e3,
                    left=start * 1e3,
                    height=0.8,
                    color=COLORS[task.site],
                    edgecolor="white",
                    linewidth=0.4,
                )
        exposed = timeline.exposed(0) * 1e3
        axes.set_title(
            f"{name}, simulated: {timeline.seconds * 1e3:.1f} ms, {exposed:.1f} of it only sending",
            loc="left",
            fontsize=10,
        )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
    every[-1].set_xlabel("ms, simulated")
    sites = {task.site for timeline in shown.values() for task in timeline.tasks}
    labels = {"": "product"}
    figure.legend(
        handles=[
            plt.Rectangle((0, 0), 1, 1, color=color, label=labels.get(site, site))
            for site, color in COLORS.items()
            if site in sites
        ],
        loc="outside right upper",
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def gains(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws the speed of every step over the blocking one, against what it sends.

    Args:
        path: PNG to write.
        rows: of `centauri_table`.
    """
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    sent = [row["sent_over_computed"] for row in rows]
    for name, color in STEPS:
        speed = [row["blocking"] / row[name] for row in rows]
        axes.scatter(sent, speed, s=18, color=color, label=name)
    limit = [row["blocking"] / row["bound"] for row in rows]
    axes.scatter(sent, limit, s=26, marker="_", color="#b5473c", label="bound")
    axes.axvspan(0.25, 1.0, color="#2a9d5c", alpha=0.08)
    axes.set_xscale("log")
    axes.set_xlabel("communication over computation of the blocking step")
    axes.set_ylabel("blocking step / step, both simulated")
    axes.set_title("Simulated gains over the blocking step, one point a model, hybrid and cluster")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
