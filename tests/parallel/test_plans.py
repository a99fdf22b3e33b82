"""Plans: what is drawn at random takes the same step, what is impossible is refused."""

import dataclasses

import numpy as np
import optax
import pytest

from models.stages import llama_stages, split
from parallel.overlap import Overlap
from parallel.partition import Composition, compositions, flat
from parallel.plan import BATCH, KINDS, Plan
from parallel.train import init_state, make_train_step
from tests.common import toys
from tests.parallel.test_mesh_training import BOTH, MODEL, V, five_steps, large_then_small, mesh_of
from tests.parallel.test_train_step import assert_close, batch


@pytest.fixture(scope="module")
def model():
    return toys.tiny(**MODEL)


@pytest.fixture(scope="module")
def oracle(model):
    return five_steps(model)


def sampled_plans(count):
    """Meshes and plans drawn at random from everything that fits them."""
    rng = np.random.default_rng(0)

    def one_of(values):
        return values[rng.integers(len(values))]

    overlaps = [
        Overlap.parse(text) for text in ("plain", "tokens/2", "features/4", "tokens/3", "ring")
    ]
    meshes = [
        {"data": 4},
        {"host": 2, "data": 2},
        {"host": 2, "data": 2, "fsdp": 2},
        {"fsdp": 4},
        {"host": 2, "fsdp": 2},
        {"data": 2, "fsdp": 2},
        {"data": 2, "tensor": 2},
        {"fsdp": 2, "tensor": 2},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"data": 2, "pipe": 2},
        {"fsdp": 2, "pipe": 2, "tensor": 2},
    ]
    for _ in range(count):
        sizes = one_of(meshes)
        plan = Plan(
            column=one_of(overlaps) if "tensor" in sizes else overlaps[0],
            row=one_of(overlaps) if "tensor" in sizes else overlaps[0],
            order=one_of(["free", "chained"]),
            schedule=one_of(["gpipe", "1f1b"]) if "pipe" in sizes else "gpipe",
        )
        scan = one_of([False, True])
        for site, values in (
            ("shard", [("fsdp",), ("host", "fsdp"), ("host", "data"), ("data",)]),
            ("zero", [1, 2, 3]),
            ("bucket", ["leaf", "block"]),
            ("prefetch", [False, True]),
            ("when", ["end", "each"]),
        ):
            other = dataclasses.replace(plan, **{site: one_of(values)})
            plan = other if fits(other, sizes, scan) else plan
        for site, kind in KINDS.items():
            mine = {axis: sizes[axis] for axis in plan.axes(site, sizes)}
            if mine:
                how = one_of(list(compositions(kind, mine, (1, 2, 3))))
                plan = dataclasses.replace(plan, **{site: how})
        how = {"accumulate": one_of([1, 2]), "remat": one_of([False, True])}
        if np.prod([sizes.get(axis, 1) for axis in BATCH]) == 8:
            how["accumulate"] = 1  # of eight sequences
        yield sizes, plan, {**how, "scan": scan}


def fits(plan, sizes, scan):
    try:
        plan.check(sizes, scan)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "plan", "how"), list(sampled_plans(200)), ids=range(200))
def test_sampled_plans(model, oracle, sizes, plan, how):
    """Two hundred plans take the same step."""
    assert Plan.from_json(plan.to_json()) == plan
    mesh, optimizer = mesh_of(sizes), large_then_small()
    step = make_train_step(llama_stages(model.config), optimizer, mesh, plan, **how)
    state, metrics = step(init_state(split(model), optimizer, mesh, plan), batch(0, vocab=V))
    assert_close(state.params, oracle[0], 1e-5)
    assert_close(metrics, oracle[2], 1e-5)


EIGHT = {"num_heads": 8, "num_kv_heads": 8}
REFUSED = {  # HO-28
    "6 sequences on 4 devices": ({"data": 4}, {}, 6, {}, "6 sequences does not divide into 4 dev"),
    "micro-batches of 3": (
        {"data": 2},
        {"accumulate": 3},
        8,
        {},
        "does not divide into 2 devices x 3",
    ),
    "heads": ({"tensor": 8}, {}, 8, {}, "8 devices on the mesh axis 'tensor' for 6 query heads"),
    "layers": ({"pipe": 2}, {}, 8, {"num_layers": 5}, "axis L has 5 entries.*2 devices"),
    "vocabulary": ({"tensor": 4}, {}, 8, {"vocab_size": 3}, "4 devices .* 3 tokens of the voc"),
    "tokens": (
        {"tensor": 8},
        {},
        8,
        {"num_heads": 8, "num_kv_heads": 8},
        "12 tokens do not divide",
    ),
    "unknown axis": ({"rows": 2}, {}, 8, {}, r"Mesh axes \('rows',\): choose of"),
    "a site without its axis": (
        {"data": 2},
        {"plan": Plan(gather=Composition.parse("all_gather(fsdp)"))},
        8,
        {},
        "gather = .*has no",
    ),
    "a wrong composition": (
        {"data": 2},
        {"plan": Plan(reduce=Composition.parse("reduce_scatter(data)"))},
        8,
        {},
        "reduce: reduce_scatter.data. is no all_reduce",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_meshes_are_refused(name):
    """One error each, before anything is compiled."""
    sizes, how, rows, changes, message = REFUSED[name]
    model, optimizer = toys.tiny(**{**MODEL, **changes}), optax.sgd(0.1)
    mesh = mesh_of(sizes)

    def build():
        step = make_train_step(llama_stages(model.config), optimizer, mesh, **how)
        step.lower(init_state(split(model), optimizer, mesh), batch(0, rows, V))

    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("plan", "sizes", "words"),
    [
        (Plan(row=Overlap.parse("ring")), {"data": 2}, "row = ring needs .* tensor"),
        (Plan(schedule="1f1b"), {"data": 2}, "schedule = 1f1b needs .* pipe"),
        (Plan(zero=1), {"data": 2}, "zero = 1 needs .* fsdp"),
        (Plan(zero=1, bucket="block"), {"fsdp": 2}, "bucket = block needs .* zero = 3"),
        (Plan(prefetch=True), {"fsdp": 2}, "prefetch = True needs .* scanned"),
        (Plan(when="each"), {"pipe": 2}, "when = each needs no pipeline"),
        (Plan(when="each", zero=1), {"fsdp": 2}, "when = each needs"),
        (Plan(zero=2), {"fsdp": 2, "pipe": 2}, "say 1 or 3"),
        (Plan(shard=BOTH), {"fsdp": 2}, r"shard = \('host', 'fsdp'\) needs .* \('host', 'fsdp'\)"),
        (
            Plan(shard=BOTH, gather=flat("all_gather", ("fsdp",))),
            {"host": 2, "fsdp": 2},
            "gather: all_gather.fsdp. is no all_gather over .'host', 'fsdp'.*sharded over .'host'",
        ),
        (
            Plan(shard=BOTH, reduce=flat("all_reduce", ("host",))),
            {"host": 2, "fsdp": 2},
            "reduce = all_reduce.host., but the mesh .* nothing to all_reduce",
        ),
        (
            Plan(table=flat("reduce_scatter", ("tensor",))),
            {"pipe": 2},
            "table = .* no axis .*tenso",
        ),
        (Plan(table=flat("all_gather", ("tensor",))), {"tensor": 2}, "table: .* no reduce_scatter"),
        (Plan(head=flat("all_gather", ("pipe",))), {"tensor": 2}, "head: .* leaves the group"),
        (Plan(loss=flat("reduce_scatter", ("tensor",))), {"tensor": 2}, "loss: .* no all_reduce"),
        (Plan(send=flat("send", ("pipe",))), {"tensor": 2}, "send = .* no axis of .'pipe'"),
        (Plan(send=flat("all_gather", ("pipe",))), {"pipe": 2}, "send: all_gather.* is no send"),
        (Plan(reduce=flat("send", ("data",))), {"data": 2}, "reduce: send.data. is no all_reduce"),
    ],
)
def test_what_nothing_would_read_is_refused(plan, sizes, words):
    with pytest.raises(ValueError, match=words):
        plan.check(sizes, scan=False)


def test_bad_plans():
    for bad, words in (
        ({"zero": 4}, "zero = 4"),
        ({"bucket": "all"}, "bucket = 'all'"),
        ({"when": "never"}, "when = 'never'"),
        ({"shard": ()}, r"shard = \(\): choose some of"),
        ({"shard": ("fsdp", "host")}, "in this order"),
        ({"shard": ("tensor",)}, "choose some of .'host', 'data', 'fsdp'"),
        ({"shard": "fsdp"}, "choose some of"),
    ):
        with pytest.raises(ValueError, match=words):
            Plan(**bad)
    for text, words in (
        ("[]", "No plan"),
        ("{", "No plan"),
        ('{"speed": 9}', "its sites are"),
        ('{"row": "spiral"}', "Plan: row: Overlap"),
        ('{"row": 5}', "Plan: row: 5 is no text"),
        ('{"gather": "all(x)"}', "Plan: gather"),
        ('{"send": 3}', "Plan: send: 3 is no text"),
        ('{"loss": "sum(tensor)"}', "Plan: loss: Primitive 'sum'"),
        ('{"column": null}', "Plan: column: None is no text"),
        ('{"shard": ["host"]}', "Plan: shard: .* is no text"),
        ('{"shard": "fsdp,host"}', "in this order"),
    ):
        with pytest.raises(ValueError, match=words):
            Plan.from_json(text)
