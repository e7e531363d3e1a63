"""`save_sparse` and `load_sparse`: the state of any model in a file that holds only its real edges.

A safetensors file with a checksum (`wirings.utils.tensor_files`), whose tensors are stored as
`wirings.utils.encoded_tensors` describes. Its header says in JSON, under ``state``, which tensors are ``encoded`` and
how, which names are ``tied`` to a stored one, and what is known about the ``wiring``: for every tensor that is stored
by its edges, their number ``k``, their ``density`` and the ``rule`` that chose them, null for a plain model.

Files need not be trusted. Nothing in them is executed, and the names, shapes and types of all tensors are compared with
those of the model before memory is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wirings.errors import WiringError
from wirings.selection.sharded import is_sharded
from wirings.utils.encoded_tensors import (
    Description,
    check_description,
    decode,
    describe_plain,
    encode,
    part_names,
    rounding_type,
)
from wirings.utils.files import check_file, check_path, disk_errors, whole_file
from wirings.utils.tensor_files import OtherFileError, file_errors, read_tensors, require_safetensors, write_tensors
from wirings.utils.text import printable
from wirings.version import __version__
from wirings.wire.checks import first_names
from wirings.wire.finalize import checked_layers, final_weight
from wirings.wire.layer import Layer
from wirings.wire.load_edges import load_edges
from wirings.wire.parametrization import wired

FORMAT, SCHEMA = "wirings sparse state", "1"
_WHAT, _REMEDY = "sparse files", "Save the model again."


@torch.no_grad()
def save_sparse(model: nn.Module, path: str | Path, dtype: str | torch.dtype | None = None) -> Path:
    """Write a model's ``state_dict`` to a safetensors file that holds only real edges.

    A wired model is saved as `finalize_` would leave it, and is not changed: the plain names, zeros for hallucinated
    edges. To go on training, save what `rewire_` needs instead. Of a plain model, all weights that are not zero are
    saved. Buffers are included, tied weights are stored once, and dense tensors stay dense.

    Args:
        model: any model, wired or plain. Of a compiled or parallel one (DDP), the model within is saved.
        path: the file, usually ``….safetensors``.
        dtype: what parameters are rounded to in the file: ``"float16"``, ``"bfloat16"``, or ``"int8"`` with a scale
            for every row. Vectors, such as biases and norms, are not rounded, and no edge becomes zero. By default,
            nothing is rounded, and everything is loaded bit for bit.

    Returns:
        The path.

    Raises:
        WiringError: if something in the state is not a plain tensor, or the file cannot be written.
    """
    model = _within(model, "save_sparse")
    checked = check_file(path)
    rounding = rounding_type(dtype)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    layers = {place[0]: Layer(*place) for place in wired(model)}
    if layers:
        checked_layers(model, "save")
    tensors: dict[str, Tensor] = {}
    encoded: dict[str, Description] = {}
    tied: dict[str, str] = {}
    wiring: dict[str, Any] = {}
    first: dict[Any, str] = {}
    for name, x in _plain_state(model).items():
        memory = (x.data_ptr(), x.shape, x.stride(), x.dtype) if x.numel() else name
        if (other := first.setdefault(memory, name)) != name:
            tied[name] = other
            continue
        layer = layers.get(name)
        try:
            if layer is None:
                parts, description = encode(x, rounding if name in parameters else None)
            else:
                parts, description = encode(final_weight(layer), rounding, layer.edges.real(layer.weight))
        except WiringError as error:
            raise WiringError(f"{name} cannot be saved: {error}") from error
        if description is not None:
            encoded[name] = description
        if description is not None and "bits" in description:
            wiring[name] = _about_layer(len(parts["values"]), x, layer)
        tensors |= {f"{name}.{part}" if part else name: one for part, one in parts.items()}
    about = {"model": type(model).__name__, "encoded": encoded, "tied": tied, "wiring": wiring}
    header = {"format": FORMAT, "schema": SCHEMA, "version": __version__, "state": json.dumps(about)}
    with disk_errors(checked), whole_file(checked) as part:
        write_tensors(part, tensors, header)
    return checked


def load_sparse(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a file that `save_sparse` wrote into a model, in place. Nothing in the file is executed.

    A plain model gets the weights. In a wired one, the edges of the file also become the wiring, as with
    ``wire_(model, rule, start="weights")``, and the rule goes on from there; schedules stay where they are. What an
    optimizer remembers belongs to the weights before: create a new one.

    Args:
        model: a model of the same architecture, on any device.
        path: the file.

    Returns:
        The model.

    Raises:
        WiringError: if the file is damaged, if its names or shapes are not those of the model, or if the rule of a
            wired model cannot take this wiring, for example since its budget differs. The model is left unchanged.
    """
    inner = _within(model, "load_sparse")
    if not check_path(path).is_file():
        raise WiringError(f"expected a file that save_sparse wrote, but {path} does not exist.")
    with file_errors(path, _REMEDY):
        tensors, header = read_tensors(path, lambda header: _check_header(header, path))
        about = json.loads(header["state"])
        stored = _check_state(about, tensors)
    _check_fits(inner, path, about["model"], {**stored, **{name: stored[x] for name, x in about["tied"].items()}})
    state = {name: x for name, x in tensors.items() if name in stored}
    places: dict[str, Tensor | None] = {}
    with file_errors(path, _REMEDY):
        for name, description in about["encoded"].items():
            parts = part_names(name, description, tensors)
            state[name], places[name] = decode({part: tensors[x] for part, x in parts.items()}, description)
    for name, other in about["tied"].items():
        state[name], places[name] = state[other], places.get(other)
    if wired(inner):
        load_edges(inner, path, state, places)
    else:
        inner.load_state_dict(state)
    return model


def _within(model: Any, function: str) -> nn.Module:
    """The model itself, in which others find its names: without wrappers that are compiled or parallel."""
    if not isinstance(model, nn.Module):
        raise WiringError(f"{function}() expects a torch.nn.Module, got {type(model).__name__}.")
    require_safetensors(_WHAT)
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):  # of torch.compile
            model = inner
        else:
            return model


def _plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a finalized model has, by name."""
    ours = tuple(f"{name}.wiring." for name, _, _, _ in wired(model))
    state = {name: x for name, x in model.state_dict().items() if not name.startswith(ours)}
    for name, x in state.items():
        if not isinstance(x, Tensor):
            raise WiringError(f"{name} in the state of this {type(model).__name__} is a {type(x).__name__}, no tensor.")
        if is_lazy(x):
            raise WiringError(f"{name} belongs to a lazy module, and has no shape yet. Call the model once first.")
        if is_sharded(x):
            raise WiringError(
                f"{name} is sharded over processes. Use a model with whole weights: load the gathered state into one "
                "that is not sharded."
            )
        if x.layout != torch.strided:
            layout = str(x.layout).removeprefix("torch.")
            raise WiringError(
                f"{name} is a tensor of layout {layout}. Make it dense first, with its zeros: .to_dense()."
            )
        if x.is_meta:
            raise WiringError(f"{name} is on the meta device, without values. Use model.to_empty(device=…) first.")
    return state


def _about_layer(k: int, x: Tensor, layer: Layer | None) -> dict[str, Any]:
    possible = x.numel() if layer is None else layer.edges.possible_edges
    return {"rule": None if layer is None else layer.edges.rule.name, "k": k, "density": round(k / possible, 6)}


# ---- reading --------------------------------------------------------------------------------------------------------


def _check_header(header: Mapping[str, str], path: str | Path) -> None:
    if header.get("format") != FORMAT:
        raise OtherFileError(
            f"expected a file that save_sparse wrote, but {path} is another. Compact models are loaded by "
            "wirings.load_compact."
        )
    if header.get("schema") != SCHEMA:
        raise OtherFileError(
            f"{path} has schema {header.get('schema', '')[:20]!r}, but this version reads {SCHEMA!r}. Upgrade wirings."
        )


def _check_state(about: Any, tensors: Mapping[str, Tensor]) -> dict[str, Description]:
    """The shape and type of every tensor that a file stores."""
    keys = {"model", "encoded", "tied", "wiring"}
    if not isinstance(about, dict) or set(about) != keys or not isinstance(about["model"], str):
        raise WiringError(f"expected a state with {', '.join(sorted(keys))}")
    if not all(isinstance(about[key], dict) for key in ("encoded", "tied", "wiring")):
        raise WiringError("expected mappings by name")
    parts: set[str] = set()
    for name, description in about["encoded"].items():
        check_description(description)
        parts |= set(part_names(name, description, tensors).values())
    stored = {name: describe_plain(x) for name, x in tensors.items() if name not in parts}
    if about["encoded"].keys() & stored.keys() or about["tied"].keys() & {*stored, *about["encoded"]}:
        raise WiringError("expected every tensor once")
    stored |= about["encoded"]
    if not all(isinstance(other, str) and other in stored for other in about["tied"].values()):
        raise WiringError("expected ties to stored tensors")
    return stored


def _check_fits(model: nn.Module, path: str | Path, saved: str, stored: Mapping[str, Description]) -> None:
    """Raise unless a file has the names, shapes and kinds of numbers of a model's tensors."""
    own = {name: describe_plain(x) for name, x in _plain_state(model).items()}
    wrong = [
        f"{len(names):,} tensors {what} ({first_names([name[:60] for name in sorted(names)])})"
        for what, names in (("are missing in it", own.keys() - stored.keys()), ("are unexpected", stored.keys() - own))
        if names
    ]
    for name in sorted(own.keys() & stored.keys()):
        ours, theirs = own[name], stored[name]
        if ours["shape"] != theirs["shape"]:
            wrong.append(f"{name} has shape {tuple(ours['shape'])}, but {tuple(theirs['shape'])} in it")
        elif ("float" in ours["dtype"]) != ("float" in theirs["dtype"]):
            wrong.append(f"{name} is of type {ours['dtype']}, but {theirs['dtype']} in it")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        text = " ".join("; ".join(wrong[:3]).split())  # a file may have any names
        raise WiringError(
            f"{path} does not fit this {type(model).__name__}: {printable(text)}{more}. Load it into a model of the "
            f"architecture that was saved, a {printable(' '.join(saved[:60].split()))}."
        )
