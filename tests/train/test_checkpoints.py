"""Damaged and foreign checkpoints are rejected before anything is changed."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz import checkpoints as fuzz
from wirings import WiringError, models
from wirings.train.run import checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return fuzz.good(tmp_path_factory.mktemp("run"))


def resume(path: Path) -> None:
    """Resume from a checkpoint; if that is rejected, the step must be unchanged."""
    step = fuzz.new_step()
    before, refused = fuzz.state_of(step), None
    try:
        fuzz.resumed(step, path)
    except WiringError as error:
        refused = error
    if refused is not None:
        assert str(path) in str(refused)
        assert fuzz.state_of(step) == before
        raise refused


def swap(header: dict[str, Any]) -> None:
    one, other = "model.graph.weight", "average.graph.weight"
    header[one], header[other] = header[other], header[one]


def dtype(header: dict[str, Any]) -> None:
    header["model.graph.weight"]["dtype"] = "I32"


def shape(header: dict[str, Any]) -> None:
    header["model.graph.weight"]["shape"].reverse()
    header["model.graph.weight"]["shape"].append(1)


def name(header: dict[str, Any]) -> None:
    header["optimizer.99.momentum_buffer"] = header.pop("optimizer.0.momentum_buffer")


def text(header: dict[str, Any]) -> None:
    header["__metadata__"]["about"] = header["__metadata__"]["about"].replace('"batch": 2,', '"batch": 1,')


@pytest.mark.parametrize("change", [swap, dtype, shape, name, text])
def test_checksum_covers_the_whole_file(
    change: Callable[[dict[str, Any]], None], written: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "last.safetensors"
    path.write_bytes(written)
    resume(path)
    (length,) = struct.unpack_from("<Q", written)
    header = json.loads(written[8 : 8 + length])
    change(header)
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + written[8 + length :])
    with pytest.raises(WiringError, match="its checksum does not match its contents"):
        resume(path)


CASES: list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], Any], str]] = [
    ("no progress", lambda t, a: a.pop("progress"), "'progress' must be dict, got NoneType"),
    ("more progress", lambda t, a: a["progress"].update(more=1), "its progress has unexpected or missing entries"),
    ("epoch", lambda t, a: a["progress"].update(epoch="1"), "an invalid 'epoch'"),
    ("step", lambda t, a: a["progress"].update(steps=9), "its progress is impossible: epoch 1, batch 2, step 9"),
    ("totals", lambda t, a: a["progress"].update(totals=[0.0]), "invalid 'totals'"),
    ("log", lambda t, a: a["progress"]["history"][0].pop("lr"), "invalid lines of the log"),
    ("recipe", lambda t, a: a.update(recipe=3), "'recipe' must be str, got int"),
    ("settings", lambda t, a: a["settings"].update(batch="x"), "batch must be an integer"),
    ("scaler", lambda t, a: a.update(scaler={"scale": 1.0}), "invalid state of the gradient scaler"),
    ("no wiring", lambda t, a: a.update(wiring=None), "it has no wiring, unlike the model"),
    (
        "model",
        lambda t, a: t.pop("model.graph.weight"),
        r"expected model.graph.weight to be float32 \(.*\), got missing",
    ),
    ("more", lambda t, a: t.update(more=torch.zeros(1)), r"expected more to be missing, got float32 \(1,\)"),
    ("double", lambda t, a: t.update({"seen.0": t["seen.0"].double()}), "expected seen.0 to be uint8 .*, got float64"),
    (
        "shape",
        lambda t, a: t.update({"random.cpu": t["random.cpu"][:9].clone()}),
        r"expected random.cpu to be uint8 \(5056,\)",
    ),
    (
        "random",
        lambda t, a: t.update({"random.cpu": torch.zeros(5056, dtype=torch.uint8)}),
        "state of a random number generator",
    ),
    ("optimizer", lambda t, a: t.update({"optimizer.0": torch.zeros(1)}), "the optimizer has no 'optimizer.0'"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_contents_are_checked_before_anything_changes(
    change: Callable[[dict[str, Any], dict[str, Any]], Any], message: str, written: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "last.safetensors"
    tensors, about = fuzz.Mutator(written).read()
    change(tensors, about)
    checkpoint.write_tensors(path, tensors, about)
    with pytest.raises(WiringError, match=message):
        resume(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", -1),
        ("steps", "5"),
        ("edges", 3),
        ("edges", ["x"]),
        ("planned", "6"),
        ("planned", 0),
        ("ranked", [1, 2]),
    ],
)
def test_rejects_invalid_states_of_a_wiring(key: str, value: Any) -> None:
    wiring = models.get("digits_static", rule="dnw").wiring
    before = wiring.state_dict()
    with pytest.raises(WiringError, match=f"not the state of (a|this) wiring: '{key}' (must be a|belongs to other)"):
        wiring.load_state_dict({**before, key: value})
    assert wiring.state_dict() == before


def test_rejects_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    for data in (b"", b"{}", b"\xff" * 100, struct.pack("<Q", 2**63), struct.pack("<Q", 2) + b"{}"):
        path.write_bytes(data)
        with pytest.raises(WiringError, match="is damaged or not a checkpoint of wirings"):
            checkpoint.read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(WiringError, match=r"not a checkpoint of wirings \(it is not a file\)"):
        checkpoint.read(path)
