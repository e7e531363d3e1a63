"""Profiles: small networks counted by hand, and dead nodes of whole networks."""

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import wirings
from wirings import ContinuousGraph, DiscreteGraph, StaticGraph, WiringError, models
from wirings.graph import ActivationNode, ConvNode, Groups, NodeFunction, PerStep, PlainNode, TimeNode
from wirings.models.mobilenet import STAGES, edges_of_width
from wirings.profiling import Profile, ProfileRow, profile
from wirings.selection import shared
from wirings.train.networks import open_network


def counts(counted: Profile | ProfileRow) -> tuple[int, ...]:
    """Dense, real and live parameters, then multiply-adds."""
    return (
        *(counted.dense_params, counted.params, counted.live_params),
        *(counted.dense_mult_adds, counted.mult_adds, counted.live_mult_adds),
    )


def with_edges(graph: Any, *edges: tuple[int, int]) -> Any:
    """A plain graph that has only these edges, (from, to)."""
    matrix = torch.zeros(graph.nodes, graph.nodes)
    for number, (u, v) in enumerate(edges, 1):
        matrix[v, u] = number
    graph.set_matrix_(matrix)
    return graph


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape", "params", "mult_adds"),
    [
        (nn.Linear(3, 5), (3,), 20, 15),
        (nn.Linear(3, 5, bias=False), (7, 3), 15, 7 * 15),
        (nn.Conv2d(4, 8, 3, padding=1, groups=2), (4, 5, 5), 8 * 2 * 9 + 8, 8 * 2 * 9 * 25),
        (nn.Conv2d(3, 2, 3, stride=2, padding=1), (3, 9, 9), 56, 54 * 25),
        (nn.Conv1d(2, 3, 5), (2, 12), 33, 30 * 8),
        (nn.Conv3d(1, 2, 2), (1, 3, 4, 5), 18, 16 * 2 * 3 * 4),
        (nn.ConvTranspose2d(3, 2, 2, stride=2, bias=False), (3, 4, 4), 24, 24 * 16),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 5), 4 * 3 * 3 + 6, 36 * 5),
        (nn.LSTM(3, 5), (7, 3), 200, 0),  # see below: its example has no batch
        (nn.Sequential(nn.BatchNorm1d(4), nn.PReLU()), (4,), 9, 0),
    ],
)
def test_layers_counted_by_hand(layer: nn.Module, shape: tuple[int, ...], params: int, mult_adds: int) -> None:
    if isinstance(layer, nn.LSTM):
        counted = profile(layer, torch.zeros(*shape))
        mult_adds = 7 * (4 * 5 * 3 + 4 * 5 * 5)
    else:
        counted = profile(layer, shape)
    assert counts(counted) == (params,) * 3 + (mult_adds,) * 3
    assert counted.all_params == sum(p.numel() for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_layers() -> None:
    x = torch.zeros(7, 2, 3)  # steps, batch, features
    per_step = (4 * 5 * 3 + 4 * 5 * 5) * 2 + (4 * 5 * 10 + 4 * 5 * 5) * 2
    assert profile(nn.LSTM(3, 5, num_layers=2, bidirectional=True), x).mult_adds == 7 * 2 * per_step
    projected = 4 * 5 * 3 + 4 * 5 * 2 + 2 * 5
    assert profile(nn.LSTM(3, 5, proj_size=2), x).mult_adds == 7 * 2 * projected
    assert profile(nn.GRU(3, 5), x).mult_adds == 7 * 2 * (3 * 5 * 3 + 3 * 5 * 5)
    assert profile(nn.GRUCell(3, 5), (3,)).mult_adds == 3 * 5 * 3 + 3 * 5 * 5
    lengths = torch.tensor([7, 4])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
    assert profile(nn.RNN(3, 5), packed).mult_adds == 11 * (5 * 3 + 5 * 5)
    wired = nn.LSTM(3, 5)
    wirings.wire_(wired, "dnw", density=0.5)
    assert counts(profile(wired, x)) == (200, 120, 120, 14 * 160, 14 * 80, 14 * 80)


def test_attention_and_bilinear_layers() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x, y = torch.zeros(1, 3, 8), torch.zeros(1, 5, 8)
    assert profile(layer, (x, x, x)).mult_adds == 3 * 192 + 3 * 64 + 2 * 3 * 3 * 8
    counted = profile(layer, (x, y, y))
    assert counted.mult_adds == 3 * 64 + 5 * 128 + 3 * 64 + 2 * 3 * 5 * 8
    assert counted.params == sum(p.numel() for p in layer.parameters()) == 4 * 64 + 4 * 8
    other = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
    keys, values = torch.zeros(5, 1, 4), torch.zeros(5, 1, 6)
    assert profile(other, (torch.zeros(3, 1, 8), keys, values)).mult_adds == (
        3 * 64 + 5 * 32 + 5 * 48 + 3 * 64 + 2 * 3 * 5 * 8
    )
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # whose fast path calls no layers
    assert profile(encoder, (3, 8)).mult_adds == 3 * 192 + 3 * 64 + 144 + 2 * 3 * 8 * 16
    bilinear = nn.Bilinear(3, 4, 5)
    assert profile(bilinear, (torch.zeros(1, 3), torch.zeros(1, 4))).mult_adds == 60


def test_tied_weights_count_once_as_parameters() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    tied[2].weight = tied[0].weight
    assert counts(profile(tied, (4,)))[1::2] == (16, 32, 32)
    wirings.wire_(tied, "dnw", k=5)
    assert (profile(tied, (4,)).params, profile(tied, (4,)).mult_adds) == (5, 10)
    layer = nn.Linear(4, 4)
    twice = nn.Sequential(layer, layer)
    counted = profile(twice, (4,))
    assert (counted.params, counted.mult_adds, counted.rows[0].times) == (20, 32, 2)
    assert "counted together: 0 × 2 calls" in str(counted)


def test_wired_and_finalized_models_count_alike() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, 4))
    wirings.wire_(model, "dnw", density=0.1)
    before = profile(model, (3, 5, 5))
    assert before.params == 16 + 6 + 12 + 21 + 4
    assert before.mult_adds == 16 * 9 + 21
    assert before.dense_mult_adds == 3 * 6 * 9 * 9 + 54 * 4
    wirings.finalize_(model)
    after = profile(model, (3, 5, 5))
    assert counts(after)[1:] == counts(before)[1:]
    assert after.rows[0].edges == 16


def test_dense_counts_exclude_edges_that_are_not_allowed() -> None:
    layer = nn.Linear(4, 4, bias=False)
    wirings.wire_(layer, "dnw", k=3, allowed={"weight": torch.eye(4).bool()})
    assert counts(profile(layer, (4,))) == (4, 3, 3, 4, 3, 3)


def test_real_edges_may_have_weights_of_zero() -> None:
    layer = nn.Linear(4, 4, bias=False)
    wirings.wire_(layer, "random", k=6)
    with torch.no_grad():
        layer.parametrizations.weight.original.zero_()  # as edges that a rule has just grown
    assert counts(profile(layer, (4,))) == (16, 6, 6, 16, 6, 6)


def test_other_parametrizations() -> None:
    layer = parametrizations.weight_norm(nn.Linear(3, 5))
    assert (profile(layer, (3,)).params, profile(layer, (3,)).mult_adds) == (15 + 5 + 5, 15)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_a_graph_of_five_nodes() -> None:
    graph = with_edges(StaticGraph([2, 2, 1], node=ConvNode(norm=None)), (0, 2), (2, 4), (1, 3))
    row = profile(graph, (2, 4, 4)).rows[0]
    allowed = 2 * 2 + 4 * 1
    assert counts(row) == (
        *(allowed + 4 * 9, 3 + 3 * 9, 2 + 2 * 9),
        *(16 * (allowed + 4 * 9), 16 * (3 + 3 * 9), 16 * (2 + 2 * 9)),
    )
    assert (row.edges, row.live_edges, row.nodes, row.without_output, row.dead_nodes) == (3, 2, 5, 1, 2)
    assert (row.kind, row.times, row.norms) == ("StaticGraph", 1, 0)


def test_a_graph_with_a_stride() -> None:
    nodes = [ConvNode(norm="batch", stride=2), ConvNode(norm="batch"), PlainNode()]
    graph = StaticGraph([2, 3, 1], node=nodes)
    counted = profile(graph, (2, 9, 7))
    pixels = 5 * 4
    assert counts(counted) == (11 + 45,) * 3 + ((11 + 45) * pixels,) * 3
    assert (counted.rows[0].norms, counted.all_params) == (10, 66)
    narrowing = StaticGraph(wirings.Blocks([2, 3, 1], reach=1), node=[ConvNode(stride=2), ConvNode(stride=2), None])
    assert profile(narrowing, (2, 8, 8)).mult_adds == 6 * 16 + 2 * 9 * 16 + 3 * 4 + 3 * 9 * 4


def test_nodes_that_convolve_after_the_edges() -> None:
    node = ConvNode(norm=None, before=[], after=["conv", "activation"])
    graph = with_edges(StaticGraph([1, 2, 1], node=node), (0, 1), (1, 3))
    row = profile(graph, (1, 4, 4)).rows[0]
    assert row.dense_params == 1 * 2 + 3 + 3 * 9  # inputs receive nothing
    assert (row.params, row.mult_adds) == (2 + 2 * 9, 16 * (2 + 2 * 9))  # node 2 has no edge; the output is read
    assert (row.without_output, row.dead_nodes) == (1, 1)


def test_graphs_of_scalars_vectors_and_other_kinds_of_nodes() -> None:
    scalar = StaticGraph([4, 8, 3], edges=20, node=ActivationNode(bias=True))
    counted = profile(scalar, (4,))
    assert (counted.mult_adds, counted.params) == (20, 20 + 11)
    assert profile(StaticGraph([4, 8, 3], edges=20), (4, 5)).mult_adds == 20 * 5
    ordered = StaticGraph(topology=wirings.Dag(40, inputs=4), outputs=3, edges=0.5, node=ConvNode())
    row = profile(ordered, (4, 4, 4)).rows[0]
    senders = len(set(ordered.real_edges()[1].tolist()))
    assert row.mult_adds == 16 * (row.edges + 9 * senders)
    groups = Groups([2, 4], [ConvNode(norm=None), PlainNode()])
    mixed = DiscreteGraph(6, inputs=2, outputs=2, steps=3, node=groups)
    assert profile(mixed, (2, 4, 4)).dense_mult_adds == 3 * 16 * (36 + 2 * 9)
    padded = DiscreteGraph(6, inputs=2, outputs=2, steps=3, node=ConvNode(stride=2, pad=True))
    assert profile(padded, (2, 4, 4)).dense_mult_adds == 3 * (36 * 16 + 6 * 9 * 4)
    stepwise = DiscreteGraph(6, inputs=2, outputs=2, steps=3, node=PerStep(ConvNode(norm=None), 3))
    counted = profile(stepwise, (2, 4, 4))
    assert (counted.dense_params, counted.dense_mult_adds) == (36 + 3 * 6 * 9, 3 * 16 * (36 + 6 * 9))
    timed = ContinuousGraph(6, inputs=2, outputs=2, node=TimeNode(ConvNode(norm=None)), solver="euler", steps=4)
    counted = profile(timed, (2, 4, 4))
    assert (counted.dense_params, counted.dense_mult_adds) == (36 + 6 + 6 * 9, 4 * 16 * (36 + 6 * 9))


def test_discrete_graphs_count_every_step() -> None:
    graph = with_edges(DiscreteGraph(4, inputs=1, outputs=1, steps=3), (0, 1), (1, 2), (2, 3), (3, 3), (1, 3))
    row = profile(graph, (1, 2, 2)).rows[0]
    assert (row.times, row.per, row.mult_adds, row.dense_mult_adds) == (3, "step", 3 * 5 * 4, 3 * 16 * 4)
    # Alive: 0→1 in step 0; 1→2 and 1→3 in step 1; 2→3 and 3→3 in step 2.
    assert (row.live_mult_adds, row.live_edges, row.dead_nodes) == (5 * 4, 5, 0)
    short = with_edges(DiscreteGraph(4, inputs=1, outputs=1, steps=2), (0, 1), (1, 2), (2, 3), (3, 3), (1, 3))
    row = profile(short, (1,)).rows[0]
    assert (row.live_mult_adds, row.live_edges, row.dead_nodes) == (2, 2, 1)
    sequence = DiscreteGraph(5, inputs=2, outputs=2, inflow="every", reads="every", edges=12)
    counted = profile(sequence, (6, 2))
    assert (counted.mult_adds, counted.rows[0].times) == (6 * 12, 6)
    assert counted.rows[0].dead_nodes == len(sequence.dead_nodes())


def test_continuous_graphs_count_every_evaluation() -> None:
    graph = ContinuousGraph(10, inputs=3, outputs=2, edges=30, node=ConvNode(before=["activation", "conv"]))
    row = profile(graph, (3, 4, 4)).rows[0]
    assert graph.effort is not None
    assert (row.times, row.per) == (graph.effort.evaluations, "evaluation")
    assert row.times > 6
    assert row.mult_adds == row.times * 16 * (30 + 9 * (10 - row.without_output))
    fixed = with_edges(ContinuousGraph(3, inputs=1, outputs=1, solver="rk4", steps=2), (0, 2), (1, 2))
    assert counts(profile(fixed, (1,)))[3:] == (8 * 9, 8 * 2, 8 * 1)


@pytest.mark.parametrize("name", ["tiny_static", "tiny_discrete", "tiny_continuous"])
def test_the_tiny_classifiers_have_the_papers_parameters(name: str) -> None:
    model = models.get(name)
    counted = profile(model)
    assert counted.params == model.paper_parameters()["total"] == 41_458
    assert counted.all_params == sum(p.numel() for p in model.parameters())
    assert counted.row("graph").norms == 1_600
    assert counted.row("graph").dead_nodes == len(model.graph.dead_nodes())
    assert counted.row("graph").live_edges <= 32_000


# ---- what is dead ----------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """A convolution, two graphs, a norm and a classifier."""

    input_shape = (1, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1)
        node = ConvNode(norm=None)
        self.one = with_edges(StaticGraph([3, 2, 3], node=[node, node, None]), (0, 3), (3, 5), (1, 4), (4, 6), (2, 7))
        self.two = with_edges(StaticGraph([3, 2, 2], node=[node, node, None]), (0, 3), (3, 5), (1, 4))
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.two(self.one(self.stem(x))))).mean((-2, -1)))


def test_dead_nodes_are_traced_through_the_whole_network() -> None:
    # one: 0 → 3 → 5, 1 → 4 → 6, 2 → 7; its outputs 5, 6, 7 are two's inputs 0, 1, 2.
    # two: 0 → 3 → 5, 1 → 4; input 2 and node 4 lead nowhere, and nothing leads to output 6.
    counted = profile(Chain())
    stem, one, two, norm, head = (counted.row(name) for name in ("stem", "one", "two", "norm", "head"))
    assert (one.without_output, one.dead_nodes, one.edges, one.live_edges) == (0, 5, 5, 2)
    assert (two.without_output, two.dead_nodes, two.edges, two.live_edges) == (2, 4, 3, 2)
    assert counts(one)[1:3] == (5 + 5 * 9, 2 + 2 * 9)
    assert counts(one)[4:] == (16 * (5 + 5 * 9), 16 * (2 + 2 * 9))
    assert counts(two)[4:] == (16 * (3 + 3 * 9), 16 * (2 + 2 * 9))
    # The paper's count: all of the stem's channels go into a node with an edge; one output of two is empty.
    assert counts(stem) == (30, 30, 10, 27 * 16, 27 * 16, 9 * 16)
    assert (stem.dead_nodes, head.dead_nodes) == (2, 0)
    assert counts(head) == (9, 3 + 3, 3 + 3, 6, 3, 3)
    assert (norm.params, norm.live_params) == (4, 2)


def test_layer_before_a_graph_counts_only_channels_that_are_sent() -> None:
    model = Chain()
    with_edges(model.one, (0, 3), (3, 5), (2, 7))
    counted = profile(model)
    assert counts(counted.row("stem")) == (30, 20, 10, 27 * 16, 18 * 16, 9 * 16)
    assert counted.row("one").without_output == 2


class Block(nn.Module):
    """Paths of channels: a residual, a concatenation, a shuffle and a gate."""

    input_shape = (4, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.gate = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.relu6(self.a(x))) + x
        y = torch.cat([y, x], 1).view(-1, 2, 4, 6, 6).transpose(1, 2).flatten(1, 2)
        y = F.hardswish(F.max_pool2d(self.depthwise(y), 2))
        return self.last(y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))).sum((2, 3))


def test_channels_are_traced_through_residuals_and_gates() -> None:
    model = Block()
    full = profile(model)
    assert full.live_mult_adds == full.mult_adds == full.dense_mult_adds
    with torch.no_grad():
        model.last.weight[:, 2:4] = 0  # channels 2 and 3 of the shuffle: 1 of the residual, 1 of the input
        model.gate.weight[:] = 0  # a constant gate
    counted = profile(model)
    assert counted.row("depthwise").live_edges == 6 * 9
    assert counted.row("b").live_edges == 12
    assert (counted.row("gate").edges, counted.row("gate").live_edges) == (0, 0)
    assert counted.row("a").live_edges == 4 * 36
    with torch.no_grad():
        model.b.weight[:, 0] = 0
    assert profile(model).row("a").dead_nodes == 1
    assert profile(model).row("a").live_edges == 3 * 36


@given(st.integers(0, 10_000))
def test_dead_units_of_perceptrons(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 6, random.integers(2, 6)).tolist()
    masks = [random.random((b, a)) < 0.4 for a, b in itertools.pairwise(sizes)]
    layers: list[nn.Module] = []
    for mask in masks:
        layers += [nn.Linear(mask.shape[1], mask.shape[0]), nn.Tanh()]
        with torch.no_grad():
            layers[-2].weight.copy_(torch.from_numpy(mask) * torch.where(torch.rand(mask.shape) > 0.5, 1.0, -1.0))
    fed, wanted = [np.ones(sizes[0], bool)], [np.ones(sizes[-1], bool)]
    for mask in masks:
        fed.append((mask & fed[-1]).any(1))
    for mask in reversed(masks):
        wanted.insert(0, (mask & wanted[0][:, None]).any(0))
    counted = profile(nn.Sequential(*layers), (sizes[0],))
    rows = [row for row in counted.rows if row.kind == "Linear"]
    assert len(rows) == len(masks)
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        live = mask & fed[number] & wanted[number + 1][:, None]
        assert (row.edges, row.live_edges, row.live_mult_adds) == (mask.sum(), live.sum(), live.sum())
        assert row.dead_nodes == (~(fed[number + 1] & wanted[number + 1])).sum()
        assert row.live_params == live.sum() + wanted[number + 1].sum()


def test_transposed_and_grouped_convolutions_lose_their_dead_channels() -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 1, bias=False), nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False), nn.Conv1d(6, 1, 1)
    )
    with torch.no_grad():
        model[2].weight[:, 0] = 0  # the first output of the first group
        model[0].weight[3] = 0  # the second input of the second group
    counted = profile(model, (2, 5))
    assert [row.live_edges for row in counted.rows] == [6, 2 * 2 * 3 + 1 * 3 * 3, 5]
    assert [row.edges for row in counted.rows] == [6, 36, 5]


def test_untraceable_models_count_as_alive() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if x.detach().min() > 0.25:  # as no random image is
                raise RuntimeError("only real images")
            return self.last(self.first(x).detach())

    odd = Odd()
    with torch.no_grad():
        odd.last.weight.zero_()
    counted = profile(odd, (4,))
    assert counted.notes == (
        "dead channels could not be traced through the model (only real images), so nothing counts as dead.",
    )
    assert (counted.live_mult_adds, counted.mult_adds) == (16, 16)


def test_token_ids_through_an_embedding() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.one, self.two = nn.Embedding(10, 4), nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(F.gelu(self.one(self.table(x))))

    words = Words()
    with torch.no_grad():
        words.two.weight[:, 0] = 0
    counted = profile(words, torch.tensor([[1, 2, 3]]))
    assert (counted.params, counted.mult_adds) == (40 + 15 + 4 + 2, 3 * (12 + 4))
    assert counted.row("one").live_mult_adds == 3 * 8


# ---- MobileNetV1-DNW ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [False, True])
def test_mobilenet_by_the_papers_rule(small: bool) -> None:
    model = models.get("mobilenetv1_dnw", rule="dnw", width=0.225, classes=100, image_size=224, small=small)
    counted = profile(model)
    sides = (112, 56, 28, 14, 7)
    expected = np.zeros(2, int)
    for number, (stage, side) in enumerate(zip(STAGES, sides, strict=True)):
        targets, sources = model.stages[number].real_edges()
        k, senders = edges_of_width(stage, 0.225), len(set(sources.tolist()))
        assert len(targets) == k
        row = counted.row(f"stages.{number}")
        assert (row.params, row.mult_adds) == (k + 9 * senders, (k + 9 * senders) * side**2)
        nodes = stage.before + stage.channels * stage.blocks
        assert (row.nodes, row.without_output) == (nodes, nodes - stage.channels - senders)
        expected += (row.params, row.mult_adds)
    first = len(set(model.stages[0].real_edges()[1].tolist()))
    read = set((model.stages[4].real_edges()[0] - 512 - 1024)[model.stages[4].real_edges()[0] >= 1536].tolist())
    columns = model.head.weight.detach()[:, sorted(read)]
    last = int(columns.count_nonzero())
    assert last == (100 * len(read) if not small else min(last, math.floor(0.225 * 102_400)))
    expected += (27 * first + last + 100 + 2048, 27 * first * 112**2 + last)
    assert (counted.params, counted.mult_adds) == tuple(expected)
    assert counted.live_mult_adds < counted.mult_adds < counted.dense_mult_adds
    assert counted.all_params == sum(p.numel() for p in model.parameters())


def test_mobilenet_without_its_dead_nodes_computes_the_same() -> None:
    networkx = pytest.importorskip("networkx")
    torch.manual_seed(1)
    model = models.get("mobilenetv1_dnw", rule="dnw", width=0.1, classes=10, small=True)
    wirings.finalize_(model)
    whole = networkx.DiGraph()  # all graphs, joined where the outputs of one are the inputs of the next
    for n, graph in enumerate(model.stages):
        targets, sources = (ends.tolist() for ends in graph.real_edges())
        whole.add_edges_from(((n, u), (n, v)) for u, v in zip(sources, targets, strict=True))
        if n:
            outputs = model.stages[n - 1].outputs.tolist()
            whole.add_edges_from(((n - 1, u), (n, v)) for v, u in enumerate(outputs))
    whole.add_edges_from(("image", (0, v)) for v in range(32))
    read = (model.head.weight != 0).any(0).nonzero().squeeze(1).tolist()
    whole.add_edges_from(((4, 512 + 1024 + v), "classes") for v in read)
    fed, wanted = networkx.descendants(whole, "image"), networkx.ancestors(whole, "classes")
    counted, x = profile(model), torch.randn(4, 3, 32, 32)
    before = model(x)
    assert before.std(0).max() > 0.1
    for n, graph in enumerate(model.stages):
        row = counted.row(f"stages.{n}")
        dead = [v for v in range(graph.nodes) if (n, v) not in fed or (n, v) not in wanted]
        assert row.dead_nodes == len(dead) > len(graph.dead_nodes())
        targets, sources = graph.edge_list()
        reaches = np.array([(n, v) in wanted for v in range(graph.nodes)])
        comes = np.array([(n, v) in fed for v in range(graph.nodes)])
        live = torch.from_numpy(comes[sources] & reaches[targets]) & (graph.weight != 0)
        assert row.live_edges == int(live.sum())
        with torch.no_grad():
            graph.weight.mul_(torch.from_numpy(reaches[targets]))
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mobilenetv1_dnw", {"rule": "dnw", "width": 0.15, "small": True}),
        ("mobilenetv1", {"rule": "dnw", "width": 0.25, "density": 0.1}),
        ("tiny_static", {"rule": "random", "edges": 3000}),
        ("densenet", {"rule": "dnw", "width": 0.5, "density": 0.03, "image_size": 64}),
    ],
)
def test_live_counts_match_compaction(name: str, settings: dict[str, Any]) -> None:
    from wirings.compaction.compact import compact

    model = models.get(name, classes=10, **settings).eval()
    counted = profile(model)
    assert counted.live_mult_adds < counted.mult_adds
    assert compact(model, torch.randn(1, *model.input_shape)).report.after.mult_adds == counted.live_mult_adds


# ---- its output, and that the model is unchanged -----------------------------------------------------------------


def test_notes_name_what_could_not_be_counted() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.scale = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))
            self.spare = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.matrix) * self.scale

    counted = profile(nn.Sequential(Bare()), (3,))
    assert counted.notes == (
        "0.spare was not called: its parameters are counted, but no multiply-adds.",
        "0.matrix: counted as parameters, but what they multiply is unknown.",
    )
    assert (counted.params, counted.mult_adds) == (12 + 4 + 6, 0)
    assert counted.notes[0] in str(counted)

    class Mixing(NodeFunction):
        def __init__(self, nodes: int) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.eye(4).expand(nodes, 4, 4).clone())

        def after(self, received: Tensor, time: float) -> Tensor:
            return torch.einsum("bnc,ncd->bnd", received, self.mix)

    counted = profile(StaticGraph([2, 3, 1], node=Mixing), (2, 4))
    assert len(counted.notes) == 3
    assert counted.params == 11 + 6 * 16
    last = StaticGraph([2, 3, 1], node=[None, None, lambda nodes: nn.Linear(4, 2)])
    counted = profile(last, (2, 4))
    assert (counted.mult_adds, counted.row("functions.2.module").mult_adds) == (11 * 4 + 8, 8)
    assert "in an unknown way (expected (4,), got (1, 1, 2))" in counted.notes[0]


def test_a_norm_inside_a_graph_is_left_out() -> None:
    graph = StaticGraph([2, 3, 1], node=nn.BatchNorm1d)
    counted = profile(graph, (2,))
    assert (counted.params, counted.all_params) == (11, 11 + sum(p.numel() for p in graph.functions.parameters()))


def test_model_is_unchanged() -> None:
    model = models.get("digits_static")
    model.graph.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = profile(model), profile(model)
    assert first == second
    assert torch.equal(torch.rand(3), expected)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_table_and_dict() -> None:
    counted = profile(Chain())
    lines = str(counted).splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert lines[0].endswith("params  live  mult-adds  live  edges  live  nodes  no output  dead")
    assert lines[3].split() == ["one", "StaticGraph", "50", "20", "800", "320", "5", "2", "8", "0", "5"]
    assert lines[8].split()[:2] == ["total", f"{counted.params:,}"]
    assert "others  norms and the like" in str(counted)
    assert "dense: " in lines[9]
    stored = counted.as_dict()
    assert json.loads(json.dumps(stored)) == stored
    assert stored["live_mult_adds"] == counted.live_mult_adds
    assert stored["rows"][1]["dead_nodes"] == 5
    assert str(profile(nn.ReLU(), (3,))).splitlines()[-1].split() == ["total", "0", "0", "0", "0"]
    assert "(model)" in str(profile(nn.Linear(2, 2), (2,)))


@dataclass
class Output:
    """An output like those of Hugging Face models."""

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


class Tagger(nn.Module):
    """Takes token ids and a mask by keyword; returns a dict or a dataclass."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.embed, self.dense, self.head = nn.Embedding(10, 4), nn.Linear(4, 6), nn.Linear(6, 3)
        self.output = output

    def forward(self, input_ids: Tensor, mask: Tensor) -> Any:
        hidden = self.dense(self.embed(input_ids)) * mask[..., None]
        return self.output(logits=self.head(hidden), hidden=(hidden,))


@pytest.mark.parametrize("output", [dict, Output])
def test_keyword_inputs_and_structured_outputs(output: Any) -> None:
    model, ids = Tagger(output), torch.randint(10, (2, 5))
    inputs = {"input_ids": ids, "mask": torch.ones(2, 5, dtype=torch.long)}
    counted = profile(model, inputs)
    assert counted.mult_adds == 2 * 5 * (4 * 6 + 6 * 3)
    assert counted.mult_adds == profile(model, (ids, inputs["mask"])).mult_adds
    with torch.no_grad():
        model.dense.weight[2:] = 0
        model.dense.bias[2:] = 0
    pruned = profile(model, inputs)
    assert pruned.notes == ()
    assert pruned.row("dense").dead_nodes == 4
    assert pruned.live_mult_adds == 2 * 5 * (2 * 4 + 2 * 3)


def test_a_batch_counts_in_full_and_a_shape_as_one_example() -> None:
    layer = nn.Linear(3, 2)
    assert profile(layer, torch.zeros(5, 3)).mult_adds == 5 * profile(layer, (3,)).mult_adds == 30


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: profile("model"), r"profile\(\) expects a torch.nn.Module, got str"),
        (lambda: profile(nn.Linear(2, 2)), "profile needs example_input for Linear: a tensor, a tuple of inputs"),
        (lambda: profile(nn.Linear(2, 2), (3,)), r"Linear failed on example_input of shape \(1, 3\): .*shapes cannot"),
        (lambda: profile(nn.Conv2d(3, 2, 1), (1, 3, 8, 8)), r"\(1, 1, 3, 8, 8\).*leave the batch dimension out"),
        (lambda: profile(nn.Embedding(9, 2), (4,)), "give token ids as a tensor"),
        (lambda: profile(nn.Linear(2, 2), 3), "example_input must be a tensor, .*without the batch.*got 3"),
        (lambda: profile(nn.Linear(2, 2), (0,)), r"got \(0,\)"),
        (lambda: profile(nn.Linear(2, 2), torch.zeros(9, 99)), r"failed on example_input of shape \(9, 99\): mat1"),
        (lambda: profile(nn.Linear(2, 2), {"x": torch.zeros(9, 2)}), r"of shape x=\(9, 2\): .*unexpected keyword"),
        (lambda: profile(models.get("mobilenetv1_dnw"), (3, 8, 8)), "at least 16 × 16 pixels"),
        (lambda: profile(nn.Linear(2, 2), "words"), "got str"),
    ],
)
def test_rejects_invalid_arguments(call: Any, message: str) -> None:
    with pytest.raises(WiringError, match=message) as caught:
        call()
    assert len(str(caught.value)) < 600
    assert "tensor([" not in str(caught.value)


def test_rejects_networks_without_classes() -> None:
    with pytest.raises(WiringError, match="classes must be at least 1, got 0"):
        open_network("table2/dnw", classes=0)


@pytest.mark.parametrize("called", ["model", "parent", "method"])
@pytest.mark.parametrize("rule", ["dnw", "soft_threshold"])
def test_layers_that_share_a_budget_are_ranked_once_a_call(
    rule: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.body.forward(x) if called == "method" else self.body(x)

    parent = Parent()
    wiring = wirings.wire_(parent.body, rule, density=0.3, share="global")
    wiring.masks()
    wiring.layers[0].weight.data.mul_(10)  # counts no version: what was ranked before is not used
    made, plain = [], shared.rank_together
    monkeypatch.setattr(shared, "rank_together", lambda *args: made.append(1) or plain(*args))
    rows = wirings.profile(parent.body if called == "model" else parent, torch.ones(1, 6)).rows
    assert len(made) == 1
    assert [row.params for row in rows] == [int(mask.sum()) for mask in wiring.masks().values()]
    wiring.layers[1].weight.data.mul_(100)
    real = parent.body[1].weight != 0  # type: ignore[operator]
    assert torch.equal(real, wiring.masks()["1.weight"]), "the ranking is no longer held"
