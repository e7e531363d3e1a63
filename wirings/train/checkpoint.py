"""Checkpoints: one safetensors file each, written whole or not at all; nothing that is loaded can execute.

Tensors (model, optimizer, average, random numbers) are in the file, all else as JSON in its header, and a checksum over
all of it. A file is written under another name, brought to the disk, and then renamed: a kill at any instant leaves the
last good one. A file that is damaged, or is none of ours, is a `WiringError` that names it.
"""

from __future__ import annotations

import errno
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.train.step import Step
from wirings.utils.files import whole_file

SCHEMA = "2"
INITIAL, LAST, BEST, RESULT = "initial.safetensors", "last.safetensors", "best.safetensors", "result.json"
"""Files of a run: the model before the first step, two checkpoints, and at the end what came of it."""


def collect(step: Step, about: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a checkpoint holds, copied where it lies, for `write_tensors`; ``about`` is whatever JSON can hold."""
    tensors = _fixed(step)
    for i, parameter in enumerate(_parameters(step)):
        for key, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{i}.{key}"] = value
    wiring = None if step.wiring is None else step.wiring.state_dict()
    about = {**about, "wiring": wiring, "scaler": step.scaler.state_dict()}
    # Tied and sliced tensors share memory, which the format does not take; and training goes on.
    return {name: value.detach().clone() for name, value in tensors.items()}, about


def _fixed(step: Step) -> dict[str, Tensor]:
    """The tensors that a checkpoint has at every step; the optimizer's come with its first one."""
    tensors = {f"model.{name}": value for name, value in step.model.state_dict().items()}
    if step.average is not None:
        tensors |= {f"average.{name}": value for name, value in step.average.state_dict().items()}
    if step.wiring is not None:  # the wiring at the last look, which swapped edges are counted from
        tensors |= {f"seen.{i}": torch.from_numpy(seen) for i, seen in enumerate(step.wiring.last_look)}
    tensors["random.cpu"] = torch.get_rng_state()
    if step.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(step.device)
    return tensors


def save_model(path: Path, model: nn.Module, about: dict[str, Any]) -> None:
    """Write a model alone: nothing to go on from, but to begin again with."""
    write_tensors(path, {f"model.{name}": value.clone() for name, value in model.state_dict().items()}, about)


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write a checkpoint of tensors that share no memory."""
    from safetensors.torch import save_file

    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(about)
    header = {"schema": SCHEMA, "crc32": _checksum(plain, text), "about": text}
    write(path, lambda part: save_file(plain, part, header))


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    """Of all that a file says: its schema, its text, and every tensor's name, dtype, shape and bytes."""
    names = sorted(tensors)
    kinds = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]
    total = zlib.crc32(json.dumps([SCHEMA, about, kinds]).encode())
    for name in names:
        total = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def write(path: Path, put: Any) -> None:
    """Let ``put`` write a file, then give it its name in one go."""
    try:
        with whole_file(path) as part:
            put(str(part))
    except Exception as error:
        full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
        if full or isinstance(error, OSError):
            what = "the disk is full" if full else str(error)
            raise WiringError(
                f"{path} could not be written: {what}. What was there before is untouched; make room, or give another "
                "--out, and go on with --resume."
            ) from error
        raise


def clean(folder: Path) -> None:
    """Remove what a killed process had begun to write: our part of a file, and the one that safetensors makes of it."""
    for part in [*folder.glob(".*.part"), *folder.glob(".tmp??????")]:
        part.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, and what it says about itself. Takes no more memory than the file has bytes."""
    from safetensors import safe_open

    if not path.exists():
        raise WiringError(f"there is no checkpoint {path}: start without --resume, or give the folder of a run.")
    if not path.is_file():
        raise damaged(path, "it is no file")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            if "about" not in header or "schema" not in header:
                raise ValueError("its header is another one")
            if header["schema"] != SCHEMA:
                raise WiringError(
                    f"{path} is a checkpoint of schema {header['schema'][:20]!r}, this version reads {SCHEMA!r}: train "
                    "it again, or open it with the version that wrote it."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        if header.get("crc32") != _checksum(tensors, header["about"]):
            raise ValueError("it is not what was written: its checksum is wrong")
        about = json.loads(header["about"])
        if not isinstance(about, dict):
            raise ValueError("its text is no mapping")
    except (WiringError, MemoryError):
        raise
    except Exception as error:  # whatever a library makes of bytes that nobody wrote
        raise damaged(path, error) from error
    return tensors, about


def damaged(path: Path, why: object) -> WiringError:
    """The error for a file that cannot be a checkpoint of wirings, or no longer is."""
    return WiringError(
        f"{path} is damaged or no checkpoint of wirings ({str(why)[:200]}). Train again in another folder; the run's "
        "other checkpoint, best or last, may still be whole (wirings eval with --best, or without)."
    )


def field(about: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """What a checkpoint says under a key, if it is of the right kind."""
    value = about.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise damaged(path, f"{key!r} should be {kind.__name__}, but is {type(value).__name__}")
    return value


def restore(step: Step, tensors: dict[str, Tensor], about: dict[str, Any], path: Path) -> None:
    """Put a checkpoint's tensors where they were. In place, so that a captured step goes on with them.

    All of it is checked before anything is changed. Only the handle's state is checked against the model that it
    belongs to, once that is loaded; where it does not fit, the model gets its own weights back.
    """
    given = {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}
    fixed = _fixed(step)
    if step.device.type != "cuda" or "random.cuda" not in given:  # it may have been written on another device
        given.pop("random.cuda", None)
        fixed.pop("random.cuda", None)
    _check_fits(fixed, given, path)
    buffers = _buffers(step, tensors, path)
    try:
        torch.Generator().set_state(given["random.cpu"])
        if "random.cuda" in given:
            torch.Generator(step.device).set_state(given["random.cuda"])
    except (RuntimeError, TypeError) as error:
        raise damaged(path, f"its random numbers: {error}") from error
    scaler, own = field(about, "scaler", dict, path), step.scaler.state_dict()
    if scaler.keys() != own.keys() or not all(is_number(value) for value in scaler.values()):
        raise damaged(path, "its loss scale is another one's")
    if (about.get("wiring") is None) != (step.wiring is None):
        raise damaged(path, "its wiring is missing, or one too many")

    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    step.model.load_state_dict(model_state(tensors))
    if step.wiring is not None:
        try:
            step.wiring.load_state_dict(about["wiring"])
        except WiringError as error:
            step.model.load_state_dict(before)
            raise damaged(path, error) from error
        step.wiring.last_look = [tensors[f"seen.{i}"].numpy() for i in range(len(step.wiring.last_look))]
    if step.average is not None:
        step.average.load_state_dict(model_state(tensors, "average."))
    with torch.no_grad():
        for parameter, key, value in buffers:
            state = step.optimizer.state[parameter]
            if not isinstance(state.get(key), Tensor):
                state[key] = torch.empty_like(parameter)
            state[key].copy_(value)
    step.scaler.load_state_dict(scaler)
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in given:
        torch.cuda.set_rng_state(tensors["random.cuda"], step.device)


def _buffers(step: Step, tensors: dict[str, Tensor], path: Path) -> list[tuple[nn.Parameter, str, Tensor]]:
    """The optimizer's tensors in a checkpoint: whose they are, their name, what they hold."""
    found, parameters = [], {str(i): parameter for i, parameter in enumerate(_parameters(step))}
    known = ("momentum_buffer",) if step.settings.optimizer.momentum else ()
    for name in (name for name in tensors if name.startswith("optimizer.")):
        _, number, key = (*name.split(".", 2), "")[:3]
        if number not in parameters or key not in known:
            raise damaged(path, f"the optimizer has no {name[:60]!r}")
        _check_fits({name: parameters[number]}, {name: tensors[name]}, path)
        found.append((parameters[number], key, tensors[name]))
    return found


def is_number(value: Any) -> bool:
    """Whether JSON gave a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def _check_fits(own: Mapping[str, Tensor], given: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless two sets of tensors have the same names, dtypes and shapes."""
    remedy = "It belongs to another recipe or setting, or is damaged: give another --out."
    for name in [*own, *(name for name in given if name not in own)]:
        ours, theirs = (_kind(tensors.get(name)) for tensors in (own, given))
        if ours != theirs:
            raise WiringError(
                f"{path} does not fit this model: {name[:200]} should be {ours}, but is {theirs}. {remedy}"
            )


def _kind(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def model_state(tensors: dict[str, Tensor], prefix: str = "model.") -> dict[str, Tensor]:
    """The part of a checkpoint under ``prefix``: the model's ``state_dict``, or its average's."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def evaluated(tensors: dict[str, Tensor]) -> str:
    """The prefix of the network that was evaluated: the average, where there is one."""
    return "average." if any(name.startswith("average.") for name in tensors) else "model."


def load_model(model: nn.Module, tensors: dict[str, Tensor], path: Path, prefix: str = "model.") -> None:
    """Give a model the part of a checkpoint under ``prefix``."""
    state = model_state(tensors, prefix)
    _check_fits(model.state_dict(), state, path)
    model.load_state_dict(state)


def _parameters(step: Step) -> list[nn.Parameter]:
    return [p for group in step.optimizer.param_groups for p in group["params"]]
