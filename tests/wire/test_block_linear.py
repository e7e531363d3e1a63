"""Products that skip zero blocks match the masked dense layer: on a CPU, in Triton's interpreter, and on a GPU."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import INTERPRETED, on_gpu, without_waiting
from torch import Tensor, nn

from wirings import WiringError
from wirings.wire.block_products import choose, operators
from wirings.wire.block_products.choose import DENSE, LayerTiles, default_products
from wirings.wire.block_products.layout import BlockLayout
from wirings.wire.block_products.linear import BlockLinear, block_linear, supports
from wirings.wire.block_products.operators import block_lists
from wirings.wire.block_products.tiles import GRADIENTS, PRODUCTS, GradientTile, ProductTile

SMALL = LayerTiles(ProductTile(16, step=2), ProductTile(16), GradientTile(2, tokens=16, split=2))
OTHER = LayerTiles(ProductTile(32), ProductTile(16, step=4), GradientTile(4, tokens=32, split=1))
MASKS = {
    "some": [[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1], [1, 0, 1, 1, 0, 0]],
    "one": [[0] * 6, [0] * 6, [0, 0, 0, 0, 1, 0], [0] * 6],
    "all": [[1] * 6] * 4,
    "none": [[0] * 6] * 4,
}


def layer(mask: Any, block: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, BlockLayout]:
    layout = BlockLayout(torch.as_tensor(mask).bool().to(device), block)
    weight = torch.randn(layout.shape, device=device) / layout.shape[1] ** 0.5
    return torch.where(layout.spread(), weight, 0).to(dtype), layout


def gradients(run: Any, *tensors: Tensor, rounded: torch.dtype | None = None) -> list[Tensor]:
    """Outputs and gradients; that of the outputs is exact in the precision of the tensors, or in the one given."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = run(*leaves)
    grad = torch.linspace(-1, 1, out.numel()).to(rounded or out.dtype).to(out).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def reference(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None) -> Tensor:
    out = F.linear(x, weight, bias)
    return F.gelu(out, approximate="tanh" if activation == "gelu_tanh" else "none") if activation else out


def check(x: Tensor, weight: Tensor, layout: BlockLayout, activation: str | None, gradient: str, **more: Any) -> None:
    """Compare outputs and all gradients with those of the masked dense layer in double precision."""
    bias = torch.randn(len(weight), device=x.device).to(x.dtype)
    options = {"activation": activation, "gradient": gradient, **more}
    ours = gradients(lambda x, w, b: block_linear(x, w, layout, b, **options), x, weight, bias)
    exact = gradients(lambda x, w, b: reference(x, w, b, activation), x.double(), weight.double(), bias.double(),
                      rounded=x.dtype)  # fmt: skip
    if gradient == "real":
        exact[2] = torch.where(layout.spread(), exact[2], 0)
        assert not ours[2][~layout.spread()].any()
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == x.dtype
        tolerance = 2e-5 if x.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.abs().amax() + 1e-6))


@pytest.mark.parametrize("gradient", ["real", "dense"])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("mask", MASKS)
def test_dense_fallback(mask: str, activation: str | None, gradient: str) -> None:
    weight, layout = layer(MASKS[mask], 16)
    check(torch.randn(2, 5, 96), weight, layout, activation, gradient, products=DENSE)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("products", [SMALL, OTHER])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh"])
@pytest.mark.parametrize("mask", MASKS)
def test_kernels(mask: str, activation: str | None, products: LayerTiles) -> None:
    """Empty rows and columns, and tokens that are no multiple of a tile."""
    weight, layout = layer(MASKS[mask], 16)
    x = torch.randn(3, 15, 96)
    assert supports(x, weight, layout) == (mask != "none")
    check(x, weight, layout, activation, "real", products=products)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("seed", range(6))
def test_random_layers(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    block = (16, 32, 64)[seed % 3]
    rows, columns, tokens = (int(torch.randint(1, 5, (), generator=generator)) for _ in range(3))
    weight, layout = layer(torch.rand(2 * rows, 2 * columns, generator=generator) < 0.4, block)
    x = torch.randn(tokens * 13, 2 * columns * block)
    for products in (
        SMALL,
        OTHER,
        LayerTiles(SMALL.forward, None, OTHER.weights),
        LayerTiles(None, OTHER.inputs, None),
    ):
        check(x, weight, layout, None, "real", products=products)
    check(x, weight, layout, "gelu", "dense", products=SMALL)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("block", [16, 32])
def test_all_tiles(block: int) -> None:
    """Tiles as they are used on a GPU, on layers smaller than a tile."""
    weight, layout = layer(MASKS["some"], block)
    x = torch.randn(70, weight.shape[1])
    for tile in PRODUCTS[block]:
        check(x, weight, layout, None, "real", products=LayerTiles(tile, tile, None))
    for gradient in GRADIENTS[block]:
        check(x, weight, layout, None, "real", products=LayerTiles(None, None, gradient))


@pytest.mark.usefixtures("interpreter")
def test_values_that_are_not_finite_stay_in_their_blocks() -> None:
    """A step that has fewer blocks than places must not multiply anything by zero."""
    weight, layout = layer([[0, 1, 0], [0, 0, 1]], 16)
    x = torch.randn(20, 48)
    x[:, :16] = float("nan")  # no block reads these inputs
    out = block_linear(x, weight, layout, products=SMALL)
    torch.testing.assert_close(out, F.linear(x[:, 16:], weight[:, 16:]))


@pytest.mark.usefixtures("interpreter")
def test_gelu_of_large_and_small_sums() -> None:
    layout = BlockLayout(torch.ones(1, 1, dtype=torch.bool), 16)
    x = torch.cat([torch.linspace(-9, 9, 300), torch.tensor([0.0, 1e-30, -1e-3, 1e3])])
    inputs = torch.zeros(len(x), 16)
    inputs[:, 0] = x
    weight = torch.zeros(16, 16)
    weight[0, 0] = 1
    for activation, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        out = block_linear(inputs, weight, layout, None, activation, products=SMALL)[:, 0]
        torch.testing.assert_close(out, F.gelu(x, approximate=approximate), rtol=1e-6, atol=2e-6)


@pytest.mark.usefixtures("interpreter")
def test_gradients_that_are_not_needed() -> None:
    weight, layout = layer(MASKS["some"], 16)
    x = torch.randn(20, 96, requires_grad=True)
    block_linear(x, weight, layout, products=SMALL).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(20, -1))
    with torch.no_grad():
        out = block_linear(x, weight, layout, None, "gelu", products=SMALL)
    torch.testing.assert_close(out, F.gelu(F.linear(x, weight)).detach())


def test_defaults_fall_back_to_dense() -> None:
    weight, layout = layer(MASKS["some"], 16)
    if not INTERPRETED:
        assert not supports(torch.randn(4, 96), weight, layout)
    x = torch.randn(4, 96)
    assert torch.equal(block_linear(x, weight, layout), F.linear(x, weight))


def test_autocast() -> None:
    weight, layout = layer(MASKS["some"], 16)
    x = torch.randn(4, 96)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = block_linear(x, weight, layout, torch.randn(64)), F.linear(x, weight)
    assert out.dtype == expected.dtype == torch.bfloat16
    linear = nn.Linear(96, 64)
    linear.weight.data = weight
    leaves = [linear.weight, linear.bias]
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(block_linear(x, linear.weight, layout, linear.bias).sum(), leaves)
        dense = torch.autograd.grad(linear(x).sum(), leaves)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], dense[0] * layout.spread(), rtol=1e-2, atol=1e-2)


def test_module() -> None:
    weight, layout = layer(MASKS["some"], 16)
    linear = nn.Linear(96, 64)
    linear.weight.data = weight
    module = BlockLinear(linear, 16, "gelu")
    x = torch.randn(2, 3, 96)
    torch.testing.assert_close(module(x), F.gelu(linear(x)))
    assert list(module.state_dict()) == ["weight", "bias"]
    assert str(module) == "BlockLinear(BlockLayout(9 of 24 blocks of 16 x 16), activation='gelu')"
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))
    copied = copy.deepcopy(module).to("meta")
    assert copied.layout.mask.device.type == "meta"
    assert torch.equal(module.layout.mask, layout.mask)


@pytest.mark.usefixtures("interpreter")
def test_blocks_are_found_again_when_the_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "measured", lambda *_: SMALL.forward)
    linear = nn.Linear(96, 64)
    linear.weight.data = layer(MASKS["one"], 16)[0]
    module, x = BlockLinear(linear, 16), torch.randn(128, 96)

    def check_outputs() -> None:
        torch.testing.assert_close(module(x), F.linear(x, module.weight, module.bias), rtol=1e-4, atol=1e-5)

    with torch.inference_mode():
        module.weight[:16, :16] = 1
        check_outputs()
    assert module.blocks == 2
    mask = module.block_mask
    check_outputs()  # with gradients, too
    assert module.block_mask is mask
    with torch.no_grad():
        module.weight.add_(1)
    check_outputs()
    module.weight.data = layer(MASKS["some"], 16)[0]
    check_outputs()
    del module.weight
    module.weight = nn.Parameter(layer(MASKS["all"], 16)[0])
    check_outputs()
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.zero_()
    assert not (copied(x) - copied.bias).any()


def test_blocks_are_counted_again_on_any_device() -> None:
    linear = nn.Linear(96, 64)
    linear.weight.data = layer(MASKS["one"], 16)[0]
    module, x = BlockLinear(linear, 16), torch.randn(4, 96)
    with torch.no_grad():
        module.weight.copy_(layer(MASKS["some"], 16)[0])
    module(x).sum().backward()
    assert module.blocks == 9
    assert torch.equal(module.weight.grad != 0, module.layout.spread())
    assert module.to("meta")(x.to("meta")).shape == (4, 64)


def test_transforms_are_dense(request: pytest.FixtureRequest) -> None:
    if INTERPRETED:
        request.getfixturevalue("interpreter")
    weight, layout = layer(MASKS["some"], 16)
    linear = nn.Linear(96, 64)
    linear.weight.data = weight
    module, x = BlockLinear(linear, 16, "gelu"), torch.randn(2, 130, 96)
    torch.testing.assert_close(torch.func.vmap(module)(x), F.gelu(linear(x)))

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x,)).square().sum()

    def dense(weight: Tensor, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, linear.bias)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    expected = torch.func.vmap(torch.func.grad(dense), (None, 0))(weight, x)
    torch.testing.assert_close(found, expected * layout.spread(), rtol=1e-4, atol=1e-4)
    total = torch.func.grad(lambda w: torch.func.vmap(loss, (None, 0))(w, x).sum())(weight)
    torch.testing.assert_close(total, expected.sum(0) * layout.spread(), rtol=1e-4, atol=1e-4)


def test_no_mask_is_made_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, layout = layer(MASKS["some"], 16)
    x = torch.randn(1, 96)
    monkeypatch.setattr(BlockLayout, "spread", lambda _: pytest.fail("made a mask"))
    assert torch.equal(block_linear(x, weight, layout), F.linear(x, weight))
    with torch.no_grad():
        weight.requires_grad_()
        assert torch.equal(block_linear(x, weight, layout), F.linear(x, weight))


def check_compiled(products: LayerTiles) -> None:
    weight, layout = layer(MASKS["some"], 16)
    x = torch.randn(40, 96)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return block_linear(x, w, layout, None, "gelu", products=products)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled, x, weight), gradients(run, x, weight), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_fallback() -> None:
    check_compiled(DENSE)


@pytest.mark.usefixtures("interpreter")
def test_compiled_kernels() -> None:
    check_compiled(SMALL)


@pytest.mark.usefixtures("interpreter")
def test_operators() -> None:
    """The operators that compiled calls use: schemas and fake tensors agree with what is computed."""
    weight, layout = layer(MASKS["some"], 16)
    x = torch.randn(20, 96)
    lists = block_lists(layout.mask, layout.blocks + 1)
    calls: dict[Any, tuple[Any, ...]] = {
        torch.ops.wirings.block_lists: (layout.mask, layout.blocks),
        torch.ops.wirings.block_forward: (x, weight, None, lists, 16, 0.4, [16, 1, 4, 2], "gelu", True),
        torch.ops.wirings.block_inputs: (torch.randn(20, 64), weight, lists, 16, 0.4, [0]),
        torch.ops.wirings.block_weights: (torch.randn(20, 64), x, lists, 16, 0.4, [2, 16, 2, 4, 2]),
    }
    for operator, arguments in calls.items():
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_fastest_product_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake timings."""
    times = {"dense": 1.0, "a": 0.5, "b": 0.4}
    monkeypatch.setattr(choose, "milliseconds", lambda run: times[run()])
    tiles = {name: lambda name=name: name for name in ("a", "b")}
    assert choose.fastest(lambda: "dense", tiles) == ("b", 1.0, 0.4)
    times["dense"] = 0.4
    assert choose.fastest(lambda: "dense", tiles) == (None, 0.4, 0.4)


def test_similar_layers_are_measured_once() -> None:
    def key(tokens: int, density: float) -> tuple[Any, ...]:
        return choose._key("inputs", torch.device("cpu"), torch.bfloat16, (tokens, 64, 96, 16), density)

    assert key(4096, 0.1) == key(4000, 0.095)
    assert len({key(4096, 0.1), key(8192, 0.1), key(4096, 0.2)}) == 3


def test_the_gradient_of_a_superset() -> None:
    weight, layout = layer(MASKS["some"], 16)
    more = BlockLayout(layout.mask | torch.eye(4, 6).bool(), 16)
    x = torch.randn(20, 96)
    expected = gradients(F.linear, x, weight)
    for products in (None, SMALL if INTERPRETED else None, LayerTiles(SMALL.forward, None, None)):
        found = gradients(lambda x, w, p=products: block_linear(x, w, layout, gradient=more, products=p), x, weight)
        torch.testing.assert_close(found[1], expected[1])
        torch.testing.assert_close(found[2], expected[2] * more.spread())


def test_rejects_arguments_that_do_not_fit() -> None:
    weight, layout = layer(MASKS["some"], 16)
    with pytest.raises(WiringError, match=r"weight of shape \(64, 96\) and inputs of 96 features"):
        block_linear(torch.randn(4, 64), weight, layout)
    with pytest.raises(WiringError, match="expects an activation of"):
        block_linear(torch.randn(4, 96), weight, layout, activation="relu")
    with pytest.raises(WiringError, match="gradient= of"):
        block_linear(torch.randn(4, 96), weight, layout, gradient="all")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_on_a_gpu(block: int, dtype: torch.dtype) -> None:
    """All tiles, on a layer with more programs than multiprocessors."""
    weight, layout = layer(torch.rand(1024 // block, 1536 // block) < 0.2, block, dtype, "cuda")
    x = torch.randn(3, 1111, 1536, device="cuda", dtype=dtype)
    for tile in PRODUCTS[block]:
        check(x, weight, layout, "gelu", "real", products=LayerTiles(tile, tile, None))
    for gradient in GRADIENTS[block]:
        check(x, weight, layout, None, "real", products=LayerTiles(None, None, gradient))
    check(x, weight, layout, "gelu_tanh", "dense")


@on_gpu
def test_never_waits_for_the_gpu() -> None:
    weight, layout = layer(torch.rand(32, 32) < 0.2, 32, torch.bfloat16, "cuda")
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight.requires_grad_()
    block_linear(x, weight, layout).sum().backward()  # measures
    with without_waiting():
        again = BlockLayout.of_weight(weight, 32, layout.blocks)
        block_linear(x, weight, again).sum().backward()


@on_gpu
def test_compiled_on_a_gpu() -> None:
    weight, layout = layer(torch.rand(32, 32) < 0.2, 32, torch.bfloat16, "cuda")
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return block_linear(x, w, layout, None, "gelu", products=default_products(32))

    for a, b in zip(gradients(torch.compile(run, fullgraph=True), x, weight), gradients(run, x, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@on_gpu
def test_choice_on_a_gpu() -> None:
    weight, layout = layer(torch.rand(64, 64) < 0.1, 64, torch.bfloat16, "cuda")
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    choose._found.clear()
    check(x, weight, layout, None, "real")
    print(choose._found)
    assert {key[0] for key in choose._found} == {"forward none", "inputs", "weights"}
    with without_waiting():
        block_linear(x, weight, layout)
