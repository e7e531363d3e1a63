"""A vision transformer (Dosovitskiy and others, 2021) for small images, such as CIFAR-10's.

An image is cut into patches of 4 × 4 pixels, and each becomes a token. Blocks normalise before attention and before
the MLP. The linear layers of the blocks are wired; the embedding of the patches, the positions and the head stay dense.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from wirings.errors import WiringError
from wirings.models.option_groups import DENSE_LAYERS, LayerWiring
from wirings.models.registry import register
from wirings.models.transformer_options import check_transformer_options
from wirings.utils.checks import check_int, check_number


class ViTBlock(nn.Module):
    """Self-attention and an MLP, each on a residual branch that starts with a layer norm.

    Args:
        width: Size of a token's state.
        heads: Number of attention heads.
        hidden: Size of the MLP's hidden layer.
        dropout: Dropout probability at the end of both branches.
        drop_path: Probability with which an image skips a branch while training (stochastic depth).
    """

    activation_of: ClassVar[dict[str, str]] = {"activation": "up"}
    """The layer whose output the activation is given, and nothing else is: they can be computed together."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.heads, self.drop_path = heads, drop_path
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.activation = nn.GELU()
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._branch(self.attention(self.attention_norm(x)))
        return x + self._branch(self.down(self.activation(self.up(self.mlp_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        """Let all tokens of an image attend to each other."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed

    def _branch(self, y: Tensor) -> Tensor:
        y = self.dropout(y)
        if not self.training or self.drop_path == 0:
            return y
        kept = torch.rand(len(y), 1, 1, device=y.device) >= self.drop_path
        return y * (kept / (1 - self.drop_path)).to(y.dtype)


class ViT(nn.Module):
    """A vision transformer. Takes images, (batch, 3, size, size), and returns logits, (batch, classes).

    Args:
        classes: Number of classes.
        image_size: Height and width of the images in pixels.
        patch: Height and width of a patch in pixels.
        layers: Number of blocks.
        width: Size of a token's state.
        heads: Number of attention heads.
        mlp: Size of an MLP's hidden layer, as a multiple of the width.
        dropout: Dropout probability of the embedded patches and of every branch.
        drop_path: Probability with which an image skips a branch of the last block while training; it rises linearly
            from 0 at the first block.
        pool: What the head reads: the mean of all tokens, or a class token.
    """

    def __init__(
        self,
        classes: int = 10,
        image_size: int = 32,
        patch: int = 4,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        mlp: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        pool: Literal["mean", "class"] = "mean",
    ) -> None:
        super().__init__()
        sizes = {"image_size": image_size, "patch": patch, "layers": layers}
        rates = {"dropout": dropout, "drop_path": drop_path}
        check_transformer_options("vit", rates, width=width, heads=heads, **sizes)
        hidden = round(check_number("vit", "mlp", mlp, most=math.inf) * width)
        check_int("vit", "the size of the MLP's hidden layer", hidden, hint=" Use a larger mlp.")
        if image_size % patch:
            raise WiringError(f"image_size must be a multiple of patch, got {image_size} and {patch}.")
        if pool not in ("mean", "class"):
            raise WiringError(f"pool must be 'mean' or 'class', got {pool!r}.")
        self.input_shape, self.pool = (3, image_size, image_size), pool
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        tokens = (image_size // patch) ** 2 + (pool == "class")
        self.positions = nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))
        self.class_token = nn.Parameter(torch.zeros(1, 1, width)) if pool == "class" else None
        self.dropout = nn.Dropout(dropout)
        skipped = [drop_path * number / max(layers - 1, 1) for number in range(layers)]
        self.blocks = nn.Sequential(*(ViTBlock(width, heads, hidden, dropout, rate) for rate in skipped))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.input_shape:
            expected = ", ".join(map(str, self.input_shape))
            raise WiringError(f"expected images (batch, {expected}), got {tuple(images.shape)}.")
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.blocks(self.dropout(x + self.positions)))
        return self.head(x.mean(1) if self.pool == "mean" else x[:, 0])


@register
def vit(
    wiring: LayerWiring = DENSE_LAYERS,
    classes: int = 10,
    image_size: int = 32,
    patch: int = 4,
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    mlp: float = 4.0,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    pool: Literal["mean", "class"] = "mean",
) -> ViT:
    """A vision transformer, for CIFAR-10 by default; the linear layers of its blocks are wired."""
    model = ViT(classes, image_size, patch, layers, width, heads, mlp, dropout, drop_path, pool)
    wiring.wire(model, skip=["patches", "head"])
    return model
