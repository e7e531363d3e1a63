"""The state of a model by its real edges, and the file that holds it.

A safetensors file with a checksum (`wirings.utils.tensor_files`), whose tensors are stored as
`wirings.utils.encoded_tensors` describes. Its header says in JSON, under ``state``, which tensors are ``encoded`` and
how, which names are ``tied`` to a stored one, and what is known about the ``wiring``: for every tensor that is stored
by its edges, their number ``k``, their ``density`` and the ``rule`` that chose them, null for a plain model.

Files need not be trusted. Nothing in them is executed, and reading one takes no more memory than the file: whoever
decodes its tensors first compares their `SparseState.shapes` with those of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from wirings.errors import WiringError
from wirings.utils.encoded_tensors import Description, check_description, decode, describe_plain, part_names
from wirings.utils.tensor_files import OtherFileError, file_errors, read_tensors, write_tensors
from wirings.version import __version__

FORMAT, SCHEMA = "wirings sparse state", "1"
_REMEDY = "Save the model again."


@dataclass(frozen=True)
class SparseState:
    """A model's state by its real edges.

    Args:
        tensors: what the file stores: whole tensors, and the parts of encoded ones.
        about: what its header says about them.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any]

    def write(self, path: Path) -> None:
        """Write the file, but not atomically."""
        header = {"format": FORMAT, "schema": SCHEMA, "version": __version__, "state": json.dumps(self.about)}
        write_tensors(path, self.tensors, header)

    @classmethod
    def read(cls, path: str | Path) -> SparseState:
        """Read a file. Raises a `WiringError` that names it if it is damaged, or another one."""
        with file_errors(path, _REMEDY):
            tensors, header = read_tensors(path, lambda header: _check_header(header, path))
            state = cls(tensors, json.loads(header["state"]))
            state._check()
            return state

    @property
    def stored(self) -> dict[str, Description]:
        """The shape and type of every tensor that the file stores, once decoded."""
        encoded = self.about["encoded"]
        parts = {part for name, x in encoded.items() for part in part_names(name, x, self.tensors).values()}
        plain = {name: describe_plain(x) for name, x in self.tensors.items() if name not in parts}
        return {**plain, **encoded}

    @property
    def shapes(self) -> dict[str, Description]:
        """The shape and type of every tensor of the model, once decoded; tied ones have several names."""
        stored = self.stored
        return {**stored, **{name: stored[other] for name, other in self.about["tied"].items()}}

    def decoded(self, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """All tensors of the model, and of those that are stored by their edges, the places. `shapes` says how large.

        Args:
            path: the file, for messages.
        """
        encoded, tied = self.about["encoded"], self.about["tied"]
        state = {name: self.tensors[name] for name in self.stored if name not in encoded}
        places: dict[str, Tensor | None] = {}
        with file_errors(path, _REMEDY):
            for name, description in encoded.items():
                parts = part_names(name, description, self.tensors)
                own = {part: self.tensors[there] for part, there in parts.items()}
                state[name], places[name] = decode(own, description)
        for name, other in tied.items():
            state[name], places[name] = state[other], places.get(other)
        return state, places

    def _check(self) -> None:
        about, keys = self.about, {"model", "encoded", "tied", "wiring"}
        if not isinstance(about, dict) or set(about) != keys or not isinstance(about["model"], str):
            raise WiringError(f"expected a state with {', '.join(sorted(keys))}")
        if not all(isinstance(about[key], dict) for key in ("encoded", "tied", "wiring")):
            raise WiringError("expected mappings by name")
        for description in about["encoded"].values():
            check_description(description)
        stored, tied = self.stored, about["tied"]
        whole = self.tensors.keys() & stored.keys()
        if about["encoded"].keys() & whole or tied.keys() & stored.keys():
            raise WiringError("expected every tensor once")
        if not all(isinstance(other, str) and other in stored for other in tied.values()):
            raise WiringError("expected ties to stored tensors")


def is_sparse_file(path: Path) -> bool:
    """Whether a file says that it holds a model's state by its real edges."""
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():  # reading a pipe might never end
            return False
        with safe_open(str(path), framework="pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError):
        return False


def _check_header(header: Mapping[str, str], path: str | Path) -> None:
    if header.get("format") != FORMAT:
        raise OtherFileError(
            f"expected a file that save_sparse wrote, but {path} is another. Compact models are loaded by "
            "wirings.load_compact."
        )
    if header.get("schema") != SCHEMA:
        raise OtherFileError(
            f"{path} has schema {header.get('schema', '')[:20]!r}, but this version reads {SCHEMA!r}. Upgrade wirings."
        )
