"""Byte-pair encoding of sentences, by the library ``tokenizers``."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from typing import Any

from wirings.errors import WiringError
from wirings.models.seq2seq import END, PAD, START
from wirings.utils.cache import cache_folder, write_whole
from wirings.utils.checks import is_int
from wirings.utils.text import brief

SPECIAL = {PAD: "<pad>", START: "<s>", END: "</s>"}
SMALLEST = 256 + len(SPECIAL)
"""Size of a vocabulary of all bytes and nothing else."""
LARGEST = 2**20
"""The largest vocabulary. The library reserves memory for all of it, and ends the process if there is none."""


class BytePairs:
    """Encodes sentences as tokens: frequent sequences of bytes. Every text can be encoded.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, lines: Sequence[str], vocabulary: int) -> BytePairs:
        """Learn which sequences of bytes are frequent, or read from the cache what was learned before.

        Args:
            lines: The sentences to learn from. The result depends on them and the size alone.
            vocabulary: Number of tokens. It may become smaller if there is little text.
        """
        library = _library()
        if not is_int(vocabulary) or not SMALLEST <= vocabulary <= LARGEST:
            raise WiringError(
                f"data.options.vocabulary must be an integer from {SMALLEST} to {LARGEST:,}, got {brief(vocabulary)}."
            )
        digest = hashlib.md5("\n".join([library.__version__, str(vocabulary), *lines]).encode())
        cached = cache_folder() / "tokenizers" / f"{digest.hexdigest()}.json"
        if cached.exists():
            try:
                return cls(library.Tokenizer.from_file(str(cached)))
            except Exception:  # the library raises nothing more specific for a damaged file; learn again
                pass
        bytes_ = library.pre_tokenizers.ByteLevel
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = bytes_(add_prefix_space=True)  # so that a word is the same at the beginning
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[SPECIAL[i] for i in range(len(SPECIAL))],
            initial_alphabet=sorted(bytes_.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        text = tokenizer.to_str()
        write_whole(cached, lambda file: file.write(text.encode()))
        return cls(tokenizer)

    def __len__(self) -> int:
        """Size of the vocabulary."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    def __str__(self) -> str:
        """The tokenizer as JSON, as ``tokenizers.Tokenizer.from_str`` reads it."""
        text: str = self._tokenizer.to_str()
        return text

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the tokens of sentences, without special ones."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(lines))]

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of sentences on one line each, up to `END`; other special tokens are left out."""
        words = [list(sentence) for sentence in tokens]
        ended = [sentence[: sentence.index(END)] if END in sentence else sentence for sentence in words]
        return [" ".join(text.split()) for text in self._tokenizer.decode_batch(ended)]


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise WiringError(
            "translation needs the package tokenizers, which is not installed: pip install tokenizers."
        ) from error
