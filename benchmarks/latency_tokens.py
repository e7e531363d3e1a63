"""Latency of transformers on a CPU: `wirings.engine`, ONNX Runtime in float32 and int8, and PyTorch.

- ``encoder``: an encoder like BERT's, 6 layers × 384, on one sequence of 128 tokens, with 10 and 5 % of the weights of
  its blocks.
- ``decoder``: a GPT, 6 layers × 512, with 10 % of the weights of its blocks and with all, one token at a time with a
  cache, of which 128 tokens are filled; in the engine also in bfloat16 and int8.

The wiring is random, not trained. ONNX Runtime gets what PyTorch exports, and what `wirings` exports; the faster one
counts. Its int8 is dynamic quantisation. Sides take turns as in `benchmarks.latency`.

    python -m benchmarks.latency_tokens [encoder|decoder] [--threads 2] [--seconds 4] [--out RECORD.json]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import machine, save
from benchmarks.latency import in_turn
from wirings import compact, engine, finalize_, models, wire_

TOKENS, VOCABULARY = 128, 1000
ENCODER = {"layers": 6, "width": 384, "heads": 6}
DECODER = {"layers": 6, "width": 512, "heads": 8, "context": 256, "classes": 256}


class Encoder(nn.Module):
    """Tokens to two classes, by the first token after the last layer."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, TOKENS, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.tokens(tokens) + self.positions))[:, 0])


def sparse(model: nn.Module, density: float) -> nn.Module:
    """The network with a share of the weights of its blocks; everything else is dense."""
    wire_(model, "random", density=density, include=["blocks.*"])
    return finalize_(model).eval()


class OneToken(nn.Module):
    """A GPT for one token; keys and values of earlier ones are inputs and outputs, (layers, heads, past, size)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model = self.model
        x = model.tokens(token) + model.positions(position)
        made: list[tuple[Tensor, Tensor]] = []
        for number, block in enumerate(model.blocks):
            own = block.attention
            y = block.attention_norm(x)
            q, k, v = (f(y).view(1, 1, own.heads, -1).transpose(1, 2) for f in (own.query, own.key, own.value))
            k, v = torch.cat([keys[number][None], k], 2), torch.cat([values[number][None], v], 2)
            made.append((k[0], v[0]))
            x = x + own.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + block.down(F.gelu(block.up(block.mlp_norm(x))))
        logits = model.head(model.norm(x))
        return logits, torch.stack([k for k, _ in made]), torch.stack([v for _, v in made])


def session(path: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def exported(model: nn.Module, inputs: dict[str, Tensor], path: Path) -> Path:
    """The ONNX file that PyTorch makes of a network."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.mha.set_fastpath_enabled(False)  # has no counterpart in ONNX
        torch.onnx.export(
            model, tuple(inputs.values()), path, dynamo=False, opset_version=17, input_names=list(inputs), verbose=False
        )
        torch.backends.mha.set_fastpath_enabled(True)
    return path


def quantised(path: Path) -> Path:
    """The same network with int8 weights, and activations that ONNX Runtime quantises as it runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.disable(logging.WARNING)
    made = path.with_suffix(".int8.onnx")
    quantize_dynamic(path, made, weight_type=QuantType.QInt8)
    logging.disable(logging.NOTSET)
    return made


def runs(path: Path, inputs: dict[str, Tensor], threads: int) -> Callable[[], list[np.ndarray]]:
    made, given = session(path, threads), {name: x.numpy() for name, x in inputs.items()}
    return lambda: made.run(None, given)


def show(times: dict[str, dict[str, float]]) -> None:
    for name, taken in times.items():
        print(f"  {name:40} median {1e3 * taken['median_s']:8.3f} ms, fastest {1e3 * taken['min_s']:.3f}, "
              f"n = {taken['n']}, disturbed {taken['disturbed']}")  # fmt: skip


@torch.no_grad()
def encoder(threads: int, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for density in (0.1, 0.05):
        torch.manual_seed(0)
        model = sparse(Encoder(**ENCODER), density)
        x = {"tokens": torch.randint(VOCABULARY, (1, TOKENS))}
        small = compact(model, x["tokens"])
        fast = engine.compile(small, threads=threads)
        int8 = engine.compile(small, threads=threads, dtype="int8")
        with tempfile.TemporaryDirectory() as folder:
            path = exported(model, x, Path(folder) / "model.onnx")
            own = small.save(Path(folder) / "compact.onnx")
            named = {next(iter(small.program.inputs)): x["tokens"]}
            sides: dict[str, Callable[[], Any]] = {
                "engine": lambda fast=fast, x=x: fast(x["tokens"]),
                "engine, int8": lambda int8=int8, x=x: int8(x["tokens"]),
                "ONNX Runtime, from PyTorch": runs(path, x, threads),
                "ONNX Runtime, from wirings": runs(own, named, threads),
                "ONNX Runtime, int8": runs(quantised(path), x, threads),
                "PyTorch": lambda model=model, x=x: model(x["tokens"]),
            }
        expected = model(**x)
        for name in ("engine", "ONNX Runtime, from PyTorch", "ONNX Runtime, from wirings"):
            found = sides[name]()
            found = found if isinstance(found, Tensor) else torch.from_numpy(found[0])
            assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), name
        lost = float((int8(x["tokens"]) - expected).norm() / expected.norm())
        print(f"encoder {ENCODER['layers']} × {ENCODER['width']}, {TOKENS} tokens, {100 * density:g} %")
        times = in_turn(sides, seconds)
        show(times)
        print(f"  int8 changes the outputs by {100 * lost:.2f} %")
        rows.append({"density": density, "times": times, "int8_loss": lost, "steps": fast.report.as_mapping()["steps"]})
    return rows


@torch.no_grad()
def decoder(threads: int, seconds: float) -> list[dict[str, Any]]:
    return [one_token(density, threads, seconds) for density in (0.1, 1.0)]


def one_token(density: float, threads: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = models.get("gpt", **DECODER).eval()
    model = sparse(model, density) if density < 1 else model
    layers, heads, size = DECODER["layers"], DECODER["heads"], DECODER["width"] // DECODER["heads"]
    tokens = torch.randint(DECODER["classes"], (1, DECODER["context"]))
    way = "sparse" if density < 1 else "dense"  # of the network for all tokens, which is not used
    made = {
        dtype: engine.compile(model, tokens, engine=way, threads=threads, dtype=dtype).generator()
        for dtype in ("float32", "bfloat16", "int8")
    }
    one = OneToken(model)
    keys = values = torch.zeros(layers, heads, 0, size)
    found: dict[str, Tensor] = {}
    for t in range(TOKENS):
        logits, keys, values = one(tokens[:, t : t + 1], torch.tensor([[t]]), keys, values)
        found = {dtype: generator.step(int(tokens[0, t])) for dtype, generator in made.items()}
    expected = logits[0, 0]
    assert (found["float32"] - expected).abs().max() < 1e-4 * logits.abs().max()
    x = {"token": tokens[:, :1], "position": torch.tensor([[TOKENS]]), "keys": keys, "values": values}

    def step(dtype: str) -> Tensor:
        made[dtype]._count = TOKENS  # the same position every time
        return made[dtype].step(0)

    with tempfile.TemporaryDirectory() as folder:
        path = exported(one, x, Path(folder) / "model.onnx")
        sides: dict[str, Callable[[], Any]] = {
            "engine": lambda: step("float32"),
            "engine, bfloat16": lambda: step("bfloat16"),
            "engine, int8": lambda: step("int8"),
            "ONNX Runtime": runs(path, x, threads),
            "ONNX Runtime, int8": runs(quantised(path), x, threads),
            "PyTorch": lambda: one(**x),
        }
    print(f"GPT {layers} × {DECODER['width']}, one token after {TOKENS}, {100 * density:g} %")
    times = in_turn(sides, seconds)
    show(times)
    lost = {dtype: float((found[dtype] - expected).norm() / expected.norm()) for dtype in ("bfloat16", "int8")}
    for dtype, loss in lost.items():
        print(f"  {dtype} changes the outputs by {100 * loss:.2f} %")
    return {"density": density, "tokens": TOKENS, "times": times, "losses": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["encoder", "decoder", "all"], default="all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of calls per side")
    parser.add_argument("--out", type=Path, help="a record to write or to update")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    import onnxruntime

    record: dict[str, Any] = {"benchmark": "latency_tokens"}
    if chosen.out is not None and chosen.out.exists():
        record = json.loads(chosen.out.read_text())
    parts = {"encoder": encoder, "decoder": decoder}
    for name, part in parts.items():
        if chosen.part in (name, "all"):
            about = machine("cpu")
            about["versions"]["onnxruntime"] = onnxruntime.__version__
            print(f"{about['hardware']}, {chosen.threads} threads, {about['versions']}")
            record[name] = {**about, "rows": part(chosen.threads, chosen.seconds)}
    save(chosen.out, record)


if __name__ == "__main__":
    main()
