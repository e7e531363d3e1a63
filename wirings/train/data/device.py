"""A loader for data sets that fit on the device, stored there as uint8 and cropped, flipped and normalised there.

The host never waits between two batches. The plan of an epoch (which example, cropped where, flipped or not) is drawn
on the host and copied into fixed buffers. The position within the epoch is a tensor on the device, too, so a captured
CUDA graph that contains `DeviceLoader.next` sees new examples at every replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from wirings.errors import WiringError
from wirings.train.data.augment import Normalise
from wirings.train.data.base import Loader, LoadOptions
from wirings.train.data.sampling import EXAMPLE, random_stream, rank_slices

Split = tuple[Tensor, Tensor]
"""Images, uint8 (N, channels, height, width), and labels, (N,)."""


def test_batch(batch: int, world: int, shape: Sequence[int]) -> int:
    """Return a global batch size for testing: at least ``batch``, and large enough to keep a GPU busy (3 M values)."""
    return max(batch, max(1, 3 * 2**20 // math.prod(shape)) * world)


class EpochPlan(NamedTuple):
    """An epoch over all ranks: the order of the examples, and how each is augmented. All arrays are (examples,).

    The crop starts ``dy`` rows and ``dx`` columns into the padded image, and is flipped afterwards.
    """

    order: np.ndarray
    dy: np.ndarray
    dx: np.ndarray
    flip: np.ndarray


class DeviceLoader(Loader):
    """Batches from uint8 images and their labels, kept on a device.

    Args:
        images: uint8 (N, channels, height, width).
        labels: (N,).
        batch: Number of examples of a batch, over all ranks.
        mean: Mean of each channel, where pixels from 0 to ``peak`` are scaled to the range from 0 to 1.
        std: Standard deviation of each channel, on the same scale.
        peak: The largest pixel value.
        padding: Number of black pixels around an image, of which a random crop of the image's size is taken; 0 takes
            no crop.
        flip: Whether to flip half the images horizontally.
        cutout: Side in pixels of a square at a random place, cut off at the borders, that is set to the mean colour; 0
            sets none.
        shuffle: Whether every epoch has a new order.
        examples: Number of examples of an epoch; N by default. If it is larger, images repeat: example i is image i
            modulo N.
        device: Where the data is kept.
        seed: Random seed of the order and the augmentation.
        rank: Which process this is, from 0.
        world: Number of processes.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch: int,
        mean: Sequence[float],
        std: Sequence[float],
        peak: int = 255,
        padding: int = 0,
        flip: bool = False,
        cutout: int = 0,
        shuffle: bool = False,
        examples: int | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
            raise WiringError(
                "expected uint8 images (N, channels, height, width) and labels (N,), "
                f"got {images.dtype} {tuple(images.shape)} and {tuple(labels.shape)}."
            )
        super().__init__(len(images) if examples is None else examples, batch, rank, world)
        self.padding, self.flip, self.cutout, self.shuffle, self.seed = padding, flip, cutout, shuffle, seed
        self._channels, self._height, self._width = images.shape[1:]
        self._wide, self._high = self._width + 2 * padding, self._height + 2 * padding
        # One row a pixel, with all channels: a single index finds a pixel. The black padding is stored, too.
        padded = pad(images.to(device), (padding,) * 4)
        self._pixels = padded.permute(0, 2, 3, 1).reshape(-1, self._channels)
        self._labels = labels.cpu().numpy().astype(np.int64)
        self._normalise = Normalise(mean, std, device, peak)

        parts = rank_slices(self.examples, batch, rank, world)
        self._mine = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        self._begun = 0
        # For each of this rank's examples: first pixel of the crop, step along a row (-1 if flipped), label; and with
        # cutout, the first row and column of the square.
        self._plan = torch.zeros(len(self._mine), 5 if cutout else 3, dtype=torch.int64, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._ramp = torch.arange(max(self.sizes()), device=device)
        self._lines = torch.arange(self._height, device=device).view(1, -1, 1)
        self._rows = self._lines * self._wide
        self._columns = torch.arange(self._width, device=device).view(1, 1, -1)

    def draw(self, number: int) -> EpochPlan:
        """Draw the plan of an epoch: a pure function of the seed and the epoch's number, the same on every rank."""
        random, count = random_stream(self.seed, number), self.examples
        order = random.permutation(count) if self.shuffle else np.arange(count)
        dy, dx = random.integers(0, 2 * self.padding + 1, (2, count))
        flip = random.integers(0, 2, count) if self.flip else np.zeros(count, dtype=np.int64)
        return EpochPlan(order, dy, dx, flip)

    def draw_squares(self, number: int) -> np.ndarray:
        """Draw the first row and column of every example's cutout, (2, examples); the centre is within the image."""
        random = random_stream(self.seed, number, EXAMPLE)  # a stream of its own: crops are the same without cutout
        centres = random.integers(0, [[self._height], [self._width]], (2, self.examples))
        return centres - self.cutout // 2

    def begin(self, number: int, start: int = 0) -> None:
        """Let `next` return the examples of epoch ``number``, starting with batch ``start``."""
        self.check_epoch(number, start)
        order, dy, dx, flip = (numbers[self._mine] for numbers in self.draw(number))
        image = order % len(self._labels)
        first = (image * self._high + dy) * self._wide + dx + flip * (self._width - 1)
        squares = self.draw_squares(number)[:, self._mine] if self.cutout else ()
        self._plan.copy_(torch.from_numpy(np.stack([first, 1 - 2 * flip, self._labels[image], *squares], axis=1)))
        self._position.fill_(sum(self.sizes()[:start]))
        self._begun += 1

    def next(self, size: int) -> tuple[Tensor, Tensor]:
        """Return this rank's next ``size`` examples without making the host wait; `sizes` lists the sizes to ask for.

        It starts over after the last example, so warming up before a capture is safe; `begin` resets the position.
        """
        if not 0 <= size <= len(self._ramp):
            raise WiringError(f"a batch of this rank has at most {len(self._ramp)} examples, got size = {size}.")
        at = (self._position + self._ramp[:size]) % max(1, len(self._plan))
        first, step, labels, *squares = self._plan[at].unbind(1)
        self._position.add_(size)
        index = first.view(-1, 1, 1) + self._rows + step.view(-1, 1, 1) * self._columns
        pixels = self._pixels.index_select(0, index.reshape(-1))
        images = pixels.view(size, self._height, self._width, self._channels).permute(0, 3, 1, 2)
        images = self._normalise(images)
        if self.cutout:
            down, right = self._lines - squares[0].view(-1, 1, 1), self._columns - squares[1].view(-1, 1, 1)
            inside = (down >= 0) & (down < self.cutout) & (right >= 0) & (right < self.cutout)
            images = images.masked_fill(inside[:, None], 0.0)
        return images, labels.contiguous()

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


def device_loaders(
    options: LoadOptions,
    train: Split,
    test: Split,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    peak: int = 255,
    padding: int = 0,
    flip: bool = False,
    cutout: int = 0,
    examples: tuple[int | None, int | None] = (None, None),
) -> tuple[DeviceLoader, DeviceLoader]:
    """Return the training and test loaders of a data set that is kept on the device.

    Args:
        options: What `wirings.train.data.load` was called with.
        train: Images and labels to train on.
        test: Images and labels to test on.
        mean: See `DeviceLoader`.
        std: See `DeviceLoader`.
        peak: See `DeviceLoader`.
        padding: See `DeviceLoader`; for training images, and only if ``options.augment`` is true.
        flip: See `DeviceLoader`; for training images, and only if ``options.augment`` is true.
        cutout: See `DeviceLoader`; for training images, and only if ``options.augment`` is true.
        examples: Number of examples of a training and of a test epoch; see `DeviceLoader`.
    """
    both: dict[str, Any] = {
        "mean": mean, "std": std, "peak": peak, "device": options.device, "seed": options.seed,
        "rank": options.rank, "world": options.world,
    }  # fmt: skip
    augment: dict[str, Any] = {"padding": padding, "flip": flip, "cutout": cutout} if options.augment else {}
    larger = test_batch(options.batch, options.world, test[0].shape[1:])
    return (
        DeviceLoader(train[0], train[1], batch=options.batch, examples=examples[0], shuffle=True, **augment, **both),
        DeviceLoader(test[0], test[1], batch=larger, examples=examples[1], **both),
    )
