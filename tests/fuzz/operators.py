"""Compact models with one of the allowed operators, whose arguments are drawn from its schema: most are almost right.

Where an operator expects one of PyTorch's constants, such as a dtype, it is given integers and other constants as well.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.files import bytes_with
from tests.fuzz.runner import MISTAKE, Fuzzer
from wirings import WiringError, load_compact
from wirings.compaction.allowed_operators import ALLOWED_OPERATORS
from wirings.compaction.operations.torch_operator import find_operator
from wirings.utils.memory import is_out_of_memory
from wirings.utils.tensor_files import NO_MEMORY

SHAPES = ([4], [1, 4], [2, 3], [2, 4, 3], [1, 4, 6, 6], [1, 2, 3, 4, 5], [0], [2, 0], [1, 0, 4, 4], [])
USUAL, EXTREME = (0, 1, 2, 3, 4, -1, -2), (7, 65_536, -65_536, 2**31, 2**63 - 1, -(2**63), 10**9)
NUMBERS = (0.0, 1.0, -1.0, 0.5, 1e-4, 1e4, 1e308, 1e-320, {"float": "nan"}, {"float": "inf"}, {"float": "-inf"})
WORDS = (
    "none",
    "floor",
    "trunc",
    "sum",
    "mean",
    "constant",
    "reflect",
    "same",
    "tanh",
    "ij",
    "ab,bc->ac",
    "ii->i",
    "x",
)
CONSTANTS = {
    "ScalarType": ("torch.float32", "torch.float64", "torch.int64", "torch.bool", "torch.complex64", "torch.quint8"),
    "Layout": ("torch.strided", "torch.sparse_coo"),
    "MemoryFormat": ("torch.contiguous_format", "torch.preserve_format", "torch.channels_last"),
}

_TARGETS = sorted(ALLOWED_OPERATORS)


def _takes_constants(target: str) -> bool:
    return any(kind in str(a.real_type) for a in find_operator(target)._schema.arguments for kind in CONSTANTS)


_WITH_CONSTANTS = [target for target in _TARGETS if _takes_constants(target)]


class Arguments:
    """Draws the arguments of an operator, and the weights that they refer to."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.weights: list[Tensor] = []

    def of(self, kind: str) -> Any:
        """An argument of a type of the schema."""
        draw = self.draw
        if kind.startswith("Optional["):
            return None if draw.random() < 0.3 else self.of(kind[9:-1])
        if kind.startswith("List["):
            return [self.of(kind[5:-1]) for _ in range(draw.choice((0, 1, 1, 2, 2, 2, 3, 4)))]
        if kind in CONSTANTS:
            some = {"torch": draw.choice(draw.choice(tuple(CONSTANTS.values())))}
            return draw.choice(({"torch": draw.choice(CONSTANTS[kind])}, some, self._integer()))
        match kind:
            case "Tensor":
                return self._tensor()
            case "int":
                return self._integer()
            case "float" | "number":
                return draw.choice(NUMBERS) if draw.random() < 0.5 else self._integer()
            case "bool":
                return draw.random() < 0.5
            case "str":
                return draw.choice(WORDS)
            case "Device":
                return draw.choice(({"device": "cpu"}, {"device": "cuda"}, -1, 1000))
        raise AssertionError(f"no arguments of type {kind}")

    def _integer(self) -> int:
        return self.draw.choice(USUAL if self.draw.random() < 0.85 else EXTREME)

    def _tensor(self) -> dict[str, int]:
        draw = self.draw
        if draw.random() < 0.2:
            return {"InputRef": 0}
        shape = draw.choice(SHAPES)
        match draw.randrange(5):
            case 0 | 1:
                made = torch.randn(shape)
            case 2:
                made = torch.randint(-3, 9, shape)
            case 3:
                made = torch.full(shape, draw.choice((-(2**63), 2**63 - 1, -1, 0, 10**9)))
            case _:
                kinds = (torch.bool, torch.int8, torch.int32, torch.float64, torch.float16, torch.bfloat16)
                made = torch.randint(-3, 9, shape).to(draw.choice(kinds))
        self.weights.append(made)
        return {"WeightRef": len(self.weights) - 1}


def program(draw: random.Random) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """An operator, its weights, and a program that consists of it."""
    target = draw.choice(_WITH_CONSTANTS if draw.random() < 0.2 else _TARGETS)
    schema, made = find_operator(target)._schema, Arguments(draw)
    positional: list[Any] = []
    options: list[list[Any]] = []
    for argument in schema.arguments:
        if argument.has_default_value() and draw.random() < 0.3:
            if not argument.kwarg_only:
                break
            continue
        value = made.of(str(argument.real_type))
        if argument.kwarg_only:
            options.append([argument.name, value])
        else:
            positional.append(value)
    first = {"operation": "TorchOperator", "output": "y", "inputs": ["x"], "target": target}
    operations: list[dict[str, Any]] = [{**first, "arguments": positional, "options": options, "channelwise": False}]
    if len(schema.returns) > 1 or str(schema.returns[0].type).startswith("List"):
        take = {"operation": "TorchOperator", "output": "z", "inputs": ["y"], "target": "getitem"}
        operations.append({**take, "arguments": [{"InputRef": 0}, 0], "options": [], "channelwise": False})
    weights = {f"y.held{i}": weight for i, weight in enumerate(made.weights)}
    shape = draw.choice([one for one in SHAPES if one])
    about = {
        "inputs": {"x": shape},
        "operations": operations,
        "outputs": [operations[-1]["output"]],
        "encoded": {},
        "bytes": sum(weight.nbytes for weight in weights.values()),
        "notes": {},
    }
    return target, weights, about


def case(_: None, folder: Path, seed: int) -> str:
    """Load a model with one operator, and run it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    target, weights, about = program(draw)
    path = folder / f"operator{seed}.safetensors"
    path.write_bytes(bytes_with(weights, about))
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = load_compact(path, max_bytes=2**30)  # less than a case may take
            model(torch.randn(draw.choice((1, 2)), *about["inputs"]["x"]))
    except WiringError as error:
        return f"{MISTAKE}: {target}: {str(error)[:200]}" if NO_MEMORY in str(error) else "refused"
    except RuntimeError as error:  # what it computes may be impossible, as long as it raises
        return f"{MISTAKE}: {target} loads, then {error!r}" if is_out_of_memory(error) else "raised when run"
    except (ValueError, IndexError, TypeError, NotImplementedError, ZeroDivisionError):
        return "raised when run"
    finally:
        path.unlink()
    return "ran"


FUZZERS = {"operators": Fuzzer(lambda folder: None, case, chunk=500, short=300)}
