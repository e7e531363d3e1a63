"""Random graphs, wirings and small networks with everything that compaction has to handle."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from wirings import Blocks, Dag, StaticGraph
from wirings.compaction.aten import CONVERTERS, ProgramTensor
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operations import InputRef, TorchOperator
from wirings.compaction.program import Program
from wirings.graph import ActivationNode, ConvNode, Groups, PlainNode

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
    """Random parameters and statistics, some of them zero: constant nodes, kernels that contribute nothing."""
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


class RandomNet(nn.Module):
    """Steps on maps of one size. A step has a kind, possibly a module, and the numbers of the tensors it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.steps: list[tuple[str, int | None, tuple[int, ...]]] = []
        self.channels: list[int] = []

    def add(self, kind: str, inputs: tuple[int, ...], channels: int, module: nn.Module | None = None) -> None:
        if module is not None:
            self.parts.append(module)
        self.steps.append((kind, None if module is None else len(self.parts) - 1, inputs))
        self.channels.append(channels)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, part, inputs in self.steps:
            taken = [values[i] for i in inputs]
            if kind == "call":
                assert part is not None
                values.append(self.parts[part](taken[0]))
            elif kind == "add":
                values.append(taken[0] + taken[1])
            elif kind == "in_place":
                values.append((taken[0] * 1).add_(taken[1]).relu_())
            elif kind == "concat":
                values.append(torch.cat(taken, 1))
            elif kind == "gate":
                values.append(taken[0] * taken[1].mean((2, 3), keepdim=True).sigmoid())
            elif kind == "half":
                values.append(taken[0].chunk(2, 1)[1])
            elif kind == "softmax":
                values.append(taken[0].softmax(1))
            elif kind == "shuffle":
                b, c, h, w = taken[0].shape
                values.append(taken[0].view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w))
            else:
                values.append(taken[0] * 0.5 + 0.25)
        return values[-1]


KINDS = [*["conv"] * 8, "bn", "act", "add", "concat", "depthwise", "grouped", "pool", "gate", "half"]
RARE = ["in_place", "softmax", "shuffle", "group_norm", "instance_norm", "number", "prelu", "pad", "up"]


@st.composite
def networks(draw: Draw) -> tuple[nn.Module, Tensor]:
    """A small convolutional network with dead and constant channels, in double precision, and an input."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    net = RandomNet()
    net.channels = [3]
    for _ in range(draw(st.integers(3, 12))):
        _step(draw, net)
    count = net.channels[-1]
    size = 6
    with torch.no_grad():
        pixels = net(torch.zeros(1, 3, size, size)).shape[2:].numel()
    end = draw(st.sampled_from(["mean", "flatten", "none", "pooled"]))
    ends: dict[str, list[nn.Module]] = {
        "mean": [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(count), nn.Linear(count, 3)],
        "flatten": [nn.Flatten(), nn.Dropout(), nn.Linear(count * pixels, 3)],
        "none": [],
        "pooled": [nn.BatchNorm2d(count), nn.AdaptiveAvgPool2d(1), nn.Conv2d(count, 2, 1)],
    }
    model = nn.Sequential(net, *ends[end]).double().eval()
    spoil(draw, model)
    density = draw(st.sampled_from([0.15, 0.3, 0.6, 0.9]))
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() > 1:
                x *= (torch.rand_like(x) < density) & (torch.rand(x.shape[:1]).view(-1, *[1] * (x.dim() - 1)) < 0.9)
    return model, torch.randn(draw(st.sampled_from([1, 2])), 3, size, size, dtype=torch.float64)


def _step(draw: Draw, net: RandomNet) -> None:
    kind = draw(st.sampled_from(KINDS + RARE))
    last = len(net.channels) - 1
    i = draw(st.sampled_from([last, last, draw(st.integers(0, last))]))
    count = net.channels[i]
    same = [j for j, other in enumerate(net.channels) if other == count]
    if kind == "conv":
        out, kernel = draw(st.sampled_from([2, 4, 4, 6])), draw(st.sampled_from([1, 3]))
        module: nn.Module = nn.Conv2d(count, out, kernel, padding=kernel // 2, bias=draw(st.booleans()))
        net.add("call", (i,), out, module)
    elif kind == "depthwise":
        times = draw(st.sampled_from([1, 1, 2]))
        net.add("call", (i,), times * count, nn.Conv2d(count, times * count, 3, padding=1, groups=count))
    elif kind == "grouped" and count % 2 == 0:
        net.add("call", (i,), 6, nn.Conv2d(count, 6, 3, padding=1, groups=2))
    elif kind == "act":
        acts = (
            nn.ReLU(),
            nn.ReLU(inplace=False),
            nn.Hardswish(),
            nn.Sigmoid(),
            nn.LeakyReLU(0.2),
            nn.ReLU6(),
            nn.ELU(),
        )
        net.add("call", (i,), count, draw(st.sampled_from(acts)))
    elif kind in ("add", "in_place", "gate"):
        net.add(kind, (i, draw(st.sampled_from(same))), count)
    elif kind == "concat":
        j = draw(st.integers(0, last))
        net.add("concat", (i, j), count + net.channels[j])
    elif kind == "half" and count > 1:
        net.add("half", (i,), count // 2)
    elif kind == "shuffle" and count % 2 == 0:
        net.add("shuffle", (i,), count)
    elif kind == "group_norm" and count % 2 == 0:
        net.add("call", (i,), count, nn.GroupNorm(2, count, affine=False))
    elif kind in ("softmax", "number"):
        net.add(kind, (i,), count)
    else:
        pools = (nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False))
        made = {
            "bn": nn.BatchNorm2d(count),
            "instance_norm": nn.InstanceNorm2d(count, affine=True),
            "prelu": nn.PReLU(count),
            "pool": draw(st.sampled_from(pools)),
            "pad": nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(3, 1)),
            "up": nn.Sequential(nn.Upsample(scale_factor=2), nn.AvgPool2d(2)),
        }
        net.add("call", (i,), count, made.get(kind, nn.BatchNorm2d(count)))


def program_of(model: nn.Module, x: Tensor) -> Program:
    """A drawn network as a program, without a trace, which would take most of the time of a test."""
    builder = ProgramBuilder([x])
    values = [ProgramTensor(builder.inputs[0])]
    net, *ends = model
    assert isinstance(net, RandomNet)

    def call(name: str, **arguments: Any) -> Any:
        done = CONVERTERS[name](builder, name, arguments)
        assert done is not None, name
        return done

    def called(module: nn.Module, a: ProgramTensor) -> Any:
        own = {"weight": getattr(module, "weight", None), "bias": getattr(module, "bias", None)}
        own = {key: None if p is None else p.detach() for key, p in own.items()}
        if isinstance(module, nn.Sequential):
            for inner in module:
                a = called(inner, a)
            return a
        if isinstance(module, nn.Conv2d):
            return call("conv2d", input=a, **own, padding=module.padding, groups=module.groups)
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            statistics = {"running_mean": module.running_mean, "running_var": module.running_var}
            return call("batch_norm", input=a, **own, **statistics, training=False, eps=module.eps)
        if isinstance(module, nn.InstanceNorm2d):
            return call("instance_norm", input=a, **own, use_input_stats=True, eps=module.eps)
        if isinstance(module, nn.Linear):
            return call("linear", input=a, **own)
        if isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
            sizes = {"kernel_size": module.kernel_size, "stride": module.stride, "padding": module.padding}
            counted = {"count_include_pad": getattr(module, "count_include_pad", True)}
            return call("max_pool2d" if isinstance(module, nn.MaxPool2d) else "avg_pool2d", self=a, **sizes, **counted)
        if isinstance(module, nn.Flatten):
            size = builder.values[a.name].shape
            return call("view", self=a, out=(0, size[1:].numel()))
        if isinstance(module, nn.AdaptiveAvgPool2d):
            return call("adaptive_avg_pool2d", self=a, output_size=1)
        if isinstance(module, nn.ZeroPad2d):
            return call("pad", self=a, pad=[1, 1, 1, 1])
        names = {nn.ReLU: "relu", nn.Hardswish: "hardswish", nn.Sigmoid: "sigmoid", nn.ELU: "elu", nn.PReLU: "prelu"}
        if isinstance(module, nn.LeakyReLU):
            return call("leaky_relu", self=a, negative_slope=0.2)
        if isinstance(module, nn.ReLU6):
            return call("hardtanh", self=a, min_val=0.0, max_val=6.0)
        if type(module) in names:
            return call(names[type(module)], self=a, weight=own["weight"])
        if isinstance(module, nn.Dropout):
            return a
        target, channelwise = {
            nn.GroupNorm: ("aten::group_norm", False),
            nn.Upsample: ("aten::upsample_nearest2d.vec", True),
        }[type(module)]
        arguments = (InputRef(0), 2) if not channelwise else (InputRef(0), None, (2.0, 2.0))
        return ProgramTensor(
            builder.add(TorchOperator, (a.name,), "opaque", target=target, arguments=arguments, channelwise=channelwise)
        )

    for kind, part, inputs in net.steps:
        taken = [values[i] for i in inputs]
        if kind == "call":
            made = called(net.parts[part], taken[0])
        elif kind in ("add", "in_place"):
            made = call("add", self=taken[0], other=taken[1])
            made = made if kind == "add" else call("relu", self=made)
        elif kind == "concat":
            made = call("cat", tensors=taken, dim=1)
        elif kind == "gate":
            mean = call("mean", self=taken[1], dim=[2, 3], keepdim=True)
            made = call("mul", self=taken[0], other=call("sigmoid", self=mean))
        elif kind == "half":
            made = call("chunk", self=taken[0], chunks=2, dim=1)[1]
        elif kind == "softmax":
            settings = {"target": "aten::softmax.int", "arguments": (InputRef(0), 1)}
            made = ProgramTensor(builder.add(TorchOperator, (taken[0].name,), "softmax", **settings))
        elif kind == "shuffle":
            count = builder.channels(taken[0].name)
            index = torch.arange(count).view(2, -1).t().flatten()
            made = call("index_select", self=taken[0], dim=1, index=index)
        else:
            made = call("add", self=call("mul", self=taken[0], other=0.5), other=0.25)
        values.append(made)
    result = values[-1]
    for module in ends:
        result = called(module, result)
    return builder.program([result.name])
