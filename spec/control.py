"""Which tree now: a drafter that chooses, step by step, what is worth its time.

Every option is a number of lookup nodes, with or without the model's tree. A step's worth is its
expected tokens over its measured seconds. What is expected is learned while decoding, row by row:
the lookup's guess is compared with what was emitted whether or not it was drafted (looking up is
nearly free), the model's whenever it ran. All estimates fall back towards where they began, so
that what was given up is tried again, and a text that changes is followed.

Choosing by goodput follows SmartSpec (arXiv 2406.14066); expected accepts over measured passes
follows Sequoia (arXiv 2402.12374, section 3.3).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec.drafters.ensemble import combine, own_step
from spec.drafters.feature import FeatureDrafter
from spec.drafters.model import ModelDrafter
from spec.drafters.ngram import Found, History, NGramDrafter
from spec.drafters.protocol import Step, View
from spec.draws import Children, Draws, drop_invalid, point_mass
from spec.tree import TokenTree, emitted_tokens

# Weight of one observation; share by which an estimate falls back in a step.
LEARN, FORGET = 1 / 8, 1 / 64


class Option(NamedTuple):
    """What a step may draft: lookup nodes, root included, and whether the model drafts too."""

    nodes: int
    model: bool


class Odds(NamedTuple):
    """How often a drafter is right: its first guess, and each next one after a right one.

    Attributes:
        first: in 0..1; [..., C] for the lookup, by length of its match, [...] for the model.
        next: the same.
    """

    first: jax.Array
    next: jax.Array


class ControlState(NamedTuple):
    """State: the members', what they guessed, and how right they have been, row by row."""

    lookup: History
    model: Any
    own_BN: tuple[jax.Array, ...]
    lookup_odds: Odds
    model_odds: Odds
    match_B: jax.Array
    guess_BD: jax.Array
    guessed_B: jax.Array
    drafted_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveDrafter:
    """Drafts what pays now: nothing, a lookup, a model's tree, or both. Implements `Drafter`.

    The model's children must be deterministic: which of them are checked depends on more than
    their depth, so only the point-mass rules stay exact.

    Attributes:
        lookup: its largest size holds the most nodes of any option.
        model: drafts its whole tree or nothing, and may lag behind; None for lookups alone.
        lookup_prior: float32 odds [C], C = window + 1, to begin with and to fall back to.
        model_prior: float32 odds of the model's tree, scalars.
        seconds_O: float32, what a step of each option costs, see `experiments.common.costs`.
        forced: int32, the option that every row takes, to measure; -1 for the best.
        options: ascending; the first drafts nothing.
    """

    lookup: NGramDrafter
    model: ModelDrafter | FeatureDrafter | None
    lookup_prior: Odds
    model_prior: Odds
    seconds_O: jax.Array
    forced: jax.Array
    options: tuple[Option, ...] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        """Refuses options that the members cannot fill, and children that may not be chosen."""
        if not isinstance(self.lookup, NGramDrafter):
            return  # a pytree of something else, in the hands of JAX
        nodes = [option.nodes for option in self.options]
        if self.options[0] != Option(1, False) or max(nodes) != self.lookup.buckets[-1]:
            raise ValueError(
                f"options {self.options}: the first must draft nothing, and the largest lookup "
                f"take the {self.lookup.buckets[-1]} nodes of the lookup."
            )
        if any(option.model for option in self.options) != (self.model is not None):
            raise ValueError(f"options {self.options} ask for a model: give one, or leave it out.")
        if self.model is not None and self.model.how is not Children.TOP_K:
            raise ValueError(
                f"Children {self.model.how.value!r} of the model: which nodes are checked is "
                "chosen by more than their depth, so use top_k."
            )
        if self.model is not None and not self.model.lag:
            raise ValueError("The model's lag is 0: it must be able to wait, give it 48 tokens.")

    @property
    def depth(self) -> int:
        """Of the deeper member."""
        return max(self.lookup.depth, 0 if self.model is None else self.model.depth)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The options' sizes."""
        return tuple(sorted({self._size(option) for option in self.options}))

    @property
    def children(self) -> frozenset[Children]:
        """Deterministic, merged."""
        return frozenset({Children.TOP_K, Children.MERGED})

    def _size(self, option: Option) -> int:
        extra = self.model.shape.size - 1 if option.model and self.model is not None else 0
        return option.nodes + extra

    def init(
        self,
        token_BT: jax.Array,
        length_B: jax.Array,
        hidden_BTID: jax.Array,
        capacity: int,
        path_size: int,
    ) -> ControlState:
        """Starts both members, with the odds that were given."""
        B = token_BT.shape[0]
        given = token_BT, length_B, hidden_BTID, capacity, path_size
        members = 1 if self.model is None else 2
        zero_B = jnp.zeros(B, jnp.int32)

        def each(prior: Odds) -> Odds:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), prior)

        return ControlState(
            self.lookup.init(*given),
            () if self.model is None else self.model.init(*given),
            (jnp.zeros((B, self.buckets[-1]), jnp.int32),) * members,
            each(self.lookup_prior),
            each(self.model_prior),
            zero_B,
            jnp.zeros((B, self.lookup.depth), jnp.int32),
            zero_B,
            jnp.zeros(B, jnp.bool_),
        )

    def propose(
        self, state: ControlState, view: View, key_B: jax.Array
    ) -> tuple[TokenTree, Draws, ControlState]:
        """Chooses an option for every row and drafts it."""
        found = self.lookup.look_up(state.lookup, view.root_B)
        choice_B = jnp.argmax(self.worth(state, found), axis=1)
        choice_B = jnp.where(self.forced < 0, choice_B, self.forced)
        nodes_O, model_O = (jnp.asarray(column) for column in zip(*self.options, strict=True))
        tree = self.lookup.heaviest(found, nodes_O[choice_B].astype(jnp.int32))
        trees, drawn, model = [tree], [point_mass(tree)], state.model
        drafted_B = jnp.zeros_like(view.active_B)
        if self.model is not None:
            drafted_B = model_O[choice_B] & view.active_B
            tree, draws, model = self._drafted(state.model, view, key_B, drafted_B)
            trees.append(tree)
            drawn.append(draws)
        merged, draws, own_BN = combine(trees, drawn, self.buckets[-1])
        _, valid_BD = self._guess(found)
        return (
            merged,
            draws,
            state._replace(
                model=model,
                own_BN=own_BN,
                match_B=found.run_B,
                guess_BD=found.chains.token_BN[:, 1 : 1 + self.lookup.depth],
                guessed_B=jnp.sum(valid_BD, axis=1, dtype=jnp.int32),
                drafted_B=drafted_B,
            ),
        )

    def worth(self, state: ControlState, found: Found) -> jax.Array:
        """Returns expected tokens a second of every option, float32 [B, O]."""
        first_B, next_B = (
            jnp.take_along_axis(x_BC, found.run_B[:, None], axis=1)[:, 0]
            for x_BC in state.lookup_odds
        )
        rank_BD, valid_BD = self._guess(found)
        model_B = jnp.zeros_like(first_B)
        if self.model is not None:
            model_B = _expected(*state.model_odds, jnp.asarray(self.model.depth))
        columns = []
        for option in self.options:
            depth_B = jnp.sum(valid_BD & (rank_BD < option.nodes), axis=1)
            tokens_B = 1 + _expected(first_B, next_B, depth_B)
            if option.model:
                tokens_B += jnp.where(depth_B > 0, 1 - first_B, 1.0) * model_B
            columns.append(tokens_B)
        return jnp.stack(columns, axis=1) / self.seconds_O[None, :]

    def _guess(self, found: Found) -> tuple[jax.Array, jax.Array]:
        """Returns of the best match's continuation: places by weight, and which are real."""
        D = self.lookup.depth
        heavier_BDN = found.votes_BN[:, None, :] > found.votes_BN[:, 1 : 1 + D, None]
        index_N = jnp.arange(found.votes_BN.shape[1], dtype=jnp.int32)
        equal_BDN = found.votes_BN[:, None, :] == found.votes_BN[:, 1 : 1 + D, None]
        before_BDN = equal_BDN & (index_N[None, None, :] < index_N[None, 1 : 1 + D, None])
        rank_BD = jnp.sum(heavier_BDN | before_BDN, axis=2)
        return rank_BD, found.chains.valid_BN[:, 1 : 1 + D]

    def _drafted(
        self, state: Any, view: View, key_B: jax.Array, wanted_B: jax.Array
    ) -> tuple[TokenTree, Draws, Any]:
        """Runs the model if any row wants it, or if it must read before its queue is full."""
        model = self.model
        assert model is not None

        def run(state: Any) -> tuple[TokenTree, Draws, Any]:
            return model.propose(state, view, key_B)

        def wait(state: Any) -> tuple[TokenTree, Draws, Any]:
            tree, draws, _ = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, state)
            )
            root = jnp.arange(tree.size, dtype=jnp.int32)[None, :] == 0
            valid_BN = jnp.broadcast_to(root, tree.valid_BN.shape)
            token_BN = tree.token_BN.at[:, 0].set(view.root_B)
            return dataclasses.replace(tree, token_BN=token_BN, valid_BN=valid_BN), draws, state

        now = jnp.any(wanted_B) | model.is_full(state)
        tree, draws, state = jax.lax.cond(now, run, wait, state)
        root_N = jnp.arange(tree.size, dtype=jnp.int32) == 0
        tree = dataclasses.replace(
            tree, valid_BN=tree.valid_BN & (wanted_B[:, None] | root_N[None, :])
        )
        return tree, drop_invalid(draws, tree), state

    def observe(self, state: ControlState, step: Step) -> ControlState:
        """Tells the members, and learns from what was emitted."""
        emitted_BP = emitted_tokens(step.token_BP, step.count_B, step.bonus_B)
        D = min(self.lookup.depth, emitted_BP.shape[1])
        index_D = jnp.arange(D, dtype=jnp.int32)[None, :]
        right_BD = emitted_BP[:, :D] == state.guess_BD[:, :D]
        right_BD &= (index_D < state.guessed_B[:, None]) & (index_D < step.count_B[:, None])
        right_B = _leading(right_BD)
        active_B = step.count_B > 0
        C = state.lookup_odds.first.shape[1]
        here_BC = state.match_B[:, None] == jnp.arange(C, dtype=jnp.int32)[None, :]
        lookup_odds = _learned(
            _fallen_back(state.lookup_odds, self.lookup_prior, active_B[:, None]),
            right_B[:, None],
            jnp.minimum(state.guessed_B, D)[:, None],
            step.count_B[:, None],
            here_BC & (active_B & (state.guessed_B > 0))[:, None],
        )
        model, model_odds = state.model, state.model_odds
        if self.model is not None:
            size = self.model.buckets[-1]
            own = own_step(step, state.own_BN[1], size)
            model = self.model.observe(state.model, own)
            mine_BP = _leading(own.node_BP[:, 1:] < size)
            model_odds = _learned(
                _fallen_back(state.model_odds, self.model_prior, active_B),
                mine_BP,
                jnp.full_like(mine_BP, self.model.depth),
                step.count_B,
                active_B & state.drafted_B,
            )
        lookup_step = own_step(step, state.own_BN[0], self.lookup.buckets[-1])
        return state._replace(
            lookup=self.lookup.observe(state.lookup, lookup_step),
            model=model,
            lookup_odds=lookup_odds,
            model_odds=model_odds,
        )


def _expected(first: jax.Array, then: jax.Array, depth: jax.Array) -> jax.Array:
    """Returns expected accepts of a chain: first (1 + then + then^2 + ...), `depth` terms."""
    then = jnp.minimum(then, 0.999)
    return first * (1 - then ** depth.astype(then.dtype)) / (1 - then)


def _leading(right_BD: jax.Array) -> jax.Array:
    """Counts the True before the first False of each row: int32 [B]."""
    return jnp.sum(jnp.cumprod(right_BD.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _fallen_back(odds: Odds, prior: Odds, active: jax.Array) -> Odds:
    """Moves odds of active rows a little towards where they began."""

    def move(now: jax.Array, began: jax.Array) -> jax.Array:
        return now + jnp.where(active, FORGET, 0.0) * (jnp.broadcast_to(began, now.shape) - now)

    return jax.tree.map(move, odds, prior)


def _learned(
    odds: Odds, right: jax.Array, guessed: jax.Array, emitted: jax.Array, seen: jax.Array
) -> Odds:
    """Moves odds towards what was seen: `right` of the guesses at the head of `emitted` tokens.

    The first guess is one trial; each further one is a trial if those before it were right and
    a token was emitted to compare it with.
    """
    first = odds.first + jnp.where(seen, LEARN, 0.0) * (
        (right > 0).astype(odds.first.dtype) - odds.first
    )
    hits = jnp.maximum(right - 1, 0)
    missed = (right > 0) & (right < guessed) & (right < emitted)
    hits = hits.astype(odds.next.dtype)
    trials = hits + missed.astype(hits.dtype)
    share = hits / jnp.maximum(trials, 1)
    weight = jnp.where(seen, 1 - (1 - LEARN) ** trials, 0.0)
    return Odds(first, odds.next + weight * (share - odds.next))
