"""CIFAR-100: class folders, binary and Python archives give the same records; other and damaged data is refused."""

import hashlib
import io
import pickle
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
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
    def unreachable(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network here")

    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take data of the small stand-in's size for the official data."""
    monkeypatch.setattr(cifar100, "PER_CLASS", COUNTS)


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


def expected() -> np.ndarray:
    """The records of a prepared file."""
    rows: list[list[int]] = []
    for part in PARTS:
        rows += sorted(np.concatenate([LABELS[part][:, None].astype(np.uint8), PIXELS[part]], axis=1).tolist())
    return np.array(rows, dtype=np.uint8)


MD5 = hashlib.md5(expected().tobytes()).hexdigest()


@pytest.mark.parametrize("layout", [binary, python, class_folders, archive])
def test_all_layouts_give_the_same_records(layout: Callable[[Path], Path], tmp_path: Path) -> None:
    data = load("cifar100", directory=layout(tmp_path / "data"), per_class=COUNTS, batch=50, augment=False)
    assert data.md5 == MD5
    assert (data.classes, data.shape, data.train.examples, data.test.examples) == (100, (3, 32, 32), 200, 100)
    x, y = (torch.cat(parts) for parts in zip(*data.test.epoch(0), strict=True))
    assert y.tolist() == list(range(100))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)))
    pixels = ((x * std + mean) * 255).round().to(torch.uint8).numpy().reshape(100, -1)
    assert np.array_equal(pixels, expected()[200:, 1:])


@pytest.mark.usefixtures("official")
def test_the_cache_is_filled_once(tmp_path: Path) -> None:
    binary(tmp_path / "cache" / "cifar-100-binary")
    prepared = tmp_path / "cache" / PREPARED
    assert load("cifar100", per_class=COUNTS).md5 == MD5
    assert np.array_equal(np.load(prepared), expected())
    (tmp_path / "cache" / "cifar-100-binary" / "test.bin").unlink()
    assert load("cifar100", per_class=COUNTS).md5 == MD5
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_file()] == [PREPARED]


@pytest.mark.usefixtures("official")
def test_a_prepared_file_of_another_folder_is_taken(tmp_path: Path) -> None:
    cifar100.save(tmp_path / PREPARED, expected())
    assert load("cifar100", directory=tmp_path, per_class=COUNTS).md5 == MD5


@pytest.mark.usefixtures("official")
def test_a_folder_that_is_named_wins_over_the_cache(tmp_path: Path) -> None:
    other = expected()
    other[0, 1:] = 0
    prepared = tmp_path / "cache" / PREPARED
    cifar100.save(prepared, other)
    before = prepared.read_bytes()
    folder = binary(tmp_path / "data")
    assert load("cifar100", directory=folder, per_class=COUNTS).md5 == MD5
    assert prepared.read_bytes() == before  # other runs read what they read before
    assert load("cifar100", per_class=COUNTS).md5 == hashlib.md5(other.tobytes()).hexdigest()
    assert cifar100.CIFAR100().fetch(folder) == prepared
    assert load("cifar100", per_class=COUNTS).md5 == MD5


def test_samples_do_not_touch_the_cache(tmp_path: Path) -> None:
    prepared = tmp_path / "cache" / PREPARED
    cifar100.save(prepared, expected())
    before = prepared.read_bytes()
    with pytest.raises(WiringError, match="neither found nor downloaded"):
        load("cifar100", per_class=COUNTS)
    binary(tmp_path / "cache" / "cifar-100-binary")
    options = cifar100.CIFAR100().write_sample(tmp_path)
    assert load("cifar100", **options).train.examples == 100
    assert load("cifar100", per_class=COUNTS).md5 == MD5
    assert prepared.read_bytes() == before


def header(shape: str) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(118).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, records=expected())
    return file.getvalue()


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


DAMAGED = {
    "a zip file": zipped(),
    "too large": header("(600000000000, 3073)"),
    "a broken header": header("(" * 100),
    "an overflow": header(f"({10**23}, 3073)"),
    "empty": b"",
    "another type": saved(expected().astype(np.int16)),
    "one dimension": saved(expected().reshape(-1)),
    "a number": saved(np.uint8(3)),
    "fewer records": saved(expected()[:-1]),
    "a byte short": saved(expected())[:-1],
    "another label": saved(np.where(np.arange(3073) == 0, np.uint8(255), expected())),
}


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_prepared_file_is_refused_or_prepared_again(damage: str, checksum: bool, tmp_path: Path) -> None:
    content = cifar100.with_md5(DAMAGED[damage]) if checksum else DAMAGED[damage]
    (tmp_path / PREPARED).write_bytes(content)
    with pytest.raises(WiringError, match=PREPARED) as refused:
        load("cifar100", directory=tmp_path, per_class=COUNTS)
    assert len(str(refused.value)) < 600
    binary(tmp_path / "cache" / "cifar-100-binary")
    (tmp_path / "cache" / PREPARED).write_bytes(content)
    assert load("cifar100", per_class=COUNTS).md5 == MD5
    assert np.array_equal(cifar100.read(tmp_path / "cache" / PREPARED), expected())


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("place", [20, 5000, -3073, -40, -1])
def test_no_changed_byte_of_a_prepared_file_is_taken(place: int, tmp_path: Path) -> None:
    prepared = tmp_path / "cache" / PREPARED
    cifar100.save(prepared, expected())
    content = bytearray(prepared.read_bytes())
    content[place] ^= 1
    prepared.write_bytes(content)
    with pytest.raises(WiringError, match=r"cifar100\.npy is truncated or damaged .its checksum is missing or differs"):
        cifar100.read(prepared)
    with pytest.raises(WiringError, match="neither found nor downloaded"):
        load("cifar100", per_class=COUNTS)
    binary(tmp_path / "cache" / "cifar-100-binary")
    assert load("cifar100", per_class=COUNTS).md5 == MD5


@pytest.mark.usefixtures("official")
def test_archives_under_official_names_must_have_their_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = archive(tmp_path / "data")
    file = folder / "cifar-100-binary.tar.gz"
    with pytest.raises(WiringError, match=r"expected md5 03b5dce\w+ for .*cifar-100-binary\.tar\.gz, got "):
        load("cifar100", directory=folder, per_class=COUNTS)
    monkeypatch.setitem(cifar100.ARCHIVES, file.name, hashlib.md5(file.read_bytes()).hexdigest())
    assert load("cifar100", directory=folder, per_class=COUNTS).md5 == MD5


@pytest.mark.usefixtures("official")
def test_pickles_must_have_their_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = python(tmp_path / "data")
    with pytest.raises(WiringError, match=r"expected md5 16019d7\w+ for .*data/train, got "):
        load("cifar100", directory=folder, per_class=COUNTS)
    for part in PARTS:
        monkeypatch.setitem(cifar100.PICKLES, part, hashlib.md5((folder / part).read_bytes()).hexdigest())
    assert load("cifar100", directory=folder, per_class=COUNTS).md5 == MD5
    content = bytearray((folder / "test").read_bytes())
    content[len(content) // 2] ^= 1  # a pixel
    (folder / "test").write_bytes(content)
    with pytest.raises(WiringError, match=r"expected md5 \w+ for .*data/test, got "):
        load("cifar100", directory=folder, per_class=COUNTS)


@pytest.mark.usefixtures("official")
def test_downloads_and_checks_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (archive(tmp_path / "data") / "cifar-100-binary.tar.gz").read_bytes()
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(content))
    with pytest.raises(WiringError, match=f"expected md5 03b5dce01913d631647c71ecec9e9cb8 for {cifar100.URL}, got"):
        load("cifar100", per_class=COUNTS)
    monkeypatch.setitem(cifar100.ARCHIVES, "cifar-100-binary.tar.gz", hashlib.md5(content).hexdigest())
    assert load("cifar100", per_class=COUNTS).md5 == MD5
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [PREPARED]  # the archive is gone


ONE = PIXELS["test"]
FIELDS: dict[str, dict[object, object]] = {
    "a negative label": {b"data": ONE, b"fine_labels": [-1] * 100},
    "a large label": {b"data": ONE, b"fine_labels": [100] * 100},
    "text": {b"data": ONE, b"fine_labels": ["a"] * 100},
    "one dimension": {b"data": np.zeros(100, np.uint8), b"fine_labels": [0] * 100},
    "no dimension": {b"data": np.array(3, np.uint8), b"fine_labels": [0]},
    "fewer labels": {b"data": ONE, b"fine_labels": [0] * 99},
    "no labels": {b"data": ONE, b"\xff": 3},
    "another type": {b"data": np.zeros((100, 3072)), b"fine_labels": [0] * 100},
}


@pytest.mark.parametrize("problem", FIELDS)
def test_rejects_pickles_of_something_else(problem: str, tmp_path: Path) -> None:
    folder = python(tmp_path / "data")
    (folder / "test").write_bytes(pickle.dumps(FIELDS[problem], protocol=2))
    with pytest.raises(WiringError, match=str(folder / "test")) as refused:
        load("cifar100", directory=folder, per_class=COUNTS)
    assert "CIFAR-10 " not in str(refused.value)


def test_messages_about_pickles_name_the_data_set(tmp_path: Path) -> None:
    folder = python(tmp_path / "data")
    (folder / "test").write_bytes(b"\x80\x02cos\nsystem\nU\x04exit\x85R.")
    with pytest.raises(WiringError, match=r"wants to run os.system, which CIFAR-100's own files never do"):
        load("cifar100", directory=folder, per_class=COUNTS)


def test_holds_out_training_images(tmp_path: Path) -> None:
    data = load("cifar100", directory=binary(tmp_path / "data"), per_class=COUNTS, holdout=100)
    assert (data.train.examples, data.test.examples) == (100, 100)


def test_names_are_the_published_ones_in_order() -> None:
    assert len(NAMES) == 100
    assert sorted(NAMES) == NAMES


def test_rejects_other_data(tmp_path: Path) -> None:
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
    with pytest.raises(WiringError, match=r"per_class must be two positive integers, got 3"):
        load("cifar100", directory=folder, per_class=3)
