"""From what a flag says to a corpus: text:SOURCE or answers:PATH, mixed in the order given."""

import functools
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from experiments.data import answers, text
from experiments.data.corpus import Corpus, Document
from models.tokenizer import Tokenizer


def load(data: Sequence[str], tokenizer: Tokenizer, limit: int | None = None) -> Corpus:
    """Reads and tokenises all sources.

    Args:
        data: each "text:SOURCE" (see `data.text.documents`) or "answers:PATH" (see
            `data.answers.read`); a text document ends with the end-of-sequence token.
        tokenizer: the target's.
        limit: most tokens of each source, about; None for all.

    Raises:
        ValueError: for a source that is neither, or holds nothing.
    """
    return functools.reduce(
        Corpus.__add__, (Corpus.of(_some(source, tokenizer, limit)) for source in data)
    )


def _some(source: str, tokenizer: Tokenizer, limit: int | None) -> Iterator[Document]:
    found: Iterator[Document]
    kind, _, where = source.partition(":")
    if kind == "text":
        ends = tokenizer.eos_ids[:1]
        found = (Document((*tokenizer.encode(each), *ends)) for each in text.documents(where))
    elif kind == "answers":
        found = answers.documents(answers.read(where), tokenizer)
    else:
        raise ValueError(f"Data {source!r}: write text:SOURCE or answers:PATH.")
    size = 0
    for document in tqdm(found, desc=f"tokenise {where}", unit="document", leave=False):
        yield document
        size += len(document.token_ids)
        if limit is not None and size >= limit:
            break
