"""`save_sparse` and `load_sparse`: the state of any model in a file that holds only its real edges.

`wirings.wire.sparse_state` has the format. Files need not be trusted: the names, shapes and types of all tensors are
compared with those of the model before memory is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wirings.errors import WiringError
from wirings.selection.sharded import is_sharded
from wirings.utils.encoded_tensors import Description, describe_plain, encode, rounding_type
from wirings.utils.files import check_file, check_path, disk_errors, whole_file
from wirings.utils.tensor_files import require_safetensors
from wirings.utils.text import printable
from wirings.wire.checks import first_names
from wirings.wire.finalize import checked_layers, final_weight
from wirings.wire.layer import Layer
from wirings.wire.load_edges import load_edges
from wirings.wire.parametrization import wired
from wirings.wire.sparse_state import SparseState


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
    state = sparse_state_of(model, rounding_type(dtype))
    with disk_errors(checked), whole_file(checked) as part:
        state.write(part)
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
    saved = SparseState.read(path)
    _check_fits(inner, path, saved.about["model"], saved.shapes)
    state, places = saved.decoded(path)
    if wired(inner):
        load_edges(inner, path, state, places)
    else:
        inner.load_state_dict(state)
    return model


@torch.no_grad()
def sparse_state_of(model: nn.Module, rounding: str | None = None) -> SparseState:
    """The state of a model by its real edges, as `save_sparse` writes it.

    Args:
        model: any model, wired or plain.
        rounding: the type that parameters are rounded to, or None.

    Raises:
        WiringError: if something in the state is not a plain tensor.
    """
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
    return SparseState(tensors, about)


def _within(model: Any, function: str) -> nn.Module:
    """The model itself, in which others find its names: without wrappers that are compiled or parallel."""
    if not isinstance(model, nn.Module):
        raise WiringError(f"{function}() expects a torch.nn.Module, got {type(model).__name__}.")
    require_safetensors("sparse files")
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
