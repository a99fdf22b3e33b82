"""Stop strings: looked for on the host, in the decoded bytes, each byte once."""

from collections.abc import Callable

import numpy as np


class StopScanner:
    """The text of each row so far, and where the first stop string begins in it.

    Tokens are read one by one, so that which string is complete first does not depend on how many
    tokens come at once.

    Attributes:
        cut: for each row the byte at which the string that was complete first begins, or None.
    """

    def __init__(
        self, stop: tuple[str, ...], token_bytes: Callable[[int], bytes] | None, rows: int
    ):
        """See `Request.stop` and `Request.token_bytes`; without `stop` nothing is decoded."""
        self._needles = [text.encode() for text in stop]
        self._token_bytes = token_bytes
        self._text = [bytearray() for _ in range(rows)]
        self._ends: list[list[int]] = [[] for _ in range(rows)]  # byte at which each token ends
        self.cut: list[int | None] = [None] * rows

    def read(self, row: int, tokens: np.ndarray) -> None:
        """Reads the tokens of a row (all so far) that are new, up to the first stop string."""
        if not self._needles or self.cut[row] is not None:
            return
        assert self._token_bytes is not None
        text, ends = self._text[row], self._ends[row]
        for token in tokens[len(ends) :]:
            old = len(text)
            text += self._token_bytes(int(token))
            ends.append(len(text))
            hits = [text.find(needle, max(0, old - len(needle) + 1)) for needle in self._needles]
            self.cut[row] = min((hit for hit in hits if hit >= 0), default=None)
            if self.cut[row] is not None:
                return

    def kept(self, row: int) -> int:
        """Returns how many tokens begin before the stop string that was met."""
        cut = self.cut[row]
        assert cut is not None
        return self._begin_before(row, cut)

    def certain(self, row: int) -> int:
        """Returns how many of the tokens read no later stop string can take back.

        The longest end of the text that begins a stop string is in doubt, and with it every token
        that touches it.
        """
        text, ends = self._text[row], self._ends[row]
        doubt = max(
            (
                n
                for needle in self._needles
                for n in range(1, len(needle))
                if text[-n:] == needle[:n]
            ),
            default=0,
        )
        limit = len(text) - doubt
        return min(self._begin_before(row, limit), sum(end <= limit for end in ends))

    def _begin_before(self, row: int, byte: int) -> int:
        return sum(begin < byte for begin in [0, *self._ends[row]][:-1])
