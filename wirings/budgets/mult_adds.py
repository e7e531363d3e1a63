"""Which weights a call of each kind of layer multiplies by, and how often; and how a model is run to observe that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from wirings.utils.layers import (
    CONVOLUTIONS,
    TRANSPOSED_CONVOLUTIONS,
    expert_weights,
    is_transposed_linear,
    original_weight,
    wired_by_default,
)

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)
FREE = (*_NORMS, nn.Embedding, nn.EmbeddingBag, nn.PReLU)
"""Layers whose parameters take part in no counted multiplication: norms, activations, embeddings."""


class Call(NamedTuple):
    """One observed call of a module: the shapes of its tensors."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    evaluations: int = 1
    """The number of function evaluations, in a continuous graph."""
    loads: tuple[int, ...] = ()
    """The number of inputs that each expert gets, in a mixture of experts."""


class Use(NamedTuple):
    """A weight of a layer, and how many times a call multiplies by each of its entries."""

    holder: nn.Module
    attribute: str
    times: int
    rows: slice = slice(None)
    """The rows that are multiplied by."""


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS)


def uses(module: nn.Module, call: Call) -> list[Use]:
    """The weights that a call multiplies by. Biases, norms and activations are not counted."""
    first, out = call.inputs[0] if call.inputs else (), call.outputs[0] if call.outputs else ()
    if isinstance(module, (nn.Linear, nn.Bilinear)) or is_transposed_linear(module):
        return [Use(module, "weight", math.prod(out[:-1]))]
    if isinstance(module, CONVOLUTIONS):
        dims = len(module.kernel_size)
        batch = math.prod(out[: len(out) - dims - 1])
        maps = (
            first if isinstance(module, TRANSPOSED_CONVOLUTIONS) else out
        )  # a transposed convolution multiplies every input pixel
        return [Use(module, "weight", batch * math.prod(maps[len(maps) - dims :]))]
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return [Use(module, name, math.prod(first[:-1])) for name in wired_by_default(module)]
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, call)
    names = expert_weights(module)
    return [Use(module, name, times, slice(i, i + 1)) for name in names for i, times in enumerate(call.loads)]


def loads(module: nn.Module, arguments: Sequence[Any]) -> tuple[int, ...]:
    """The number of inputs that each expert of a module gets in a call; empty for other modules.

    They follow from the arguments: the experts that the router has chosen for every input (integers), or a list with
    the number of inputs of every expert. Without these, all experts get equal parts.
    """
    names = expert_weights(module)
    if not names:
        return ()
    experts = len(original_weight(module, names[0]))
    for given in arguments:
        if isinstance(given, Tensor) and given.dtype in (torch.int32, torch.int64) and given.dim():
            chosen = given.flatten()
            return tuple(torch.bincount(chosen[chosen < experts], minlength=experts).tolist())
        if isinstance(given, (list, tuple)) and len(given) == experts and all(isinstance(n, int) for n in given):
            return tuple(given)
    first = next((given for given in arguments if isinstance(given, Tensor)), None)
    return () if first is None else (math.prod(first.shape[:-1]) // experts,) * experts


def extra(module: nn.Module, call: Call) -> int:
    """Multiply-adds of a call that involve no weight: in attention, queries by keys and scores by values."""
    if not isinstance(module, nn.MultiheadAttention):
        return 0
    batch, queries, keys = _lengths(module, call)
    return 2 * batch * queries * keys * module.embed_dim


def _lengths(module: nn.MultiheadAttention, call: Call) -> tuple[int, int, int]:
    """The batch size and the numbers of queries and keys of a call."""
    query, key = call.inputs[0], call.inputs[1] if len(call.inputs) > 1 else call.inputs[0]
    if len(query) == 2:
        return 1, query[0], key[0]
    time = 1 if module.batch_first else 0
    return query[1 - time], query[time], key[time]


def _attention(module: nn.MultiheadAttention, call: Call) -> list[Use]:
    batch, queries, keys = _lengths(module, call)
    out = Use(module.out_proj, "weight", batch * queries)
    size = module.embed_dim
    if module._qkv_same_embed_dim:
        return [
            Use(module, "in_proj_weight", batch * queries, slice(0, size)),
            Use(module, "in_proj_weight", batch * keys, slice(size, None)),
            out,
        ]
    wide = (("q_proj_weight", queries), ("k_proj_weight", keys), ("v_proj_weight", keys))
    return [*(Use(module, name, batch * length) for name, length in wide), out]


def shapes(values: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors among a call's arguments or results, in order."""
    if isinstance(values, PackedSequence):  # one row for every time step of every sequence
        return (tuple(values.data.shape),)
    if isinstance(values, Tensor):
        return (tuple(values.shape),)
    if isinstance(values, (list, tuple)):
        return tuple(shape for value in values for shape in shapes(value))
    if isinstance(values, dict):
        return shapes(list(values.values()))
    return ()


class Products(TorchFunctionMode):
    """Counts the multiply-adds of calls of ``scaled_dot_product_attention`` while active, masked ones included.

    Calls within `torch.nn.MultiheadAttention`, which is counted as a layer, are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.mult_adds = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))  # the mode is off in here, and so within MultiheadAttention
        if func is F.scaled_dot_product_attention:
            self._count(out, *args, **(kwargs or {}))
        return out

    def _count(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> None:
        self.calls += 1
        self.mult_adds += math.prod(out.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Products]:
    """Prepare a model to be observed while it runs, count attention outside layers, and restore the model.

    The model is in evaluation mode, without gradients and without the fast path of transformers, which calls no layers.
    """
    training = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        with torch.no_grad(), Products() as products:
            yield products
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, was in training.items():
            module.training = was
