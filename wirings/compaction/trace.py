"""Convert a module to operations: trace it with `torch.export`, and convert PyTorch's operators one by one.

Neural graphs inside the module are not traced; `wirings.compaction.lower_graphs` converts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import OutputKind

from wirings.compaction.allowed_operators import PYTHON_OPERATORS
from wirings.compaction.aten import CHANNELWISE, CONVERTERS, ProgramTensor
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operations import InputRef, SelectChannels, TorchOperator, WeightRef
from wirings.compaction.torch_export import ADVICE, OPERATOR, export_module
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
_PERMUTATIONS = ("aten::reshape", "aten::transpose.int", "aten::permute")
"""Operators that only move numbers, so that a sequence of them may be a permutation of channels."""


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
        self.moved: dict[str, tuple[str, Tensor]] = {}  # see _as_permutation
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
        results = [self._resolve(x) for x in given]
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
        if _is_random(target, arguments, options):
            raise WiringError(
                f"the model draws random numbers in evaluation ({name}), so its outputs cannot be compared. Make it "
                "deterministic in eval()."
            )
        _check_sizes(node, name)
        if not _depends_on_input([*arguments, *options.values()]):  # computed once, now
            return target(*arguments, **options)
        if name == "getitem" and isinstance(arguments[0], tuple):
            return arguments[0][arguments[1]]
        if name == OPERATOR:
            leaf, lower = self.leaves[arguments[1]]
            return ProgramTensor(lower(self.builder, leaf, self._hint(node, "graph"), arguments[0].name))
        short = name.removeprefix("aten::").partition(".")[0]
        batch_first = all(self._batch_first(x) for x in node.all_input_nodes)
        if short in CONVERTERS and batch_first and isinstance(target, torch._ops.OpOverload):
            named = dict(zip((a.name for a in target._schema.arguments), arguments, strict=False)) | options
            if "out" not in named:
                named["out"] = self._shape(node)
            result = CONVERTERS[short](self.builder, short, named)
            if result is not None:
                return self._named_by_weights(node, result)
        return self._torch_operator(node, name, arguments, options, batch_first and short in CHANNELWISE)

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
        new = ProgramTensor(self.builder.rename(first.name, weights[0].rpartition(".")[0]))
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
        first, result = self.builder.values[taken[0]], node.meta.get("val")
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
        return self._as_permutation(node, made, taken[0]) if name in _PERMUTATIONS else ProgramTensor(made)

    def _as_permutation(self, node: fx.Node, made: str, source: str) -> ProgramTensor:
        """Replace operators that only move numbers by a selection of channels, if they amount to one.

        To find out, a tensor that contains the number of each of its entries is moved along with the tensor.
        """
        values = self.builder.values
        if source not in self.moved:
            self.moved[source] = source, _entry_numbers(values[source].shape)
        root, numbers = self.moved[source]
        operation = self.builder.operations[-1]
        moved = operation.run(numbers, *(values[x] for x in operation.inputs[1:]))
        self.moved[made] = root, moved
        if self._shape(node) is None or moved.shape != values[root].shape or not moved.numel():
            return ProgramTensor(made)
        index = moved[0].reshape(moved.shape[1], -1)[:, 0] // moved[0, 0].numel()
        if int(index.max()) >= moved.shape[1] or not torch.equal(_entry_numbers(moved.shape)[:, index], moved):
            return ProgramTensor(made)
        return ProgramTensor(self.builder.add(SelectChannels, (root,), node.name, index=index))

    def _hint(self, node: fx.Node, otherwise: str) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        return path.removeprefix("model").removeprefix(".") or otherwise


def _entry_numbers(shape: torch.Size) -> Tensor:
    return torch.arange(shape.numel()).view(shape)


def _is_random(target: Any, arguments: list[Any], options: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention only does with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | options
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _check_sizes(node: fx.Node, name: str) -> None:
    """Raise if the size of an operator's result depends on the values of tensors."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports SymPy, which takes 0.3 s

    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    if not any(isinstance(x, Tensor) and free_unbacked_symbols(x) for x in values):
        return
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    where = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    raise WiringError(f"the operator {name}{where} returns a tensor whose size depends on values. {ADVICE}")


def _depends_on_input(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_depends_on_input(item) for item in x)
    return isinstance(x, ProgramTensor)


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
