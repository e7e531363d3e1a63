"""Byte-pair encoding and BLEU, by the libraries that compute them."""

import sys
from pathlib import Path

import pytest

from wirings import WiringError
from wirings.models.seq2seq import END, PAD, START
from wirings.train.data.bleu import bleu
from wirings.train.data.bpe import SMALLEST, BytePairs

LINES = ["The dog runs.", "The dog sleeps.", "Der Hund schläft.", "Der Hund rennt."]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path))
    return tmp_path / "tokenizers"


def test_every_text_survives_encoding() -> None:
    pairs = BytePairs.train(LINES, SMALLEST + 20)
    assert len(pairs) == SMALLEST + 20
    texts = ["The Hund runs.", "Ein Vögelchen – 鳥!", "x"]
    tokens = pairs.encode(texts)
    assert pairs.decode(tokens) == texts
    assert len(tokens[0]) < len("The Hund runs.")
    assert not {PAD, START, END} & {token for sentence in tokens for token in sentence}


def test_decoding_ends_at_the_end() -> None:
    pairs = BytePairs.train(LINES, SMALLEST + 20)
    [sentence] = pairs.encode(["The dog runs."])
    assert pairs.decode([[*sentence, END, *sentence], [START, *sentence, PAD]]) == ["The dog runs."] * 2


def test_a_vocabulary_depends_on_the_lines_and_its_size_and_is_cached(cache: Path) -> None:
    first = BytePairs.train(LINES, 290)
    [file] = cache.iterdir()
    assert str(BytePairs.train(LINES, 290)) == str(first)
    file.write_text("damaged")
    assert str(BytePairs.train(LINES, 290)) == str(first)
    BytePairs.train(LINES, 291)
    BytePairs.train(LINES[:3], 290)
    assert len(list(cache.iterdir())) == 3


def test_rejects_a_vocabulary_without_all_bytes() -> None:
    with pytest.raises(WiringError, match=f"vocabulary must be an integer from {SMALLEST} to 1,048,576, got 200"):
        BytePairs.train(LINES, 200)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(WiringError, match="needs the package tokenizers, which is not installed: pip install"):
        BytePairs.train(LINES, 300)


def test_bleu_of_a_translation() -> None:
    references = ["Ein Hund rennt im Schnee.", "Ein Mann wartet auf den Bus."]
    assert bleu(references, references) == 100
    # Of words (the full stops included), pairs, triples and quadruples, one, two, two and two are wrong.
    precisions = 12 / 13 * 9 / 11 * 7 / 9 * 5 / 7
    assert bleu(["Ein Hund rennt im Gras.", references[1]], references) == pytest.approx(100 * precisions**0.25)
    assert bleu([text.lower() for text in references], references) < 80  # case matters
    with pytest.raises(WiringError, match="expected one translation for each of 2 sentences, got 1"):
        bleu(references[:1], references)


@pytest.mark.parametrize("vocabulary", [10**12, 2**63, 10**30, 2**20 + 1, 258, -1, 300.0, True])
def test_vocabularies_of_any_size_are_refused(vocabulary: object) -> None:
    """The library ends the process if there is no memory for a vocabulary."""
    with pytest.raises(WiringError, match="vocabulary must be an integer from 259 to 1,048,576"):
        BytePairs.train(["a b"], vocabulary)  # type: ignore[arg-type]
