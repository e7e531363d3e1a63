"""The authors' checkpoints: made-up ones, compared with a reference of their forward pass written for this test."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from wirings import WiringError, compact
from wirings.models import authors

STAGES = [(32, 64, 1, 1), (64, 128, 2, 2), (128, 256, 2, 2), (256, 512, 2, 6), (512, 1024, 2, 2)]
"""Input channels, output channels, stride of the input nodes, number of blocks after the input."""
State = dict[str, Tensor]


def batch_norm(state: State, name: str, size: int) -> None:
    state[f"{name}.weight"], state[f"{name}.bias"] = 1 + 0.3 * torch.randn(size), 0.3 * torch.randn(size)
    state[f"{name}.running_mean"], state[f"{name}.running_var"] = 0.1 * torch.randn(size), torch.rand(size) * 0.1 + 0.05
    state[f"{name}.num_batches_tracked"] = torch.tensor(7)


def large(random: bool = False, small: bool = False, classes: int = 10) -> State:
    torch.manual_seed(0)
    state = {"conv1.weight": torch.randn(32, 3, 3, 3) * 0.2}
    for i, (before, out, _, blocks) in enumerate(STAGES):
        rows, columns = out * blocks, before + out * (blocks - 1)
        state[f"layers.{i}.downsample.0.weight"] = torch.randn(before, 1, 3, 3) * 0.3
        if blocks > 1:
            state[f"layers.{i}.conv.weight"] = torch.randn(out * (blocks - 1), 1, 3, 3) * 0.3
        for j in range(blocks):
            batch_norm(state, f"layers.{i}.norm.{j}", before if j == 0 else out)
        state[f"layers.{i}.graph.weight"] = torch.randn(rows, columns, 1, 1) * 0.2
        if random:
            state[f"layers.{i}.graph.mask"] = (torch.rand(rows, columns, 1, 1) < 0.05).float()
    batch_norm(state, "bn", 1024)
    if small:
        state["linear.graph.weight"] = torch.randn(classes, 1024, 1, 1) * 0.1
    else:
        state["linear.weight"], state["linear.bias"] = torch.randn(classes, 1024) * 0.1, torch.randn(classes)
    return state


def strongest(weight: Tensor, k: int) -> Tensor:
    """Return the weight with all but its k largest entries set to zero."""
    flat = weight.flatten()
    kept = torch.zeros_like(flat)
    places = flat.abs().topk(k).indices
    kept[places] = flat[places]
    return kept.view(weight.shape)


def run_large(state: State, x: Tensor, width: float) -> tuple[Tensor, list[int]]:
    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return F.batch_norm(x, mean, var, state[f"{name}.weight"], state[f"{name}.bias"]).relu()

    used = []
    x = F.conv2d(x, state["conv1.weight"], padding=1)
    for i, (before, out, stride, blocks) in enumerate(STAGES):
        weight, mask = state[f"layers.{i}.graph.weight"], state.get(f"layers.{i}.graph.mask")
        k = int(width**2 * out * (before + out * (blocks - 1)) + 1e-6)
        weight = strongest(weight, k) if mask is None else weight * mask
        kernel = state[f"layers.{i}.downsample.0.weight"]
        sent = [F.conv2d(norm(x, f"layers.{i}.norm.0"), kernel, stride=stride, padding=1, groups=before)]
        used.append(0)
        for block in range(blocks):
            part = weight[block * out : (block + 1) * out, : before + block * out]
            used[-1] += int(part.count_nonzero())
            x = F.conv2d(torch.cat(sent, 1), part)
            if block < blocks - 1:
                kernel = state[f"layers.{i}.conv.weight"][block * out : (block + 1) * out]
                sent.append(F.conv2d(norm(x, f"layers.{i}.norm.{block + 1}"), kernel, padding=1, groups=out))
    x = norm(x, "bn").mean((2, 3))
    if "linear.weight" in state:
        return F.linear(x, state["linear.weight"], state["linear.bias"]), used
    weight = state["linear.graph.weight"][:, :, 0, 0]
    return F.linear(x, strongest(weight, int(width * weight.numel() + 1e-6))), used


@pytest.mark.parametrize("form", ["dnw", "random", "small", "small random"])
def test_large_networks_match_the_reference(form: str) -> None:
    width = 0.225
    state = large(random="random" in form, small="small" in form)
    x = torch.randn(2, 3, 32, 32)
    expected, used = run_large(state, x, width)
    prefixed: dict[str, Any] = {f"module.{name}": value for name, value in state.items()}
    needed = {} if form == "random" else {"width": width}
    published = authors.load({"state_dict": prefixed} if form == "dnw" else prefixed, **needed)
    with torch.no_grad():
        found = published.model(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert [layer.used for layer in published.layers[:5]] == used
    if "random" not in form:
        assert [layer.kept for layer in published.layers[:5]] == [103, 1244, 4976, 72990, 79626]
        assert published.layers[0].used == 103  # with one block, the whole weight is read
        assert published.layers[3].used < 0.8 * 72990
    assert "layers.3" in str(published)
    if form == "dnw":
        small = compact(published.model, x)
        assert small.report is not None
        assert small.report.difference < 1e-5


def tiny(kind: str, random: bool = False) -> State:
    torch.manual_seed(0)
    inner = "odesolve.odefunc." if kind == "continuous" else ""
    state = {f"{inner}conv.weight": torch.randn(800, 1, 3, 3) * 0.3}
    state[f"{inner}graph.weight"] = torch.randn(800, 800, 1, 1) * 0.1
    if random:
        state[f"{inner}graph.mask"] = (torch.rand(800, 800, 1, 1) < 0.05).float()
    sizes = [32, 192, 192, 192, 192] if kind == "static" else [800]
    for j, size in enumerate(sizes):
        name = f"{inner}norm.{j}" if kind == "static" else f"{inner}norm"
        state[f"{name}.weight"], state[f"{name}.bias"] = torch.rand(size) + 0.5, torch.randn(size) * 0.2
    shapes = {0: (16, 3, 3, 3), 3: (16, 1, 3, 3), 4: (32, 16, 1, 1)}
    for number, shape in shapes.items():
        state[f"downsample.{number}.weight"] = torch.randn(shape) * 0.3
        state[f"downsample.{number}.bias"] = torch.randn(shape[0]) * 0.1
    batch_norm(state, "downsample.1", 16)
    batch_norm(state, "downsample.5", 32)
    state["fc.weight"], state["fc.bias"] = torch.randn(10, 100), torch.randn(10)
    state["zeros"] = torch.zeros(1, 768, 8, 8)
    return state


def stem(state: State, x: Tensor) -> Tensor:
    def conv(x: Tensor, number: int, **settings: Any) -> Tensor:
        return F.conv2d(x, state[f"downsample.{number}.weight"], state[f"downsample.{number}.bias"], **settings)

    def norm(x: Tensor, number: int) -> Tensor:
        mean, var, weight, bias = (
            state[f"downsample.{number}.{name}"] for name in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, var, weight, bias)

    x = norm(conv(x, 0, stride=2, padding=1), 1).relu()
    return norm(conv(conv(x, 3, stride=2, padding=1, groups=16), 4), 5)


def head(state: State, maps: Tensor) -> Tensor:
    return F.linear(maps[:, :, 2:4, 2:4].mean((2, 3)), state["fc.weight"], state["fc.bias"])


def run_static(state: State, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    """Blocks of 32 and 4 × 192 nodes compute; then the last 100 nodes receive from all and are read."""
    starts = [0, 32, 224, 416, 608, 800]
    sent: list[Tensor] = []
    received = stem(state, x)
    used = 0
    for block in range(5):
        own = slice(starts[block], starts[block + 1])
        if block:
            part = weight[own, : starts[block]]
            used += int(part.count_nonzero())
            received = F.conv2d(torch.cat(sent, 1), part)
        scale, shift = state[f"norm.{block}.weight"], state[f"norm.{block}.bias"]
        kernel = state["conv.weight"][own]
        maps = F.instance_norm(received, weight=scale, bias=shift).relu()
        sent.append(F.conv2d(maps, kernel, padding=1, groups=len(kernel)))
    used += int(weight[700:, 608:].count_nonzero())
    return head(state, F.conv2d(torch.cat(sent, 1), weight[700:])), used


@pytest.mark.parametrize("random", [False, True])
def test_tiny_static_network_matches_the_reference(random: bool) -> None:
    state = tiny("static", random)
    weight = state["graph.weight"]
    weight = weight * state["graph.mask"] if random else strongest(weight, 32_000)
    x = torch.randn(2, 3, 32, 32)
    expected, used = run_static(state, x, weight)
    published = authors.load(dict(state))
    with torch.no_grad():
        torch.testing.assert_close(published.model(x), expected, rtol=1e-4, atol=1e-4)
    (layer,) = published.layers
    assert layer.used == used
    if not random:
        assert layer.kept == 32_000
        assert 12_800 < layer.used < 13_700  # most of the others are never read


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_tiny_dynamic_networks_match_the_equation(kind: str, random: bool) -> None:
    state = tiny(kind, random)
    given = {f"module.{name}": value for name, value in state.items()} if random else dict(state)
    published = authors.load(given, in_place_relu=False)
    state = {name.removeprefix("odesolve.odefunc."): value for name, value in state.items()}
    weight = state["graph.weight"]
    weight = weight * state["graph.mask"] if random else strongest(weight, 32_000)
    x = torch.randn(2, 3, 32, 32)

    def change(states: Tensor) -> Tensor:
        sent = F.conv2d(states.relu(), state["conv.weight"], padding=1, groups=800)
        return F.instance_norm(F.conv2d(sent, weight), weight=state["norm.weight"], bias=state["norm.bias"])

    first = stem(state, x)
    states = torch.cat([first, first.new_zeros(2, 768, 8, 8)], 1)
    tolerance = 1e-4
    with torch.no_grad():
        if kind == "discrete":
            for _ in range(5):
                states = change(states)
        else:
            torchdiffeq, tolerance = pytest.importorskip("torchdiffeq"), 1e-3
            graph: Any = published.model.graph
            graph.rtol = graph.atol = 1e-6
            times = torch.tensor([0.0, 1.0])
            states = torchdiffeq.odeint(lambda t, y: change(y), states, times, rtol=1e-6, atol=1e-6)[-1]
        expected = head(state, states[:, -100:])
        torch.testing.assert_close(published.model(x), expected, rtol=tolerance, atol=tolerance)
    (layer,) = published.layers
    assert layer.used == layer.kept == int(weight.count_nonzero())


def run_continuous(state: State, x: Tensor, weight: Tensor, in_place: bool, tolerance: float) -> tuple[Tensor, int]:
    """The authors' continuous network: torchdiffeq, with a derivative that may apply ReLU in place to its argument."""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    calls = 0

    def change(time: Tensor, states: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        positive = states.relu_() if in_place else states.relu()
        sent = F.conv2d(positive, state["conv.weight"], padding=1, groups=800)
        return F.instance_norm(F.conv2d(sent, weight), weight=state["norm.weight"], bias=state["norm.bias"])

    first = stem(state, x)
    start = torch.cat([first, first.new_zeros(len(x), 768, 8, 8)], 1)
    times = torch.tensor([0.0, 1.0]).to(x)
    states = torchdiffeq.odeint(change, start, times, rtol=tolerance, atol=tolerance, method="dopri5")[-1]
    return head(state, states[:, -100:]), calls


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-3), (torch.float64, 1e-5)], ids=str
)
@torch.no_grad()
def test_continuous_network_can_compute_as_the_authors_did(random: bool, dtype: torch.dtype, tolerance: float) -> None:
    state = tiny("continuous", random)
    theirs, equation = (authors.load(dict(state), in_place_relu=x).model.to(dtype) for x in (True, False))
    for model in (theirs, equation):
        graph: Any = model.graph
        assert (graph.rtol, graph.atol) == (1e-3, 1e-3)
        graph.rtol = graph.atol = tolerance
    state = {k.removeprefix("odesolve.odefunc."): v.to(dtype) for k, v in state.items()}
    weight = state["graph.weight"]
    weight = weight * state["graph.mask"] if random else strongest(weight, 32_000)
    x = torch.randn(2, 3, 32, 32, dtype=dtype)
    expected, calls = run_continuous(state, x, weight, True, tolerance)
    largest = expected.abs().max()
    assert (theirs(x) - expected).abs().max() < 1e-5 * largest
    assert theirs.graph.effort.evaluations == calls
    plain, _ = run_continuous(state, x, weight, False, tolerance)
    assert (equation(x) - plain).abs().max() < 10 * tolerance * largest
    assert (plain - expected).abs().max() > 0.3 * largest, "the two are very different networks"


def test_in_place_relu_is_the_default_and_differentiable() -> None:
    model = authors.load(tiny("continuous")).model
    assert type(model.graph).__name__ == "InPlaceReluGraph"
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    assert model.graph.weight.grad.abs().sum() > 0
    model.graph.max_steps = 2
    with pytest.raises(WiringError, match="not done after max_steps = 2 steps"):
        model(torch.randn(1, 3, 32, 32))


def test_rejects_other_architectures() -> None:
    with pytest.raises(WiringError, match=r"not a checkpoint of the authors'.*got weight"):
        authors.load({"weight": torch.zeros(2)})
    state = large()
    with pytest.raises(WiringError, match=r"layers.0.graph.weight has no mask, so give width="):
        authors.load(dict(state))
    with pytest.raises(WiringError, match=r"expected layers.1.graph.weight of shape .*, got \(3, 3, 1, 1\)"):
        authors.load({**state, "layers.1.graph.weight": torch.zeros(3, 3, 1, 1)}, width=0.2)
    with pytest.raises(WiringError, match=r"also has layers.7.se.weight"):
        authors.load({**state, "layers.7.se.weight": torch.zeros(3)}, width=0.2)
    with pytest.raises(WiringError, match=r"has no bn.running_mean"):
        authors.load({name: x for name, x in state.items() if name != "bn.running_mean"}, width=0.2)
    with pytest.raises(WiringError, match="expected a state dict of names and tensors, got dict"):
        authors.load({"epoch": 3})
    with pytest.raises(WiringError, match="unknown kind"):
        authors.load(tiny("static"), kind="sideways")
    with pytest.raises(WiringError, match="stem"):
        authors.load({name: x for name, x in tiny("static").items() if not name.startswith("downsample.5")})


def test_reads_files(tmp_path: Path) -> None:
    torch.save({"state_dict": {f"module.{k}": v for k, v in tiny("static").items()}, "epoch": 160}, tmp_path / "a.pt")
    assert authors.load(tmp_path / "a.pt").layers[0].kept == 32_000
    with pytest.raises(WiringError, match="there is no file"):
        authors.load(tmp_path / "b.pt")
    torch.save({"state_dict": {}, "settings": Path("x")}, tmp_path / "c.pt")
    with pytest.raises(WiringError, match=r"load it with torch\.load"):
        authors.load(tmp_path / "c.pt")
    (tmp_path / "d.pt").write_text("hello")
    with pytest.raises(WiringError, match=r"d.pt is damaged, not a checkpoint"):
        authors.load(tmp_path / "d.pt")


def test_dictionary_that_contains_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": torch.zeros(1)}
    state["state_dict"] = state
    torch.save(state, tmp_path / "endless.pth")
    for source in (state, tmp_path / "endless.pth"):
        with pytest.raises(WiringError, match="not a checkpoint of the authors' networks"):
            authors.load(source)


def test_small_files_do_not_stand_for_large_tensors(tmp_path: Path) -> None:
    tensor = torch.zeros(1).expand(10**9, 1024)
    torch.save({"conv1.weight": torch.zeros(1), "linear.weight": tensor, "layers.0": torch.zeros(1)}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 10_000
    with pytest.raises(WiringError, match=r"a\.pt: expected a state dict of dense tensors, got linear\.weight"):
        authors.load(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_are_no_weights(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"graph.weight": torch.zeros(1), "fc.weight": nested}, tmp_path / "a.pt")
    with pytest.raises(WiringError, match=r"a\.pt: expected a state dict of dense tensors, got fc\.weight"):
        authors.load(tmp_path / "a.pt")


def test_rejects_files_whose_bits_have_flipped(tmp_path: Path) -> None:
    """PyTorch does not compare the checksums of its archives."""
    path = tmp_path / "tiny.pt"
    torch.save(tiny("discrete"), path)
    assert authors.load(path).layers
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # among the weights, which are most of the file
    path.write_bytes(content)
    with pytest.raises(WiringError, match=rf"{path} is damaged.*checksum"):
        authors.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fc.bias", torch.zeros(10, device="meta")),
        ("downsample.x.weight", torch.zeros(1)),
        ("downsample.", torch.zeros(1)),
        ("fc.bias", torch.zeros(3)),
    ],
)
def test_errors_name_the_file(name: str, value: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "tiny.pt"
    torch.save({**tiny("discrete"), name: value}, path)
    with pytest.raises(WiringError, match=str(path)):
        authors.load(path)
