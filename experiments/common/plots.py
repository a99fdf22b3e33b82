"""Pictures of decoding: the first token trees, and how many drafts each step accepted."""

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import matplotlib

matplotlib.use("Agg")  # files only, no display
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from models.tokenizer import Tokenizer
from spec.decode import Trace
from spec.generate import Completion
from spec.metrics import total
from spec.tree import TokenTree

ACCEPTED, REJECTED, ROOT = "#2a9d5c", "#c9ced6", "#33475b"
SHOWN = 4


def plot_run(
    path: pathlib.Path,
    title: str,
    steps: Iterable[Trace],
    answers: Sequence[Completion],
    tokenizer: Tokenizer,
) -> None:
    """Draws the first steps that proposed drafts, and the accept-length histogram.

    Args:
        path: PNG to write.
        title: which prompt the trees belong to.
        steps: traces of one prompt (batch row 0), in order; read as far as they are drawn.
        answers: all completions, for the histogram.
        tokenizer: to put text on the nodes.
    """
    drafting = ((i, step) for i, step in enumerate(steps) if step.tree.valid_BN[0, 1:].any())
    grown = [*itertools.islice(drafting, SHOWN)]
    heights = [0.7 + 0.33 * _leaves(step) for _, step in grown]
    figure = plt.figure(figsize=(12, sum(heights) + 3.2), layout="constrained")
    grid = figure.add_gridspec(len(grown) + 1, 1, height_ratios=[*heights, 3.2])
    for line, (index, step) in enumerate(grown):
        axes = figure.add_subplot(grid[line])
        _draw_tree(axes, step, tokenizer)
        axes.set_title(f"{title}, target step {index + 1}", loc="left", fontsize=10)
    _histogram(figure.add_subplot(grid[-1]), answers)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _leaves(step: Trace) -> int:
    """Lines that the drawing takes: one a leaf, and one for the token after the path."""
    valid = np.flatnonzero(np.asarray(step.tree.valid_BN)[0])
    return 1 + len(set(valid.tolist()) - set(np.asarray(step.tree.parent_BN)[0, valid].tolist()))


def _draw_tree(axes: Axes, step: Trace, tokenizer: Tokenizer) -> None:
    tree: TokenTree = step.tree
    parent, depth, token, valid = (
        np.asarray(array)[0].tolist()
        for array in (tree.parent_BN, tree.depth_BN, tree.token_BN, tree.valid_BN)
    )
    path = np.asarray(step.accepted.node_BP)[0, : int(step.accepted.count_B[0])].tolist()
    nodes = [node for node in range(len(valid)) if valid[node]]
    # The token that the target adds itself hangs at the path's end, outlined.
    bonus = len(parent)
    parent.append(path[-1])
    depth.append(depth[path[-1]] + 1)
    token.append(int(step.accepted.bonus_B[0]))
    nodes.append(bonus)
    height = _heights(parent, nodes)
    for node in nodes[1:]:
        up, on = parent[node], node in path or node == bonus
        axes.plot(
            [depth[up], depth[node]],
            [height[up], height[node]],
            color=ACCEPTED if on else REJECTED,
            linewidth=2.2 if on else 1.2,
            linestyle="--" if node == bonus else "-",
            zorder=1,
        )
    for node in nodes:
        fill = ROOT if node == 0 else ACCEPTED if node in path else REJECTED
        if node == bonus:
            _label(axes, depth[node], height[node], tokenizer, token[node], "white", ACCEPTED)
        else:
            _label(axes, depth[node], height[node], tokenizer, token[node], fill)
    axes.set_xlim(-0.4, max(8.6, max(depth[node] for node in nodes) + 0.5))
    axes.set_ylim(min(height.values()) - 0.6, 0.6)
    axes.axis("off")


def _heights(parent: list[int], nodes: list[int]) -> dict[int, float]:
    """Leaves on lines of their own, in depth-first order; inner nodes level with a first child."""
    children: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes[1:]:
        children[parent[node]].append(node)
    height: dict[int, float] = {}
    lines = 0

    def visit(node: int) -> float:
        nonlocal lines
        if not children[node]:
            height[node] = -float(lines)
            lines += 1
        else:
            height[node] = max([visit(child) for child in children[node]])
        return height[node]

    visit(0)
    return height


def _label(
    axes: Axes, x: float, y: float, tokenizer: Tokenizer, token: int, fill: str, edge: str = "none"
) -> None:
    text = tokenizer.token_bytes(int(token)).decode("utf-8", errors="replace")
    text = text or tokenizer.backend.id_to_token(int(token)) or str(token)  # special tokens
    shown = text.replace(" ", "␣").replace("\n", "⏎").replace("$", r"\$")
    dark = fill in (ACCEPTED, ROOT)
    axes.text(
        x,
        y,
        shown if len(shown) <= 14 else shown[:13] + "…",
        ha="center",
        va="center",
        fontsize=8,
        color="white" if dark else "black",
        bbox={"boxstyle": "round,pad=0.3", "facecolor": fill, "edgecolor": edge},
        zorder=2,
    )


def _histogram(axes: Axes, answers: Sequence[Completion]) -> None:
    whole = total(answer.metrics for answer in answers)
    counts = whole.accept_histogram
    bars = axes.bar(range(len(counts)), counts, color=ACCEPTED, width=0.7)
    axes.bar_label(bars, fontsize=8)
    axes.set_xlabel("accepted drafts in a target step")
    axes.set_ylabel("target steps")
    axes.set_xticks(range(len(counts)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"All prompts: {whole.tokens} tokens in {whole.steps} target steps, "
        f"{whole.tokens_per_step:.2f} tokens per step",
        loc="left",
        fontsize=10,
    )


def plot_curves(
    path: pathlib.Path,
    training: Mapping[str, Sequence[float]],
    evaluation: Mapping[str, Sequence[float]],
) -> None:
    """Draws the loss by step and, below, every figure of the evaluations.

    Args:
        path: PNG to write.
        training: columns `step` and `loss` of a run.
        evaluation: column `step` and the figures; may be empty.
    """
    figures = [name for name in evaluation if name != "step"]
    fig, axes = plt.subplots(
        1 + len(figures), 1, figsize=(7, 2.6 * (1 + len(figures))), sharex=True
    )
    axes = np.atleast_1d(axes)
    loss = np.asarray(training["loss"])
    axes[0].plot(training["step"], loss, color=ROOT, alpha=0.3, linewidth=0.8)
    # A running mean over a fiftieth of the run, so that the trend shows through the noise.
    window = max(len(loss) // 50, 1)
    smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
    axes[0].plot(training["step"][window - 1 :], smooth, color=ROOT)
    axes[0].set_ylabel("loss, nats a token")
    for axis, name in zip(axes[1:], figures, strict=True):
        axis.plot(evaluation["step"], evaluation[name], color=ACCEPTED, marker="o", markersize=3)
        axis.set_ylabel(name.replace("_", " "))
    axes[-1].set_xlabel("step")
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)
