"""Multi30k (Elliott and others, 2016): 29,000 descriptions of images in English and German, one sentence each.

The folder holds raw text, one sentence a line, as in ``data/task1/raw`` of the repository multi30k/dataset:
``train.en``, ``train.de`` and so on with ``val`` and ``test_2016_flickr``, plain or packed (``.gz``). Other parallel
text in the same layout works, too. Settings are chosen on ``val``, with the option ``test: val``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from wirings.errors import WiringError
from wirings.models.beam_search import beam_search, check_search
from wirings.models.seq2seq import END, PAD, Seq2Seq
from wirings.train.data.base import Data, Dataset, LoadOptions, Measured, register_dataset
from wirings.train.data.bleu import bleu as bleu_of
from wirings.train.data.bleu import need_sacrebleu
from wirings.train.data.bpe import BytePairs
from wirings.train.data.metrics import BLEU, NATS
from wirings.train.data.pair_loader import PairLoader, check_increasing
from wirings.train.data.unpack import read_bytes
from wirings.utils.checks import check_bool

TRANSLATIONS, REFERENCES, TOKENIZER = "translations.txt", "references.txt", "tokenizer.json"
"""Files of a run: its translations of the test sentences, what they should be, and the vocabulary."""
AT_ONCE = 256
"""Number of sentences that are translated at the same time."""
LONGEST = 20_000
"""The most characters of a sentence. Learning tokens takes quadratic time in the length of a word."""


@register_dataset("multi30k")
class Multi30k(Dataset):
    """Multi30k, from a folder. A model is measured by BLEU."""

    title = "Multi30k"
    held_out = MappingProxyType({"test": "val"})

    def load(
        self,
        options: LoadOptions,
        *,
        source: str = "en",
        target: str = "de",
        test: str = "test_2016_flickr",
        vocabulary: int = 8000,
        lengths: Sequence[int] = (24, 64),
        bleu: bool = True,
        beams: int = 5,
        penalty: float = 1.0,
    ) -> Data:
        """Read the sentences and encode them with a vocabulary that both languages share.

        Args:
            options: Options of every data set. The batch is the number of pairs of the shortest length.
            source: Language to translate from, as the files are named.
            target: Language to translate to.
            test: Which sentences to test on: ``val`` to choose settings.
            vocabulary: Number of tokens, learned from the training sentences by byte-pair encoding.
            lengths: Numbers of tokens that pairs are padded to, increasing.
            bleu: Whether to measure by BLEU, which needs sacrebleu; otherwise by the loss. Translations are written to
                the run's folder anyway, so that BLEU can be computed later.
            beams: Number of beams of the search for translations.
            penalty: Length penalty of that search; see `wirings.models.beam_search`.
        """
        if check_bool("multi30k", "bleu", bleu):
            need_sacrebleu()
        check_increasing(lengths)
        check_search("multi30k", beams, penalty)  # now, and not after hours of training
        if options.directory is None:
            raise WiringError(
                "data set 'multi30k' needs the folder with train.en, train.de and so on (data/task1/raw of the "
                "repository multi30k/dataset). Give it with --data, or directory=."
            )
        train, held = (_pairs(options.directory, name, (source, target)) for name in ("train", test))
        pairs = BytePairs.train([*train[0], *train[1]], vocabulary)
        where: dict[str, Any] = {"device": options.device, "rank": options.rank, "world": options.world}
        where |= {"lengths": tuple(lengths), "batch": options.batch, "folder": options.directory}
        train_tokens, held_tokens = ([pairs.encode(side) for side in both] for both in (train, held))
        digest = hashlib.md5("\n".join([*train[0], *train[1], *held[0], *held[1], str(pairs)]).encode())

        def measure(model: nn.Module) -> Measured:
            found = pairs.decode(translate(model, held_tokens[0], beams=beams, penalty=penalty))
            files = {TRANSLATIONS: _lines(found), REFERENCES: _lines(held[1]), TOKENIZER: str(pairs)}
            return Measured(bleu_of(found, held[1]) if bleu else None, files)

        return Data(
            self.name,
            len(pairs),
            (2, lengths[-1]),
            PairLoader(*train_tokens, shuffle=True, seed=options.seed, **where),
            PairLoader(*held_tokens, **where),
            md5=digest.hexdigest(),
            tokens=True,
            metric=BLEU if bleu else NATS,
            measure=measure,
        )

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write twelve made-up pairs to train on and four to test on."""
        nouns = ("dog", "Hund"), ("man", "Mann"), ("boy", "Junge"), ("bird", "Vogel")
        verbs = ("runs", "rennt"), ("sings", "singt"), ("sleeps", "schläft"), ("waits", "wartet")
        pairs = [(f"The {a} {b}.", f"Der {c} {d}.") for a, c in nouns for b, d in verbs]
        for name, part in (("train", pairs[4:]), ("test_2016_flickr", pairs[:4])):
            for language, side in zip(("en", "de"), zip(*part, strict=True), strict=True):
                (folder / f"{name}.{language}").write_text(_lines(side), encoding="utf-8")
        return {"directory": folder, "vocabulary": 300, "lengths": [20], "beams": 2}


def translate(model: nn.Module, sentences: Sequence[Sequence[int]], *, beams: int, penalty: float) -> list[list[int]]:
    """Return the tokens of translations.

    Args:
        model: A `Seq2Seq`, in evaluation mode and not wired, which would choose edges again for every token.
        sentences: The tokens of the sentences.
        beams: See `wirings.models.beam_search`.
        penalty: See `wirings.models.beam_search`.
    """
    if not isinstance(model, Seq2Seq):
        raise WiringError(f"only the model 'seq2seq' translates, got {type(model).__name__}. Use that for multi30k.")
    device, limit = model.positions.device, len(model.positions)
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))  # like lengths together
    found: list[list[int]] = [[] for _ in sentences]
    for start in range(0, len(order), AT_ONCE):
        chosen = order[start : start + AT_ONCE]
        rows: list[Tensor] = [torch.tensor([*sentences[i], END]) for i in chosen]
        source = pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)
        longest = min(2 * source.shape[1] + 10, limit)
        tokens = beam_search(model, source, beams=beams, penalty=penalty, longest=longest)
        for i, row in zip(chosen, tokens.tolist(), strict=True):
            found[i] = row
    return found


def _pairs(folder: Path, name: str, languages: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Read the sentences of both languages."""
    source, target = (_read(folder, f"{name}.{language}") for language in languages)
    if len(source) != len(target) or not source:
        raise WiringError(
            f"{name}.{languages[0]} and {name}.{languages[1]} in {folder} must have equally many lines, at least one, "
            f"got {len(source):,} and {len(target):,}."
        )
    return source, target


def _read(folder: Path, name: str) -> list[str]:
    found = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if found is None:
        raise WiringError(f"there is no {name} or {name}.gz in {folder}. Give the folder of Multi30k's raw text.")
    try:
        text = read_bytes(found).decode()
    except UnicodeDecodeError as error:
        raise WiringError(f"{found} is not UTF-8: {error.reason} at byte {error.start:,}. Convert it.") from error
    # Not splitlines: sentences may contain other characters that it takes for the end of a line.
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST:
            raise WiringError(
                f"line {number:,} of {found} has {len(line):,} characters, but a sentence has at most {LONGEST:,}. "
                "Split it, or leave it out."
            )
    return lines


def _lines(sentences: Sequence[str]) -> str:
    return "".join(f"{sentence}\n" for sentence in sentences)
