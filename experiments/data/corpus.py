"""Tokens with the little that training must know of each, and rows cut from them."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np


class Document(NamedTuple):
    """Token ids, and how many of the first are context only, not to be learned."""

    token_ids: Sequence[int]
    given: int = 0


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents end to end. n tokens.

    Attributes:
        token_n: int32 ids.
        document_n: int32, number of the token's document.
        learn_n: bool, whether the token is worth predicting: not the first of its document, not
            part of a prompt.
    """

    token_n: np.ndarray
    document_n: np.ndarray
    learn_n: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Self:
        """Joins documents; empty ones are left out.

        Raises:
            ValueError: if nothing is left.
        """
        tokens: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        learn: list[np.ndarray] = []
        for each in documents:
            if not len(each.token_ids):
                continue
            size = len(each.token_ids)
            numbers.append(np.full(size, len(tokens), np.int32))
            tokens.append(np.asarray(each.token_ids, np.int32))
            learn.append(np.arange(size) >= max(each.given, 1))
        if not tokens:
            raise ValueError("No document has any token: nothing to learn from.")
        return cls(np.concatenate(tokens), np.concatenate(numbers), np.concatenate(learn))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            return cls(file["token_n"], file["document_n"], file["learn_n"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one .npz file; a reader sees all of it or none."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.tmp.npz")
        np.savez(temporary, **dataclasses.asdict(self))
        os.replace(temporary, path)

    def fingerprint(self) -> str:
        """Returns 12 hex digits that say which tokens these are, and where documents begin."""
        digest = hashlib.sha256(self.token_n.tobytes())
        digest.update(self.document_n.tobytes())
        return digest.hexdigest()[:12]

    def __add__(self, other: Self) -> Self:
        """Puts another corpus behind this one."""
        behind = other.document_n + self.document_n[-1] + 1
        return type(self)(
            np.concatenate((self.token_n, other.token_n)),
            np.concatenate((self.document_n, behind)).astype(np.int32),
            np.concatenate((self.learn_n, other.learn_n)),
        )


def frequent_tokens(corpus: Corpus, size: int, always: Iterable[int]) -> np.ndarray:
    """Returns the ids of a drafter's reduced vocabulary, int32 ascending.

    Args:
        corpus: counted where tokens are learned.
        size: U, how many.
        always: ids that belong to it whatever their frequency, such as the end of sequence.

    Raises:
        ValueError: if `always` alone is more than `size`.
    """
    kept = sorted(set(always))
    if len(kept) > size:
        raise ValueError(f"{len(kept)} ids must be kept, more than the {size} of the vocabulary.")
    count_V = np.bincount(corpus.token_n[corpus.learn_n], minlength=size + len(kept))
    count_V[kept] = 0
    # A stable sort, so that ties go to the smaller id on every machine.
    order = np.argsort(-count_V, kind="stable")
    order = order[~np.isin(order, kept)]
    return np.sort(np.concatenate((kept, order[: size - len(kept)]))).astype(np.int32)


def row_of_token(ids_U: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns for every token id its row in the reduced head, -1 where it has none; int32 [V]."""
    row_V = np.full(vocab_size, -1, np.int32)
    row_V[ids_U] = np.arange(len(ids_U), dtype=np.int32)
    return row_V
