"""What a model returns besides a tensor: tuples, lists and dictionaries of tensors, and Hugging Face's `ModelOutput`.

A program returns a list of tensors. How the model packs them is described by values that JSON can represent, so that a
file can hold it: a number is the tensor of that number, None is None, and ``{"tuple": […]}``, ``{"list": […]}`` and
``{"dict": {…}}`` hold others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from wirings.compaction.operation import expect
from wirings.errors import WiringError

MAX_DEPTH = 16


class NamedOutputs(dict[str, Any]):
    """What a model returns in a dictionary or a `ModelOutput`; entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the outputs have no {name!r}, only {', '.join(self)}") from None

    def __getitem__(self, key: Any) -> Any:
        """An entry by name or, as in a `ModelOutput`, by number."""
        return list(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


def flatten_outputs(outputs: Any) -> tuple[list[Tensor], Any, list[str]]:
    """The tensors that a model returns, their structure, and the names of entries that are left out.

    Entries of a dictionary that are not tensors, such as a cache of keys and values, are left out.

    Raises:
        WiringError: if there is no tensor, or anything else than tensors in a tuple or list.
    """
    tensors: list[Tensor] = []
    left_out: list[str] = []

    def visit(x: Any, path: str, depth: int) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
            return len(tensors) - 1
        if x is None:
            return None
        if depth > MAX_DEPTH:
            raise _unsupported(outputs)
        if isinstance(x, Mapping) and all(isinstance(key, str) for key in x):
            made = {}
            for key, value in x.items():
                if isinstance(value, (Tensor, Mapping, tuple, list)) or value is None:
                    made[key] = visit(value, f"{path}{key}.", depth + 1)
                else:
                    left_out.append(f"{path}{key}")
            return {"dict": made}
        if isinstance(x, (tuple, list)):
            kind = "list" if isinstance(x, list) else "tuple"
            return {kind: [visit(item, f"{path}{i}.", depth + 1) for i, item in enumerate(x)]}
        raise _unsupported(outputs)

    structure = visit(outputs, "", 0)
    if not tensors:
        raise _unsupported(outputs)
    return tensors, structure, left_out


def _unsupported(outputs: Any) -> WiringError:
    what = type(outputs).__name__
    if isinstance(outputs, (tuple, list)):
        what += f" of ({', '.join(type(x).__name__ for x in outputs)})"
    return WiringError(
        "compaction expects a model that returns a tensor, or a tuple, list or dictionary of tensors, got "
        f"{what}. Wrap the model in a module that returns the tensors."
    )


def restore_outputs(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Tensors in the structure that `flatten_outputs` found."""
    if isinstance(structure, int):
        return tensors[structure]
    if structure is None:
        return None
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return NamedOutputs({key: restore_outputs(part, tensors) for key, part in parts.items()})
    made = [restore_outputs(part, tensors) for part in parts]
    return made if kind == "list" else tuple(made)


def default_structure(count: int) -> Any:
    """The structure of a program that has none: a tensor, or a tuple of tensors."""
    return 0 if count == 1 else {"tuple": list(range(count))}


def check_structure(structure: Any, count: int) -> None:
    """Raise unless a structure from a file uses every one of ``count`` tensors once."""
    found: list[int] = []

    def visit(x: Any, depth: int) -> None:
        expect(depth <= MAX_DEPTH, f"outputs nested at most {MAX_DEPTH} deep")
        if type(x) is int:
            found.append(x)
        elif x is not None:
            expect(isinstance(x, dict) and len(x) == 1, "a structure of the outputs")
            ((kind, parts),) = x.items()
            expect(kind in ("tuple", "list", "dict"), "a tuple, a list or a dictionary of outputs")
            expect(isinstance(parts, dict if kind == "dict" else list), "entries of the outputs")
            for part in parts.values() if kind == "dict" else parts:
                visit(part, depth + 1)

    visit(structure, 0)
    expect(sorted(found) == list(range(count)), "every output once")
