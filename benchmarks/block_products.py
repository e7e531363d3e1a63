"""Linear layers whose weight consists of blocks, most of them zero, compared with dense products of cuBLAS.

Every tile is measured for each of the three products (forward, gradient of the inputs, gradient of the weight), and
then whole layers with the fastest tiles: forward, and forward and both gradients, called and captured in a CUDA graph.
The blocks are drawn at random, which is the hardest case: neighbouring rows share few columns.

    python -m benchmarks.block_products [--shapes 4096x4096x8192 ...] [--densities 0.1] [--blocks 32] [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import captured, compare, machine, save
from wirings.wire.block_products.choose import DENSE, LayerTiles
from wirings.wire.block_products.layout import BLOCKS, BlockLayout
from wirings.wire.block_products.linear import block_linear, supports
from wirings.wire.block_products.operators import lists_of
from wirings.wire.block_products.tiles import GRADIENTS, PRODUCTS

SHAPES = ("4096x4096x8192", "3072x768x16384", "768x3072x16384")  # outputs, inputs, tokens; GPT-2's perceptron


def make(outputs: int, inputs: int, tokens: int, block: int, density: float, device: str) -> tuple[Any, ...]:
    """Random blocks, inputs and a gradient of the outputs; bfloat16 on a GPU."""
    rows, columns = outputs // block, inputs // block
    blocks = max(1, round(density * rows * columns))
    mask = torch.zeros(rows * columns, dtype=torch.bool, device=device)
    mask[torch.randperm(rows * columns, device=device)[:blocks]] = True
    layout = BlockLayout(mask.view(rows, columns), block, blocks)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weight = torch.where(layout.spread(), torch.randn(outputs, inputs, device=device) / inputs**0.5, 0).to(dtype)
    x, grad = (torch.randn(tokens, width, device=device, dtype=dtype) for width in (inputs, outputs))
    return x.requires_grad_(), weight.requires_grad_(), grad, layout


def fastest_tiles(x: Tensor, weight: Tensor, grad: Tensor, layout: BlockLayout, device: str, seconds: float) -> Any:
    """The fastest tile of each product, faster than dense or not, and the times of all."""
    from wirings.wire.block_products import _products_cuda as kernels

    x, weight, block, lists = x.detach(), weight.detach(), layout.block, lists_of(layout)

    def product(tile: Any, by_column: bool) -> Callable[[], object]:
        return lambda: kernels.multiply(grad if by_column else x, weight, None, lists, block, tile, by_column)

    def gradient(tile: Any) -> Callable[[], object]:
        return lambda: kernels.weight_gradient(grad, x, lists, block, tile)

    sides: dict[str, tuple[Callable[[], object], dict[Any, Callable[[], object]]]] = {
        "forward": (lambda: x @ weight.T, {t: product(t, False) for t in PRODUCTS[block]}),
        "inputs": (lambda: grad @ weight, {t: product(t, True) for t in PRODUCTS[block]}),
        "weights": (lambda: grad.T @ x, {t: gradient(t) for t in GRADIENTS[block]}),
    }
    best, rows = [], []
    for name, (dense, tiles) in sides.items():
        runs: dict[Any, Callable[[], object]] = {"dense": dense}
        for tile, run in tiles.items():
            try:
                run()
                runs[tile] = run
            except Exception as error:  # more shared memory or registers than the GPU has
                print(f"  {name} {tuple(tile)}: {type(error).__name__}: {str(error).splitlines()[0]}")
        if device == "cuda":
            runs = {tile: captured(run) for tile, run in runs.items()}
        taken = compare(runs, device, seconds)
        found = min((tile for tile in taken if tile != "dense"), key=lambda tile: taken[tile]["median_s"])
        best.append(found)
        for tile, times in taken.items():
            ratio = taken["dense"]["median_s"] / times["median_s"]
            print(f"  {name:8} {tile!s:75} {1e3 * times['median_s']:8.4f} ms, {ratio:5.2f} x dense", flush=True)
            rows.append({"product": name, "tile": tile if tile == "dense" else tile._asdict(), **times, "gain": ratio})
    return LayerTiles(*best), rows


def layers(x: Tensor, weight: Tensor, grad: Tensor, layout: BlockLayout, products: LayerTiles) -> dict[str, Any]:
    """Whole layers: forward without gradients, with GELU, and forward and both gradients."""

    def forward(activation: str | None, products: LayerTiles) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return block_linear(x, weight, layout, None, activation, products=products)

        return run

    def step(products: LayerTiles, gradient: str) -> Callable[[], object]:
        return lambda: torch.autograd.grad(
            block_linear(x, weight, layout, gradient=gradient, products=products), (x, weight), grad
        )

    return {
        "forward, dense": forward(None, DENSE),
        "forward, blocks": forward(None, products),
        "forward and GELU, dense": forward("gelu_tanh", DENSE),
        "forward and GELU, blocks": forward("gelu_tanh", products),
        "step, dense": step(DENSE, "dense"),
        "step, blocks": step(products, "real"),
        "step, blocks, all gradients": step(products, "dense"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="outputs x inputs x tokens")
    parser.add_argument("--densities", nargs="+", type=float, default=[0.05, 0.1, 0.2])
    parser.add_argument("--blocks", nargs="+", type=int, default=BLOCKS)
    parser.add_argument("--seconds", type=float, default=0.1, help="seconds of calls per side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about, device = machine(options.device), options.device
    print(f"{about['hardware']}, {about['versions']}")
    rows = []
    for shape in options.shapes:
        outputs, inputs, tokens = map(int, shape.split("x"))
        for density in options.densities:
            for block in options.blocks:
                torch.manual_seed(0)
                x, weight, grad, layout = make(outputs, inputs, tokens, block, density, device)
                print(f"{outputs} x {inputs}, {tokens} tokens, {layout}")
                products, tiles = DENSE, []
                if supports(x, weight, layout):
                    products, tiles = fastest_tiles(x, weight, grad, layout, device, options.seconds)
                sides = layers(x, weight, grad, layout, products)
                ways = {"called": sides}
                if device == "cuda":
                    ways["captured"] = {name: captured(run) for name, run in sides.items()}
                for way, runs in ways.items():
                    taken = compare(runs, device, options.seconds)
                    gains = {}
                    for name, times in taken.items():
                        base = taken[f"{name.split(',')[0]}, dense"]["median_s"]
                        gains[name] = base / times["median_s"]
                        print(f"  {name:28} {1e3 * times['median_s']:8.4f} ms, {gains[name]:5.2f} x dense, {way}")
                    rows.append({"outputs": outputs, "inputs": inputs, "tokens": tokens, "block": block,
                                 "density": density, "way": way, "tiles": tiles, "times": taken,
                                 "gains": gains})  # fmt: skip
    settings = {"shapes": list(options.shapes), "densities": options.densities, "seconds": options.seconds}
    save(options.out, {"benchmark": "block_products", "settings": settings, **about, "device": device, "rows": rows})


if __name__ == "__main__":
    main()
