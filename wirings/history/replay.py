"""Histories of wirings: which edges were real at every record, and values such as the loss beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wirings.errors import WiringError
from wirings.history import file_format
from wirings.history.check_structure import check_structure
from wirings.history.quantize import decode
from wirings.history.structure import RecordedTile, WiringStructure, alive, positions
from wirings.utils.checks import is_int
from wirings.utils.files import check_file, check_path, whole_file
from wirings.utils.text import brief

MIN_EDGE_LIMIT, EDGES_PER_BYTE = 2**25, 64
"""How many edges a file of any size may record, and how many more for each of its bytes."""


class WiringState:
    """A wiring at one moment: its real edges, in ascending order of their flat indices.

    Args:
        structure: the nodes and possible edges.
        step: the optimizer step.
        indices: flat indices of the real edges and of kernel entries, ascending.
        codes: their quantized weights, int8; see `wirings.history.quantize`.
        born: the step of the record at which each became real.
    """

    def __init__(
        self, structure: WiringStructure, step: int, indices: np.ndarray, codes: np.ndarray, born: np.ndarray
    ) -> None:
        self.structure, self.step = structure, step
        self._all = indices, codes, born
        edges = int(np.searchsorted(indices, structure.edges))
        self.indices, self.codes, self.born = indices[:edges], codes[:edges], born[:edges]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def size(self) -> int:
        """The number of real edges and kernel entries."""
        return len(self._all[0])

    @cached_property
    def _endpoints(self) -> tuple[np.ndarray, np.ndarray]:
        return self.structure.endpoints(self.indices)

    @property
    def targets(self) -> np.ndarray:
        """The node that each edge leads to."""
        return self._endpoints[0]

    @property
    def sources(self) -> np.ndarray:
        """The node that each edge comes from."""
        return self._endpoints[1]

    @cached_property
    def weights(self) -> np.ndarray:
        """The weight of each edge, to within 6 %."""
        return decode(self.codes)

    def kernel(self, node: int) -> np.ndarray | None:
        """The convolution kernel of a node, to within 6 %; None if it has none."""
        for kernels in self.structure.kernels:
            if node in kernels.nodes:
                size = int(np.prod(kernels.shape))
                first = kernels.start + kernels.nodes.index(node) * size
                at = int(np.searchsorted(self._all[0], first))
                return decode(self._all[1][at : at + size]).reshape(kernels.shape)
        return None

    def all_codes(self) -> np.ndarray:
        """The codes of all possible edges and kernel entries, int8, 0 for edges that are not real."""
        indices, codes, _ = self._all
        everything = np.zeros(self.structure.size, np.int8)
        everything[indices] = codes
        return everything

    def counts(self) -> np.ndarray:
        """The number of real edges of each layer."""
        bounds = [self.structure.layers[0].start, *(layer.stop for layer in self.structure.layers)]
        return np.diff(np.searchsorted(self.indices, bounds))

    def block_counts(self) -> list[tuple[int, int]] | None:
        """The real and the possible blocks of each layer; None if edges are not real in blocks, or it is not known."""
        block = self.structure.block
        if block is None or any(tile.pairs is not None and tile.sides is None for tile in self.structure.tiles):
            return None
        counts = []
        for layer in self.structure.layers:
            tiles = [tile for tile in self.structure.tiles if layer.start <= tile.start < layer.stop]
            counts.append(tuple(map(sum, zip(*(self._blocks_in(tile, block) for tile in tiles), strict=True))))
        return counts  # type: ignore[return-value]

    def _blocks_in(self, tile: RecordedTile, block: tuple[int, int]) -> tuple[int, int]:
        first, last = np.searchsorted(self.indices, (tile.start, tile.start + tile.count))
        real = self.indices[first:last] - tile.start
        if tile.pairs is not None and tile.sides is not None:
            rows, cols = (positions(nodes, side) for nodes, side in zip(tile.pairs, tile.sides, strict=True))
            blocks = rows // block[0] * len(tile.sides[1]) + cols // block[1]
            return len(np.unique(blocks[real])), len(np.unique(blocks))
        height, width = block[::-1] if tile.flip else block
        columns = -(-tile.cols // width)
        row, col = np.divmod(real // tile.inner, max(tile.cols, 1))
        return len(np.unique(row // height * columns + col // width)), -(-tile.rows // height) * columns

    def degrees(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of real edges into each node, and out of each node."""
        nodes = self.structure.nodes
        return np.bincount(self.targets, minlength=nodes), np.bincount(self.sources, minlength=nodes)

    @cached_property
    def alive(self) -> np.ndarray:
        """Boolean mask of the live nodes; if paths across layers are unknown, of the nodes with a real edge."""
        structure = self.structure
        if not structure.paths_known:
            into, out_of = self.degrees()
            return (into + out_of) > 0
        return alive(structure, self.sources, self.targets)

    def then(self, record: file_format.RecordDelta) -> WiringState:
        """The state after one more record.

        Raises:
            ValueError: the record does not follow this state.
        """
        indices, codes, born = self._all
        if len(record.delta) != len(indices):
            raise ValueError(f"it changes {len(record.delta)} edges, but {len(indices)} were real before it")
        after = (codes.view(np.uint8) + record.delta).view(np.int8)
        kept = after != 0
        indices, after, born = indices[kept], after[kept], born[kept]
        if len(record.new):
            where = np.searchsorted(indices, record.new)
            repeated = indices[np.minimum(where, len(indices) - 1)] == record.new if len(indices) else np.zeros(1, bool)
            if (np.diff(record.new) <= 0).any() or record.new[-1] >= self.structure.size or repeated.any():
                raise ValueError("its new edges are unsorted, duplicate or out of range")
            indices, after = np.insert(indices, where, record.new), np.insert(after, where, record.codes)
            born = np.insert(born, where, record.step)
        return WiringState(self.structure, record.step, indices, after, born)


class History:
    """The history of a wiring, record by record. `Recorder` creates one; `History.load` reads one from a file.

    Args:
        structure: the nodes and possible edges.
        about: metadata such as the name of the recipe; any JSON value.
        chunks: records and notes.
    """

    def __init__(
        self, structure: WiringStructure, about: Mapping[str, Any], chunks: Sequence[file_format.Chunk] = ()
    ) -> None:
        self.structure, self.about = structure, dict(about)
        self.chunks: list[file_format.Chunk] = []
        self.steps: list[int] = []
        """The optimizer step of each record."""
        self.notes: list[tuple[int, dict[str, float]]] = []
        """Values that belong to a step, such as the loss."""
        self.damage: str | None = None
        """What is wrong with the rest of the file, if only its intact part was loaded."""
        self.path: Path | None = None
        """The file that it was loaded from, which messages name."""
        self._records: list[file_format.Chunk] = []
        for chunk in chunks:
            self.add(chunk)

    def add(self, chunk: file_format.Chunk) -> None:
        """Append a record or a note."""
        if chunk.kind == file_format.NOTE:
            step, values = file_format.unpack_json(chunk)
            self.notes.append((int(step), {str(name): float(value) for name, value in values.items()}))
        else:
            self.steps.append(file_format.step_of(chunk))
            self._records.append(chunk)
        self.chunks.append(chunk)
        for cached in ("births", "deaths", "_changes"):
            self.__dict__.pop(cached, None)

    def __len__(self) -> int:
        return len(self.steps)

    def states(self) -> Iterator[WiringState]:
        """Iterate over the wiring at every record."""
        state, limit = self._before_first(), self._edge_limit()
        for i, chunk in enumerate(self._records):
            try:
                state = state.then(file_format.unpack_record(chunk, state.size, limit))
            except ValueError as error:
                raise WiringError(
                    f"record {i + 1} of {self.path or 'this history'} is damaged: {error}. Use History.until(step) to "
                    "get the records before it."
                ) from error
            yield state

    def _before_first(self) -> WiringState:
        empty = np.empty(0, np.int64)
        return WiringState(self.structure, -1, empty, np.empty(0, np.int8), empty)

    def _edge_limit(self) -> int:
        """The most edges that a state can have, by the structure and by the size of the file: a small one is small."""
        size = sum(len(chunk.content) for chunk in self._records)
        return min(self.structure.size, MIN_EDGE_LIMIT + EDGES_PER_BYTE * size)

    def state(self, record: int = -1) -> WiringState:
        """The wiring at a record; negative numbers count from the end, as in a list."""
        if not -len(self) <= record < len(self):
            raise WiringError(f"record {record} is out of range: this history has {len(self)} records.")
        wanted = record % len(self)
        return next(state for i, state in enumerate(self.states()) if i == wanted)

    @cached_property
    def births(self) -> np.ndarray:
        """For each record, the number of edges that became real since the previous record."""
        return np.array([self._changes[i][0] for i in range(len(self))], int)

    @cached_property
    def deaths(self) -> np.ndarray:
        """For each record, the number of edges that are no longer real since the previous record."""
        return np.array([self._changes[i][1] for i in range(len(self))], int)

    @cached_property
    def _changes(self) -> list[tuple[int, int]]:
        """Births and deaths at each record."""
        changes, before, edges = [], 0, self.structure.edges
        for chunk, state in zip(self._records, self.states(), strict=True):
            born = int(np.count_nonzero(file_format.unpack_record(chunk).new < edges))
            changes.append((born, before + born - len(state)))
            before = len(state)
        return changes

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps at which a value was noted, and the values."""
        found = [(step, values[name]) for step, values in self.notes if name in values]
        return np.array([step for step, _ in found], int), np.array([value for _, value in found], float)

    def curves(self) -> list[str]:
        """The names of the values to draw over training: accuracy and loss first, then others that were noted."""
        known = {name: None for _, values in self.notes for name in values if name != "test_loss"}
        return [name for name in ("accuracy", "loss") if name in known] + [
            name for name in known if name not in ("accuracy", "loss")
        ]

    def until(self, step: int) -> History:
        """The part of the history up to a step."""
        kept = [
            c
            for c in self.chunks
            if (file_format.unpack_json(c)[0] if c.kind == file_format.NOTE else file_format.step_of(c)) <= step
        ]
        part = History(self.structure, self.about, kept)
        part.path = self.path
        return part

    def thinned(self, records: int) -> History:
        """The history with fewer records, for a smaller file: the first, the last, and some evenly between them.

        Edges that came and went between two of these are not in it. Notes are kept.

        Args:
            records: the most records that are kept, at least 1; of one, the last is kept.
        """
        if not is_int(records) or records < 1:
            raise WiringError(f"records must be an integer of at least 1, got {brief(records)}.")
        if records >= len(self):
            return self
        chosen = {round(i * (len(self) - 1) / max(records - 1, 1)) for i in range(records)} if records > 1 else set()
        chosen.add(len(self) - 1)
        before, kept = np.zeros(self.structure.size, np.int8), []
        for i, state in enumerate(self.states()):
            if i in chosen:
                after = state.all_codes()
                kept.append(file_format.pack_record(state.step, before, after))
                before = after
        notes = [chunk for chunk in self.chunks if chunk.kind == file_format.NOTE]
        both = [(file_format.step_of(c), 0, c) for c in kept] + [(self.notes[i][0], 1, c) for i, c in enumerate(notes)]
        thin = History(self.structure, self.about, [c for *_, c in sorted(both, key=lambda one: one[:2])])
        thin.path = self.path
        return thin

    def sound(self, step: int) -> tuple[History, str | None]:
        """The part up to a step that can be replayed, and what is wrong with what follows, if anything is.

        Every chunk of a file may be whole and still not follow the one before it, as when two processes wrote it.
        """
        kept = History(self.structure, self.about)
        state, limit = self._before_first(), self._edge_limit()
        for chunk in self.chunks:
            is_note = chunk.kind == file_format.NOTE
            at = int(file_format.unpack_json(chunk)[0]) if is_note else file_format.step_of(chunk)
            if at > step:
                return kept, None
            try:
                if at < state.step + (not is_note):
                    raise ValueError("it does not come after the record before it")
                state = state if is_note else state.then(file_format.unpack_record(chunk, state.size, limit))
            except ValueError as error:
                return kept, f"{'a note' if is_note else f'record {len(kept) + 1}'} is wrong: {error}"
            kept.add(chunk)
        return kept, self.damage

    def head(self) -> file_format.Chunk:
        """The first chunk of a file: the structure and the metadata."""
        return file_format.pack_json(file_format.HEAD, {"structure": self.structure.to_json(), "about": self.about})

    def to_bytes(self) -> bytes:
        """The content of a file that holds this history."""
        return b"".join([file_format.MAGIC, *(chunk.framed() for chunk in (self.head(), *self.chunks))])

    def save(self, path: str | Path) -> Path:
        """Write the history to a file, atomically."""
        try:
            with whole_file(check_file(path)) as part:
                part.write_bytes(self.to_bytes())
        except OSError as error:
            raise WiringError(
                f"cannot write the history to {path}: {error.strerror}. Free some disk space or choose another path."
            ) from error
        return Path(path)

    @classmethod
    def load(cls, path: str | Path, *, whole: bool = True) -> History:
        """Read a history from a file.

        Args:
            path: the file.
            whole: whether to raise if the file is damaged. If False, the intact part is loaded, and `damage` describes
                what is wrong with the rest.
        """
        path = check_path(path)
        chunks, damage = file_format.read_chunks(path)
        try:
            if not chunks or chunks[0].kind != file_format.HEAD:
                raise ValueError("the head is missing" if damage is None else damage)
            head = file_format.unpack_json(chunks[0])
            structure = WiringStructure.from_json(head["structure"])
            check_structure(structure)
            history = cls(structure, head["about"], chunks[1:])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise WiringError(
                f"{path} is damaged and cannot be read: {str(error)[:200]}. Restore it from a backup, or train again."
            ) from error
        history.path, history.damage = path, damage
        if damage is not None and whole:
            good = f"up to step {history.steps[-1]:,}" if len(history) else "before the first record"
            raise WiringError(
                f"{path} is damaged: {damage}. It is intact {good}. Load that part with History.load(path, "
                "whole=False); resuming the run with --resume repairs the file."
            )
        return history

    def __repr__(self) -> str:
        last = f"to step {self.steps[-1]:,}" if len(self) else "yet"
        size = f"{self.structure.nodes:,} nodes, {self.structure.edges:,} possible edges"
        return f"<History: {len(self)} records {last}, {size}>"
