"""The speculation step and the loop around it, all on the device.

prefill -> loop of: propose -> verify_forward -> accept -> commit + observe
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention import LayerKV
from models.kv_cache import KVCache, commit, take_path
from models.transformer import Transformer
from parallel.comm import LOCAL, Comm
from spec.drafters.protocol import Drafter, Step, View
from spec.draws import Draws, drop_invalid
from spec.metrics import record_size, step_record
from spec.sampling import Sampling, Use, best_token, probabilities
from spec.tree import TokenTree, ancestor_mask, append, emitted_tokens, limit_depth
from spec.verify import Accepted, Greedy, Keys, Rule
from spec.verify.rule import check_fit, pick

RUNNING, EOS, LENGTH = 0, 1, 2
SLOTS_OF = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """What every row of a batch shares.

    Attributes:
        eos_E: int32 ids that end a row; -1 entries match nothing.
        run_limit: int32, most tokens a step may emit; large for normal decoding, 1 to visit every
            position of the target's own path (acceptance by rank).
        sampling: temperature, top-k and top-p of each row.
        vocab_size: static; ids from here on are padding of the embedding table and never chosen.
        rule: static; how drafts are verified. `Greedy` takes the best token whatever `sampling`.
        comm: static; how the target's devices talk. Under `shard_map` the whole step runs inside.
    """

    eos_E: jax.Array
    run_limit: jax.Array
    sampling: Sampling
    vocab_size: int = dataclasses.field(metadata={"static": True})
    rule: Rule = dataclasses.field(metadata={"static": True})
    comm: Comm = dataclasses.field(default=LOCAL, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that changes from step to step.

    Attributes:
        cache: the target's committed K/V.
        root_B: int32, last token of each row, not cached yet.
        token_BE: int32 output buffer, E >= the largest budget.
        emitted_B: int32, tokens in the output buffer.
        budget_B: int32, most tokens each row may emit.
        finish_B: int32, RUNNING, EOS or LENGTH.
        drafter: the drafter's state.
        key_B: one random key a row, from (seed, request).
        record_BER: int32, at the slot of each step's first token what the step did
            (`metrics.step_record`, R columns), -1 elsewhere.
        logprob_BE: float32 natural log-probability of each emitted token under the target's own
            softmax, before temperature, top-k and top-p; E is 0 if not kept.
    """

    cache: KVCache
    root_B: jax.Array
    token_BE: jax.Array
    emitted_B: jax.Array
    budget_B: jax.Array
    finish_B: jax.Array
    drafter: Any
    key_B: jax.Array
    record_BER: jax.Array
    logprob_BE: jax.Array


class Trace(NamedTuple):
    """One step, for pictures and tests: the tree and what the target made of it."""

    tree: TokenTree
    accepted: Accepted


class _Verified(NamedTuple):
    """What a branch of the target pass returns: never the cache, which XLA would copy."""

    accepted: Accepted
    path_kv: tuple[LayerKV, ...]
    hidden_BPID: jax.Array
    logprob_BP: jax.Array


def start(
    drafter: Drafter,
    cache: KVCache,
    hidden_BTID: jax.Array,
    token_BT: jax.Array,
    length_B: jax.Array,
    budget_B: jax.Array,
    key_B: jax.Array,
    *,
    out_size: int,
    logprobs: bool,
) -> DecodeState:
    """Returns the state before the first step, the drafter prefilled too.

    Args:
        drafter: see `Drafter`.
        cache: of the target, from `prefill`; its capacity at least prompt + budget - 1 tokens.
        hidden_BTID: from `prefill`.
        token_BT: int32 right-padded prompts.
        length_B: int32 prompt lengths; 0 for a padding row, whose budget must be 0.
        budget_B: int32 most new tokens a row, 0 for none.
        key_B: a random key a row.
        out_size: E, static.
        logprobs: whether to keep the log-probability of every emitted token, static.
    """
    last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
    B = token_BT.shape[0]
    # The last token of all is never cached; whole blocks, for kernels that read caches in blocks.
    slots = -(-(cache.capacity + 1) // SLOTS_OF) * SLOTS_OF
    return DecodeState(
        cache=cache,
        root_B=jnp.take_along_axis(token_BT, last_B1, axis=1)[:, 0],
        token_BE=jnp.zeros((B, out_size), jnp.int32),
        emitted_B=jnp.zeros(B, jnp.int32),
        budget_B=budget_B,
        # Not weakly typed: a host that replaces it (stop strings) must not cause a compilation.
        finish_B=jnp.where(budget_B > 0, RUNNING, LENGTH).astype(jnp.int32),
        drafter=drafter.init(token_BT, length_B, hidden_BTID, slots, drafter.depth + 1),
        key_B=key_B,
        record_BER=jnp.full((B, out_size, record_size(drafter.depth)), -1, jnp.int32),
        logprob_BE=jnp.zeros((B, out_size if logprobs else 0), jnp.float32),
    )


def advance(
    target: Transformer,
    drafter: Drafter,
    state: DecodeState,
    settings: Settings,
    steps: jax.typing.ArrayLike,
    leave: jax.typing.ArrayLike = 0,
) -> tuple[DecodeState, Trace]:
    """Runs steps until at most `leave` rows are unfinished, at most `steps` (int32) of them.

    Returns:
        The state, and the trace of the last step: so pictures need no program of their own.
        Without a step that is zeros.
    """
    Carry = tuple[jax.Array, DecodeState, Trace]

    def more(carry: Carry) -> jax.Array:
        done, state, _ = carry
        running = jnp.sum(state.finish_B == RUNNING, dtype=jnp.int32)
        return (done < steps) & (running > leave)

    def body(carry: Carry) -> Carry:
        done, state, _ = carry
        return done + 1, *spec_step(target, drafter, state, settings)

    B, N, P = state.root_B.shape[0], drafter.buckets[-1], drafter.depth + 1
    ids_BN, ids_B = jnp.zeros((B, N), jnp.int32), jnp.zeros(B, jnp.int32)
    tree = TokenTree(ids_BN, ids_BN, ids_BN, jnp.zeros((B, N), jnp.bool_))
    nothing = Trace(tree, Accepted(jnp.zeros((B, P), jnp.int32), ids_B, ids_B))
    return jax.lax.while_loop(more, body, (jnp.zeros((), jnp.int32), state, nothing))[1:]


def spec_step(
    target: Transformer, drafter: Drafter, state: DecodeState, settings: Settings
) -> tuple[DecodeState, Trace]:
    """Grows a tree, checks it in one target pass, keeps what the target would have said.

    SpecInfer algorithm 2, one iteration. Every active row emits at least one token.
    """
    active_B = state.finish_B == RUNNING
    length_B = state.cache.length_B
    room_B = state.budget_B - state.emitted_B
    keys = Keys(state.key_B, length_B)
    view = View(state.root_B, length_B, room_B, active_B, target, state.cache, settings.sampling)
    proposed, draws, drafter_state = drafter.propose(state.drafter, view, keys.step(Use.DRAFT))
    tree = limit_depth(proposed, jnp.where(active_B, room_B, 0))
    draws = settings.rule.order(drop_invalid(draws, tree), keys.step(Use.ORDER))

    logprobs = state.logprob_BE.shape[1] > 0
    verified = _verify(target, drafter, state.cache, tree, draws, keys, settings, logprobs)
    accepted = verified.accepted
    index_BP = jnp.minimum(accepted.node_BP, tree.size - 1)
    token_BP = jnp.take_along_axis(tree.token_BN, index_BP, axis=1)
    emitted_BP = emitted_tokens(token_BP, accepted.count_B, accepted.bonus_B)
    count_B, finish_B = _cut(emitted_BP, accepted.count_B, room_B, active_B, settings)
    last_B1 = jnp.maximum(count_B - 1, 0)[:, None]
    bonus_B = jnp.take_along_axis(emitted_BP, last_B1, axis=1)[:, 0]

    record_BR = step_record(proposed, tree, emitted_BP[:, 0], accepted.count_B - 1, drafter.depth)
    # N past the path, whatever the bucket and the cut.
    on_path_BP = jnp.arange(token_BP.shape[1], dtype=jnp.int32)[None, :] < count_B[:, None]
    node_BP = jnp.where(on_path_BP, accepted.node_BP, tree.size)
    step = Step(node_BP, token_BP, count_B, verified.hidden_BPID, bonus_B)
    new = DecodeState(
        cache=commit(state.cache, verified.path_kv, count_B),
        root_B=jnp.where(count_B > 0, bonus_B, state.root_B),
        token_BE=append(state.token_BE, emitted_BP, state.emitted_B, count_B),
        emitted_B=state.emitted_B + count_B,
        budget_B=state.budget_B,
        finish_B=jnp.where(active_B, finish_B, state.finish_B),
        drafter=drafter.observe(drafter_state, step),
        key_B=state.key_B,
        logprob_BE=(
            append(state.logprob_BE, verified.logprob_BP, state.emitted_B, count_B)
            if logprobs
            else state.logprob_BE
        ),
        record_BER=append(
            state.record_BER, record_BR[:, None, :], state.emitted_B, jnp.minimum(count_B, 1)
        ),
    )
    return new, Trace(tree, Accepted(node_BP, count_B, bonus_B))


def _verify(
    target: Transformer,
    drafter: Drafter,
    cache: KVCache,
    tree: TokenTree,
    draws: Draws,
    keys: Keys,
    settings: Settings,
    logprobs: bool,
) -> _Verified:
    """Runs the target over the smallest bucket that holds every row's valid nodes."""
    check_fit(settings.rule, drafter.children)
    P = drafter.depth + 1

    def branch(size: int) -> Any:
        def run(tree: TokenTree, draws: Draws) -> _Verified:
            part = tree.first(size)
            mask_BNN = ancestor_mask(part)
            position_BN = cache.length_B[:, None] + part.depth_BN
            out = target(part.token_BN, position_BN, mask_BNN, cache, comm=settings.comm)
            logits_BNV = out.logits_BNV[..., : settings.vocab_size]
            accepted = _accept(part, draws, mask_BNN, logits_BNV, keys, settings, P)
            # Path slots past the end of a smaller bucket mean the same as past its path: nothing.
            index_BP = jnp.minimum(accepted.node_BP, size - 1)
            hidden_BPID = jnp.take_along_axis(out.hidden_BNID, index_BP[:, :, None, None], axis=1)
            logprob_BP = jnp.zeros((index_BP.shape[0], 0))
            if logprobs:
                logprob_BP = _logprobs(part, accepted, index_BP, logits_BNV)
            return _Verified(accepted, take_path(out.tree_kv, index_BP), hidden_BPID, logprob_BP)

        return run

    buckets = drafter.buckets
    if len(buckets) == 1:
        return branch(buckets[0])(tree, draws)
    index_N = jnp.arange(tree.size, dtype=jnp.int32)[None, :]
    needed = jnp.max(jnp.where(tree.valid_BN, index_N, 0)) + 1
    which = jnp.searchsorted(jnp.asarray(buckets, jnp.int32), needed)
    return jax.lax.switch(which, [branch(size) for size in buckets], tree, draws)


def _accept(
    tree: TokenTree,
    draws: Draws,
    mask_BNN: jax.Array,
    logits_BNV: jax.Array,
    keys: Keys,
    settings: Settings,
    path_size: int,
) -> Accepted:
    """Applies the rule; p is processed only at the nodes that the rule asks for."""
    if isinstance(settings.rule, Greedy):
        return settings.rule.accept(tree, mask_BNN, best_token(logits_BNV), path_size)

    rows, vocab = draws.q_BQV.shape[1:]
    if rows and vocab != logits_BNV.shape[2]:
        raise ValueError(
            f"The drafter's q has {vocab} tokens, the target's p {logits_BNV.shape[2]}: give the "
            "same vocab_size to the drafter and to the request."
        )

    def p_at(node_B: jax.Array) -> jax.Array:
        return probabilities(pick(logits_BNV, node_B)[:, None], settings.sampling)[:, 0]

    # Draws of nodes beyond this bucket are padding; their slots must stay within the tree.
    inside = dataclasses.replace(draws, child_BM=jnp.minimum(draws.child_BM, tree.size - 1))
    return settings.rule.sample(p_at, tree, inside, keys, path_size)


def _logprobs(
    tree: TokenTree, accepted: Accepted, index_BP: jax.Array, logits_BNV: jax.Array
) -> jax.Array:
    """Returns float32 [B, P]: log p of each emitted token after its node on the path."""
    token_BP = jnp.take_along_axis(tree.token_BN, index_BP, axis=1)
    emitted_BP = emitted_tokens(token_BP, accepted.count_B, accepted.bonus_B)
    logits_BPV = jnp.take_along_axis(logits_BNV, index_BP[:, :, None], axis=1)
    chosen_BP = jnp.take_along_axis(logits_BPV, emitted_BP[:, :, None], axis=2)[..., 0]
    return (chosen_BP - jax.nn.logsumexp(logits_BPV, axis=-1)).astype(jnp.float32)


def _cut(
    emitted_BP: jax.Array,
    count_B: jax.Array,
    room_B: jax.Array,
    active_B: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Ends the run at the budget and at the first end-of-sequence token, wherever it stands.

    Returns the tokens emitted, 0 for idle rows, and how the row goes on.
    """
    P = emitted_BP.shape[1]
    count_B = jnp.minimum(jnp.minimum(count_B, room_B), settings.run_limit)
    is_eos_BP = jnp.any(emitted_BP[:, :, None] == settings.eos_E[None, None, :], axis=2)
    inside_BP = jnp.arange(P, dtype=jnp.int32)[None, :] < count_B[:, None]
    ends_BP = is_eos_BP & inside_BP
    ended_B = ends_BP.any(axis=1)
    count_B = jnp.where(ended_B, jnp.argmax(ends_BP, axis=1).astype(jnp.int32) + 1, count_B)
    finish_B = jnp.where(count_B >= room_B, LENGTH, RUNNING)
    return jnp.where(active_B, count_B, 0), jnp.where(ended_B, EOS, finish_B)
