"""What a call of each kind of layer multiplies: which of its weights, and how often."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence

from wirings.layers import _CONVOLUTIONS, _TRANSPOSED, is_turned, wired_by_default
from wirings.profile.graphs import Call

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)
FREE = (*_NORMS, nn.Embedding, nn.EmbeddingBag, nn.PReLU)
"""Layers whose parameters multiply nothing that is counted: norms, activations, tables."""


class Use(NamedTuple):
    """A weight of a layer, and how often a call multiplies by each of its entries."""

    holder: nn.Module
    attribute: str
    times: int
    rows: slice = slice(None)
    """Only these of its rows."""


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS)


def uses(module: nn.Module, call: Call) -> list[Use]:
    """The weights that a call multiplies by. Biases, norms and activations are not counted."""
    first, out = call.inputs[0] if call.inputs else (), call.outputs[0] if call.outputs else ()
    if isinstance(module, (nn.Linear, nn.Bilinear)) or is_turned(module):
        return [Use(module, "weight", math.prod(out[:-1]))]
    if isinstance(module, _CONVOLUTIONS):
        dims = len(module.kernel_size)
        batch = math.prod(out[: len(out) - dims - 1])
        maps = first if isinstance(module, _TRANSPOSED) else out  # a transposed one spreads every pixel that comes in
        return [Use(module, "weight", batch * math.prod(maps[len(maps) - dims :]))]
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return [Use(module, name, math.prod(first[:-1])) for name in wired_by_default(module)]
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, call)
    return []


def extra(module: nn.Module, call: Call) -> int:
    """Multiply-adds of a call that no weight is part of: of attention, queries by keys and weights by values."""
    if not isinstance(module, nn.MultiheadAttention):
        return 0
    batch, queries, keys = _lengths(module, call)
    return 2 * batch * queries * keys * module.embed_dim


def _lengths(module: nn.MultiheadAttention, call: Call) -> tuple[int, int, int]:
    """Batch, queries and keys of a call."""
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
    if isinstance(values, PackedSequence):  # one row for every step of every sequence
        return (tuple(values.data.shape),)
    if isinstance(values, Tensor):
        return (tuple(values.shape),)
    if isinstance(values, (list, tuple)):
        return tuple(shape for value in values for shape in shapes(value))
    if isinstance(values, dict):
        return shapes(list(values.values()))
    return ()
