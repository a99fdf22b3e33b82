"""From flags to a drafter: lookups, models, merges; shared by all decoding scripts."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from experiments.common import setup
from models.checkpoint import shipped
from models.feature import FeatureModel
from models.tokenizer import check_same_vocabulary
from models.transformer import Transformer
from spec.drafters import (
    Drafter,
    EnsembleDrafter,
    FeatureDrafter,
    ModelDrafter,
    NGramDrafter,
    RootDrafter,
)
from spec.draws import Children
from spec.tree_shapes import TreeShape, parse_expansion

flags.disclaim_key_flags()  # `--help` of a command shows the flags below as its own

# How a model can choose children; the other ways come about by merging.
_CHOICES = (
    Children.TOP_K,
    Children.IID,
    Children.WITHOUT_REPLACEMENT,
    Children.GREEDY_PLUS_ONE,
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What drafters with a name are made of.

    Attributes:
        target: what is drafted for.
        ngram: what the flags of n-grams describe.
        shape: of those that grow a tree, theirs.
        children: how those choose children.
    """

    target: setup.Loaded
    ngram: NGramDrafter
    shape: TreeShape
    children: Children


class Named(NamedTuple):
    """How a name of --drafter becomes a drafter, and whether that takes a --tree."""

    build: Callable[[Asked], Drafter]
    grows: bool


def _itself(asked: Asked) -> Drafter:
    target = asked.target
    return ModelDrafter(target.model, asked.shape, target.tokenizer.vocab_size, asked.children)


# An entry here is all that gives a drafter a name; every other --drafter is a model.
NAMED: Mapping[str, Named] = {
    "ngram": Named(lambda asked: asked.ngram, grows=False),
    "none": Named(lambda asked: RootDrafter(), grows=False),
    "self": Named(_itself, grows=True),
}


def grows(name: str) -> bool:
    """Says whether a drafter grows a tree that has to be described: models do."""
    return name not in NAMED or NAMED[name].grows


def define_flags() -> None:
    """Declares the flags that `from_flags` reads."""
    flags.DEFINE_multi_string(
        "drafter", ["ngram"], f"{', '.join(NAMED)}, or a model as for --target. Repeat it to merge."
    )
    flags.DEFINE_multi_string(
        "tree", ["1,1,3,1,1,1,1,1"], "Expansion of the model drafters: one for all or one each."
    )
    flags.DEFINE_enum(
        "children",
        Children.TOP_K.value,
        [k.value for k in _CHOICES],
        "How model drafters choose children.",
    )
    flags.DEFINE_string("ngram_sizes", "1,8", "Tree sizes of the n-gram drafter, ascending.")
    flags.DEFINE_integer("ngram_min_match", 2, "Shortest suffix match that drafts.", lower_bound=1)
    flags.DEFINE_integer("ngram_window", 4, "Longest suffix match looked for.", lower_bound=1)
    flags.DEFINE_integer(
        "ngram_unsure", None, "Most n-gram nodes behind shorter matches than that.", lower_bound=1
    )
    flags.DEFINE_integer(
        "budget",
        None,
        "Most nodes of a merged tree: later drafters may be left out.",
        lower_bound=1,
    )


def check_flags(args: flags.FlagValues) -> None:
    """Refuses flags that describe no drafter that was asked for.

    Raises:
        ValueError: says which flag to leave out.
    """
    if not any(map(grows, args.drafter)) and (args["tree"].present or args["children"].present):
        raise ValueError(
            f"--tree and --children describe model drafters, --drafter is {args.drafter}: leave "
            "them out, or add a model drafter."
        )
    if args.budget is not None and len(args.drafter) == 1:
        raise ValueError(
            f"--budget {args.budget} is shared by several drafters, --drafter is {args.drafter}: "
            "leave it out, or add a drafter."
        )


def from_flags(
    args: flags.FlagValues, target: setup.Loaded, dtype: jax.typing.DTypeLike
) -> Drafter:
    """Returns the drafter that the flags of `define_flags` describe, see `make`."""
    return make(
        args.drafter,
        args.tree,
        args.children,
        _ngram(args),
        target,
        dtype,
        args.budget,
    )


def make(
    names: Sequence[str],
    trees: Sequence[str],
    children: str,
    ngram: NGramDrafter,
    target: setup.Loaded,
    dtype: jax.typing.DTypeLike,
    budget: int | None = None,
) -> Drafter:
    """Returns the drafter that the flags describe; several names make one merged tree.

    A feature drafter that reads blocks of the target sets its taps, see `Transformer`; so make
    the drafters of one target one after the other.

    Args:
        names: of `NAMED` ("self": the target drafts for itself), a shipped drafter (its name, or a
            file that training exported), or a model as `setup.load` takes it.
        trees: static expansions of the model drafters, such as "1,1,3,1": one for all, or one each
            in their order.
        children: how model drafters choose children, see `spec.draws.Children`.
        ngram: what "ngram" stands for.
        target: what is drafted for.
        dtype: of drafters that have to be loaded.
        budget: of the merged tree, see `EnsembleDrafter`.

    Raises:
        ValueError: for an unreadable drafter or tree, trees that do not match the drafters,
            another vocabulary, or drafters that read other blocks of the target than each other.
    """
    models = [name for name in names if grows(name)]
    parsed = [parse_expansion(tree) for tree in trees]
    if len(trees) not in (1, len(models) or 1):
        raise ValueError(
            f"{len(trees)} trees for {len(models)} model drafters: give one, or one each."
        )
    shapes = itertools.cycle(parsed)
    made: list[Drafter] = []
    reads: set[tuple[int, ...]] = set()
    vocab, how = target.tokenizer.vocab_size, Children(children)
    for name in names:
        shape = next(shapes) if grows(name) else parsed[0]
        if name in NAMED:
            made.append(NAMED[name].build(Asked(target, ngram, shape, how)))
            continue
        model, ids_U = _load(name, target, dtype)
        if isinstance(model, FeatureModel):
            reads.add(model.reads)
            made.append(FeatureDrafter(model, shape, vocab, ids_U, how))
        else:
            made.append(ModelDrafter(model, shape, vocab, how, ids_U))
    L = target.model.config.num_layers
    for blocks in reads:
        if list(blocks) != sorted({*blocks} & {*range(L)}):
            raise ValueError(
                f"Drafters {[*names]} read blocks {blocks} of the target, which has 0..{L - 1}: "
                "use a drafter that was trained for it."
            )
    if len(reads) > 1:
        raise ValueError(
            f"Drafters {[*names]} read different blocks of the target, {sorted(reads)}: use one "
            "of them, or retrain one."
        )
    target.model.taps = reads.pop() if reads else ()
    return made[0] if len(made) == 1 else EnsembleDrafter(tuple(made), budget)


def _ngram(args: flags.FlagValues) -> NGramDrafter:
    try:
        sizes = tuple(int(size) for size in args.ngram_sizes.split(","))
    except ValueError:
        raise ValueError(
            f"ngram_sizes {args.ngram_sizes!r}: write ascending numbers, such as 1,8."
        ) from None
    return NGramDrafter(
        window=args.ngram_window,
        min_match=args.ngram_min_match,
        depth=max(sizes[-1] - 1, 1),
        sizes=sizes,
        unsure=args.ngram_unsure,
    )


def _load(
    name: str, target: setup.Loaded, dtype: jax.typing.DTypeLike
) -> tuple[Transformer | FeatureModel, Any]:
    """Returns a model, and the token ids of its head, an array if that is reduced, else None."""
    named = setup.SHIPPED / f"{name}.safetensors"
    path = named if named.is_file() else pathlib.Path(name)
    if path.suffix == ".safetensors" and path.is_file():
        found = shipped.load(path, target.model.embed_VD[...], dtype)
        return found.model, jnp.asarray(found.ids_U)
    try:
        drafter = setup.load(name, dtype)
    except ValueError as error:
        raise ValueError(
            f"Drafter {name!r} is none of {[*NAMED]} and no file of drafter weights. {error}"
        ) from error
    check_same_vocabulary(target.tokenizer, drafter.tokenizer)
    return drafter.model, None


def readable(names: Sequence[str]) -> list[pathlib.Path]:
    """Returns where the one drafter lies that is a whole model in a Hugging Face folder.

    Nothing if there is none, or several: transformers takes one.
    """
    models = [name for name in names if name not in NAMED]
    found = [path for path in map(setup.folder, models) if (path / "config.json").is_file()]
    return found if len(found) == 1 else []
