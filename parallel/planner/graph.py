"""Lays a training step out as tasks, by a choice of how everything is partitioned and ordered.

The step of `parallel.train`: weights gathered (once, or for every block), forward and backward
passes of all micro-batches, gradients scattered and reduced, the optimiser on shards. One device
of each pipeline stage stands for all.
"""

import functools
from collections import Counter
from collections.abc import Iterable

from parallel.overlap import Overlap
from parallel.partition import Collective, Composition, Kind, flat
from parallel.planner import cost
from parallel.planner.chips import Cut
from parallel.planner.choice import Choice
from parallel.planner.priority import justified, order, ranked
from parallel.planner.simulate import COMPUTE, Task, simulate
from parallel.planner.workload import Part, Step


def build(step: Step, choice: Choice) -> list[Task]:
    """Returns the tasks of a step; every task comes after those that it waits for."""
    tasks = _Builder(step, choice).build()
    if choice.order == "program":
        return tasks
    return justified(tasks) if choice.order == "justified" else ranked(tasks)


def wanted(step: Step) -> Counter[Collective]:
    """Returns the collectives that the first stage cannot do without, and how often each."""
    builder = _Builder(step, Choice())
    builder.build()
    return builder.wanted


def pair_seconds(step: Step, site: str, overlap: Overlap, beside: float) -> float:
    """Returns what the products of a layer beside a site's collectives take, forward and back."""
    builder = _Builder(step, Choice(column=overlap, row=overlap, waits=frozenset()))
    after: tuple[int, ...] = ()
    for part in step.parts():
        column = site == "column"
        took, shape = (part.into, part.into_shape) if column else (part.out, part.out_shape)
        for kind in ("all_gather", "reduce_scatter"):
            done, sent = builder._pair(0, part.name, site, kind, took, shape, after)
            after = (*done, *sent)
    return simulate(builder.tasks, beside).seconds


class _Builder:
    def __init__(self, step: Step, choice: Choice):
        self.step, self.choice, self.where = step, choice, step.where
        self.chip = step.where.cluster.chip
        self.parts = step.parts()
        self.tasks: list[Task] = []
        stages = range(step.pipe)
        # By stage: the last computation of the program, and the last of each block in order.
        self.tail: list[tuple[int, ...]] = [() for _ in stages]
        self.blocks: list[list[int]] = [[] for _ in stages]
        self.late: list[list[tuple[int, ...]]] = [[] for _ in stages]
        self.passed: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.whole: dict[tuple[int, object], tuple[int, ...]] = {}
        self.reduced: list[list[int]] = [[] for _ in stages]
        self.updates: list[list[tuple[str, float, tuple[int, ...]]]] = [[] for _ in stages]
        self.filling: dict[tuple[int, int], tuple[int, ...]] = {}
        # What earlier micro-batches have added, or are about to add, to a block's gradients.
        self.added: dict[tuple[int, object], tuple[int, ...]] = {}
        # Buckets that have gone over their shards after each micro-batch, in order.
        self.drained: list[list[tuple[int, ...]]] = [[] for _ in stages]
        self.wanted: Counter[Collective] = Counter()
        # The same few collectives come again and again.
        self.pieces = functools.cache(lambda wanted, how: cost.pieces(wanted, how, step.where))
        self.tokens = functools.cache(step.tokens)
        self.cut = functools.cache(
            lambda kind, parts: Composition(flat(kind, ("tensor",)).ops, parts)
        )

    def build(self) -> list[Task]:
        step = self.step
        if step.job.zero in (1, 2):
            for stage in range(step.pipe):
                self._gather_once(stage)
        queues = [order(step, stage) for stage in range(step.pipe)]
        while any(queues):
            for stage, queue in enumerate(queues):
                while queue and self._come(stage, *queue[0]) is not None:
                    self._pass(stage, *queue.pop(0))
        for stage in range(step.pipe):
            self._update(stage)
        return self.tasks

    # ------------------------------------------------------------------ tasks

    def _add(
        self,
        stage: int,
        name: str,
        resources: tuple[int, ...],
        seconds: float,
        after: Iterable[int],
        site: str = "",
        rank: float = 0.0,
    ) -> int:
        needs = tuple(dict.fromkeys(after))
        self.tasks.append(Task(name, stage, resources, seconds, needs, rank, site))
        return len(self.tasks) - 1

    def _compute(
        self, stage: int, name: str, seconds: float, after: Iterable[int], late: bool = False
    ) -> int:
        """Adds a computation; unless it may be late, the program's next one waits for it."""
        gap = late and self.choice.apart
        before = after if gap or self.choice.strands else (*after, *self.tail[stage])
        number = self._add(stage, name, (COMPUTE,), seconds + self.chip.launch, before)
        if not gap:
            self.tail[stage] = (number,)
        return number

    def _sent(self, stage: int, name: str, site: str, pieces: tuple[cost.Piece, ...],
              after: Iterable[int]) -> tuple[int, ...]:  # fmt: skip
        """Adds the primitives of one chunk; returns the last."""
        waits = site in self.choice.waits
        last = tuple(after)
        if waits:
            last = (*last, *self.tail[stage])
        for piece in pieces:
            if not piece.levels:
                continue
            resources = tuple(1 + level for level in piece.levels)
            resources = (COMPUTE, *resources) if waits else resources
            # Other stages stand still for what goes down the pipeline, so it goes first.
            urgent = -1.0 if site == "send" else 0.0
            label = f"{name} {piece.op}"
            kind = site.removesuffix(" back")
            last = (self._add(stage, label, resources, piece.seconds, last, kind, urgent),)
        if waits:
            self.tail[stage] = last
        return last

    def _send(
        self, stage: int, name: str, site: str, wanted: Collective, after: Iterable[int]
    ) -> tuple[int, ...]:
        """Adds a collective; returns the last primitive of every chunk."""
        how, after = self.choice.how(site, wanted), tuple(after)
        if not stage:
            self.wanted[wanted] += 1
        pieces = self.pieces(wanted, how)
        return tuple(
            number
            for _ in range(how.chunks)
            for number in self._sent(stage, name, site, pieces, after)
        )

    def _pair(
        self,
        stage: int,
        name: str,
        site: str,
        kind: Kind,
        seconds: float,
        shape: tuple[int, int],
        after: tuple[int, ...],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Adds a gather before a product, or a scatter after it.

        Returns:
            The tasks that end the product, and those that end the collective.
        """
        if self.step.tensor == 1:
            done = (self._compute(stage, name, seconds, after),)
            return done, done
        overlap = self.choice.column if site.startswith("column") else self.choice.row
        wanted = self.tokens(kind)
        if not stage:
            self.wanted[wanted] += 1
        products: list[int] = []
        ends: list[int] = []
        first = kind == "all_gather"
        if overlap.kind == "ring":
            parts = self.step.tensor
            seconds *= self.chip.slow_down("tokens", parts, *shape)
            hop = cost.send(wanted.nbytes / parts, "tensor", self.where)
            last = after
            for part in range(parts):
                if first and part:  # its own shard needs no message
                    last = self._sent(stage, f"{name} hop {part}", site, (hop,), last)
                    ends += last
                needs = last if first else after
                products.append(self._compute(stage, f"{name} {part}", seconds / parts, needs))
                if not first and part < parts - 1:
                    last = (products[-1], *(last if part else ()))
                    last = self._sent(stage, f"{name} hop {part}", site, (hop,), last)
                    ends += last
            return tuple(products), tuple(ends) if first else (products[-1], *ends)
        parts = overlap.chunks
        cut: Cut = "tokens"
        if overlap.kind == "features":
            cut = "contract" if first else "features"
        seconds *= self.chip.slow_down(cut, parts, *shape)
        pieces = self.pieces(wanted, self.cut(kind, parts))
        for part in range(parts):
            label = f"{name} {part}" if parts > 1 else name
            if first:
                arrived = self._sent(stage, label, site, pieces, after)
                ends += arrived
                products.append(self._compute(stage, label, seconds / parts, (*after, *arrived)))
            else:
                products.append(self._compute(stage, label, seconds / parts, after))
                ends += self._sent(stage, label, site, pieces, (products[-1],))
        return tuple(products), tuple(ends)

    # ------------------------------------------------------------------ passes

    def _come(self, stage: int, phase: str, micro: int) -> tuple[int, ...] | None:
        """Returns what a pass waits for, or None if that is not laid out yet."""
        before = stage - 1 if phase == "F" else stage + 1
        if 0 <= before < self.step.pipe:
            come = self.passed.get((phase, micro, before))
        else:
            come = self.passed.get(("F", micro, stage)) if phase == "B" else ()
        # Micro-batches whose activations a stage keeps when passes interleave.
        kept = 2 * (self.step.pipe - stage)
        every = self.step.pipe > 1 and self.step.job.schedule == "gpipe"
        if come is None or not self.choice.strands or phase == "B" or every or micro < kept:
            return come
        return (*come, *self.passed["B", micro - kept, stage])

    def _pass(self, stage: int, phase: str, micro: int) -> None:
        step, tag = self.step, f"{phase}{micro}"
        x = self._come(stage, phase, micro) or ()
        last_stage = stage == step.pipe - 1
        layers = range(step.layers)
        if phase == "F":
            if stage == 0:
                x = (*x, *self._weights(stage, f"{tag} table", "table", micro == 0))
                if step.tensor > 1:  # rows that devices looked up, summed
                    wanted = step.tokens("reduce_scatter")
                    x = self._send(stage, f"{tag} table", "table", wanted, x)
            for layer in layers:
                ready = self._weights(stage, f"{tag} L{layer}", layer, micro == 0)
                x, _ = self._forward(stage, f"{tag} L{layer}", x, ready)
                self.blocks[stage].append(self.tail[stage][0])
            if last_stage:
                ready = self._weights(stage, f"{tag} head", "head", micro == 0)
                if step.tensor > 1:
                    x = self._send(stage, f"{tag} head", "head", step.tokens("all_gather"), x)
                x = (self._compute(stage, f"{tag} head", step.head(), (*x, *ready)),)
                self.blocks[stage].append(x[0])
                for _ in range(2 if step.tensor > 1 else 0):  # sums of exponentials, label's logits
                    x = self._send(stage, f"{tag} loss", "loss", step.vocabulary(), x)
        else:
            if last_stage:
                ready = self._weights(stage, f"{tag} head", "head", False)
                x = (self._compute(stage, f"{tag} head dX", step.head(), (*x, *ready)),)
                self.blocks[stage].append(x[0])
                dw = self._compute(stage, f"{tag} head dW", step.head(), x, late=True)
                self.late[stage].append((dw,))
                self._gradient(stage, f"{tag} head", "head", micro, (dw,))
                if step.tensor > 1:
                    x = self._send(stage, f"{tag} head", "head", step.tokens("reduce_scatter"), x)
            for layer in reversed(layers):
                x = self._backward(stage, f"{tag} L{layer}", layer, micro, x)
            if stage == 0:
                if step.tensor > 1:
                    x = self._send(stage, f"{tag} table", "table", step.tokens("all_gather"), x)
                self._gradient(stage, f"{tag} table", "table", micro, x)
        after = stage + 1 if phase == "F" else stage - 1
        if 0 <= after < step.pipe:
            x = self._send(stage, f"{tag} to {after}", "send", step.passed(), x)
        self.passed[phase, micro, stage] = x

    def _forward(
        self, stage: int, tag: str, x: tuple[int, ...], ready: tuple[int, ...], whole: bool = True
    ) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Adds a layer; returns its output, and what gathered each part's input."""
        gathered = []
        for part in self.parts:
            name = f"{tag} {part.name}"
            x, arrived = self._pair(
                stage, f"{name} in", "column", "all_gather", part.into, part.into_shape,
                (*x, *ready),
            )  # fmt: skip
            gathered.append(arrived)
            x = (self._compute(stage, f"{name} mid", part.between, x),)
            if whole or part is not self.parts[-1]:
                _, x = self._pair(
                    stage, f"{name} out", "row", "reduce_scatter", part.out, part.out_shape, x
                )
        return x, gathered

    def _backward(
        self, stage: int, tag: str, layer: int, micro: int, x: tuple[int, ...]
    ) -> tuple[int, ...]:
        ready = self._weights(stage, tag, layer, False)
        if len(self.late[stage]) >= 2:  # gradients of weights lag by two layers at most
            x = (*x, *self.late[stage][-2])
        inputs: list[tuple[int, ...]] = [() for _ in self.parts]
        if self.step.job.again:
            again, inputs = self._forward(stage, f"{tag} again", x, ready, whole=False)
            x = (*x, *again)
        late: list[int] = []
        for part, gathered in zip(reversed(self.parts), reversed(inputs), strict=True):
            x = self._part_back(stage, f"{tag} {part.name}", part, x, ready, gathered, late)
        self.blocks[stage].append(self.tail[stage][0])
        self.late[stage].append(tuple(late))
        self._gradient(stage, tag, layer, micro, tuple(late))
        return x

    def _part_back(self, stage: int, name: str, part: Part, x: tuple[int, ...],
                   ready: tuple[int, ...], gathered: tuple[int, ...], late: list[int]
                   ) -> tuple[int, ...]:  # fmt: skip
        at = x
        rows, inner = part.into_shape
        dy, arrived = self._pair(
            stage, f"{name} out dX", "row", "all_gather", part.out, (rows, inner), (*x, *ready)
        )
        # Gradients need room: that of the bucket before the last, once it has gone.
        room = self.drained[stage][-2] if len(self.drained[stage]) > 1 else ()
        needs = (*arrived, *x, *room)
        late.append(self._compute(stage, f"{name} out dW", part.out, needs, late=True))
        dy = (self._compute(stage, f"{name} mid dX", 2 * part.between, dy),)
        if self.step.tensor > 1 and not gathered:
            wanted = self.tokens("all_gather")
            gathered = self._send(stage, f"{name} in again", "column back", wanted, at)
        done, x = self._pair(
            stage, f"{name} in dX", "column back", "reduce_scatter", part.into, part.out_shape, dy
        )
        needs = (*gathered, *dy, *room)
        late.append(self._compute(stage, f"{name} in dW", part.into, needs, late=True))
        return x if self.step.tensor > 1 else done

    # ------------------------------------------------------------------ weights and gradients

    def _count(self, which: object) -> float:
        return self.step.layer_weights if isinstance(which, int) else self.step.outer_weights

    def _owned(self, stage: int) -> list[object]:
        """Returns what a stage has weights of, in the order of the forward pass."""
        owned: list[object] = ["table"] if stage == 0 else []
        owned += range(self.step.layers)
        return owned + (["head"] if stage == self.step.pipe - 1 else [])

    def _gather_once(self, stage: int) -> None:
        for which in self._owned(stage):
            wanted = self.step.gather(self._count(which))
            self.whole[stage, which] = self._send(stage, f"gather {which}", "gather", wanted, ())
        if not self.choice.deferred:
            every = tuple(n for which in self._owned(stage) for n in self.whole[stage, which])
            self.whole.update({(stage, which): every for which in self._owned(stage)})

    def _weights(self, stage: int, tag: str, which: object, first: bool) -> tuple[int, ...]:
        """Returns what the products with a block's weights wait for."""
        if self.step.job.zero in (1, 2):
            return self.whole[stage, which] if first else ()
        if self.step.job.zero == 0:
            return ()
        before = self.blocks[stage]
        room = len(before) - 1 - self.choice.ahead  # the block whose room these weights take
        after = (before[room],) if room >= 0 else ()
        wanted = self.step.gather(self._count(which))
        return self._send(stage, f"{tag} gather", "gather", wanted, after)

    def _gradient(
        self, stage: int, tag: str, which: object, micro: int, after: tuple[int, ...]
    ) -> None:
        """Sends a block's gradients, or lets them wait until their bucket is full."""
        step, job = self.step, self.step.job
        end = micro == job.micro_batches - 1
        each = job.zero >= 2 and self.choice.when == "each"
        if not each:  # what is sent is the sum over all micro-batches
            after = (*self.added.pop((stage, which), ()), *after)
        if not end and not each:
            self.added[stage, which] = after
            return
        count = 1
        if isinstance(which, int):
            after = (*self.filling.pop((stage, micro), ()), *after)
            if which % self.choice.bucket:
                self.filling[stage, micro] = after
                return
            count = min(self.choice.bucket, step.layers - which)
        weights = count * self._count(which)
        if job.zero:
            after = self._send(stage, f"{tag} scatter", "scatter", step.scatter(weights), after)
        if each:  # shards are added up
            self.drained[stage].append(after)
            after = (*self.added.pop((stage, which), ()), *after)
            self.added[stage, which] = after
        if end and step.replicas:
            after = self._send(stage, f"{tag} reduce", "reduce", step.reduce(weights), after)
        if end:
            self.reduced[stage] += after
            self.updates[stage].append((tag, weights / step.sharded, after))

    def _update(self, stage: int) -> None:
        """Adds the optimiser, which waits for all gradients if it clips them by their norm."""
        every = [number for numbers in self.reduced for number in numbers]
        for tag, weights, reduced in self.updates[stage]:
            after = every if self.step.job.clips else reduced
            self._compute(stage, f"update {tag}", self.step.update(weights), after, late=True)
