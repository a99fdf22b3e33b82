"""Which composition every collective of a training step uses: readable, serialisable, checked.

A plan says nothing of sizes or machines. Sites, by the mesh axes that they talk over:

* `fsdp`: weights are gathered before use (`gather`) and their gradients scattered (`scatter`).
* `data`: gradients are reduced (`reduce`); with `host` beside it in two levels if it says so.
* `tensor`: column products gather tokens (`column`), row products scatter them (`row`).
* `pipe`: activations pass from stage to stage (`schedule`).
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from parallel.overlap import PLAIN, Overlap
from parallel.partition import Composition, check, flat

# Mesh axes in the order of a mesh, slow links first.
AXES = ("host", "data", "fsdp", "pipe", "tensor")
# Axes over which the batch is split.
BATCH = ("host", "data", "fsdp")


@dataclasses.dataclass(frozen=True)
class Plan:
    """See the module. Compositions that are None are one flat collective.

    Attributes:
        gather: of weights over `fsdp`, an all-gather.
        scatter: of their gradients, a reduce-scatter.
        reduce: of gradients over `host` and `data`, an all-reduce.
        column: how column products gather tokens.
        row: how row products scatter tokens.
        zero: what is kept in shards over `fsdp` while a step runs: 1 optimiser state (weights are
            gathered once, gradients scattered at the end), 2 gradients too (scattered after every
            micro-batch), 3 weights too (gathered for each block, and again in the backward pass).
            Between steps all of it is shards, so the gather of updated weights falls into the next
            step's forward pass.
        bucket: gather and scatter each weight alone ("leaf"), or all weights of a block in one
            collective ("block").
        prefetch: in a scanned stack, carry the next block's weights in the loop, gathered beside
            this block's products, forward and backward; see `parallel.prefetch`. Without it the
            backward gather of an unrolled block stands behind JAX's recomputation barrier.
        when: reduce gradients over `data` once at the "end", or after "each" micro-batch.
        order: the reductions of different weights are left to the compiler ("free"; XLA:CPU merges
            them into one), or each waits for the one before ("chained"), last weights first.
        schedule: of a pipeline: "gpipe", all forward passes then all backward ones; or "1f1b".
    """

    gather: Composition | None = None
    scatter: Composition | None = None
    reduce: Composition | None = None
    column: Overlap = PLAIN
    row: Overlap = PLAIN
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

    def check(self, sizes: Mapping[str, int], scan: bool) -> None:
        """Refuses compositions that are not those of this mesh, and what nothing would read.

        Args:
            sizes: devices along each mesh axis.
            scan: whether blocks are scanned.

        Raises:
            ValueError: naming the site and what is wrong with it.
        """
        base, sharded = Plan(), "fsdp" in sizes
        for site, fits, needs in (
            ("column", "tensor" in sizes, "a mesh with the axis tensor"),
            ("row", "tensor" in sizes, "a mesh with the axis tensor"),
            ("schedule", "pipe" in sizes, "a mesh with the axis pipe"),
            ("zero", sharded, "a mesh with the axis fsdp"),
            ("bucket", sharded and self.zero == 3, "the axis fsdp and zero = 3"),
            ("prefetch", sharded and self.zero == 3 and scan, "fsdp, zero = 3 and scanned blocks"),
            ("when", "pipe" not in sizes and self.zero != 1, "no pipeline and zero = 2 or 3"),
        ):
            if getattr(self, site) != getattr(base, site) and not fits:
                raise ValueError(f"Plan: {site} = {getattr(self, site)} needs {needs}.")
        if self.zero == 2 and "pipe" in sizes:
            raise ValueError("Plan: zero = 2 in a pipeline keeps what zero = 1 keeps: say 1 or 3.")
        over = tuple(axis for axis in ("host", "data") if axis in sizes)
        for site, kind, axes in (
            ("gather", "all_gather", ("fsdp",)),
            ("scatter", "reduce_scatter", ("fsdp",)),
            ("reduce", "all_reduce", over),
        ):
            how = getattr(self, site)
            if how is None:
                continue
            if not set(axes) & set(sizes):
                raise ValueError(f"Plan: {site} = {how}, but the mesh {dict(sizes)} has no {axes}.")
            try:
                check(kind, axes, how)  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"Plan: {site}: {error}") from error

    def gathering(self) -> Composition:
        """Returns how weights are gathered."""
        return self.gather or flat("all_gather", ("fsdp",))

    def scattering(self) -> Composition:
        """Returns how gradients are scattered."""
        return self.scatter or flat("reduce_scatter", ("fsdp",))

    def reducing(self, axes: tuple[str, ...]) -> Composition:
        """Returns how gradients are reduced over `axes` of the batch."""
        return self.reduce or flat("all_reduce", axes)

    def to_json(self) -> str:
        """Writes one line a site; `from_json` reads it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        texts = (Composition, Overlap)
        return json.dumps(
            {k: str(v) if isinstance(v, texts) else v for k, v in fields.items()}, indent=1
        )

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
                texts = ("gather", "scatter", "reduce", "column", "row")
                if site in texts and not isinstance(value, str | None):
                    raise ValueError(f"{value!r} is no text")
                if site in ("gather", "scatter", "reduce") and value is not None:
                    raw[site] = Composition.parse(value)
                elif site in ("column", "row"):
                    raw[site] = Overlap.parse(value)
            except ValueError as error:
                raise ValueError(f"Plan: {site}: {error}") from error
        return cls(**raw)
