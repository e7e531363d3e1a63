"""GPT: a decoder of transformer blocks that predicts the next token (Radford et al., 2019).

Pre-norm blocks with learned positions and GELU, initialised as GPT-2: weights are normal with a deviation of 0.02,
which the layers that write to the residual stream divide by the square root of their number.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings.errors import WiringError
from wirings.models.option_groups import DENSE_LAYERS, LayerWiring
from wirings.models.registry import register
from wirings.models.transformer_options import check_transformer_options


class CausalAttention(nn.Module):
    """Attention in which a token sees itself and those before it. Takes and returns (batch, tokens, width)."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(-2))


class GPTBlock(nn.Module):
    """Attention and a two-layer perceptron, four times as wide inside, each added to its input."""

    activation_of: ClassVar[dict[str, str]] = {"activation": "up"}
    """The layer whose output the activation is given, and nothing else is: they can be computed together."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = CausalAttention(width, heads, dropout, bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * width, width, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.down(self.activation(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """A decoder. Takes tokens, int64 (batch, tokens), and returns logits of the next ones, (batch, tokens, classes).

    Args:
        classes: Number of different tokens.
        context: The most tokens of a sequence.
        layers: Number of blocks.
        heads: Number of attention heads of each block.
        width: Size of the residual stream; a multiple of ``heads``.
        dropout: Probability with which attention weights, embeddings and what a block adds are dropped in training.
        bias: Whether linear layers and norms have biases.
        tied: Whether the head has the weights of the token embedding.
    """

    def __init__(
        self,
        classes: int,
        context: int,
        *,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        bias: bool = False,
        tied: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"context": context, "layers": layers}
        check_transformer_options("gpt", {"dropout": dropout}, width=width, heads=heads, **sizes)
        self.context = context
        self.input_shape, self.input_tokens = (context,), classes
        self.tokens = nn.Embedding(classes, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, classes, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                into_residual = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[-1]
        if count > self.context:
            raise WiringError(f"gpt was made for {self.context} tokens, got {count}. Give fewer, or a larger context.")
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(count, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@register
def gpt(
    wiring: LayerWiring = DENSE_LAYERS,
    classes: int = 256,
    context: int = 256,
    layers: int = 6,
    heads: int = 6,
    width: int = 384,
    dropout: float = 0.0,
    bias: bool = False,
    tied: bool = True,
) -> nn.Module:
    """A GPT, by default with 10.7M weights. The layers of its blocks are wired, but not the embeddings and the head."""
    sizes = {"layers": layers, "heads": heads, "width": width}
    return wiring.wire(GPT(classes, context, **sizes, dropout=dropout, bias=bias, tied=tied), skip=["head"])
