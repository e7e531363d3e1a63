"""Recognize functions that models spell out in several operators: RMS norms, GELU by tanh, and attention.

Each is recognized at its last operator, by looking at the operators before it in the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from wirings.compaction.recognize_experts import experts

_NOTHING = ("_to_copy", "to", "clone", "alias", "detach", "contiguous", "dropout")
"""Operators that change no number, as far as a trace in one floating-point type is concerned."""

_VIEWS = ("view", "reshape", "_unsafe_view")

Recognized = tuple[str, dict[str, Any]]
"""The operator that a function is, and its arguments by name, as nodes of the trace or plain values."""


def recognize(node: fx.Node) -> Recognized | None:
    """The function whose last operator is this one; None if it is none of those that are known."""
    for found in (_rms_norm, _gelu, _attention, experts):
        if (result := found(node)) is not None:
            return result
    return None


def _operator(x: Any) -> str:
    """The name of a node's operator, without its overload."""
    name = getattr(getattr(x, "target", None), "name", None) if isinstance(x, fx.Node) else None
    return name().removeprefix("aten::").partition(".")[0] if callable(name) else ""


def _before(x: Any) -> Any:
    """A node without the operators after it that change nothing."""
    while _operator(x) in _NOTHING:
        kept = x.kwargs.get("dtype") or (x.args[1] if len(x.args) > 1 else None)
        value, source = x.meta.get("val"), x.args[0].meta.get("val")
        if kept is not None and getattr(value, "dtype", None) != getattr(source, "dtype", None):
            return x
        x = x.args[0]
    return x


def _is(x: Any, *names: str) -> bool:
    return _operator(x) in names


def _pairs(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """The two operands of a sum or product, in both orders."""
    if len(node.args) == 2 and not node.kwargs:
        one, two = (_before(x) for x in node.args)
        yield one, two
        yield two, one


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, (int, float)) else None


def _with_number(x: Any, names: tuple[str, ...]) -> tuple[Any, float] | None:
    """The other operand and the number, if a node is a sum or product with a number."""
    if _is(x, *names):
        for one, two in _pairs(x):
            if (number := _number(two)) is not None:
                return one, number
    return None


def _power(x: Any, exponent: int) -> Any:
    """What a node raises to a power; None if it does not."""
    if _is(x, "pow") and _number(x.args[1]) == exponent:
        return _before(x.args[0])
    if exponent == 2 and _is(x, "square"):
        return _before(x.args[0])
    if exponent == 2 and _is(x, "mul") and _before(x.args[0]) is _before(x.args[1]):
        return _before(x.args[0])
    return None


def _rms_norm(node: fx.Node) -> Recognized | None:
    """X · rsqrt(mean(x²) + epsilon), or x / sqrt(mean(x²) + epsilon)."""
    root = {"mul": "rsqrt", "div": "sqrt"}.get(_operator(node))
    if root is None:
        return None
    for x, divisor in list(_pairs(node))[: 1 if root == "sqrt" else 2]:
        if not _is(divisor, root):
            continue
        found = _with_number(_before(divisor.args[0]), ("add",))
        if found is None or not _is(found[0], "mean"):
            continue
        mean, epsilon = found
        dims, keeps = mean.args[1] if len(mean.args) > 1 else None, len(mean.args) > 2 and mean.args[2]
        value = x.meta.get("val") if isinstance(x, fx.Node) else None
        if not isinstance(value, Tensor) or not keeps or list(dims or ()) not in ([-1], [value.dim() - 1]):
            continue
        if _power(_before(mean.args[0]), 2) is x:
            return "rms_norm", {"input": x, "normalized_shape": [value.shape[-1]], "eps": epsilon}
    return None


def _gelu(node: fx.Node) -> Recognized | None:
    """X / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³)))."""
    if not _is(node, "mul"):
        return None
    for half, gate in _pairs(node):
        scaled, shifted = _with_number(half, ("mul",)), _with_number(gate, ("add",))
        if scaled is None or shifted is None or (scaled[1], shifted[1]) != (0.5, 1.0):
            continue
        x, tanh = scaled[0], shifted[0]
        inner = _with_number(_before(tanh.args[0]), ("mul",)) if _is(tanh, "tanh") else None
        if (
            inner is None
            or not math.isclose(inner[1], math.sqrt(2 / math.pi), rel_tol=1e-6)
            or not _is(inner[0], "add")
        ):
            continue
        for one, two in _pairs(inner[0]):
            cube = _with_number(two, ("mul",))
            if one is x and cube is not None and cube[1] == 0.044715 and _power(cube[0], 3) is x:
                return "gelu", {"self": x, "approximate": "tanh"}
    return None


def _attention(node: fx.Node) -> Recognized | None:
    """softmax(scale · q · kᵀ + mask) · v for (batch, heads, tokens, size) or (batch, tokens, size).

    Or v · softmax(…)ᵀ for values (…, size, tokens). Keys may be (…, size, tokens) from the start.
    """
    if not _is(node, "matmul") or len(node.args) != 2:
        return None
    shares, values = _before(node.args[0]), node.args[1]
    turned = _turned(_before(node.args[1]))
    if turned is not None and not _is(shares, "softmax", "_softmax"):
        shares, values = _before(turned), node.args[0]
    else:
        turned = None
    dims = getattr(shares.meta.get("val"), "dim", int)() if isinstance(shares, fx.Node) else 0
    if not _is(shares, "softmax", "_softmax") or dims not in (3, 4) or shares.args[1] not in (-1, dims - 1):
        return None
    scores, mask, scale = _before(shares.args[0]), None, 1.0
    scores, windows = _without_window_mask(scores)
    if _is(scores, "add") and not scores.kwargs:
        for one, two in _pairs(scores):
            if _product_of(one) is not None:
                scores, mask = one, two
                break
    found = _product_of(scores)
    added = mask.meta.get("val") if isinstance(mask, fx.Node) else mask
    if found is None or not (added is None or (isinstance(added, Tensor) and added.is_floating_point())):
        return None  # True is added as a 1; attention would take it for a mask
    queries, keys, scale, keys_turned = found
    arguments = {"query": queries, "key": keys, "value": values, "attn_mask": mask, "scale": scale}
    arguments |= {"keys_turned": keys_turned, "values_turned": turned is not None}
    if windows is not None:
        arguments["window_mask"] = windows
    return "scaled_dot_product_attention", arguments


def _turned(x: Any) -> Any:
    """What a node transposes the last two dimensions of; None if it does not."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    if not _is(x, "transpose") or not isinstance(value, Tensor) or value.dim() < 2:
        return None
    return x.args[0] if {d % value.dim() for d in x.args[1:3]} == {value.dim() - 2, value.dim() - 1} else None


def _without_window_mask(scores: Any) -> tuple[Any, Any]:
    """Scores (batch · windows, …) without a mask of windows, added to them as (batch, windows, …), and that mask."""
    if not _is(scores, *_VIEWS) or not _is(added := _before(scores.args[0]), "add"):
        return scores, None
    for one, two in _pairs(added):
        if not _is(one, *_VIEWS) or getattr(one.meta.get("val"), "dim", int)() != 5:
            continue
        inside, mask = _before(one.args[0]), two.meta.get("val") if isinstance(two, fx.Node) else None
        same = isinstance(inside, fx.Node) and str(inside.meta["val"].shape) == str(scores.meta["val"].shape)
        if same and isinstance(mask, Tensor) and mask.is_floating_point():
            return inside, two
    return scores, None


def _product_of(x: Any) -> tuple[Any, Any, float, bool] | None:
    """The queries, keys and scale of a product of queries and keys, and whether keys are (…, size, tokens)."""
    scale, x = _scaled(x)
    if not _is(x, "matmul"):
        return None
    before, queries = _scaled(_before(x.args[0]))
    after, right = _scaled(_before(x.args[1]))
    keys = _turned(right)
    if keys is None:
        return queries, right, scale * before * after, True
    inner, keys = _scaled(_before(keys))
    return queries, keys, scale * before * after * inner, False


def _scaled(x: Any) -> tuple[float, Any]:
    """The number that a node multiplies by, and the rest."""
    if (product := _with_number(x, ("mul",))) is not None:
        return product[1], product[0]
    if _is(x, "div") and not x.kwargs and (number := _number(x.args[1])):
        return 1 / number, _before(x.args[0])
    return 1.0, x
