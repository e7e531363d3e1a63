"""The sizes of tiles that the kernels can work with, and what decides between them.

What limits these products is the traffic between the level-2 cache and the multiprocessors: an output needs few
inputs, so inputs that were loaded are used few times. For 4096 x 4096, 8,192 tokens and 10 % of the blocks in bfloat16,
with random blocks (X is read once for every block, W once for every tile of tokens):

| blocks | tokens of a tile | X | W | sum | at 5.5 to 7 TB/s |
|---|---|---|---|---|---|
| 16 x 16 | 256 | 1.72 GB | 0.11 GB | 1.83 GB | 0.26 to 0.33 ms |
| 32 x 32 | 128 | 0.86 GB | 0.21 GB | 1.07 GB | 0.15 to 0.20 ms |
| 32 x 32 | 256 | 0.86 GB | 0.11 GB | 0.97 GB | 0.14 to 0.18 ms |
| 32 x 32 | 512 | 0.86 GB | 0.05 GB | 0.91 GB | 0.13 to 0.17 ms |
| 64 x 64 | 256 | 0.43 GB | 0.11 GB | 0.54 GB | 0.08 to 0.10 ms |
| 128 x 128 | 256 | 0.21 GB | 0.11 GB | 0.32 GB | 0.05 to 0.06 ms |

These are estimates. An H200 takes 0.129 ms with blocks of 32 and 0.084 ms with blocks of 64, where the dense product
takes 0.33 ms. The products themselves, 27 GFLOP, would take 0.05 ms at 550 TFLOP/s.

Rows of blocks that share what they load would save little: of 128 columns, g random rows at 10 % use 128 (1 - 0.9^g),
which is 1.9 times those of one for g = 2 and 3.4 times for g = 4, while tensor cores also multiply the zeros of the
union. With all sums that fit into registers (128 tokens x 256 outputs), X and W together would still be 0.83 GB. Only
multiprocessors that share loads (clusters with multicast) would come below that, to about 0.47 GB with four; Triton
does not offer them.

The gradient of a block of the weight needs two columns of all tokens, 1.7 GB in total if each block is alone. Blocks of
one row share the outputs' half, so that runs of 8 blocks need 0.97 GB.
"""

from __future__ import annotations

from typing import NamedTuple


class ProductTile(NamedTuple):
    """What a program of the forward product, or of the gradient of the inputs, computes."""

    tokens: int
    """Tokens; the rows of a tile, of which tensor cores need 64."""
    step: int = 1
    """Blocks that are loaded and multiplied at a time."""
    warps: int = 4
    stages: int = 4
    """Steps in flight. Shared memory limits how many programs a multiprocessor runs."""


class GradientTile(NamedTuple):
    """What a program of the weight's gradient computes."""

    blocks: int
    """Blocks of one row; times their side, the rows of a tile."""
    tokens: int = 64
    """Tokens that are loaded and multiplied at a time."""
    split: int = 4
    """Shares of the tokens, which are added up at the end, so that all multiprocessors have work."""
    warps: int = 4
    stages: int = 4


PRODUCTS = {
    16: (
        ProductTile(256, step=2, stages=3),
        ProductTile(128, step=4),
        ProductTile(256, step=4, warps=8, stages=3),
        ProductTile(256, step=2, warps=8),
    ),
    32: (
        ProductTile(256, stages=3),
        ProductTile(256, stages=2),
        ProductTile(256),
        ProductTile(128),
        ProductTile(512, warps=8, stages=3),
    ),
    64: (
        ProductTile(128, stages=3),
        ProductTile(128, stages=2),
        ProductTile(256, stages=2),
        ProductTile(256, warps=8, stages=3),
    ),
    128: (
        ProductTile(128, warps=8, stages=3),
        ProductTile(128, warps=8, stages=2),
        ProductTile(128, stages=2),
    ),
}
"""The tiles worth measuring for each side of a block."""

GRADIENTS = {
    16: (
        GradientTile(16, warps=8, stages=3),
        GradientTile(8),
        GradientTile(16, split=2, warps=8, stages=3),
    ),
    32: (
        GradientTile(8, warps=8, stages=3),
        GradientTile(4),
        GradientTile(8, split=2, warps=8, stages=3),
        GradientTile(8, tokens=32, warps=8),
        GradientTile(2),
    ),
    64: (
        GradientTile(2),
        GradientTile(4, warps=8, stages=3),
        GradientTile(2, split=2),
        GradientTile(2, stages=3),
    ),
    128: (
        GradientTile(1, warps=8, stages=3),
        GradientTile(1, split=2, warps=8, stages=3),
        GradientTile(2, warps=8, stages=3),
    ),
}
