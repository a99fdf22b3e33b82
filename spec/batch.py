"""What became of every row of a batch, on the host, wherever the row is decoded."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from spec.decode import EOS, LENGTH, RUNNING, DecodeState
from spec.metrics import Metrics
from spec.request import Completion, Request
from spec.stop import StopScanner


class Batch:
    """The rows of a batch: which slot of the device's arrays each has, and what came of it.

    Rows that are finished may leave the device (`halve`); what they made is kept here.
    """

    def __init__(self, rows: int, request: Request):
        """The first `rows` slots hold the rows, in order."""
        self._stops = StopScanner(request.stop, request.token_bytes, rows)
        self._holds_back = bool(request.stop)
        self._slot = {row: row for row in range(rows)}  # of the rows on the device
        self._left: dict[int, Sequence[np.ndarray]] = {}  # made by those that are not

    def look(self, state: DecodeState) -> tuple[DecodeState, int]:
        """Reads new tokens; waits for the device.

        Returns the state, rows that met a stop string finished, and how many rows go on.
        """
        finish_B = np.array(state.finish_B)
        if self._holds_back:
            tokens, emitted = np.asarray(state.token_BE), np.asarray(state.emitted_B)
            for row, slot in self._slot.items():
                self._stops.read(row, tokens[slot, : emitted[slot]])
                if self._stops.cut[row] is not None and finish_B[slot] == RUNNING:
                    finish_B[slot] = LENGTH
            state = dataclasses.replace(state, finish_B=jax.device_put(finish_B))
        return state, int((finish_B == RUNNING).sum())

    def halve(self, state: DecodeState) -> np.ndarray:
        """Lets rows go, half of the slots; returns the slots that stay, int32 [B / 2].

        At most half of the rows may be unfinished.
        """
        finished_B = np.asarray(state.finish_B) != RUNNING
        stay = np.argsort(finished_B, kind="stable")[: len(finished_B) // 2]
        new = {int(old): slot for slot, old in enumerate(stay)}
        made = _made(state)
        for row, slot in [*self._slot.items()]:
            if slot in new:
                self._slot[row] = new[slot]
            else:
                self._left[row] = [array[slot] for array in made]
                del self._slot[row]
        return stay.astype(np.int32)

    def completions(self, state: DecodeState, hold_back: bool = False) -> list[Completion]:
        """Cuts each row at its stop string, or, on request, where one may still come to begin."""
        arrays, out = _made(state), []
        for row, cut in enumerate(self._stops.cut):
            made = self._left.get(row) or [array[self._slot[row]] for array in arrays]
            token_E, emitted, finish, record_ER, logprob_E = made
            count = int(emitted) if cut is None else self._stops.kept(row)
            if hold_back and self._holds_back and finish == RUNNING:
                count = min(count, self._stops.certain(row))
            reason: Literal["eos", "length", "stop"] = "eos" if finish == EOS else "length"
            out.append(
                Completion(
                    tuple(token_E[:count].tolist()),
                    reason if cut is None else "stop",
                    Metrics.from_records(record_ER[:count]),
                    tuple(logprob_E[:count].tolist()),
                    cut,
                )
            )
        return out


def _made(state: DecodeState) -> Sequence[np.ndarray]:
    """Returns what all rows have made so far."""
    return jax.device_get(
        (state.token_BE, state.emitted_B, state.finish_B, state.record_BER, state.logprob_BE)
    )
