"""Recognize experts in a trace: products of groups of tokens, which are sorted by the expert that a router chose.

This is how the `transformers` library computes them ("grouped_mm"), for every model of it with experts:

    shares, experts = softmax(scores).topk(k); shares /= shares.sum(-1)
    sorted, order = experts.flatten().sort()
    ends = histc(sorted).cumsum()
    inside = grouped_mm(x[order // k], into, ends)
    results = grouped_mm(act(inside), weight, ends) * shares.flatten()[order]
    results[inverse of order].view(tokens, k, features).sum(1)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, fx

_NOTHING = ("_to_copy", "to", "clone", "alias", "detach", "contiguous")
_VIEWS = ("view", "reshape", "_unsafe_view", "flatten")
_PRODUCTS = ("_grouped_mm", "grouped_mm", "transformers::grouped_mm_fallback")
_FUNCTIONS = {"silu": "silu", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "mish": "mish"}


class _Inside(NamedTuple):
    """What is between the two products of an expert."""

    product: fx.Node
    """The first of them."""
    activation: str
    gated: bool


def experts(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    """The arguments of experts, if a node is the sum of their results; see `Experts`."""
    dims: Any = node.args[1] if _is(node, "sum") and len(node.args) == 2 and not node.kwargs else ()
    if list(dims) != [1]:
        return None
    split = _before(node.args[0])
    value = _value(split)
    if not _is(split, *_VIEWS) or value is None or value.dim() != 3 or not isinstance(value.shape[1], int):
        return None
    results, inverse = _indexed(_before(split.args[0]))
    order = _inverse_of(inverse)
    if order is None or not _is(results, "mul"):
        return None
    for product, factor in (results.args, results.args[::-1]):
        found = _products(_before(product), _before(factor), order, value.shape[1])
        if found is not None:
            return "experts", found
    return None


def _products(product: Any, factor: Any, order: fx.Node, count: int) -> dict[str, Any] | None:
    """The arguments of experts from the products of their last layers, and what these are multiplied by."""
    if not _is(product, *_PRODUCTS) or not _is(factor, "unsqueeze") or factor.args[1] not in (-1, 1):
        return None
    inside = _inside(_before(product.args[0]))
    shares, by = _indexed(_before(factor.args[0]))
    chosen = _sorted_from(order)
    if inside is None or by is not order or chosen is None or not _is(shares, *_VIEWS) or not _plain(product):
        return None
    router = _router(_before(shares.args[0]), chosen)
    if router is None or router["count"] != count or not _plain(inside.product):
        return None
    tokens, divided = _indexed(_before(inside.product.args[0]))
    right = _is(divided, "floor_divide") and divided.args[0] is order and divided.args[1] == count
    ends = _before(product.args[2])
    if not right or ends is not _before(inside.product.args[2]) or not _counts(ends, order, _size(product.args[1])):
        return None
    weights = {"into": inside.product.args[1], "weight": product.args[1]}
    return {"x": tokens, **weights, **router, "activation": inside.activation, "gated": inside.gated}


def _inside(x: Any) -> _Inside | None:
    if _is(x, "mul"):
        for one, two in (x.args, x.args[::-1]):
            name, unit = _activated(_before(one))
            first, second = _part(unit, 0), _part(_before(two), 1)
            if name and first is not None and first is second and _is(first, *_PRODUCTS):
                return _Inside(first, name, True)
    name, unit = _activated(x)
    return _Inside(unit, name, False) if name and _is(unit, *_PRODUCTS) else None


def _activated(x: Any) -> tuple[str, Any]:
    """The name of an activation and what it is applied to; "" if a node is none."""
    if not isinstance(x, fx.Node):
        return "", None
    name = _FUNCTIONS.get(_operator(x), "")
    if _is(x, "gelu"):
        name = "gelu_tanh" if "tanh" in (*x.args[1:], *x.kwargs.values()) else "gelu"
    return name, _before(x.args[0]) if name else None


def _part(x: Any, number: int) -> fx.Node | None:
    """What a node is the first or second half of, in the last dimension."""
    if not _is_item(x, number):
        return None
    halves, value = x.args[0], _value(x)
    source = halves.args[0]
    size, dim = halves.args[1], halves.args[2] if len(halves.args) > 2 else halves.kwargs.get("dim", 0)
    if not _is(halves, "split", "chunk", "split_with_sizes") or value is None or dim not in (-1, value.dim() - 1):
        return None
    whole = source.meta["val"].shape[-1]
    even = {"split": size == whole // 2, "chunk": size == 2}.get(_operator(halves), size == [whole // 2] * 2)
    return _before(source) if even and whole % 2 == 0 else None


def _router(shares: Any, chosen: Any) -> dict[str, Any] | None:
    """The scores that experts are chosen by, and how, from the shares and the numbers of those that are chosen."""
    normalized = _is(shares, "div") and _is(_before(shares.args[1]), "sum")
    if normalized:
        total = _before(shares.args[1])
        shares = _before(shares.args[0])
        right = len(total.args) == 3 and list(total.args[1]) in ([-1], [1]) and total.args[2]
        if not right or _before(total.args[0]) is not shares:
            return None
    softmax_after = _is(shares, "softmax", "_softmax") and shares.args[1] in (-1, 1)
    if softmax_after:
        shares = _before(shares.args[0])
    if not _is_item(shares, 0) or not _is_item(chosen, 1) or shares.args[0] is not chosen.args[0]:
        return None
    top = shares.args[0]
    if (
        not _is(top, "topk")
        or top.kwargs
        or (len(top.args) > 2 and top.args[2] not in (-1, 1))
        or False in top.args[3:4]
    ):
        return None
    scores = _before(top.args[0])
    value = _value(scores)
    if value is None or value.dim() != 2 or not isinstance(top.args[1], int):
        return None
    softmax = _is(scores, "softmax", "_softmax") and scores.args[1] in (-1, 1)
    if softmax and softmax_after:
        return None
    # The softmax of those that are chosen is the softmax of all, divided by the sum of those.
    return {
        "scores": _before(scores.args[0]) if softmax else scores,
        "count": top.args[1],
        "softmax": softmax or softmax_after,
        "normalized": normalized or softmax_after,
    }


def _counts(ends: Any, order: fx.Node, experts: int | None) -> bool:
    """Whether these are the ends of the groups of tokens of each expert, in sorted order."""
    if not _is(ends, "cumsum") or ends.args[1] != 0 or not _is(counts := _before(ends.args[0]), "histc"):
        return False
    numbers = counts.args[0]
    while _is(numbers, "_to_copy", "to"):  # histc takes floating-point numbers
        numbers = numbers.args[0]
    sorted_too = _is_item(numbers, 0) and numbers.args[0] is order.args[0]
    return sorted_too and list(counts.args[1:]) == [experts, 0, (experts or 0) - 1]


def _sorted_from(order: fx.Node) -> Any:
    """The numbers that an order sorts, of which it is the indices."""
    if not _is_item(order, 1) or not _is(order.args[0], "sort"):
        return None
    flat: Any = order.args[0]
    ascending = all(x in (-1, 0, False) for x in flat.args[1:]) and not flat.kwargs.get("descending")
    return _before(flat.args[0].args[0]) if ascending and _is(flat.args[0], *_VIEWS) else None


def _inverse_of(x: Any) -> fx.Node | None:
    """The order that x is the inverse of: numbers from 0 on, written to the places that the order says."""
    if not _is(x, "index_put") or len(x.args) != 3 or x.kwargs:
        return None
    (order,), numbers = x.args[1], x.args[2]
    from_zero = _is(numbers, "arange") and len(numbers.args) == 1
    value, size = _value(numbers), _value(order)
    same = value is not None and size is not None and str(value.shape) == str(size.shape)
    return order if from_zero and same and isinstance(order, fx.Node) else None


def _indexed(x: Any) -> tuple[Any, Any]:
    """A tensor and the indices of the rows that are taken of it."""
    if _is(x, "index") and len(x.args[1]) == 1:
        return _before(x.args[0]), _before(x.args[1][0])
    return None, None


def _plain(product: fx.Node) -> bool:
    return len(product.args) == 3 and not product.kwargs


def _size(x: Any) -> int | None:
    value = _value(x)
    return None if value is None else int(value.shape[0])


def _value(x: Any) -> Tensor | None:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _is_item(x: Any, number: int) -> bool:
    """Whether a node is one of several results of another."""
    return isinstance(x, fx.Node) and getattr(x.target, "__name__", "") == "getitem" and bool(x.args[1] == number)


def _operator(x: Any) -> str:
    name = getattr(getattr(x, "target", None), "name", None) if isinstance(x, fx.Node) else None
    return name().removeprefix("aten::").partition(".")[0] if callable(name) else ""


def _is(x: Any, *names: str) -> bool:
    return _operator(x) in names


def _before(x: Any) -> Any:
    """A node without the operators after it that change nothing, in a trace in one floating-point type."""
    while _is(x, *_NOTHING):
        value, source = _value(x), _value(x.args[0])
        if value is None or source is None or value.dtype != source.dtype:
            return x
        x = x.args[0]
    return x
