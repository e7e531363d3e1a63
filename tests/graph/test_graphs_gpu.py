"""Graphs on a GPU: the same numbers as on a CPU, whole steps captured in a CUDA graph and compiled."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wirings import Dag, DiscreteGraph, StaticGraph, models
from wirings.graph import ActivationNode, ConvNode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = [name for name in models.names() if name.startswith("tiny")]
TINY = {name: {"rtol": 1e-5, "atol": 1e-5} if name == "tiny_continuous" else {} for name in NAMES}
GRAPHS = {
    "dag": (lambda: StaticGraph(topology=Dag(80, inputs=4), outputs=5, edges=800, node=ActivationNode("tanh")), (6, 4)),
    "sparse": (
        lambda: DiscreteGraph(
            topology=torch.rand(200, 200, generator=torch.Generator().manual_seed(0)) < 0.03,
            inputs=9, outputs=50, steps=3, edges=0.5, node=ActivationNode("tanh", bias=True),
        ),
        (6, 9),
    ),
    "stride": (lambda: StaticGraph([4, 8, 3], edges=40, node=[ConvNode(stride=2), ConvNode(), None]), (2, 4, 8, 8)),
    "blocks": (lambda: StaticGraph([4, 8, 8, 4], edges=0.4, structure="2x4", node=ActivationNode("tanh")), (6, 4)),
    "rows": (
        lambda: StaticGraph(
            topology=Dag(80, inputs=4), outputs=40, edges=0.4, structure="row", node=ActivationNode("tanh")
        ),
        (6, 4),
    ),
    "2:4": (lambda: StaticGraph([4, 8, 8, 4], structure="2:4", node=ActivationNode("tanh")), (6, 4)),
    "large maps": (lambda: StaticGraph([4, 8, 3], edges=40, node=ConvNode()), (2, 4, 20, 20)),
}  # fmt: skip


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    y = model(x)
    y.square().sum().backward()
    return y.detach().cpu(), [p.grad.cpu() for p in model.parameters()]


def compare(model: nn.Module, x: Tensor) -> None:
    """Compare a GPU with the CPU in float32 without TF32, and gradients of both with float64."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        exact, exact_grads = gradients(copy.deepcopy(model).double(), x.double())
        y, grads = gradients(copy.deepcopy(model).cuda(), x.cuda())
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert torch.allclose(y.double(), exact, rtol=1e-3, atol=1e-4)
    for a, b in zip(grads, exact_grads, strict=True):
        assert (a.double() - b).norm() <= 1e-3 * b.norm() + 1e-5


@pytest.mark.parametrize("name", TINY)
def test_tiny_classifiers_match_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    compare(models.get(name, rule="dnw", **TINY[name]), torch.randn(6, 3, 32, 32))


@pytest.mark.parametrize("kind", GRAPHS)
def test_other_graphs_match_the_cpu(kind: str) -> None:
    torch.manual_seed(0)
    build, shape = GRAPHS[kind]
    compare(build(), torch.randn(shape))


@pytest.mark.parametrize(
    ("name", "structure"),
    [("tiny_static", "free"), ("tiny_discrete", "free"), ("tiny_static", "4x32"), ("tiny_discrete", "column")],
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_whole_training_step_can_be_captured(name: str, structure: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model = models.get(name, rule="dnw", structure=structure).cuda()
    twin = copy.deepcopy(model)
    x, y = torch.randn(16, 3, 32, 32, device="cuda"), torch.randint(10, (16,), device="cuda")

    def stepper(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
        used = torch.compile(model) if compiled else model

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(used(x), y).backward()
            optimizer.step()

        return optimizer, step

    (other, eager), (optimizer, captured) = stepper(twin), stepper(model)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            captured()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    for _ in range(4):
        # One step from the same state: after a few, these networks amplify differences of rounding beyond any bound.
        before = {name: value.clone() for name, value in model.state_dict().items()}
        twin.load_state_dict(before)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which copies no tensors itself
        graph.replay()
        eager()
        for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            difference, change = (a - b).float().norm(), (a - before[name]).float().norm()
            assert difference <= 0.02 * change + 1e-6 * b.float().norm(), name
    assert int(model.graph.real().sum()) == 32_000


def test_half_precision_follows_full_precision() -> None:
    torch.manual_seed(0)
    for name in NAMES:
        model = models.get(name, rule="dnw").cuda().eval()
        x = torch.randn(8, 3, 32, 32, device="cuda")
        with torch.no_grad():
            full = model(x)
            for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
                with torch.autocast("cuda", dtype):
                    half = model(x)
                assert (half.float() - full).abs().max() < tolerance * full.abs().max(), (name, dtype)
