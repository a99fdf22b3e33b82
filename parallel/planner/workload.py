"""One training step of a transformer, in numbers: products, collectives, memory.

Everything is of one device: what it computes for a layer and a micro-batch, what it sends, what it
keeps. `planner.graph` lays the step out as tasks. Products are counted as in the scaling book's
chapter on transformers; activations as in Korthikanti et al. 2022 (arXiv 2205.05198), with
attention that keeps no scores.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from parallel.partition import Collective, Kind
from parallel.plan import KINDS
from parallel.planner.choice import Choice
from parallel.planner.cluster import Placement

WEIGHT, GRADIENT, STATE = 2, 4, 12  # bytes of a value: bfloat16; float32; master weight and Adam's
USABLE = 0.9  # part of a chip's memory; the rest is the runtime's, or lost between arrays (assumed)


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    Attributes:
        name: for tables.
        layers: L.
        width: D.
        hidden: F, width of the feed-forward layer.
        heads: H, query heads.
        kv_heads: K.
        vocab: V.
        gated: whether the feed-forward layer has a gate (three matrices instead of two).
    """

    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    gated: bool

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        return self.attention_in + self.width * self.width

    @property
    def attention_in(self) -> int:
        """Weights that make queries, keys and values."""
        head = self.width // self.heads
        return self.width * head * (self.heads + 2 * self.kv_heads)

    @property
    def feed_forward_in(self) -> int:
        """Weights of the feed-forward layer's first product."""
        return self.width * self.hidden * (2 if self.gated else 1)

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        out = self.width * self.width + self.width * self.hidden
        return self.attention_in + self.feed_forward_in + out

    @property
    def size(self) -> int:
        """Weights in all, table and head apart."""
        return self.layers * self.layer + 2 * self.vocab * self.width


@dataclasses.dataclass(frozen=True)
class Job:
    """A step on a mesh.

    Attributes:
        model: what is trained.
        tokens: T, of a sequence.
        sequences: of the whole batch.
        micro_batches: parts that every device takes its share of the batch in.
        shard: mesh axes over which weights, gradients or state are kept in shards.
        zero: what is kept in shards: 1 the optimiser's state, 2 gradients, 3 weights; 0 nothing.
        schedule: of a pipeline.
        again: whether the backward pass computes a layer's forward pass again.
        clips: whether the optimiser needs the norm of all gradients before it begins.
    """

    model: Model
    tokens: int
    sequences: int
    micro_batches: int
    shard: tuple[str, ...]
    zero: Literal[0, 1, 2, 3]
    schedule: Literal["gpipe", "1f1b"]
    again: bool
    clips: bool


@dataclasses.dataclass(frozen=True)
class Part:
    """Half a layer, or a whole one where nothing is sent between its halves.

    Attributes:
        name: for pictures.
        into: seconds of the first products, forward.
        between: seconds of attention, norms and activations, forward.
        out: seconds of the last product, forward.
        into_shape: rows and columns of the first products' output.
        out_shape: rows and columns of the last product's output.
    """

    name: str
    into: float
    between: float
    out: float
    into_shape: tuple[int, int]
    out_shape: tuple[int, int]


class Step:
    """What one device has to do for a job on a placed mesh; see the module."""

    def __init__(self, job: Job, where: Placement):
        """Checks that the job divides.

        Raises:
            ValueError: naming what does not divide, and by what.
        """
        self.job, self.where, self.model = job, where, job.model
        sizes = where.sizes
        self.tensor, self.pipe = sizes.get("tensor", 1), sizes.get("pipe", 1)
        self.batch_axes = tuple(a for a in ("host", "data", "fsdp") if a in sizes)
        stray = set(job.shard) - set(self.batch_axes)
        if stray or bool(job.shard) != bool(job.zero):
            raise ValueError(
                f"zero = {job.zero} with shards over {job.shard}: name some of the mesh's "
                f"{self.batch_axes} for 1, 2 or 3, and none for 0."
            )
        self.replicas = tuple(axis for axis in self.batch_axes if axis not in job.shard)
        model, parts = job.model, math.prod(sizes[axis] for axis in self.batch_axes)
        for value, name, by, of in (
            (model.layers, "layers", self.pipe, "pipe"),
            (model.heads, "heads", self.tensor, "tensor"),
            (model.kv_heads, "kv heads", self.tensor, "tensor"),
            (model.vocab, "vocabulary", self.tensor, "tensor"),
            (model.hidden, "feed-forward width", self.tensor, "tensor"),
            (job.tokens, "tokens", self.tensor, "tensor"),
            (job.sequences, "sequences", parts * job.micro_batches, "data x micro-batches"),
        ):
            if value % by:
                raise ValueError(
                    f"{model.name}: {value} {name} do not divide by {of} = {by}: change one."
                )
        self.layers = model.layers // self.pipe
        self.rows = job.sequences * job.tokens // parts // job.micro_batches
        self.sharded = math.prod(sizes[axis] for axis in job.shard)

    def resized(self, layers: int, micro_batches: int) -> "Step":
        """Returns the step with so many layers a stage and micro-batches, each of the same size."""
        job, parts = self.job, self.job.sequences // self.job.micro_batches
        model = dataclasses.replace(self.model, layers=layers * self.pipe)
        job = dataclasses.replace(
            job, model=model, micro_batches=micro_batches, sequences=parts * micro_batches
        )
        return Step(job, self.where)

    # ------------------------------------------------------------------ computation

    def product(self, rows: float, inner: float, columns: float) -> float:
        """Returns the seconds of a bfloat16 product: by its operations, or its bytes."""
        chip = self.where.cluster.chip
        nbytes = WEIGHT * (rows * inner + inner * columns + rows * columns)
        return max(
            2 * rows * inner * columns / (chip.flops * chip.reached), nbytes / chip.memory_rate
        )

    def passes(self, nbytes: float) -> float:
        """Returns the seconds that bytes need through memory."""
        return nbytes / self.where.cluster.chip.memory_rate

    def parts(self) -> list[Part]:
        """Returns a layer: its two halves if tokens are gathered between them, else one part."""
        model, tensor, rows = self.model, self.tensor, self.rows
        width, chip = model.width, self.where.cluster.chip
        split = rows // tensor
        qkv = model.attention_in // width // tensor
        wide = model.feed_forward_in // width // tensor
        # Causal scores and their sum: half of 2 x 2 x rows x tokens x width operations.
        scores = 2 * rows * self.job.tokens * width / tensor / (chip.flops * chip.reached)
        norm = self.passes(WEIGHT * 4 * split * width)
        attention = Part(
            "attention",
            self.product(rows, width, qkv),
            scores + norm,
            self.product(rows, width // tensor, width),
            (rows, qkv),
            (rows, width),
        )
        act = norm + self.passes(WEIGHT * 2 * rows * wide)
        feed = Part(
            "feed-forward",
            self.product(rows, width, wide),
            act,
            self.product(rows, model.hidden // tensor, width),
            (rows, wide),
            (rows, width),
        )
        if tensor > 1:
            return [attention, feed]
        between = attention.between + attention.out + feed.into + feed.between
        return [
            Part("layer", attention.into, between, feed.out, attention.into_shape, feed.out_shape)
        ]

    def head(self) -> float:
        """Returns the seconds of the forward head and loss, on the last stage."""
        columns = self.model.vocab / self.tensor
        return self.product(self.rows, self.model.width, columns) + self.passes(
            2 * GRADIENT * self.rows * columns
        )

    def update(self, weights: float) -> float:
        """Returns the optimiser's seconds for so many weights of this device."""
        return self.passes((2 * STATE + GRADIENT + WEIGHT) * weights)

    # ------------------------------------------------------------------ communication

    @property
    def layer_weights(self) -> float:
        """Weights of one layer on one device, all shards together."""
        return self.model.layer / self.tensor

    @property
    def outer_weights(self) -> float:
        """Weights of table or head on one device, all shards together."""
        return self.model.vocab * self.model.width / self.tensor

    def wanted(self, site: str) -> Collective | None:
        """Returns what a layer or a micro-batch sends at one of `plan.KINDS`, if anything."""
        if site in ("gather", "scatter", "reduce"):
            axes = self.replicas if site == "reduce" else self.job.shard
            return getattr(self, site)(self.layer_weights) if axes else None
        if site == "send":
            return self.passed() if self.pipe > 1 else None
        if self.tensor == 1:
            return None
        return self.vocabulary() if site == "loss" else self.tokens(KINDS[site])

    def gather(self, weights: float) -> Collective:
        """Returns the gather of weights over their shards."""
        return self._collective("all_gather", self.job.shard, weights * WEIGHT, "bfloat16")

    def scatter(self, weights: float) -> Collective:
        """Returns the reduce-scatter of gradients over their shards."""
        return self._collective("reduce_scatter", self.job.shard, weights * GRADIENT, "float32")

    def reduce(self, weights: float) -> Collective:
        """Returns the all-reduce of (sharded) gradients over the replicas."""
        nbytes = weights * GRADIENT / self.sharded
        return self._collective("all_reduce", self.replicas, nbytes, "float32")

    def tokens(self, kind: Kind) -> Collective:
        """Returns the gather or scatter of a micro-batch's activations over `tensor`."""
        return self._collective(kind, ("tensor",), self.activations * self.tensor, "bfloat16")

    def vocabulary(self) -> Collective:
        """Returns the all-reduce of one float32 number a token of a micro-batch over `tensor`."""
        return self._collective("all_reduce", ("tensor",), self.rows * GRADIENT, "float32")

    def passed(self) -> Collective:
        """Returns the send of a micro-batch's activations to the next stage."""
        return self._collective("send", ("pipe",), self.activations, "bfloat16")

    @property
    def activations(self) -> float:
        """Bytes of one micro-batch's activations between layers, on one device."""
        return self.rows * self.model.width * WEIGHT / self.tensor

    @staticmethod
    def _collective(kind: Kind, axes: tuple[str, ...], nbytes: float, dtype: str) -> Collective:
        return Collective(kind, axes, math.ceil(nbytes), dtype)

    # ------------------------------------------------------------------ memory

    def memory(self, choice: Choice) -> Mapping[str, float]:
        """Returns bytes by what they hold, on the first stage, which keeps most micro-batches.

        Args:
            choice: what is gathered ahead, kept whole, put off or interleaved.
        """
        job, shards = self.job, self.sharded
        outer = 2 if self.pipe == 1 else 1  # table and head, or the table
        mine = self.layers * self.layer_weights + outer * self.outer_weights
        gathered = (1 + choice.ahead) * self.layer_weights + self.outer_weights
        kept = mine / shards if job.zero == 3 else mine
        # Two buckets of gradients may wait for their links, see `graph`.
        waiting = 2 * min(choice.bucket, self.layers) * self.layer_weights + self.outer_weights
        whole_gradients = job.zero < 2 or (choice.when == "end" and job.micro_batches > 1)
        flying = self.pipe if job.schedule == "1f1b" or self.pipe == 1 else job.micro_batches
        strands = 1 + choice.strands
        flying = min(flying * strands, job.micro_batches)
        # Values kept of a layer, a token and a channel (Korthikanti et al., without scores).
        whole = self.rows * self.model.width * 34 / self.tensor
        layer = self.activations if job.again else whole
        # Computed again: this layer, and two more whose gradients of weights are put off.
        again = whole * (3 if choice.apart else 1) * strands if job.again else 0.0
        return {
            "state": STATE * mine / shards,
            "weights": WEIGHT * (kept + (gathered if job.zero == 3 else 0)),
            "gradients": GRADIENT * (mine if whole_gradients else mine / shards + waiting),
            "activations": flying * self.layers * layer + again,
            "logits": 2 * GRADIENT * strands * self.rows * self.model.vocab / self.tensor,
        }

    def fits(self, choice: Choice) -> bool:
        """Says whether a choice leaves a tenth of the memory free."""
        return sum(self.memory(choice).values()) <= USABLE * self.where.cluster.chip.memory

    def check_memory(self, choice: Choice) -> None:
        """Refuses what does not fit.

        Raises:
            ValueError: naming the largest part.
        """
        if not self.fits(choice):
            parts, room = self.memory(choice), USABLE * self.where.cluster.chip.memory
            most = max(parts, key=lambda name: parts[name])
            raise ValueError(
                f"{self.model.name} on {self.where.cluster.name} {dict(self.where.sizes)} needs "
                f"{sum(parts.values()) / 1e9:.0f} GB of {room / 1e9:.0f} a device, "
                f"{parts[most] / 1e9:.0f} of it {most}: use more devices, shards (zero), "
                "micro-batches, or compute again."
            )
