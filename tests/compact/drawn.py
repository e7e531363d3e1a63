"""Random graphs, wirings and small networks, with all that compaction has to see through."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from wirings import Blocks, Dag, StaticGraph
from wirings.nodes import ActivationNode, ConvNode, Groups, PlainNode

Draw = Any
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "silu", None)


@st.composite
def nodes(draw: Draw, dims: int, stride: int = 1) -> Any:
    """A recipe of node functions for scalars (dims 0) or maps."""
    activation = draw(st.sampled_from(ACTIVATIONS))
    if dims == 0:
        return draw(st.sampled_from([None, PlainNode(), ActivationNode(activation, bias=draw(st.booleans()))]))
    parts = draw(st.permutations(["norm", "activation", "conv"]))
    cut = draw(st.integers(0, 3))
    return ConvNode(
        norm=draw(st.sampled_from([None, "batch", "instance"])),
        activation=activation,
        before=parts[:cut],
        after=parts[cut:],
        kernel=draw(st.sampled_from([1, 3])),
        dims=dims,
        stride=stride,
        pad=stride > 1 and draw(st.booleans()),  # zeros around, so that constant maps have borders
    )


@st.composite
def graphs(draw: Draw) -> tuple[StaticGraph, Tensor]:
    """A finalized static graph, in double precision and evaluation, and an input."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dims = draw(st.sampled_from([0, 2, 2, 2, 1]))
    kind = draw(st.sampled_from(["blocks", "blocks", "blocks", "dag", "matrix"]))
    if kind == "blocks":
        sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
        reach = draw(st.sampled_from([None, 1, 2]))
        strides = [1] * len(sizes)
        if dims == 2:  # one block sends smaller maps: any if edges lead to the next block alone, else the first
            strides[draw(st.integers(0, len(sizes) - 2)) if reach == 1 else 0] = draw(st.sampled_from([1, 2]))
        recipes = [draw(nodes(dims, stride)) for stride in strides]
        graph = StaticGraph(Blocks(sizes, reach=reach), node=recipes)
    else:
        count, inputs = draw(st.integers(3, 9)), draw(st.integers(1, 2))
        recipe = draw(nodes(dims))
        if dims == 0 and draw(st.booleans()):
            recipe = Groups([2, count - 2], [ActivationNode("relu", bias=True), ActivationNode("tanh")])
        outputs = draw(st.integers(1, count))
        if kind == "dag":
            graph = StaticGraph(topology=Dag(count, inputs=inputs), outputs=outputs, node=recipe)
        else:
            allowed = torch.tril(torch.rand(count, count) < 0.6, -1)
            allowed[:inputs], allowed[-1, 0] = False, True
            order = torch.randperm(count)
            which = [int((order == i).nonzero()) for i in range(inputs)]
            allowed = allowed[order][:, order]
            graph = StaticGraph(topology=allowed, inputs=which, outputs=outputs, node=recipe)
    graph = graph.double().eval()
    spoil(draw, graph)
    with torch.no_grad():
        graph.weight *= torch.rand_like(graph.weight) < draw(st.sampled_from([0.05, 0.2, 0.4, 0.7]))
        graph.weight[draw(st.integers(0, graph.allowed - 1))] = 0.7  # at least one edge, perhaps the only one
    size = [draw(st.integers(3, 6)) for _ in range(dims)]
    return graph, torch.randn(2, len(graph.inputs), *size, dtype=torch.float64)


def spoil(draw: Draw, module: nn.Module) -> None:
    """Parameters and statistics of all sizes, some of them zero: constant nodes, kernels that bring nothing."""
    share = draw(st.sampled_from([0.0, 0.0, 0.3]))
    with torch.no_grad():
        for name, x in [*module.named_parameters(), *module.named_buffers()]:
            if not x.is_floating_point():
                continue
            x.copy_(torch.randn_like(x))
            if name.endswith("running_var"):
                x.abs_().add_(0.1)
            elif name.rpartition(".")[2] in ("norm_weight", "norm_bias", "kernel", "bias", "weight"):
                x[torch.rand(x.shape[0]) < share] = 0
