"""A loader of pairs of sentences that are kept on the device, in batches of few shapes.

Pairs are padded to one of a few lengths, and a batch holds pairs of one length. Long pairs come in smaller batches, so
that every batch has about as many tokens, and each shape can be compiled and captured once. As in
`wirings.train.data.device`, the host never waits: the plan of an epoch is drawn on the host and copied into a fixed
buffer, and the position in it is a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.models.seq2seq import END, PAD, START
from wirings.train.data.base import Loader
from wirings.train.data.sampling import ORDER, random_stream
from wirings.utils.checks import is_int
from wirings.utils.text import brief

IGNORED = -100
"""The label of positions without a next token, which ``torch.nn.functional.cross_entropy`` ignores by default."""

Sentences = Sequence[Sequence[int]]
"""The tokens of sentences, without `START`, `END` and `PAD`."""


class PairLoader(Loader):
    """Batches of pairs of source and target sentences, labelled with the target's next tokens.

    The last batch of a length is filled up with empty pairs, whose labels are all ignored, so that every pair is seen
    once in an epoch. At which lengths the batches of an epoch are is the same in every epoch.

    Args:
        source: Tokens of the source sentences.
        target: Tokens of the target sentences, as many.
        lengths: Lengths that pairs are padded to, increasing.
        batch: Number of pairs of a batch of the shortest length, over all ranks; longer ones have proportionally fewer.
        shuffle: Whether every epoch has a new order.
        device: Where the tokens are kept.
        seed: Random seed of the order.
        rank: Which process this is, from 0.
        world: Number of processes.
        folder: Where the sentences are from, for messages.
    """

    padded = True

    def __init__(
        self,
        source: Sentences,
        target: Sentences,
        *,
        lengths: Sequence[int],
        batch: int,
        shuffle: bool = False,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        folder: Path | None = None,
    ) -> None:
        super().__init__(len(source), batch, rank, world)
        self.shuffle, self.seed = shuffle, seed
        needed = np.array([1 + max(len(a), len(b)) for a, b in zip(source, target, strict=True)])
        rows = check_lengths(lengths, batch, world, int(needed.max()), folder)
        self._length_of = {count // world: length for count, length in zip(rows, lengths, strict=True)}
        # The last row is the empty pair. Its source has a token, since attention to nothing is not a number.
        self._source = _padded([*([*s, END] for s in source), [END]], lengths[-1]).to(device)
        self._target = _padded([*([START, *t, END] for t in target), [START]], lengths[-1] + 1).to(device)
        bucket = np.searchsorted(np.asarray(lengths), needed)
        self._buckets = [(np.flatnonzero(bucket == i), count) for i, count in enumerate(rows) if (bucket == i).any()]
        batches = np.repeat(np.arange(len(self._buckets)), [-(-len(found) // count) for found, count in self._buckets])
        if shuffle:
            batches = random_stream(0, 0, ORDER).permutation(batches)
        self._batches_of = batches  # the bucket of every batch of an epoch
        self._plan = torch.zeros(sum(self.sizes()), dtype=torch.int64, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._ramp = torch.arange(max(self.sizes()), device=device)
        self._begun = 0

    def __len__(self) -> int:
        return len(self._batches_of)

    def sizes(self) -> list[int]:
        """Return this rank's batch sizes over an epoch, in order; a size tells the length of its pairs."""
        return [self._buckets[i][1] // self.world for i in self._batches_of]

    def batch_size(self, number: int) -> int:
        """Return the size of batch ``number`` of an epoch, over all ranks."""
        return self._buckets[self._batches_of[number]][1]

    def draw(self, number: int) -> list[np.ndarray]:
        """Draw the pairs of every batch of an epoch, over all ranks: a pure function of the seed and the epoch."""
        waiting = []
        for i, (found, rows) in enumerate(self._buckets):
            order = random_stream(self.seed, number, ORDER, i).permutation(found) if self.shuffle else found
            empty = np.full(-len(found) % rows, self.examples)
            waiting.append(iter(np.concatenate([order, empty]).reshape(-1, rows)))
        return [next(waiting[i]) for i in self._batches_of]

    def begin(self, number: int, start: int = 0) -> None:
        """Let `next` return the pairs of epoch ``number``, starting with batch ``start``."""
        self.check_epoch(number, start)
        mine = [pairs.reshape(self.world, -1)[self.rank] for pairs in self.draw(number)]
        self._plan.copy_(torch.from_numpy(np.concatenate(mine)))
        self._position.fill_(sum(self.sizes()[:start]))
        self._begun += 1

    def next(self, size: int) -> tuple[Tensor, Tensor]:
        """Return this rank's next batch, which has ``size`` pairs.

        It starts over after the last batch, so warming up before a capture is safe; `begin` resets the position.

        Returns:
            Source and target tokens, int64 (size, 2, length), and the next token of every target token, int64
            (size, length), or `IGNORED`.
        """
        length = self._length_of[size]
        pairs = self._plan[(self._position + self._ramp[:size]) % len(self._plan)]
        self._position.add_(size)
        source, target = self._source[pairs, :length].long(), self._target[pairs, : length + 1].long()
        following = target[:, 1:]
        return torch.stack([source, target[:, :-1]], 1), following.masked_fill(following == PAD, IGNORED)

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


def check_increasing(lengths: object) -> None:
    """Raise unless this is a list of lengths that pairs can be padded to."""
    listed = isinstance(lengths, Sequence) and all(is_int(n) and n > 1 for n in lengths)
    if not listed or not lengths or list(lengths) != sorted(set(lengths)):  # type: ignore[call-overload]
        raise WiringError(f"data.options.lengths must be increasing integers above 1, got {brief(lengths)}.")


def check_lengths(
    lengths: Sequence[int], batch: int, world: int, longest: int, folder: Path | None = None
) -> list[int]:
    """Check the lengths that pairs are padded to, and return the number of pairs of a batch of each length."""
    check_increasing(lengths)
    if longest > lengths[-1]:
        where = f" of {folder}" if folder is not None else ""
        raise WiringError(
            f"data.options.lengths ends with {lengths[-1]}, but a sentence{where} has {longest} tokens with its end. "
            "Append a larger length."
        )
    rows = [batch * lengths[0] // length // world * world for length in lengths]
    if rows[-1] < 1 or len(set(rows)) < len(rows):
        raise WiringError(
            f"batch = {batch} is too small for pairs of the lengths {', '.join(map(str, lengths))}: longer pairs come "
            f"in smaller batches, of {', '.join(map(str, rows))} pairs. Use a larger batch or one length."
        )
    return rows


def _padded(sentences: Sentences, length: int) -> Tensor:
    """Return sentences as one tensor, int32 (n, length), padded at the end."""
    table = np.full((len(sentences), length), PAD, dtype=np.int32)
    for row, tokens in zip(table, sentences, strict=True):
        row[: len(tokens)] = tokens
    return torch.from_numpy(table)
