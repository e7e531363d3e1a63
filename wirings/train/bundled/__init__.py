"""Trained networks that come with the package, named after their recipes.

Each is a small safetensors file. A tensor that is mostly zeros, such as the weights of a finalized graph, is stored as
positions and values. The header says which recipe, seed and settings the network was trained with, and its accuracy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import unknown
from wirings.train.run import checkpoint
from wirings.wire.finalize import finalize_

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of the trained networks."""
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.safetensors"))


def path_of(name: str) -> Path:
    """The file of a trained network."""
    if name not in names():
        raise unknown("trained network", name, names())
    return FOLDER / f"{name}.safetensors"


def save_sparse(model: nn.Module, path: Path, about: dict[str, Any]) -> Path:
    """Finalize a trained model, in place, and write it to a small file.

    Args:
        model: the model; it is moved to the CPU.
        path: the file.
        about: the header; anything that JSON can hold.
    """
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, value in finalize_(model.cpu()).state_dict().items():
        flat = value.reshape(-1)
        places = flat.nonzero().squeeze(1)
        if len(places) < len(flat) / 3:
            shapes[name] = list(value.shape)
            tensors[f"{name}.places"], tensors[f"{name}.values"] = places.to(torch.int32), flat[places].clone()
        else:
            tensors[name] = value.contiguous().clone()
    checkpoint.write_tensors(path, tensors, {**about, "sparse": shapes})
    return path


def load_into(model: nn.Module, path: Path) -> dict[str, Any]:
    """Finalize a model and load a trained network's weights into it.

    Args:
        model: a model of the same settings.
        path: a file that `save_sparse` wrote.

    Returns:
        The header of the file.
    """
    tensors, about = checkpoint.read(path)
    own = finalize_(model).state_dict()
    for name, shape in checkpoint.field(about, "sparse", dict, path).items():
        places, values = tensors.pop(f"{name}.places", None), tensors.pop(f"{name}.values", None)
        if name not in own or list(own[name].shape) != shape or places is None or values is None:
            raise checkpoint.damaged(path, f"{name[:60]!r} does not fit the model")
        dense = values.new_zeros(own[name].numel())
        if places.dtype != torch.int32 or places.shape != values.shape or values.dim() != 1:
            raise checkpoint.damaged(path, f"the positions of {name!r} do not fit its values")
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(dense):
            raise checkpoint.damaged(path, f"the positions of {name!r} are out of range")
        dense[places.long()] = values
        tensors[name] = dense.view(shape)
    checkpoint.load_model(model, tensors, path, "")
    return about
