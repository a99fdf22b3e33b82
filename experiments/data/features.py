"""The target's hidden state at every token of a corpus, computed once and kept on disk."""

import json
import os
import pathlib
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.data.batches import Rows
from models.losses import Batch
from models.transformer import Transformer

AT_ONCE = 8


class HiddenRows:
    """Rows with the target's state at each token; a grain data source like `Rows`.

    Attributes:
        rows: the rows without features.
        length: T.
    """

    def __init__(self, rows: Rows, hidden_nTID: np.ndarray):
        """Takes hidden states of every row, [rows, T, I, D], from `hidden_states`."""
        self.rows, self.length, self._hidden_nTID = rows, rows.length, hidden_nTID

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        hidden_TID = np.asarray(self._hidden_nTID[int(index)], np.float32)
        return {**self.rows[index], "hidden_BTID": hidden_TID}


def hidden_states(rows: Rows, target: Transformer, path: str | os.PathLike[str]) -> np.ndarray:
    """Returns float16 [rows, T, I, D], the target's states, from disk or computed.

    Can be interrupted and called again. A row's documents do not see each other.

    Args:
        rows: of the corpus.
        target: the model; its taps say which I - 1 states there are beside the final norm's.
        path: of an .npy file; beside it, a note says how far it is.

    Raises:
        ValueError: if the file there has another shape.
    """
    path = pathlib.Path(path)
    shape = (len(rows), rows.length, len(target.taps) + 1, target.config.d_model)
    note = path.with_suffix(".json")
    if path.exists():
        hidden = np.lib.format.open_memmap(path, mode="r+")
        if hidden.shape != shape:
            raise ValueError(
                f"{path} holds features of shape {hidden.shape}, this corpus needs {shape}: "
                "choose another file."
            )
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    first = json.loads(note.read_text())["rows"] if note.exists() else 0
    for start in tqdm(range(first, len(rows), AT_ONCE), desc="features", unit="batch"):
        # The last batch reaches back, so that there is one compiled shape.
        at = range(max(min(start, len(rows) - AT_ONCE), 0), min(start + AT_ONCE, len(rows)))
        some = [rows[i] for i in at]
        fields: dict[str, Any] = {name: np.stack([row[name] for row in some]) for name in some[0]}
        batch = Batch(**fields)
        hidden[at.start : at.stop] = np.asarray(_hidden(target, batch), np.float16)
        hidden.flush()
        note.write_text(json.dumps({"rows": at.stop}))
    return hidden


@jax.jit
def _hidden(target: Transformer, batch: Batch) -> jax.Array:
    hidden = target(batch.token_BT, batch.position_BT, batch.mask()).hidden_BNID
    return hidden.astype(jnp.float16)
