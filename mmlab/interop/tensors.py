"""Tensors of a Hugging Face folder: one safetensors file, shards with an index, or one older file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mmlab.interop.weights import InteropError, State

WHOLE, INDEX, OLDER = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


def read_tensors(folder: Path) -> State:
    """All tensors of `folder` by their names there.

    Raises:
        InteropError: no file with weights, one that is missing, cut off or not what its index says.
    """
    if (folder / WHOLE).is_file():
        return _safetensors(folder / WHOLE)
    if (folder / INDEX).is_file():
        return _shards(folder)
    if (folder / OLDER).is_file():
        return _pickled(folder / OLDER)
    raise InteropError(f"{folder} has no weights: neither {WHOLE}, {INDEX} nor {OLDER}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`; InteropError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InteropError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InteropError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InteropError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _safetensors(path: Path) -> State:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, OSError) as error:
        raise InteropError(f"{path} cannot be read, it may be cut off: {error}") from error


def _shards(folder: Path) -> State:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, Mapping) or not all(isinstance(name, str) for name in places.values()):
        raise InteropError(f"{folder / INDEX} has no weight_map from names of tensors to files")
    state: State = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise InteropError(f"{folder / INDEX} names {name}, which is no file in {folder}")
        shard = _safetensors(folder / name)
        listed = {key for key, place in places.items() if place == name}
        if shard.keys() != listed:
            raise InteropError(
                f"{folder / name} lacks {sorted(listed - shard.keys())} of its index "
                f"and has {sorted(shard.keys() - listed)} that are not in it"
            )
        state.update(shard)
    return state


def _pickled(path: Path) -> State:
    state = load_pickled(path)
    strangers = [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if strangers:
        raise InteropError(f"{path} holds more than tensors: {strangers[:5]}")
    return state


def load_pickled(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote to `path`, tensors mapped from the file; only plain types and tensors are read.

    Raises:
        InteropError: no such file, one that is cut off, or one that holds other objects.
    """
    if not path.is_file():
        raise InteropError(f"{path} does not exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise InteropError(f"{path} cannot be read, it may be cut off or foreign: {error}") from error
    if not isinstance(content, dict):
        raise InteropError(f"{path} holds a {type(content).__name__}, expected a mapping")
    return content
