"""Loaders of text that is kept on the device as a whole: random windows to train on, all windows to test on.

As in `wirings.train.data.device`, the host never waits: where the windows of an epoch begin is drawn on the host and
copied into a fixed buffer, and the position in it is a tensor on the device, so that a captured CUDA graph that
contains `next` sees new windows at every replay.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.train.data.base import Loader, LoadOptions
from wirings.train.data.sampling import random_stream, rank_slices
from wirings.utils.checks import is_int, is_number
from wirings.utils.text import brief

PARTS = 20
"""Parts of the training text of which each gives its end to a holdout, so that all of the text is represented."""
TEST_TOKENS = 2**16
"""Tokens of a test batch, at least."""
MOST_WINDOWS, MOST_STEPS = 2**28, 10**7
"""The most windows of an epoch, and the most steps that one can ask for: they take memory."""


class TextLoader(Loader):
    """Windows of ``context`` tokens, each labelled with the token that follows it.

    Args:
        text: Tokens, (n,), of an integer type.
        context: Number of tokens of a window.
        steps: For random windows, the number of batches of an epoch; None for all windows of the text, in order,
            without overlap. What is left of the text then is not read.
        batch: Number of windows of a batch, over all ranks.
        device: Where the text is kept.
        seed: Random seed of the windows.
        rank: Which process this is, from 0.
        world: Number of processes.
    """

    def __init__(
        self,
        text: Tensor,
        context: int,
        *,
        steps: int | None = None,
        batch: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__((len(text) - 1) // context if steps is None else steps * batch, batch, rank, world)
        self.context, self.steps, self.seed = context, steps, seed
        self._starts = len(text) - context
        self._text = text.to(device)
        self._mine = rank_slices(self.examples, batch, rank, world)
        self._plan = torch.zeros(sum(map(len, self._mine)), dtype=torch.int64, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._ramp = torch.arange(max(self.sizes()), device=device)
        self._offsets = torch.arange(context + 1, device=device)
        self._begun = 0

    def draw(self, number: int) -> np.ndarray:
        """Draw where the windows of an epoch begin, over all ranks, (examples,).

        The windows of a batch depend on the seed and the number of its step alone, not on how long an epoch is.
        """
        if self.steps is None:
            return np.arange(self.examples) * self.context
        first = number * self.steps
        steps = range(first, first + self.steps)
        return np.concatenate([random_stream(self.seed, step).integers(0, self._starts, self.batch) for step in steps])

    def begin(self, number: int, start: int = 0) -> None:
        """Let `next` return the windows of epoch ``number``, starting with batch ``start``."""
        self.check_epoch(number, start)
        starts = self.draw(number)
        mine = np.concatenate([starts[part.start : part.stop] for part in self._mine])
        self._plan.copy_(torch.from_numpy(mine))
        self._position.fill_(sum(self.sizes()[:start]))
        self._begun += 1

    def next(self, size: int) -> tuple[Tensor, Tensor]:
        """Return this rank's next ``size`` windows and what follows each token, both int64 (size, context).

        It starts over after the last window, so warming up before a capture is safe; `begin` resets the position.
        """
        at = (self._position + self._ramp[:size]) % max(1, len(self._plan))
        index = self._plan[at].view(-1, 1) + self._offsets
        self._position.add_(size)
        window = self._text[index].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Loader.epoch`. Starting another epoch ends this one, since there is one plan at a time."""
        self.begin(number, start)
        return self._batches(number, start, self._begun)

    def _batches(self, number: int, start: int, begun: int) -> Iterator[tuple[Tensor, Tensor]]:
        for size in self.sizes()[start:]:
            if self._begun != begun:
                raise WiringError(
                    f"another epoch was started while epoch {number} was being read. Finish one epoch before the next."
                )
            yield self.next(size)


def text_loaders(
    options: LoadOptions,
    train: np.ndarray,
    test: np.ndarray,
    *,
    context: int,
    epoch_steps: int | None = None,
    holdout: float | None = None,
) -> tuple[TextLoader, TextLoader]:
    """Return the training and test loaders of text.

    Args:
        options: What `wirings.train.data.load` was called with.
        train: Tokens to train on, (n,), uint8 or int32.
        test: Tokens to test on.
        context: Number of tokens of a window.
        epoch_steps: Number of batches of an epoch; by default as many as hold all of the training text.
        holdout: Fraction of the training text to test on instead; see `hold_out_text`.
    """
    for name, value in (("context", context), ("epoch_steps", epoch_steps)):
        if not (value is None and name == "epoch_steps") and not (is_int(value) and value >= 1):
            raise WiringError(f"data.options.{name} must be an integer of at least 1, got {brief(value)}.")
    if holdout is not None:
        train, test = hold_out_text(train, holdout)
    where = f" of {options.directory}" if options.directory is not None else ""
    for what, text in (("training", train), ("validation", test)):
        if len(text) <= context:
            raise WiringError(
                f"the {what} text{where} has {len(text):,} tokens, but a window needs {context + 1:,}: "
                "data.options.context and the token after it. Use more text, or a context of at most "
                f"{max(len(text) - 1, 1):,}."
            )
    tokens = options.batch * context
    steps = max(1, len(train) // tokens) if epoch_steps is None else epoch_steps
    if (
        steps * options.batch > MOST_WINDOWS or (epoch_steps or 0) > MOST_STEPS
    ):  # where they begin is drawn for a whole epoch
        raise WiringError(
            f"an epoch of {brief(steps)} steps with {brief(options.batch)} windows each is too long. Set fewer "
            "data.options.epoch_steps, or a smaller batch."
        )
    windows = max(options.batch, max(1, TEST_TOKENS // context) * options.world)
    return (
        _loader(options, train, context, steps=steps, batch=options.batch),
        _loader(options, test, context, steps=None, batch=windows),
    )


def _loader(options: LoadOptions, text: np.ndarray, context: int, *, steps: int | None, batch: int) -> TextLoader:
    where = {"device": options.device, "rank": options.rank, "world": options.world}
    return TextLoader(torch.from_numpy(text), context, steps=steps, batch=batch, seed=options.seed, **where)  # type: ignore[arg-type]


def hold_out_text(text: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split a training text, so that settings can be chosen without looking at the validation text.

    The text is cut into 20 equal parts, and the end of each is held out. The split does not depend on a run's seed, so
    that runs are compared on the same text.

    Args:
        text: Tokens, (n,).
        fraction: Fraction to hold out.

    Returns:
        The tokens to train on and the held-out ones.

    >>> rest, held = hold_out_text(np.arange(100), 0.2)
    >>> len(rest), held[:4]
    (80, array([ 4,  9, 14, 19]))
    """
    check_fraction("holdout", fraction)
    train, held = [], []
    for part in np.array_split(text, PARTS):
        cut = len(part) - round(fraction * len(part))
        train.append(part[:cut])
        held.append(part[cut:])
    return np.concatenate(train), np.concatenate(held)


def check_fraction(name: str, value: float) -> None:
    """Raise unless an option of a data set is a fraction between 0 and 1."""
    if not (is_number(value) and 0 < value < 1):
        raise WiringError(f"data.options.{name} must be a number between 0 and 1, got {brief(value)}.")
