"""Shared networks of which only the edges are stored: exact, small, and safe to read from a stranger."""

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import wirings
from wirings import WiringError, hub, models
from wirings.models import registry
from wirings.train.hub import limits
from wirings.wire.sparse_state import SparseState, is_sparse_file

NARROW = {"width": 0.125, "density": 0.1, "rule": "dnw"}
GPT = {"rule": "dnw", "density": 0.1, "layers": 1, "width": 32, "heads": 2, "context": 8, "classes": 65}
PAIRS = {"rule": "dnw", "density": 0.1, "layers": 1, "width": 32, "heads": 2, "hidden": 64, "length": 8, "classes": 50}


def finalized(name: str = "resnet18", **options: Any) -> nn.Module:
    """A finalized network, whose running statistics are not those of a new one."""
    torch.manual_seed(0)
    model = wirings.finalize_(models.get(name, **(options or NARROW)))
    for buffer in model.buffers():
        buffer.copy_(torch.rand_like(buffer) if buffer.is_floating_point() else torch.full_like(buffer, 7))
    return model


def saved(folder: Path, model: nn.Module | None = None, **options: Any) -> Path:
    """The weights file of a network in a folder."""
    return hub.save_pretrained(finalized() if model is None else model, folder, card=False, **options) / (
        "model.safetensors"
    )


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same names, types and values."""
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, x in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], x, rtol=0, atol=0)


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Change the tensors and the description in a file, and write it with a valid checksum."""
    state = SparseState.read(path)
    change(state.tensors, state.about)
    state.write(path)


@pytest.fixture
def register() -> Any:
    """Registers models of one's own for a test."""
    added = []

    def add(build: Any) -> str:
        build.__module__ = "mine"
        added.append(models.register(build).__name__)
        return build.__name__

    yield add
    for name in added:
        registry._registry.pop(name)


# ---- what is loaded is what was saved --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", NARROW),
        ("tiny_static", {"edges": 900}),
        ("vit", {"rule": "rigl", "density": 0.1, "width": 32, "layers": 2, "heads": 2}),
        ("gpt", GPT),
        ("seq2seq", PAIRS),
    ],
)
def test_finalized_networks_come_back(name: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = finalized(name, **options).to(dtype)
    assert is_sparse_file(saved(tmp_path, model))
    again = hub.from_pretrained(tmp_path)
    assert_same(model, again)
    assert not again.training
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in model.named_parameters()}  # tied as before


def test_dense_files_come_back_in_their_type_as_well(tmp_path: Path) -> None:
    model = finalized().bfloat16()
    assert not is_sparse_file(saved(tmp_path, model, sparse=False))
    assert_same(model, hub.from_pretrained(tmp_path))


def test_tensors_without_entries(register: Any, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(100, 100))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.register_buffer("scalar", torch.tensor(2.5))
            self.register_buffer("empty", torch.zeros(4, 0, dtype=torch.int64))
            self.register_buffer("mask", torch.ones(9, 9, dtype=torch.bool).tril())

    def odd_network() -> nn.Module:
        return Odd()

    model = models.get(register(odd_network))
    with torch.no_grad():
        model.weight[3, ::7] = torch.randn(15)
    assert is_sparse_file(saved(tmp_path, model))
    assert_same(model, hub.from_pretrained(tmp_path))


def test_what_only_dense_files_hold(register: Any, tmp_path: Path) -> None:
    def complex_network() -> nn.Module:
        model = nn.Linear(40, 40)
        with torch.no_grad():
            model.weight.zero_()
        model.register_buffer("turn", torch.tensor([1j, 2.0]))
        return model

    model = models.get(register(complex_network))
    assert not is_sparse_file(saved(tmp_path, model))
    assert_same(model, hub.from_pretrained(tmp_path))


def test_load_sparse_reads_the_same_file(tmp_path: Path) -> None:
    path, again = saved(tmp_path), models.get("resnet18", width=0.125)
    wirings.load_sparse(again, path)
    assert_same(finalized(), again)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes(tmp_path: Path) -> None:
    sizes = [saved(tmp_path / str(sparse), sparse=sparse).stat().st_size for sparse in (True, False)]
    assert sizes[0] < sizes[1] / 2
    assert saved(tmp_path / "table2", wirings.load("table2/dnw")).stat().st_size < 1_200_000


@given(st.floats(0, 1), st.integers(1, 60), st.sampled_from([torch.float32, torch.float16, torch.float64]))
@settings(max_examples=40, deadline=None)
def test_edges_are_stored_where_they_save_a_tenth(density: float, width: int, dtype: torch.dtype) -> None:
    def one_linear() -> nn.Module:
        return nn.Linear(width, width)

    one_linear.__module__ = "mine"
    models.register(one_linear)
    try:
        torch.manual_seed(0)
        model = models.get("one_linear").to(dtype)
        with torch.no_grad():
            model.weight *= torch.rand_like(model.weight) < density
        with tempfile.TemporaryDirectory() as folder:
            path = saved(Path(folder), model)
            small, size = is_sparse_file(path), path.stat().st_size
            assert_same(model, hub.from_pretrained(folder))
            dense = saved(Path(folder), model, sparse=False).stat().st_size
        assert size <= 0.9 * dense if small else size == dense
        if width == 60:
            assert small or density > 0.7
    finally:
        registry._registry.pop("one_linear")


def test_networks_without_zeros_and_wired_ones_stay_as_they_are(tmp_path: Path) -> None:
    dense = models.get("resnet18", width=0.125)
    for parameter in dense.parameters():
        nn.init.uniform_(parameter)
    assert not is_sparse_file(saved(tmp_path / "dense", dense))
    wired = models.get("resnet18", **NARROW)
    path = saved(tmp_path / "wired", wired)
    assert not is_sparse_file(path)
    assert len(hub.from_pretrained(tmp_path / "wired").wiring.layers) == len(wired.wiring.layers)


def test_without_the_option_anything_reads_the_weights(tmp_path: Path) -> None:
    model = finalized()
    whole = load_file(saved(tmp_path / "dense", model, sparse=False))
    assert {name.removeprefix("model.") for name in whole} == model.state_dict().keys()
    assert_same(model, hub.from_pretrained(tmp_path / "dense"))
    parts = load_file(saved(tmp_path / "edges", model))  # a valid safetensors file, of other tensors
    name = next(name for name, x in model.state_dict().items() if x.dim() == 4 and x.numel() > 5000)
    assert name not in parts
    assert len(parts[f"{name}.values"]) == int(model.state_dict()[name].count_nonzero())
    with pytest.raises(WiringError, match="sparse must be"):
        hub.save_pretrained(model, tmp_path, card=False, sparse="yes")  # type: ignore[arg-type]


def test_a_network_that_may_not_be_decoded_is_saved_dense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is saved can be loaded: one edge in a thousand is too few for what the file would decode to."""
    model = finalized("digits_static", rule="dnw", edges=2)
    monkeypatch.setattr(limits, "MIN_BYTES", 2**12)
    monkeypatch.setattr(limits, "SPARSE_RATIO", 2)
    assert not is_sparse_file(saved(tmp_path, model))
    monkeypatch.setattr(limits, "SPARSE_RATIO", 256)
    assert is_sparse_file(saved(tmp_path, model))


def test_the_card_says_how_large_the_file_is(tmp_path: Path) -> None:
    hub.save_pretrained("table1/static-dnw", tmp_path, name="me/network")
    text = (tmp_path / "README.md").read_text()
    assert "| weights file | 0.20 MB, without the zeros; 1.35 MB in memory |" in text
    assert "wirings.hub.from_pretrained('me/network')" in text
    assert "not with other programs" in text
    hub.save_pretrained("table1/static-dnw", tmp_path, sparse=False)
    text = (tmp_path / "README.md").read_text()
    assert "weights file" not in text
    assert "other programs" not in text


# ---- files of strangers ----------------------------------------------------------------------------------------------


def test_no_damaged_file_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header, 97), *range(header, len(whole), len(whole) // 40), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(WiringError, match=r"cannot be loaded"):
            hub.from_pretrained(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(WiringError, match=r"cannot be loaded"):
        hub.from_pretrained(tmp_path)


def shaped(shape: list[int]) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda tensors, about: about["encoded"]["head.weight"].update(shape=shape)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (shaped([10, 65]), r"head.weight to be float32 \(10, 64, 1, 1\), got float32 \(10, 65\)"),
        (shaped([2000, 2000]), r"head.weight to be float32 \(10, 64, 1, 1\), got float32 \(2000, 2000\)"),
        (shaped([2**20, 2**20]), r"would take 4,398,\d+,\d+,\d+ bytes of memory, but those in the file take"),
        (shaped([-1, 2]), "expected tensors with a shape"),
        (lambda tensors, about: about["encoded"]["head.weight"].update(dtype="float64"), "got float64"),
        (lambda tensors, about: about["encoded"]["head.weight"].update(dtype="x"), "expected tensors with a shape"),
        (lambda tensors, about: about["encoded"]["head.weight"].update(bits=9), "expected places"),
        (lambda tensors, about: about["encoded"].pop("head.weight"), "head.weight to be float32 .*, got missing"),
        (lambda tensors, about: about["tied"].update(more="head.weight"), "expected more to be missing"),
        (
            lambda tensors, about: about["tied"].update({str(i): "head.weight" for i in range(30_000)}),
            "bytes of memory, but",
        ),
        (lambda tensors, about: tensors.pop("head.weight.values"), "expected a tensor head.weight.values"),
        (lambda tensors, about: tensors.update(more=torch.zeros(3)), "expected more to be missing"),
    ],
)
def test_crafted_files_are_refused_before_memory_is_taken(change: Any, why: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    rewritten(path, lambda tensors, about: None)
    assert_same(hub.from_pretrained(tmp_path), finalized())
    rewritten(path, change)
    before = peak_bytes()
    with pytest.raises(WiringError, match=why):
        hub.from_pretrained(tmp_path)
    assert peak_bytes() - before < 2**28


def test_nothing_is_decoded_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = saved(tmp_path)
    rewritten(path, shaped([2000, 2000]))
    monkeypatch.setattr(SparseState, "decoded", lambda *_: pytest.fail("decoded"))
    with pytest.raises(WiringError, match="does not fit"):
        hub.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "options", [{"width": 4092, "layers": 4000}, {"width": 2048, "layers": 24}, {"layers": 10**9, "width": 4}]
)
def test_edges_do_not_raise_the_limit_on_what_is_built(options: dict[str, int], tmp_path: Path) -> None:
    """A small file that claims a large weight, as large as it may, does not make room for any network."""
    path = saved(tmp_path)
    rewritten(path, shaped([2000, 7000]))  # 56 MB
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"] = {"name": "gpt", "options": {"heads": 1, "context": 8, **options}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = peak_bytes()
    with pytest.raises(
        WiringError, match=r"out of proportion|takes more than 497 MiB, but its weights take 56,\d+,\d+ bytes"
    ):
        hub.from_pretrained(tmp_path)
    assert peak_bytes() - before < 2**30


def peak_bytes() -> int:
    """The most memory that this process has taken."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_a_wired_network_needs_all_its_edges(tmp_path: Path) -> None:
    saved(tmp_path / "wired", models.get("resnet18", **NARROW))
    edges = saved(tmp_path / "finalized")
    (tmp_path / "wired" / "model.safetensors").write_bytes(edges.read_bytes())
    with pytest.raises(WiringError, match="expected all edges of a wired network"):
        hub.from_pretrained(tmp_path / "wired")
