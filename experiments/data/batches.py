"""From a corpus to batches: packed, shuffled, and found again by their number alone."""

from typing import Protocol, SupportsIndex

import grain
import numpy as np

from experiments.data.corpus import Corpus
from models.losses import Batch


class RowSource(Protocol):
    """Rows of equal length by number; a grain data source."""

    length: int

    def __len__(self) -> int:
        """Rows in all."""
        ...

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        """Returns fields of `Batch` for one row, without the B axis."""
        ...


class Rows:
    """Rows of T tokens and the one after, cut from a corpus; a grain data source.

    A row begins where the last one ended, whatever the documents; positions are counted from the
    start of a document or of the row.
    """

    def __init__(self, corpus: Corpus, length: int, row_V: np.ndarray | None):
        """Keeps what rows are cut from.

        Args:
            corpus: see `Corpus`.
            length: T.
            row_V: row of the drafter's head for each token id, -1 for none; None if they are the
                same.

        Raises:
            ValueError: if the corpus does not fill one row.
        """
        if len(corpus.token_n) <= length:
            raise ValueError(
                f"The corpus has {len(corpus.token_n)} tokens, a row of {length} needs one more: "
                "take shorter rows or more text."
            )
        self.corpus, self.length, self.row_V = corpus, length, row_V

    def __len__(self) -> int:
        return (len(self.corpus.token_n) - 1) // self.length

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        corpus, T = self.corpus, self.length
        at = slice(int(index) * T, int(index) * T + T + 1)
        token, document = corpus.token_n[at], corpus.document_n[at]
        segment = document - document[0]
        first = np.concatenate(([True], segment[1:] != segment[:-1]))
        start = np.maximum.accumulate(np.where(first, np.arange(T + 1), 0))
        label, learn = token[1:], corpus.learn_n[at][1:] & ~first[1:]
        if self.row_V is not None:
            label = self.row_V[label]
            learn = learn & (label >= 0)
        return {
            "token_BT": token[:-1],
            "position_BT": (np.arange(T + 1) - start)[:-1].astype(np.int32),
            "segment_BT": segment[:-1].astype(np.int32),
            "label_BT": np.maximum(label, 0).astype(np.int32),
            "weight_BT": learn.astype(np.float32),
        }


class Batches:
    """An endless sequence of batches: `batches[step]` is the same on every run and machine.

    So the number of the step is all there is to save, and resumption is exact.
    """

    def __init__(self, rows: RowSource, batch_size: int, seed: int):
        """Shuffles anew in every epoch; `batch_size` rows each, an incomplete last one left out.

        Raises:
            ValueError: if there are fewer rows than a batch takes.
        """
        if len(rows) < batch_size:
            raise ValueError(
                f"{len(rows)} rows of {rows.length} tokens do not make a batch of {batch_size}: "
                "take a smaller batch, shorter rows or more text."
            )
        data = grain.MapDataset.source(rows).seed(seed).shuffle()
        self.epoch = len(rows) // batch_size
        self._batches = data.repeat().batch(batch_size, drop_remainder=True)

    def __getitem__(self, step: int) -> Batch:
        """Returns batch number `step`, numpy arrays."""
        return Batch(**self._batches[step])
