"""A loader for data sets that lie on the device whole, as uint8: cropping, flipping and normalising happen there.

Nothing is waited for between two batches. The plan of an epoch (which example, cropped where, mirrored or not) is drawn
on the host and copied into fixed buffers; batches are taken by a position that is itself a tensor there and advances
there. A captured CUDA graph that holds `DeviceLoader.next` therefore sees new examples at every replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from wirings.errors import WiringError
from wirings.train.data.augment import Normalise
from wirings.train.data.base import Loader, shares, stream


def test_batch(batch: int, world: int, shape: Sequence[int]) -> int:
    """A global batch for testing: ``batch``, or more for small images: 3 M values a rank, so that a GPU is busy."""
    return max(batch, max(1, 3 * 2**20 // math.prod(shape)) * world)


class Plan(NamedTuple):
    """An epoch over all ranks: the examples in the order in which they come, and what is done to each; all (examples,).

    The crop begins ``dy`` rows and ``dx`` columns into the padded image, and is mirrored after.
    """

    order: np.ndarray
    dy: np.ndarray
    dx: np.ndarray
    flip: np.ndarray


class DeviceLoader(Loader):
    """Batches from uint8 images (N, channels, height, width) and labels (N,) on a device.

    Args:
        mean, std: of every channel, where pixels from 0 to ``peak`` stand for 0 to 1.
        padding: black pixels around the image, within which a crop of the image's size begins anywhere; 0 for no crop.
        flip: mirror half the images.
        shuffle: a new order every epoch.
        examples: a number other than N makes the images repeat: example i is image i modulo N.
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
        shuffle: bool = False,
        examples: int | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
            raise WiringError(
                "images must be uint8 (N, channels, height, width) and labels (N,), "
                f"but they are {images.dtype} {tuple(images.shape)} and {tuple(labels.shape)}."
            )
        super().__init__(len(images) if examples is None else examples, batch, rank, world)
        self.padding, self.flip, self.shuffle, self.seed = padding, flip, shuffle, seed
        self._channels, self._height, self._width = images.shape[1:]
        self._wide, self._high = self._width + 2 * padding, self._height + 2 * padding
        # Pixel by pixel, all channels together: one index finds a pixel, and padding is there to be read, black.
        padded = pad(images.to(device), (padding,) * 4)
        self._pixels = padded.permute(0, 2, 3, 1).reshape(-1, self._channels)
        self._labels = labels.cpu().numpy().astype(np.int64)
        self._normalise = Normalise(mean, std, device, peak)

        parts = shares(self.examples, batch, rank, world)
        self._mine = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        self._begun = 0
        # Of each of this rank's examples: the crop's first pixel, the step along a row (-1 if mirrored), the label.
        self._plan = torch.zeros(len(self._mine), 3, dtype=torch.int64, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._ramp = torch.arange(max(self.sizes()), device=device)
        self._rows = (torch.arange(self._height, device=device) * self._wide).view(1, -1, 1)
        self._columns = torch.arange(self._width, device=device).view(1, 1, -1)

    def draw(self, number: int) -> Plan:
        """The plan of epoch ``number``: a pure function of the seed and the number, the same on every rank."""
        random, count = stream(self.seed, number), self.examples
        order = random.permutation(count) if self.shuffle else np.arange(count)
        dy, dx = random.integers(0, 2 * self.padding + 1, (2, count))
        flip = random.integers(0, 2, count) if self.flip else np.zeros(count, dtype=np.int64)
        return Plan(order, dy, dx, flip)

    def begin(self, number: int, start: int = 0) -> None:
        """Make epoch ``number`` the one that `next` takes examples from, beginning with batch ``start``."""
        self.check_epoch(number, start)
        order, dy, dx, flip = (numbers[self._mine] for numbers in self.draw(number))
        image = order % len(self._labels)
        first = (image * self._high + dy) * self._wide + dx + flip * (self._width - 1)
        self._plan.copy_(torch.from_numpy(np.stack([first, 1 - 2 * flip, self._labels[image]], axis=1)))
        self._position.fill_(sum(self.sizes()[:start]))
        self._begun += 1

    def next(self, size: int) -> tuple[Tensor, Tensor]:
        """This rank's next ``size`` examples, without the host waiting; `sizes` has the sizes to ask for.

        After the last example it starts over, so that warming up for a capture needs no care; `begin` sets it right.
        """
        if not 0 <= size <= len(self._ramp):
            raise WiringError(
                f"a batch of this rank has at most {len(self._ramp)} examples, but {size} were asked for."
            )
        at = (self._position + self._ramp[:size]) % max(1, len(self._plan))
        first, step, labels = self._plan[at].unbind(1)
        self._position.add_(size)
        index = first.view(-1, 1, 1) + self._rows + step.view(-1, 1, 1) * self._columns
        pixels = self._pixels.index_select(0, index.reshape(-1))
        images = pixels.view(size, self._height, self._width, self._channels).permute(0, 3, 1, 2)
        return self._normalise(images), labels.contiguous()

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Loader.epoch`. There is one plan at a time: beginning another epoch ends this one."""
        self.begin(number, start)
        return self._batches(number, start, self._begun)

    def _batches(self, number: int, start: int, begun: int) -> Iterator[tuple[Tensor, Tensor]]:
        for size in self.sizes()[start:]:
            if self._begun != begun:
                raise WiringError(
                    f"epoch {number} was still being read when another one was begun; finish one before the next."
                )
            yield self.next(size)
