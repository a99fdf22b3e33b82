"""A drafter of somebody else's: one file in a folder of its own, by what the README says."""

import ast
import importlib.util
import re
import sys

import jax.numpy as jnp
import pytest

from spec.drafters import Drafter
from spec.generate import Request, generate
from tests.common import processes, toys

# Guesses that after t comes a t + b: right for T1, made up for T2. Under the root its guess and the
# next token id, under the guess its guess.
FILE = '''
"""Drafts an affine sequence."""

import dataclasses

import jax
import jax.numpy as jnp

from spec.drafters import Step, View
from spec.draws import Children, Draws, point_mass
from spec.tree import TokenTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AffineDrafter:
    """After t comes (a t + b) mod vocab."""

    a: jax.Array
    b: jax.Array
    vocab: int = dataclasses.field(metadata={"static": True})

    @property
    def depth(self) -> int:
        return 2

    @property
    def buckets(self) -> tuple[int, ...]:
        return (4,)

    @property
    def children(self) -> frozenset[Children]:
        return frozenset({Children.TOP_K})

    def init(self, token_BT, length_B, hidden_BTID, capacity, path_size):
        return ()

    def propose(self, state, view: View, key_B) -> tuple[TokenTree, Draws, tuple[()]]:
        after = lambda token_B: (self.a * token_B + self.b) % self.vocab
        best_B = after(view.root_B)
        tokens = (view.root_B, best_B, (best_B + 1) % self.vocab, after(best_B))

        def every(*values):
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (view.root_B.shape[0], 4))

        tree = TokenTree(
            token_BN=jnp.stack(tokens, axis=1),
            parent_BN=every(0, 0, 0, 1),
            depth_BN=every(0, 1, 1, 2),
            valid_BN=every(1, 1, 1, 1) == 1,
        )
        return tree, point_mass(tree), state

    def observe(self, state, step: Step):
        return state
'''


@pytest.fixture
def affine(tmp_path, monkeypatch):
    """The class, read from a file outside of the repository."""
    path = tmp_path / "affine_drafter.py"
    path.write_text(FILE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("affine_drafter", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "affine_drafter", module)
    spec.loader.exec_module(module)
    return module.AffineDrafter


def methods(source):
    [of] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in of.body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_file_that_the_readme_says_to_copy_has_all_of_a_drafter():
    text = (processes.ROOT / "README.md").read_text(encoding="utf-8")
    [copied] = re.findall(r"^\| drafter \| `([^`]+)` \|", text, re.MULTILINE)
    wanted = {name for name in vars(Drafter) if not name.startswith("_")}
    template = methods((processes.ROOT / copied).read_text(encoding="utf-8"))
    assert set(template) == wanted
    assert methods(FILE) == template


def test_a_right_one_saves_steps(affine):
    """T1 says 3t + 1: two drafts and a bonus a step."""
    drafter = affine(jnp.int32(3), jnp.int32(1), toys.VOCAB1)
    prompts = [[2], [5, 3], [0, 1, 6]]
    done = generate(toys.chain11(), drafter, prompts, Request(12))
    for prompt, completion in zip(prompts, done, strict=True):
        assert completion.token_ids == toys.chain11_greedy(prompt[-1], 12)
        assert completion.metrics.tokens_per_step == 3


def test_a_wrong_one_changes_nothing(affine):
    drafter = affine(jnp.int32(5), jnp.int32(2), toys.VOCAB2)
    model, prompts = toys.tiny(), [[1, 2, 3], [9, 8]]
    want = toys.plain_uncached(model, prompts, 16)
    assert toys.decode(model, drafter, prompts, 16) == want
    assert toys.decode(model, toys.PLAIN, prompts, 16) == want
