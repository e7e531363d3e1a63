"""BLEU, as sacrebleu computes it: of detokenized text with case, tokenized as in the WMT's script 13a."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from wirings.errors import WiringError
from wirings.utils.text import brief


def need_sacrebleu() -> None:
    """Raise an error if sacrebleu, which computes BLEU, is missing."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise WiringError(
            "BLEU needs the package sacrebleu, which is not installed: pip install sacrebleu. To train without it, set "
            "data.options.bleu=false; the run keeps its translations, which `wirings bleu RUN` scores later."
        )


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of translations, from 0 to 100.

    Args:
        translations: One line for each sentence.
        references: What each sentence should be translated to.

    >>> bleu(["Ein Hund rennt im Schnee."], ["Ein Hund rennt im Schnee."])
    100.0
    """
    for given in (translations, references):
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(x, str) for x in given):
            raise WiringError(f"expected lists of sentences, each a text, got {brief(given)}.")
    if not references:
        raise WiringError("expected at least one sentence to compute BLEU of, got none.")
    need_sacrebleu()
    import sacrebleu

    if len(translations) != len(references):
        raise WiringError(f"expected one translation for each of {len(references)} sentences, got {len(translations)}.")
    return round(float(sacrebleu.corpus_bleu(list(translations), [list(references)]).score), 6)
