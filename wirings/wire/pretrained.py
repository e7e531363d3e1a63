"""Hugging Face models that are wired, or have a wired part, are saved with their wiring.

While a model of transformers or a part of it is wired, its ``save_pretrained`` writes

- under the names of the plain model, the weights that the forward pass uses: exact zeros for hallucinated edges. So
  ``from_pretrained`` gives the finalized network, wherever it is called, and reports the other tensors as unexpected;
- under ``<weight>.wiring.all_edges`` the weights of all edges, and beside it what the rule remembers, as in a
  ``state_dict``. A wired model loads them, so that the Trainer resumes from such a checkpoint;
- under ``wirings`` in ``config.json`` the description of every wiring (`Wiring.describe`), for `wirings.rewire_`.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.selection.sharded import is_sharded, same_memory
from wirings.utils.files import check_path, read_regular_text
from wirings.utils.text import shortened
from wirings.utils.torch_files import load_torch_file
from wirings.wire.finalize import final_weight
from wirings.wire.handle import Wiring
from wirings.wire.layer import Layer
from wirings.wire.parametrization import HANDLES, wired

CONFIG = "config.json"
KEY = "wirings"
"""The name under which a model's config holds the descriptions of its wirings."""
_INTERCEPTED = "_finds_wirings"


def describe_when_saved(model: nn.Module, wiring: Wiring) -> None:
    """Have a wiring saved by ``save_pretrained``, of the model itself or of one that contains it.

    Args:
        model: the wired model.
        wiring: the handle.
    """
    model.__dict__.setdefault(HANDLES, []).append(wiring)
    intercept_saving()


def intercept_saving() -> None:
    """Let ``save_pretrained`` of transformers look for wirings; models without one are saved as before.

    The class is changed and not the model, since a wired module does not know which models contain it.
    """
    transformers = sys.modules.get("transformers.modeling_utils")  # without it there is no such model
    base: Any = getattr(transformers, "PreTrainedModel", None)
    if base is not None and not hasattr(base.save_pretrained, _INTERCEPTED):
        base.save_pretrained = _with_wirings(base.save_pretrained)


def _with_wirings(save: Any) -> Any:
    """``save_pretrained``, which takes the same arguments, for models that may be wired."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        model = bound.args[0]
        if not wired(model):
            return save(*args, **kwargs)
        given = bound.arguments.get("state_dict")
        bound.arguments["state_dict"] = _with_final_weights(model, model.state_dict() if given is None else dict(given))
        if "save_original_format" in signature.parameters:  # which would take tensors of experts apart
            bound.arguments["save_original_format"] = False
        before = getattr(model.config, KEY, None)
        setattr(model.config, KEY, _descriptions(model))
        try:
            return save(*bound.args, **bound.kwargs)
        finally:
            if before is None:
                delattr(model.config, KEY)
            else:
                setattr(model.config, KEY, before)

    setattr(save_pretrained, _INTERCEPTED, True)
    return save_pretrained


def handles_of(model: nn.Module) -> list[Wiring]:
    """The handles of the wirings of a model and of its parts."""
    found = [handle for module in model.modules() for handle in module.__dict__.get(HANDLES, ())]
    return [handle for handle in found if not handle.ended]


def _descriptions(model: nn.Module) -> list[dict[str, Any]] | None:
    handles = handles_of(model)
    here = {id(layer.edges) for handle in handles for layer in handle.layers}
    try:
        if alone := [name for name, _, _, edges in wired(model) if id(edges) not in here]:
            raise WiringError(f"{alone[0]} was wired as a part of a larger model; save that one.")
        return [handle.describe_within(model) for handle in handles]
    except WiringError as error:
        warnings.warn(
            f"{type(model).__name__} is saved without a description of its wiring, so that wirings.rewire_ cannot "
            f"restore it: {error} Wire a model by hand and load the state into it.",
            stacklevel=3,
        )
        return None


def _with_final_weights(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state with the weights of the forward pass under the plain names, and all weights beside them."""
    tied = getattr(model, "_tied_weights_keys", None) or ()  # a list of patterns, or a mapping from them
    places: dict[int, list[Layer]] = {}
    for place in wired(model):
        places.setdefault(id(place[3]), []).append(Layer(*place))
    with torch.no_grad():
        for layers in places.values():
            # Of a tied weight one name is stored: the one from which transformers restores the others.
            first = next((x for x in layers if not any(re.search(p, x.name) for p in tied)), layers[0])
            for layer in layers:
                if layer is not first:
                    for key in [key for key in state if key == layer.name or key.startswith(f"{layer.name}.wiring.")]:
                        del state[key]
            if first.name not in state:
                continue
            everything = state[first.name]
            # The edges of sharded weights are chosen by all processes, but only one of them may be saving.
            used = everything if is_sharded(first.weight) else final_weight(first).detach().to(everything.dtype)
            if same_memory(used, everything):  # also if the rule uses all edges; safetensors rejects shared memory
                used = used.clone()
            state[first.name], state[f"{first.name}.wiring.all_edges"] = used, everything
            if first.edges.allowed is not None:
                state[f"{first.name}.wiring.allowed"] = first.edges.allowed
    return state


def read_descriptions(folder: str | PathLike[str]) -> list[dict[str, Any]]:
    """The descriptions of the wirings of a model that ``save_pretrained`` has written."""
    path = check_path(folder, "a folder")
    try:
        config = json.loads(read_regular_text(path / CONFIG))
    except OSError as error:
        raise WiringError(
            f"expected a local folder that save_pretrained has written, with a {CONFIG}, got {str(folder)!r}. Download "
            "models of the Hub first (huggingface_hub.snapshot_download)."
        ) from error
    except (ValueError, RecursionError) as error:
        raise WiringError(f"{path / CONFIG} is not valid JSON: {error}.") from error
    found = config.get(KEY) if isinstance(config, dict) else None
    if not isinstance(found, list) or not found:
        raise WiringError(
            f"{path / CONFIG} describes no wiring: the model in {str(folder)!r} was not wired when it was saved. Wire "
            "it with wirings.wire_."
        )
    return found


def read_tensors(folder: str | PathLike[str]) -> dict[str, Tensor]:
    """The weights in a folder, from one file or several."""
    path = check_path(folder, "a folder")
    kinds = ("model.safetensors", "pytorch_model.bin")
    index = next((path / f"{kind}.index.json" for kind in kinds if (path / f"{kind}.index.json").is_file()), None)
    files = [path / name for name in _files_in(index)] if index is not None else []
    if index is None:
        files = [next((path / kind for kind in kinds if (path / kind).is_file()), path / kinds[0])]
    state: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise WiringError(f"{str(folder)!r} has no weights: {file.name} is missing.")
        try:
            if file.suffix == ".safetensors":
                from safetensors.torch import load_file

                state |= load_file(file)
            else:
                state |= load_torch_file(file)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # both raise exceptions of many types for damaged files
            raise WiringError(
                f"{file} is damaged, or not a file of weights ({shortened(str(error), 200)}). Save the model again."
            ) from error
    return state


def _files_in(index: Path) -> list[str]:
    """The names of the files that an index lists."""
    try:
        names = sorted(set(json.loads(read_regular_text(index))["weight_map"].values()))
        if not names or any(
            Path(name).name != name or len(name) > 255 for name in names
        ):  # files elsewhere are not the model's
            raise ValueError("weight_map must map tensors to names of files beside it")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise WiringError(f"{index} is damaged ({shortened(str(error), 200)}). Save the model again.") from error
    return names
