"""From what a flag says to a corpus: text:SOURCE or answers:PATH, mixed in the order given."""

import functools
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from experiments.data import answers, text
from experiments.data.corpus import Corpus, Document
from models.tokenizer import Tokenizer

# One text of so many is held out of "train:".
HELD = 16


def load(data: Sequence[str], tokenizer: Tokenizer, limit: int | None = None) -> Corpus:
    """Reads and tokenises all sources.

    Args:
        data: each "answers:PATH" (see `data.answers.read`) or "text:SOURCE" (see
            `data.text.documents`), of which "train:SOURCE" leaves every `HELD`-th out and
            "held:SOURCE" takes only those; a text ends with the end-of-sequence token.
        tokenizer: the target's.
        limit: most tokens of each source, about; None for all.

    Raises:
        ValueError: for a source that is none of these, or holds nothing.
    """
    return functools.reduce(
        Corpus.__add__, (Corpus.of(_some(source, tokenizer, limit)) for source in data)
    )


def texts(data: Sequence[str]) -> Iterator[str]:
    """Yields the texts of sources that are text.

    Raises:
        ValueError: for other sources.
    """
    for source in data:
        kind, _, where = source.partition(":")
        if kind not in ("text", "train", "held"):
            raise ValueError(f"Data {source!r}: write text:SOURCE, train:SOURCE or held:SOURCE.")
        for number, each in enumerate(text.documents(where)):
            if kind == "text" or (number % HELD == 0) == (kind == "held"):
                yield each


def prefixes(source: str, tokenizer: Tokenizer, count: int, tokens: int = 96) -> list[str]:
    """Returns the beginnings of `count` texts, each cut at the end of a line.

    Args:
        source: as in `texts`.
        tokenizer: counts tokens.
        count: how many; texts that are too short are left out.
        tokens: least size of a beginning, counted line by line; at most about one line more.

    Raises:
        ValueError: if there are fewer texts of that length.
    """
    found: list[str] = []
    for whole in texts((source,)):
        if len(found) == count:
            break
        lines, size = whole.splitlines(keepends=True), 0
        for number, line in enumerate(lines):
            size += len(tokenizer.encode(line))
            if size >= tokens:
                found.append("".join(lines[: number + 1]))
                break
    if len(found) < count:
        raise ValueError(f"{source} has {len(found)} texts of {tokens} tokens, not {count}.")
    return found


def _some(source: str, tokenizer: Tokenizer, limit: int | None) -> Iterator[Document]:
    found: Iterator[Document]
    kind, _, where = source.partition(":")
    if kind == "answers":
        found = answers.documents(answers.read(where), tokenizer)
    elif kind in ("text", "train", "held"):
        ends = tokenizer.eos_ids[:1]
        found = (Document((*tokenizer.encode(each), *ends)) for each in texts((source,)))
    else:
        raise ValueError(f"Data {source!r}: write text:SOURCE or answers:PATH.")
    size = 0
    for document in tqdm(found, desc=f"tokenise {where}", unit="document", leave=False):
        yield document
        size += len(document.token_ids)
        if limit is not None and size >= limit:
            break
