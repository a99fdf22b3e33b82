"""What is asked of the decoder, and what it answers."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Literal

from models.config import ModelConfig
from spec.metrics import Metrics
from spec.sampling import GREEDY_BELOW, check_controls
from spec.verify import rule


@dataclasses.dataclass(frozen=True)
class Request:
    """How to continue a batch of prompts.

    Attributes:
        max_new_tokens: budget of every row, >= 0 tokens.
        eos_ids: ids that end a row; may be empty.
        vocab_size: ids that the tokenizer knows; None for the whole table. Ids from here on are
            padding of the embedding table and are never chosen.
        max_length: most tokens of prompt and output together; None for the model's own limit.
        stop: strings that end a row; neither they nor anything after is returned.
        token_bytes: bytes of a token id, needed for `stop` (`Tokenizer.token_bytes`).
        temperature: 0 decodes greedily; more samples.
        top_k: most probable tokens kept, 0 for all.
        top_p: least probability kept, in (0, 1].
        rule: name of the verification rule; None for the usual one of the drafter's children.
        logprobs: return log-probabilities.
        seed: of the random keys. A number: row i is request i of that seed, and a caller who
            gives none has seed 0. A tuple: one seed a row, whose tokens then depend on nothing
            but it, the prompt and the settings.
        run_limit: most tokens a step may emit; None for as many as are accepted.
        reserve: tokens (prompt and output) to pad for at least, so that batches of different
            lengths share one compiled program.
        compact: whether a batch goes on in half its size once no more than half of its rows are
            unfinished. Every size is one more program (some 8 s on a CPU at 135M), so it
            pays where many batches follow each other; tokens are the same.
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    max_length: int | None = None
    stop: tuple[str, ...] = ()
    token_bytes: Callable[[int], bytes] | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    rule: str | None = None
    logprobs: bool = False
    seed: int | tuple[int, ...] = 0
    run_limit: int | None = None
    reserve: int = 1
    compact: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be done."""
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens} must be 0 or more.")
        if self.stop and (self.token_bytes is None or "" in self.stop):
            raise ValueError(f"stop = {self.stop}: give token_bytes with it, and no empty string.")
        check_controls(self.temperature, self.top_k, self.top_p)
        for seed in self.seed if isinstance(self.seed, tuple) else (self.seed,):
            if not 0 <= operator.index(seed) < 2**32:
                raise ValueError(f"seed = {seed} must lie in 0..{2**32 - 1}.")
        if self.rule is not None:
            rule(self.rule)
        if self.rule == "greedy" and self.temperature >= GREEDY_BELOW:
            raise ValueError(
                f"The rule 'greedy' takes the best token, temperature = {self.temperature} asks "
                "for draws: leave one of them out."
            )
        if self.run_limit is not None and self.run_limit < 1:
            raise ValueError(f"run_limit = {self.run_limit} must be at least 1.")

    def limit(self, config: ModelConfig) -> int:
        """Returns the most tokens of prompt and output together, for such a target."""
        return config.max_positions if self.max_length is None else self.max_length

    def vocab(self, config: ModelConfig) -> int:
        """Returns how many ids may be chosen, for such a target."""
        return config.vocab_size if self.vocab_size is None else self.vocab_size


@dataclasses.dataclass(frozen=True)
class Completion:
    """Continuation of one prompt.

    Attributes:
        token_ids: emitted tokens, an ending end-of-sequence token included. After a stop string:
            the tokens that begin before it.
        finish_reason: "eos", "length" (budget or the model's limit) or "stop".
        metrics: counts of the target steps that made these tokens.
        logprobs: natural log-probability of each token under the target's own softmax (before
            temperature, top-k and top-p); empty unless asked for.
        stop_bytes: with finish reason "stop", how many bytes of the tokens' text to keep.
    """

    token_ids: tuple[int, ...]
    finish_reason: Literal["eos", "length", "stop"]
    metrics: Metrics
    logprobs: tuple[float, ...] = ()
    stop_bytes: int | None = None
