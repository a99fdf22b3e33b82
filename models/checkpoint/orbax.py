"""Our own checkpoints, written by Orbax: parameters in our layout and a `config.json`."""

import os
import pathlib

import jax
import orbax.checkpoint as ocp

from models.checkpoint import config_json
from models.checkpoint.parameters import build, check, of_model, parameters
from models.transformer import Transformer

_PARAMETERS = "parameters"


def save(model: Transformer, folder: str | os.PathLike[str]) -> None:
    """Writes a checkpoint and waits until it is complete.

    Args:
        model: in any dtype; the checkpoint keeps it.
        folder: created if absent.

    Raises:
        ValueError: if there is a checkpoint already.
    """
    folder = pathlib.Path(folder).absolute()
    if is_checkpoint(folder):
        raise ValueError(f"{folder} holds a checkpoint already: choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            folder / _PARAMETERS, {parameter.name: array for parameter, array in of_model(model)}
        )
        checkpointer.wait_until_finished()  # here a failure in the background is raised
    config_json.write(model.config, folder)


def load(folder: str | os.PathLike[str], dtype: jax.typing.DTypeLike) -> Transformer:
    """Loads a checkpoint onto the default device, whatever mesh it was saved from.

    Args:
        folder: written by `save`.
        dtype: of the weights. They are restored as they were saved and then cast: Orbax itself
            would cast to any dtype that is asked for and say nothing.

    Raises:
        ValueError: if the parameters are not exactly those of the config; before any is read.
    """
    folder = pathlib.Path(folder).absolute()
    config = config_json.read(folder)
    if not is_checkpoint(folder):
        raise ValueError(f"{folder} holds no checkpoint written by models.checkpoint.orbax.save.")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder / _PARAMETERS).item_metadata.tree
        check(
            folder,
            expected={parameter.name: parameter.shape for parameter in parameters(config)},
            found={name: tuple(leaf.shape) for name, leaf in saved.items()},
            unreadable={},
            readable="any",
        )
        restored = checkpointer.restore(
            folder / _PARAMETERS,
            {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
                for name, leaf in saved.items()
            },
        )
    # Popped, so that no more than one parameter exists in both dtypes.
    return build(config, lambda parameter: restored.pop(parameter.name), dtype)


def is_checkpoint(folder: pathlib.Path) -> bool:
    """Returns whether `save` wrote to this folder."""
    return (folder / _PARAMETERS).is_dir()
