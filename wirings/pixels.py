"""What an edge costs: the multiply-adds that a weight of each layer takes part in when the model is called.

An edge of a convolution is multiplied once for every pixel of the map that it leads to, one of a linear layer once for
every row that comes in, one of a recurrent layer once for every step. `wirings.profile` counts the same way, and much
more; here it is only what a budget of multiply-adds needs before a model is wired.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from wirings.attention import Products
from wirings.errors import WiringError
from wirings.layers import _CONVOLUTIONS, _TRANSPOSED, Target, multiplies, wired_by_default
from wirings.rules.base import held


class _Use(NamedTuple):
    """Some rows of a weight of a layer, or all, and how often a call multiplies by each of their entries."""

    module: nn.Module
    attribute: str
    times: int
    rows: float = 1.0
    """The part of its rows."""


def costs(model: nn.Module, targets: Sequence[Target], example_input: Any) -> tuple[list[int], int]:
    """The multiply-adds of one edge of each target, and those of everything else in the model.

    The model is run once on ``example_input``, in evaluation, and left as it was.
    """
    times: dict[int, dict[int, float]] = {}  # for every weight, the parts of it that are multiplied so often
    numel: dict[int, int] = {}
    rest = 0
    for use, extra in _uses(model, _arguments(model, example_input)):
        rest += extra
        if use is not None:
            weight = _weight(use.module, use.attribute)
            parts = times.setdefault(id(weight), {})
            parts[use.times] = parts.get(use.times, 0.0) + use.rows
            numel[id(weight)] = weight.numel()
    wired = {id(target.weight) for target in targets}
    rest += sum(
        round(sum(often * part for often, part in parts.items()) * numel[key])
        for key, parts in times.items()
        if key not in wired
    )
    return [_cost(target, times.get(id(target.weight), {})) for target in targets], rest


def _cost(target: Target, parts: dict[int, float]) -> int:
    module = target.places[0][1]
    if getattr(module, "wired_weights", None):
        raise WiringError(
            f"{target.name} is a neural graph, whose edges carry maps of different sizes; give it a number of edges, "
            "k= or params=, or skip it."
        )
    if not parts:
        raise WiringError(
            f"{target.name} multiplies nothing that could be seen when the model was called with example_input, so its "
            f"edges have no cost; skip=[{target.name!r}], or give k= or params=."
        )
    whole = sum(often * round(part) for often, part in parts.items() if math.isclose(part, round(part)))
    if not all(math.isclose(part, round(part)) for part in parts.values()):
        raise WiringError(
            f"the rows of {target.name} are not all multiplied equally often (queries and keys of different lengths), "
            f"so its edges have no one cost; skip=[{target.name!r}], or give k= or params=."
        )
    return whole


def _weight(module: nn.Module, attribute: str) -> Tensor:
    holder = held(module).get(attribute)
    if holder is None:
        return getattr(module, attribute)
    original = getattr(holder, "original", None)
    return next(holder.parameters()) if original is None else original


def _arguments(model: nn.Module, example_input: Any) -> tuple[Any, ...]:
    """What to call the model with."""
    given = getattr(model, "input_shape", None) if example_input is None else example_input
    if given is None:
        raise WiringError(
            f"mult_adds= needs example_input=, what {type(model).__name__} is called with: a tensor, a tuple of "
            "arguments, or the shape of one example without the batch, such as (3, 32, 32)."
        )
    if isinstance(given, (tuple, list)) and given and all(type(n) is int and n > 0 for n in given):
        first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        return (torch.zeros(1, *given, device=first.device, dtype=first.dtype),)
    return given if type(given) is tuple else (given,)  # a packed sequence is a tuple, too


def _uses(model: nn.Module, arguments: tuple[Any, ...]) -> list[tuple[_Use | None, int]]:
    """Run the model once: every use of a weight by a layer, and multiply-adds that no weight is part of."""
    found: list[tuple[_Use | None, int]] = []
    products = Products()

    def hook(module: nn.Module, args: Any, keywords: Any, out: Any) -> None:
        inputs, outputs = _shapes((*args, *keywords.values())), _shapes(out)
        if isinstance(module, nn.MultiheadAttention):
            batch, queries, keys = _lengths(module, inputs)
            found.extend((use, 0) for use in _attention(module, batch, queries, keys))
            found.append((None, 2 * batch * queries * keys * module.embed_dim))
        else:
            found.extend((use, 0) for use in _layer(module, inputs, outputs))

    # The projection inside of attention is counted there.
    inside = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    watched = [m for m in model.modules() if multiplies(m) and id(m) not in inside]
    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in watched]
    try:
        with _evaluating(model), products:
            model(*arguments)
    except WiringError:
        raise
    except Exception as error:
        came = ", ".join(str(shape) for shape in _shapes(arguments)) or "no tensor"
        raise WiringError(
            f"{type(model).__name__} does not run on example_input, of shape {came}: {error} Give a tensor or a tuple "
            "of arguments as it is called with, or the shape of one example without the batch."
        ) from error
    finally:
        for one in hooks:
            one.remove()
    return [*found, (None, products.mult_adds)]


def _layer(module: nn.Module, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]) -> list[_Use]:
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        return [_Use(module, "weight", math.prod(outputs[0][:-1]))]
    if isinstance(module, _CONVOLUTIONS):
        dims = len(module.kernel_size)
        maps = inputs[0] if isinstance(module, _TRANSPOSED) else outputs[0]  # a transposed one spreads what comes in
        batch = math.prod(maps[: len(maps) - dims - 1])
        return [_Use(module, "weight", batch * math.prod(maps[len(maps) - dims :]))]
    return [_Use(module, name, math.prod(inputs[0][:-1])) for name in wired_by_default(module)]


def _lengths(module: nn.MultiheadAttention, inputs: list[tuple[int, ...]]) -> tuple[int, int, int]:
    """Batch, queries and keys of a call."""
    query, key = inputs[0], inputs[1] if len(inputs) > 1 else inputs[0]
    if len(query) == 2:
        return 1, query[0], key[0]
    time = 1 if module.batch_first else 0
    return query[1 - time], query[time], key[time]


def _attention(module: nn.MultiheadAttention, batch: int, queries: int, keys: int) -> list[_Use]:
    out = _Use(module.out_proj, "weight", batch * queries)
    if module._qkv_same_embed_dim:
        both = [
            _Use(module, "in_proj_weight", batch * queries, 1 / 3),
            _Use(module, "in_proj_weight", batch * keys, 2 / 3),
        ]
        return [*both, out]
    wide = (("q_proj_weight", queries), ("k_proj_weight", keys), ("v_proj_weight", keys))
    return [*(_Use(module, name, batch * length) for name, length in wide), out]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation, without gradients and without the fast path of transformers, which calls no layers."""
    training = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, was in training.items():
            module.training = was


def _shapes(values: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors among a call's arguments or results, in order."""
    if isinstance(values, PackedSequence):  # one row for every step of every sequence
        return [tuple(values.data.shape)]
    if isinstance(values, Tensor):
        return [tuple(values.shape)]
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return [shape for value in values for shape in _shapes(value)]
    return []
