"""Checkpoints: one safetensors file each, written whole or not at all; nothing that is loaded can execute.

Tensors (model, optimizer, average, random numbers) are in the file, all else as JSON in its header. A file is written
under another name, brought to the disk, and then renamed: a kill at any instant leaves the last good one.
"""

from __future__ import annotations

import errno
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.train.step import Step
from wirings.utils.files import whole_file

SCHEMA = "1"
INITIAL, LAST, BEST, RESULT = "initial.safetensors", "last.safetensors", "best.safetensors", "result.json"
"""Files of a run: the model before the first step, two checkpoints, and at the end what came of it."""


def collect(step: Step, about: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a checkpoint holds, copied where it lies, for `write_tensors`; ``about`` is whatever JSON can hold."""
    tensors = {f"model.{name}": value for name, value in step.model.state_dict().items()}
    for i, parameter in enumerate(_parameters(step)):
        for key, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{i}.{key}"] = value
    if step.average is not None:
        tensors |= {f"average.{name}": value for name, value in step.average.state_dict().items()}
    if step.wiring is not None:  # the wiring at the last look, which swapped edges are counted from
        tensors |= {f"seen.{i}": torch.from_numpy(seen) for i, seen in enumerate(step.wiring.last_look)}
    tensors["random.cpu"] = torch.get_rng_state()
    if step.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(step.device)
    wiring = None if step.wiring is None else step.wiring.state_dict()
    about = {**about, "wiring": wiring, "scaler": step.scaler.state_dict()}
    # Tied and sliced tensors share memory, which the format does not take; and training goes on.
    return {name: value.detach().clone() for name, value in tensors.items()}, about


def save_model(path: Path, model: nn.Module, about: dict[str, Any]) -> None:
    """Write a model alone: nothing to go on from, but to begin again with."""
    write_tensors(path, {f"model.{name}": value.clone() for name, value in model.state_dict().items()}, about)


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write a checkpoint of tensors that share no memory."""
    from safetensors.torch import save_file

    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    header = {"schema": SCHEMA, "crc32": _checksum(plain), "about": json.dumps(about)}
    write(path, lambda part: save_file(plain, part, header))


def _checksum(tensors: dict[str, Tensor]) -> str:
    total = 0
    for name in sorted(tensors):
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
    """The tensors of a checkpoint, and what it says about itself."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise WiringError(f"there is no checkpoint {path}: start without --resume, or give the folder of a run.")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        about = json.loads(header["about"])
        if "crc32" in header and header["crc32"] != _checksum(tensors):  # files of earlier versions have none
            raise ValueError("its tensors are not those that were written")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise WiringError(
            f"{path} is damaged or no checkpoint of wirings ({error}). Train again in another folder; the run's other "
            "checkpoint, best or last, may still be whole (wirings eval with --best, or without)."
        ) from error
    if header.get("schema") != SCHEMA:
        raise WiringError(f"{path} is a checkpoint of schema {header.get('schema')!r}, this version reads {SCHEMA!r}.")
    return tensors, about


def restore(step: Step, tensors: dict[str, Tensor], about: dict[str, Any], path: Path) -> None:
    """Put a checkpoint's tensors where they were. In place, so that a captured step goes on with them."""
    load_model(step.model, tensors, path)
    if step.average is not None:
        load_model(step.average, tensors, path, "average.")
    with torch.no_grad():
        for i, parameter in enumerate(_parameters(step)):
            prefix = f"optimizer.{i}."
            state = step.optimizer.state[parameter]
            for name in [name for name in tensors if name.startswith(prefix)]:
                key = name.removeprefix(prefix)
                if not isinstance(state.get(key), Tensor):
                    state[key] = torch.empty_like(parameter)
                state[key].copy_(tensors[name])
    if step.wiring is not None:
        step.wiring.load_state_dict(about["wiring"])
        step.wiring.last_look = [tensors[f"seen.{i}"].numpy() for i in range(len(step.wiring.last_look))]
    step.scaler.load_state_dict(about["scaler"])
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and step.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], step.device)


def model_state(tensors: dict[str, Tensor], prefix: str = "model.") -> dict[str, Tensor]:
    """The part of a checkpoint under ``prefix``: the model's ``state_dict``, or its average's."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def evaluated(tensors: dict[str, Tensor]) -> str:
    """The prefix of the network that was evaluated: the average, where there is one."""
    return "average." if any(name.startswith("average.") for name in tensors) else "model."


def load_model(model: nn.Module, tensors: dict[str, Tensor], path: Path, prefix: str = "model.") -> None:
    """Give a model the part of a checkpoint under ``prefix``."""
    try:
        model.load_state_dict(model_state(tensors, prefix))
    except RuntimeError as error:
        raise WiringError(
            f"{path} does not fit this model: {error}. It belongs to another recipe or setting."
        ) from error


def _parameters(step: Step) -> list[nn.Parameter]:
    return [p for group in step.optimizer.param_groups for p in group["params"]]
