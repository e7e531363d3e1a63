"""The weights of a shared network in ``model.safetensors``: only its real edges where that makes the file smaller.

A wired network is a checkpoint with all its edges. A plain one with many zeros, such as a finalized network, is a file
as `wirings.save_sparse` writes it; other plain ones are checkpoints, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from wirings.errors import WiringError
from wirings.train.hub.limits import check_decoded, may_decode
from wirings.train.run import checkpoint
from wirings.utils.encoded_tensors import Description, decoded_bytes
from wirings.wire.sparse_file import sparse_state_of
from wirings.wire.sparse_state import SparseState, is_sparse_file

SAVED = 0.1
"""The part of a file that edges must save. Programs without this library read only dense files."""
_PER_TENSOR = 128
"""What the header of a file takes for a tensor, at most, besides its name and description."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def smaller_state(model: nn.Module) -> SparseState | None:
    """The real edges of a plain network; None if they do not save a tenth of its file, or it must be dense."""
    try:
        state = sparse_state_of(model)
    except WiringError:  # such as complex numbers, which only dense files hold
        return None
    dense = sum(decoded_bytes(x) for x in state.stored.values())
    small = file_bytes(state) <= (1 - SAVED) * dense
    return state if small and may_decode(stored_bytes(state), model_bytes(state)) else None


def file_bytes(state: SparseState) -> int:
    """What a file takes, at most."""
    header = sum(len(name) + _PER_TENSOR for name in state.tensors) + len(json.dumps(json.dumps(state.about)))
    return stored_bytes(state) + header


def stored_bytes(state: SparseState) -> int:
    """What the tensors of a file take in it."""
    return sum(x.numel() * x.element_size() for x in state.tensors.values())


def model_bytes(state: SparseState) -> int:
    """What the tensors of a file take in a model."""
    return sum(decoded_bytes(x) for x in state.shapes.values())


@dataclass(frozen=True)
class SavedWeights:
    """What a file holds, before it is loaded into a model.

    Args:
        path: the file, for messages.
        tensors: the tensors of a checkpoint; those of a sparse file on the meta device, since memory must not be taken
            for them before they were compared with a model.
        sparse: the content of a sparse file; None for a checkpoint.
    """

    path: Path
    tensors: dict[str, Tensor]
    sparse: SparseState | None

    @classmethod
    def read(cls, path: Path) -> SavedWeights:
        """Read a file. It takes no more memory than it is large."""
        if not is_sparse_file(path):
            return cls(path, checkpoint.read(path)[0], None)
        state = SparseState.read(path)
        check_decoded(stored_bytes(state), model_bytes(state))
        return cls(path, {f"model.{name}": _claimed(about) for name, about in state.shapes.items()}, state)

    def check_all_edges(self) -> None:
        """Raise if they are only the real edges, which are too few for a wired network."""
        if self.sparse is not None:
            raise WiringError("expected all edges of a wired network, but the file holds only the real ones")

    def load_into(self, model: nn.Module) -> None:
        """Load the weights into a plain model, which gets their type."""
        own, saved = (_float_types(tensors) for tensors in (model.state_dict(), self.tensors))
        if own != saved and len(saved) == 1 and saved <= set(_FLOATS):
            model.to(saved.pop())
        checkpoint.check_fits(model.state_dict(), checkpoint.model_state(self.tensors), self.path)
        state = checkpoint.model_state(self.tensors) if self.sparse is None else self.sparse.decoded(self.path)[0]
        model.load_state_dict(state)


def _float_types(tensors: Mapping[str, Tensor]) -> set[torch.dtype]:
    return {x.dtype for x in tensors.values() if x.is_floating_point()}


def _claimed(about: Description) -> Tensor:
    return torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]), device="meta")
