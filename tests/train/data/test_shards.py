"""Shards: every example is seen once over ranks and workers; shuffling, resuming, corrupt members."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from wirings.errors import WiringError
from wirings.train.data.base import Data, load


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (10, 10), (value, value, value)).save(file, "png")
    return file.getvalue()


def write(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def files(start: int, stop: int) -> dict[str, bytes]:
    """Return the files of examples whose label and colour are their number."""
    found: dict[str, bytes] = {}
    for number in range(start, stop):
        found |= {f"{number:03d}.png": png(number), f"{number:03d}.json": b"{}", f"{number:03d}.cls": b"%d" % number}
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for shard, (start, stop) in enumerate([(0, 10), (10, 23), (23, 24), (24, 40), (40, 53)]):
        write(tmp_path / f"train-{shard:03d}.tar", files(start, stop))
    write(tmp_path / "val-000.tar", files(0, 4))
    write(tmp_path / "val-001.tar", files(4, 7))
    return tmp_path


def data(root: Path | None, **settings: object) -> Data:
    base = {"directory": root, "batch": 8, "workers": 0, "image_size": 4, "classes": 60}
    return load("shards", **{**base, **settings})


def labels(batches: object) -> list[int]:
    return [int(label) for _, y in batches for label in y]


def test_imagenet_can_be_read_from_shards(root: Path) -> None:
    d = load("imagenet", directory=root, batch=8, workers=0, image_size=4)
    assert (d.name, d.classes, d.train.examples, d.test.examples) == ("imagenet", 1000, 53, 7)
    assert sorted(labels(d.train.epoch(0))) == list(range(53))
    (root / "train").mkdir()  # class folders take precedence
    with pytest.raises(WiringError, match="must contain the folders train, and val or test"):
        load("imagenet", directory=root, batch=8)


def test_loads_examples(root: Path) -> None:
    d = data(root)
    assert (d.name, d.classes, d.shape, d.train.examples, len(d.train), d.test.examples) == (
        "shards", 60, (3, 4, 4), 53, 7, 7,
    )  # fmt: skip
    x, y = next(d.train.epoch(0))
    assert (x.shape, x.dtype, y.dtype) == ((8, 3, 4, 4), torch.float32, torch.int64)
    assert torch.allclose((x[:, 0] * 0.229 + 0.485) * 255, y.view(-1, 1, 1).expand(-1, 4, 4).float(), atol=1e-3)
    assert labels(d.test.epoch(0)) == labels(d.test.epoch(1)) == list(range(7))


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 1), (1, 3), (2, 0), (2, 2), (4, 0)])
def test_every_example_is_seen_once_over_ranks_and_workers(root: Path, world: int, workers: int) -> None:
    for part in ("train", "test"):
        seen = []
        for rank in range(world):
            loader = getattr(data(root, rank=rank, world=world, workers=workers), part)
            batches = list(loader.epoch(0))
            assert [len(y) for _, y in batches] == loader.sizes()
            seen += labels(batches)
        assert sorted(seen) == list(range(loader.examples))


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_batches_depend_on_seed_epoch_and_start_alone(root: Path, workers: int) -> None:
    first = list(data(root, workers=workers).train.epoch(1))
    before = torch.get_rng_state()
    for start in (0, 1, 2, 5, 7):
        rest = list(data(root, workers=workers).train.epoch(1, start))
        assert len(rest) == 7 - start
        for one, other in zip(first[start:], rest, strict=True):
            assert all(map(torch.equal, one, other))
    assert torch.equal(before, torch.get_rng_state())


def test_every_option_changes_something(root: Path) -> None:
    order = labels(data(root).train.epoch(0))
    assert order != labels(data(root).train.epoch(1))
    assert order != labels(data(root, seed=1).train.epoch(0))
    assert order != labels(data(root, workers=2).train.epoch(0))
    assert order != labels(data(root, buffer=5).train.epoch(0))
    # Without a buffer, only the order of the shards is shuffled.
    steps = [
        b - a for a, b in zip(*(labels(data(root, buffer=0).train.epoch(0))[cut:] for cut in (0, 1)), strict=False)
    ]
    assert sum(step != 1 for step in steps) <= 4
    augmented, plain = (next(data(root, augment=a, image_size=4).train.epoch(0)) for a in (True, False))
    assert torch.equal(augmented[1], plain[1])
    assert data(root, image_size=6).shape == (3, 6, 6)


def test_augments_training_images(root: Path) -> None:
    file = io.BytesIO()
    Image.radial_gradient("L").save(file, "png")
    write(root / "train-000.tar", {"a.png": file.getvalue(), "a.cls": b"1"})
    for path in sorted(root.glob("train-*.tar"))[1:]:
        path.unlink()
    d, plain = data(root), data(root, augment=False)
    seen = [next(d.train.epoch(number))[0] for number in range(2)]
    assert not torch.equal(*seen)
    assert torch.equal(*(next(plain.train.epoch(number))[0] for number in range(2)))
    # The augmentation of an example does not depend on the worker that decodes it.
    assert torch.equal(seen[0], next(data(root, workers=1).train.epoch(0))[0])


def test_sizes_json_is_used(root: Path) -> None:
    (root / "sizes.json").write_text(json.dumps({"train-001.tar": 12, "val-000.tar": 4}))
    d = data(root)
    assert d.train.examples == 52
    assert 22 not in labels(d.train.epoch(0))
    (root / "sizes.json").write_text(json.dumps({"train-001.tar": 14}))
    with pytest.raises(
        WiringError, match=r"train-001.tar: example 13 .*ends before its example 13 of 14. Is it complete, and"
    ):
        labels(data(root).train.epoch(0))
    for wrong, message in (("{", "is damaged"), ("[1]", "is damaged"), ('{"val-001.tar": "x"}', "got 'x'")):
        (root / "sizes.json").write_text(wrong)
        with pytest.raises(WiringError, match=message):
            data(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, r"sizes\.json is damaged \(.*recursion.*\). Fix or remove it"),
        (
            '{"train-001.tar": 1000000000000}',
            r"sizes\.json gives train-001\.tar 1000000000000 examples, .* \d\d at most. Fix",
        ),
        ('{"train-001.tar": 1' + "0" * 4000 + "}", r"sizes\.json gives train-001\.tar 10+ … 0+ examples"),
        ('{"train-001.tar": [' + "0, " * 9000 + "0]}", r"sizes\.json must give the number of .{,200}$"),
        (
            json.dumps({f"train-00{i}.tar": 0 for i in range(5)}),
            r"train-000\.tar, … must have at least one example, .* to /.*sizes\.json\.$",
        ),
        ('{"train-001.tar": true}', r"sizes\.json must give the number of examples of train-001\.tar, got True"),
    ],
    ids=["nested", "many", "digits", "list", "none", "bool"],
)
def test_sizes_json_is_checked(text: str, message: str, root: Path) -> None:
    (root / "sizes.json").write_text(text)
    with pytest.raises(WiringError, match=message):
        data(root)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"x.png": b"no image", "x.cls": b"3"}, r"train-002.tar: x.png cannot be decoded"),
        ({"x.png": png(3), "x.cls": b"three"}, "must hold a number, got b'three'"),
        ({"x.png": png(3)}, r"there is no .cls file for it"),
    ],
)
def test_corrupt_members_raise_or_are_skipped(root: Path, broken: dict[str, bytes], message: str, workers: int) -> None:
    write(root / "train-002.tar", {"readme.txt": b"not an example", **broken})
    with pytest.raises(WiringError, match=message):
        labels(data(root, workers=workers).train.epoch(0))
    d = data(root, workers=workers, skip_corrupt=True)
    assert sorted(labels(d.train.epoch(0))) == [n for n in range(53) if n != 23]
    assert d.train.skipped == [f"{root / 'train-002.tar'}: x.png"]


def test_truncated_shards(root: Path) -> None:
    path = root / "train-003.tar"
    content = path.read_bytes()
    for size in (5000, 512 * 18, 512 * 20, 512 * 19, 100):
        path.write_bytes(content[:size])
        with pytest.raises(WiringError, match=r"train-003.tar is truncated or damaged"):
            data(root)
    path.write_bytes(content[: 512 * 20])
    (root / "sizes.json").write_text(json.dumps({path.name: 16}))  # so that its headers are not read
    with pytest.raises(WiringError, match=r"the shard (is damaged|ends) before its example"):
        labels(data(root).train.epoch(0))
    d = data(root, skip_corrupt=True)
    seen = labels(d.train.epoch(0))
    assert len(seen) + len(d.train.skipped) == 53
    assert set(range(24)) | set(range(40, 53)) < set(seen)


def test_rejects_bad_settings(root: Path, tmp_path: Path) -> None:
    with pytest.raises(WiringError, match="needs directory="):
        data(None)
    with pytest.raises(WiringError, match="needs classes="):
        data(root, classes=None)
    with pytest.raises(WiringError, match="a buffer of at least 0, got classes = 60 and buffer = -1"):
        data(root, buffer=-1)
    with pytest.raises(WiringError, match=r"labels must be from 0 to 9, got \d\d for \S+: 0\d\d.png"):
        labels(data(root, classes=10, skip_corrupt=True).train.epoch(0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(WiringError, match=r"named train-\*.tar, but it has none"):
        data(tmp_path / "empty")


def test_accepts_test_instead_of_val_and_keys_in_folders(root: Path) -> None:
    for path in root.glob("val-*.tar"):
        path.unlink()
    write(root / "test-0.tar", {f"{where}/0.{end}": c for where in "ab" for end, c in (("png", png(1)), ("cls", b"1"))})
    assert labels(data(root).test.epoch(0)) == [1, 1]


def test_sparse_members_are_corrupt(root: Path) -> None:
    """A header of 512 bytes can stand for gigabytes of zeros."""
    path = next(root.glob("train-*.tar"))
    member = tarfile.TarInfo("9.png")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 0
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % (2**32)  # the size with its holes
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    label = tarfile.TarInfo("9.cls")
    label.size = 1
    with tarfile.open(path, "w") as tar:
        tar.fileobj.write(header)
        tar.addfile(label, io.BytesIO(b"1"))
    for noted in root.glob("sizes.json"):
        noted.unlink()
    with pytest.raises(WiringError, match=r"9\.png cannot be decoded \(sparse files are not supported"):
        labels(data(root).train.epoch(0))
