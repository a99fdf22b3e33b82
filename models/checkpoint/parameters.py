"""Which stored tensor fills which parameter: the one table that every checkpoint format reads."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.transformer import Transformer

Shape = tuple[int, ...]

# Parameter path with the block number as `{}` -> Hugging Face name, GGUF name, and how many of the
# parameter's leading axes are input features. Files keep a linear layer as [out, in] and do not
# split heads; 0 is a vector; None is the embedding table, which files keep as we do.
_TABLE: dict[str, tuple[str, str, int | None]] = {
    "embed_VD": ("model.embed_tokens.weight", "token_embd.weight", None),
    "final_norm.scale_D": ("model.norm.weight", "output_norm.weight", 0),
    "head_DU": ("lm_head.weight", "output.weight", 1),
} | {
    f"blocks.{{}}.{ours}": (f"model.layers.{{}}.{hugging_face}", f"blk.{{}}.{gguf}", inputs)
    for ours, hugging_face, gguf, inputs in (
        ("attention_norm.scale_D", "input_layernorm.weight", "attn_norm.weight", 0),
        ("attention.q_DHA", "self_attn.q_proj.weight", "attn_q.weight", 1),
        ("attention.k_DKA", "self_attn.k_proj.weight", "attn_k.weight", 1),
        ("attention.v_DKA", "self_attn.v_proj.weight", "attn_v.weight", 1),
        ("attention.o_HAD", "self_attn.o_proj.weight", "attn_output.weight", 2),
        ("attention.q_bias_HA", "self_attn.q_proj.bias", "attn_q.bias", 0),
        ("attention.k_bias_KA", "self_attn.k_proj.bias", "attn_k.bias", 0),
        ("attention.v_bias_KA", "self_attn.v_proj.bias", "attn_v.bias", 0),
        ("attention.o_bias_D", "self_attn.o_proj.bias", "attn_output.bias", 0),
        ("mlp_norm.scale_D", "post_attention_layernorm.weight", "ffn_norm.weight", 0),
        ("mlp.gate_DF", "mlp.gate_proj.weight", "ffn_gate.weight", 1),
        ("mlp.up_DF", "mlp.up_proj.weight", "ffn_up.weight", 1),
        ("mlp.down_FD", "mlp.down_proj.weight", "ffn_down.weight", 1),
    )
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a model and its names and layout in files.

    Attributes:
        path: keys from the model's root, as in nnx state.
        shape: our shape, input features first, heads split.
        hugging_face: name in a safetensors file.
        gguf: name in a GGUF file.
        inputs: leading axes that are input features; 0 for vectors, None for the embedding table.
    """

    path: tuple[Any, ...]
    shape: Shape
    hugging_face: str
    gguf: str
    inputs: int | None

    @property
    def name(self) -> str:
        """The path as one string, e.g. `blocks.3.attention.q_DHA`."""
        return ".".join(map(str, self.path))

    @property
    def file_shape(self) -> Shape:
        """Shape in safetensors and GGUF files (the latter print it reversed)."""
        if self.inputs is None:
            return self.shape
        out = math.prod(self.shape[self.inputs :])
        return (out, math.prod(self.shape[: self.inputs])) if self.inputs else (out,)

    def from_file(self, array: np.ndarray) -> np.ndarray:
        """Changes the layout of `array` from `file_shape` to `shape`."""
        return array if self.inputs is None else array.T.reshape(self.shape)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """Changes the layout of `array` from `shape` to `file_shape`."""
        return array if self.inputs is None else array.reshape(self.file_shape[::-1]).T


@functools.lru_cache(maxsize=1)  # checking and building ask for the same one, 0.6 s for 30 blocks
def _abstract(config: ModelConfig) -> Any:
    """Returns graph definition and pure state of the model, shapes only: nothing is computed."""
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), jnp.float32))
    graph, state = nnx.split(model)
    return graph, state


def _parameter(path: tuple[Any, ...], shape: Shape) -> Parameter:
    block = path[1] if path[0] == "blocks" else None
    key = ".".join("{}" if part == block else str(part) for part in path)
    hugging_face, gguf, inputs = _TABLE[key]
    return Parameter(path, shape, hugging_face.format(block), gguf.format(block), inputs)


def parameters(config: ModelConfig) -> list[Parameter]:
    """Lists every parameter of a model with this config; the shapes come from the model itself."""
    _, state = _abstract(config)
    return [_parameter(path, leaf.shape) for path, leaf in nnx.to_flat_state(state)]


def of_model(model: Transformer) -> Iterator[tuple[Parameter, jax.Array]]:
    """Yields every parameter of a model with its array."""
    for path, leaf in nnx.to_flat_state(nnx.split(model)[1]):
        yield _parameter(path, leaf.shape), leaf[...]


def build(
    config: ModelConfig,
    read: Callable[[Parameter], np.ndarray | jax.Array],
    dtype: jax.typing.DTypeLike,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Transformer:
    """Builds a model whose every parameter comes from `read`.

    One tensor is in flight at a time, so the peak is the model and its largest tensor.

    Args:
        config: the model's shape; `check` must have accepted the file for it.
        read: returns a parameter's array in our layout, of any float dtype.
        dtype: that the weights are cast to.
        progress: wraps the loop over the parameters.
    """
    graph, state = _abstract(config)
    flat = []
    for path, leaf in progress(list(nnx.to_flat_state(state))):
        array = read(_parameter(path, leaf.shape))
        assert array.shape == leaf.shape, (path, array.shape, leaf.shape)
        # A copy: the model must not keep a view of a memory-mapped file. By NumPy, since on the
        # device every shape would be a program.
        made = jnp if isinstance(array, jax.Array) else np
        flat.append((path, leaf.replace(jax.device_put(made.array(array, dtype)))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def check(
    file: str | os.PathLike[str],
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    unreadable: Mapping[str, str],
    readable: str,
) -> None:
    """Compares what a file holds with what the model needs, from headers alone.

    Args:
        file: named in the error.
        expected: tensor name -> shape that the config asks for.
        found: tensor name -> shape in the file.
        unreadable: tensor name -> dtype, for tensors whose dtype we cannot read.
        readable: the dtypes that we can.

    Raises:
        ValueError: one for everything that is wrong: missing or unexpected tensors, shapes,
            dtypes.
    """
    both = expected.keys() & found.keys()
    wrong = [
        f"{name} is {found[name]}, not {expected[name]}"
        for name in expected
        if name in both and found[name] != expected[name]
    ]
    problems = [
        f"{what}: {_first(names)}"
        for what, names in (
            ("missing", [name for name in expected if name not in both]),
            ("unexpected", [name for name in found if name not in both]),
            ("of wrong shape", wrong),
            (
                f"of a dtype other than {readable}",
                [f"{name} ({dtype})" for name, dtype in unreadable.items()],
            ),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"{file} does not hold exactly the tensors that its config asks for; "
            f"{'; '.join(problems)}. Use the config that belongs to these weights, "
            "or convert the file again."
        )


def _first(names: Collection[str], limit: int = 5) -> str:
    more = len(names) - limit
    return ", ".join(list(names)[:limit]) + (f" and {more} more" if more > 0 else "")
