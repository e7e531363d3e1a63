"""Random programs: all kinds of operations, odd and even sizes, sparse and dense weights, channels without edges."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wirings.compaction.operations import (
    Activation,
    Add,
    AddMap,
    AddNumbers,
    Affine,
    Concat,
    Constant,
    Conv,
    Crop,
    Flatten,
    GroupNorm,
    InputRef,
    InstanceNorm,
    Linear,
    Mean,
    Multiply,
    Operation,
    Pad,
    Pooling,
    RepeatPixels,
    Reshape,
    Roll,
    ScatterChannels,
    SelectChannels,
    TorchOperator,
)
from wirings.compaction.program import Program

FUNCTIONS = (
    "relu", "clamp", "leaky_relu", "elu", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "hardswish", "hardsigmoid",
    "softplus", "mish",
)  # fmt: skip
VALUES = {"clamp": (-0.5, 1.5), "leaky_relu": (0.1,), "elu": (1.0,)}


class RandomProgram:
    """A program to which random operations are added."""

    def __init__(self, seed: int, shape: tuple[int, ...]) -> None:
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.values = {"x": torch.zeros(1, *shape)}
        self.inputs = {"x": shape}
        self.operations: list[Operation] = []

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, without the batch dimension."""
        return {name: tuple(x.shape[1:]) for name, x in self.values.items()}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def weight(self, *shape: int, density: float | None = None) -> Tensor:
        """Random edges, possibly none in some rows, scaled such that results stay near one."""
        density = float(self.random.choice([0.02, 0.1, 0.4, 1.0])) if density is None else density
        kept = torch.rand(*shape, generator=self.generator) < density
        return self.normal(*shape) * kept / max(1.0, float(kept.sum() / shape[0])) ** 0.5

    def add(self, operation: Operation) -> str:
        assert operation.output not in self.values
        self.values[operation.output] = operation.run(*(self.values[name] for name in operation.inputs))
        self.operations.append(operation)
        return operation.output

    def name(self) -> str:
        return f"t{len(self.operations)}"

    def pick(self, dims: int = 3) -> str:
        """A tensor with ``dims`` dimensions; late ones are more likely."""
        found = [name for name, shape in self.shapes.items() if len(shape) == dims]
        return found[-1] if self.random.random() < 0.7 else str(self.random.choice(found))

    def like(self, name: str) -> str:
        """A tensor of the same shape, possibly the same one."""
        return str(self.random.choice([n for n, shape in self.shapes.items() if shape == self.shapes[name]]))

    def conv(self, name: str) -> str:
        channels, height, width = self.shapes[name]
        out = int(self.random.integers(1, 20))
        kernel = int(self.random.choice([1, 1, 3, 3, 5])), int(self.random.choice([1, 3, 3]))
        if self.random.random() < 0.5:
            kernel = (kernel[0], kernel[0])
        stride, dilation, padding = [], [], []
        for size, k in zip((height, width), kernel, strict=True):
            d = int(self.random.choice([1, 1, 1, 2]))
            p = int(self.random.integers(0, d * (k // 2) + 2))
            if size + 2 * p < d * (k - 1) + 1:
                p = d * (k - 1)
            stride.append(int(self.random.choice([1, 1, 1, 2, 2, 3])))
            dilation.append(d)
            padding.append(p)
        groups = 1
        if self.random.random() < 0.2 and channels % 2 == 0:
            groups, out = 2, 2 * -(-out // 2)
        weight = self.weight(out, channels // groups, *kernel)
        bias = self.normal(out) if self.random.random() < 0.7 else None
        conv = Conv(self.name(), (name,), weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)
        return self.add(conv)

    def depthwise(self, name: str) -> str:
        channels = self.shapes[name][0]
        stride = int(self.random.integers(1, 3))
        bias = self.normal(channels) if self.random.random() < 0.5 else None
        weight = self.weight(channels, 1, 3, 3, density=1.0)
        return self.add(Conv(self.name(), (name,), weight, bias, (stride, stride), (1, 1), (1, 1), channels))

    def activation(self, name: str) -> str:
        kind = "relu" if self.random.random() < 0.6 else str(self.random.choice(FUNCTIONS))
        return self.add(Activation(self.name(), (name,), kind, VALUES.get(kind, ())))

    def index(self, channels: int) -> Tensor:
        count = int(self.random.integers(1, channels + 1))
        return torch.from_numpy(self.random.permutation(channels)[:count].copy())

    def pool(self, name: str) -> str:
        _, height, width = self.shapes[name]
        if self.random.random() < 0.3:
            size = int(self.random.integers(1, height + 1)), int(self.random.integers(1, width + 1))
            return self.add(
                Pooling(self.name(), (name,), str(self.random.choice(["adaptive_avg", "adaptive_max"])), size)
            )
        k = int(min(self.random.integers(1, 4), height, width))
        s, p = int(self.random.integers(1, 4)), int(self.random.integers(0, k // 2 + 1))
        pool = Pooling(
            self.name(), (name,), str(self.random.choice(["max", "avg"])), (k, k), (s, s), (p, p), (1, 1),
            bool(self.random.integers(2)), bool(self.random.integers(2)),
        )  # fmt: skip
        return self.add(pool)

    def crop(self, name: str) -> str:
        starts, stops = [], []
        for size in self.shapes[name][1:]:
            start = int(self.random.integers(0, size))
            starts.append(start)
            stops.append(int(self.random.integers(start + 1, size + 1)))
        return self.add(Crop(self.name(), (name,), tuple(starts), tuple(stops), (1, 1)))

    def grow(self) -> None:
        """Add an operation."""
        kind = str(self.random.choice([
            "conv", "conv", "conv", "depthwise", "depthwise", "activation", "activation", "affine", "add", "concat",
            "select", "place", "pool", "crop", "pad", "map", "norm", "multiply", "constant", "opaque",
            "groups", "numbers", "repeat", "roll",
        ]))  # fmt: skip
        name = self.pick()
        shape = self.shapes[name]
        channels = shape[0]
        match kind:
            case "conv" | "depthwise" | "activation" | "pool" | "crop":
                getattr(self, kind)(name)
            case "affine":
                self.add(Affine(self.name(), (name,), self.normal(channels), self.normal(channels)))
            case "add":
                self.add(Add(self.name(), (name, self.like(name))))
            case "concat":
                others = [n for n, s in self.shapes.items() if len(s) == 3 and s[1:] == shape[1:]]
                self.add(Concat(self.name(), (name, str(self.random.choice(others)))))
            case "select":
                self.add(SelectChannels(self.name(), (name,), self.index(channels)))
            case "place":
                index = torch.from_numpy(self.random.permutation(channels + 2)[:channels].copy())
                self.add(ScatterChannels(self.name(), (name,), index, channels + 2))
            case "pad":
                self.add(Pad(self.name(), (name,), (1, 0), (0, 2)))
            case "map":
                added = self.normal(*shape) if self.random.random() < 0.5 else self.border(shape)
                self.add(AddMap(self.name(), (name,), added))
            case "norm" if shape[1] * shape[2] > 1:
                self.add(InstanceNorm(self.name(), (name,), self.normal(channels), self.normal(channels), 0.1))
            case "groups":
                sizes = (channels // 2, channels - channels // 2) if channels > 1 else (1,)
                own = self.normal(channels), self.normal(channels)
                self.add(GroupNorm(self.name(), (name,), *own, sizes, max(sizes) + channels % 2, 0.1))
            case "numbers":
                numbers = self.add(Mean(self.name(), (name,), True))
                self.add(AddNumbers(self.name(), (name, numbers)))
            case "repeat" if shape[1] * shape[2] < 100:
                self.add(RepeatPixels(self.name(), (name,), (2, 1)))
            case "roll":
                self.add(Roll(self.name(), (name,), (2, -1)))
            case "multiply":
                gate = self.add(Mean(self.name(), (name,), True)) if self.random.random() < 0.5 else self.like(name)
                self.add(Multiply(self.name(), (name, gate)))
            case "constant":
                self.add(Constant(self.name(), (name,), self.normal(*shape)))
            case "opaque" if self.random.random() < 0.5:
                self.add(TorchOperator(self.name(), (name,), "aten::sin", (InputRef(0),)))

    def border(self, shape: tuple[int, ...]) -> Tensor:
        """Constant maps like those of constant nodes, with other values at the border."""
        ones = torch.ones(1, shape[0], shape[1], shape[2])
        return torch.nn.functional.conv2d(ones, self.normal(shape[0], 1, 3, 3), padding=1, groups=shape[0])[0]

    def program(self, steps: int) -> Program:
        """A program of ``steps`` operations, possibly with a classifier."""
        for _ in range(steps):
            self.grow()
        last = self.pick()
        if self.random.random() < 0.5:
            self.head(last)
        outputs = {list(self.shapes)[-1], *([self.pick()] if self.random.random() < 0.3 else [])}
        notes = {"one_output": False}
        return Program(self.inputs, self.operations, tuple(sorted(outputs)), notes)

    def head(self, name: str) -> None:
        mean = self.random.random() < 0.6
        if mean and self.random.random() < 0.3:
            kept = self.add(Mean(self.name(), (name,), True))
            vector = self.add(Reshape(self.name(), (kept,)))
        else:
            vector = self.add((Mean if mean else Flatten)(self.name(), (name,)))
        for _ in range(int(self.random.integers(1, 3))):
            size, bias = int(self.random.integers(1, 70)), None
            if self.random.random() < 0.7:
                bias = self.normal(size)
            vector = self.add(Linear(self.name(), (vector,), self.weight(size, self.shapes[vector][0]), bias))
            if self.random.random() < 0.5:
                vector = self.activation(vector)
