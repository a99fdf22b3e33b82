"""Which composition every collective of a training step uses: readable, serialisable, checked.

A plan says nothing of sizes or machines. Sites, by the mesh axes that they talk over:

* shards, `fsdp` or also `host` and `data`: weights are gathered before use (`gather`) and their
  gradients scattered (`scatter`).
* the other axes of the batch: gradients are reduced (`reduce`).
* `tensor`: column products gather tokens (`column`), row products scatter them (`row`), so does
  the embedding (`table`); the head gathers them (`head`), the loss adds over the vocabulary
  (`loss`).
* `pipe`: activations pass from stage to stage (`send`), in the order of `schedule`.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from parallel.overlap import PLAIN, Overlap
from parallel.partition import Composition, Kind, check, flat

# Mesh axes in the order of a mesh, slow links first.
AXES = ("host", "data", "fsdp", "pipe", "tensor")
# Axes over which the batch is split.
BATCH = ("host", "data", "fsdp")
# Sites that are collectives alone, and what each wants.
KINDS: Mapping[str, Kind] = {
    "gather": "all_gather",
    "scatter": "reduce_scatter",
    "reduce": "all_reduce",
    "table": "reduce_scatter",
    "head": "all_gather",
    "loss": "all_reduce",
    "send": "send",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """See the module. Compositions that are None are one flat collective.

    Attributes:
        gather: of weights over `shard`, an all-gather.
        scatter: of their gradients, a reduce-scatter.
        reduce: of gradients over the axes of the batch that are not in `shard`, an all-reduce.
        column: how column products gather tokens.
        row: how row products scatter tokens.
        table: how what devices looked up is summed and scattered over tokens, a reduce-scatter;
            its gradient is gathered the mirrored way.
        head: how the head gathers tokens, an all-gather; its gradient is scattered likewise.
        loss: of each token's sums over the vocabulary, an all-reduce. (The maximum that is taken
            off first is one flat collective: no sum.)
        send: of activations to the next stage, and of their gradients back, in chunks.
        shard: axes of the batch over which shards lie together, outermost first: with ("host",
            "fsdp") no host holds a whole copy, with ("fsdp",) each does. By default a mesh without
            `fsdp` has no shards.
        zero: what is kept in shards while a step runs: 1 optimiser state (weights are
            gathered once, gradients scattered at the end), 2 gradients too (scattered after every
            micro-batch), 3 weights too (gathered for each block, and again in the backward pass).
            Between steps all of it is shards, so the gather of updated weights falls into the next
            step's forward pass.
        bucket: gather and scatter each weight alone ("leaf"), or all weights of a block in one
            collective ("block").
        prefetch: in a scanned stack, carry the next block's weights in the loop, gathered beside
            this block's products, forward and backward; see `parallel.prefetch`. Without it the
            backward gather of an unrolled block stands behind JAX's recomputation barrier.
        when: reduce gradients over replicas once at the "end", or after "each" micro-batch.
        order: the reductions of different weights are left to the compiler ("free"; XLA:CPU merges
            them into one), or each waits for the one before ("chained"), last weights first.
        schedule: of a pipeline: "gpipe", all forward passes then all backward ones; or "1f1b".
    """

    gather: Composition | None = None
    scatter: Composition | None = None
    reduce: Composition | None = None
    column: Overlap = PLAIN
    row: Overlap = PLAIN
    table: Composition | None = None
    head: Composition | None = None
    loss: Composition | None = None
    send: Composition | None = None
    shard: tuple[str, ...] = ("fsdp",)
    zero: Literal[1, 2, 3] = 3
    bucket: Literal["leaf", "block"] = "leaf"
    prefetch: bool = False
    when: Literal["end", "each"] = "end"
    order: Literal["free", "chained"] = "free"
    schedule: Literal["gpipe", "1f1b"] = "gpipe"

    def __post_init__(self) -> None:
        """Refuses values that no step understands."""
        for name, allowed in (
            ("zero", (1, 2, 3)),
            ("bucket", ("leaf", "block")),
            ("prefetch", (False, True)),
            ("when", ("end", "each")),
            ("order", ("free", "chained")),
            ("schedule", ("gpipe", "1f1b")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Plan: {name} = {getattr(self, name)!r}: choose of {allowed}.")
        if not self.shard or self.shard != tuple(axis for axis in BATCH if axis in self.shard):
            raise ValueError(f"Plan: shard = {self.shard}: choose some of {BATCH}, in this order.")

    def check(self, sizes: Mapping[str, int], scan: bool) -> None:
        """Refuses compositions that are not those of this mesh, and what nothing would read.

        Args:
            sizes: devices along each mesh axis.
            scan: whether blocks are scanned.

        Raises:
            ValueError: naming the site and what is wrong with it.
        """
        base, sharded = Plan(), bool(self.sharded(sizes))
        shards = f"a mesh with the axis {' or '.join(self.shard)}"
        for site, fits, needs in (
            ("column", "tensor" in sizes, "a mesh with the axis tensor"),
            ("row", "tensor" in sizes, "a mesh with the axis tensor"),
            ("schedule", "pipe" in sizes, "a mesh with the axis pipe"),
            ("shard", set(self.shard) <= set(sizes), f"a mesh with the axes {self.shard}"),
            ("zero", sharded, shards),
            ("bucket", sharded and self.zero == 3, f"{shards}, and zero = 3"),
            (
                "prefetch",
                sharded and self.zero == 3 and scan,
                f"{shards}, zero = 3, scanned blocks",
            ),
            ("when", "pipe" not in sizes and self.zero != 1, "no pipeline and zero = 2 or 3"),
        ):
            if getattr(self, site) != getattr(base, site) and not fits:
                raise ValueError(f"Plan: {site} = {getattr(self, site)} needs {needs}.")
        if self.zero == 2 and "pipe" in sizes:
            raise ValueError("Plan: zero = 2 in a pipeline keeps what zero = 1 keeps: say 1 or 3.")
        for site, kind in KINDS.items():
            how, axes = getattr(self, site), self.axes(site, sizes)
            if how is None:
                continue
            if not axes:
                raise ValueError(
                    f"Plan: {site} = {how}, but the mesh {dict(sizes)} has nothing to {kind}: no "
                    f"axis of {self.axes(site, dict.fromkeys(AXES, 1))}."
                )
            try:
                check(kind, axes, how)
            except ValueError as error:
                raise ValueError(f"Plan: {site}: {error}") from error

    def sharded(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the axes of a mesh over which shards lie."""
        return tuple(axis for axis in self.shard if axis in sizes)

    def axes(self, site: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the axes of a mesh over which one of `KINDS` talks."""
        if site in ("gather", "scatter"):
            return self.sharded(sizes)
        if site == "reduce":
            return tuple(axis for axis in BATCH if axis in sizes and axis not in self.shard)
        axis = "pipe" if site == "send" else "tensor"
        return (axis,) if axis in sizes else ()

    def how(self, site: str, axes: tuple[str, ...]) -> Composition:
        """Returns the composition of one of `KINDS` over its axes."""
        chosen: Composition | None = getattr(self, site)
        return chosen or flat(KINDS[site], axes)

    def to_json(self) -> str:
        """Writes one line a site; `from_json` reads it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        texts = (Composition, Overlap)
        written = {k: str(v) if isinstance(v, texts) else v for k, v in fields.items()}
        return json.dumps({**written, "shard": ",".join(self.shard)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: for what is no plan, naming the site.
        """
        try:
            raw: dict[str, Any] = json.loads(text)
            known = {field.name for field in dataclasses.fields(cls)}
            if not isinstance(raw, dict) or not set(raw) <= known:
                raise ValueError(f"its sites are {sorted(known)}, not {sorted(raw)}")
        except ValueError as error:
            raise ValueError(f"No plan: {error}.") from error
        for site, value in raw.items():
            try:
                if site in KINDS and value is None:
                    continue
                if site in (*KINDS, "column", "row", "shard") and not isinstance(value, str):
                    raise ValueError(f"{value!r} is no text")
                if site in KINDS:
                    raw[site] = Composition.parse(value)
                elif site in ("column", "row"):
                    raw[site] = Overlap.parse(value)
                elif site == "shard":
                    raw[site] = tuple(value.split(","))
            except ValueError as error:
                raise ValueError(f"Plan: {site}: {error}") from error
        return cls(**raw)
