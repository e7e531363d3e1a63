"""Random programs over tokens: attention of all kinds, norms, embeddings, products, and other orders of dimensions."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.engine.random_programs import RandomProgram
from wirings.compaction.operations import (
    Add,
    AddMap,
    Affine,
    Arrange,
    Attention,
    ChannelNorm,
    Concat,
    Conv,
    Crop,
    Embedding,
    Experts,
    InputRef,
    Multiply,
    MultiplyMap,
    PickTokens,
    Recurrent,
    Reshape,
    ScatterChannels,
    SelectChannels,
    SumTokens,
    TopShares,
    TorchOperator,
)
from wirings.compaction.operations.recurrent import GATES
from wirings.compaction.program import Program

MOST_PAIRS = 2**18
"""The most pairs of tokens that an attention compares: PyTorch, which it is compared with, stores them all."""
MOST_STEPS = 200
"""The most tokens of a recurrent layer: a difference in rounding may grow with each of them."""


class RandomTokenProgram(RandomProgram):
    """A program on (channels, tokens), to which random operations are added.

    Args:
        seed: of everything random.
        tokens: the length of the input.
        channels: of the input, or of the embedding of each token.
        vocabulary: the number of tokens to choose from, if the input is tokens instead of vectors; otherwise 0.
    """

    def __init__(self, seed: int, tokens: int, channels: int, vocabulary: int = 0) -> None:
        super().__init__(seed, (tokens,) if vocabulary else (channels, tokens))
        self.types: dict[str, str] = {}
        if vocabulary:
            self.types["x"] = "torch.int64"
            self.values["x"] = self.values["x"].long()
            self.add(Embedding("embedded", ("x",), self.normal(vocabulary, channels)))

    def linear(self, name: str, out: int) -> str:
        weight = self.weight(out, self.shapes[name][0], 1)
        bias = self.normal(out) if self.random.random() < 0.7 else None
        return self.add(Conv(self.name(), (name,), weight, bias, (1,), (0,), (1,), 1))

    def norm(self, name: str) -> str:
        channels = self.shapes[name][0]
        scale, shift = self.normal(channels), self.normal(channels)
        centered, missing = bool(self.random.integers(2)), int(self.random.integers(3))
        return self.add(ChannelNorm(self.name(), (name,), scale, shift, 0.1, centered, channels + missing))

    def attention(self, name: str) -> str:
        heads, sharing = int(self.random.integers(1, 4)), int(self.random.choice([1, 1, 2, 3]))
        sizes = tuple(int(n) for n in self.random.integers(1, 9, heads))
        value_sizes = tuple(int(n) for n in self.random.integers(1, 9, heads))
        other = self.pick(2) if self.random.random() < 0.3 else name  # possibly with another number of tokens
        if self.shapes[name][1] * self.shapes[other][1] > MOST_PAIRS:
            return name
        queries = self.linear(name, sharing * sum(sizes))
        keys, values = self.linear(other, sum(sizes)), self.linear(other, sum(value_sizes))
        tokens, others = self.shapes[queries][1], self.shapes[keys][1]
        kind = str(self.random.choice(["none", "none", "causal", "mask", "input"]))
        mask, inputs = None, (queries, keys, values)
        every = heads * sharing
        if kind == "mask":
            mask = self.normal(int(self.random.choice([1, every])), tokens, others)
            hidden = torch.rand(mask.shape, generator=self.generator) < 0.2
            hidden[..., 0] = False  # every token sees another
            mask = mask.masked_fill(hidden, -math.inf)
        if kind == "input":
            bias = f"bias{len(self.inputs)}"
            shape = int(self.random.choice([1, every])), int(self.random.choice([1, tokens])), others
            self.inputs[bias], self.values[bias] = shape, torch.zeros(1, *shape)
            inputs = (*inputs, bias)
        scale, causal = float(self.random.uniform(0.1, 1)), kind == "causal"
        return self.add(Attention(self.name(), inputs, mask, sizes, value_sizes, sharing, scale, causal))

    def arrange(self, name: str) -> str:
        """Swap the dimensions, or some of their factors."""
        factors = []
        for size in self.shapes[name]:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            outer = int(self.random.choice(divisors)) if self.random.random() < 0.5 else size
            factors.append((outer, size // outer))
        order = [int(n) for n in self.random.permutation(4)]
        flat = [size for own in factors for size in own]
        cut = int(self.random.integers(1, 4))
        shape = (-1, *(math.prod(flat[n] for n in part) for part in (order[:cut], order[cut:])))
        return self.add(Arrange(self.name(), (name,), tuple(factors), (0, *(n + 1 for n in order)), shape))

    def recurrent(self, name: str) -> str:
        """A recurrent layer, half of them with states to begin with."""
        channels, tokens = self.shapes[name]
        kind, units = str(self.random.choice(list(GATES))), int(self.random.integers(1, 40))
        if tokens > MOST_STEPS:
            return name
        rows = GATES[kind] * units
        first: list[str] = []
        if self.random.random() < 0.5:
            source = self.linear(self.add(Crop(self.name(), (name,), (0,), (1,), (1,))), units)
            state = self.add(Reshape(self.name(), (source,)))
            first = [state] * (2 if kind == "lstm" else 1)
        biases = (self.normal(rows), self.normal(rows)) if self.random.random() < 0.7 else (None, None)
        reverse, cell = bool(self.random.integers(2)), kind == "lstm" and bool(self.random.integers(2))
        weights = self.weight(rows, channels), 0.5 * self.weight(rows, units)
        return self.add(Recurrent(self.name(), (name, *first), *weights, *biases, kind, reverse, cell))

    def experts(self, name: str) -> str:
        channels = self.shapes[name][0]
        experts, units, out = (int(n) for n in self.random.integers(1, (6, 20, 20)))
        count, gated = int(self.random.integers(1, experts + 1)), bool(self.random.integers(2))
        softmax, normalized = bool(self.random.integers(2)), bool(self.random.integers(2))
        # Dense, since which of two equal scores is larger depends on how they are rounded.
        spread = self.add(
            Conv(
                self.name(), (name,), self.normal(experts, channels, 1) / channels**0.5, self.normal(experts), (1,),
                (0,), (1,), 1,
            )
        )  # fmt: skip
        if not softmax:  # a sum may be zero
            normalized = False
        shares = self.add(TopShares(self.name(), (spread,), count, softmax, normalized))
        into = self.weight(experts, units * (2 if gated else 1), channels)
        kind = str(self.random.choice(["relu", "silu", "gelu", "tanh"]))
        weights = into, self.weight(experts, out, units)
        return self.add(Experts(self.name(), (name, shares), *weights, kind, gated, count))

    def indexed(self, name: str) -> str:
        """Messages along the edges of a graph, or one half of that. Nothing else reads tensors of three dimensions."""
        tokens, edges = self.shapes[name][1], int(self.random.integers(1, 60))
        integers = f"edges{len(self.inputs)}"
        self.inputs[integers], self.types[integers] = (1, 2, edges), "torch.int64"
        self.values[integers] = torch.randint(tokens, (1, 1, 2, edges), generator=self.generator)
        made = self.add(PickTokens(self.name(), (name, integers), 0, edges, tokens))
        if self.random.random() < 0.3:
            return made
        return self.add(SumTokens(self.name(), (made, integers), edges, edges, tokens + int(self.random.integers(3))))

    def tokens_of(self, name: str) -> str:
        """Some of the tokens."""
        count = self.shapes[name][1]
        first = int(self.random.integers(0, count))
        return self.add(Crop(self.name(), (name,), (first,), (int(self.random.integers(first + 1, count + 1)),), (1,)))

    def grow(self) -> None:
        name = self.pick(2)
        channels, tokens = shape = self.shapes[name]
        kind = str(self.random.choice([
            "linear", "linear", "linear", "norm", "norm", "attention", "attention", "activation", "affine", "add",
            "concat", "select", "place", "arrange", "tokens_of", "map", "product", "multiply", "reshape", "opaque",
            "recurrent", "experts", "indexed",
        ]))  # fmt: skip
        match kind:
            case "recurrent" | "experts" | "indexed":
                getattr(self, kind)(name)
            case "linear":
                self.linear(name, int(self.random.integers(1, 40)))
            case "norm" | "attention" | "activation" | "arrange" | "tokens_of":
                getattr(self, kind)(name)
            case "affine":
                self.add(Affine(self.name(), (name,), self.normal(channels), self.normal(channels)))
            case "add":
                self.add(Add(self.name(), (name, self.like(name))))
            case "multiply":
                self.add(Multiply(self.name(), (name, self.like(name))))
            case "concat":
                others = [n for n, s in self.shapes.items() if len(s) == 2 and s[1] == tokens]
                self.add(Concat(self.name(), (name, str(self.random.choice(others)))))
            case "select":
                self.add(SelectChannels(self.name(), (name,), self.index(channels)))
            case "place":
                index = torch.from_numpy(self.random.permutation(channels + 2)[:channels].copy())
                self.add(ScatterChannels(self.name(), (name,), index, channels + 2))
            case "map":
                self.add(AddMap(self.name(), (name,), self.normal(*shape)))
            case "product":
                self.add(MultiplyMap(self.name(), (name,), self.normal(*shape)))
            case "reshape":
                rows = int(self.random.choice([n for n in range(1, tokens + 1) if tokens % n == 0]))
                maps = self.add(Reshape(self.name(), (name,), (rows, tokens // rows)))
                self.add(Reshape(self.name(), (maps,), (tokens,)))
            case "opaque" if self.random.random() < 0.5:
                self.add(TorchOperator(self.name(), (name,), "aten::sin", (InputRef(0),)))

    def pick(self, dims: int = 2) -> str:
        return super().pick(dims)

    def program(self, steps: int) -> Program:
        made = super().program(steps)
        return Program(made.inputs, made.operations, made.outputs, {**made.notes, "types": self.types})


def random_program(seed: int, longest: int, steps: int) -> Program:
    """A random program on images or, half of the time, on tokens.

    Args:
        seed: of everything random.
        longest: the largest height, width, or number of tokens.
        steps: the number of operations.
    """
    draw = np.random.default_rng((seed, 1))
    channels, height, width = (int(n) for n in draw.integers(1, (10, longest + 1, longest + 1)))
    if draw.random() < 0.5:
        return RandomProgram(seed, (channels, height, width)).program(steps)
    vocabulary = int(draw.integers(1, 50)) if draw.random() < 0.5 else 0
    return RandomTokenProgram(seed, width, channels, vocabulary).program(steps)
