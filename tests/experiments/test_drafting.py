"""Names of drafters on the command line: one table, which flags, errors and merges read."""

import jax.numpy as jnp
import pytest
from absl import flags

from experiments.common import drafting, setup
from models import tokenizer
from spec.drafters import EnsembleDrafter, ModelDrafter, NGramDrafter, RootDrafter
from tests.common import toys
from tests.models.test_tokenizer import byte_level

NGRAM = NGramDrafter()


@pytest.fixture(scope="module")
def target():
    words = tokenizer.Tokenizer(byte_level(), None, (), False, None)
    return setup.Loaded(toys.tiny(vocab_size=words.vocab_size), words)


def make(target, *names, trees=("2,1",)):
    return drafting.make(names, trees, "top_k", NGRAM, target, jnp.float32)


def given(*arguments):
    """Flags of a command that has nothing but a drafter's."""
    values = flags.FlagValues()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "FLAGS", values)
        for kind in ("multi_string", "string", "integer", "enum"):
            define = getattr(flags, f"DEFINE_{kind}")
            patch.setattr(
                flags,
                f"DEFINE_{kind}",
                lambda *a, define=define, **k: define(*a, flag_values=values, **k),
            )
        drafting.define_flags()
    values(["command", *arguments])
    return values


def test_every_name_makes_its_drafter(target):
    kinds = {"ngram": NGramDrafter, "none": RootDrafter, "self": ModelDrafter}
    assert set(kinds) == set(drafting.NAMED)
    for name, kind in kinds.items():
        assert isinstance(make(target, name), kind)
        assert drafting.grows(name) == (kind is ModelDrafter)
    assert make(target, "self").model is target.model
    merged = make(target, "none", "self", "ngram", "self", trees=("2,1", "1"))
    assert isinstance(merged, EnsembleDrafter)
    assert [each.depth for each in merged.members] == [0, 2, NGRAM.depth, 1]


def test_one_entry_names_another_drafter(target, monkeypatch):
    """In the help, in what the flags refuse, and in what is made."""
    other = NGramDrafter(window=1)
    with pytest.raises(ValueError, match="'echo' is none of \\['ngram', 'none', 'self'\\]"):
        make(target, "echo")
    named = {**drafting.NAMED, "echo": drafting.Named(lambda asked: other, grows=False)}
    monkeypatch.setattr(drafting, "NAMED", named)
    assert make(target, "echo") is other
    assert "echo" in given()["drafter"].help
    with pytest.raises(ValueError, match="--tree and --children describe model drafters"):
        drafting.check_flags(given("--drafter=echo", "--tree=2"))
    drafting.check_flags(given("--drafter=self", "--tree=2"))


def test_trees_are_one_or_one_each(target):
    for names, trees in (
        (("self", "self"), ("1",) * 3),
        (("ngram",), ()),
        (("ngram",), ("1",) * 2),
    ):
        with pytest.raises(ValueError, match="give one, or one each"):
            make(target, *names, trees=trees)
