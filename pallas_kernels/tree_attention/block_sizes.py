"""Block sizes as data: what was tuned where, and a default that runs everywhere.

No device has been tuned yet, so the table is empty and the default serves all.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of one kernel launch.

    Attributes:
        kv: cached tokens read at once.
        rows: queries times heads of a kv head, computed at once.
    """

    kv: int
    rows: int


# Small enough for the 16 MB of VMEM that a v5e kernel gets, in float32 with heads of 256 and 256
# nodes (`tpu.vmem_bytes`); large enough that a block of the cache is a long read.
DEFAULT = Blocks(kv=512, rows=256)

# Device kind, bucket of rows, bucket of tree nodes, head size, bucket of slots, bytes an element.
Key = tuple[str, int, int, int, int, int]
TUNED: dict[Key, Blocks] = {}


def bucket(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def key_of(
    device_kind: str, rows: int, nodes: int, head_size: int, slots: int, itemsize: int
) -> Key:
    """Returns the entry of `TUNED` that serves a shape: all that memory on the chip depends on."""
    return device_kind, bucket(rows), bucket(nodes), head_size, bucket(slots), itemsize


def blocks_for(
    device_kind: str, rows: int, nodes: int, head_size: int, slots: int, itemsize: int
) -> Blocks:
    """Returns the tuned sizes for a bucketed shape, or the default.

    Args:
        device_kind: as `jax.Device.device_kind` says it, such as "TPU v5 lite".
        rows: queries of a row times query heads of a kv head.
        nodes: M, tree nodes.
        head_size: A.
        slots: cached tokens a row can hold.
        itemsize: bytes of an element of the cache.
    """
    return TUNED.get(key_of(device_kind, rows, nodes, head_size, slots, itemsize), DEFAULT)
