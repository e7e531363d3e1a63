"""Generate text with a trained run, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.train import data as data_sets
from wirings.train.build import context_of
from wirings.train.run.step import autocast
from wirings.train.saved_runs import TRANSLATED, open_with_header
from wirings.utils.checks import check_int, check_number, check_seed
from wirings.utils.text import brief


class Vocabulary(NamedTuple):
    """The tokens of a run: bytes, or the characters of its text."""

    characters: tuple[str, ...] | None
    """The characters, in the order of their tokens; None for bytes."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        if self.characters is None:
            return list(text.encode("utf-8"))
        places = {character: token for token, character in enumerate(self.characters)}
        if unknown := [character for character in text if character not in places]:
            known = "".join(character for character in self.characters if character.isprintable())
            raise WiringError(
                f"the prompt has the character {unknown[0]!r}, which was not in the text that the run was trained on. "
                f"Use these and line breaks: {known}"
            )
        return [places[character] for character in text]

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """The text of tokens, piece by piece. Bytes that are not UTF-8 become replacement characters."""
        if self.characters is not None:
            yield from (self.characters[token] for token in tokens)
            return
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if piece := decoder.decode(bytes([token])):
                yield piece
        if rest := decoder.decode(b"", final=True):
            yield rest


def generate(
    run: str | Path,
    prompt: str = "\n",
    *,
    length: int = 500,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    best: bool = False,
    device: str | None = None,
) -> Iterator[str]:
    """Continue a text with a run that was trained on text.

    Args:
        run: see `wirings.train.saved_runs.open_run`.
        prompt: the text to continue, at most as long as the context that the run was trained with.
        length: the number of tokens to generate.
        temperature: what logits are divided by; 0 takes the most likely token.
        top_k: draw from this many of the most likely tokens only; None for all.
        seed: random seed.
        best: see `wirings.train.saved_runs.open_run`.
        device: see `wirings.train.saved_runs.open_run`.

    Returns:
        An iterator over pieces of the text that follows the prompt. All arguments are checked before it is returned.
    """
    check_int("generate", "length", length)
    check_number("generate", "temperature", temperature, most=float("inf"))
    if top_k is not None:
        check_int("generate", "top_k", top_k)
    if not isinstance(prompt, str):
        raise WiringError(f"prompt must be a text, got {brief(prompt)}.")
    if check_seed("generate", seed) is None:
        raise WiringError("generate: seed must be a whole number, got None.")
    (model, settings, _, context), about = open_with_header(run, best, device)
    dataset = data_sets.get(settings.data.name)
    if isinstance(dataset, data_sets.ImageDataset):
        raise WiringError(f"{run} was trained on {dataset.title}, not on text. Use `wirings predict`.")
    if len(model.input_shape) != 1:  # type: ignore[arg-type]
        raise WiringError(f"{run} was trained to translate, not to continue a text. {TRANSLATED}")
    names = about.get("names")
    vocabulary = Vocabulary(None if names is None else tuple(names))
    tokens, most = vocabulary.encode(prompt), model.input_shape[0]  # type: ignore[index]
    most = min(most, context_of(settings) or most)  # later positions of the model were not trained
    if not tokens:
        raise WiringError("the prompt is empty. Give at least one character, such as a line break.")
    if len(tokens) > most:
        raise WiringError(
            f"the prompt has {len(tokens):,} tokens, but the run was trained with a context of {most:,}. Give a "
            "shorter one."
        )

    def scores(window: Tensor) -> Tensor:
        with autocast(settings.precision, context.device):
            return model(window)[0, -1, : int(about["classes"])].float()

    random = torch.Generator(context.device).manual_seed(seed)
    drawn = _draw(scores, tokens, int(most), context.device, length, temperature, top_k, random)
    return vocabulary.decode(drawn)


@torch.no_grad()
def _draw(
    scores: Callable[[Tensor], Tensor],
    tokens: Sequence[int],
    most: int,
    device: torch.device,
    length: int,
    temperature: float,
    top_k: int | None,
    random: torch.Generator,
) -> Iterator[int]:
    """Draw tokens one by one, each from the scores that follow the last ``most`` tokens."""
    window = torch.tensor([tokens], device=device)
    for _ in range(length):
        logits = scores(window)
        if temperature == 0:
            token = logits.argmax(0, keepdim=True)
        else:
            if top_k is not None and top_k < len(logits):
                logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
            # Differences from the largest logit, since that divided by a tiny temperature would be infinite.
            weights = nn.functional.softmax((logits - logits.max()) / max(temperature, 1e-30), 0)
            token = torch.multinomial(weights, 1, generator=random)
        window = torch.cat([window, token[None]], 1)[:, -most:]
        yield int(token)
