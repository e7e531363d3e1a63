"""Random networks on images of 1 to 8,192 pixels a side: compiled, they return what PyTorch does, or are refused."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.programs import difference, prepare
from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError, engine

LONGEST = 8192
"""The longest side of an image, in pixels."""
PIXELS = 2**20
"""The most pixels of an image with several channels; others have one."""
NUMBERS = 2**22
"""The most numbers that a layer may return, unless the images have half as many."""
PRODUCTS = 2**28
"""The most pixels that a layer may read, so that a case takes seconds: each counts as often as it is read."""
WEIGHTS = 2**20
"""The most weights of a layer."""
HUGE = (2**15, 2**16 + 1, 10**6, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62)
"""Strides, dilations and paddings that do not fit into fewer bits."""
HUGE_SHARE = 0.03
"""The share of cases with images of 4,096 to 8,192 pixels a side and several threads."""
CLOSE = 3e-5
"""The difference from PyTorch's outputs, as a share of the largest, that rounding explains."""


def size(draw: random.Random, most: int) -> int:
    """A size of 1 to ``most``: small and large ones are as likely, and so are powers of two and their neighbours."""
    if draw.random() < 0.3:
        return max(1, min(most, 2 ** draw.randint(0, most.bit_length()) + draw.randint(-1, 1)))
    return min(most, int(2 ** draw.uniform(0, math.log2(most + 1))))


def far(draw: random.Random, most: int = LONGEST) -> int:
    """A stride or a dilation, usually of a few pixels."""
    kind = draw.random()
    return draw.choice(HUGE) if kind < 0.02 else size(draw, most) if kind < 0.2 else draw.choice((1, 1, 1, 2, 2, 3, 4))


def axis(draw: random.Random, length: int) -> tuple[int, int, int, int]:
    """The kernel, the stride, the padding and the dilation of a convolution along a side of an image."""
    kernel = size(draw, 2 * length) if draw.random() < 0.1 else draw.randint(1, draw.choice((1, 3, 7)))
    stride, dilation = far(draw), far(draw)
    reach = dilation * (kernel - 1)
    padding = draw.choice((0, kernel // 2, reach // 2, draw.randint(0, 8), size(draw, LONGEST)))
    if draw.random() < 0.5:  # the kernel fits, and the result has at most a thousand pixels more
        padding = min(max(padding, -(-(reach + 1 - length) // 2)), (reach + 1000) // 2)
    return kernel, stride, padding, dilation


def lengths(sides: Sequence[int], axes: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """The sides of the image after a layer whose kernel, stride, padding and dilation are given for each."""
    return [max(0, n + 2 * p - d * (k - 1) - 1) // s + 1 for n, (k, s, p, d) in zip(sides, axes, strict=True)]


def convolution(draw: random.Random, channels: int, sides: Sequence[int], large: bool) -> nn.Module | None:
    """A random convolution; None if it would take too long."""
    axes = [axis(draw, side) for side in sides]
    kernel, stride, padding, dilation = zip(*axes, strict=True)
    groups = draw.choice([g for g in (1, 1, 2, 3, channels) if channels % g == 0])
    out = groups * (size(draw, 512) if draw.random() < 0.1 and not large else draw.randint(1, 2 if large else 4))
    how: Any = padding
    if draw.random() < 0.2:
        how, stride = "same", (1,) * len(sides)
        axes = [(k, 1, d * (k - 1) // 2, d) for k, _, _, d in axes]
    weights, after = out * channels // groups * math.prod(kernel), math.prod(lengths(sides, axes))
    padded = channels * math.prod(n + 2 * p for n, (_, _, p, _) in zip(sides, axes, strict=True))
    read = weights * math.prod(lengths(sides, axes)[:-1]) * sides[-1]  # the engine passes over rows as a whole
    pixels = channels * math.prod(sides)
    products, numbers = max(PRODUCTS, 9 * pixels), max(NUMBERS, 2 * pixels)  # one convolution of a large image
    if weights > WEIGHTS or weights * after > products or read > products or out * after > numbers:
        return None
    mode = draw.choice(("zeros", "zeros", "zeros", "reflect", "replicate", "circular")) if padded < NUMBERS else "zeros"
    made = (nn.Conv1d if len(sides) == 1 else nn.Conv2d)(
        channels, out, kernel, stride, how, dilation, groups, draw.random() < 0.7, mode
    )
    with torch.no_grad():
        made.weight *= torch.rand_like(made.weight) < draw.choice((0.1, 0.5, 1.0))
    return made


def pooling(draw: random.Random, channels: int, sides: Sequence[int]) -> nn.Module | None:
    """A random pooling layer, of the largest or of the mean pixel; None if it would take too long."""
    one, largest = len(sides) == 1, draw.random() < 0.5
    if draw.random() < 0.3:
        shape = [size(draw, 300) if draw.random() < 0.3 else draw.randint(1, 9) for _ in sides]
        if one:
            return (nn.AdaptiveMaxPool1d if largest else nn.AdaptiveAvgPool1d)(shape[0])
        return (nn.AdaptiveMaxPool2d if largest else nn.AdaptiveAvgPool2d)(tuple(shape))
    kernel = tuple(size(draw, side) if draw.random() < 0.2 else draw.randint(1, 4) for side in sides)
    padding = tuple(k // 2 if draw.random() < 0.2 else draw.randint(0, min(k // 2, 4)) for k in kernel)
    stride, dilation = tuple(far(draw) for _ in sides), tuple(far(draw, 64) if largest else 1 for _ in sides)
    axes = list(zip(kernel, stride, padding, dilation, strict=True))
    if channels * math.prod(kernel) * math.prod(n + 1 for n in lengths(sides, axes)) > PRODUCTS:
        return None
    ceil = draw.random() < 0.3
    if largest:
        return (nn.MaxPool1d if one else nn.MaxPool2d)(kernel, stride, padding, dilation, ceil_mode=ceil)
    return (nn.AvgPool1d if one else nn.AvgPool2d)(kernel, stride, padding, ceil, draw.random() < 0.5)


def layer(draw: random.Random, channels: int, sides: Sequence[int], large: bool) -> nn.Module | None:
    """A random layer; None if it would take too long."""
    kind = draw.choice(("conv", "conv", "conv", "conv", "pool", "pool", "relu", "norm"))
    if kind == "conv":
        return convolution(draw, channels, sides, large)
    if kind == "pool":
        return pooling(draw, channels, sides)
    if kind == "relu":
        return nn.ReLU()
    return (nn.BatchNorm1d if len(sides) == 1 else nn.BatchNorm2d)(channels)


def network(draw: random.Random, images: Tensor) -> nn.Module | None:
    """A random network that PyTorch can run on the images, or None."""
    large = images[0].numel() > PIXELS
    layers: list[nn.Module] = []
    x = images
    for _ in range(draw.randint(1, 2 if large else 5)):
        made = layer(draw, x.shape[1], x.shape[2:], large)
        if made is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch copies the input for some kernels
                y = made.eval()(x)
        except (RuntimeError, ValueError):  # a kernel that is larger than the image, for instance
            continue
        if not 0 < y.numel() <= max(NUMBERS, 2 * images.numel()):
            continue
        x = y
        layers.append(made)
    if draw.random() < 0.4 and x[0].numel() <= 4096:
        layers += [nn.Flatten(), nn.Linear(x[0].numel(), draw.randint(1, 20))]
    return nn.Sequential(*layers).eval() if layers else None


def is_huge(seed: int) -> bool:
    """Whether a case has images of 4,096 to 8,192 pixels a side."""
    return random.Random(f"huge {seed}").random() < HUGE_SHARE


@torch.no_grad()
def case(_: None, folder: Path, seed: int) -> str:
    """Compile a random network for random images."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sides = [size(draw, LONGEST) for _ in range(1 if draw.random() < 0.15 else 2)]
    most = draw.choice((2**14, 2**14, 2**14, 2**14, 2**18, 2**22, 2**22)) if draw.random() < 0.99 else LONGEST**2
    sides[0] = min(sides[0], max(1, most // math.prod(sides[1:])))
    huge = is_huge(seed)
    if huge:
        sides = [draw.randint(LONGEST // 2, LONGEST) for _ in range(2)]
    pixels = math.prod(sides)
    channels = size(draw, max(1, min(2048, 2**18 // pixels))) if draw.random() < 0.3 else draw.randint(1, 4)
    images = torch.randn(*((1, 1) if pixels > PIXELS else (draw.randint(1, 2), channels)), *sides)
    model = None
    while model is None:
        model = network(draw, images)
    way, threads = draw.choice(("auto", "sparse", "dense")), draw.randint(2 if huge else 1, 8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = engine.compile(model, images[:1], engine=way, threads=threads)
            found = made(images)
    except WiringError as error:
        return f"{way}: refused" if len(str(error)) < 1000 else f"{MISTAKE}: {str(error)[:300]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model(images)
    if found.shape != expected.shape:
        return f"{MISTAKE}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = difference(found, (expected,))
    if error < CLOSE:
        return f"{way}: right"
    exact = model.double()(images.double())
    own, theirs = (difference(x.double(), (exact,)) for x in (found, expected))
    if own < 10 * theirs + CLOSE:
        return f"{way}: right"
    about = f"{' × '.join(map(str, sides))}, {way}, {threads} threads"
    return f"{MISTAKE}: {about}: other outputs than PyTorch's, by {error:.2g}"


FUZZERS = {"image sizes": Fuzzer(prepare, case, memory=8 * 2**30, chunk=50, seconds=300.0, short=5)}
