"""The checkpoints that the authors of "Discovering Neural Wirings" published, as models of this library.

Their networks rank every entry of a rectangular weight, also entries that no forward pass reads: edges from a block to
itself or to an earlier one. The k strongest of all entries are kept; those that lie where nothing reads do nothing. A
model that is loaded here has exactly the edges that their forward pass used, as a plain, finalized model.

One format, large and small, stands in one file, which is why it is long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError, unknown
from wirings.graph import ContinuousGraph, DiscreteGraph, Graph, StaticGraph
from wirings.graph.nodes import ConvNode
from wirings.models.mobilenet import STAGES, MobileNetV1DNW, Stage, edges_of_width
from wirings.models.tiny import BLOCK, EDGES, INPUTS, NODES, OUTPUTS, TinyClassifier
from wirings.selection.functional import choose

_SOLVED = "odesolve.odefunc."
_STEPS = 5


@dataclass(frozen=True)
class Kept:
    """The edges of one weight."""

    layer: str
    ranked: int
    """Entries of the weight."""
    kept: int
    """Entries that are not masked or ranked out."""
    used: int
    """Those of them that the forward pass reads."""


@dataclass
class Published:
    """A published network: ``model``, in evaluation, and which of its edges are used. Print it for a table."""

    model: nn.Module
    layers: list[Kept] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{'':12}{'entries':>12}{'kept':>10}{'used':>10}"]
        lines += [f"{x.layer:12}{x.ranked:>12,}{x.kept:>10,}{x.used:>10,}" for x in self.layers]
        return "\n".join(lines)


def load(
    source: str | Path | Mapping[str, Any],
    *,
    width: float | None = None,
    edges: int | None = None,
    kind: str | None = None,
    image_size: int | None = None,
) -> Published:
    """A published checkpoint as a model.

    Args:
        source: the file, or its state dict; a prefix ``module.``, or a ``{"state_dict": …}`` around it, does no harm.
        width: of a MobileNetV1-DNW, the width multiplier d that the number of edges follows from, such as 0.225. Random
            graphs have a mask and need none, unless their classifier was made small.
        edges: of a tiny classifier, how many are kept; 32,000 by default, as in the paper.
        kind: of a tiny classifier, ``"static"``, ``"discrete"`` or ``"continuous"``, if its names do not tell.
        image_size: of a MobileNetV1-DNW, whose first convolution has no stride up to 64 pixels; by default 32 for ten
            classes, else 224.
    """
    state = _State(_read(source))
    if "conv1.weight" in state.left and any(name.startswith("layers.") for name in state.left):
        published = _large(state, width, image_size)
    elif f"{_SOLVED}graph.weight" in state.left or "graph.weight" in state.left:
        published = _small(state, EDGES if edges is None else edges, kind)
    else:
        some = ", ".join(list(state.left)[:6])
        raise WiringError(
            "this is no checkpoint of the authors' small networks (expected graph.weight and fc.weight, among others) "
            f"nor of their large ones (conv1.weight and layers.0.graph.weight, …): it has {some}, …"
        )
    state.finish()
    published.model.eval()
    return published


def _read(source: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    if isinstance(source, (str, Path)):
        if not Path(source).is_file():
            raise WiringError(f"there is no file {source}; expected a checkpoint of the authors'.")
        try:
            found: Any = torch.load(source, map_location="cpu", weights_only=True)
        except Exception as error:  # PyTorch has one of its own for every byte that it stumbles over
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise WiringError(
                f"{source} is damaged, no checkpoint, or cannot be read without running what is inside it: {why} In "
                "the last case, if you trust it, load it yourself (torch.load(…, weights_only=False)) and give its "
                "state dict."
            ) from error
    else:
        found = source
    while isinstance(found, Mapping):
        inner = next(
            (found[name] for name in ("state_dict", "model", "net") if isinstance(found.get(name), Mapping)), None
        )
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not any(isinstance(x, Tensor) for x in found.values()):
        raise WiringError(f"a state dict, names and tensors, was expected, but {type(found).__name__} came.")
    plain = {str(name).removeprefix("module."): x.detach().cpu() for name, x in found.items() if isinstance(x, Tensor)}
    return {name: x for name, x in plain.items() if not name.endswith("num_batches_tracked")}


class _State:
    """The tensors of a checkpoint, taken one by one; what is left at the end belongs to another architecture."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.left = tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.left:
            raise WiringError(
                f"the checkpoint has no {name}, of shape {shape}; it is of another architecture than the authors' "
                "published ones."
            )
        found = self.left.pop(name)
        if tuple(found.shape) != shape:
            raise WiringError(
                f"{name} of the checkpoint has shape {tuple(found.shape)}, but {shape} was expected; it is of another "
                "architecture than the authors' published ones."
            )
        return found.float()

    def maybe(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self.take(name, shape) if name in self.left else None

    def finish(self) -> None:
        if self.left:
            raise WiringError(
                f"the checkpoint also has {', '.join(list(self.left)[:4])}, which the authors' published networks do "
                "not have; it is of another architecture."
            )


def _top(name: str, weight: Tensor, mask: Tensor | None, k: int | None) -> Tensor:
    """Which entries of a weight are kept: a mask's, or the k strongest of all."""
    if mask is not None:
        return mask != 0
    if k is None:
        raise WiringError(f"{name} is ranked, so width= is needed: the network's width multiplier, such as 0.225.")
    if not 1 <= k <= weight.numel():
        raise WiringError(f"{k:,} edges were asked for, but {name} has {weight.numel():,} entries.")
    return choose(weight, k)


@torch.no_grad()
def _copy(pairs: list[tuple[Any, Tensor]]) -> None:
    for parameter, value in pairs:
        parameter.copy_(value.view(parameter.shape))


# ---- MobileNetV1-DNW ------------------------------------------------------------------------------------------------


def _large(state: _State, width: float | None, image_size: int | None) -> Published:
    if width is not None and not 0 < width <= 1:
        raise WiringError(f"width is a multiplier in (0, 1], but it is {width}.")
    head = next((name for name in ("linear.weight", "linear.graph.weight") if name in state.left), None)
    if head is None:
        raise WiringError("the checkpoint has neither linear.weight nor linear.graph.weight; it is of another network.")
    classes = len(state.left[head])
    model = MobileNetV1DNW(classes, image_size or (32 if classes == 10 else 224))
    published = Published(model)
    _copy([(model.stem.weight, state.take("conv1.weight", (STAGES[0].before, 3, 3, 3)))])
    for number, (stage, graph) in enumerate(zip(STAGES, model.stages, strict=True)):
        assert isinstance(graph, StaticGraph)
        published.layers.append(_stage(state, f"layers.{number}.", stage, graph, width))
    last = STAGES[-1].channels
    _copy(_batch_norm(state, "bn.", last, model.norm))
    shape = state.left[head].shape
    weight = state.take(head, (classes, last, *[1] * (len(shape) - 2)))
    if head == "linear.graph.weight":
        mask = state.maybe("linear.graph.mask", tuple(shape))
        k = None if width is None else math.floor(width * weight.numel() + 1e-6)
        real = _top(head, weight, mask, k)
        published.layers.append(Kept("linear", weight.numel(), int(real.sum()), int(real.sum())))
        weight = weight * real
    bias = next(
        (b for name in ("linear.bias", "linear.graph.bias") if (b := state.maybe(name, (classes,))) is not None), None
    )
    _copy([(model.head.weight, weight), (model.head.bias, torch.zeros(classes) if bias is None else bias)])
    return published


def _stage(state: _State, prefix: str, stage: Stage, graph: StaticGraph, width: float | None) -> Kept:
    """One graph: its kernels and norms block by block, and of its weight what each block reads."""
    rows, columns = stage.channels * stage.blocks, stage.before + stage.channels * (stage.blocks - 1)
    weight = state.take(f"{prefix}graph.weight", (rows, columns, 1, 1)).view(rows, columns)
    mask = state.maybe(f"{prefix}graph.mask", (rows, columns, 1, 1))
    k = None if width is None else edges_of_width(stage, width)
    real = _top(f"{prefix}graph.weight", weight, None if mask is None else mask.view(rows, columns), k)
    # Block b of those that receive reads the nodes before it: the inputs and the b blocks before.
    read = torch.arange(columns) < (stage.before + torch.arange(rows) // stage.channels * stage.channels)[:, None]
    matrix = torch.zeros(graph.nodes, graph.nodes)
    matrix[stage.before :, :columns] = weight * (real & read)
    graph.set_matrix_(matrix)
    kernels = _kernels(state, prefix, stage.before, columns)
    sizes = [stage.before, *[stage.channels] * (stage.blocks - 1)]
    for number, (size, kernel) in enumerate(zip(sizes, kernels.split(sizes), strict=True)):
        function: Any = graph.functions[number]
        _copy([(function.kernel, kernel), *_batch_norm(state, f"{prefix}norm.{number}.", size, function)])
    return Kept(prefix.rstrip("."), weight.numel(), int(real.sum()), int((real & read).sum()))


def _kernels(state: _State, prefix: str, inputs: int, nodes: int) -> Tensor:
    """The convolutions of all nodes that have one: those of the inputs, which may have a stride, stand apart."""
    first = state.maybe(f"{prefix}downsample.0.weight", (inputs, 1, 3, 3))
    left = nodes if first is None else nodes - inputs
    if left == 0 and f"{prefix}conv.weight" not in state.left:
        assert first is not None
        return first
    rest = state.take(f"{prefix}conv.weight", (left, 1, 3, 3))
    return rest if first is None else torch.cat([first, rest])


def _batch_norm(state: _State, prefix: str, size: int, norm: Any) -> list[tuple[Any, Tensor]]:
    """What goes where, for a norm of ours, of PyTorch's or of a node function."""
    scale, shift = (getattr(norm, f"norm_{x}", None) for x in ("weight", "bias"))
    scale, shift = (norm.weight, norm.bias) if scale is None else (scale, shift)
    names = {"weight": scale, "bias": shift, "running_mean": norm.running_mean, "running_var": norm.running_var}
    return [(place, state.take(prefix + name, (size,))) for name, place in names.items()]


# ---- the tiny classifiers -------------------------------------------------------------------------------------------


def _small(state: _State, edges: int, kind: str | None) -> Published:
    prefix = _SOLVED if f"{_SOLVED}graph.weight" in state.left else ""
    told = "continuous" if prefix else "static" if f"{prefix}norm.0.weight" in state.left else "discrete"
    kind = told if kind is None else kind
    if kind not in ("static", "discrete", "continuous"):
        raise unknown("kind", kind, ("static", "discrete", "continuous"))
    weight = state.take(f"{prefix}graph.weight", (NODES, NODES, 1, 1)).view(NODES, NODES)
    mask = state.maybe(f"{prefix}graph.mask", (NODES, NODES, 1, 1))
    real = _top(f"{prefix}graph.weight", weight, None if mask is None else mask.view(NODES, NODES), edges)
    kernels = state.take(f"{prefix}conv.weight", (NODES, 1, 3, 3))
    norms = _instance_norms(state, prefix)
    graph, read = (
        _static(weight * real, kernels, norms) if kind == "static" else _dynamic(kind, weight * real, kernels, norms)
    )
    classes = len(state.left["fc.weight"]) if "fc.weight" in state.left else 10
    model = TinyClassifier(graph, classes)
    _stem(state, model.stem)
    head = [state.take("fc.weight", (classes, OUTPUTS)), state.take("fc.bias", (classes,))]
    _copy(list(zip([model.head.weight, model.head.bias], head, strict=True)))
    return Published(model, [Kept("graph", weight.numel(), int(real.sum()), int((real & read).sum()))])


def _instance_norms(state: _State, prefix: str) -> list[Tensor]:
    """Scale and shift of all nodes, from one norm or from one a block."""
    if f"{prefix}norm.weight" in state.left:
        return [state.take(f"{prefix}norm.{name}", (NODES,)) for name in ("weight", "bias")]
    sizes = [INPUTS, *[BLOCK] * 4]
    parts = [
        [state.take(f"{prefix}norm.{j}.{name}", (size,)) for j, size in enumerate(sizes)] for name in ("weight", "bias")
    ]
    return [torch.cat(part) for part in parts]


def _static(matrix: Tensor, kernels: Tensor, norms: list[Tensor]) -> tuple[Graph, Tensor]:
    """Their static graph: four blocks after the input, and the last nodes read once more, from all blocks.

    Ours has those that are read as nodes of their own, so that an edge to one of them from an earlier block, which
    their forward pass used twice, is two edges here.
    """
    graph = StaticGraph([INPUTS, BLOCK, BLOCK, BLOCK, BLOCK, OUTPUTS], node=ConvNode())
    block = (torch.arange(NODES) - INPUTS).div(BLOCK, rounding_mode="floor")  # −1 for the inputs
    first = INPUTS + block * BLOCK  # of a node's block
    read = (torch.arange(NODES) < first[:, None]) & (block >= 0)[:, None]
    whole = torch.zeros(graph.nodes, graph.nodes)
    whole[:NODES, :NODES] = matrix * read
    whole[NODES:, :NODES] = matrix[-OUTPUTS:]
    graph.set_matrix_(whole)
    sizes = [INPUTS, *[BLOCK] * 4]
    for number, part in enumerate(zip(*(x.split(sizes) for x in (kernels, *norms)), strict=True)):
        function: Any = graph.functions[number]
        _copy(list(zip([function.kernel, function.norm_weight, function.norm_bias], part, strict=True)))
    read[-OUTPUTS:] = True
    return graph, read


def _dynamic(kind: str, matrix: Tensor, kernels: Tensor, norms: list[Tensor]) -> tuple[Graph, Tensor]:
    """All edges are read: any node may feed any other."""
    node = ConvNode(before=["activation", "conv"], after=["norm"])
    settings: dict[str, Any] = {"inputs": INPUTS, "outputs": OUTPUTS, "node": node}
    graph: Graph = (
        DiscreteGraph(NODES, steps=_STEPS, **settings) if kind == "discrete" else ContinuousGraph(NODES, **settings)
    )
    graph.set_matrix_(matrix)
    function: Any = graph.function
    _copy(list(zip([function.kernel, function.norm_weight, function.norm_bias], [kernels, *norms], strict=True)))
    return graph, torch.ones_like(matrix, dtype=torch.bool)


def _stem(state: _State, stem: nn.Sequential) -> None:
    """The layers that have weights, in their order, whatever their numbers."""
    numbers = sorted({int(name.split(".")[1]) for name in state.left if name.startswith("downsample.")})
    ours = [layer for layer in stem if list(layer.parameters())]
    if len(numbers) != len(ours):
        raise WiringError(
            f"the checkpoint's stem (downsample.N) has {len(numbers)} layers with weights, but {len(ours)} were "
            "expected; it is of another architecture."
        )
    for number, layer in zip(numbers, ours, strict=True):
        for name, place in layer.state_dict().items():
            if name != "num_batches_tracked":
                _copy([(place, state.take(f"downsample.{number}.{name}", tuple(place.shape)))])
