"""Write a compiled network as one C++ source file with a C interface."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from wirings.compaction.operations import TorchOperator
from wirings.compaction.program import Program
from wirings.engine.export.image import NetworkImage, PlanPlaces, as_text
from wirings.engine.export.interface import Interface
from wirings.engine.export.kernels_source import kernels_source
from wirings.engine.kernel_step import KernelStep
from wirings.engine.segments import ProgramSegment
from wirings.engine.step import KINDS, KernelSizes
from wirings.errors import WiringError, unknown
from wirings.utils.compiler import FLAGS
from wirings.utils.files import check_path, disk_errors, whole_file


@dataclass(frozen=True)
class ExportTarget:
    """Vector instructions that a network can be exported for."""

    title: str
    sizes: KernelSizes
    flag: str
    """What compilers need to use these instructions on any machine; empty if they always do."""


TARGETS = {
    "avx512": ExportTarget("AVX-512", KernelSizes(16, 8, 16, 3, 64), "-march=x86-64-v4"),
    "avx2": ExportTarget("AVX2", KernelSizes(8, 4, 12, 3, 32), "-march=x86-64-v3"),
    "sse": ExportTarget("SSE", KernelSizes(4, 4, 12, 3, 16), "-march=x86-64"),
    "neon": ExportTarget("NEON", KernelSizes(4, 8, 16, 3, 16), ""),
}
"""The targets by name. ``static_assert`` compares their sizes with those of the kernels."""


def export_network(
    program: Program,
    segments: Sequence[ProgramSegment],
    shapes: dict[str, tuple[int, ...]],
    folder: str | Path,
    name: str = "network",
    target: str | None = None,
) -> Path:
    """Write C++ source code, a header, an example program and a README to a folder; see `EngineModel.export`."""
    check_name(name)
    if target is not None and (not isinstance(target, str) or target not in TARGETS):
        raise unknown("target", str(target)[:60], TARGETS)
    folder = check_path(folder, "a folder")
    if folder.exists() and not folder.is_dir():
        raise WiringError(f"expected a folder to export to, got the file {folder}. Choose another path.")
    segments = [segment for segment in segments if segment.outputs]  # others compute nothing that is used
    _check_compiled(program, segments)
    plans = [segment.plan for segment in segments if segment.plan is not None]
    sizes = plans[0].machine if target is None else TARGETS[target].sizes
    built_for = next((own for own in TARGETS.values() if own.sizes == sizes), None)
    if built_for is None:
        raise WiringError(f"the kernels have unknown sizes ({sizes}). Name a target: {', '.join(TARGETS)}.")
    interface = Interface(program, shapes, name)
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    flags += [flag for flag in ("-march=native" if target is None else built_for.flag,) if flag]
    about = {"target": built_for.title, "flags": " ".join(flags), "threads": str(plans[0].threads)}
    about["batches"] = f"of {program.notes['batch']}" if "batch" in program.notes else "of any size"
    texts = {
        f"{name}.cpp": _source(interface, segments, shapes, built_for, program.notes.get("batch", 0)),
        f"{name}.h": interface.fill("network.h.txt", **about),
        "example.cpp": interface.fill("example.cpp.txt", **about),
        "README.md": interface.fill("README.md.txt", **about),
    }
    with disk_errors(folder):
        for file, text in texts.items():
            with whole_file(folder / file) as part:
                part.write_text(text, encoding="utf-8")
    return folder


def check_name(name: str) -> None:
    """Raise unless a name can be the prefix of names in C."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z](_?[A-Za-z0-9])*", name) or len(name) > 60:
        raise WiringError(
            f"name must be letters, digits and single underscores, and begin with a letter, got {str(name)[:80]!r}."
        )
    if name.lower() == "example":
        raise WiringError('name must not be "example": example.cpp is the program that runs it. Choose another name.')


def _check_compiled(program: Program, segments: Sequence[ProgramSegment]) -> None:
    copied = [name for name in program.outputs if name in program.inputs]
    if copied:
        raise WiringError(f"the input {copied[0]} is also an output, which cannot be exported. Remove this output.")
    others = [o for segment in segments if segment.plan is None for o in segment.operations]
    names = sorted({o.target if isinstance(o, TorchOperator) else type(o).__name__ for o in others})
    if names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")
        raise WiringError(
            f"only networks that run on the compiled kernels alone can be exported, but these operators run on "
            f"PyTorch: {shown}. Replace them in the model, or save the compact model as .onnx."
        )


def _source(
    interface: Interface,
    segments: Sequence[ProgramSegment],
    shapes: dict[str, tuple[int, ...]],
    target: ExportTarget,
    batch: int,
) -> str:
    image = NetworkImage()
    numbers = {x.tensor: i for i, x in enumerate([*interface.inputs, *interface.outputs])}
    tensors = [(x.floats,) for x in (*interface.inputs, *interface.outputs)]
    own, tables = [], []
    for i, segment in enumerate(segments):
        assert segment.plan is not None
        for name in segment.outputs:
            if name not in numbers:
                numbers[name] = len(tensors)
                tensors.append((math.prod(shapes[name]),))
        one = image.add_plan(segment.plan, target.sizes)
        many = PlanPlaces() if segment.batch_plan is None else image.add_plan(segment.batch_plan, target.sizes)
        inputs, outputs = ([numbers[name] for name in names] for names in (segment.inputs, segment.outputs))
        tables += [_table("int", f"INPUTS_{i}", inputs or [-1]), _table("int", f"OUTPUTS_{i}", outputs)]
        own.append(
            f"{{{_row(astuple(one))}, {_row(astuple(many))}, INPUTS_{i}, OUTPUTS_{i}, {len(inputs)}, {len(outputs)}}}"
        )
    texts = as_text(image.words)
    indices = [(numbers[name], limit, start, interface.size_of(name) if count is None else count)
               for name, limit, start, count in interface.indices]  # fmt: skip
    tables += [
        _table("ImagePart", "PARTS", map(_row, image.parts)),
        _table("ImagePointer", "POINTERS", map(_row, image.pointers)),
        _table("SegmentData", "SEGMENTS", own),
        _table("TensorData", "TENSORS", map(_row, tensors)),
        _table("IndexData", "INDICES", map(_row, indices or [(0, 0, 0, 0)])),
        _table("char *const", "TEXT", (f'"{text}"' for text in texts)),
    ]
    fields = [
        "TEXT", len(texts), len(image.words), image.bytes // 4, "PARTS", len(image.parts),
        "POINTERS", len(image.pointers), "SEGMENTS", len(own), "TENSORS",
        len(interface.inputs), len(interface.outputs), len(tensors), "INDICES", len(indices), batch,
    ]  # fmt: skip
    headers, kernels = kernels_source()
    kinds: list[type[ctypes.Structure]] = [KernelStep, *(kind.struct for kind in KINDS.values())]
    sizes = target.sizes
    return interface.fill(
        "network.cpp.txt",
        headers=headers,
        kernels=kernels,
        checks="\n".join(
            f'static_assert(sizeof({kind.__name__}) == {ctypes.sizeof(kind)}, "structs have an unexpected layout");'
            for kind in kinds
        ),
        lanes=str(sizes.lanes),
        sizes_match=f"LANES == {sizes.lanes} && BLOCK == {sizes.block} && TILE == {sizes.tile} && "
        f"DENSE_TILE == {sizes.dense_tile} && PANEL * LANES == {sizes.panel}",
        target=target.title,
        flag=f"-march=native or {target.flag}" if target.flag else "a compiler for AArch64",
        tables="\n".join(tables),
        fields=", ".join(map(str, fields)),
    )


def _row(numbers: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, numbers)) + "}"


def _table(kind: str, name: str, rows: Iterable[object]) -> str:
    return f"const {kind} {name}[] = {{\n" + ",\n".join(map(str, rows)) + "\n};\n"
