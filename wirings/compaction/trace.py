"""From a module to a program, by `torch.export`: a trace of PyTorch's operators, each turned into an operation.

Neural graphs inside the module stay whole in the trace, as one operator of ours, and are lowered by `graphs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from wirings.compaction import aten_maps  # noqa: F401 - puts its operators into the table
from wirings.compaction.allowed import PYTHON
from wirings.compaction.aten import CHANNELWISE, TABLE, Value
from wirings.compaction.builder import Builder
from wirings.compaction.exported import ADVICE, exported
from wirings.compaction.operations import Held, Opaque, Select, Taken
from wirings.errors import WiringError

Lower = Callable[[Builder, nn.Module, str, str], str]
"""Lowers a module that stays whole: the builder, the module, a hint and its input's name; gives its output's."""


def trace(module: nn.Module, builder: Builder, inputs: Sequence[str], leaves: dict[nn.Module, Lower]) -> list[str]:
    """Add what a module does to a program; the names of its outputs.

    Args:
        module: in evaluation; modules in ``leaves`` are replaced inside it, so give a copy.
        builder: of the program.
        inputs: the names of the module's inputs.
        leaves: modules within that stay whole, with the functions that lower them.
    """
    example = tuple(builder.values[name] for name in inputs)
    lowered = list(leaves.items())
    traced = exported(module, example, [leaf for leaf, _ in lowered])
    return _Tracer(builder, traced, inputs, lowered).run()


class _Tracer:
    """Goes through a trace once and adds its operators to a program."""

    def __init__(self, builder: Builder, exported: Any, inputs: Sequence[str], leaves: list[tuple[nn.Module, Lower]]):
        self.builder, self.exported, self.leaves = builder, exported, leaves
        self.given = list(inputs)
        self.batch: str | None = None  # the size of dimension 0, a symbol if it may be any
        self.found: dict[fx.Node, Any] = {}
        self.places: dict[str, tuple[str, Tensor]] = {}
        self.origin: dict[fx.Node, str] = {}

    def run(self) -> list[str]:
        signature = self.exported.graph_signature
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        held |= signature.inputs_to_lifted_tensor_constants
        waiting = iter(self.given)
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                target = held.get(node.name)
                if target is None:
                    self.found[node] = Value(next(waiting))
                    size = node.meta["val"].shape[0]
                    self.batch = self.batch or str(size)
                    if str(size).isdigit():  # a symbol that can only be one number is a number
                        self.builder.batch = int(size)
                else:
                    store = self.exported.state_dict if target in self.exported.state_dict else self.exported.constants
                    self.found[node], self.origin[node] = store[target].detach(), target.removeprefix("model.")
            elif node.op == "call_function":
                if node.users:  # else it is an assertion, or of no use
                    self.found[node] = self._call(node)
            elif node.op == "output":
                return self._outputs(node)
        raise AssertionError("a trace ends with its output")

    def _outputs(self, node: fx.Node) -> list[str]:
        # A trace also gives what the model changes in place, inputs and buffers; that is nobody's output.
        results: Any = node.args[0]
        kinds = [spec.kind for spec in self.exported.graph_signature.output_specs]
        given = [x for x, kind in zip(results, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
        self._check_memory(given)
        results = [self._known(x) for x in given]
        spec = str(self.exported.call_spec.out_spec)
        names = []
        for x in results:
            if isinstance(x, Tensor):
                raise WiringError(
                    "an output of the model is a constant: it does not depend on the input at all. Leave it out of "
                    "what forward returns."
                )
            if not isinstance(x, Value) or "dict" in spec:
                raise WiringError(
                    "compaction takes models that return a tensor or a tuple of tensors, but this one returns "
                    f"{spec}. Wrap it in a module that returns the tensors."
                )
            names.append(x.name)
        return names

    def _check_memory(self, outputs: list[Any]) -> None:
        """Raise if outputs depend on a buffer that the model changes, and so on what came before."""
        signature = self.exported.graph_signature
        changed = set(signature.buffers_to_mutate.values())
        waiting, seen = [x for x in outputs if isinstance(x, fx.Node)], set()
        while waiting:
            node = waiting.pop()
            if (name := signature.inputs_to_buffers.get(node.name)) in changed:
                raise WiringError(
                    f"the model changes its buffer {name.removeprefix('model.')} in evaluation and computes with it, "
                    "so that outputs depend on what came before. Leave it as it is in eval()."
                )
            waiting += [x for x in node.all_input_nodes if x not in seen]
            seen.update(node.all_input_nodes)

    def _known(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self.found[x]
        if isinstance(x, (list, tuple)):
            return tuple(self._known(item) for item in x)
        return x

    def _call(self, node: fx.Node) -> Any:
        arguments = [self._known(x) for x in node.args]
        options = {name: self._known(x) for name, x in node.kwargs.items()}
        target: Any = node.target
        name = _operator_name(target)
        if _random(target, arguments, options):
            raise WiringError(
                f"the model draws random numbers in evaluation ({name}), so it has no outputs to keep; make it "
                "deterministic in eval()."
            )
        _check_sizes(node, name)
        if not _depends([*arguments, *options.values()]):  # on no input: computed now, once and for all
            return target(*arguments, **options)
        if name == "getitem" and isinstance(arguments[0], tuple):
            return arguments[0][arguments[1]]
        if name == "wirings::whole":
            leaf, lower = self.leaves[arguments[1]]
            return Value(lower(self.builder, leaf, self._hint(node, "graph"), arguments[0].name))
        short = name.removeprefix("aten::").partition(".")[0]
        first = all(self._batch_first(x) for x in node.all_input_nodes)
        if short in TABLE and first and isinstance(target, torch._ops.OpOverload):  # Python's act on sizes
            named = dict(zip((a.name for a in target._schema.arguments), arguments, strict=False)) | options
            if "out" not in named:
                named["out"] = self._shape(node)
            done = TABLE[short](self.builder, short, named)
            if done is not None:
                return self._renamed(node, done)
        return self._opaque(node, name, arguments, options, first and short in CHANNELWISE)

    def _batch_first(self, node: fx.Node) -> bool:
        """Whether a tensor that depends on the input has its images in dimension 0, and a fixed number of channels."""
        x = node.meta.get("val")
        if not isinstance(self.found[node], Value) or not isinstance(x, Tensor):
            return True
        return x.dim() >= 2 and str(x.shape[0]) == self.batch and all(isinstance(size, int) for size in x.shape[1:])

    def _shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape that an operator gives, if its first dimension, which is left open, is still the batch."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.dim() or str(value.shape[0]) != self.batch:
            return None
        rest = list(value.shape[1:])
        return (0, *rest) if all(isinstance(size, int) for size in rest) else None

    def _renamed(self, node: fx.Node, done: Any) -> Any:
        """Operations with weights are called after them, as the module is."""
        weights = [self.origin[x] for x in node.args if isinstance(x, fx.Node) and x in self.origin]
        if not weights or "." not in weights[0] or not isinstance(done, (Value, tuple)):
            return done
        first = done[0] if isinstance(done, tuple) else done
        made = self.builder.operations[-1] if self.builder.operations else None
        if made is None or made.output != first.name:
            return done
        new = Value(self.builder.rename(first.name, weights[0].rpartition(".")[0]))
        return (new, *done[1:]) if isinstance(done, tuple) else new

    def _opaque(self, node: fx.Node, name: str, arguments: list[Any], options: dict[str, Any], alone: bool) -> Value:
        taken: list[str] = []
        held: list[Tensor] = []

        def packed(x: Any) -> Any:
            if isinstance(x, Value):
                if x.name not in taken:
                    taken.append(x.name)
                return Taken(taken.index(x.name))
            if isinstance(x, Tensor):
                held.append(x)
                return Held(len(held) - 1)
            return tuple(packed(item) for item in x) if isinstance(x, (tuple, list)) else x

        packed_arguments = tuple(packed(x) for x in arguments)
        packed_options = tuple((key, packed(x)) for key, x in options.items())
        first = self.builder.values[taken[0]]
        result = node.meta.get("val")
        alone = alone and len(taken) == 1 and not held and isinstance(first, Tensor) and first.dim() >= 2
        alone = alone and isinstance(result, Tensor) and result.dim() >= 2 and result.shape[1] == first.shape[1]
        name = _INSTEAD.get(name, name)
        settings: dict[str, Any] = {
            "target": name,
            "arguments": packed_arguments,
            "options": packed_options,
            "channelwise": alone,
        }
        made = self.builder.add(Opaque, taken, node.name, held=tuple(held), **settings)
        return self._shuffled(node, made, taken[0]) if name in _MOVES else Value(made)

    def _shuffled(self, node: fx.Node, made: str, source: str) -> Value:
        """What only moves numbers about, if it comes to channels in another order: these channels.

        Beside the tensor, one is moved that has the number of its place in the image at every place.
        """
        values = self.builder.values
        if source not in self.places:
            self.places[source] = source, _numbered(values[source].shape)
        root, numbers = self.places[source]
        operation = self.builder.operations[-1]
        moved = operation.run(numbers, *(values[x] for x in operation.inputs[1:]))
        self.places[made] = root, moved
        now = self._shape(node)
        if now is None or moved.shape != values[root].shape or not moved.numel():
            return Value(made)
        index = moved[0].reshape(moved.shape[1], -1)[:, 0] // moved[0, 0].numel()
        if int(index.max()) >= moved.shape[1] or not torch.equal(_numbered(moved.shape)[:, index], moved):
            return Value(made)
        return Value(self.builder.add(Select, (root,), node.name, index=index))

    def _hint(self, node: fx.Node, otherwise: str) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        return path.removeprefix("model").removeprefix(".") or otherwise


_INSTEAD = {
    "aten::view": "aten::reshape",  # copies that made the memory fit are left out
    "aten::_unsafe_view": "aten::reshape",
    "aten::empty_like": "aten::zeros_like",  # what was never written is nobody's to read
    "aten::new_empty": "aten::new_zeros",
}
_MOVES = ("aten::reshape", "aten::transpose.int", "aten::permute")


def _numbered(shape: torch.Size) -> Tensor:
    """At every place its number, the images one after the other."""
    return torch.arange(shape.numel()).view(shape)


def _random(target: Any, arguments: list[Any], options: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention does only if it drops something out."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | options
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _check_sizes(node: fx.Node, name: str) -> None:
    """Raise if an operator gives a tensor whose size depends on the values of others."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    if not any(isinstance(x, Tensor) and free_unbacked_symbols(x) for x in values):
        return
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    where = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    raise WiringError(f"the operator {name}{where} gives a tensor whose size depends on values. {ADVICE}")


def _depends(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_depends(item) for item in x)
    return isinstance(x, Value)


def _operator_name(target: Any) -> str:
    """``aten::softmax.int``, or the name of an operator of Python's."""
    if isinstance(target, torch._ops.OpOverload):
        return target.name() if target._overloadname != "default" else target.name().removesuffix(".default")
    name = getattr(target, "__name__", str(target))
    if name in PYTHON:
        return name
    raise WiringError(
        f"the model's trace holds {target}, which compaction cannot run. Write that part of forward() with tensors."
    )
