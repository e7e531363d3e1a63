"""The ways to run a network that `wirings.ship` compares, and what they leave out."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.compaction import CompactModel, Program
from wirings.compaction.compare import largest_magnitude, relative_difference
from wirings.compaction.operations import TorchOperator
from wirings.compaction.output_structure import flatten_outputs
from wirings.engine import EngineModel
from wirings.engine.ship_report import COMPACT, ENGINE, ONNX, ORIGINAL, TorchSteps
from wirings.utils.example_input import CallArguments

PRODUCTS = ("linear", "mm", "matmul", "einsum", "conv", "attention", "lstm", "gru", "rnn")
"""Parts of the names of operators that multiply tensors."""


def measured_sides(
    plain: nn.Module,
    stored: CompactModel,
    fast: EngineModel,
    arguments: CallArguments,
    *,
    onnx: Path,
    notes: list[str],
) -> dict[str, Callable[[], Any]]:
    """What is measured, by name. Each side has its own inputs, since a model may change them in place.

    Args:
        plain: the original network.
        stored: the compact network, as its file gives it.
        fast: the same, compiled; left out if there are no kernels.
        arguments: what the original network is called with.
        onnx: the file to write for ONNX Runtime.
        notes: what is left out is added to these.
    """

    def tensors(single: bool) -> list[Tensor]:
        given = [x for x in (*arguments.args, *arguments.kwargs.values()) if isinstance(x, Tensor)]
        return [(x.float() if single and x.is_floating_point() else x).clone() for x in given]

    own = on_cpu(arguments, clone=True)
    sides: dict[str, Callable[[], Any]] = {
        ORIGINAL: functools.partial(plain, *own.args, **own.kwargs),
        COMPACT: functools.partial(stored, *tensors(False)),
    }
    run = _onnx_runtime(stored, onnx, fast.threads, notes)
    if run is not None:
        sides[ONNX] = functools.partial(run, *tensors(True))
    if fast.compiled:
        sides[ENGINE] = functools.partial(fast, *tensors(True))
    return {side: torch.no_grad()(call) for side, call in sides.items()}


def _onnx_runtime(
    stored: CompactModel, path: Path, threads: int, notes: list[str]
) -> Callable[..., list[Tensor]] | None:
    """The compact network in ONNX Runtime, which reads it from ``path``; None, and a note, if that is impossible."""
    path.unlink(missing_ok=True)  # of an earlier network
    if not (installed("onnx") and installed("onnxruntime")):
        notes.append('ONNX Runtime was left out: it is not installed (pip install "wirings[export]").')
        return None
    import onnxruntime

    try:
        stored.save(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # exporters raise all kinds of errors, and shipping does not depend on them
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        notes.append(f"There is no ONNX file, and ONNX Runtime was left out: {reason}")
        return None
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, given)]

    return run


def output_differences(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The largest difference of each side's outputs from those of the first, as a share of the largest output."""
    expected: Sequence[Tensor] = []
    found = {}
    for name, call in calls.items():
        outputs = [x.clone() for x in flatten_outputs(call())[0]]
        expected = expected or outputs
        pairs = zip(outputs, expected, strict=True)
        found[name] = max(relative_difference(one, two, largest_magnitude(two)) for one, two in pairs)
    return found


def steps_left_to_torch(fast: EngineModel) -> list[TorchSteps]:
    """What the engine leaves to PyTorch, the slowest kind first."""
    times: dict[str, list[float]] = {}
    names = {o.output: o.target for o in fast.program.operations if isinstance(o, TorchOperator)}
    for step in fast.report.steps:
        if step.way == "torch":
            times.setdefault(names.get(step.name, step.kind), []).append(step.seconds)
    made = [TorchSteps(kind, len(each), sum(each)) for kind, each in times.items()]
    return sorted(made, key=lambda steps: -steps.seconds)


def layer_notes(fast: EngineModel) -> list[str]:
    """Which layers of a network are in int8, and why others are not; nothing for a network in float32."""
    if fast.quantization is None or not fast.compiled:
        return []
    reasons = Counter(re.split(r" [0-9.]+ %|:", why)[0] for why in fast.quantization.floats.values())
    count, more = len(fast.quantization.layers), ", ".join(f"{n} ({why})" for why, n in reasons.items())
    return [f"Layers in int8: {count}." + (f" In float32: {more}." if more else "")]


def uncounted_products(program: Program) -> list[str]:
    """A note if a program has products that its multiply-adds do not include."""
    targets = Counter(o.target for o in program.operations if isinstance(o, TorchOperator))
    found = [f"{count} × {name}" for name, count in targets.items() if any(part in name for part in PRODUCTS)]
    return [f"Not counted in the multiply-adds, before and after: {', '.join(found)}."] if found else []


def on_cpu(arguments: CallArguments, clone: bool = False) -> CallArguments:
    """The arguments of a call on the CPU, without gradients; ``clone`` copies their memory."""

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().cpu().clone() if clone else x.detach().cpu()

    kwargs = {key: moved(value) for key, value in arguments.kwargs.items()}
    return CallArguments(tuple(moved(x) for x in arguments.args), kwargs)


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None
