"""CIFAR-100: class folders, binary and Python archives give the same records; other data is refused."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wirings.errors import WiringError
from wirings.train.data import cifar100, load
from wirings.train.data.cifar100 import NAMES, PARTS, PREPARED

COUNTS = (2, 1)
"""Images of every class to train and to test on in the small stand-in."""
RANDOM = np.random.default_rng(0)
PIXELS = {part: RANDOM.integers(0, 256, (100 * n, 3072), dtype=np.uint8) for part, n in zip(PARTS, COUNTS, strict=True)}
LABELS = {part: RANDOM.permutation(np.repeat(np.arange(100), n)) for part, n in zip(PARTS, COUNTS, strict=True)}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "cache"))


def binary(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for part in PARTS:
        coarse = np.full((len(PIXELS[part]), 1), 7, np.uint8)
        rows = np.concatenate([coarse, LABELS[part][:, None].astype(np.uint8), PIXELS[part]], axis=1)
        (folder / f"{part}.bin").write_bytes(rows.tobytes())
    return folder


def python(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for part in PARTS:
        content = {b"data": PIXELS[part], b"fine_labels": LABELS[part].tolist(), b"coarse_labels": [0]}
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))
    return folder


def class_folders(folder: Path) -> Path:
    for part in PARTS:
        for i, (label, pixels) in enumerate(zip(LABELS[part], PIXELS[part], strict=True)):
            place = folder / part / NAMES[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.reshape(3, 32, 32).transpose(1, 2, 0)).save(place / f"{i}.png")
    return folder


def archive(folder: Path) -> Path:
    files = binary(folder / "cifar-100-binary")
    with tarfile.open(folder / "cifar-100-binary.tar.gz", "w:gz") as tar:
        for part in PARTS:
            content = (files / f"{part}.bin").read_bytes()
            member = tarfile.TarInfo(f"cifar-100-binary/{part}.bin")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            (files / f"{part}.bin").unlink()
    return folder


@pytest.mark.parametrize("layout", [binary, python, class_folders, archive])
def test_all_layouts_give_the_same_records(layout: object, tmp_path: Path) -> None:
    data = load("cifar100", directory=layout(tmp_path / "data"), per_class=COUNTS, batch=50, augment=False)  # type: ignore[operator]
    records = np.load(tmp_path / "cache" / PREPARED)
    expected = []
    for part in PARTS:
        rows = np.concatenate([LABELS[part][:, None].astype(np.uint8), PIXELS[part]], axis=1)
        expected += sorted(rows.tolist())
    assert records.tolist() == expected
    assert (data.classes, data.shape, data.train.examples, data.test.examples) == (100, (3, 32, 32), 200, 100)
    again = load("cifar100", per_class=COUNTS)
    assert again.md5 == data.md5
    x, y = (torch.cat(parts) for parts in zip(*data.test.epoch(0), strict=True))
    assert y.tolist() == list(range(100))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)))
    pixels = ((x * std + mean) * 255).round().to(torch.uint8).numpy().reshape(100, -1)
    assert np.array_equal(pixels, records[200:, 1:])


def test_a_prepared_file_of_another_folder_is_taken(tmp_path: Path) -> None:
    first = load("cifar100", directory=binary(tmp_path / "data"), per_class=COUNTS)
    (tmp_path / "cache" / PREPARED).rename(tmp_path / PREPARED)
    assert load("cifar100", directory=tmp_path, per_class=COUNTS).md5 == first.md5


def test_holds_out_training_images(tmp_path: Path) -> None:
    data = load("cifar100", directory=binary(tmp_path / "data"), per_class=COUNTS, holdout=100)
    assert (data.train.examples, data.test.examples) == (100, 100)


def test_names_are_the_published_ones_in_order() -> None:
    assert len(NAMES) == 100
    assert sorted(NAMES) == NAMES


def test_rejects_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise cifar100.UnreachableError("no network")

    monkeypatch.setattr(cifar100, "download_chunks", unreachable)
    with pytest.raises(WiringError, match="neither found nor downloaded"):
        load("cifar100", directory=tmp_path)
    with pytest.raises(WiringError, match="there is no folder"):
        load("cifar100", directory=tmp_path / "none")
    folder = binary(tmp_path / "data")
    with pytest.raises(WiringError, match=r"expected 60,000 images .* got 300"):
        load("cifar100", directory=folder)
    (folder / "test.bin").write_bytes(b"123")
    with pytest.raises(WiringError, match="truncated"):
        load("cifar100", directory=folder, per_class=COUNTS)
    wrong = class_folders(tmp_path / "folders")
    (wrong / "train" / "apple").rename(wrong / "train" / "pineapple")
    with pytest.raises(WiringError, match="'apple' differs"):
        load("cifar100", directory=wrong, per_class=COUNTS)
    with pytest.raises(WiringError, match="cutout must be"):
        load("cifar100", directory=folder, cutout=40)
