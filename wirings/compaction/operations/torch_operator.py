"""Any other operator, run by PyTorch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from wirings.compaction.allowed_operators import (
    ALLOWED_OPERATORS,
    PYTHON_OPERATORS,
    check_operator_arguments,
    has_check,
    python_operator,
)
from wirings.compaction.operation import Operation, Tensors, UnsupportedByOnnxError, expect
from wirings.errors import WiringError

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter


_PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv", "einsum", "bilinear", "lstm",
    "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention", "grouped_mm", "_grouped_mm",
}  # fmt: skip
"""Operators with multiply-adds that a report does not count, besides convolutions."""


@dataclass(frozen=True)
class InputRef:
    """In the arguments of a `TorchOperator`: the input of this number."""

    number: int


@dataclass(frozen=True)
class WeightRef:
    """In the arguments of a `TorchOperator`: the weight of this number."""

    number: int


_Get = Callable[[Sequence[Any], Sequence[Any]], Any]
"""Finds an argument in the inputs and weights of a call."""


@dataclass(frozen=True, eq=False)
class TorchOperator(Operation):
    """An operator of PyTorch or Python with its arguments. Unless ``channelwise``, it needs all channels around it."""

    input_count = None
    target: str = ""
    """An operator such as ``aten::softmax.int``, or one of Python's such as ``getitem``."""
    arguments: tuple[Any, ...] = ()
    """Numbers, strings, tuples of them, `InputRef` and `WeightRef`."""
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments."""
    channelwise: bool = False
    """Whether it takes one tensor and treats all of its channels alike and separately."""
    held: tuple[Tensor, ...] = ()
    """The weights."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return self._call(inputs, [own[f"held{i}"] for i in range(len(self.held))])

    def run(self, *inputs: Tensor) -> Tensor:
        return self._call(inputs, self.held)

    def _call(self, inputs: Sequence[Any], held: Sequence[Any]) -> Any:
        function, arguments, options, checked = self._prepared
        given = [x if get is None else get(inputs, held) for x, get in arguments]
        named = {name: x if get is None else get(inputs, held) for name, x, get in options}
        if checked:
            check_operator_arguments(self.target, tuple(given), named)
        return function(*given, **named)

    @functools.cached_property
    def _prepared(self) -> tuple[Any, list[tuple[Any, _Get | None]], list[tuple[str, Any, _Get | None]], bool]:
        """Everything about a call that does not depend on its inputs, since many operators take microseconds only."""
        arguments = [_argument(x) for x in self.arguments]
        options = [(name, *_argument(x)) for name, x in self.options]
        return find_operator(self.target), arguments, options, has_check(self.target)

    def tensors(self) -> dict[str, Tensor | None]:
        return {f"held{i}": value for i, value in enumerate(self.held)}

    def with_tensors(self, own: Tensors) -> Self:
        return dataclasses.replace(self, held=tuple(own[f"held{i}"] for i in range(len(self.held))))

    def with_dtype(self, dtype: torch.dtype) -> Self:
        def changed(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(changed(item) for item in x)
            return dtype if x in (torch.float32, torch.float64) else x

        return dataclasses.replace(self, arguments=changed(self.arguments), options=changed(self.options))

    @property
    def multiplies(self) -> bool:
        """Whether it is a product of matrices, a convolution, attention or a recurrent layer."""
        name = self.target.removeprefix("aten::").partition(".")[0]
        return name in _PRODUCTS or name.startswith(("conv", "_convolution"))

    @property
    def opaque(self) -> bool:
        return not self.channelwise

    @property
    def fixed_size(self) -> bool:
        return True

    def pruned_weights(self, wanted: Tensor) -> dict[str, Any]:
        return {}

    def to_onnx(self, writer: OnnxWriter) -> None:
        raise UnsupportedByOnnxError(f"the operator {self.target}")

    # ---- files ------------------------------------------------------------------------------------------------------

    def infer(self, inputs: Sequence[Any]) -> Any:
        check_allowed_operator(self.target)
        _check_references((self.arguments, self.options), len(inputs), len(self.held))
        options = dict(_on_meta(self.options))
        if self.target not in PYTHON_OPERATORS:
            schema = find_operator(self.target)._schema.arguments
            names = [argument.name for argument in schema]
            expect(len(self.arguments) <= len(names), f"at most {len(names)} arguments")
            expect(set(options) <= set(names), "arguments that the operator has")
            _check_constants(schema, {**dict(zip(names, self.arguments, strict=False)), **options})
            if "device" in names[len(self.arguments) :]:
                options["device"] = torch.device("meta")
        own = {name: torch.empty_like(x, device="meta") for name, x in self.tensors().items() if x is not None}
        meta = dataclasses.replace(self, arguments=_on_meta(self.arguments), options=tuple(options.items()))
        made: Any = meta.compute(inputs, own)
        several = made if isinstance(made, (tuple, list)) else (made,)
        expect(all(isinstance(x, (Tensor, int, float)) for x in several), "tensors or numbers")
        on_meta = all(not isinstance(x, Tensor) or x.is_meta for x in several)
        expect(on_meta, "tensors that depend on its arguments alone")
        return made


_CONSTANTS: dict[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}
"""PyTorch's names of constants in the schema of an operator. Operators take them as integers, too, without a check: an
integer that is none of them ends the process."""


def _check_constants(schema: Sequence[Any], given: dict[str, Any]) -> None:
    """Raise if an operator is given anything but a constant where it expects one."""
    for argument in schema:
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        if kind in _CONSTANTS and (value := given.get(argument.name)) is not None:
            expect(isinstance(value, _CONSTANTS[kind]), f"a torch.{_CONSTANTS[kind].__name__} as {argument.name}")


def _argument(x: Any) -> tuple[Any, _Get | None]:
    """An argument, or a function that finds it in the inputs and weights of a call."""
    if isinstance(x, InputRef):
        return None, lambda inputs, held, number=x.number: inputs[number]
    if isinstance(x, WeightRef):
        return None, lambda inputs, held, number=x.number: held[number]
    if isinstance(x, tuple):
        parts = [_argument(item) for item in x]
        if all(get is None for _, get in parts):
            own = [value for value, _ in parts]
            return None, lambda inputs, held: list(own)  # an operator may change it
        return None, lambda inputs, held: [v if get is None else get(inputs, held) for v, get in parts]
    return x, None


def find_operator(target: str) -> Any:
    """The operator of a name: PyTorch's, such as ``aten::softmax.int``, or one of `PYTHON_OPERATORS`."""
    if target in PYTHON_OPERATORS:
        return python_operator(target)
    namespace, _, name = target.partition("::")
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def check_allowed_operator(target: str) -> None:
    """Raise unless a file may contain an operator."""
    if target not in ALLOWED_OPERATORS and target not in PYTHON_OPERATORS:
        raise WiringError(
            f"the operator {target[:60]!r} is not allowed in a file (see wirings/compaction/allowed_operators.py)"
        )


def _check_references(x: Any, inputs: int, weights: int) -> None:
    if isinstance(x, tuple):
        for item in x:
            _check_references(item, inputs, weights)
    elif isinstance(x, (InputRef, WeightRef)):
        most = inputs if isinstance(x, InputRef) else weights
        expect(type(x.number) is int and 0 <= x.number < most, f"an argument's number from 0 to {most - 1}")


def _on_meta(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_on_meta(item) for item in x)
    return torch.device("meta") if isinstance(x, torch.device) else x
