"""Every simplification, on a network written by hand whose compact form is known."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import Blocks, DiscreteGraph, StaticGraph, compact, wire_
from wirings.compaction import CompactModel
from wirings.compaction.compact import lower, plain_copy
from wirings.compaction.operations import (
    AddMap,
    Affine,
    Conv,
    InstanceNorm,
    Linear,
    Multiply,
    Operation,
    Pad,
    ScatterChannels,
    SelectChannels,
    TorchOperator,
)
from wirings.graph import ActivationNode, ConvNode


def kinds(small: CompactModel) -> list[str]:
    return [type(o).__name__ for o in small.program.operations]


def only(small: CompactModel, kind: type[Operation]) -> Operation:
    (found,) = (o for o in small.program.operations if isinstance(o, kind))
    return found


def compared(model: nn.Module, *shape: int) -> CompactModel:
    """The compact model, compared with the model on inputs other than the example."""
    small = compact(model, torch.randn(2, *shape))
    x = torch.randn(3, *shape)
    with torch.no_grad():
        expected = plain_copy(model)(x)
    torch.testing.assert_close(small(x), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    return small


def norm(channels: int, dims: int = 2) -> nn.Module:
    made: nn.Module = (nn.BatchNorm2d if dims == 2 else nn.BatchNorm1d)(channels)
    with torch.no_grad():
        for x in (made.weight, made.bias, made.running_mean):
            x.normal_()
        made.running_var.uniform_(0.5, 2)
    return made


def test_scalar_graph_by_hand() -> None:
    # 0 → 2 → 4 is the only path. 3 has no inputs, but its bias reaches 4. 1 reaches no output. 5 has no edges.
    graph = StaticGraph([2, 2, 2], node=ActivationNode("relu", bias=True))
    matrix = torch.zeros(6, 6)
    matrix[2, 0], matrix[4, 2], matrix[4, 3] = 2.0, 3.0, 10.0
    graph.set_matrix_(matrix)
    with torch.no_grad():
        graph.functions[1].bias.copy_(torch.tensor([1.0, 0.5]))
        graph.functions[2].bias.copy_(torch.tensor([0.25, -1.0]))
    small = compared(graph, 2)
    first, last = (o for o in small.program.operations if isinstance(o, Linear))
    assert first.weight.tolist() == [[2.0, 0.0]]
    assert first.bias is not None
    assert first.bias.tolist() == [1.0]
    assert last.weight.tolist() == [[3.0], [0.0]]  # a constant output is kept
    assert last.bias is not None
    assert last.bias.tolist() == [10 * 0.5 + 0.25, 0.0]  # its bias of -1 after the ReLU
    x = torch.tensor([[1.0, 7.0]])
    assert small(x).tolist() == [[3 * (2 * 1 + 1) + 5.25, 0.0]]
    assert small.report is not None
    assert (small.report.before.nodes, small.report.after.nodes) == (6, 5)
    assert (small.report.before.edges, small.report.after.edges) == (3, 2)


def test_recursive_liveness() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[4].weight[:, 2] = 0  # the last hidden node does not reach an output,
        model[2].weight[:2, 1] = 0  # so neither does the middle one of the first layer, which only feeds that node
        model[2].weight[1, :] = 0  # constant: its bias is folded into the last layer's
    small = compared(model, 4)
    assert [tuple(o.weight.shape) for o in small.program.operations if isinstance(o, Linear)] == [
        (2, 4),
        (1, 2),
        (2, 1),
    ]


def test_constant_nodes_become_a_bias_or_a_map_with_exact_borders() -> None:
    for padding, kind in ((0, "bias"), (1, "map")):
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=padding))
        with torch.no_grad():
            model[0].weight[1], model[0].bias[1] = 0, 2.0
        small = compared(model, 1, 5, 5)
        assert ("AddMap" in kinds(small)) == (kind == "map")
        last = [o for o in small.program.operations if isinstance(o, Conv)][-1]
        assert last.weight.shape[1] == 1
        if kind == "map":
            added = only(small, AddMap)
            assert isinstance(added, AddMap)
            inner = 2 * model[2].weight[:, 1].sum((1, 2)) + model[2].bias
            torch.testing.assert_close(added.map[:, 2, 2], inner.detach())
            corner = 2 * model[2].weight[:, 1, 1:, 1:].sum((1, 2)) + model[2].bias
            torch.testing.assert_close(added.map[:, 0, 0], corner.detach())


def test_constant_maps_are_valid_for_one_size() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, 2.0
    small = compact(model, torch.randn(1, 1, 5, 5))
    with pytest.raises(ValueError, match=r"compact it again with an example of the other size"):
        small(torch.randn(1, 1, 6, 6))
    free = compact(nn.Conv2d(1, 2, 3), torch.randn(1, 1, 5, 5))
    assert free(torch.randn(2, 1, 9, 9)).shape == (2, 2, 7, 7)


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_norms_of_nodes_keep_their_epsilon(kind: str) -> None:
    graphs = []
    for eps in (1e-5, 0.5):
        torch.manual_seed(0)
        graphs.append(StaticGraph([2, 3, 2], node=ConvNode(norm=kind, eps=eps)).eval())
        compared(graphs[-1], 2, 5, 5)
    x = torch.randn(2, 2, 5, 5)
    assert not torch.allclose(graphs[0](x), graphs[1](x), rtol=0.01)


@pytest.mark.parametrize("place", ["after", "before", "between"])
def test_batch_norm_is_folded_into_its_neighbours(place: str) -> None:
    models = {
        "after": nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), norm(3), nn.ReLU()),
        "before": nn.Sequential(nn.ReLU(), norm(2), nn.Conv2d(2, 3, 3)),
        "between": nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), norm(3), nn.Conv2d(3, 2, 3, padding=1)),
    }
    small = compared(models[place].eval(), 2, 6, 6)
    assert not any(isinstance(o, Affine) for o in small.program.operations)
    assert ("AddMap" in kinds(small)) == (place == "between")  # the padding is not shifted


def test_batch_norm_between_two_relus_stays() -> None:
    small = compared(nn.Sequential(nn.ReLU(), norm(2), nn.ReLU()).eval(), 2, 4, 4)
    assert kinds(small) == ["Activation", "Affine", "Activation"]


def test_norms_fold_through_means_flattening_and_residual_sums() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 3, padding=1)
            self.norm, self.head_norm, self.head = norm(3), norm(3, 1), nn.Linear(3, 2)
            self.last = nn.Linear(3 * 16, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            maps = self.norm(self.one(x) + self.two(x)).relu()
            return self.head(self.head_norm(maps.mean((2, 3)))), self.last(maps.flatten(1))

    model = Net().eval()
    small = compact(model, torch.randn(2, 2, 4, 4))
    assert not any(isinstance(o, (Affine, AddMap)) for o in small.program.operations)
    x = torch.randn(3, 2, 4, 4)
    for found, expected in zip(small(x), model(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_norms_fold_through_selected_channels() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(2, 6, 1), norm(2), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            some = self.first(x)[:, [5, 1, 3, 0]][:, 1:3]  # channels 1 and 3
            return self.last(self.norm(some).relu())

    model = Halves().eval()
    small = compared(model, 2, 4, 4)
    assert kinds(small) == ["Conv", "Activation", "Conv"]
    first = next(o for o in small.program.operations if isinstance(o, Conv))
    scale = model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()
    expected = model.first.weight[[1, 3]] * scale[:, None, None, None]
    torch.testing.assert_close(first.weight, expected.detach())


def test_norm_of_channels_that_are_selected_twice_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(2, 3, 1), norm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x)[:, [0, 0, 1, 2]]).relu()

    assert "Affine" in kinds(compared(Twice().eval(), 2, 4, 4))


def test_shift_before_an_instance_norm_is_removed() -> None:
    small = compared(nn.Sequential(nn.Conv2d(2, 3, 1), nn.InstanceNorm2d(3, affine=True)), 2, 4, 4)
    assert only(small, Conv).tensors()["bias"] is None
    assert isinstance(only(small, InstanceNorm), InstanceNorm)


def test_depthwise_grouped_and_strided_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), norm(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 1),
    ).eval()  # fmt: skip
    with torch.no_grad():
        model[6].weight[:, [0, 1, 5]] = 0
        model[4].weight[:, 3] = 0  # in each group of four inputs, the last has no edges
        model[3].weight[2] = 0  # constant after its depthwise convolution
    small = compared(model, 3, 9, 9)
    sizes = [(tuple(o.weight.shape), o.groups) for o in small.program.operations if isinstance(o, Conv)]
    assert sizes[0] == ((5, 3, 3, 3), 1)
    assert sizes[1] == ((5, 1, 3, 3), 5)
    assert sizes[2] == ((6, 3, 3, 3), 2)  # padded to the larger group
    assert sizes[3] == ((2, 5, 1, 1), 1)


class Residual(nn.Module):
    """Two branches that are added, and a third that is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.beside, self.head = nn.Conv2d(4, 3, 1), nn.Conv2d(7, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.head(torch.cat([x + self.second(x), self.beside(x).relu()], 1))


def test_residual_additions_and_concatenations() -> None:
    model = Residual()
    with torch.no_grad():
        model.second.weight[[0, 2]], model.second.bias[:] = 0, torch.tensor([0.5, 0, 0, 0])
        model.head.weight[:, [3, 5]] = 0  # a channel of the sum and one of the branch are not used
        model.second.weight[:, 3] = 0
        model.beside.weight[:, 3] = 0
    small = compared(model, 2, 5, 5)
    shapes = {o.output: tuple(o.weight.shape[:2]) for o in small.program.operations if isinstance(o, Conv)}
    assert shapes["first"] == (3, 2)
    assert shapes["second"] == (3, 3)  # rows of zeros for channels in which only the other term varies
    assert shapes["beside"] == (2, 3)
    assert shapes["head"] == (2, 5)
    assert not any(isinstance(o, (ScatterChannels, SelectChannels, AddMap)) for o in small.program.operations)


def test_constant_branch_becomes_a_constant() -> None:
    model = Residual()
    with torch.no_grad():
        model.second.weight[:] = 0
    small = compared(model, 2, 5, 5)
    assert "second" not in [o.output for o in small.program.operations]


def test_prunes_through_channel_shuffles_and_splits() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 6, 1), nn.Conv2d(3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            b, c, h, w = x.shape
            x = x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)
            return self.last(x.chunk(2, 1)[0].relu())

    small = compared(Shuffled(), 2, 4, 4)
    assert not any(isinstance(o, TorchOperator) for o in small.program.operations)
    assert next(o for o in small.program.operations if isinstance(o, Conv)).weight.shape[0] == 3


def test_in_place_operations() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 4, 1), nn.Conv2d(2, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y[:] += self.second(x)
            return y.relu_()

    assert kinds(compared(InPlace(), 2, 5, 5)) == ["Conv", "Conv", "Add", "Activation"]

    class Partly(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y[:, 1:3] += self.second(x)[:, :2]
            return y

    compared(Partly(), 2, 5, 5)


def test_gates_are_the_second_factor() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.gate(x.mean((2, 3), keepdim=True)).sigmoid() * x

    small = compared(Gated(), 2, 5, 5)
    shapes = small.program.shapes()
    assert [shapes[name] for name in only(small, Multiply).inputs] == [(4, 5, 5), (4, 1, 1)]


def test_attention_and_computed_sizes() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.three, self.last = nn.Linear(6, 18), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            b, n, c = x.shape
            q, k, v = self.three(x).view(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            return self.last(y.reshape(b * n, c)).view(b, n, 4)

    small = compared(Attention(), 5, 6)
    parts = ["SelectChannels"] * 3
    assert kinds(small) == ["Arrange", "Conv", *parts, "Attention", "Conv", "Arrange"]


class AddsBooleans(nn.Module):
    """Adds booleans to scores, which counts them as 0 and 1."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)
        return (q @ q.transpose(-1, -2) * 0.5 + (torch.ones(4, 4).tril() > 0)).softmax(-1) @ q


class ByPlaceInBatch(nn.Module):
    """Multiplies all but the first few examples of a batch by zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[0]) < 4).float()[:, None, None]


@pytest.mark.parametrize("last", [AddsBooleans, ByPlaceInBatch])
def test_what_looks_like_something_else(last: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), last()).eval(), torch.randn(6, 4, 6)
    small = compact(model, x[:2])
    torch.testing.assert_close(small(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_empty_parts_and_more_dimensions() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _, one, two = x.split([0, 2, 4], -1)
            return torch.cat([two, one, x.expand(3, *x.shape).sum(0)], -1)

    compared(nn.Sequential(nn.Linear(6, 6), Parts()), 4, 6)


def test_opaque_operators_only_keep_the_channels_around_them() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1), nn.ReLU(),
        nn.Conv2d(3, 1, 1),
    )  # fmt: skip
    with torch.no_grad():
        model[2].weight[0], model[2].weight[:, 3] = 0, 0
        model[6].weight[:, 2] = 0
    small = compared(model, 2, 4, 4)
    assert [tuple(o.weight.shape[:2]) for o in small.program.operations if isinstance(o, Conv)] == [
        (3, 2), (4, 3), (2, 4), (1, 2),
    ]  # fmt: skip


def test_wired_models_are_finalized_on_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    wire_(model, "dnw", density=0.1)
    small = compared(model, 8)
    assert model[0].parametrizations  # the model itself is still wired
    assert small.report is not None
    assert small.report.after.nodes < small.report.before.nodes
    assert small.report.before.edges == 25 + 12
    assert sum(p.numel() for p in small.parameters()) < 200


def test_discrete_graphs_are_unrolled() -> None:
    torch.manual_seed(0)
    node = ConvNode(before=["activation", "conv"], after=["norm"])
    graph = DiscreteGraph(20, inputs=3, outputs=4, steps=3, edges=60, node=node).eval()
    small = compared(graph, 3, 5, 5)
    assert sum(isinstance(o, InstanceNorm) for o in small.program.operations) == 3


def test_user_defined_node_functions_are_traced() -> None:
    graph = StaticGraph(Blocks([2, 3, 2]), node=lambda nodes: nn.BatchNorm1d(nodes)).eval()
    with torch.no_grad():
        graph.weight[:4] = 0
    compared(graph, 2)
    squared = StaticGraph([2, 3, 2], node=ActivationNode(lambda x: x * x.sigmoid()))
    compared(squared, 2)


def test_graph_with_many_levels_inside_a_model() -> None:
    from wirings import Dag

    torch.manual_seed(0)
    graph = StaticGraph(topology=Dag(60, inputs=4), outputs=6, edges=150, node=ActivationNode("tanh", bias=True))
    model = nn.Sequential(nn.Linear(5, 4), graph, nn.Linear(6, 3))
    small = compared(model, 5)
    rounds = sum(isinstance(o, Linear) for o in small.program.operations) - 2
    assert rounds <= graph.longest_path()


def test_lowered_program_computes_what_the_model_does() -> None:
    model = Residual()
    x = torch.randn(2, 2, 5, 5)
    program = lower(plain_copy(model), [x])
    torch.testing.assert_close(program.run(x)[0], model(x), rtol=1e-6, atol=1e-6)
    assert "first = Conv(input) [4, 5, 5]" in str(program)


def test_report_is_a_table() -> None:
    small = compared(Residual(), 2, 5, 5)
    text = str(small.report)
    for word in ("nodes", "edges", "parameters", "multiply-adds", "bytes", "before", "after"):
        assert word in text
    assert small.report is not None
    assert small.report.before.mult_adds == 25 * (8 + 144 + 12 + 14)


def test_operator_of_several_results_before_a_constant() -> None:
    """Nothing reads the largest pixels, of which PyTorch also returns the places: such results have no channels."""
    model = nn.Sequential(
        nn.MaxPool2d(2),
        nn.AdaptiveMaxPool2d(4),
        nn.Conv2d(1, 2, 1),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    )
    nn.init.zeros_(model[2].weight)
    small = compared(model.eval(), 1, 16, 16)
    assert "Pooling" not in kinds(small)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("dilation", [1, 3, 2**33 + 1])
def test_even_kernels_of_padding_same(dilation: int) -> None:
    """Only the zero that one side has more is a step of its own, however far the kernel reaches."""
    model = nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(dilation, 3))
    small = compared(model, 2, 5, 6)
    assert only(small, Pad).after == (1, 1)
    assert only(small, Conv).padding == (dilation // 2, 4)
