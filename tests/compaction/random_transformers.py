"""Random transformers with dead heads, neurons and residual channels: encoders, decoders, or one of each.

`Ops` runs each operator in PyTorch or adds it to a program. So a network is computed both ways from one description,
without a trace, which would take most of the time of a test.
"""

import math
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings.compaction.aten import VIEW_CONVERTERS, ProgramTensor, view_of
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operations.arrange import arrange
from wirings.compaction.program import Program

VOCABULARY = 11


class Ops:
    """PyTorch's operators by name, on tensors or, with a builder, on tensors of a program."""

    def __init__(self, builder: ProgramBuilder | None = None) -> None:
        self.builder = builder

    def call(self, operator: str, /, **arguments: Any) -> Any:
        if self.builder is None:
            return getattr(torch.ops.aten, operator)(**arguments)
        made = VIEW_CONVERTERS[operator](self.builder, operator, arguments)
        assert made is not None, operator
        return made

    def shape(self, x: Any) -> tuple[int, ...]:
        if isinstance(x, Tensor):
            return tuple(x.shape)
        assert self.builder is not None
        axes = view_of(self.builder, x)
        assert axes is not None
        return axes.shape

    def reshape(self, x: Any, *shape: int) -> Any:
        if self.builder is None:
            return x.reshape(shape)
        return self.call("reshape", self=x, sizes=shape)

    def transpose(self, x: Any, one: int, two: int) -> Any:
        if self.builder is None:
            return x.transpose(one, two)
        return self.call("transpose", self=x, dim0=one, dim1=two)

    def part(self, x: Any, first: int, last: int) -> Any:
        if self.builder is None:
            return x[..., first:last]
        return self.call("slice", self=x, dim=-1, start=first, end=last)

    def linear(self, x: Any, layer: nn.Linear) -> Any:
        bias = None if layer.bias is None else layer.bias.detach()
        return self.call("linear", input=x, weight=layer.weight.detach(), bias=bias)

    def attention(self, q: Any, k: Any, v: Any, **how: Any) -> Any:
        if self.builder is None:
            return F.scaled_dot_product_attention(q, k, v, **how)
        return self.call("scaled_dot_product_attention", query=q, key=k, value=v, **how)

    def binary(self, operator: str, one: Any, two: Any) -> Any:
        if self.builder is None:
            return {"add": torch.add, "mul": torch.mul}[operator](one, two)
        return self.call(operator, self=one, other=two)

    def function(self, operator: str, x: Any) -> Any:
        return self.call(operator, self=x)

    def norm(self, kind: str, x: Any, weight: Tensor, bias: Tensor) -> Any:
        if kind == "layer_norm":
            shape, eps = [len(weight)], 1e-3
            return self.call("layer_norm", input=x, normalized_shape=shape, weight=weight, bias=bias, eps=eps)
        if self.builder is None:
            return F.rms_norm(x, (len(weight),), weight, 1e-3)
        return self.call("rms_norm", input=x, normalized_shape=[len(weight)], weight=weight, eps=1e-3)

    def embedding(self, weight: Tensor, tokens: Any) -> Any:
        return self.call("embedding", weight=weight, indices=tokens)

    def cat(self, parts: list[Any], dim: int) -> Any:
        return self.call("cat", tensors=parts, dim=dim)


class RandomAttention(nn.Module):
    """Attention with all of its variants: shared heads, rotary embeddings, masks, other tokens."""

    def __init__(self, draw: Random, width: int, tokens: int, others: int | None = None) -> None:
        super().__init__()
        self.heads, self.shared = draw.choice([(1, 1), (2, 1), (2, 2), (4, 2)])
        self.size = draw.choice([2, 4])
        bias, keys = draw.random() < 0.5, self.shared * self.size
        self.queries = nn.Linear(width, self.heads * self.size, bias=bias)
        self.keys, self.values = nn.Linear(width, keys, bias=bias), nn.Linear(width, keys, bias=bias)
        self.out = nn.Linear(self.heads * self.size, width, bias=bias)
        kind = draw.choice(["none", "none", "causal", "mask", "heads"]) if others is None else "none"
        self.causal, self.mask = kind == "causal", None
        if kind in ("mask", "heads"):
            self.mask = torch.randn(self.heads if kind == "heads" else 1, tokens, tokens).double()
            self.mask[:, 0, 1:] = -math.inf
        self.rotary = others is None and self.size > 2 and draw.random() < 0.5
        with torch.no_grad():  # dead heads
            for head in range(self.shared):
                if draw.randint(0, 4) == 0:
                    layer = draw.choice([self.queries, self.keys, self.values])
                    many = self.heads // self.shared if layer is self.queries else 1
                    layer.weight.view(self.shared, many * self.size, width)[head] = 0
            for head in range(self.heads):
                if draw.randint(0, 4) == 0:
                    self.out.weight.view(width, self.heads, self.size)[:, head] = 0

    def forward(self, ops: Ops, x: Any, other: Any) -> Any:
        batch, tokens, _ = ops.shape(x)
        split = []
        for layer, source, heads in (
            (self.queries, x, self.heads),
            (self.keys, other, self.shared),
            (self.values, other, self.shared),
        ):
            count = ops.shape(source)[1]
            made = ops.reshape(ops.linear(source, layer), batch, count, heads, self.size)
            split.append(ops.transpose(made, 1, 2))
        if self.rotary:
            split[:2] = [self.turned(ops, part, tokens) for part in split[:2]]
        how = {"attn_mask": self.mask, "is_causal": self.causal, "enable_gqa": self.heads != self.shared}
        made = ops.transpose(ops.attention(*split, **how), 1, 2)
        return ops.linear(ops.reshape(made, batch, tokens, self.heads * self.size), self.out)

    def turned(self, ops: Ops, x: Any, tokens: int) -> Any:
        """Rotary embeddings."""
        half = self.size // 2
        angles = torch.arange(tokens).double()[:, None] / 10 ** torch.arange(half).double()
        cos, sin = (function(angles).repeat(1, 2) for function in (torch.cos, torch.sin))
        low, high = ops.part(x, 0, half), ops.part(x, half, self.size)
        swapped = ops.cat([ops.function("neg", high), low], -1)
        return ops.binary("add", ops.binary("mul", x, cos), ops.binary("mul", swapped, sin))


class RandomBlock(nn.Module):
    """A block of a transformer."""

    def __init__(self, draw: Random, width: int, tokens: int, others: int | None = None) -> None:
        super().__init__()
        self.attention = RandomAttention(draw, width, tokens)
        self.cross = None if others is None else RandomAttention(draw, width, tokens, others)
        hidden, bias = draw.choice([4, 8]), draw.random() < 0.5
        self.into, self.out = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if draw.random() < 0.5 else None
        self.activation = draw.choice(["gelu", "relu", "silu", "tanh", "sigmoid"])
        self.kind, self.first = draw.choice(["layer_norm", "rms_norm"]), draw.random() < 0.5
        self.norms = nn.ParameterList([nn.Parameter(torch.randn(2, width)) for _ in range(3)])
        with torch.no_grad():  # dead and constant neurons
            for layer in (self.into, self.out, self.gate):
                if layer is not None:
                    layer.weight *= torch.rand_like(layer.weight) < draw.choice([0.2, 0.5, 1.0])
            for neuron in range(hidden):
                if draw.randint(0, 3) == 0:
                    self.into.weight[neuron] = 0

    def forward(self, ops: Ops, x: Any, other: Any) -> Any:
        parts: list[Any] = [lambda y: self.attention(ops, y, y)]
        if self.cross is not None:
            parts.append(lambda y: self.cross(ops, y, other))
        parts.append(lambda y: self.mlp(ops, y))
        for part, norm in zip(parts, self.norms, strict=False):
            weight, bias = norm.detach()
            if self.first:
                x = ops.binary("add", x, part(ops.norm(self.kind, x, weight, bias)))
            else:
                x = ops.norm(self.kind, ops.binary("add", x, part(x)), weight, bias)
        return x

    def mlp(self, ops: Ops, x: Any) -> Any:
        hidden = ops.function(self.activation, ops.linear(x, self.into))
        if self.gate is not None:
            hidden = ops.binary("mul", hidden, ops.linear(x, self.gate))
        return ops.linear(hidden, self.out)


class RandomTransformer(nn.Module):
    """Blocks over tokens or vectors; with two inputs, a decoder also reads what an encoder made of the second."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        width, self.tokens = draw.choice([4, 6, 8]), draw.choice([1, 3, 7, 17])
        self.others = draw.choice([None, None, 2, 5])
        self.from_ids = draw.random() < 0.5
        self.table = nn.Parameter(torch.randn(VOCABULARY, width))
        self.places = nn.Parameter(torch.randn(1, self.tokens, width))
        self.blocks = nn.ModuleList(
            RandomBlock(draw, width, self.tokens, self.others) for _ in range(draw.randint(1, 2))
        )
        self.encoder = None if self.others is None else RandomBlock(draw, width, self.others)
        self.head, self.width = nn.Linear(width, 3), width
        self.double().eval()
        dead = [c for c in range(width) if draw.randint(0, 3) == 0]
        with torch.no_grad():  # channels that stay zero in the residual stream
            self.table[:, dead] = 0
            self.places[:, :, dead] = 0
            for block in self.modules():
                if isinstance(block, RandomBlock):
                    for layer in (block.attention.out, block.out, *([block.cross.out] if block.cross else [])):
                        layer.weight[dead] = 0
                        if layer.bias is not None:
                            layer.bias[dead] = 0

    def example(self, batch: int) -> list[Tensor]:
        sizes = [self.tokens, *([] if self.others is None else [self.others])]
        if self.from_ids:
            return [torch.randint(VOCABULARY, (batch, size)) for size in sizes]
        return [torch.randn(batch, size, self.width, dtype=torch.float64) for size in sizes]

    def run(self, ops: Ops, x: Any, *other: Any) -> Any:
        inputs = [ops.embedding(self.table.detach(), y) if self.from_ids else y for y in (x, *other)]
        x = ops.binary("add", inputs[0], self.places.detach())
        other = self.encoder(ops, inputs[1], None) if self.encoder is not None else None
        for block in self.blocks:
            x = block(ops, x, other)
        return ops.linear(x, self.head)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(Ops(), *inputs)  # type: ignore[no-any-return]

    def program(self) -> Program:
        """The network as a program, without a trace."""
        builder = ProgramBuilder(self.example(2))
        made = self.run(Ops(builder), *map(ProgramTensor, builder.inputs))
        axes = view_of(builder, made)
        assert axes is not None
        return builder.program([arrange(builder, made.name, axes, "result")])


def random_transformer(seed: int) -> RandomTransformer:
    torch.manual_seed(seed)
    return RandomTransformer(Random(seed))
