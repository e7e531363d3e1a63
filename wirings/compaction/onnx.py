"""Convert a program to an ONNX model for any batch size. Each operation has a ``to_onnx`` method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wirings.compaction.operation import Operation
from wirings.compaction.program import TORCH_CONSTANTS, Program

OPSET = 17
IR_VERSION = 8
"""Old enough for runtimes of several years ago."""


def onnx_model(program: Program) -> Any:
    """The ONNX model of a program in single precision.

    Raises:
        UnsupportedByOnnxError: if ONNX has no operator for an operation.
    """
    import onnx
    from onnx import TensorProto, helper

    shapes = program.shapes()
    writer = OnnxWriter(shapes)
    for operation in program.operations:
        operation.to_onnx(writer)
    kinds = {name: _element_type(text) for name, text in program.notes.get("types", {}).items()}
    inputs = [
        helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), ["batch", *shape])
        for name, shape in program.inputs.items()
    ]
    outputs = []
    for name in program.outputs:  # an input that is also an output needs another name
        shown = writer.node("Identity", [name], f"{name}.copy") if name in program.inputs else name
        outputs.append(helper.make_tensor_value_info(shown, TensorProto.FLOAT, ["batch", *shapes[name]]))
    graph = helper.make_graph(writer.nodes, "wirings", inputs, outputs, initializer=writer.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="wirings")
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model)
    return model


def _element_type(name: str) -> int:
    """The ONNX type of an input of integers or booleans."""
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(torch.zeros(0, dtype=TORCH_CONSTANTS[name]).numpy().dtype))


class OnnxWriter:
    """Collects the nodes and weights of an ONNX model."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        """The shape of every tensor of the program, without the batch dimension."""
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def node(self, kind: str, inputs: list[str], output: str, *more: str, **attributes: Any) -> str:
        """Add a node; returns the name of its output, after which it may have ``more`` ("" for those not used)."""
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output, *more], name=f"{output}:{kind}", **attributes))
        return output

    def tensor(self, value: Tensor, hint: str) -> str:
        """Add a constant tensor; returns its name."""
        from onnx import numpy_helper

        name = f"{hint}#{len(self.weights)}"
        value = value.to(torch.float32) if value.is_floating_point() else value
        self.weights.append(numpy_helper.from_array(value.detach().cpu().contiguous().numpy(), name))
        return name

    def integers(self, values: list[int], hint: str) -> str:
        """Add constant integers; returns their name."""
        return self.tensor(torch.tensor(values, dtype=torch.int64), hint)

    def by_channel(self, o: Operation, value: Tensor, field: str) -> str:
        """Add one number per channel, reshaped to broadcast with the operation's result; returns its name."""
        return self.tensor(value.view(-1, *[1] * (len(self.shapes[o.output]) - 1)), f"{o.output}.{field}")
