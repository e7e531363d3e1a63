"""Random networks on images of 1 to 8,192 pixels a side: compiled, they return what PyTorch does, or are refused."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.fuzz.programs import prepare
from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError, engine

LONGEST = 8192
"""The longest side of an image, in pixels."""
PIXELS = 2**20
"""The most pixels of an image with several channels; others have one."""
CLOSE = 3e-5
"""The difference from PyTorch's outputs, as a share of the largest, that rounding explains."""


def side(draw: random.Random) -> int:
    """A side of an image: short and long ones are as likely, and so are powers of two and their neighbours."""
    if draw.random() < 0.3:
        return max(1, min(LONGEST, 2 ** draw.randint(0, 13) + draw.randint(-1, 1)))
    return int(2 ** draw.uniform(0, 13))


def layer(draw: random.Random, channels: int, large: bool) -> tuple[nn.Module, int]:
    """A random layer, and the number of channels that it returns."""

    def pair(least: int, most: int) -> tuple[int, int]:
        return (draw.randint(least, most), draw.randint(least, most))

    kind = draw.choice(("conv", "conv", "conv", "depthwise", "max", "avg", "adaptive", "relu", "norm"))
    if kind in ("conv", "depthwise"):
        groups = channels if kind == "depthwise" else draw.choice([g for g in (1, 1, 2, 3) if channels % g == 0])
        out = groups * draw.randint(1, 2 if large else 4)
        kernel, dilation = pair(1, draw.choice((1, 3, 7))), pair(1, draw.choice((1, 1, 3)))
        stride = draw.choice(((1, 1), (2, 2), pair(1, 4)))
        padding = draw.choice(("same", (0, 0), (kernel[0] // 2, kernel[1] // 2), pair(0, 8)))
        mode = draw.choice(("zeros", "zeros", "zeros", "reflect", "replicate", "circular"))
        made = nn.Conv2d(
            channels, out, kernel, (1, 1) if padding == "same" else stride, padding, dilation, groups,
            draw.random() < 0.7, mode,
        )  # fmt: skip
        with torch.no_grad():
            made.weight *= torch.rand_like(made.weight) < draw.choice((0.1, 0.5, 1.0))
        return made, out
    if kind in ("max", "avg"):
        kernel = pair(1, 4)
        stride, padding = pair(1, 3), (draw.randint(0, kernel[0] // 2), draw.randint(0, kernel[1] // 2))
        if kind == "max":
            return nn.MaxPool2d(kernel, stride, padding, draw.randint(1, 2), ceil_mode=draw.random() < 0.3), channels
        return nn.AvgPool2d(kernel, stride, padding, draw.random() < 0.3, draw.random() < 0.5), channels
    if kind == "adaptive":
        return (nn.AdaptiveAvgPool2d if draw.random() < 0.5 else nn.AdaptiveMaxPool2d)(pair(1, 9)), channels
    return (nn.ReLU() if kind == "relu" else nn.BatchNorm2d(channels)), channels


def network(draw: random.Random, channels: int, images: Tensor) -> nn.Module | None:
    """A random network that PyTorch can run on the images, or None."""
    large = images.shape[-1] * images.shape[-2] > PIXELS
    layers: list[nn.Module] = []
    x = images
    for _ in range(draw.randint(1, 2 if large else 5)):
        made, after = layer(draw, channels, large)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch copies the input for some kernels
                y = made.eval()(x)
        except (RuntimeError, ValueError):  # a kernel that is larger than the image, for instance
            continue
        if not 0 < y.numel() <= max(2**22, 2 * images.numel()):
            continue
        x, channels = y, after
        layers.append(made)
    if draw.random() < 0.4 and x[0].numel() <= 4096:
        layers += [nn.Flatten(), nn.Linear(x[0].numel(), draw.randint(1, 20))]
    return nn.Sequential(*layers).eval() if layers else None


@torch.no_grad()
def case(_: None, folder: Path, seed: int) -> str:
    """Compile a random network for random images."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    height, width = side(draw), side(draw)
    large = height * width > PIXELS
    if height * width > 2**22 and draw.random() < 0.9:  # the largest take many seconds each
        height = max(1, 2**22 // width)
    channels = 1 if large else draw.randint(1, 4)
    images = torch.randn(1 if large else draw.randint(1, 2), channels, height, width)
    model = None
    while model is None:
        model = network(draw, channels, images)
    way, threads = draw.choice(("auto", "sparse", "dense")), draw.randint(1, 8)
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
    error = float((found - expected).abs().max()) / max(1e-3, float(expected.abs().max()))
    if error < CLOSE:
        return f"{way}: right"
    exact = model.double()(images.double())
    own, theirs = (float((x.double() - exact).abs().max()) for x in (found, expected))
    if own < 10 * theirs + CLOSE * float(exact.abs().max()):
        return f"{way}: right"
    return f"{MISTAKE}: {height} × {width}, {way}, {threads} threads: other outputs than PyTorch's, by {error:.2g}"


FUZZERS = {"image sizes": Fuzzer(prepare, case, memory=8 * 2**30, chunk=50, seconds=120.0, short=5)}
