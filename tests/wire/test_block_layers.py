"""Wired layers in blocks skip those that are not real, with the same results as without: in Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from kernels import INTERPRETED, on_gpu, without_waiting
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import wirings
from wirings.wire.block_products import choose, operators
from wirings.wire.block_products.tiles import GradientTile, ProductTile

RULES = ["dnw", "soft_threshold", "random", "set", "rigl", "no_update", "sparse_momentum", "fine_tune",
         wirings.rules.TopKAST(reach=0.6), wirings.rules.DecayedGradient()]  # fmt: skip
needs_interpreter = pytest.mark.usefixtures("interpreter", "_kernels")


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles for all products, and no timings."""
    tiles = {"weights": GradientTile(2, tokens=32, split=2), "inputs": ProductTile(64), "forward none": ProductTile(64)}
    monkeypatch.setattr(operators, "measured", lambda product, *rest: tiles[product])


def wired(rule: Any, device: str = "cpu", **more: Any) -> tuple[nn.Module, wirings.Wiring]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).to(device)
    model[2].weight.data *= 1.3  # so that both layers have edges in one ranking
    return model, wirings.wire_(model, rule, **{"density": 0.3, "structure": "16x16", **more})


def without_kernels(model: nn.Module) -> nn.Module:
    """A copy of a wired model that computes dense layers with zeros."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if hasattr(module, "blocks"):
            module.blocks = None
    return plain


def results(model: Any, x: Tensor, parameters: Any) -> list[Tensor]:
    for parameter in parameters:
        parameter.grad = None
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in parameters)]  # type: ignore[list-item]


def check(model: nn.Module, x: Tensor, tolerance: float = 1e-5, run: Any = None) -> None:
    plain = without_kernels(model)
    found = results(run or model, x, list(model.parameters()))
    for a, b in zip(found, results(plain, x, list(plain.parameters())), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().amax()))


@needs_interpreter
@pytest.mark.parametrize("share", ["uniform", "global"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_has_the_results_of_the_dense_layer(rule: Any, share: str) -> None:
    model, wiring = wired(rule, share=share)
    if rule == "sparse_momentum":
        assert all(layer.edges.blocks is None for layer in wiring.layers)
        return
    assert all(layer.edges.blocks is not None for layer in wiring.layers)
    check(model, torch.randn(3, 50, 64))


@needs_interpreter
def test_a_checkpoint_with_more_blocks() -> None:
    """All blocks of a wiring that was loaded are used, even if they are more than the budget's."""
    model, _ = wired("random")
    other, more = wired("random", density=0.8)
    model.load_state_dict(other.state_dict())
    check(model, torch.randn(130, 64))
    torch.testing.assert_close(model(torch.ones(130, 64)), without_kernels(other)(torch.ones(130, 64)))
    assert more.layers[0].edges.k > 4


@needs_interpreter
def test_gradient_of_hallucinated_blocks_every_other_step() -> None:
    model, wiring = wired("dnw", gradient_every=2)
    for step in range(3):
        check(model, torch.randn(130, 64))
        weight = wiring.layers[0].weight
        real = wiring.layers[0].edges.real(weight)
        assert bool((weight.grad[~real] != 0).any()) == (step % 2 == 0)  # type: ignore[index]
        wiring.step()


@needs_interpreter
def test_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By layers that have enough tokens, and nowhere in exported models."""
    model, _ = wired("random")
    seen: list[str] = []
    for name in ("block_forward", "block_inputs", "block_weights"):
        function = getattr(operators, name)
        monkeypatch.setattr(operators, name, lambda *args, f=function: seen.append(f.__name__) or f(*args))
    results(model, torch.randn(130, 64), list(model.parameters()))
    assert seen == ["block_forward"] * 2 + ["block_inputs", "block_weights"] * 2
    seen.clear()
    model(torch.randn(100, 64))  # too few tokens
    with torch.no_grad():
        torch.func.functional_call(model, dict(model.named_parameters()), torch.randn(130, 64))
    torch.export.export(model, (torch.randn(130, 64),))
    assert seen == ["block_forward"] * 2  # of functional_call


@needs_interpreter
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    torch._dynamo.reset()
    model, _ = wired("soft_threshold")
    x, used = torch.randn(130, 64), torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return used(x)

    plain, tensors = without_kernels(model), list(model.parameters())
    found = results(run, x, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(plain, x, list(plain.parameters()))
    assert found[0].dtype == torch.bfloat16
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * float(b.abs().amax()))


@needs_interpreter
@pytest.mark.parametrize("rule", ["dnw", "set", "rigl"])
def test_compiled(rule: str) -> None:
    torch._dynamo.reset()
    names: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def note(graph: Any, inputs: Any) -> Any:
            names.extend(str(node.target) for node in graph.graph.nodes if "wirings.block" in str(node.target))
            return make_boxed_func(graph)

        return aot_autograd(fw_compiler=note, bw_compiler=note)(graph, inputs)

    model, wiring = wired(rule, **({"gradient_every": 2} if rule == "dnw" else {}))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        check(model, torch.randn(130, 64), run=compiled)
        if rule == "dnw":
            wiring.step()
    kinds = {name.split(".")[1] for name in names}
    assert kinds == {"block_lists", "block_forward", "block_inputs", "block_weights"}


@needs_interpreter
def test_second_derivatives() -> None:
    model, _ = wired("random")
    plain = without_kernels(model)
    found = []
    for net in (model, plain):
        x = torch.linspace(-1, 1, 130 * 64).view(130, 64).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        slope.square().mean().backward()
        found.append([x.grad, *(p.grad for p in net.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().amax()))


def test_blocks_without_kernels() -> None:
    """Layers whose blocks have other shapes, or change in number, stay dense."""
    others: list[dict[str, Any]] = [{"structure": text} for text in ("8x8", "16x32", "row", "column")]
    others += [{"structure": "2:4", "density": None}, {"density": wirings.LinearSchedule(1.0, 0.3, 10)}]
    for more in others:
        _, wiring = wired("dnw", **more)
        assert all(layer.edges.blocks is None for layer in wiring.layers)
    _, wiring = wired("gmp")
    assert wiring.layers[0].edges.blocks is None


@pytest.mark.skipif(INTERPRETED, reason="the interpreter stands in for a GPU")
def test_a_cpu_computes_dense_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = wired("dnw")
    monkeypatch.setattr(operators, "block_forward", None)
    x = torch.randn(130, 64)
    assert torch.equal(model(x), without_kernels(model)(x))


@on_gpu
@pytest.mark.parametrize("rule", ["dnw", "random", "rigl", wirings.rules.TopKAST(reach=0.3)], ids=str)
def test_on_a_gpu(rule: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).cuda()
    wirings.wire_(model, rule, density=0.1, structure="64x64")
    x = torch.randn(4096, 1024, device="cuda")
    choose._found.clear()

    def run(net: nn.Module) -> list[Tensor]:
        def call(x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return net(x)

        return results(call, x, list(net.parameters()))

    plain = without_kernels(model)
    for a, b in zip(run(model), run(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * float(b.abs().amax()))
    print({key[0]: found for key, found in choose._found.items()})
    assert any(found.tile for found in choose._found.values())
    with without_waiting():
        run(model)
    compiled = torch.compile(model)
    for a, b in zip(run(compiled), run(plain), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * float(b.abs().amax()))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(model)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run(model)
    graph.replay()
    for a, b in zip(captured, run(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * float(b.abs().amax()))
