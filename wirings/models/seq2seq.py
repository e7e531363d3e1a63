"""A transformer that translates (Vaswani and others, 2017): an encoder reads the source, a decoder writes the target.

Queries, keys and values have linear layers of their own, in cross-attention too. The linear layers of the blocks are
wired; the embeddings and the output layer stay dense. `wirings.models.beam_search` decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

from wirings.errors import WiringError
from wirings.models.option_groups import DENSE_LAYERS, LayerWiring
from wirings.models.registry import register
from wirings.models.transformer_options import check_transformer_options

PAD, START, END = 0, 1, 2
"""Tokens that every vocabulary begins with: padding, and the beginning and the end of a sentence."""

KeyValues = tuple[Tensor, Tensor]
"""Keys and values of attention, both (batch, heads, length, width / heads)."""


class Past:
    """Keys and values of the positions that a decoder block has computed, while a translation grows by one token."""

    def __init__(self) -> None:
        self.read: KeyValues | None = None

    def append(self, new: KeyValues) -> KeyValues:
        """Append the keys and values of further positions, and return all."""
        old = self.read
        self.read = new if old is None else (torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2))
        return self.read

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.read is not None:
            self.read = (self.read[0][rows], self.read[1][rows])


class Residual(nn.Module):
    """Adds a branch to its input, with a layer norm before the branch (``pre``) or after the sum, and dropout."""

    def __init__(self, width: int, dropout: float, pre: bool) -> None:
        super().__init__()
        self.pre, self.norm, self.dropout = pre, nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return x + self.dropout(branch(self.norm(x)))
        return self.norm(x + self.dropout(branch(x)))


class MultiHeadAttention(nn.Module):
    """Attention with several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        """Split states, (batch, length, width), into heads: (batch, heads, length, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def read(self, x: Tensor) -> KeyValues:
        """Return the keys and values of the states that are attended to."""
        return self.split(self.key(x)), self.split(self.value(x))

    def forward(self, x: Tensor, read: KeyValues, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(self.split(self.query(x)), *read, mask, dropout, causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers for each position on its own."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(relu(self.up(x))))


class EncoderBlock(nn.Module):
    """Attention within the source, and a feed-forward layer."""

    def __init__(
        self, width: int, heads: int, hidden: int, dropout: float, attention_dropout: float, pre: bool
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads, attention_dropout)
        self.feed_forward = FeedForward(width, hidden, dropout)
        self.residuals = nn.ModuleList(Residual(width, dropout, pre) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.residuals[0](x, lambda y: self.attention(y, self.attention.read(y), mask))
        return self.residuals[1](x, self.feed_forward)


class DecoderBlock(nn.Module):
    """Attention within the target so far, attention to the source, and a feed-forward layer.

    It computes all positions of the target at once, or with a `Past` the next one.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, dropout: float, attention_dropout: float, pre: bool
    ) -> None:
        super().__init__()
        self.attention, self.cross = (MultiHeadAttention(width, heads, attention_dropout) for _ in range(2))
        self.feed_forward = FeedForward(width, hidden, dropout)
        self.residuals = nn.ModuleList(Residual(width, dropout, pre) for _ in range(3))

    def forward(self, x: Tensor, source: KeyValues, mask: Tensor, past: Past | None = None) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            read = self.attention.read(y)
            return self.attention(y, read if past is None else past.append(read), causal=past is None)

        x = self.residuals[0](x, attend)
        x = self.residuals[1](x, lambda y: self.cross(y, source, mask))
        return self.residuals[2](x, self.feed_forward)


class Seq2Seq(nn.Module):
    """An encoder-decoder transformer.

    Takes pairs of source and target tokens, int64 (batch, 2, length), both padded at the end with `PAD`; the target
    starts with `START`. Returns the logits of the target's next tokens, (batch, length, vocabulary).

    Args:
        classes: Size of the vocabulary, which both languages share.
        layers: Number of blocks of the encoder, and of the decoder.
        width: Size of a token's state.
        heads: Number of attention heads.
        hidden: Size of the hidden layer of the feed-forward layers.
        dropout: Dropout probability of embeddings, branches and hidden layers.
        attention_dropout: Dropout probability of the attention weights.
        norm_first: Whether layer norms come first on a branch (pre-norm), or after the sum (post-norm).
        tied: Whether both embeddings and the output layer share one weight.
        length: Largest number of tokens of a sentence.
    """

    def __init__(
        self,
        classes: int = 8000,
        layers: int = 6,
        width: int = 512,
        heads: int = 8,
        hidden: int = 2048,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        norm_first: bool = True,
        tied: bool = True,
        length: int = 256,
    ) -> None:
        super().__init__()
        sizes = {"layers": layers, "hidden": hidden, "length": length}
        rates = {"dropout": dropout, "attention_dropout": attention_dropout}
        check_transformer_options("seq2seq", rates, width=width, heads=heads, **sizes)
        if width % 2:  # a sine and a cosine for each wavelength
            raise WiringError(f"seq2seq: width must be even and a multiple of heads, got {width} and {heads}.")
        self.input_shape, self.input_tokens = (2, min(24, length)), classes
        block = (width, heads, hidden, dropout, attention_dropout, norm_first)
        self.encoder = nn.ModuleList(EncoderBlock(*block) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(*block) for _ in range(layers))
        # With post-norm, the blocks end with a norm themselves.
        self.encoder_norm, self.decoder_norm = (nn.LayerNorm(width) if norm_first else nn.Identity() for _ in range(2))
        self.source, self.target = nn.Embedding(classes, width), nn.Embedding(classes, width)
        self.head = nn.Linear(width, classes, bias=False)
        if tied:
            self.source.weight = self.target.weight = self.head.weight
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positions", sinusoids(length, width), persistent=False)
        self.positions: Tensor
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.head:
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        drawn = {id(weight): weight for weight in (self.source.weight, self.target.weight, self.head.weight)}
        for weight in drawn.values():  # each once, in this order: tied ones are the same
            nn.init.normal_(weight, std=width**-0.5)

    def forward(self, pairs: Tensor) -> Tensor:
        if pairs.dim() != 3 or pairs.shape[1] != 2 or pairs.is_floating_point():
            raise WiringError(f"expected tokens (batch, 2, length), got {pairs.dtype} {tuple(pairs.shape)}.")
        source, target = pairs.unbind(1)
        x, mask = self.encode(source)
        y = self.embed(self.target, target)
        for block, read in zip(self.decoder, self.read_source(x), strict=True):
            y = block(y, read, mask)
        return self.head(self.decoder_norm(y))

    def embed(self, embedding: nn.Embedding, tokens: Tensor, start: int = 0) -> Tensor:
        """Return the states of tokens, (batch, length), whose first one is at position ``start``."""
        end = start + tokens.shape[1]
        if end > len(self.positions):
            raise WiringError(
                f"a sentence has at most {len(self.positions)} tokens, got {end}. Set model.options.length."
            )
        width = self.positions.shape[1]
        return self.dropout(embedding(tokens) * math.sqrt(width) + self.positions[start:end])

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Encode source tokens, (batch, length).

        Returns:
            The states, (batch, length, width), and a mask of the tokens that are not padding, (batch, 1, 1, length).
        """
        mask = (source != PAD)[:, None, None]
        x = self.embed(self.source, source)
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x), mask

    def read_source(self, states: Tensor) -> list[KeyValues]:
        """Return the keys and values of an encoded source, for each block of the decoder."""
        return [block.cross.read(states) for block in self.decoder]  # type: ignore[union-attr,operator]


def sinusoids(length: int, width: int) -> Tensor:
    """Return sines and cosines of positions, (length, width), with wavelengths from 2 π to 20,000 π."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


@register
def seq2seq(
    wiring: LayerWiring = DENSE_LAYERS,
    classes: int = 8000,
    layers: int = 6,
    width: int = 512,
    heads: int = 8,
    hidden: int = 2048,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    norm_first: bool = True,
    tied: bool = True,
    length: int = 256,
) -> Seq2Seq:
    """An encoder-decoder transformer of the base size; the linear layers of its blocks are wired."""
    size = (classes, layers, width, heads, hidden)
    model = Seq2Seq(*size, dropout, attention_dropout, norm_first, tied, length)
    wiring.wire(model, skip=["head", "source", "target"])
    return model
