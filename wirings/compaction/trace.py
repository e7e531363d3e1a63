"""Convert a module to operations: trace it with `torch.export`, and convert PyTorch's operators one by one.

Neural graphs inside the module are not traced; `wirings.compaction.lower_graphs` converts them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import OutputKind

from wirings.compaction import convert_attention, convert_parts, convert_views  # noqa: F401 (they register their functions)
from wirings.compaction.allowed_operators import PYTHON_OPERATORS
from wirings.compaction.aten import CHANNELWISE, CONVERTERS, VIEW_CONVERTERS, BatchConstant, ProgramTensor
from wirings.compaction.batch_value import BatchValue
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operations import InputRef, TorchOperator, WeightRef
from wirings.compaction.operations.arrange import arrange
from wirings.compaction.recognize import recognize
from wirings.compaction.torch_export import OPERATOR, check_sizes, export_module, is_random
from wirings.errors import WiringError

LowerModule = Callable[[ProgramBuilder, nn.Module, str, str], str]
"""Converts a module that is not traced: takes the builder, the module, a hint for names and the name of the module's
input; returns the name of its output."""

_REPLACEMENTS = {
    "aten::view": "aten::reshape",  # the copies that made views possible are left out
    "aten::_unsafe_view": "aten::reshape",
    "aten::empty_like": "aten::zeros_like",  # files must not contain uninitialized memory
    "aten::new_empty": "aten::new_zeros",
}
_FILLED = ("new_zeros", "new_ones", "new_full")
"""Operators that take nothing but the type of their first argument."""
_LIKE = ("zeros_like", "ones_like", "full_like")
"""The same for all of its sizes, too, so that they are constant in a batch of one."""
_ELEMENTWISE = CHANNELWISE & {
    "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "hardshrink", "log1p", "log_sigmoid", "logit", "pow",
    "reciprocal", "round", "rsqrt", "selu", "celu", "sign", "sin", "softshrink", "softsign", "sqrt", "square",
    "threshold", "trunc",
}  # fmt: skip
"""Operators on single numbers, for which it does not matter how a tensor is stored."""


def trace(
    module: nn.Module, builder: ProgramBuilder, inputs: Sequence[str], leaves: dict[nn.Module, LowerModule]
) -> list[str]:
    """Add the operations of a module to a program.

    Args:
        module: a module in evaluation mode. The modules in ``leaves`` are changed during the trace, so pass a copy.
        builder: the program.
        inputs: the names of the module's inputs.
        leaves: modules inside it that are not traced, with the functions that convert them.

    Returns:
        The names of its outputs.
    """
    example = tuple(builder.values[name] for name in inputs)
    lowered = list(leaves.items())
    exported = export_module(module, example, [leaf for leaf, _ in lowered])
    return _TraceConverter(builder, exported, inputs, lowered).run()


class _TraceConverter:
    """Walks through a trace once and adds its operators to a program."""

    def __init__(
        self, builder: ProgramBuilder, exported: Any, inputs: Sequence[str], leaves: list[tuple[nn.Module, LowerModule]]
    ):
        self.builder, self.exported, self.leaves = builder, exported, leaves
        self.inputs = list(inputs)
        self.batch: str | None = None  # the size of dimension 0; a symbol if any batch size works
        self.found: dict[fx.Node, Any] = {}  # what each node of the trace is in the program
        self.origin: dict[fx.Node, str] = {}  # the names of weights in the model

    def run(self) -> list[str]:
        signature = self.exported.graph_signature
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        held |= signature.inputs_to_lifted_tensor_constants
        waiting = iter(self.inputs)
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                target = held.get(node.name)
                if target is None:
                    self.found[node] = ProgramTensor(next(waiting))
                    size = node.meta["val"].shape[0]
                    self.batch = self.batch or str(size)
                    if str(size).isdigit():  # a symbol that can only be one number is a number
                        self.builder.batch = int(size)
                else:
                    store = self.exported.state_dict if target in self.exported.state_dict else self.exported.constants
                    self.found[node], self.origin[node] = store[target].detach(), target.removeprefix("model.")
            elif node.op == "call_function":
                if node.users:  # otherwise it is an assertion, or its result is not used
                    self.found[node] = self._call(node)
            elif node.op == "output":
                return self._outputs(node)
        raise AssertionError("a trace ends with its outputs")

    def _outputs(self, node: fx.Node) -> list[str]:
        # A trace also returns the inputs and buffers that the model changes in place, which are not its outputs.
        results: Any = node.args[0]
        kinds = [spec.kind for spec in self.exported.graph_signature.output_specs]
        given = [x for x, kind in zip(results, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
        self._check_buffers(given)
        results = [self._plain(self._resolve(x)) for x in given]
        spec = str(self.exported.call_spec.out_spec)
        names = []
        for x in results:
            if isinstance(x, Tensor):
                raise WiringError(
                    "an output of the model is constant: it does not depend on the input. Remove it from what forward "
                    "returns."
                )
            if not isinstance(x, ProgramTensor) or "dict" in spec:
                raise WiringError(
                    f"compaction expects a model that returns a tensor or a tuple of tensors, got {spec}. Wrap the "
                    "model in a module that returns the tensors."
                )
            names.append(x.name)
        return names

    def _check_buffers(self, outputs: list[Any]) -> None:
        """Raise if outputs depend on a buffer that the model changes, and thus on earlier calls."""
        signature = self.exported.graph_signature
        changed = set(signature.buffers_to_mutate.values())
        waiting, seen = [x for x in outputs if isinstance(x, fx.Node)], set()
        while waiting:
            node = waiting.pop()
            if (name := signature.inputs_to_buffers.get(node.name)) in changed:
                raise WiringError(
                    f"the model changes its buffer {name.removeprefix('model.')} in evaluation and computes with it, "
                    "so its outputs depend on earlier calls. Do not change it in eval()."
                )
            waiting += [x for x in node.all_input_nodes if x not in seen]
            seen.update(node.all_input_nodes)

    def _resolve(self, x: Any) -> Any:
        """Replace nodes of the trace by what they are in the program."""
        if isinstance(x, fx.Node):
            return self.found[x]
        if isinstance(x, (list, tuple)):
            return tuple(self._resolve(item) for item in x)
        return x

    def _call(self, node: fx.Node) -> Any:
        arguments = [self._resolve(x) for x in node.args]
        options = {name: self._resolve(x) for name, x in node.kwargs.items()}
        target: Any = node.target
        name = _operator_name(target)
        if is_random(target, arguments, options):
            raise WiringError(
                f"the model draws random numbers in evaluation ({name}), so its outputs cannot be compared. Make it "
                "deterministic in eval()."
            )
        check_sizes(node, name)
        if not _depends_on_input([*arguments, *options.values()]):  # computed once, now
            return target(*arguments, **options)
        if name == "getitem" and isinstance(arguments[0], tuple):
            return arguments[0][arguments[1]]
        if name == OPERATOR:
            leaf, lower = self.leaves[arguments[1]]
            source = self._plain(arguments[0])
            return ProgramTensor(lower(self.builder, leaf, self._hint(node, "graph"), source.name))
        short = name.removeprefix("aten::").partition(".")[0]
        if (constant := self._constant(node, target, short, arguments, options)) is not None:
            return constant
        given = [*arguments, *options.values()]
        if not _tensors_in(given) or (short == "sym_size" and arguments[1:] == [0]):
            return self._batch_value(node, target, name, arguments, options).simplified()
        result = self._recognized(node)
        result = self._convert(node, target, short, arguments, options) if result is None else result
        if result is None:
            moved = any(x.axes is not None for x in _tensors_in(given))
            arguments = [self._plain(x) for x in arguments]
            options = {key: self._plain(x) for key, x in options.items()}
            result = self._convert(node, target, short, arguments, options) if moved else None
        if result is not None:
            return self._named_by_weights(node, result)
        batch_first = all(self._batch_first(x) for x in node.all_input_nodes)
        return self._torch_operator(node, name, arguments, options, batch_first and short in CHANNELWISE)

    def _constant(
        self, node: fx.Node, target: Any, short: str, arguments: list[Any], options: dict[str, Any]
    ) -> Tensor | None:
        """A tensor of one size and value for any input, such as ``x.new_zeros(3, 3)``; None if it is not constant."""
        value = node.meta.get("val")
        one = self.builder.batch == 1
        known = short in _FILLED or (one and short in _LIKE)
        if not known or not isinstance(value, Tensor) or not isinstance(arguments[0], ProgramTensor):
            return None
        fixed = all(isinstance(size, int) for size in value.shape) and (one or not (self.batch or "").isdigit())
        if not fixed or _depends_on_input([*arguments[1:], *options.values()]):
            return None
        like: Tensor = self.builder.values[arguments[0].name]
        if short in _LIKE:
            like = like.new_empty(value.shape)
        made: Tensor = target(like, *arguments[1:], **options)
        return made

    def _recognized(self, node: fx.Node) -> Any:
        """The result of a function that the model spells out in several operators, if this is the last of them."""
        found = recognize(node)
        if found is None:
            return None
        operator, arguments = found
        named = {name: self._resolve(x) for name, x in arguments.items()}
        if isinstance(named.get("window_mask"), (ProgramTensor, BatchConstant, BatchValue)):
            return None
        return VIEW_CONVERTERS[operator](self.builder, operator, named)

    def _convert(self, node: fx.Node, target: Any, short: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """Express an operator by operations of the program; None if that is not possible."""
        if not isinstance(target, torch._ops.OpOverload):
            return None
        named = dict(zip((a.name for a in target._schema.arguments), arguments, strict=False)) | options
        if "out" not in named:
            named["out"] = self._shape(node)
        named["sizes"] = _example_sizes(node)
        named["used"] = {user.args[1] for user in node.users if user.target is operator.getitem}
        given = _tensors_in([*arguments, *options.values()])
        plain = all(x.axes is None for x in given) and all(self._batch_first(x) for x in node.all_input_nodes)
        result = CONVERTERS[short](self.builder, short, named) if plain and short in CONVERTERS else None
        if result is None and short in VIEW_CONVERTERS:
            result = VIEW_CONVERTERS[short](self.builder, short, named)
        if result is not None:
            return result
        if short in _ELEMENTWISE and len(given) == 1 and given[0].axes is not None:
            stored = [ProgramTensor(x.name) if isinstance(x, ProgramTensor) else x for x in arguments]
            if not any(isinstance(x, (Tensor, BatchConstant)) for x in [*stored, *options.values()]):
                made = self._torch_operator(node, _operator_name(target), stored, options, channelwise=True)
                return ProgramTensor(made.name, given[0].axes)
        return None

    def _batch_value(
        self, node: fx.Node, target: Any, name: str, arguments: list[Any], options: dict[str, Any]
    ) -> BatchValue:
        """The result of an operator that depends on the batch size only."""

        def at(x: Any, batch: int) -> Any:
            if isinstance(x, (tuple, list)):
                return [at(item, batch) for item in x]
            if isinstance(x, BatchConstant):
                return x.value.expand(batch, *x.value.shape[1:])
            return x.call(batch) if isinstance(x, BatchValue) else x

        def call(batch: int) -> Any:
            if name == "aten::sym_size.int" and isinstance(arguments[0], ProgramTensor):
                return batch
            return target(*(at(x, batch) for x in arguments), **{key: at(x, batch) for key, x in options.items()})

        def emit() -> Any:
            plain = {key: self._plain(x) for key, x in options.items()}
            return self._torch_operator(node, name, [self._plain(x) for x in arguments], plain, channelwise=False)

        return BatchValue(call, emit)

    def _plain(self, x: Any) -> Any:
        """Tensors as the model sees them, and constants for every example, inside of an argument."""
        if isinstance(x, (tuple, list)):
            return tuple(self._plain(item) for item in x)
        if isinstance(x, BatchValue):
            return x.emit()
        if isinstance(x, BatchConstant):
            size = self.builder.add(
                TorchOperator, self.inputs[:1], "batch", target="aten::sym_size.int", arguments=(InputRef(0), 0)
            )
            sizes = (InputRef(0), *x.value.shape[1:])
            fields = {"target": "aten::expand", "arguments": (WeightRef(0), sizes), "held": (x.value,)}
            return ProgramTensor(self.builder.add(TorchOperator, (size,), "constant", **fields))
        if not isinstance(x, ProgramTensor) or x.axes is None:
            return x
        name = arrange(self.builder, x.name, x.axes, f"{x.name}.arranged")
        if not x.axes.batch_first:
            self.builder.loose.add(name)
        return ProgramTensor(name)

    def _batch_first(self, node: fx.Node) -> bool:
        """Whether a tensor that depends on the input has its batch in dimension 0, and other dimensions are fixed."""
        x = node.meta.get("val")
        if not isinstance(self.found[node], ProgramTensor) or not isinstance(x, Tensor):
            return True
        return x.dim() >= 2 and str(x.shape[0]) == self.batch and all(isinstance(size, int) for size in x.shape[1:])

    def _shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape of a result, with 0 for the batch dimension; None if dimension 0 is not the batch."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.dim() or str(value.shape[0]) != self.batch:
            return None
        rest = list(value.shape[1:])
        return (0, *rest) if all(isinstance(size, int) for size in rest) else None

    def _named_by_weights(self, node: fx.Node, result: Any) -> Any:
        """Name an operation with weights after the module that has them."""
        weights = [self.origin[x] for x in node.args if isinstance(x, fx.Node) and x in self.origin]
        if not weights or "." not in weights[0] or not isinstance(result, (ProgramTensor, tuple)):
            return result
        first = result[0] if isinstance(result, tuple) else result
        last = self.builder.operations[-1] if self.builder.operations else None
        if last is None or last.output != first.name:
            return result
        new = ProgramTensor(self.builder.rename(first.name, weights[0].rpartition(".")[0]), first.axes)
        return (new, *result[1:]) if isinstance(result, tuple) else new

    def _torch_operator(
        self, node: fx.Node, name: str, arguments: list[Any], options: dict[str, Any], channelwise: bool
    ) -> ProgramTensor:
        taken: list[str] = []
        held: list[Tensor] = []

        def reference(x: Any) -> Any:
            if isinstance(x, ProgramTensor):
                if x.name not in taken:
                    taken.append(x.name)
                return InputRef(taken.index(x.name))
            if isinstance(x, Tensor):
                held.append(x)
                return WeightRef(len(held) - 1)
            return tuple(reference(item) for item in x) if isinstance(x, (tuple, list)) else x

        references = tuple(reference(x) for x in arguments)
        named_references = tuple((key, reference(x)) for key, x in options.items())
        first, result = self.builder.values[taken[0]] if taken else None, node.meta.get("val")
        tensors = isinstance(first, Tensor) and isinstance(result, Tensor) and min(first.dim(), result.dim()) >= 2
        name = _REPLACEMENTS.get(name, name)
        settings: dict[str, Any] = {
            "target": name,
            "arguments": references,
            "options": named_references,
            "channelwise": channelwise and len(taken) == 1 and not held and tensors and (
                result.shape[1] == first.shape[1]  # type: ignore[union-attr]
            ),
        }  # fmt: skip
        made = self.builder.add(TorchOperator, taken, node.name, held=tuple(held), **settings)
        if isinstance(result, Tensor) and (not result.dim() or str(result.shape[0]) != self.batch):
            self.builder.loose.add(made)
        return ProgramTensor(made)

    def _hint(self, node: fx.Node, otherwise: str) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        return path.removeprefix("model").removeprefix(".") or otherwise


def _example_sizes(node: fx.Node) -> tuple[int, ...] | None:
    """The sizes of a result for the example."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    sizes = [n if isinstance(n, int) else n.node.hint for n in value.shape]
    return tuple(sizes) if all(isinstance(n, int) for n in sizes) else None


def _tensors_in(x: Any) -> list[ProgramTensor]:
    """The tensors of the program inside of arguments."""
    if isinstance(x, (list, tuple)):
        return [found for item in x for found in _tensors_in(item)]
    return [x] if isinstance(x, ProgramTensor) else []


def _depends_on_input(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_depends_on_input(item) for item in x)
    return isinstance(x, (ProgramTensor, BatchValue, BatchConstant))


def _operator_name(target: Any) -> str:
    """The name of an operator, such as ``aten::softmax.int``, or ``add`` for one of Python's."""
    if isinstance(target, torch._ops.OpOverload):
        return target.name() if target._overloadname != "default" else target.name().removesuffix(".default")
    name = getattr(target, "__name__", str(target))
    if name in PYTHON_OPERATORS:
        return name
    raise WiringError(
        f"the model's trace contains {target}, which compaction does not support. Write that part of forward() with "
        "tensor operations."
    )
