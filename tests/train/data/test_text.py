"""Text data sets: how text is found and split, windows of it, characters as tokens, and errors."""

import bz2
import gzip
import hashlib
import lzma
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wirings.errors import WiringError
from wirings.train.data import Data, TextLoader, get, load, shakespeare, unpack
from wirings.train.data.text_loader import hold_out_text

EVERY = pytest.mark.parametrize("name", ["text", "shakespeare"])


@pytest.fixture
def sample(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments for `load` that load a sample of the data set."""
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sample"
    folder.mkdir()
    return {"batch": 4, **get(name).write_sample(folder)}


def text_of(data: Data) -> tuple[bytes, bytes]:
    """The training and validation text that loaders hold."""
    return tuple(bytes(loader._text.numpy()) for loader in (data.train, data.test))  # type: ignore[attr-defined, return-value]


def windows(loader: TextLoader, epoch: int = 0, start: int = 0) -> torch.Tensor:
    return torch.cat([x for x, _ in loader.epoch(epoch, start)])


@EVERY
def test_windows_are_followed_by_their_labels(name: str, sample: dict[str, Any]) -> None:
    data = load(name, **sample)
    assert (data.name, data.shape, data.tokens, data.unit) == (name, (8,), True, "tokens")
    for loader in (data.train, data.test):
        for x, y in loader.epoch(0):
            assert x.shape == y.shape == (len(x), 8)
            assert x.dtype == y.dtype == torch.int64
            assert torch.equal(x[:, 1:], y[:, :-1])
            assert int(y.max()) < data.classes
    assert all(size == 4 for size in data.train.sizes()), "one size, so that one step is captured"


@EVERY
def test_windows_depend_on_seed_and_step_alone(name: str, sample: dict[str, Any]) -> None:
    data = load(name, **sample, epoch_steps=6)
    assert len(data.train) == 6
    state = torch.get_rng_state()
    seen = torch.cat([windows(data.train, epoch) for epoch in range(2)])  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state), "the global generator must not be used"
    more: Any = load(name, **sample, epoch_steps=4).train
    assert torch.equal(torch.cat([windows(more, epoch) for epoch in range(3)]), seen), "whatever the epochs' length"
    assert torch.equal(windows(more, 1, 2), seen[24:32]), "from the middle of an epoch"
    other: Any = load(name, **sample, epoch_steps=4, seed=1).train
    assert not torch.equal(windows(other), windows(more))
    ranks: list[Any] = [load(name, **sample, epoch_steps=4, rank=rank, world=2).train for rank in range(2)]
    parts = torch.cat([windows(rank).view(4, 2, 8) for rank in ranks], 1)
    assert torch.equal(parts.view(-1, 8), windows(more))


def test_validates_on_all_windows_without_overlap() -> None:
    loader = TextLoader(torch.arange(20, dtype=torch.uint8), 6, batch=2)
    batches = list(loader.epoch(0))
    assert torch.cat([x for x, _ in batches]).flatten().tolist() == list(range(18))
    assert torch.cat([y for _, y in batches]).flatten().tolist() == list(range(1, 19))
    whole = TextLoader(torch.arange(19, dtype=torch.uint8), 6, batch=2)
    assert whole.examples == 3, "the last label is the last token"
    loader.begin(0)
    first = loader.next(2)[0]
    loader.epoch(0)
    assert torch.equal(loader.next(2)[0], first)


def test_every_window_can_be_drawn() -> None:
    loader = TextLoader(torch.arange(10, dtype=torch.uint8), 7, steps=40, batch=4)
    assert {tuple(window) for window in windows(loader).tolist()} == {tuple(range(i, i + 7)) for i in range(3)}


def test_finds_the_parts_of_a_text(tmp_path: Path) -> None:
    with lzma.open(tmp_path / "train.txt.xz", "wb") as file:
        file.write(b"a" * 40)
    with gzip.open(tmp_path / "val.txt.gz", "wb") as file:
        file.write(b"b" * 30)
    (tmp_path / "README.md").write_bytes(b"not text of the corpus")
    data = load("text", directory=tmp_path, batch=2, context=8)
    assert text_of(data) == (b"a" * 40, b"b" * 30)
    assert data.md5 == hashlib.md5(b"a" * 40 + b"b" * 30).hexdigest()
    alone = load("text", directory=tmp_path / "train.txt.xz", batch=2, context=8, fraction=0.25)
    assert text_of(alone) == (b"a" * 30, b"a" * 10)
    named = load("text", directory=tmp_path / "train.txt.xz", batch=2, context=8, validation="val.txt.gz")
    assert text_of(named) == text_of(data)
    (tmp_path / "valid").mkdir()
    with pytest.raises(WiringError, match=r"holds both val.txt.gz and valid\. Remove one"):
        load("text", directory=tmp_path, batch=2, context=8)


def test_splits_a_folder_by_fraction_and_by_file(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / f"part{number % 3}" / f"{number}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([65 + number]) * 10)
    (tmp_path / ".hidden").write_bytes(b"!" * 99)
    at_end = text_of(load("text", directory=tmp_path, batch=2, context=8, fraction=0.2))
    assert [len(part) for part in at_end] == [160, 40]
    order = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("part*/*"))
    assert b"".join(at_end) == b"".join((tmp_path / path).read_bytes() for path in order)
    train, test = text_of(load("text", directory=tmp_path, batch=2, context=8, fraction=0.4, split="files"))
    assert set(train).isdisjoint(test)
    assert len(train) + len(test) == 200
    more = text_of(load("text", directory=tmp_path, batch=2, context=8, fraction=0.6, split="files"))[1]
    assert set(test) < set(more), "a file's side depends on its path alone"
    inside = load("text", directory=tmp_path, batch=2, context=8, validation="part1")
    assert len(text_of(inside)[1]) == 70
    assert set(text_of(inside)[0]).isdisjoint(text_of(inside)[1])


@pytest.mark.parametrize("spelling", ["val.txt", "../{name}/val.txt", "./sub/../val.txt", "{root}/val.txt", "link.txt"])
def test_excludes_the_validation_text_however_it_is_spelled(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"a" * 40)
    (tmp_path / "val.txt").write_bytes(b"b" * 30)
    if spelling == "link.txt":
        (tmp_path / "link.txt").symlink_to(tmp_path / "val.txt")
    held = spelling.format(name=tmp_path.name, root=tmp_path)
    assert text_of(load("text", directory=tmp_path, batch=2, context=8, validation=held)) == (b"a" * 40, b"b" * 30)


def test_trains_on_the_part_that_is_named_for_it(tmp_path: Path) -> None:
    for name, letter in (("train.txt", b"a"), ("val.txt", b"b"), ("test.txt", b"c"), ("notes.md", b"d")):
        (tmp_path / name).write_bytes(letter * 40)
    options: dict[str, Any] = {"directory": tmp_path, "batch": 2, "context": 8}
    assert text_of(load("text", **options)) == (b"a" * 40, b"b" * 40), "val wins over test"
    assert text_of(load("text", **options, validation="val.txt")) == (b"a" * 40, b"b" * 40)
    assert text_of(load("text", **options, validation="test.txt")) == (b"a" * 40, b"c" * 40)
    with pytest.raises(WiringError, match=r"nothing is left to train on: .*train\.txt is all of the text"):
        load("text", **options, validation="train.txt")
    (tmp_path / "val.txt").unlink()
    assert text_of(load("text", **options)) == (b"a" * 40, b"c" * 40)
    (tmp_path / "test.txt").unlink()
    assert text_of(load("text", **options, fraction=0.25)) == (b"a" * 30, b"a" * 10)
    (tmp_path / "train").mkdir()
    with pytest.raises(WiringError, match=r"holds both train and train\.txt\. Remove one"):
        load("text", **options)


@EVERY
def test_holdout_leaves_the_validation_text_alone(name: str, sample: dict[str, Any]) -> None:
    train, test = text_of(load(name, **sample))
    rest, held = text_of(load(name, **sample, holdout=0.2, seed=5))
    assert held != test
    assert (rest, held) == text_of(load(name, **sample, holdout=0.2))
    assert sorted(rest + held) == sorted(train)
    assert len(held) == pytest.approx(0.2 * len(train), rel=0.1)


def test_holdout_is_spread_over_the_text() -> None:
    rest, held = hold_out_text(np.arange(1000), 0.1)
    assert held.tolist() == [place for place in range(1000) if place % 50 >= 45]
    assert sorted([*rest, *held]) == list(range(1000))


def test_characters_are_tokens(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    text = "Über allen Gipfeln ist Ruh.\n" * 5
    path.write_text(text, encoding="utf-8")
    data = load("shakespeare", directory=path, batch=2, context=4, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert data.names == tuple(sorted(set(text)))
    assert data.classes == len(data.names)
    tokens = b"".join(text_of(data))
    assert "".join(data.names[token] for token in tokens) == text
    assert len(text_of(data)[0]) == 126
    wide = tmp_path / "wide.txt"
    wide.write_text("".join(chr(0x4E00 + number) for number in range(300)), encoding="utf-8")
    many: Any = load("shakespeare", directory=wide, batch=2, context=4, sha256=None)
    assert many.classes == 300
    assert many.train._text.tolist() == list(range(270)), "more tokens than a byte holds"


def serve(monkeypatch: pytest.MonkeyPatch, contents: bytes | None) -> None:
    import io

    def answer(url: str, timeout: float) -> io.BytesIO:
        assert (url, timeout) == (shakespeare.URL, 30.0)
        if contents is None:
            raise urllib.error.URLError("no network here")
        return io.BytesIO(contents)

    monkeypatch.setattr(urllib.request, "urlopen", answer)


def test_fetches_shakespeare_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "cache"))
    contents = b"First Citizen:\n" * 20
    serve(monkeypatch, contents)
    with pytest.raises(WiringError, match="has another checksum than expected"):
        get("shakespeare").fetch()
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(contents).hexdigest())
    path = get("shakespeare").fetch()
    assert path == tmp_path / "cache" / "tinyshakespeare.txt"
    assert path.read_bytes() == contents
    serve(monkeypatch, None)
    assert get("shakespeare").fetch() == path, "not downloaded again"
    assert get("shakespeare").fetch(tmp_path / "cache") == path
    with pytest.raises(WiringError, match="there is no file or folder"):
        get("shakespeare").fetch(tmp_path / "none")
    with pytest.raises(WiringError, match=r"a folder with input\.txt, got "):
        get("shakespeare").fetch(tmp_path)
    (tmp_path / "other.txt").write_bytes(b"other")
    with pytest.raises(WiringError, match=r"is not Tiny Shakespeare as published.* data\.options\.sha256=null\."):
        get("shakespeare").fetch(tmp_path / "other.txt")
    path.write_bytes(contents[:-1])
    with pytest.raises(WiringError, match=r"neither found nor downloaded: .*no network here.*--data"):
        get("shakespeare").fetch()
    (tmp_path / "input.txt").write_bytes(contents)
    assert get("shakespeare").fetch(tmp_path).read_bytes() == contents
    path.unlink()
    (tmp_path / "input.txt").write_bytes(b"other")
    with pytest.raises(WiringError, match="is not Tiny Shakespeare as published"):
        get("shakespeare").fetch(tmp_path)


@pytest.mark.parametrize(
    ("contents", "options", "message"),
    [
        (b"", {}, "one.txt is empty. Give a file or folder of text."),
        (b"a" * 50, {"context": 50}, "one.txt has 45 tokens, but a window needs 51"),
        (b"a" * 50, {"context": 20}, "one.txt has 5 tokens, but a window needs 21"),
        (b"a" * 50, {"context": 0}, "data.options.context must be an integer of at least 1, got 0."),
        (b"a" * 50, {"epoch_steps": 0}, "data.options.epoch_steps must be an integer of at least 1, got 0."),
        (b"a" * 50, {"fraction": 1.5}, "data.options.fraction must be a number between 0 and 1, got 1.5."),
        (b"a" * 50, {"holdout": 0}, "data.options.holdout must be a number between 0 and 1, got 0."),
        (b"a" * 50, {"holdout": "9" * 10**6}, "holdout must be a number between 0 and 1, got '999999"),
        (b"a" * 50, {"split": "flies"}, "unknown data.options.split 'flies'. Did you mean 'files'?"),
        (b"a" * 50, {"split": "files"}, "split: files leaves no file to validate on"),
        (b"a" * 50, {"validation": "none.txt"}, "there is no validation text"),
        (b"a" * 50, {"image_size": 8}, "data set 'text' has no images, got image_size = 8."),
    ],
)
def test_rejects_text_that_cannot_be_used(
    tmp_path: Path, contents: bytes, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "one.txt").write_bytes(contents)
    with pytest.raises(WiringError) as caught:
        load("text", directory=tmp_path / "one.txt", **{"batch": 2, "context": 4, **options})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("contents", "kind"),
    [
        (bz2.compress(b"text" * 100), "bzip2"),
        (gzip.compress(b"text" * 100), "gzip"),
        (lzma.compress(b"text" * 100), "xz"),
        (b"PK\3\4" + bytes(100), "zip"),
        (b"\x28\xb5\x2f\xfd" + bytes(100), "zstd"),
    ],
    ids=["bzip2", "gzip", "xz", "zip", "zstd"],
)
def test_rejects_files_that_are_still_compressed(contents: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"text" * 100)
    (tmp_path / "val.packed").write_bytes(contents)
    with pytest.raises(WiringError, match=rf"val\.packed is compressed \({kind}\), not text\. Decompress it"):
        load("text", directory=tmp_path, batch=2, context=4)


def test_warns_of_files_that_are_not_text(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(b"\x89PNG\0\0" * 10)
    (tmp_path / "a.md").write_bytes(b"text" * 100)
    with pytest.warns(UserWarning, match=r"/0\.png, .*/1\.png, .*/2\.png and 2 more cannot be text"):
        load("text", directory=tmp_path, batch=2, context=4)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_bounds_what_a_compressed_file_unpacks_to(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("text.gz" if pack is gzip.compress else "text.xz")
    monkeypatch.setattr(unpack, "MOST_BYTES", 2**20)
    path.write_bytes(pack(bytes(2**20)) + pack(b"end"))  # two streams in one file
    with pytest.raises(WiringError, match=r"unpacks to more than 1,048,576 bytes, .* decompress it yourself"):
        load("text", directory=path)
    path.write_bytes(pack(bytes(2**20 - 3)) + pack(b"end"))
    assert unpack.read_bytes(path) == bytes(2**20 - 3) + b"end"
    random = np.random.default_rng(0).bytes(2**21)  # large files may be larger
    path.write_bytes(pack(random))
    assert unpack.read_bytes(path) == random
    path.write_bytes(pack(random)[:-1000])
    with pytest.raises(WiringError, match="cannot be decompressed"):
        unpack.read_bytes(path)


def test_bounds_the_memory_of_decompression(tmp_path: Path) -> None:
    """The header of a file says how much memory its decompressor takes."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0}]
    packed = bytearray(lzma.compress(b"text" * 100, filters=filters))
    header = packed[12 : 12 + 4 * (packed[12] + 1)]
    header[4] = 39  # the size of the dictionary: 3 GiB
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    packed[12 : 12 + len(header)] = header
    (tmp_path / "text.xz").write_bytes(packed)
    with pytest.raises(WiringError, match="cannot be decompressed"):
        load("text", directory=tmp_path / "text.xz")


def test_rejects_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WiringError, match="needs a file or folder of text"):
        load("text")
    with pytest.raises(WiringError, match="there is no text"):
        load("text", directory=tmp_path / "none")
    with pytest.raises(WiringError, match=r"holds no files\."):
        load("text", directory=tmp_path)
    for ending in ("xz", "gz"):
        path = tmp_path / f"text.{ending}"
        path.write_bytes(b"plain")
        with pytest.raises(WiringError, match=rf"text\.{ending} cannot be decompressed"):
            load("text", directory=path)
    (tmp_path / "latin1.txt").write_bytes("Über".encode("latin-1") * 50)
    with pytest.raises(WiringError, match=r"is not UTF-8 text \(byte 0\), so it has no characters as tokens"):
        load("shakespeare", directory=tmp_path / "latin1.txt", sha256=None)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(WiringError, match=r"empty\.txt is empty"):
        load("shakespeare", directory=tmp_path / "empty.txt", sha256=None)
    with pytest.raises(WiringError, match="does not have the checksum"):
        load("shakespeare", directory=tmp_path / "empty.txt", sha256="0")
    (tmp_path / "input.txt").write_bytes(b"")
    with pytest.raises(WiringError, match=r"/input\.txt is empty"):
        load("shakespeare", directory=tmp_path, sha256=None)
    with pytest.raises(WiringError, match="there is no file or folder"):
        load("shakespeare", directory=tmp_path / "none", sha256=None)


def test_streams_of_xz_take_time_in_proportion_to_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Counting:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.decompressor = decompressor(*args, **options)

        def decompress(self, piece: bytes, most: int) -> bytes:
            given.append(len(piece))
            return self.decompressor.decompress(piece, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.decompressor, name)

    decompressor = lzma.LZMADecompressor
    monkeypatch.setattr(lzma, "LZMADecompressor", Counting)
    handled = []
    for streams in (3000, 6000):
        given.clear()
        (tmp_path / "many.xz").write_bytes(lzma.compress(b"") * streams)
        assert unpack.read_bytes(tmp_path / "many.xz") == b""
        handled.append(sum(given))
    assert handled[1] < 2.5 * handled[0]


@pytest.mark.parametrize("padding", [0, 4, 16_384, 50_000])
def test_streams_of_xz_are_joined(padding: int, tmp_path: Path) -> None:
    texts = [np.random.default_rng(size).bytes(size) for size in (0, 1, 16_300, 0, 100_000, 3)]
    packed = [lzma.compress(text, format) for text in texts for format in (lzma.FORMAT_XZ, lzma.FORMAT_ALONE)]
    path = tmp_path / "x.xz"
    path.write_bytes(bytes(padding).join(packed) + bytes(padding))
    assert unpack.read_bytes(path) == b"".join(text for text in texts for _ in range(2))
    path.write_bytes(bytes(padding).join(packed)[:-1])
    with pytest.raises(WiringError, match=r"x\.xz cannot be decompressed \(the file is truncated\)"):
        unpack.read_bytes(path)
