"""The `config.json` beside weights that do not carry their own config."""

import json
import os
import pathlib

from models.config import ModelConfig, config_from_hf, config_to_hf


def read(folder: pathlib.Path) -> ModelConfig:
    """Reads `folder/config.json`.

    Raises:
        ValueError: if it is absent, no JSON, or describes a model that we do not compute.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} lacks config.json, which says what the weights belong to.")
    try:
        return config_from_hf(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error


def write(config: ModelConfig, folder: pathlib.Path) -> None:
    """Writes `folder/config.json`, whole or not at all."""
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(config_to_hf(config), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "config.json")
