"""Small inputs with known answers, shared by the tests.

T1 "chain-11": a real LLaMA whose logits are a table: from t the best next token is (3t+1) mod 11,
logit 4, the second best (3t+2) mod 11, logit 3, all others 0. Greedy cycles are
2 7 0 1 4, 3 10 9 6 8 and 5. It has no working attention.

T2 "tiny random": random weights, working attention. Its oracle is `plain_uncached`, which runs the
whole sequence anew for every token and knows neither caches nor trees.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoint.parameters import Parameter, build
from models.config import ModelConfig
from models.transformer import Transformer, causal_mask
from spec.drafters import RootDrafter, ScriptedDrafter
from spec.drafters.protocol import Drafter, Step, View
from spec.draws import Children, Draws
from spec.generate import Request, generate, round_up
from spec.tree import TokenTree, limit_depth
from spec.tree_shapes import TreeShape, expansion

Continuation = tuple[tuple[int, ...], str]

VOCAB1, VOCAB2 = 11, 97
PLAIN = RootDrafter()
# `jit` for what is compiled once and run on tiny arrays: a quarter of the compile time.
quick = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
    },
)
# Least distance of the best from the second logit at which "the" greedy token is well defined.
MARGIN = 1e-3
# 11 nodes whose leaves lie at depths 1, 2, 3 and 4; a rank is not what a slot would suggest.
UNBALANCED = TreeShape((0, 0, 0, 0, 1, 1, 3, 4, 6, 6, 9), (0, 0, 1, 2, 0, 1, 1, 0, 0, 1, 0))
# Norms start at 1, biases at 0; the final norm sets how far apart logits are.
_ONES = {"attention_norm": 1, "mlp_norm": 1, "final_norm": 4}


def chain11_table(rows: int = VOCAB1, pad_logit: float = 9.0) -> np.ndarray:
    """Logits after each token, [rows, rows]; rows beyond 11 are padding of the vocabulary."""
    table = np.zeros((rows, rows), np.float32)
    for t in range(VOCAB1):
        table[t, (3 * t + 1) % VOCAB1] = 4
        table[t, (3 * t + 2) % VOCAB1] = 3
    table[:, VOCAB1:] = pad_logit
    return table


def lookup(table: np.ndarray) -> Transformer:
    """A LLaMA whose logits after token t are `table[t]`.

    Unit vectors times 100 make the norm's eps vanish; the norm makes them sqrt(D) long.
    """
    rows = len(table)
    D = -(-rows // 16) * 16
    config = tiny_config(
        vocab_size=rows,
        d_model=D,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=128,
    )
    special = {
        "embed_VD": 100 * np.eye(rows, D),
        "head_DU": np.eye(D, rows) @ table / np.sqrt(D),
        "blocks.0.attention.o_HAD": np.zeros((2, 8, D)),
        "blocks.0.mlp.down_FD": np.zeros((16, D)),
    }
    rng = np.random.default_rng(0)

    def read(parameter: Parameter) -> np.ndarray:
        ones = np.ones(parameter.shape)
        other = rng.standard_normal(parameter.shape) if parameter.inputs else ones
        return special.get(parameter.name, other)

    return build(config, read, jnp.float32)


def chain11(rows: int = VOCAB1, pad_logit: float = 9.0) -> Transformer:
    """T1, its vocabulary padded to `rows`."""
    return lookup(chain11_table(rows, pad_logit))


def chain11_greedy(token: int, n: int) -> tuple[int, ...]:
    """The n best tokens after `token`, from the formula."""
    out = []
    for _ in range(n):
        token = (3 * token + 1) % VOCAB1
        out.append(token)
    return tuple(out)


def tiny_config(**changes: object) -> ModelConfig:
    """T2's shape."""
    values: dict = {
        "vocab_size": VOCAB2,
        "d_model": 48,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "norm_eps": 1e-5,
        "tied_embeddings": False,
        "attention_bias": False,
    }
    values |= changes
    return ModelConfig(**({"draft_vocab_size": values["vocab_size"]} | values))


def tiny(
    seed: int = 0,
    dtype: jax.typing.DTypeLike = jnp.float32,
    gain: float = 3,
    **changes: object,
) -> Transformer:
    """T2. Attention and MLP outputs are large (`gain`): what came before decides the next token."""
    rng = np.random.default_rng(seed)

    def read(parameter: Parameter) -> np.ndarray:
        normal = rng.standard_normal(parameter.shape)
        if parameter.inputs == 0:
            return 0.1 * normal + _ONES.get(parameter.name.split(".")[-2], 0)
        fan_in = parameter.shape[1] if parameter.inputs is None else parameter.shape[0]
        if parameter.inputs == 2:
            fan_in *= parameter.shape[1]
        scale = gain if parameter.name.endswith(("o_HAD", "down_FD")) else 1
        return scale * normal / np.sqrt(fan_in)

    return build(tiny_config(**changes), read, dtype)


def _uncached(
    model: Transformer, token_BT: jax.Array, length_B: jax.Array, n: jax.Array, vocab: int
) -> tuple[jax.Array, jax.Array]:
    B, T = token_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    row_B = jnp.arange(B, dtype=jnp.int32)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token_BT, margin_BT = carry
        logits_BTV = model(token_BT, position_BT, causal_mask(B, T)).logits_BNV
        top, index = jax.lax.top_k(logits_BTV[row_B, length_B + i - 1, :vocab], 2)
        token_BT = token_BT.at[row_B, length_B + i].set(index[:, 0].astype(jnp.int32))
        return token_BT, margin_BT.at[row_B, length_B + i].set(top[:, 0] - top[:, 1])

    return jax.lax.fori_loop(0, n, body, (token_BT, jnp.full((B, T), jnp.inf)))


# Compiling or running decides the time, by length.
_uncached_short = quick(_uncached, static_argnames=("vocab",))
_uncached_long = jax.jit(_uncached, static_argnames=("vocab",))


def plain_uncached(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    n: int,
    eos: tuple[int, ...] = (),
    vocab: int | None = None,
    margin: float = MARGIN,
) -> list[Continuation]:
    """The oracle: tokens and finish reason of n greedy steps, one whole forward pass for each.

    Asserts that the best token was best by `margin` wherever it was used.
    """
    lengths = [len(prompt) for prompt in prompts]
    token_BT = np.zeros((len(prompts), round_up(max(lengths) + n, 64)), np.int32)
    for row, prompt in enumerate(prompts):
        token_BT[row, : len(prompt)] = prompt
    size = vocab or model.config.vocab_size
    run = _uncached_short if n <= 64 else _uncached_long
    tokens, margins = map(
        np.asarray,
        run(model, token_BT, np.asarray(lengths, np.int32), np.int32(n), size),
    )
    out: list[Continuation] = []
    for row, length in enumerate(lengths):
        budget = min(n, model.config.max_positions - length)
        new = tokens[row, length : length + budget].tolist()
        ends = [i for i, token in enumerate(new) if token in eos]
        new = new[: ends[0] + 1] if ends else new
        used = margins[row, length : length + len(new)]
        assert used.min(initial=np.inf) > margin, f"row {row}: pick another seed, {used.min()}"
        out.append((tuple(new), "eos" if ends else "length"))
    return out


def decode(
    target: Transformer,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    n: int,
    **request: object,
) -> list[Continuation]:
    """Tokens and finish reason of every row."""
    done = generate(target, drafter, prompts, Request(n, **request))  # type: ignore[arg-type]
    return [(completion.token_ids, completion.finish_reason) for completion in done]


def chain(depth: int) -> TreeShape:
    """A chain of `depth` drafts."""
    return expansion((1,) * depth)


def scripted(
    sequences: Sequence[Sequence[int]],
    shape: TreeShape,
    vocab: int,
    right: int | Sequence[int] | None = None,
    rank: Sequence[Sequence[int]] | None = None,
    width: int = 128,
) -> ScriptedDrafter:
    """An oracle drafter for whole sequences (prompt and continuation), one a row.

    Args:
        sequences: one a row; may go on past the budget.
        shape: topology.
        vocab: number of ids.
        right: levels that are right, one number or one a row; None for all.
        rank: [rows][depth], sibling that holds the right token; None for the first.
        width: positions of the script, for one program whatever the lengths.
    """
    rows, depth = len(sequences), shape.depth[-1]
    B = round_up(rows, 1)
    script_BT = np.zeros((B, width), np.int32)
    right_B, rank_BD = np.full(B, depth, np.int32), np.zeros((B, depth), np.int32)
    for row, sequence in enumerate(sequences):
        script_BT[row, : len(sequence)] = sequence
    if right is not None:
        right_B[:rows] = right
    if rank is not None:
        rank_BD[:rows] = rank
    return ScriptedDrafter(
        jnp.asarray(script_BT), jnp.asarray(right_B), jnp.asarray(rank_BD), vocab, shape
    )


def accepted_levels(shape: TreeShape, right: int, rank: Sequence[int]) -> int:
    """How many drafts of `ScriptedDrafter` are right: the path of `rank` while the shape has it."""
    node, levels = 0, 0
    for wanted in rank[:right]:
        under = [
            i for i in range(1, shape.size) if shape.parent[i] == node and shape.rank[i] == wanted
        ]
        if not under:
            break
        node, levels = under[0], levels + 1
    return levels


def accept_histogram(levels: int, n: int) -> tuple[int, ...]:
    """Steps by accepted drafts when each step accepts `levels`, or what is left of n tokens."""
    counts: list[int] = []
    while n > 0:
        counts.append(min(levels, n - 1))
        n -= counts[-1] + 1
    return tuple(np.bincount(counts).tolist()) if counts else ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limited:
    """Another drafter, row b cut to drafts of at most `depth_B[b]`: every k in one program."""

    inner: Any
    depth_B: jax.Array

    @property
    def depth(self) -> int:
        return self.inner.depth

    @property
    def buckets(self) -> tuple[int, ...]:
        return self.inner.buckets

    @property
    def children(self) -> frozenset[Children]:
        return self.inner.children

    def init(self, *args: Any) -> Any:
        return self.inner.init(*args), jnp.copy(self.depth_B)

    def propose(self, state: Any, view: View, key_B: jax.Array) -> tuple[TokenTree, Draws, Any]:
        inner, depth_B = state
        tree, draws, inner = self.inner.propose(inner, view, key_B)
        return limit_depth(tree, depth_B + 1), draws, (inner, depth_B)

    def observe(self, state: Any, step: Step) -> Any:
        return self.inner.observe(state[0], step), state[1]


def drawn_tree() -> TokenTree:
    """The tree drawn in spec/tree.py."""

    def row(*values: int) -> jax.Array:
        return jnp.asarray([values], jnp.int32)

    return TokenTree(
        token_BN=row(7, 0, 8, 1, 2, 4),
        parent_BN=row(0, 0, 0, 1, 1, 3),
        depth_BN=row(0, 1, 1, 2, 2, 3),
        valid_BN=jnp.ones((1, 6), jnp.bool_),
    )


def random_tree(
    rng: np.random.Generator, size: int, vocab: int, batch: int = 1, padding: int = 0
) -> TokenTree:
    """Trees with random parents, siblings perhaps equal; the last `padding` slots are invalid."""
    parent_BN = np.zeros((batch, size), np.int32)
    depth_BN = np.zeros((batch, size), np.int32)
    valid_BN = np.arange(size) < size - padding
    for i in range(1, size - padding):
        parent_BN[:, i] = rng.integers(0, i, batch)
        depth_BN[:, i] = depth_BN[np.arange(batch), parent_BN[:, i]] + 1
    token_BN = rng.integers(0, vocab, (batch, size)).astype(np.int32)
    token_BN[:, 0] = token_BN[0, 0]
    token_BN *= valid_BN
    return TokenTree(
        jnp.asarray(token_BN),
        jnp.asarray(parent_BN),
        jnp.asarray(depth_BN),
        jnp.broadcast_to(jnp.asarray(valid_BN), (batch, size)),
    )


def walked_mask(tree: TokenTree) -> np.ndarray:
    """The ancestor mask by following parent pointers one at a time."""
    parent_BN = np.asarray(tree.parent_BN)
    B, N = parent_BN.shape
    mask = np.zeros((B, N, N), bool)
    for b in range(B):
        for i in range(N):
            j = i
            mask[b, i, i] = mask[b, i, 0] = True
            while j:
                mask[b, i, j] = True
                j = parent_BN[b, j]
    return mask


def paths(tree: TokenTree, row: int = 0) -> dict[int, tuple[int, ...]]:
    """Root-to-node token sequence of every valid slot, by parent pointers."""
    token, parent = np.asarray(tree.token_BN)[row], np.asarray(tree.parent_BN)[row]
    out: dict[int, tuple[int, ...]] = {}
    for i in np.flatnonzero(np.asarray(tree.valid_BN)[row]).tolist():
        above = () if i == 0 else out[int(parent[i])]
        out[i] = (*above, int(token[i]))
    return out
