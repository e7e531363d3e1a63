"""The checkpoints that the authors of "Discovering Neural Wirings" published, as models of this library.

Their networks rank all entries of a rectangular weight, including entries that no forward pass reads: edges from a
block to itself or to an earlier one. The k largest are kept, and those that are never read have no effect. A model
loaded here is plain (finalized) and has exactly the edges that their forward pass used.

This file is long because the large and the small networks share one format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wirings.errors import WiringError, unknown
from wirings.graph import ContinuousGraph, DiscreteGraph, Graph, StaticGraph
from wirings.graph.nodes import ConvNode
from wirings.models.in_place_relu import InPlaceReluGraph
from wirings.models.mobilenet import STAGES, MobileNetV1DNW, Stage, edges_of_width
from wirings.models.tiny import BLOCK, EDGES, INPUTS, NODES, OUTPUTS, TinyClassifier
from wirings.selection.functional import choose
from wirings.utils.tables import text_table
from wirings.utils.torch_files import load_torch_file

_SOLVED = "odesolve.odefunc."
_STEPS = 5
MAX_DEPTH = 8
"""How many dictionaries may surround a state dict."""


@dataclass(frozen=True)
class EdgeNumbers:
    """Numbers of edges of one weight."""

    layer: str
    """Name of the layer."""
    ranked: int
    """Number of entries of the weight."""
    kept: int
    """Number of entries that the mask or the ranking keeps."""
    used: int
    """Number of kept entries that the forward pass reads."""


@dataclass
class PublishedModel:
    """A published network and the edges it uses. Print it to see a table."""

    model: nn.Module
    """The network, in evaluation mode."""
    layers: list[EdgeNumbers] = field(default_factory=list)
    """Numbers of edges, layer by layer."""

    def __str__(self) -> str:
        rows = [(x.layer, x.ranked, x.kept, x.used) for x in self.layers]
        return "\n".join(text_table(("", "entries", "kept", "used"), rows, align="lrrr", rule=False))


def load(
    source: str | Path | Mapping[str, Any],
    *,
    width: float | None = None,
    edges: int | None = None,
    kind: str | None = None,
    image_size: int | None = None,
    in_place_relu: bool = True,
) -> PublishedModel:
    """Load a published checkpoint as a model of this library.

    Args:
        source: The file or its state dict. A prefix ``module.`` and a surrounding ``{"state_dict": …}`` are removed.
        width: Width multiplier of a MobileNetV1-DNW, such as 0.225, which determines the number of edges. Random graphs
            have a mask instead, and need it only if their classifier is small.
        edges: Number of edges that a tiny classifier keeps; 32,000 by default, as in the paper.
        kind: Kind of a tiny classifier, ``"static"``, ``"discrete"`` or ``"continuous"``, if the names of its tensors
            do not reveal it.
        image_size: Height and width in pixels of a MobileNetV1-DNW's images. Up to 64, its first convolution has no
            stride. By default 32 for ten classes, otherwise 224.
        in_place_relu: Whether a continuous classifier computes what the authors' code does. Their ReLU is applied in
            place to the solver's state, so negative states are set to zero after every step, and their weights were
            trained that way. With False it solves the paper's equation, whose outputs for the same weights are very
            different. Ignored by other networks.
    """
    if not isinstance(source, (str, Path)):
        return _load(_read(source), width, edges, kind, image_size, in_place_relu)
    try:
        return _load(_read(source), width, edges, kind, image_size, in_place_relu)
    except WiringError as error:
        if str(source) in str(error):
            raise
        raise WiringError(f"{source}: {error}") from error


def _load(
    tensors: dict[str, Tensor],
    width: float | None,
    edges: int | None,
    kind: str | None,
    image_size: int | None,
    in_place_relu: bool,
) -> PublishedModel:
    state = _State(tensors)
    if "conv1.weight" in state.left and any(name.startswith("layers.") for name in state.left):
        published = _large(state, width, image_size)
    elif f"{_SOLVED}graph.weight" in state.left or "graph.weight" in state.left:
        published = _small(state, EDGES if edges is None else edges, kind, in_place_relu)
    else:
        some = ", ".join(list(state.left)[:6])
        raise WiringError(
            "not a checkpoint of the authors' networks: expected graph.weight and fc.weight (small networks), or "
            f"conv1.weight and layers.0.graph.weight (large ones), among others, got {some}, …"
        )
    state.finish()
    published.model.eval()
    return published


def _read(source: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    if isinstance(source, (str, Path)):
        if not Path(source).is_file():
            raise WiringError(f"there is no file {source}.")
        try:
            found: Any = load_torch_file(Path(source))
        except Exception as error:  # PyTorch raises exceptions of many types for damaged files
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise WiringError(
                f"{source} is damaged, not a checkpoint, or cannot be read without running code in it: {why} In the "
                "last case, if you trust it, load it with torch.load(…, weights_only=False) and pass its state dict."
            ) from error
    else:
        found = source
    where = f"{source}: " if isinstance(source, (str, Path)) else ""
    for _ in range(MAX_DEPTH):  # a dictionary may contain itself
        if not isinstance(found, Mapping):
            break
        inner = next(
            (found[name] for name in ("state_dict", "model", "net") if isinstance(found.get(name), Mapping)), None
        )
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not any(isinstance(x, Tensor) for x in found.values()):
        raise WiringError(f"{where}expected a state dict of names and tensors, got {type(found).__name__} without any.")
    for name, x in found.items():
        # A file can describe a tensor of any size as a view of a few bytes, or as a sparse one.
        if isinstance(x, Tensor) and (
            x.is_meta or x.is_nested or x.layout != torch.strided or x.nbytes > x.untyped_storage().nbytes()
        ):
            raise WiringError(
                f"{where}expected a state dict of dense tensors, got {str(name)[:60]}, which is not stored in full."
            )
    plain = {str(name).removeprefix("module."): x.detach().cpu() for name, x in found.items() if isinstance(x, Tensor)}
    return {name: x for name, x in plain.items() if not name.endswith("num_batches_tracked")}


class _State:
    """The tensors of a checkpoint, taken one by one. If any is left at the end, the architecture is another one."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.left = tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.left:
            raise WiringError(
                f"the checkpoint has no {name}, expected of shape {shape}. Its architecture is not one of the authors'."
            )
        found = self.left.pop(name)
        if tuple(found.shape) != shape:
            raise WiringError(
                f"expected {name} of shape {shape}, got {tuple(found.shape)}. The checkpoint's architecture is not one "
                "of the authors'."
            )
        return found.float()

    def maybe(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self.take(name, shape) if name in self.left else None

    def finish(self) -> None:
        if self.left:
            raise WiringError(
                f"the checkpoint also has {', '.join(list(self.left)[:4])}. Its architecture is not one of the "
                "authors'."
            )


def _top(name: str, weight: Tensor, mask: Tensor | None, k: int | None) -> Tensor:
    """Return which entries of a weight are kept: those of the mask, or the k largest by magnitude."""
    if mask is not None:
        return mask != 0
    if k is None:
        raise WiringError(f"{name} has no mask, so give width=, the network's width multiplier, such as 0.225.")
    if not 1 <= k <= weight.numel():
        raise WiringError(f"expected 1 to {weight.numel():,} edges, the entries of {name}, got {k:,}.")
    return choose(weight, k)


@torch.no_grad()
def _copy(pairs: list[tuple[Any, Tensor]]) -> None:
    for parameter, value in pairs:
        parameter.copy_(value.view(parameter.shape))


# ---- MobileNetV1-DNW ------------------------------------------------------------------------------------------------


def _large(state: _State, width: float | None, image_size: int | None) -> PublishedModel:
    if width is not None and not 0 < width <= 1:
        raise WiringError(f"width must be above 0 and at most 1, got {width}.")
    head = next((name for name in ("linear.weight", "linear.graph.weight") if name in state.left), None)
    if head is None:
        raise WiringError(
            "the checkpoint has neither linear.weight nor linear.graph.weight. Its architecture is not one of the "
            "authors'."
        )
    classes = len(state.left[head])
    model = MobileNetV1DNW(classes, image_size or (32 if classes == 10 else 224))
    published = PublishedModel(model)
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
        published.layers.append(EdgeNumbers("linear", weight.numel(), int(real.sum()), int(real.sum())))
        weight = weight * real
    bias = next(
        (b for name in ("linear.bias", "linear.graph.bias") if (b := state.maybe(name, (classes,))) is not None), None
    )
    _copy([(model.head.weight, weight), (model.head.bias, torch.zeros(classes) if bias is None else bias)])
    return published


def _stage(state: _State, prefix: str, stage: Stage, graph: StaticGraph, width: float | None) -> EdgeNumbers:
    """Load one graph: its kernels and norms block by block, and the part of its weight that each block reads."""
    rows, columns = stage.channels * stage.blocks, stage.before + stage.channels * (stage.blocks - 1)
    weight = state.take(f"{prefix}graph.weight", (rows, columns, 1, 1)).view(rows, columns)
    mask = state.maybe(f"{prefix}graph.mask", (rows, columns, 1, 1))
    k = None if width is None else edges_of_width(stage, width)
    real = _top(f"{prefix}graph.weight", weight, None if mask is None else mask.view(rows, columns), k)
    # Receiving block b reads the inputs and the b blocks before it.
    read = torch.arange(columns) < (stage.before + torch.arange(rows) // stage.channels * stage.channels)[:, None]
    matrix = torch.zeros(graph.nodes, graph.nodes)
    matrix[stage.before :, :columns] = weight * (real & read)
    graph.set_matrix_(matrix)
    kernels = _kernels(state, prefix, stage.before, columns)
    sizes = [stage.before, *[stage.channels] * (stage.blocks - 1)]
    for number, (size, kernel) in enumerate(zip(sizes, kernels.split(sizes), strict=True)):
        function: Any = graph.functions[number]
        _copy([(function.kernel, kernel), *_batch_norm(state, f"{prefix}norm.{number}.", size, function)])
    return EdgeNumbers(prefix.rstrip("."), weight.numel(), int(real.sum()), int((real & read).sum()))


def _kernels(state: _State, prefix: str, inputs: int, nodes: int) -> Tensor:
    """Return the kernels of all nodes that have one. Those of the inputs, which may have a stride, are stored apart."""
    first = state.maybe(f"{prefix}downsample.0.weight", (inputs, 1, 3, 3))
    left = nodes if first is None else nodes - inputs
    if left == 0 and f"{prefix}conv.weight" not in state.left:
        assert first is not None
        return first
    rest = state.take(f"{prefix}conv.weight", (left, 1, 3, 3))
    return rest if first is None else torch.cat([first, rest])


def _batch_norm(state: _State, prefix: str, size: int, norm: Any) -> list[tuple[Any, Tensor]]:
    """Return pairs of a parameter or buffer and its value, for PyTorch's batch norm or that of a node function."""
    scale, shift = (getattr(norm, f"norm_{x}", None) for x in ("weight", "bias"))
    scale, shift = (norm.weight, norm.bias) if scale is None else (scale, shift)
    names = {"weight": scale, "bias": shift, "running_mean": norm.running_mean, "running_var": norm.running_var}
    return [(place, state.take(prefix + name, (size,))) for name, place in names.items()]


# ---- the tiny classifiers -------------------------------------------------------------------------------------------


def _small(state: _State, edges: int, kind: str | None, in_place_relu: bool) -> PublishedModel:
    prefix = _SOLVED if f"{_SOLVED}graph.weight" in state.left else ""
    found = "continuous" if prefix else "static" if f"{prefix}norm.0.weight" in state.left else "discrete"
    kind = found if kind is None else kind
    if kind not in ("static", "discrete", "continuous"):
        raise unknown("kind", kind, ("static", "discrete", "continuous"))
    weight = state.take(f"{prefix}graph.weight", (NODES, NODES, 1, 1)).view(NODES, NODES)
    mask = state.maybe(f"{prefix}graph.mask", (NODES, NODES, 1, 1))
    real = _top(f"{prefix}graph.weight", weight, None if mask is None else mask.view(NODES, NODES), edges)
    kernels = state.take(f"{prefix}conv.weight", (NODES, 1, 3, 3))
    norms = _instance_norms(state, prefix)
    state.maybe("zeros", (1, NODES - INPUTS, 8, 8))  # initial states of the other nodes, which need not be stored
    matrix = weight * real
    if kind == "static":
        graph, read = _static(matrix, kernels, norms)
    else:
        graph, read = _dynamic(kind, matrix, kernels, norms, in_place_relu), torch.ones_like(real)
    classes = len(state.left["fc.weight"]) if "fc.weight" in state.left else 10
    model = TinyClassifier(graph, classes)
    _stem(state, model.stem)
    head = [state.take("fc.weight", (classes, OUTPUTS)), state.take("fc.bias", (classes,))]
    _copy(list(zip([model.head.weight, model.head.bias], head, strict=True)))
    return PublishedModel(model, [EdgeNumbers("graph", weight.numel(), int(real.sum()), int((real & read).sum()))])


def _instance_norms(state: _State, prefix: str) -> list[Tensor]:
    """Return scale and shift of all nodes, from one norm or from one for each block."""
    if f"{prefix}norm.weight" in state.left:
        return [state.take(f"{prefix}norm.{name}", (NODES,)) for name in ("weight", "bias")]
    sizes = [INPUTS, *[BLOCK] * 4]
    parts = [
        [state.take(f"{prefix}norm.{j}.{name}", (size,)) for j, size in enumerate(sizes)] for name in ("weight", "bias")
    ]
    return [torch.cat(part) for part in parts]


def _static(matrix: Tensor, kernels: Tensor, norms: list[Tensor]) -> tuple[Graph, Tensor]:
    """Build the static graph: four blocks after the input, and the last nodes, which receive again from all blocks.

    Here the nodes that are read are nodes of their own. So an edge to one of them from an earlier block, which their
    forward pass uses twice, becomes two edges.
    """
    graph = StaticGraph([INPUTS, BLOCK, BLOCK, BLOCK, BLOCK, OUTPUTS], node=ConvNode())
    block = (torch.arange(NODES) - INPUTS).div(BLOCK, rounding_mode="floor")  # -1 for the inputs
    first = INPUTS + block * BLOCK  # first node of a node's block
    read = (torch.arange(NODES) < first[:, None]) & (block >= 0)[:, None]
    extended = torch.zeros(graph.nodes, graph.nodes)
    extended[:NODES, :NODES] = matrix * read
    extended[NODES:, :NODES] = matrix[-OUTPUTS:]
    graph.set_matrix_(extended)
    sizes = [INPUTS, *[BLOCK] * 4]
    for number, part in enumerate(zip(*(x.split(sizes) for x in (kernels, *norms)), strict=True)):
        function: Any = graph.functions[number]
        _copy(list(zip([function.kernel, function.norm_weight, function.norm_bias], part, strict=True)))
    read[-OUTPUTS:] = True
    return graph, read


def _dynamic(kind: str, matrix: Tensor, kernels: Tensor, norms: list[Tensor], in_place_relu: bool) -> Graph:
    """Build the discrete or continuous graph, in which any node may feed any other."""
    node = ConvNode(before=["activation", "conv"], after=["norm"])
    settings: dict[str, Any] = {"inputs": INPUTS, "outputs": OUTPUTS, "node": node}
    graph: Graph
    if kind == "discrete":
        graph = DiscreteGraph(NODES, steps=_STEPS, **settings)
    else:
        graph = (InPlaceReluGraph if in_place_relu else ContinuousGraph)(NODES, **settings)
    graph.set_matrix_(matrix)
    function: Any = graph.function
    _copy(list(zip([function.kernel, function.norm_weight, function.norm_bias], [kernels, *norms], strict=True)))
    return graph


def _stem(state: _State, stem: nn.Sequential) -> None:
    """Load the layers that have weights, in order, whatever their numbers are."""
    found = (re.match(r"downsample\.(\d{1,4})\.", name) for name in state.left)
    numbers = sorted({int(match[1]) for match in found if match})
    ours = [layer for layer in stem if list(layer.parameters())]
    if len(numbers) != len(ours):
        raise WiringError(
            f"expected {len(ours)} layers with weights in the checkpoint's stem (downsample.N), got {len(numbers)}. "
            "Its architecture is not one of the authors'."
        )
    for number, layer in zip(numbers, ours, strict=True):
        for name, place in layer.state_dict().items():
            if name != "num_batches_tracked":
                _copy([(place, state.take(f"downsample.{number}.{name}", tuple(place.shape)))])
