"""A new operation is one class: everything that compaction, files and export need is defined by its methods."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wirings import compact, engine, load_compact
from wirings.compaction.aten import CONVERTERS, Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.onnx import OnnxWriter
from wirings.compaction.operation import Operation, Tensors
from wirings.compaction.operations import OPERATIONS


@dataclass(frozen=True, eq=False)
class Softsign(Operation):
    """x / (1 + |x|), which has no operation of its own in the library."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return nn.functional.softsign(inputs[0])

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Softsign", list(self.inputs), self.output)


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(CONVERTERS)

    @converts("sin")  # a stand-in for the operator of the trace
    def _softsign(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
        x: Any = a["self"]
        return ProgramTensor(builder.add(Softsign, (x.name,), hint)) if has_channels(builder, x) else None

    OPERATIONS["Softsign"] = Softsign
    yield
    del OPERATIONS["Softsign"]
    CONVERTERS.clear()
    CONVERTERS.update(before)


class Network(nn.Module):
    """Calls the operator that is converted, and computes what the operation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.sin() if torch.compiler.is_exporting() else nn.functional.softsign(y))


@pytest.mark.usefixtures("registered")
def test_new_operation_is_pruned_saved_exported_and_compiled(tmp_path: Path) -> None:
    model, x = Network(), torch.randn(3, 2, 5, 5)
    with torch.no_grad():
        model.last.weight[:, 4:] = 0  # two channels are dead
        model.first.weight[0] = 0  # and one is constant
    expected = model(x).detach()
    small = compact(model, x)
    kinds = [type(o).__name__ for o in small.program.operations]
    assert kinds == ["Conv", "Softsign", "Conv"]
    first = small.program.operations[0].tensors()["weight"]
    assert first is not None
    assert first.shape[0] == 3
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    assert torch.equal(again(x), small(x))
    fast = engine.compile(small, engine="sparse", threads=1)  # without a kernel, it runs on PyTorch
    for network in (small, fast):
        torch.testing.assert_close(network(x), expected, rtol=1e-5, atol=1e-6)
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(small.save(tmp_path / "model.onnx")))
    found = session.run(None, {"input": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)
