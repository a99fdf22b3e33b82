"""The target's own answers: what a drafter should learn to say. Shards that can be resumed."""

import gzip
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.data.corpus import Document
from experiments.prompts.prompt import Message, Prompt
from models.tokenizer import Tokenizer


class Answer(NamedTuple):
    """A prompt and the ids that the target answered with, end of sequence included."""

    prompt: Prompt
    answer_ids: tuple[int, ...]

    def line(self) -> str:
        """Returns the line of a shard: what `read` needs to know, without what is not so."""
        asked = self.prompt
        row: dict[str, object] = {"kind": asked.kind, "prompt": asked.text}
        if asked.before:
            row["before"] = [[message.role, message.content] for message in asked.before]
        if asked.continued:
            row["continued"] = True
        return json.dumps({**row, "answer_ids": self.answer_ids})


def read(path: str | os.PathLike[str]) -> Iterator[Answer]:
    """Yields the answers of a JSON-lines file (.gz too) or of all shards in a folder.

    A last line that was cut off by the end of its writer is left out.

    Raises:
        ValueError: for a path without answers, or a line that is none.
    """
    path = pathlib.Path(path)
    shards = sorted(path.glob("answers-*.jsonl")) if path.is_dir() else [path]
    if not shards:
        raise ValueError(f"{path} holds no answers-*.jsonl: run experiments.make_answers first.")
    for shard in shards:
        try:
            raw = shard.read_bytes()
            raw = gzip.decompress(raw) if shard.suffix == ".gz" else raw
        except OSError as error:
            raise ValueError(
                f"{shard} cannot be read ({error}): name a file of answers."
            ) from error
        for number, line in enumerate(raw.decode("utf-8").split("\n")[:-1], 1):
            try:
                row = json.loads(line)
                asked = Prompt(
                    id=f"{shard.name}:{number}",
                    kind=row.get("kind", "chat"),
                    split="train",
                    text=row["prompt"],
                    before=tuple(Message(*said) for said in row.get("before", ())),
                    continued=row.get("continued", False),
                )
                yield Answer(asked, tuple(row["answer_ids"]))
            except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{shard}:{number} is no answer ({error!r}): it needs prompt and answer_ids."
                ) from error


def documents(
    answers: Iterator[Answer] | Sequence[Answer], tokenizer: Tokenizer
) -> Iterator[Document]:
    """Yields each conversation as a `Document` in which only the answer is to be learned."""
    for answer in answers:
        given = answer.prompt.encode(tokenizer)
        yield Document((*given, *answer.answer_ids), len(given))
