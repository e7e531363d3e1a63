"""A new kind of step: its kernel and a line in the table of kernels, and one Python class with its lowering."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.exported import build, needs_gpp, run_example
from wirings import engine
from wirings.compaction.operation import Operation, Tensors
from wirings.compaction.operations import Conv
from wirings.compaction.program import Program
from wirings.engine import build as engine_build
from wirings.engine.bounds import expect_inside
from wirings.engine.export import kernels_source
from wirings.engine.lowering import Lowering
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations import KERNELS, kernel_for
from wirings.engine.step import KINDS, Fields, LoweredStep, StepContext, integers, pointers
from wirings.utils.compiler import MissingError, Source

KERNEL = """\
#pragma once

#include "kernel_step.h"

struct SoftsignStep {
    const int32_t *in, *out;
    int32_t height, width, pitch, out_pitch;
};

static void run_softsign(const SoftsignStep &step, float *memory, float *, int task, const CallerTensors &) {
    for (int y = 0; y < step.height; y++)
        for (int x = 0; x < step.width; x++) {
            const float v = memory[at(step.in[task] + x, y, step.pitch)];
            memory[at(step.out[task] + x, y, step.out_pitch)] = v / (1 + (v < 0 ? -v : v));
        }
}
"""


@dataclass(frozen=True, eq=False)
class Softsign(Operation):
    """x / (1 + |x|)."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return F.softsign(inputs[0])


def declare_step(*more: str) -> None:
    """What the Python file of the kernel declares; with ``more`` fields than the kernel has."""

    @dataclass(eq=False)
    class SoftsignStep(LoweredStep):
        kind = "softsign"
        layout = (*pointers("in_", "out"), *integers("height", "width", "pitch", "out_pitch", *more))
        out: FeatureMaps
        source: FeatureMaps

        def reads(self) -> list[FeatureMaps]:
            return [self.source]

        def fields(self, context: StepContext) -> tuple[Fields, int]:
            memory, source = context.memory, self.source
            in_, out = memory.offsets(source), memory.offsets(self.out)
            expect_inside(self.name, in_, context.extent(source), context.floats)
            expect_inside(self.name, out, context.extent(self.out), context.floats)
            size = {"height": source.height, "width": source.width, "pitch": memory.pitch(source)}
            return {"in_": in_, "out": out, **size, "out_pitch": memory.pitch(self.out)}, len(in_)

    @kernel_for(Softsign, lambda o, shapes: len(shapes[0]) == 3)
    def lower_softsign(lowering: Lowering, o: Any) -> FeatureMaps:
        source, out = lowering.solid(lowering.ready(o.inputs[0])), lowering.new_like(o.output)
        lowering.emit(SoftsignStep(o.output, out, source))
        return out


@pytest.fixture
def with_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels' sources with one more file, and two more lines in the table."""
    folder = tmp_path / "source"
    shutil.copytree(engine_build.SOURCE.folder, folder)
    (folder / "softsign.h").write_text(KERNEL)
    table = (folder / "kernel_table.h").read_text()
    table = table.replace('#include "pooling.h"\n', '#include "pooling.h"\n#include "softsign.h"\n')
    table = table.replace("KERNELS[] = {\n", 'KERNELS[] = {\n    kernel<SoftsignStep, run_softsign>("softsign"),\n')
    (folder / "kernel_table.h").write_text(table)
    source = Source("engine", folder, engine_build.SOURCE.main)
    monkeypatch.setattr(engine_build, "SOURCE", source)
    monkeypatch.setattr(kernels_source, "SOURCE", source)
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "cache"))
    yield
    KINDS.pop("softsign", None)
    KERNELS.pop(Softsign, None)


@needs_gpp
@pytest.mark.usefixtures("with_kernel")
def test_new_kernel_runs_and_is_exported(tmp_path: Path) -> None:
    declare_step()
    weights = torch.randn(5, 3, 3, 3), torch.randn(2, 5, 1, 1)
    operations = [
        Conv("a", ("x",), weights[0], None, (1, 1), (1, 1)),
        Softsign("b", ("a",)),
        Conv("y", ("b",), weights[1]),
    ]
    program = Program({"x": (3, 9, 7)}, operations, ("y",))
    images = torch.randn(3, 3, 9, 7)
    fast = engine.compile(program, engine="sparse", threads=2)
    assert "softsign" in [step.kind for step in fast.report.steps]
    torch.testing.assert_close(fast(images), program.run(images)[0], rtol=1e-5, atol=1e-5)
    folder = fast.export(tmp_path / "network")
    build(folder)
    assert torch.equal(run_example(fast, folder, [images])[0], fast(images))


@needs_gpp
@pytest.mark.usefixtures("with_kernel")
def test_refuses_kernels_that_python_declares_differently(tmp_path: Path) -> None:
    for declare in (lambda: None, lambda: declare_step("another")):  # not at all, and with another size
        declare()
        with pytest.raises(MissingError, match="lays steps out differently from ctypes: softsign"):
            engine_build.SOURCE.load("", tmp_path / "cache", engine_build._declared)
