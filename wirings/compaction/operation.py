"""What one kind of operation means: the contract of the classes in `wirings.compaction.operations`.

A program is a list of operations, each of which computes one named tensor. Tensors are (batch, channels, height,
width), (batch, features), or have any other number of dimensions after the channels. A channel is a node: operations
describe what happens along dimension 1. Weights are plain tensors, zeros included; whether a convolution runs dense or
sparse is up to the engine.

Everything that compaction and export need to know about a kind of operation is a method of its class: how it is
computed, which of its channels are constant, which channels of its inputs it needs, how it is pruned and simplified,
what is valid in a file, and what it is in ONNX. The defaults describe an operation that treats every channel alike and
separately, such as an activation. Its kernel, if there is one, is described in `wirings.engine.operations`.

To add an operation: write a file in `wirings/compaction/operations`, list its class in that package's ``OPERATIONS``,
and convert PyTorch's operators into it with `wirings.compaction.aten.converts`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from wirings.compaction.channel_constants import ChannelConstants, all_varying
from wirings.errors import WiringError

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.operations.affine import Affine
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter

Shape = tuple[int, ...]
Tensors = Mapping[str, Any]
"""An operation's weights by field; None for those that it does not have."""

MAX_DIMENSIONS = 16
"""Dimensions of a tensor in a file."""


class UnsupportedByOnnxError(Exception):
    """ONNX has no operator for this operation; the message names what is missing."""


class IndexRange(NamedTuple):
    """Integers that an operation reads as indices, which its kernel does not check."""

    name: str
    """The tensor of integers."""
    limit: int
    """They are from 0 to one less."""
    start: int = 0
    """The number of the first one among those of an example."""
    length: int | None = None
    """How many they are; None for all."""

    def part(self, integers: Tensor) -> Tensor:
        """The indices among the integers of a batch."""
        return integers if self.length is None else integers.flatten(1)[:, self.start : self.start + self.length]


class OperationCounts(NamedTuple):
    """What an operation contributes to a report."""

    nodes: int = 0
    edges: int = 0
    mult_adds: int = 0
    dense_mult_adds: int = 0


def expect(valid: bool, what: str) -> None:
    """Raise a `WiringError` that says what was expected, unless ``valid``."""
    if not valid:
        raise WiringError(f"expected {what}")


def expect_size(x: Tensor | None, size: Shape) -> None:
    """Raise unless a tensor, if there is one, has this size."""
    expect(x is None or tuple(x.shape) == size, f"a tensor of size {size}")


@dataclass(frozen=True, eq=False)
class Operation(ABC):
    """One operation. Its fields are its weights, and numbers, strings and tuples of them."""

    output: str
    """Name of the tensor that it computes."""
    inputs: tuple[str, ...]
    """Names of the tensors that it takes."""
    weights: ClassVar[tuple[str, ...]] = ()
    """The fields that hold tensors."""
    input_count: ClassVar[int | None] = 1
    """How many tensors it takes; None means one or more."""

    # ---- computing --------------------------------------------------------------------------------------------------

    @abstractmethod
    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        """Compute the result with the weights in ``own``, such as a module's parameters, instead of the fields."""

    def run(self, *inputs: Tensor) -> Tensor:
        """Compute the result. This is the reference that every engine must match."""
        return self.compute(inputs, self.tensors())

    def tensors(self) -> dict[str, Tensor | None]:
        """The weights by field; None for those that it does not have."""
        return {name: getattr(self, name) for name in self.weights}

    def with_tensors(self, own: Tensors) -> Self:
        """The same operation with other weights, which are named as in `tensors`."""
        return dataclasses.replace(self, **own)

    def with_dtype(self, dtype: torch.dtype) -> Self:
        """The same operation with floating-point types in its arguments replaced; weights are left alone."""
        return self

    def in_double(self) -> Self:
        """The same operation with its floating-point weights in double precision."""
        wide = {k: x.double() if x is not None and x.is_floating_point() else x for k, x in self.tensors().items()}
        return self.with_tensors(wide)

    @property
    def opaque(self) -> bool:
        """Whether nothing is known about how it treats channels, so that none of them can be removed."""
        return False

    @property
    def fixed_size(self) -> bool:
        """Whether it is only valid for images of the size that the program was made for."""
        return False

    @property
    def index_range(self) -> IndexRange | None:
        """The indices that it takes, if it takes any."""
        return None

    def counts(self, shape: Shape, inputs: Sequence[Shape]) -> OperationCounts:
        """What it contributes to a report, for an output and inputs of these shapes (without the batch dimension)."""
        return OperationCounts()

    # ---- files ------------------------------------------------------------------------------------------------------

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raise unless the fields are valid for inputs of these shapes. Files are checked before anything runs."""
        return

    def infer(self, inputs: Sequence[Any]) -> Any:
        """Check the operation, and compute its result on the meta device, which needs no memory."""
        for x in inputs:
            expect(isinstance(x, Tensor) and 2 <= x.dim() <= MAX_DIMENSIONS, "tensors with a batch and channels")
            expect(x.is_floating_point(), "floating-point tensors")
        count = self.input_count
        expect(len(inputs) == count if count else len(inputs) >= 1, f"{count or 'one or more'} inputs")
        for name, weight in self.tensors().items():
            expect(weight is None or name == "index" or weight.is_floating_point(), f"a floating-point {name}")
        self.check(inputs)
        own = {name: None if w is None else torch.empty_like(w, device="meta") for name, w in self.tensors().items()}
        return self.compute(inputs, own)

    # ---- constant channels ------------------------------------------------------------------------------------------

    def constants(self, inputs: Sequence[ChannelConstants], shape: Shape) -> ChannelConstants:
        """Find the channels of the result that do not depend on the program's inputs, and their values."""
        mask = self.constant_channels(inputs)
        return ChannelConstants(mask, self.constant_maps(inputs, mask, shape)) if mask.any() else all_varying(shape)

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        """Which channels of the result are constant: a boolean vector."""
        return inputs[0].constant.clone()

    def constant_maps(self, inputs: Sequence[ChannelConstants], mask: Tensor, shape: Shape) -> Tensor:
        """The values of the constant channels in ``mask``, zero for all others, in double precision."""
        with torch.no_grad():
            maps = self.in_double().run(*(x.maps[None] for x in inputs))[0]
        return torch.where(mask.view(-1, *[1] * (maps.dim() - 1)), maps, 0.0)

    # ---- needed channels --------------------------------------------------------------------------------------------

    def mark_needed(self, liveness: NeededChannels, needed: Tensor) -> None:
        """Mark the channels of the inputs that the ``needed`` channels of the result depend on."""
        for number, name in enumerate(self.inputs):
            if name in liveness.needed:
                liveness.mark(name, self.needed_channels(number, needed, liveness))

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        """The channels of input ``number`` that the ``needed`` channels of the result depend on."""
        return needed

    # ---- pruning ----------------------------------------------------------------------------------------------------

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        """Add this operation, reduced to its ``needed`` channels (a boolean vector), to the pruned program."""
        source, wanted = self.inputs[0], needed.nonzero().squeeze(1)
        kept = pruner.kept[source]
        # Computing all channels is cheaper than copying half of them or more.
        keep_all = not pruner.constants_of(self.output).constant[kept].any() and len(kept) <= 2 * len(wanted)
        wanted = kept if keep_all else wanted
        pruner.emit(self, (pruner.select(source, wanted),), wanted, **self.pruned_weights(wanted))

    def pruned_weights(self, wanted: Tensor) -> dict[str, Any]:
        """The weights, reduced to some channels, of an operation that treats every channel separately."""
        return {name: x[wanted] for name, x in self.tensors().items() if x is not None}

    # ---- simplifying ------------------------------------------------------------------------------------------------

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether the result is the input, given the shapes of all tensors."""
        return False

    def simplify(self, rewriter: ProgramRewriter) -> bool:
        """Merge this operation with its neighbours where possible; returns whether anything changed."""
        return False

    def absorbs_scale(self, rewriter: ProgramRewriter) -> bool:
        """Whether a scale of each channel of the result can be moved into this operation or those before it."""
        return False

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        """Absorb the affine operation right after this one, which nothing else reads; returns whether that worked."""
        return False

    def affine_repeats(self, shape: Shape) -> int:
        """The number of result channels per input channel if an affine operation before this one may be moved after it;
        otherwise 0.

        Args:
            shape: the shape of the input, without the batch dimension.
        """
        return 0

    def scattered_weights(self, index: Tensor, channels: int) -> dict[str, Any] | None:
        """The weights if the input's channels move to ``index`` among ``channels``, and all others are zero.

        None if zero channels would not stay zero, or if channels are not treated separately.
        """
        return None

    def split_bias(self) -> tuple[Operation, Tensor] | None:
        """The operation without its bias, and the bias; None if it has none."""
        return None

    # ---- export -----------------------------------------------------------------------------------------------------

    def spelled_out(self) -> Operation:
        """The operation in operators that PyTorch's exporter to ONNX writes with the same results."""
        return self

    def to_onnx(self, writer: OnnxWriter) -> None:
        """Add the ONNX nodes that compute the result.

        Raises:
            UnsupportedByOnnxError: if ONNX has no operator for it.
        """
        raise UnsupportedByOnnxError(type(self).__name__)


def by_channel(values: Tensor, x: Tensor) -> Tensor:
    """One number per channel, reshaped to broadcast with (batch, channels, …)."""
    return values.view(-1, *[1] * (x.dim() - 2))
