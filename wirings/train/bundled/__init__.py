"""Trained networks that come with the package, by the name of their recipe: small files, real edges alone.

A file is safetensors: a tensor that is mostly zeros, as the weights of a finalized graph are, is kept as places and
values; the header says which recipe, seed and settings it is of, and what it reached.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import unknown
from wirings.train import checkpoint
from wirings.wire.finalize import finalize_

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The trained networks that there are."""
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.safetensors"))


def path_of(name: str) -> Path:
    """The file of a trained network."""
    if name not in names():
        raise unknown("trained network", name, names())
    return FOLDER / f"{name}.safetensors"


def keep(model: nn.Module, path: Path, about: dict[str, Any]) -> Path:
    """Finalize a trained model, in place, and write it to ``path``; ``about`` is whatever JSON can hold."""
    from safetensors.torch import save_file

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
    header = {"schema": checkpoint.SCHEMA, "about": json.dumps({**about, "sparse": shapes})}
    checkpoint.write(path, lambda part: save_file(tensors, part, header))
    return path


def load_into(model: nn.Module, path: Path) -> dict[str, Any]:
    """Give a model of the same settings a trained network's weights, finalized; what the file says of itself."""
    tensors, about = checkpoint.read(path)
    for name, shape in about["sparse"].items():
        places, values = tensors.pop(f"{name}.places").long(), tensors.pop(f"{name}.values")
        dense = values.new_zeros(math.prod(shape))
        dense[places] = values
        tensors[name] = dense.view(shape)
    checkpoint.load_model(finalize_(model), tensors, path, "")
    return about
