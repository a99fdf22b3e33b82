"""Conversations turn by turn: the user's next message follows the model's own answer."""

import dataclasses
from collections.abc import Iterable

from experiments.prompts.prompt import Prompt
from models.tokenizer import Tokenizer
from spec.generate import Completion


def cut(prompts: Iterable[Prompt], turns: int | None) -> list[Prompt]:
    """Returns the prompts with at most `turns` messages of the user's to answer; None for all."""
    keep = None if turns is None else turns - 1
    return [dataclasses.replace(prompt, later=prompt.later[:keep]) for prompt in prompts]


def room(tokenizer: Tokenizer, prompts: Iterable[Prompt], budget: int, limit: int) -> int:
    """Returns how many tokens the longest conversation can come to, all its answers included.

    Known before the first answer, so that all turns share one compiled program. Only an answer
    that ends within a character, or is cut into tokens as no tokenizer would, is longer as text.

    Args:
        tokenizer: the model's.
        prompts: at least one.
        budget: most tokens of an answer.
        limit: most tokens that the model reads.

    Raises:
        ValueError: if a prompt cannot be encoded, or could grow beyond the limit.
    """
    longest = 0
    for prompt in prompts:
        last, answers = prompt, 0
        while last.later:
            last, answers = last.next_turn(""), answers + budget
        tokens = len(last.encode(tokenizer)) + answers
        if tokens > limit:
            fix = f", --turns below {1 + len(prompt.later)}" if prompt.later else ""
            raise ValueError(
                f"Prompt {last.id!r} can come to {tokens} tokens and the model reads {limit}: "
                f"leave it out{fix}{' or fewer new tokens' if answers else ''}."
            )
        longest = max(longest, tokens + budget)
    return longest


def following(
    tokenizer: Tokenizer, prompts: Iterable[Prompt], answers: Iterable[Completion]
) -> list[Prompt]:
    """Returns the next turn of every conversation that has one."""
    return [
        prompt.next_turn(tokenizer.decode(answer.token_ids))
        for prompt, answer in zip(prompts, answers, strict=True)
        if prompt.later
    ]
