"""Operations on tokens: norms over channels, attention, embeddings, and other orders of dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wirings.compaction.operations import Arrange, Attention, ChannelNorm, Embedding, MultiplyMap, Reshape
from wirings.compaction.report import operation_counts
from wirings.engine.fused_steps import LoweredStep
from wirings.engine.kernel_step import StepKind
from wirings.engine.lowering import Lowering, as_array, height_and_width
from wirings.engine.memory_layout import FeatureMaps
from wirings.engine.operations.registry import Shape, is_maps, kernel_for
from wirings.engine.token_steps import AttentionStep, EmbeddingStep, GatherStep, NormStep

MAX_GATHERED = 2**24
"""The most numbers that are copied one by one, each of which has an offset of 4 bytes."""


@kernel_for(ChannelNorm, lambda o, shapes: len(shapes[0]) in (1, 2, 3))
def lower_norm(lowering: Lowering, o: ChannelNorm) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    out = lowering.new_like(o.output)
    own = NormStep(source, out, as_array(o.scale), as_array(o.shift), o.features, o.centered, o.epsilon)
    lowering.emit(LoweredStep(o.output, StepKind.NORM, out, own=own))
    return out


def _supports_attention(o: Attention, shapes: Sequence[Shape]) -> bool:
    return all(len(shape) in (2, 3) for shape in shapes[:3])


@kernel_for(Attention, _supports_attention)
def lower_attention(lowering: Lowering, o: Attention) -> FeatureMaps:
    queries, keys, values = (lowering.solid(lowering.ready(name)) for name in o.inputs[:3])
    lowering.memory.join(keys, values)
    out = lowering.new_like(o.output)
    heads, given = [], 0
    for query, key, value in o.heads():
        size, value_size = key.stop - key.start, value.stop - value.start
        heads.append((query.start, key.start, value.start, given, size, value_size))
        given += value_size
    own = AttentionStep(queries, keys, values, out, np.array(heads), o.scale, o.causal)
    own.mask = None if o.mask is None else as_array(o.mask)
    own.window_mask = None if o.window_mask is None else as_array(o.window_mask)
    if len(o.inputs) > 3:
        own.bias, own.bias_shape = list(lowering.program.inputs).index(o.inputs[3]), lowering.shapes[o.inputs[3]][:2]
    work = operation_counts(o, lowering.shapes).mult_adds
    lowering.emit(LoweredStep(o.output, StepKind.ATTENTION, out, own=own, work=work))
    return out


@kernel_for(Embedding, lambda o, shapes: len(shapes[0]) == 1)
def lower_embedding(lowering: Lowering, o: Embedding) -> FeatureMaps:
    out = lowering.new_like(o.output)
    number, tokens = list(lowering.program.inputs).index(o.inputs[0]), lowering.shapes[o.inputs[0]][0]
    own = EmbeddingStep(out, as_array(o.weight), number, tokens)
    lowering.emit(LoweredStep(o.output, StepKind.EMBEDDING, out, own=own))
    return out


def _supports_arrange(o: Arrange, shapes: Sequence[Shape]) -> bool:
    plain = o.shape[:1] == (-1,) and o.order[:1] == (0,) and len(o.shape) in (2, 3, 4)
    within = math.prod(o.shape[1:]) == math.prod(shapes[0]) <= MAX_GATHERED  # nothing becomes part of the batch
    return plain and within and len(shapes[0]) in (1, 2, 3)


@kernel_for(Arrange, _supports_arrange)
def lower_arrange(lowering: Lowering, o: Arrange) -> FeatureMaps | GatherStep:
    sizes = [size for own in o.factors for size in own]
    index = np.arange(math.prod(sizes)).reshape(sizes).transpose([n - 1 for n in o.order[1:]]).reshape(o.shape[1:])
    return gather(lowering, o.output, o.inputs[0], index)


@kernel_for(Reshape, lambda o, shapes: len(shapes[0]) in (1, 2, 3) and len(o.shape) < 3)
def lower_reshape(lowering: Lowering, o: Reshape) -> FeatureMaps | GatherStep:
    shape = lowering.shapes[o.inputs[0]]
    if math.prod(shape[1:]) == 1 and math.prod(o.shape) == 1:
        return lowering.ready(o.inputs[0])  # a map of one pixel is one number
    return gather(lowering, o.output, o.inputs[0], np.arange(math.prod(shape)).reshape(shape[0], *o.shape))


def gather(lowering: Lowering, name: str, source_name: str, index: np.ndarray) -> FeatureMaps | GatherStep:
    """Copies to another order. What is an output of the network and nothing else is copied to the caller at once."""
    outside = source_name in lowering.program.inputs and source_name not in lowering.values
    source: FeatureMaps | int
    if outside and lowering.users[source_name] == 1:
        source = list(lowering.program.inputs).index(source_name)
    else:
        source = lowering.solid(lowering.ready(source_name))
    index = index.reshape(-1, index.shape[-1])
    if name in lowering.program.outputs and lowering.users[name] == 1:
        return GatherStep(index, source, lowering.program.outputs.index(name))
    out = lowering.new_like(name)
    if len(lowering.shapes[name]) == 1:  # single numbers
        index = index.reshape(-1, 1)
    lowering.emit(LoweredStep(name, StepKind.GATHER, out, own=GatherStep(index, source, out)))
    return out


@kernel_for(MultiplyMap, lambda o, shapes: is_maps(*shapes) and tuple(o.map.shape) == tuple(shapes[0]))
def lower_multiply_map(lowering: Lowering, o: MultiplyMap) -> FeatureMaps:
    source = lowering.solid(lowering.ready(o.inputs[0]))
    second = lowering.memory.constant(as_array(o.map).reshape(lowering.shape(o.output)))
    lowering.memory.join(source, second)
    out = lowering.new_like(o.output)
    fields = {"second": second, "flag": 0, **height_and_width(source)}
    lowering.emit(LoweredStep(o.output, StepKind.MULTIPLY, out, source, fields=fields))
    return out
