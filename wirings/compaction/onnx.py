"""A program as an ONNX model, operation by operation, for any number of images."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wirings.compaction.operations import (
    Activation,
    Add,
    AddMap,
    Affine,
    Concat,
    Constant,
    Conv,
    Crop,
    Flatten,
    InstanceNorm,
    Linear,
    Mean,
    Multiply,
    Operation,
    Pad,
    Place,
    Pool,
    Reshape,
    Select,
)
from wirings.compaction.program import Program

OPSET = 17


class UntoldError(Exception):
    """There is no ONNX operator for an operation here."""


def model_of(program: Program) -> Any:
    """The ONNX model of a program in single precision; raises `UntoldError` where ONNX has nothing for an operation."""
    import onnx
    from onnx import TensorProto, helper

    shapes = program.shapes()
    writer = _Writer(shapes)
    for operation in program.operations:
        writer.write(operation)
    given = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
        for name, shape in program.inputs.items()
    ]
    results = []
    for name in program.outputs:
        shown = writer.copied(name) if name in program.inputs else name
        results.append(helper.make_tensor_value_info(shown, TensorProto.FLOAT, ["batch", *shapes[name]]))
    graph = helper.make_graph(writer.nodes, "wirings", given, results, initializer=writer.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="wirings")
    model.ir_version = 8  # read by runtimes of some years back
    onnx.checker.check_model(model)
    return model


class _Writer:
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def write(self, operation: Operation) -> None:
        write = _WRITERS.get(type(operation))
        if write is None:
            raise UntoldError(type(operation).__name__)
        write(self, operation)

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"{output}:{kind}", **attributes))
        return output

    def tensor(self, value: Tensor, hint: str) -> str:
        """A constant of the model; its name."""
        from onnx import numpy_helper

        name = f"{hint}#{len(self.weights)}"
        value = value.to(torch.float32) if value.is_floating_point() else value
        self.weights.append(numpy_helper.from_array(value.detach().cpu().contiguous().numpy(), name))
        return name

    def numbers(self, values: list[int], hint: str) -> str:
        return self.tensor(torch.tensor(values, dtype=torch.int64), hint)

    def by_channel(self, o: Operation, value: Tensor, field: str) -> str:
        """One number a channel, shaped to go with the operation's result."""
        return self.tensor(value.view(-1, *[1] * (len(self.shapes[o.output]) - 1)), f"{o.output}.{field}")

    def copied(self, name: str) -> str:
        """An input as an output: ONNX wants another name for it."""
        return self.node("Identity", [name], f"{name}.copy")


def _conv(w: _Writer, o: Conv) -> None:
    inputs = [o.inputs[0], w.tensor(o.weight, f"{o.output}.weight")]
    inputs += [] if o.bias is None else [w.tensor(o.bias, f"{o.output}.bias")]
    sizes = {"kernel_shape": list(o.weight.shape[2:]), "strides": list(o.stride), "dilations": list(o.dilation)}
    w.node("Conv", inputs, o.output, pads=[*o.padding, *o.padding], group=o.groups, **sizes)


def _linear(w: _Writer, o: Linear) -> None:
    inputs = [o.inputs[0], w.tensor(o.weight, f"{o.output}.weight")]
    inputs += [] if o.bias is None else [w.tensor(o.bias, f"{o.output}.bias")]
    w.node("Gemm", inputs, o.output, transB=1)


def _affine(w: _Writer, o: Affine) -> None:
    scaled = bool((o.scale != 1).any())
    shifted = bool(o.shift.any()) or not scaled
    name = o.inputs[0]
    if scaled:
        name = w.node("Mul", [name, w.by_channel(o, o.scale, "scale")], f"{o.output}.scaled" if shifted else o.output)
    if shifted:
        w.node("Add", [name, w.by_channel(o, o.shift, "shift")], o.output)


def _instance_norm(w: _Writer, o: InstanceNorm) -> None:
    own = [w.tensor(o.scale, f"{o.output}.scale"), w.tensor(o.shift, f"{o.output}.shift")]
    w.node("InstanceNormalization", [o.inputs[0], *own], o.output, epsilon=o.epsilon)


_PLAIN = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "hardswish": "HardSwish", "softplus": "Softplus"}


def _activation(w: _Writer, o: Activation) -> None:
    x, out = o.inputs[0], o.output
    if o.kind in _PLAIN and (o.kind != "softplus" or o.values[:1] in ((), (1.0,))):
        w.node(_PLAIN[o.kind], [x], out)
    elif o.kind == "leaky_relu":
        w.node("LeakyRelu", [x], out, alpha=o.values[0])
    elif o.kind == "elu":
        w.node("Elu", [x], out, alpha=o.values[0])
    elif o.kind == "hardsigmoid":
        w.node("HardSigmoid", [x], out, alpha=1 / 6, beta=0.5)
    elif o.kind == "clamp":
        limits = [w.tensor(torch.tensor(v), f"{out}.limit") if math.isfinite(v) else "" for v in o.values]
        w.node("Clip", [x, *limits], out)
    elif o.kind == "silu":
        w.node("Mul", [x, w.node("Sigmoid", [x], f"{out}.gate")], out)
    elif o.kind == "mish":
        w.node("Mul", [x, w.node("Tanh", [w.node("Softplus", [x], f"{out}.plus")], f"{out}.gate")], out)
    elif o.kind in ("gelu", "gelu_tanh"):
        _gelu(w, x, out, o.kind == "gelu_tanh")
    else:
        raise UntoldError(o.kind)


def _gelu(w: _Writer, x: str, out: str, by_tanh: bool) -> None:
    def number(value: float) -> str:
        return w.tensor(torch.tensor(value), f"{out}.number")

    if by_tanh:
        square = w.node("Mul", [x, x], f"{out}.square")
        inner = w.node("Add", [w.node("Mul", [square, number(0.044715)], f"{out}.small"), number(1.0)], f"{out}.inner")
        inner = w.node("Mul", [w.node("Mul", [x, inner], f"{out}.cube"), number(math.sqrt(2 / math.pi))], f"{out}.in")
        gate = w.node("Tanh", [inner], f"{out}.tanh")
    else:
        gate = w.node("Erf", [w.node("Mul", [x, number(math.sqrt(0.5))], f"{out}.in")], f"{out}.erf")
    half = w.node("Mul", [x, number(0.5)], f"{out}.half")
    w.node("Mul", [half, w.node("Add", [gate, number(1.0)], f"{out}.gate")], out)


def _select(w: _Writer, o: Select) -> None:
    index = o.index.tolist()
    if index == list(range(index[0], index[0] + len(index))):
        limits = [w.numbers([n], f"{o.output}.limit") for n in (index[0], index[-1] + 1, 1)]
        w.node("Slice", [o.inputs[0], *limits], o.output)
    else:
        w.node("Gather", [o.inputs[0], w.numbers(index, f"{o.output}.index")], o.output, axis=1)


def _place(w: _Writer, o: Place) -> None:
    dims = len(w.shapes[o.output])
    sides = [0] * (2 * dims + 2)
    sides[dims + 2] = 1  # one channel of zeros behind the others, which all missing ones are taken from
    padded = w.node("Pad", [o.inputs[0], w.numbers(sides, f"{o.output}.sides")], f"{o.output}.padded")
    index = [len(o.index)] * o.channels
    for number, place in enumerate(o.index.tolist()):
        index[place] = number
    w.node("Gather", [padded, w.numbers(index, f"{o.output}.index")], o.output, axis=1)


def _pool(w: _Writer, o: Pool) -> None:
    kernel, stride = o.kernel, o.stride
    if o.kind == "adaptive_avg":
        size = w.shapes[o.inputs[0]][1:]
        if any(big % small for big, small in zip(size, o.kernel, strict=True)):
            raise UntoldError("an adaptive pool whose windows differ in size")
        kernel = stride = tuple(big // small for big, small in zip(size, o.kernel, strict=True))
    sizes = {"kernel_shape": list(kernel), "strides": list(stride), "ceil_mode": int(o.ceil)}
    sizes["pads"] = [*o.padding, *o.padding]
    if o.kind == "max":
        w.node("MaxPool", list(o.inputs), o.output, dilations=list(o.dilation), **sizes)
    elif o.kind in ("avg", "adaptive_avg"):
        w.node("AveragePool", list(o.inputs), o.output, count_include_pad=int(o.count_padding), **sizes)
    else:
        raise UntoldError(o.kind)


def _mean(w: _Writer, o: Mean) -> None:
    if o.keep:
        w.node("GlobalAveragePool", list(o.inputs), o.output)
    else:
        dims = len(w.shapes[o.inputs[0]]) - 1
        w.node("ReduceMean", list(o.inputs), o.output, axes=list(range(2, 2 + dims)), keepdims=0)


def _crop(w: _Writer, o: Crop) -> None:
    axes = list(range(2, 2 + len(o.starts)))
    limits = [w.numbers(list(values), f"{o.output}.limit") for values in (o.starts, o.stops, axes, o.steps)]
    w.node("Slice", [o.inputs[0], *limits], o.output)


def _pad(w: _Writer, o: Pad) -> None:
    sides = w.numbers([0, 0, *o.before, 0, 0, *o.after], f"{o.output}.sides")
    w.node("Pad", [o.inputs[0], sides], o.output)


def _constant(w: _Writer, o: Constant) -> None:
    batch = w.node("Shape", list(o.inputs), f"{o.output}.batch", start=0, end=1)
    shape = w.node("Concat", [batch, w.numbers(list(o.map.shape), f"{o.output}.size")], f"{o.output}.shape", axis=0)
    w.node("Expand", [w.tensor(o.map[None], f"{o.output}.map"), shape], o.output)


_WRITERS: dict[type[Operation], Callable[[_Writer, Any], Any]] = {
    Conv: _conv,
    Linear: _linear,
    Affine: _affine,
    InstanceNorm: _instance_norm,
    Activation: _activation,
    Add: lambda w, o: w.node("Add" if len(o.inputs) == 2 else "Sum", list(o.inputs), o.output),
    Multiply: lambda w, o: w.node("Mul", list(o.inputs), o.output),
    AddMap: lambda w, o: w.node("Add", [o.inputs[0], w.tensor(o.map[None], f"{o.output}.map")], o.output),
    Concat: lambda w, o: w.node("Concat", list(o.inputs), o.output, axis=1),
    Select: _select,
    Place: _place,
    Pool: _pool,
    Mean: _mean,
    Crop: _crop,
    Pad: _pad,
    Flatten: lambda w, o: w.node("Flatten", list(o.inputs), o.output, axis=1),
    Reshape: lambda w, o: w.node("Reshape", [o.inputs[0], w.numbers([0, 0, *o.shape], f"{o.output}.to")], o.output),
    Constant: _constant,
}
