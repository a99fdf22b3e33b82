"""How heads, feed-forward width and vocabulary sit on tensor ranks that they do not divide over.

Each rank has whole groups: key/value heads, and for each the same number of query heads. With
fewer key/value heads than ranks, a head sits on several ranks, and each of them has a share of its
query heads. Otherwise groups are added whose weights are zeros: they attend to nothing, and what
they say is multiplied by zero. 9 query and 3 key/value heads, whose group is [q q q | k]:

    1 rank    [0 1 2 | 0] [3 4 5 | 1] [6 7 8 | 2]
    2 ranks   [0 1 2 | 0] [3 4 5 | 1]   [6 7 8 | 2] [- - - | -]
    4 ranks   [0 1 2 | 0]   [3 4 5 | 1]   [6 7 8 | 2]   [- - - | -]
    6 ranks   [0 1 | 0]   [2 - | 0]   [3 4 | 1]   [5 - | 1]   [6 7 | 2]   [8 - | 2]
    9 ranks   [0 | 0]   [1 | 0]   [2 | 0]   [3 | 1] ...
"""

import dataclasses

from models.config import ModelConfig
from models.transformer import Transformer
from parallel.seats import EMPTY, Seats, seated


def seats_of(config: ModelConfig, ranks: int) -> dict[str, tuple[int, ...]]:
    """Returns the seats of every axis letter that does not divide over the ranks.

    Args:
        config: the model's shape.
        ranks: devices of the axis `tensor`.

    Raises:
        ValueError: if there are more ranks than query heads, or than entries of another axis.
    """
    H, K = config.num_heads, config.num_kv_heads
    for letter, what in (
        ("H", "query heads"),
        ("F", "feed-forward features"),
        ("V", "tokens of the vocabulary"),
        ("U", "rows of the head"),
    ):
        if config.sizes[letter] < ranks:
            raise ValueError(
                f"{ranks} devices on the mesh axis 'tensor' for {config.sizes[letter]} {what}: "
                f"some would only have padding; use at most {config.sizes[letter]}."
            )
    out = {letter: _padded([*range(config.sizes[letter])], ranks) for letter in "FVU"}
    groups = -(-K // ranks) * ranks
    copies, G = groups // K, H // K
    share = -(-G // copies)
    dealt = [
        k * G + g if g < G else EMPTY for k in range(K) for g in range(copies * share)
    ]  # a head's queries, `share` to each of its copies
    out["H"] = tuple(dealt + [EMPTY] * (groups * share - len(dealt)))
    out["K"] = _padded([k for k in range(K) for _ in range(copies)], groups)
    return {
        letter: seats for letter, seats in out.items() if [*seats] != [*range(config.sizes[letter])]
    }


def on_ranks(model: Transformer, ranks: int) -> Transformer:
    """Returns the same decoder with heads and feed-forward width that divide over the ranks.

    For decoding (`sharding.TENSOR_PARALLEL`): its logits are those of `model`, on one device too.
    Training needs no such copy, its step seats the weights itself.

    Args:
        model: the decoder.
        ranks: devices of the axis `tensor`.

    Raises:
        ValueError: see `seats_of`.
    """
    seats: Seats = {
        letter: each for letter, each in seats_of(model.config, ranks).items() if letter in "HKF"
    }
    out: Transformer = seated(model, seats)
    sizes = {letter: len(seats.get(letter, range(model.config.sizes[letter]))) for letter in "HKF"}
    out.config = dataclasses.replace(
        model.config, num_heads=sizes["H"], num_kv_heads=sizes["K"], d_ff=sizes["F"]
    )
    return out


def _padded(entries: list[int], ranks: int) -> tuple[int, ...]:
    return tuple(entries + [EMPTY] * (-len(entries) % ranks))
