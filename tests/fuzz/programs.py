"""Random programs in the engine: compiled, saved and loaded, they match PyTorch; damaged files are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.all_in_int8 import all_layers, loss
from tests.engine.in_tiles import in_tiles
from tests.engine.random_token_programs import random_program
from tests.fuzz.files import DAMAGES
from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError, engine
from wirings.compaction.program import Program
from wirings.engine.engine_model import EngineModel

CLOSE = 1e-5
"""The difference from PyTorch's outputs, as a share of the largest, that rounding explains."""
ROUNDED = 0.02
"""The difference in int8 from the same rounding in PyTorch: a number between two steps may be rounded either way."""
SMALLEST = 1e-2
"""Outputs count as at least so large: on the way, numbers of order 1 are added up, which leave errors of their own."""
EPSILON = 2**-23
"""How much rounding may change a number, as a share of it."""


def prepare(folder: Path) -> None:
    """Build the kernels before processes are forked."""
    assert engine.available(), "there is no C++ compiler"


def difference(found: Any, expected: tuple[Tensor, ...]) -> float:
    """The largest difference of any output, as a share of its largest number."""
    found = found if isinstance(found, tuple) else (found,)
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return float("inf")
        if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(x.isinf(), y.isinf()):
            return float("inf")
        finite = y.isfinite()
        if finite.any():
            scale = max(SMALLEST, float(y[finite].abs().max()))
            worst = max(worst, float((x - y)[finite].abs().max()) / scale)
    return worst


def inputs_of(program: Program, batch: int, seed: int) -> list[Tensor]:
    """Random numbers and tokens for each input."""
    generator, limits = torch.Generator().manual_seed(seed), program.index_limits()
    return [
        torch.randint(limits[name], (batch, *shape), generator=generator)
        if name in limits
        else torch.randn(batch, *shape, generator=generator)
        for name, shape in program.inputs.items()
    ]


def rounded(program: Program, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The outputs in double precision if all numbers that an operation reads are off by what rounding may do."""
    generator = torch.Generator().manual_seed(0)
    values = dict(zip(program.inputs, inputs, strict=True))
    for operation in program.operations:
        read = [values[name] for name in operation.inputs]
        off = [
            x * (1 + EPSILON * torch.randn(x.shape, generator=generator)) if x.is_floating_point() else x for x in read
        ]
        values[operation.output] = operation.run(*off)
    return tuple(values[name] for name in program.outputs)


def is_right(program: Program, inputs: list[Tensor], found: Any, expected: tuple[Tensor, ...]) -> bool:
    """Whether outputs are as close to the exact ones as PyTorch's are, or as rounding allows, but for a factor."""
    if difference(found, expected) < CLOSE:
        return True
    wide, exactly = [x.double() if x.is_floating_point() else x for x in inputs], program.to(dtype=torch.float64)
    exact = exactly.run(*wide)
    found = found if isinstance(found, tuple) else (found,)
    own = difference(tuple(x.double() for x in found), exact)
    theirs = difference(tuple(x.double() for x in expected), exact)
    return own < 10 * max(theirs, difference(rounded(exactly, wide), exact)) + CLOSE


def in_int8(draw: random.Random, program: Program, inputs: list[Tensor]) -> str:
    """Compile a program with all layers in int8, and compare its outputs with those of the same rounding in PyTorch."""
    quantization = all_layers(program, *inputs, static=draw.random() < 0.5)
    way, threads = draw.choice(("sparse", "dense")), draw.choice((1, 1, 1, 2, 3))
    found = EngineModel(program, way, threads, quantization=quantization)(*inputs)
    rounded, exact = quantization.reference(program).run(*inputs), program.run(*inputs)
    for x, y, z in zip(found if isinstance(found, tuple) else (found,), rounded, exact, strict=True):
        # Where two weights meet the same pixel, the engine rounds their sum, and the reference each of them.
        if loss(x, y) > ROUNDED and loss(x, z) > ROUNDED + 3 * loss(y, z):
            return f"{MISTAKE}: other outputs than the reference in int8, by {loss(x, y):.2g}"
    return "right, in int8"


def case(_: None, folder: Path, seed: int) -> str:
    """Compile a random program: a tenth in int8; a tenth is saved and loaded, and half of these files damaged."""
    draw = random.Random(seed)
    program = random_program(seed, draw.choice((8, 8, 20, 40)), draw.randint(1, 10))
    inputs = inputs_of(program, draw.choice((1, 1, 2, 3, 5)) if draw.random() > 0.02 else 0, seed)
    way = "auto" if draw.random() < 0.01 else draw.choice(("sparse", "dense"))
    if seed % 10 == 9 and len(inputs[0]):
        return in_int8(draw, program, inputs)
    made = engine.compile(program, engine=way, threads=draw.choice((1, 1, 1, 1, 1, 1, 1, 2, 3, 8)))
    if not made.compiled:
        return f"{MISTAKE}: the kernels are not used"
    if draw.random() < 0.3:
        in_tiles(made, draw.choice((300, 3000, 40_000)))
    found, expected = made(*inputs), program.run(*inputs)
    if not is_right(program, inputs, found, expected):
        return f"{MISTAKE}: other outputs than PyTorch's, by {difference(found, expected):.2g}"
    if not len(inputs[0]):
        return "right, of an empty batch"
    if draw.random() > 0.1:
        return "right"
    path = folder / f"program{seed}.safetensors"
    try:
        made.save(path)
        again = engine.load(path)
        if not is_right(program, inputs, again(*inputs), expected):
            return f"{MISTAKE}: other outputs after loading, by {difference(again(*inputs), expected):.2g}"
        if draw.random() < 0.5:
            return "right, also when loaded"
        raw = bytearray(path.read_bytes())
        before = bytes(raw)
        draw.choice(DAMAGES)(raw, draw)
        path.write_bytes(raw)
        try:
            again = engine.load(path)
        except WiringError as error:
            return "right, and refused when damaged" if str(path) in str(error) else f"{MISTAKE}: {error}"
        same = bytes(raw) == before or is_right(program, inputs, again(*inputs), expected)
        return "right, and read in spite of damage" if same else f"{MISTAKE}: other outputs of a damaged file"
    finally:
        path.unlink(missing_ok=True)


FUZZERS = {"programs": Fuzzer(prepare, case, chunk=5000, short=10_000)}
