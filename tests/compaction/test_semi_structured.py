"""2:4 weights as semi-structured tensors, only where that is supported and faster."""

import copy

import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError
from wirings.compaction import semi_structured
from wirings.compaction.semi_structured import is_two_of_four, semi_structured_
from wirings.wire.block_products.choose import MIN_SPEEDUP


def network(width: int = 64, structure: str = "2:4") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    wirings.wire_(model, structure=structure)
    return wirings.finalize_(model).eval()


def test_requires_a_cuda_device() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WiringError, match=r"2:4 tensor cores .*got a model on cpu\. The finalized model is the same"):
        wirings.semi_structured_(model, torch.randn(4, 64))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rejects_wired_models_and_models_without_linear_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    wirings.wire_(model, structure="2:4")
    with pytest.raises(WiringError, match=r"still wired.*finalize_ first"):
        semi_structured_(model, torch.randn(4, 8))
    with pytest.raises(WiringError, match=r"ReLU has no nn\.Linear"):
        semi_structured_(nn.ReLU(), torch.randn(4, 8))


def test_two_of_four() -> None:
    assert all(is_two_of_four(layer.weight) for layer in network()[::2])
    transposable = network(structure="2:4, transposable")[::2]
    assert all(is_two_of_four(layer.weight) and is_two_of_four(layer.weight.T) for layer in transposable)
    assert not is_two_of_four(torch.ones(4, 8))
    assert not is_two_of_four(torch.zeros(4, 6))
    assert is_two_of_four(torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: None, "weight is torch.float32 and its input torch.float32; both must be"),
        (lambda m: m.bfloat16()[0].weight.data.fill_(1.0), "not 2:4"),
        (lambda m: setattr(m.bfloat16()[2], "weight", m[0].weight), "shared with another layer"),
    ],
)
def test_reasons_to_keep_a_layer_dense(monkeypatch: pytest.MonkeyPatch, change: object, reason: str) -> None:
    """Reasons that are found before anything is measured apply on any device."""
    model = network()
    change(model)
    found = {}
    inputs = semi_structured.inputs_of(
        model, [("0", model[0])], torch.randn(4, 64).to(model[0].weight.dtype), "semi_structured_"
    )
    shared = model[0].weight is model[2].weight
    found = semi_structured._try("0", model[0], inputs["0"], shared, 3)
    assert not found.used
    assert reason in str(found)
    assert str(found).startswith("0 64×64, 4 rows: dense (")
    assert "not called" in str(semi_structured._try("0", model[0], None, False, 3))


@pytest.mark.parametrize(("dense", "sparse", "used"), [(10.0, 6.0, True), (10.0, 9.9, False), (5.0, 8.0, False)])
def test_the_faster_one_is_kept(monkeypatch: pytest.MonkeyPatch, dense: float, sparse: float, used: bool) -> None:
    """With fake timings, and a dense tensor in place of a compressed one."""
    times = iter([dense, sparse])
    monkeypatch.setattr(semi_structured, "_microseconds", lambda compute, repeats: next(times))
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight.clone())
    model = network().bfloat16()
    weight = model[0].weight
    found = semi_structured._try("0", model[0], torch.randn(4, 64).bfloat16(), False, 3)
    assert (found.used, found.dense_us, found.sparse_us) == (used, dense, sparse)
    assert (model[0].weight is weight) != used
    assert "dense 10.0 µs, sparse 6.0 µs: semi-structured (1.67 times as fast)" in str(found) or not used


def test_layers_called_by_keyword() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(input=x)

    model, x = Named(), torch.randn(4, 64)
    assert torch.equal(semi_structured.inputs_of(model, [("layer", model.layer)], x, "test")["layer"], x)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    if torch.cuda.get_device_capability() < semi_structured.CAPABILITY:
        pytest.skip("this GPU has no 2:4 tensor cores")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 4096), nn.ReLU(), nn.Linear(4096, 10))
    wirings.wire_(model, structure="2:4", skip=["4"])
    wirings.finalize_(model).cuda().half().eval()
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        before = model(x)
    found = wirings.semi_structured_(model, x)
    print(*found, sep="\n")
    assert [measured.name for measured in found] == ["0", "2", "4"]
    assert not found[2].used
    for measured in found:
        assert measured.dense_us is None or measured.used == (measured.dense_us >= MIN_SPEEDUP * measured.sparse_us)
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2 * float(before.abs().amax()))
    one = copy.deepcopy(network()).cuda().half()
    small = wirings.semi_structured_(one, torch.randn(1, 64, device="cuda", dtype=torch.float16))
    assert not any(measured.used for measured in small), "a single row is as fast dense"
