"""Multi30k: reading the files, encoding, translating and measuring."""

import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wirings import WiringError, models
from wirings.models.seq2seq import END, START
from wirings.train.data import Data, get, load
from wirings.train.data.multi30k import REFERENCES, TOKENIZER, TRANSLATIONS, translate
from wirings.train.data.pair_loader import IGNORED

Load = Callable[..., Data]


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few pairs."""
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sample"
    folder.mkdir()
    get("multi30k").write_sample(folder)
    return folder


@pytest.fixture
def load_sample(sample: Path) -> Load:
    def load_it(**options: Any) -> Data:
        return load("multi30k", **{"directory": sample, "batch": 4, "vocabulary": 300, "lengths": [20], **options})

    return load_it


def test_pairs_are_encoded(load_sample: Load) -> None:
    data = load_sample()
    assert (data.name, data.classes, data.shape, data.tokens) == ("multi30k", 300, (2, 20), True)
    assert (data.train.examples, data.test.examples) == (12, 4)
    [(x, y)] = data.test.epoch(0)
    assert (x.shape, y.shape) == ((4, 2, 20), (4, 20))
    assert (x[:, 1, 0] == START).all()
    assert (x < data.classes).all()
    assert torch.equal((y == END).sum(1), torch.ones(4, dtype=torch.int64))
    following, known = x[:, 1, 1:], y[:, :-1] != IGNORED
    assert torch.equal(following[known], y[:, :-1][known])


def test_packed_files_and_other_splits_and_languages(sample: Path, load_sample: Load) -> None:
    before = load_sample()
    for language in ("en", "de"):
        path = sample / f"test_2016_flickr.{language}"
        (sample / f"val.{language}.gz").write_bytes(gzip.compress(path.read_bytes()))
    [(x, _)], [(same, _)] = load_sample(test="val").test.epoch(0), before.test.epoch(0)
    assert torch.equal(x, same)
    turned = load_sample(source="de", target="en")
    [(other, _)] = turned.test.epoch(0)
    assert torch.equal(other[:, 1, 1:], torch.where(x[:, 0, :-1] == 0, 0, x[:, 0, :-1]))
    assert turned.md5 != before.md5 == load_sample().md5


def test_a_model_is_measured_by_bleu_and_its_translations_are_kept(load_sample: Load) -> None:
    data = load_sample(beams=2)
    torch.manual_seed(0)
    model = models.get("seq2seq", classes=data.classes, layers=1, width=16, heads=2, hidden=16).eval()
    assert data.metric.name == "bleu"
    assert data.measure is not None
    found = data.measure(model)
    assert found.value is not None
    assert 0 <= found.value < 50
    assert set(found.files) == {TRANSLATIONS, REFERENCES, TOKENIZER}
    assert found.files[REFERENCES].startswith("Der Hund rennt.\nDer Hund singt.\n")
    assert found.files[TRANSLATIONS].count("\n") == 4


def test_translations_are_in_the_order_of_the_sentences(load_sample: Load) -> None:
    torch.manual_seed(0)
    model = models.get("seq2seq", classes=20, layers=1, width=16, heads=2, hidden=16).eval()
    sentences = [[5, 6, 7, 8, 9], [4], [10, 11, 12]]
    together = translate(model, sentences, beams=2, penalty=1.0)
    for sentence, found in zip(sentences, together, strict=True):
        [alone] = translate(model, [sentence], beams=2, penalty=1.0)
        shared = min(len(found), len(alone))  # longer sentences may become longer
        assert found[:shared] == alone[:shared]


def test_only_a_translating_model_translates(load_sample: Load) -> None:
    with pytest.raises(WiringError, match="only the model 'seq2seq' translates, got Linear"):
        translate(torch.nn.Linear(1, 1), [[3]], beams=1, penalty=0.0)


def test_sacrebleu_is_asked_for_before_anything_is_read(monkeypatch: pytest.MonkeyPatch, load_sample: Load) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(WiringError, match=r"BLEU needs the package sacrebleu.*set data\.options\.bleu=false"):
        load_sample(directory=Path("nowhere"))
    data = load_sample(bleu=False)
    assert data.metric.name == "nats"
    assert data.measure is not None
    model = models.get("seq2seq", classes=data.classes, layers=1, width=16, heads=2, hidden=16).eval()
    found = data.measure(model)
    assert found.value is None
    assert TRANSLATIONS in found.files


def break_lines(folder: Path) -> None:
    with open(folder / "train.de", "a") as file:
        file.write("Noch ein Satz.\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "train.de").unlink(), r"there is no train\.de or train\.de\.gz in .*sample"),
        (break_lines, r"train\.en and train\.de in .* must have equally many lines, at least one, got 12 and 13"),
        (lambda folder: (folder / "train.en").write_bytes(b"\xff\n"), r"train\.en is not UTF-8: .* at byte 0"),
        (lambda folder: [p.write_text("") for p in folder.glob("test*")], "at least one, got 0 and 0"),
        (lambda folder: (folder / "train.en").rename(folder / "train.en.gz"), "cannot be decompressed"),
    ],
)
def test_damaged_files(damage: Callable[[Path], Any], message: str, sample: Path, load_sample: Load) -> None:
    damage(sample)
    with pytest.raises(WiringError, match=message):
        load_sample()


def test_mistakes_in_options(load_sample: Load) -> None:
    with pytest.raises(WiringError, match=r"'multi30k' needs the folder with train\.en, train\.de and so on"):
        load_sample(directory=None)
    with pytest.raises(WiringError, match=r"there is no test_2017\.en"):
        load_sample(test="test_2017")
    with pytest.raises(
        WiringError, match=r"data\.options\.lengths ends with 4, but a sentence of /.*sample has \d+ tokens"
    ):
        load_sample(lengths=[4])
    for lengths in (20, [], [20, 10], "20", None):
        with pytest.raises(WiringError, match=r"data\.options\.lengths must be increasing integers above 1, got "):
            load_sample(lengths=lengths)
    with pytest.raises(WiringError, match="multi30k: beams must be a whole number from 1 to 10000, got 0"):
        load_sample(beams=0)
    with pytest.raises(WiringError, match="multi30k: penalty must be a number"):
        load_sample(penalty="long")
    with pytest.raises(WiringError, match="image_size"):
        load_sample(image_size=32)


def test_sentences_of_any_length_are_refused(sample: Path, load_sample: Load) -> None:
    """Learning the tokens of one word of ten million letters would take hours."""
    lines = (sample / "train.de").read_text().splitlines()
    (sample / "train.de").write_text("\n".join([lines[0], "a" * 10**7, *lines[2:]]) + "\n")
    with pytest.raises(WiringError, match=r"line 2 of .*train\.de has 10,000,000 characters.* at most 20,000"):
        load_sample()
