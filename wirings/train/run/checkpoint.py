"""Checkpoints: one safetensors file each, complete or not there at all. Loading one cannot execute code.

The tensors (model, optimizer, average, random number generators) are in the file, everything else is JSON in its
header, and a checksum covers all of it. A file is written under a temporary name, flushed to disk and renamed: a
process that is killed at any time leaves the last good one. A damaged or foreign file raises a `WiringError` that names
it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.train import files
from wirings.train.run.optimizer import STATE
from wirings.train.run.step import TrainingStep
from wirings.wire.parametrization import wired

SCHEMA = "2"


def collect(step: TrainingStep, about: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copy everything that a checkpoint holds, each tensor on its device.

    Args:
        step: the state to save.
        about: anything that JSON can hold.

    Returns:
        The tensors and the header, for `write_tensors`.
    """
    tensors = _fixed(step)
    for i, parameter in enumerate(_parameters(step)):
        for key, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{i}.{key}"] = value
    wiring = None if step.wiring is None else step.wiring.state_dict()
    about = {**about, "wiring": wiring, "scaler": step.scaler.state_dict()}
    # Copies: safetensors rejects tensors that share memory, and training continues before the file is written.
    return {name: value.detach().clone() for name, value in tensors.items()}, about


def _fixed(step: TrainingStep) -> dict[str, Tensor]:
    """The tensors that every checkpoint has; those of the optimizer exist only after its first step."""
    tensors = {f"model.{name}": value for name, value in step.model.state_dict().items()}
    if step.average is not None:
        tensors |= {f"average.{name}": value for name, value in step.average.state_dict().items()}
    if step.wiring is not None:  # the wiring at the last look, which swapped edges are counted from
        tensors |= {f"seen.{i}": torch.from_numpy(seen) for i, seen in enumerate(step.wiring.last_look)}
    tensors["random.cpu"] = torch.get_rng_state()
    if step.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(step.device)
    return tensors


def save_model(path: Path, model: nn.Module, about: dict[str, Any], remedy: str = files.RESUME) -> None:
    """Write a model without the state of its training: a run can start from it, but not resume."""
    write_tensors(path, {f"model.{name}": value.clone() for name, value in model.state_dict().items()}, about, remedy)


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any], remedy: str = files.RESUME) -> None:
    """Write a checkpoint. The tensors must not share memory."""
    from safetensors.torch import save_file

    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(about)
    header = {"schema": SCHEMA, "crc32": _checksum(plain, text), "about": text}
    files.write_file(path, lambda part: save_file(plain, part, header), remedy)


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    """The checksum of a file: its schema, its JSON, and the name, dtype, shape and bytes of every tensor."""
    names = sorted(tensors)
    kinds = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]
    total = zlib.crc32(json.dumps([SCHEMA, about, kinds]).encode())
    for name in names:
        total = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint's tensors and the JSON of its header. Takes no more memory than the file is large.

    Raises:
        WiringError: if the file is missing, damaged, or not a checkpoint.
    """
    from safetensors import safe_open

    if not path.exists():
        raise WiringError(f"there is no checkpoint {path}. Start without --resume, or give the folder of a run.")
    if not path.is_file():
        raise damaged(path, "it is not a file")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            if "about" not in header or "schema" not in header:
                raise ValueError("its header has no schema")
            if header["schema"] != SCHEMA:
                raise WiringError(
                    f"{path} is a checkpoint of schema {header['schema'][:20]!r}, but this version reads {SCHEMA!r}. "
                    "Train it again, or open it with the version that wrote it."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if header.get("crc32") != _checksum(tensors, header["about"]):
            raise ValueError("its checksum does not match its contents")
        about = json.loads(header["about"])
        if not isinstance(about, dict):
            raise ValueError("the JSON in its header is not a mapping")
    except (WiringError, MemoryError):
        raise
    except Exception as error:  # any error of safetensors or json on damaged bytes
        raise damaged(path, error) from error
    return tensors, about


def damaged(path: Path, reason: object) -> WiringError:
    """The error for a file that is damaged or not a checkpoint of wirings."""
    return WiringError(
        f"{path} is damaged or not a checkpoint of wirings ({str(reason)[:200]}). Train again in another folder. The "
        "run's other checkpoint, best or last, may be intact: try wirings eval with or without --best."
    )


def field(about: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """The value of a key in a checkpoint's header, checked to be of type ``kind``."""
    value = about.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise damaged(path, f"{key!r} must be {kind.__name__}, got {type(value).__name__}")
    return value


def other_data(about: Mapping[str, Any], md5: str | None) -> bool:
    """Whether a checkpoint was trained on data of another checksum than ``md5``; False if either is not known."""
    then = about.get("data_md5")
    return None not in (then, md5) and then != md5


def restore(step: TrainingStep, tensors: dict[str, Tensor], about: dict[str, Any], path: Path) -> None:
    """Restore a step from a checkpoint. Tensors are written in place, so that a captured step sees them.

    Everything is checked before anything is changed, except for the handle's state, which can only be checked against
    the restored model: if that does not fit, the model gets its own weights back.
    """
    given = {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}
    fixed = _fixed(step)
    if step.device.type != "cuda" or "random.cuda" not in given:  # it may have been written on another device
        given.pop("random.cuda", None)
        fixed.pop("random.cuda", None)
    check_fits(fixed, given, path)
    buffers = _optimizer_buffers(step, tensors, path)
    try:
        torch.Generator().set_state(given["random.cpu"])
        if "random.cuda" in given:
            torch.Generator(step.device).set_state(given["random.cuda"])
    except (RuntimeError, TypeError) as error:
        raise damaged(path, f"invalid state of a random number generator: {error}") from error
    scaler, own = field(about, "scaler", dict, path), step.scaler.state_dict()
    if scaler.keys() != own.keys() or not all(is_json_number(value) for value in scaler.values()):
        raise damaged(path, "invalid state of the gradient scaler")
    if (about.get("wiring") is None) != (step.wiring is None):
        raise damaged(path, f"it has {'no' if step.wiring is not None else 'a'} wiring, unlike the model")

    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    _load(step.model, model_state(tensors))
    if step.wiring is not None:
        try:
            step.wiring.load_state_dict(about["wiring"])
        except WiringError as error:
            _load(step.model, before)
            raise damaged(path, error) from error
        step.wiring.last_look = [tensors[f"seen.{i}"].numpy() for i in range(len(step.wiring.last_look))]
    if step.average is not None:
        _load(step.average, model_state(tensors, "average."))
    with torch.no_grad():
        for parameter, key, value in buffers:
            state = step.optimizer.state[parameter]
            if not isinstance(state.get(key), Tensor):
                state[key] = torch.empty((), device=parameter.device) if key == "step" else torch.empty_like(parameter)
            state[key].copy_(value)
    step.scaler.load_state_dict(scaler)
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in given:
        torch.cuda.set_rng_state(tensors["random.cuda"], step.device)


def _optimizer_buffers(
    step: TrainingStep, tensors: dict[str, Tensor], path: Path
) -> list[tuple[nn.Parameter, str, Tensor]]:
    """The optimizer's tensors in a checkpoint: the parameter, the name and the value of each."""
    found, parameters = [], {str(i): parameter for i, parameter in enumerate(_parameters(step))}
    chosen = step.settings.optimizer
    known = () if chosen.name == "sgd" and not chosen.momentum else STATE[chosen.name]
    for name in (name for name in tensors if name.startswith("optimizer.")):
        _, number, key = (*name.split(".", 2), "")[:3]
        if number not in parameters or key not in known:
            raise damaged(path, f"the optimizer has no {name[:60]!r}")
        check_fits({name: torch.zeros(()) if key == "step" else parameters[number]}, {name: tensors[name]}, path)
        if missing := [other for other in known if f"optimizer.{number}.{other}" not in tensors]:
            raise damaged(path, f"the optimizer lacks {missing[0]!r} of a parameter")
        found.append((parameters[number], key, tensors[name]))
    return found


def is_json_number(value: Any) -> bool:
    """Whether a value from JSON is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def check_fits(own: Mapping[str, Tensor], given: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless two sets of tensors have the same names, dtypes and shapes."""
    for name in [*own, *(name for name in given if name not in own)]:
        ours, theirs = (_kind(tensors.get(name)) for tensors in (own, given))
        if ours != theirs:
            raise WiringError(
                f"{path} does not fit this model: expected {name[:200]} to be {ours}, got {theirs}. The file "
                "belongs to another recipe or other settings, or is damaged. Give another --out."
            )


def _kind(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def model_state(tensors: dict[str, Tensor], prefix: str = "model.") -> dict[str, Tensor]:
    """The ``state_dict`` of the model in a checkpoint, or that of its average with ``prefix="average."``."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def evaluated(tensors: dict[str, Tensor]) -> str:
    """The prefix of the weights that were evaluated: those of the average, if there is one."""
    return "average." if any(name.startswith("average.") for name in tensors) else "model."


def load_model(model: nn.Module, tensors: dict[str, Tensor], path: Path, prefix: str = "model.") -> None:
    """Load the weights under ``prefix`` of a checkpoint into a model."""
    state = model_state(tensors, prefix)
    check_fits(model.state_dict(), state, path)
    _load(model, state)


def _load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a state that fits a model. A new one with the rule ``keep`` has other zeros, and gets those of the state."""
    for name, _, _, edges in wired(model):
        if edges.rule.keeps_zeros:
            edges.memory()["wiring"].copy_(state[f"{name}.wiring.wiring"])
    model.load_state_dict(state)


def _parameters(step: TrainingStep) -> list[nn.Parameter]:
    return [p for group in step.optimizer.param_groups for p in group["params"]]
