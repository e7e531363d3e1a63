"""MobileNetV1-DNW and MobileNetV1: what they compute, how many edges they have, what they reject."""

from typing import Any

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError, models
from wirings.graph import ConvNode, StaticGraph, ends
from wirings.graph.nodes import conv
from wirings.models import NetworkSize
from wirings.models.mobilenet import STAGES, MobileNetV1, MobileNetV1DNW, edges_of_width


def plain_stack(network: MobileNetV1DNW) -> nn.Sequential:
    """Return depthwise and pointwise convolutions of the same sizes, without a norm and a ReLU in between."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False)]
    for stage in STAGES:
        before = stage.before
        for block in range(stage.blocks):
            stride = stage.stride if block == 0 else 1
            layers += [
                nn.BatchNorm2d(before),
                nn.ReLU(),
                nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False),
                nn.Conv2d(before, stage.channels, 1, bias=False),
            ]
            before = stage.channels
    return nn.Sequential(
        *layers, nn.BatchNorm2d(1024), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10)
    )


@torch.no_grad()
def copy_across(network: MobileNetV1DNW, stack: nn.Sequential) -> None:
    own = iter(module for module in stack if list(module.parameters()))
    next(own).load_state_dict(network.stem.state_dict())
    for graph, stage in zip(network.stages, STAGES, strict=True):
        assert isinstance(graph, StaticGraph)
        matrix, start = graph.matrix(), 0
        for block in range(stage.blocks):
            function: Any = graph.functions[block]
            norm, depthwise, pointwise = next(own), next(own), next(own)
            norm.weight.copy_(function.norm_weight)
            norm.bias.copy_(function.norm_bias)
            depthwise.weight.copy_(function.kernel)
            before = stage.before if block == 0 else stage.channels
            stop = start + before
            pointwise.weight.copy_(matrix[stop : stop + stage.channels, start:stop, None, None])
            start = stop
    next(own).load_state_dict(network.norm.state_dict())
    next(own).load_state_dict(network.head.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_edges_to_the_next_block_alone_make_a_plain_stack(training: bool) -> None:
    torch.manual_seed(0)
    network = models.get("mobilenetv1_dnw", reach=1)
    assert isinstance(network, MobileNetV1DNW)
    for name, parameter in network.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    network.double()  # in float32 the sign of a ReLU's input near zero depends on the order of summation
    stack = plain_stack(network).double()
    copy_across(network, stack)
    images = torch.randn(4, 3, 32, 32).double()
    for _ in range(2):  # so that running statistics differ from their initial values
        network(images), stack(images)
    network.train(training), stack.train(training)
    ours, theirs = network(images), stack(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    first: Any = stack[0]
    scale = first.weight.grad.abs().max()
    torch.testing.assert_close(network.stem.weight.grad / scale, first.weight.grad / scale, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("rule", ["dnw", "random", "no_update"])
def test_number_of_edges_follows_from_the_width(rule: str) -> None:
    model = models.get("mobilenetv1_dnw", rule=rule, width=0.225)
    # 0.225² of 2,048; 24,576; 98,304; 1,441,792; 1,572,864: MobileNetV1's pointwise weights by resolution
    assert [report.edges for report in model.wiring.look()] == [103, 1244, 4976, 72990, 79626]
    assert [report.possible for report in model.wiring.look()] == [
        64 * 32,
        128 * 64 + 128 * (64 + 128),
        256 * 128 + 256 * (128 + 256),
        512 * sum(256 + 512 * j for j in range(6)),
        1024 * 512 + 1024 * (512 + 1024),
    ]


def test_full_width_has_the_edges_of_mobilenetv1() -> None:
    plain = models.get("mobilenetv1", width=1.0)
    pointwise = [m.weight.numel() for m in plain.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
    assert sum(edges_of_width(stage, 1.0) for stage in STAGES) == sum(pointwise) == 3_139_584


def test_small_wires_the_classifier() -> None:
    model = models.get("mobilenetv1_dnw", rule="dnw", width=0.15, small=True, classes=1000, image_size=224)
    reports = model.wiring.look()
    assert reports[-1].name == "head.weight"
    assert reports[-1].edges == 153_600  # 15 % of 1,024 × 1,000
    assert models.get("mobilenetv1_dnw", rule="dnw").wiring.look()[-1].name == "stages.4.weight"


@pytest.mark.parametrize(("size", "stride", "last"), [(32, 1, 2), (64, 1, 4), (96, 2, 3), (224, 2, 7)])
@pytest.mark.parametrize("name", ["mobilenetv1_dnw", "mobilenetv1"])
def test_stems_and_resolutions(name: str, size: int, stride: int, last: int) -> None:
    model = models.get(name, image_size=size, classes=7, width=0.25)
    assert model.input_shape == (3, size, size)
    seen: list[tuple[int, ...]] = []
    body = model.stages if isinstance(model, MobileNetV1DNW) else model.features
    body.register_forward_hook(lambda _m, _x, y: seen.append(tuple(y.shape)))
    assert model.eval()(torch.zeros(1, 3, size, size)).shape == (1, 7)
    assert seen[0][2:] == (last, last)
    first = model.stem if isinstance(model, MobileNetV1DNW) else model.features[0]
    assert first.stride == (stride, stride)


def test_initial_weights_have_one_bound_for_each_graph() -> None:
    torch.manual_seed(0)
    model = models.get("mobilenetv1_dnw")
    for graph, stage in zip(model.stages, STAGES, strict=True):
        bound = (stage.before + stage.channels * (stage.blocks - 1)) ** -0.5
        assert 0.99 * bound < graph.weight.abs().max() <= bound


def test_every_rule_trains_and_finalizes() -> None:
    torch.manual_seed(0)
    model = models.get("mobilenetv1_dnw", rule="dnw", width=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        model.wiring.step(optimizer)
    hallucinated = ~model.wiring.masks()["stages.3.weight"]
    assert model.stages[3].all_weights().grad[hallucinated].abs().sum() > 0
    expected = model.eval()(images)
    wirings.finalize_(model)
    torch.testing.assert_close(model(images), expected)
    assert torch.count_nonzero(model.stages[3].weight) == edges_of_width(STAGES[3], 0.1)


def test_dense_has_no_budget_and_all_edges() -> None:
    model = models.get("mobilenetv1_dnw", rule="dense")
    assert [r.density for r in model.wiring.look()] == [1.0] * 5


def test_mobilenetv1_can_be_wired() -> None:
    assert models.get("mobilenetv1", rule="dense", width=0.25).wiring is None
    model = models.get("mobilenetv1", rule="dnw", width=0.25, density=0.2)
    names = [report.name for report in model.wiring.look()]
    assert "features.0.weight" not in names
    assert "head.weight" not in names
    assert len(names) == 26


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.get("mobilenetv1_dnw", rule="dnw", width=1.5), "stages.0, which allows 2,048"),
        (lambda: models.get("mobilenetv1_dnw", rule="dnw", width=0.0), "width must be above 0"),
        (lambda: models.get("mobilenetv1_dnw", image_size=8), "image_size = 8 is too small"),
        (lambda: models.get("mobilenetv1", width=0.01), "at least one of 32 channels"),
        (lambda: models.get("mobilenetv1", rule="dnw", width=0.25), "needs a budget"),
        (lambda: MobileNetV1(NetworkSize(image_size=32))(torch.zeros(1, 3, 8, 8)), "at least 16 × 16 pixels"),
        (lambda: MobileNetV1DNW(image_size=96)(torch.zeros(1, 3, 31, 40)), "at least 32 × 32 pixels"),
        (lambda: MobileNetV1DNW()(torch.zeros(3, 32, 32)), r"got \(3, 32, 32\)"),
    ],
)
def test_rejects_bad_arguments(make: Any, words: str) -> None:
    with pytest.raises(WiringError, match=words):
        make()


def test_own_kernels_serve_half_precision_alone() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    model = models.get("mobilenetv1_dnw", rule="dnw")
    serves = {dtype: model.runs_in_own_kernels(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert serves == {torch.float32: False, torch.bfloat16: True, torch.float16: True}
    model.stem.register_forward_hook(lambda *_: None)
    assert not model.runs_in_own_kernels(torch.bfloat16)


def test_no_own_kernels_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ends, conv):
        monkeypatch.setattr(module, "_TRITON", False)
    assert not models.get("mobilenetv1_dnw").runs_in_own_kernels(torch.bfloat16)


def test_other_nodes_have_no_kernels_for_blocks() -> None:
    node = ConvNode(norm="batch", activation="tanh")
    assert not StaticGraph([4, 8, 3], edges=40, node=[node, node, None]).is_one_operation
