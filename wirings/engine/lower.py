"""From a program to the steps that the compiled kernels know, with what can be one step made one.

Sums over edges stay open while operations follow that they can take in: a norm, an addition, an activation, another
convolution's sums. A depthwise 3 × 3 convolution after them closes a step of nodes. Channels that are chosen, put in
place or put together cost nothing: they only change where the next step reads.

The file is long since it has a few lines for every operation.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from wirings.compaction import operations as ops
from wirings.compaction.program import Program
from wirings.engine.bands import cut
from wirings.engine.layout import EMPTY, Maps, Memory
from wirings.engine.parts import INFINITY, Caller, Dense, Lowered, Nodes, Pending, Sum, Term
from wirings.engine.steps import FUNCTIONS, MAPS, MEANS, PHASES, POOLS, Kind

FEW_KINDS = 33
"""Constant maps with no more kinds of pixels are put together from as many maps."""


class Lowering:
    """Walks a program whose operations are all `supported`, and collects steps."""

    def __init__(self, program: Program, shapes: dict[str, tuple[int, ...]], bands: int) -> None:
        self.program, self.shapes, self.bands = program, shapes, bands
        self.memory, self.steps = Memory(), list[Lowered]()
        self.values: dict[str, Maps | Pending] = {}
        self.users = {name: len(users) for name, users in program.users().items()}
        for name in program.outputs:
            self.users[name] += 1
        self.phases: dict[tuple[str, int, int], Lowered] = {}
        for operation in program.operations:
            self._take(operation)
        for number, name in enumerate(program.outputs):
            maps = self._solid(self._ready(name))
            self._emit(Lowered(name, Kind.GIVE, None, maps, numbers={"source": number, **_size(maps)}))
        for number, step in enumerate(self.steps):
            self.memory.used(number, *step.reads(), *([step.out] if step.out is not None else []))
        if bands > 1:
            cut(self.memory, self.steps, bands)
        if not any(buffer.kept for buffer in self.memory.buffers):
            self.bands = 1
        self.floats = self.memory.plan()

    # ---- values -----------------------------------------------------------------------------------------------------

    def _shape(self, name: str) -> tuple[int, int, int]:
        """Channels, height and width; single numbers are maps of one pixel."""
        shape = self.shapes[name]
        return (shape[0], 1, 1) if len(shape) == 1 else (shape[0], shape[1], shape[2])

    def _ready(self, name: str) -> Maps:
        """A tensor that a step has written."""
        if name not in self.values:
            self.values[name] = self._input(name)
        value = self.values[name]
        if not isinstance(value, Maps):
            value = self.values[name] = self._close(value)
        return value

    def _open(self, name: str) -> Pending | None:
        """What makes a tensor, if it may take in the one operation that uses it."""
        value = self.values.get(name)
        alone = self.users[name] == 1 and value is not None and not isinstance(value, Maps)
        return value if alone and value.open else None  # type: ignore[union-attr, return-value]

    def _emit(self, step: Lowered) -> Lowered:
        self.steps.append(step)
        return step

    def _close(self, pending: Pending) -> Maps:
        """Make a step of what is open."""
        if isinstance(pending, Dense):
            out = self.memory.new(len(pending.bias), 1, 1, packed=True)
            work = int(np.count_nonzero(pending.weight))
            self._emit(Lowered(pending.name, Kind.LINEAR, out, pending=pending, work=work))
            return out
        if isinstance(pending, Nodes):
            sums = pending.sums
            self.memory.join(*sums.sources())
            out = self.memory.new(len(pending.bias), pending.height, pending.width)
            work = sums.edges * sums.height * sums.width + 9 * len(pending.bias) * pending.height * pending.width
            self._emit(Lowered(pending.name, Kind.NODES, out, pending=pending, work=work))
            return out
        out = self.memory.new(len(pending.bias), pending.height, pending.width)
        self.memory.join(*pending.sources(), out)
        self._close_sums(pending, out, {"flag": MAPS})
        return out

    def _close_sums(self, sums: Sum, out: Maps, numbers: dict[str, int]) -> Lowered:
        """A step of sums; ``numbers`` say what becomes of them."""
        self.memory.join(*sums.sources())
        work = sums.edges * sums.height * sums.width
        numbers = {"stride_y": 1, "stride_x": 1, **numbers}
        return self._emit(Lowered(sums.name, Kind.SUMS, out, pending=sums, work=work, numbers=numbers))

    def _input(self, name: str) -> Maps:
        """A tensor of the caller's, copied."""
        packed = len(self.shapes[name]) == 1
        maps = self.memory.new(*self._shape(name), packed=packed)
        out = Maps(1, len(maps), maps.buffers[:1], maps.channels[:1]) if packed else maps
        numbers = {"source": list(self.program.inputs).index(name), "stride_y": 1, "stride_x": 1, **_size(out)}
        self._emit(Lowered(f"{name} in", Kind.COPY, out, numbers=numbers))
        return maps

    def _phased(self, name: str, stride: tuple[int, int]) -> Maps:
        """A tensor as maps of the pixels with the same remainders by the stride, (channels · stride · stride)."""
        if (name, *stride) in self.phases:
            return _out(self.phases[(name, *stride)])
        channels, height, width = self._shape(name)
        sy, sx = stride
        out = self.memory.new(channels * sy * sx, -(-height // sy), -(-width // sx))
        self.memory.buffers[out.buffers[0]].own = True  # a phase may be smaller than the others
        made = self.values.get(name)
        if isinstance(made, Sum) and self._all_take(name, stride):
            self.phases[(name, *stride)] = self._close_sums(made, out, {"flag": PHASES, "stride_y": sy, "stride_x": sx})
            return out
        outside = name in self.program.inputs and name not in self.values
        source = None if outside else self._solid(self._ready(name))
        number = list(self.program.inputs).index(name) if outside else -1
        numbers = {"source": number, "stride_y": sy, "stride_x": sx, "height": height, "width": width}
        copy = self._emit(Lowered(f"{name} by {sy} × {sx}", Kind.COPY, out, source, numbers=numbers))
        self.phases[(name, *stride)] = copy
        return out

    def _all_take(self, name: str, stride: tuple[int, int]) -> bool:
        """Whether a tensor is taken by convolutions of this stride alone, so that it need not be there otherwise."""
        users = self.program.users()[name]
        strided = all(isinstance(o, ops.Conv) and o.stride == stride and not _is_node(o) for o in users)
        return strided and name not in self.program.outputs

    def _from_caller(self, sums: Sum) -> Caller | None:
        """If sums are over an input of the caller's alone, that input; and the copy of it is taken back."""
        for (name, *stride), copy in self.phases.items():
            if len(sums.terms) == 1 and sums.terms[0].source is copy.out and self.users[name] == 1:
                if copy.kind != Kind.COPY or copy.source is not None or not sums.edges:
                    return None
                self.steps.remove(copy)
                return Caller(copy.numbers["source"], *self._shape(name), (stride[0], stride[1]))
        return None

    def _solid(self, maps: Maps) -> Maps:
        """The same with maps of zeros where a channel is all zero, for steps that read every channel."""
        empty = maps.buffers == EMPTY
        if not empty.any():
            self.memory.join(maps)
            return maps
        zeros = self.memory.constant(np.zeros((1, maps.height, maps.width), np.float32))
        filled = replace(maps, buffers=np.where(empty, zeros.buffers[0], maps.buffers))
        self.memory.join(filled)
        return filled

    # ---- operations -------------------------------------------------------------------------------------------------

    def _take(self, operation: ops.Operation) -> None:
        self.values[operation.output] = getattr(self, f"_{type(operation).__name__.lower()}")(operation)

    def _identity(self, name: str, scale: np.ndarray | None = None) -> Term:
        """A tensor's own channels as edges."""
        maps = self._ready(name)
        rows = np.flatnonzero(maps.buffers != EMPTY)
        zeros = np.zeros(len(rows), int)
        value = np.ones(len(maps), np.float32) if scale is None else scale
        return Term(maps, rows, rows, value[rows], zeros, zeros, len(rows))

    def _conv(self, o: ops.Conv) -> Pending:
        weight, bias = _array(o.weight), _array(o.bias, len(o.weight))
        _, height, width = self._shape(o.output)
        if _is_node(o):
            sums = self.values.get(o.inputs[0])
            if not (isinstance(sums, Sum) and self.users[o.inputs[0]] == 1):
                term, shape = self._identity(o.inputs[0]), self._shape(o.inputs[0])
                sums = Sum(o.output, shape[1], shape[2], [term], np.zeros(shape[0], np.float32))
            caller = self._from_caller(sums)
            return Nodes(o.output, sums, weight.reshape(-1, 9), bias, o.stride[0], height, width, caller)
        return Sum(o.output, height, width, [self._edges(o, weight)], bias)

    def _edges(self, o: ops.Conv, weight: np.ndarray) -> Term:
        """A convolution's weights as edges, on maps without a stride."""
        row, within, ky, kx = np.nonzero(weight)  # in 64 bits: places are made of them
        value = weight[row, within, ky, kx]
        channel = row // (len(weight) // o.groups) * weight.shape[1] + within
        taps = np.count_nonzero(weight.reshape(o.groups, -1, *weight.shape[1:]).any(1))
        (sy, sx), (_, out_height, out_width) = o.stride, self._shape(o.output)
        y, x = ky * o.dilation[0] - o.padding[0], kx * o.dilation[1] - o.padding[1]
        name = o.inputs[0]
        if o.stride == (1, 1) and (name in self.values or self.users[name] > 1):
            source = self._ready(name)
        else:
            source = self._phased(name, (sy, sx))
            channel = (channel * sy + y % sy) * sx + x % sx
        dy, dx = y // sy, x // sx
        real = source.buffers[channel] != EMPTY
        row, channel, value, dy, dx = (part[real] for part in (row, channel, value, dy, dx))
        term = Term(source, row, channel, value, dy, dx, int(taps))
        if not len(term.row):
            self.memory.reach(source, 0, 0, 0, out_width)
            return term
        up, down, left, right = (int(n) for n in (-dy.min(), dy.max(), -dx.min(), dx.max()))
        above, before = max(0, up), max(0, left)
        below, after = max(0, out_height + down - source.height), max(0, out_width + right - source.width)
        pitch = max(source.width + before, out_width + max(0, right))
        if above or before or below or after:
            # The zeros to the right of the last row are those before the next map.
            self.memory.reach(source, above, below, max(before, after, 1), pitch)
        return term

    def _affine(self, o: ops.Affine) -> Pending:
        scale, shift = _array(o.scale), _array(o.shift)
        made = self._open(o.inputs[0])
        if isinstance(made, Nodes):
            kernel, bias = made.kernel * scale[:, None], made.bias * scale + shift
            return replace(made, name=o.output, kernel=kernel, bias=bias)
        if isinstance(made, Sum):
            terms = [replace(t, value=t.value * scale[t.row]) for t in made.terms]
            return replace(made, name=o.output, terms=terms, bias=made.bias * scale + shift)
        _, height, width = self._shape(o.output)
        return Sum(o.output, height, width, [self._identity(o.inputs[0], scale)], shift)

    def _activation(self, o: ops.Activation) -> Pending | Maps:
        limits = {"relu": (0.0, INFINITY), "clamp": o.values}.get(o.kind)
        low, high = (-INFINITY, INFINITY) if limits is None else limits
        if limits is not None:
            made = self._open(o.inputs[0])
            if made is not None:
                return replace(made, name=o.output, low=low, high=high)
            if len(self.shapes[o.output]) == 3:
                channels, height, width = self._shape(o.output)
                bias = np.zeros(channels, np.float32)
                return Sum(o.output, height, width, [self._identity(o.inputs[0])], bias, low, high)
        source = self._solid(self._ready(o.inputs[0]))
        out = self.memory.new(*self._shape(o.output), packed=len(self.shapes[o.output]) == 1)
        kind = "clamp" if limits is not None else o.kind
        scale = o.values[0] if o.values and limits is None else 1.0
        numbers = {"flag": FUNCTIONS.index(kind), "scale": scale, "low": low, "high": high, **_size(source)}
        self._emit(Lowered(o.output, Kind.FUNCTION, out, source, numbers=numbers))
        return out

    def _add(self, o: ops.Add) -> Pending:
        terms: list[Term] = []
        channels, height, width = self._shape(o.output)
        bias = np.zeros(channels, np.float32)
        for name in o.inputs:
            made = self._open(name)
            if isinstance(made, Sum):
                terms += made.terms
                bias = bias + made.bias
            else:
                terms.append(self._identity(name))
        return Sum(o.output, height, width, terms, bias)

    def _addmap(self, o: ops.AddMap) -> Pending:
        added = _array(o.map)
        made = self._open(o.inputs[0])
        if not isinstance(made, Sum):
            _, height, width = self._shape(o.output)
            made = Sum(o.output, height, width, [self._identity(o.inputs[0])], np.zeros(len(added), np.float32))
        maps, row, channel, value, bias = _few_maps(added)
        if not len(row):
            return replace(made, name=o.output, bias=made.bias + bias)
        zeros = np.zeros(len(row), int)
        term = Term(self.memory.constant(maps), row, channel, value, zeros, zeros, len(maps))
        return replace(made, name=o.output, terms=[*made.terms, term], bias=made.bias + bias)

    def _constant(self, o: ops.Constant) -> Maps:
        return self.memory.constant(_array(o.map))

    def _concat(self, o: ops.Concat) -> Maps:
        maps = Maps.joined([self._ready(name) for name in o.inputs])
        self.memory.join(maps)
        return maps

    def _selectchannels(self, o: ops.SelectChannels) -> Maps:
        return self._ready(o.inputs[0]).take(_index(o.index))

    def _scatterchannels(self, o: ops.ScatterChannels) -> Maps:
        return self._ready(o.inputs[0]).placed(_index(o.index), o.channels)

    def _flatten(self, o: ops.Flatten) -> Maps:
        maps = self._ready(o.inputs[0])
        pixels = maps.height * maps.width
        every = np.repeat(np.arange(len(maps)), pixels)
        y, x = np.tile(np.indices((maps.height, maps.width)).reshape(2, -1), len(maps))
        parts = (maps.buffers[every], maps.channels[every], maps.y[every] + y, maps.x[every] + x)
        return Maps(1, 1, *parts)

    def _reshape(self, o: ops.Reshape) -> Maps:
        return self._ready(o.inputs[0])  # one pixel is one pixel

    def _linear(self, o: ops.Linear) -> Pending:
        weight, maps = _array(o.weight), self._ready(o.inputs[0])
        real = maps.buffers != EMPTY
        return Dense(o.output, maps.take(real), weight[:, real], _array(o.bias, len(weight)))

    def _mean(self, o: ops.Mean) -> Maps:
        name = o.inputs[0]
        channels, height, width = self._shape(name)
        out = self.memory.new(channels, 1, 1, packed=len(self.shapes[o.output]) == 1)
        value = self.values.get(name)
        if isinstance(value, Sum) and self.users[name] == 1:
            self._close_sums(replace(value, name=o.output), out, {"flag": MEANS})
            return out
        source = self._solid(self._ready(name))
        numbers = {"scale": 1 / (height * width), **_size(source)}
        self._emit(Lowered(o.output, Kind.MEAN, out, source, numbers=numbers))
        return out

    def _instancenorm(self, o: ops.InstanceNorm) -> Maps:
        source = self._solid(self._ready(o.inputs[0]))
        out = self.memory.new(*self._shape(o.output))
        numbers = {"weights": _array(o.scale), "weights2": _array(o.shift), "scale": o.epsilon, **_size(source)}
        self._emit(Lowered(o.output, Kind.INSTANCE_NORM, out, source, numbers=numbers))
        return out

    def _multiply(self, o: ops.Multiply) -> Maps:
        source, second = (self._solid(self._ready(name)) for name in o.inputs)
        one = self._shape(o.inputs[1])[1:] == (1, 1)
        if not one:
            self.memory.join(source, second)
        out = self.memory.new(*self._shape(o.output))
        numbers = {"second": second, "flag": int(one), **_size(source)}
        self._emit(Lowered(o.output, Kind.MULTIPLY, out, source, numbers=numbers))
        return out

    def _pooling(self, o: ops.Pooling) -> Maps:
        source = self._solid(self._ready(o.inputs[0]))
        out = self.memory.new(*self._shape(o.output))
        kind = "avg inside" if o.kind == "avg" and not o.count_padding else o.kind
        pairs = {"kernel": o.kernel, "stride": o.stride, "pad": o.padding, "dilate": o.dilation}
        if o.kind.startswith("adaptive"):
            pairs = {"dilate": (1, 1)}
        if o.kind == "avg":
            pairs["dilate"] = (1, 1)
        numbers = {f"{name}_{side}": pair[i] for name, pair in pairs.items() for i, side in enumerate("yx")}
        self._emit(
            Lowered(o.output, Kind.POOL, out, source, numbers={"flag": POOLS.index(kind), **numbers, **_size(source)})
        )
        return out

    def _crop(self, o: ops.Crop) -> Maps:
        maps = self._solid(self._ready(o.inputs[0]))
        _, height, width = self._shape(o.output)
        size = (maps.height, maps.width)
        top, left = (slice(a, b).indices(n)[0] for a, b, n in zip(o.starts, o.stops, size, strict=True))
        part = Maps(height, width, maps.buffers, maps.channels, maps.y + top, maps.x + left)
        return self._copied(o.output, part, self.memory.new(len(maps), height, width))

    def _pad(self, o: ops.Pad) -> Maps:
        maps = self._solid(self._ready(o.inputs[0]))
        out = self.memory.new(*self._shape(o.output))
        self.memory.buffers[out.buffers[0]].own = True
        inner = Maps(maps.height, maps.width, out.buffers, out.channels, out.y + o.before[0], out.x + o.before[1])
        self._copied(o.output, maps, inner)
        return out

    def _copied(self, name: str, source: Maps, out: Maps) -> Maps:
        numbers = {"source": -1, "stride_y": 1, "stride_x": 1, "height": source.height, "width": source.width}
        self._emit(Lowered(name, Kind.COPY, out, source, numbers=numbers))
        return out


def _is_node(o: ops.Conv) -> bool:
    """Whether the kernel of nodes can do it: depthwise, 3 × 3, with a border of one pixel."""
    square = o.weight.shape[2:] == (3, 3) and o.padding == (1, 1) and o.dilation == (1, 1)
    return o.depthwise and square and o.stride in ((1, 1), (2, 2))


def _out(step: Lowered) -> Maps:
    assert step.out is not None
    return step.out


def _few_maps(added: np.ndarray) -> tuple[np.ndarray, ...]:
    """Constant maps as a bias and edges from a few maps: maps, row, channel, value, bias.

    What a constant node sends differs from pixel to pixel only near the border, so of many pixels most are alike in all
    rows. Each kind of pixel but the most frequent one gets a map that is 1 there.
    """
    flat = added.reshape(len(added), -1)
    kinds, first, kind, counts = np.unique(flat, axis=1, return_index=True, return_inverse=True, return_counts=True)
    if len(first) > FEW_KINDS:
        rows = np.flatnonzero(flat.any(1))
        return added[rows], rows, np.arange(len(rows)), np.ones(len(rows), np.float32), np.zeros(len(added), np.float32)
    usual = int(counts.argmax())
    bias = kinds[:, usual]
    rest = np.delete(np.arange(len(first)), usual)
    maps = (kind.reshape(1, *added.shape[1:]) == rest[:, None, None]).astype(np.float32)
    value = kinds[:, rest] - bias[:, None]
    row, channel = np.nonzero(value)
    return maps, row, channel, value[row, channel], bias


def _size(maps: Maps) -> dict[str, int]:
    return {"height": maps.height, "width": maps.width}


def _array(x: Tensor | None, zeros: int = 0) -> np.ndarray:
    if x is None:
        return np.zeros(zeros, np.float32)
    return x.detach().cpu().float().numpy()


def _index(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy().astype(int)
