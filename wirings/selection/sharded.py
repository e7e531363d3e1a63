"""Choosing edges of weights that are sharded over processes: exactly the edges that one process would choose.

A sharded weight is a DTensor whose rows (dimension 0) are distributed, as `torch.distributed.fsdp.fully_shard` leaves
parameters outside the forward pass. No weight is gathered. The magnitude at which the ranking is cut off is found digit
by digit: every process counts how many of its edges have each value of the digit, the counts are summed over processes,
and the search continues with the digit that contains the k-th edge; for float32 that takes three sums of some 2,000
counts. One more sum tells every process how many equal edges precede its own, since ties are broken by position in the
whole weight.

The result is a mask that is sharded like the weight. `whole` gathers one, as bits.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from wirings.errors import WiringError
from wirings.selection.cpu import keys_of

DIGIT = 11
"""The largest number of bits of a key that are counted at a time."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Does not import `torch.distributed.tensor` to find out."""
    if torch.compiler.is_compiling():
        return False  # the forward pass sees whole weights
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True)
class ShardLayout:
    """The processes over which the rows of a weight are distributed, and which of them this one is."""

    group: Any
    parts: int
    part: int
    device: str
    """The type of device that the processes communicate through."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.parts == 1:
            return values
        sent = values.to(self.device) if values.device.type != self.device else values
        dist.all_reduce(sent, group=self.group)
        return sent.to(values.device)

    def rows(self, count: int) -> slice:
        """The rows that belong to this process, of a weight of ``count`` rows."""
        each = -(-count // self.parts)
        return slice(min(self.part * each, count), min((self.part + 1) * each, count))


def layout_of(weight: Any, name: str = "a weight") -> ShardLayout:
    """The layout of a sharded weight; raises for layouts whose edges cannot be ranked."""
    from torch.distributed.tensor import Replicate, Shard

    shards = [i for i, one in enumerate(weight.placements) if not isinstance(one, Replicate)]
    if (
        not all(type(weight.placements[i]) is Shard and weight.placements[i].dim == 0 for i in shards)
        or len(shards) > 1
    ):
        raise WiringError(
            "edges of sharded weights can be ranked if the rows (dimension 0) are distributed over one dimension of a "
            f"mesh, but {name} of shape {tuple(weight.shape)} is laid out as {tuple(weight.placements)}. Leave the "
            "placement to fully_shard, without shard_placement_fn and without tensor parallelism on wired layers."
        )
    mesh, dim = weight.device_mesh, shards[0] if shards else 0
    if not shards:  # every process has all of it
        return ShardLayout(mesh.get_group(dim), 1, 0, mesh.device_type)
    return ShardLayout(mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim), mesh.device_type)


def shard_of(tensor: Tensor, place: ShardLayout) -> Tensor:
    """The rows that belong to this process, of a sharded tensor or of one that every process has whole."""
    if is_sharded(tensor) and layout_of(tensor).parts > 1:
        return _local(tensor)
    return _local(tensor)[place.rows(tensor.shape[0])]


def _local(tensor: Any) -> Tensor:
    """The local part of a sharded tensor; a tensor that is not sharded as it is."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()


def choose(weight: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Mark the ``k`` edges of largest magnitude of a sharded weight, in a mask with the same layout."""
    return Cut.find([weight], k, [allowed]).mask(0, weight, allowed)


@dataclass(frozen=True)
class Cut:
    """The position at which a ranking of the edges of several weights is cut off after k of them."""

    place: ShardLayout
    dtype: torch.dtype
    key: Tensor
    """All edges with a larger key are chosen (keys order like magnitudes), and the first of those with this key."""
    ties: Tensor
    """The number of chosen edges with this key in each shard of each weight: shape (weights, processes)."""

    @classmethod
    def find(cls, weights: Sequence[Tensor], k: Tensor, allowed: Sequence[Tensor | None]) -> Cut:
        """Rank the edges of several weights together. At least one is sharded; others are whole on every process."""
        places = [layout_of(weight) for weight in weights if is_sharded(weight)]
        place = max(places, key=lambda one: one.parts)
        if any(one != place and one.parts > 1 for one in places):
            raise WiringError(
                "layers that share one budget are ranked together, but they are sharded over different groups of "
                "processes; shard all of them over one mesh, or use share='uniform' or 'erk'."
            )
        dtype = weights[0].dtype
        for weight in weights[1:]:
            dtype = torch.promote_types(dtype, weight.dtype)
        parts = [
            (shard_of(w, place), None if a is None else shard_of(a, place))
            for w, a in zip(weights, allowed, strict=True)
        ]
        keys = [_keys(part, among, dtype) for part, among in parts]
        device = keys[0].device
        key, missing = _cut(torch.cat([part.to(device) for part in keys]), k.to(device), place)
        equal = torch.zeros(len(weights), place.parts, dtype=torch.int64, device=device)
        equal[:, place.part] = torch.stack([(part == key.to(part.device)).sum().to(device) for part in keys])
        equal = place.total(equal).reshape(-1)
        before = equal.cumsum(0) - equal
        return cls(place, dtype, key, torch.minimum((missing - before).clamp(min=0), equal).view(len(weights), -1))

    def mask(self, index: int, weight: Tensor, allowed: Tensor | None) -> Tensor:
        """The mask of the chosen edges of weight number ``index``, with the layout of the weight."""
        if is_sharded(weight) and layout_of(weight).parts > 1:
            part, ties = _local(weight), self.ties[index, self.place.part]
            among = None if allowed is None else shard_of(allowed, self.place)
        else:
            part, ties = _local(weight), self.ties[index].sum()
            among = None if allowed is None else _local(allowed)
        keys = _keys(part, among, self.dtype)
        equal = keys == self.key.to(keys.device)
        real = (keys > self.key.to(keys.device)) | (equal & (equal.cumsum(0) <= ties.to(keys.device)))
        real = real.view(part.shape)
        return _as_sharded(real, weight) if is_sharded(weight) else real


def _keys(part: Tensor, among: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Integers that order like magnitudes, flattened; -1 where no edge is allowed."""
    return keys_of(part.to(dtype).contiguous(), among).reshape(-1)


def _cut(keys: Tensor, k: Tensor, place: ShardLayout) -> tuple[Tensor, Tensor]:
    """The key of the ``k``-th edge over all processes, and how many edges with this key are among the k."""
    bits = torch.iinfo(keys.dtype).bits - 1
    count = -(-bits // DIGIT)
    widths = [bits // count + (i < bits % count) for i in range(count)]
    prefix, left, below = torch.zeros((), dtype=torch.int64, device=keys.device), k, bits
    for i, width in enumerate(widths):
        below -= width
        digits = (keys >> below) & ((1 << width) - 1)
        digits = torch.where(keys >> below >> width == prefix, digits, 1 << width).long()  # all others in one extra bin
        counts = place.total(_histogram(digits, 1 << width))
        at_least = counts.flip(0).cumsum(0).flip(0)
        if i == 0 and not keys.is_cuda and int(left) > int(at_least[0]):
            raise WiringError(
                f"k = {int(left)} edges were requested, but only {int(at_least[0])} are allowed; lower k or allow more."
            )
        digit = (at_least >= left).sum() - 1
        left = left - torch.cat([at_least, at_least.new_zeros(1)]).gather(0, (digit + 1).reshape(1)).reshape(())
        prefix = prefix * (1 << width) + digit
    return prefix, left


def _histogram(digits: Tensor, size: int) -> Tensor:
    """How often each of 0 … size - 1 occurs; larger values are not counted."""
    if not digits.is_cuda:
        return torch.bincount(digits, minlength=size + 1)[:size]
    # bincount would synchronize with the device
    counts = torch.zeros(size + 1, dtype=torch.int64, device=digits.device)
    return counts.scatter_add_(0, digits, torch.ones_like(digits))[:size]


def _as_sharded(part: Tensor, like: Any) -> Tensor:
    """A sharded tensor with the layout of another one of the same shape, from this process's part."""
    from torch.distributed.tensor import DTensor

    shape, stride = like.shape, like.stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def by_rows(function: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Apply a function that treats every row (dimension 0) independently to a weight that may be sharded."""
    return _as_sharded(function(_local(weight)), weight) if is_sharded(weight) else function(weight)


def rows_like(tensor: Any, like: Any) -> Any:
    """Shard a tensor that is whole on every process like another one of its shape; return anything else unchanged."""
    if not isinstance(tensor, Tensor) or is_sharded(tensor) or tensor.shape != like.shape:
        return tensor
    return _as_sharded(shard_of(tensor, layout_of(like)).to(like.device), like)


def whole(mask: Tensor) -> Tensor:
    """Gather a mask that may be sharded, so that it is whole on every process. Bits are sent."""
    if not is_sharded(mask):
        return mask
    if mask.dtype != torch.bool:
        return mask.full_tensor()  # type: ignore[attr-defined]
    place = layout_of(mask, "a mask")
    part: Tensor = mask.to_local()  # type: ignore[attr-defined]
    if place.parts == 1:
        return part
    most = -(-mask.shape[0] // place.parts) * mask.shape[1:].numel()
    bits = torch.zeros(-(-most // 8) * 8, dtype=torch.uint8, device=part.device)
    bits[: part.numel()] = part.reshape(-1)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    sent = (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8).to(place.device)
    parts = [torch.empty_like(sent) for _ in range(place.parts)]
    dist.all_gather(parts, sent, group=place.group)
    found = [(got.to(part.device)[:, None] & weights != 0).reshape(-1)[:most] for got in parts]
    return torch.cat(found)[: mask.numel()].view(mask.shape)


def check_alike(weight: Tensor, memory: Mapping[str, Tensor], name: str, rule: str) -> None:
    """Raise if what a rule remembers about a sharded weight differs between processes."""
    place = layout_of(weight, name)
    kept = {what: value.detach().contiguous().cpu() for what, value in memory.items() if not is_sharded(value)}
    sums = [zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().tobytes()) for value in kept.values()]
    if not sums:
        return
    found = torch.zeros(place.parts, len(sums), dtype=torch.int64, device=place.device)
    found[place.part] = torch.tensor(sums)
    found = place.total(found)
    for what, column in zip(kept, _over_replicas(weight, found).unbind(1), strict=True):
        if bool((column != column[0]).any()):
            raise WiringError(
                f"{name}: what rule {rule!r} remembers ({what}) is not the same on all processes, which would train "
                "different networks. Call torch.manual_seed with the same seed on all of them before creating and "
                "wiring the model, or load one checkpoint everywhere."
            )


def _over_replicas(weight: Any, found: Tensor) -> Tensor:
    """The smallest and largest values that the processes of all replicas of a sharded weight have found (HSDP)."""
    for dim in range(weight.device_mesh.ndim):
        if weight.placements[dim].is_replicate() and weight.device_mesh.size(dim) > 1:
            least, most, group = found.clone(), found.clone(), weight.device_mesh.get_group(dim)
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            found = torch.cat([least, most])
    return found


def laid_out_as(tensor: Tensor, like: Any) -> Tensor:
    """Distribute a tensor that every process has whole like another one; return a sharded one unchanged."""
    if is_sharded(tensor) or not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(tensor.to(like.device), mesh, like.placements, src_data_rank=None)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors start at the same address; for sharded ones, their local parts."""
    one, other = _local(one), _local(other)
    return bool(one.numel()) and one.device == other.device and one.data_ptr() == other.data_ptr()


def _largest(tensor: Tensor) -> Tensor:
    """The largest entry over all processes. PyTorch's own fails on shards without rows."""
    part, place = _local(tensor), layout_of(tensor)
    least = float("-inf") if part.is_floating_point() else torch.iinfo(part.dtype).min
    largest = torch.cat([part.reshape(-1), part.new_full((1,), least)]).amax()
    if place.parts > 1:
        sent = largest.to(place.device)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=place.group)
        largest = sent.to(part.device)
    return largest


_NUMBERS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__"}


class _AsOne(TorchFunctionMode):
    """Makes numbers that are read from sharded tensors those of the whole: sums are added over processes first.

    Tensors that are whole on every process take part with this process's rows. (PyTorch's implicit replication, which
    does the rest, would gather weights that have fewer rows than there are processes.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        like = next((one for one in args if isinstance(one, Tensor) and is_sharded(one)), None)
        if like is not None:
            if name in _NUMBERS:
                args = (args[0].full_tensor(), *args[1:])
            elif name in ("amax", "max") and len(args) == 1 and not kwargs:
                return _largest(like)
            elif name.endswith("_") and not name.endswith("__") and not is_sharded(args[0]):  # writes to a whole tensor
                args = (args[0], *(whole(one) if isinstance(one, Tensor) else one for one in args[1:]))
            elif like.dim():
                args = tuple(rows_like(one, like) for one in args)
        return func(*args, **(kwargs or {}))


_active: ContextVar[bool] = ContextVar("on_shards", default=False)  # PyTorch's own mode does not nest


@contextmanager
def on_shards(wanted: bool = True) -> Iterator[None]:
    """Let code that knows nothing about processes work on sharded weights as one process would on whole ones.

    Tensors that are whole on every process (what a rule remembers) may be combined with sharded ones; numbers read from
    the result are those of the whole. Every process must do the same.
    """
    if not wanted or _active.get():
        yield
        return
    from torch.distributed.tensor.experimental import implicit_replication

    token = _active.set(True)
    try:
        with implicit_replication(), _AsOne():
            yield
    finally:
        _active.reset(token)
