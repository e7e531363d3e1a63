"""`ship`: compact and compile a network, and say what was gained."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wirings.compaction import CompactModel, Program, compact, load_compact
from wirings.compaction.compact import check_arguments, plain_copy
from wirings.engine import EngineModel, quantization_for
from wirings.engine import compile as compile_engine
from wirings.engine.choices import check_settings
from wirings.engine.ship_report import COMPACT, ENGINE, ShipMetric, ShipReport, ShipSide
from wirings.engine.turns import time_in_turns
from wirings.errors import WiringError, unknown
from wirings.train.ship_quality import Quality, QualityMeasure, ShipData, quality_measure
from wirings.train.ship_sides import (
    installed,
    layer_notes,
    measured_sides,
    on_cpu,
    output_differences,
    steps_left_to_torch,
    uncounted_products,
)
from wirings.utils.compiler import cpu_name
from wirings.utils.encoded_tensors import rounding_type
from wirings.utils.example_input import ExampleInput
from wirings.utils.files import check_folder, disk_errors, whole_file
from wirings.utils.text import brief
from wirings.version import __version__

COMPACT_FILE, ENGINE_FILE, ONNX_FILE = "compact.safetensors", "engine.safetensors", "model.onnx"
JSON_FILE, TEXT_FILE, PICTURE_FILE = "report.json", "report.md", "gains.png"


class ShippedModel:
    """A network that is ready to ship, which `wirings.ship` returns. Print it for a table of what was gained.

    Attributes:
        fast: the network compiled for this machine's CPU; on PyTorch, if the engine gains nothing.
        compact: the network in plain PyTorch, without dead nodes.
        report: what was gained.
    """

    def __init__(self, fast: EngineModel, compact: CompactModel, report: ShipReport, exact: CompactModel) -> None:
        self.fast, self.compact, self.report = fast, compact, report
        self._exact = exact  # its weights are not rounded; files round them

    def save(self, folder: str | Path) -> Path:
        """Write the network and the report to a folder.

        - ``compact.safetensors``: the compact network, for `wirings.load_compact`;
        - ``engine.safetensors``: the same with what was chosen on this machine, for `wirings.engine.load`;
        - ``model.onnx``, if the network can be exported: the report says why not otherwise;
        - ``report.json``, ``report.md`` and, with matplotlib, ``gains.png``.

        Returns:
            The folder.
        """
        folder = _made(folder, "folder")
        self._exact.save(folder / COMPACT_FILE, self.report.dtype)
        _save_engine(self._exact, self.fast, folder, self.report.dtype)
        if ONNX_FILE in self.report.files:
            self.compact.save(folder / ONNX_FILE)
        return self._save_report(folder)

    def _save_report(self, folder: Path) -> Path:
        picture = installed("matplotlib")
        page = self.report.as_markdown()
        if picture:
            from wirings import draw

            draw.save(folder / PICTURE_FILE, draw.gains, self.report, size=(8, 6.5))
            page += f"\n![before and after]({PICTURE_FILE})\n"
        for name, text in ((JSON_FILE, json.dumps(self.report.as_mapping(), indent=1) + "\n"), (TEXT_FILE, page)):
            with disk_errors(folder / name), whole_file(folder / name) as part:
                part.write_text(text, encoding="utf-8")
        return folder

    def __str__(self) -> str:
        return str(self.report)


def ship(
    model: nn.Module,
    example_input: ExampleInput | None = None,
    *,
    out: str | Path | None = None,
    data: ShipData | None = None,
    threads: int | None = None,
    seconds: float = 1.0,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    calibrate: Iterable[Any] | None = None,
    name: str | None = None,
) -> ShippedModel:
    """Compact a network, compile it for this machine's CPU, and measure what was gained.

    The original network in PyTorch, the compact one in PyTorch, in ONNX Runtime if it is installed, and in the engine
    take turns on the CPU. If the engine is not faster than PyTorch, PyTorch is used, and the report says so.

    Args:
        model: any model that `wirings.compact` takes, on any device. A wired model is finalized. It is not changed.
        example_input: what the model is called with, in any form that `wirings.compact` takes. Times are for this
            batch. By default, one example of ``model.input_shape``.
        out: a folder to write the network and the report to; see `ShippedModel.save`.
        data: batches of (x, y) on which accuracy is measured before and after, such as a DataLoader, or a function that
            takes a model and returns a number.
        threads: the number of threads of every side; by default, as many as PyTorch uses.
        seconds: the time of measured calls per side.
        dtype: what weights are rounded to in the files, as for `CompactModel.save`. What is measured is then what the
            file gives when it is loaded again; the engine computes in float32.
        quantize: ``"int8"`` has the engine compute in int8, as ``wirings.engine.compile(…, dtype="int8")`` does.
        calibrate: for int8, batches of real inputs, with or without labels; by default, ``data`` if that has batches.
        name: what the report calls the network; by default, its class.

    Raises:
        WiringError: if the model cannot be made compact, or an argument is invalid.

    >>> from torch import nn, zeros
    >>> shipped = ship(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), zeros(1, 3), seconds=0.01)
    >>> shipped.fast(zeros(5, 3)).shape, shipped.report.sides[0].name
    (torch.Size([5, 2]), 'PyTorch')
    """
    _check(model, out, threads, seconds, name)
    rounding = rounding_type(dtype)
    measure = None if data is None else quality_measure(data)
    kind = _computes_in(quantize, calibrate)
    if kind == "int8" and calibrate is None and isinstance(data, Iterable) and not hasattr(data, "epoch"):
        calibrate = data
    arguments = on_cpu(check_arguments(model, example_input, "ship"))
    threads = int(threads or torch.get_num_threads())  # NumPy's integers cannot be written as JSON
    with _torch_threads(threads), _folder(out) as folder:
        plain = plain_copy(model)
        exact = compact(plain, arguments.kwargs or arguments.args)
        notes = uncounted_products(exact.program)
        path = exact.save(folder / COMPACT_FILE, rounding)
        stored = exact if rounding is None else load_compact(path, max_bytes=math.inf)
        before = _measure(measure, plain, notes)
        layers = quantization_for(stored.program, kind, calibrate)
        # On the kernels; whether they win is measured below.
        fast = EngineModel(stored.program, threads=threads, quantization=layers)
        notes += layer_notes(fast)
        calls = measured_sides(plain, stored, fast, arguments, onnx=folder / ONNX_FILE, notes=notes)
        differences = output_differences(calls)
        times = time_in_turns(calls, seconds)
        left = steps_left_to_torch(fast) if fast.compiled else []
        used = "engine" if fast.compiled and times[ENGINE].median < times[COMPACT].median else "torch"
        if used == "torch" and fast.compiled:
            fast = compile_engine(stored, engine="torch", threads=threads)
        after = None if before is None else _measure(measure, fast, notes)
        _save_engine(exact, fast, folder, rounding)
        if out is not None and not installed("matplotlib"):
            notes.append('There is no picture: it needs matplotlib (pip install "wirings[demo]").')
        assert exact.report is not None
        report = ShipReport(
            model=name or type(model).__name__,
            example=str(arguments),
            threads=threads,
            machine=cpu_name(),
            versions=_versions(),
            dtype=rounding,
            sides=[ShipSide(side, times[side], differences[side]) for side in calls],
            sizes=exact.report,
            bytes_before=_state_bytes(plain),
            files={
                file: (folder / file).stat().st_size
                for file in (COMPACT_FILE, ENGINE_FILE, ONNX_FILE)
                if (folder / file).exists()
            },
            metric=_metric(before, after),
            left_to_torch=left,
            used=used,
            notes=notes,
            quantize=quantize,
        )
        shipped = ShippedModel(fast, stored, report, exact)
        if out is not None:
            shipped._save_report(folder)
    return shipped


def _computes_in(quantize: Any, calibrate: Any) -> str:
    if quantize not in (None, "int8"):
        raise unknown("quantize", str(quantize)[:60], ["int8"])
    if quantize is None and calibrate is not None:
        raise WiringError('calibrate is for quantize="int8". Give both, or leave it out.')
    return quantize or "float32"


# ---- quality --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _measure(measure: QualityMeasure | None, model: nn.Module, notes: list[str]) -> Quality | None:
    if measure is None:
        return None
    try:
        return measure.measure(model)
    except WiringError as error:
        if measure.required:
            raise
        notes.append(f"The network was not measured on data: {str(error).splitlines()[0]}")
        return None


def _metric(before: Quality | None, after: Quality | None) -> ShipMetric | None:
    if before is None or after is None:
        return None
    return ShipMetric(before.label, before.value, after.value, before.unit, before.digits, before.examples)


# ---- files ----------------------------------------------------------------------------------------------------------


def _save_engine(exact: CompactModel, fast: EngineModel, folder: Path, dtype: str | None) -> None:
    """Write the network with what was chosen for it. Weights are rounded once, from those that are not rounded."""
    program = exact.program.to("cpu", torch.float32)
    notes = {**program.notes, "engine": fast.choices}
    with disk_errors(folder / ENGINE_FILE):
        Program(program.inputs, program.operations, program.outputs, notes).save(folder / ENGINE_FILE, dtype)


def _state_bytes(model: nn.Module) -> int:
    """The size of the file that `torch.save` writes for a model's state."""
    with tempfile.TemporaryFile() as file:
        torch.save(model.state_dict(), file)
        return file.tell()


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    """The folder to write to: the user's, or one that is removed in the end."""
    if out is not None:
        yield _made(out, "out")
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _made(folder: str | Path, option: str) -> Path:
    check_folder(folder, option)
    path = Path(folder)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


# ---- helpers --------------------------------------------------------------------------------------------------------


def _check(model: Any, out: Any, threads: Any, seconds: Any, name: Any) -> None:
    if not isinstance(model, nn.Module):
        raise WiringError(f"ship expects a torch.nn.Module, got {type(model).__name__}.")
    check_settings("auto", threads)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise WiringError(f"seconds must be a positive number, got {brief(seconds)}.")
    if name is not None and not isinstance(name, str):
        raise WiringError(f"name must be a text, got {brief(name)}.")
    if out is not None:
        check_folder(out, "out")


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads that PyTorch uses, and restore it in the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _versions() -> dict[str, str]:
    found = {"wirings": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["onnxruntime"] = importlib.metadata.version("onnxruntime")
    return found
