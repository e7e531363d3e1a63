"""A history of a wiring: what was real at every record, and numbers such as the loss beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wirings.errors import WiringError
from wirings.history import file_format
from wirings.history.quantize import decode
from wirings.history.structure import Structure, alive
from wirings.utils.files import whole_file


class State:
    """A wiring at one moment: its real edges in the order of their places, their strengths and steps of birth."""

    def __init__(
        self, structure: Structure, step: int, places: np.ndarray, codes: np.ndarray, born: np.ndarray
    ) -> None:
        self.structure, self.step = structure, step
        self._all = places, codes, born
        edges = int(np.searchsorted(places, structure.edges))
        self.places, self.codes, self.born = places[:edges], codes[:edges], born[:edges]

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        return self.structure.ends(self.places)

    @property
    def targets(self) -> np.ndarray:
        """The node that each edge leads to."""
        return self._ends[0]

    @property
    def sources(self) -> np.ndarray:
        """The node that each edge comes from."""
        return self._ends[1]

    @cached_property
    def weights(self) -> np.ndarray:
        """The edges' weights, to 6 %."""
        return decode(self.codes)

    def kernel(self, node: int) -> np.ndarray | None:
        """A node's kernel, to 6 %; None if it has none."""
        for kernels in self.structure.kernels:
            if node in kernels.nodes:
                size = int(np.prod(kernels.shape))
                first = kernels.start + kernels.nodes.index(node) * size
                at = int(np.searchsorted(self._all[0], first))
                return decode(self._all[1][at : at + size]).reshape(kernels.shape)
        return None

    def counts(self) -> np.ndarray:
        """The number of real edges of each layer."""
        bounds = [self.structure.layers[0].start, *(layer.stop for layer in self.structure.layers)]
        return np.diff(np.searchsorted(self.places, bounds))

    def degrees(self) -> tuple[np.ndarray, np.ndarray]:
        """For each node the number of real edges that lead to it, and of those that leave it."""
        nodes = self.structure.nodes
        return np.bincount(self.targets, minlength=nodes), np.bincount(self.sources, minlength=nodes)

    @cached_property
    def alive(self) -> np.ndarray:
        """The nodes that are not dead; where paths across layers are a guess, those that have a real edge."""
        structure = self.structure
        if not structure.sure:
            into, out_of = self.degrees()
            return (into + out_of) > 0
        return alive(structure, self.sources, self.targets)

    def then(self, record: file_format.Difference) -> State:
        """The state after one more record; raises ValueError if the record does not follow this state."""
        places, codes, born = self._all
        if len(record.delta) != len(places):
            raise ValueError(f"it changes {len(record.delta)} edges of {len(places)}")
        after = (codes.view(np.uint8) + record.delta).view(np.int8)
        kept = after != 0
        places, after, born = places[kept], after[kept], born[kept]
        if len(record.new):
            where = np.searchsorted(places, record.new)
            twice = places[np.minimum(where, len(places) - 1)] == record.new if len(places) else np.zeros(1, bool)
            if (np.diff(record.new) <= 0).any() or record.new[-1] >= self.structure.places or twice.any():
                raise ValueError("its new edges are none")
            places, after = np.insert(places, where, record.new), np.insert(after, where, record.codes)
            born = np.insert(born, where, record.step)
        return State(self.structure, record.step, places, after, born)


class History:
    """What a wiring was, record by record. `Wiring.history` records one; `load` reads one from a file.

    Args:
        structure: what the edges join.
        about: whatever JSON can hold, such as the recipe's name.
        chunks: the records and notes.
    """

    def __init__(
        self, structure: Structure, about: Mapping[str, Any], chunks: Sequence[file_format.Chunk] = ()
    ) -> None:
        self.structure, self.about = structure, dict(about)
        self.chunks: list[file_format.Chunk] = []
        self.steps: list[int] = []
        """The step of each record."""
        self.notes: list[tuple[int, dict[str, float]]] = []
        """Numbers that belong to a step, such as the loss."""
        self.damage: str | None = None
        """What is wrong with the rest of the file, if only its good part was loaded."""
        self._records: list[file_format.Chunk] = []
        for chunk in chunks:
            self.add(chunk)

    def add(self, chunk: file_format.Chunk) -> None:
        """One more record or note."""
        if chunk.kind == file_format.NOTE:
            step, values = file_format.unpack_json(chunk)
            self.notes.append((int(step), {str(name): float(value) for name, value in values.items()}))
        else:
            self.steps.append(file_format.step_of(chunk))
            self._records.append(chunk)
        self.chunks.append(chunk)
        for made in ("births", "deaths", "_changes"):
            self.__dict__.pop(made, None)

    def __len__(self) -> int:
        return len(self.steps)

    def states(self) -> Iterator[State]:
        """The wiring at every record, one after the other."""
        empty = np.empty(0, np.int64)
        state = State(self.structure, -1, empty, np.empty(0, np.int8), empty)
        for i, chunk in enumerate(self._records):
            try:
                state = state.then(file_format.read_difference(chunk))
            except ValueError as error:
                raise WiringError(
                    f"record {i + 1} of this history is damaged: {error}. `until` takes what is before it."
                ) from error
            yield state

    def state(self, record: int = -1) -> State:
        """The wiring at a record, counted as in a list."""
        if not -len(self) <= record < len(self):
            raise WiringError(f"there is no record {record}: this history has {len(self)} of them.")
        wanted = record % len(self)
        return next(state for i, state in enumerate(self.states()) if i == wanted)

    @cached_property
    def births(self) -> np.ndarray:
        """For each record the edges that are real and were not at the record before."""
        return np.array([self._changes[i][0] for i in range(len(self))], int)

    @cached_property
    def deaths(self) -> np.ndarray:
        """For each record the edges that were real at the record before and are not."""
        return np.array([self._changes[i][1] for i in range(len(self))], int)

    @cached_property
    def _changes(self) -> list[tuple[int, int]]:
        changes, before, edges = [], 0, self.structure.edges
        for chunk, state in zip(self._records, self.states(), strict=True):
            born = int(np.count_nonzero(file_format.read_difference(chunk).new < edges))
            changes.append((born, before + born - len(state)))
            before = len(state)
        return changes

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps at which a number was noted, and the numbers."""
        found = [(step, values[name]) for step, values in self.notes if name in values]
        return np.array([step for step, _ in found], int), np.array([value for _, value in found], float)

    def until(self, step: int) -> History:
        """The part of the history up to a step."""
        kept = [
            c
            for c in self.chunks
            if (file_format.unpack_json(c)[0] if c.kind == file_format.NOTE else file_format.step_of(c)) <= step
        ]
        return History(self.structure, self.about, kept)

    def sound(self, step: int) -> tuple[History, str | None]:
        """The part up to a step that can be replayed, and what is wrong with what follows, if anything is.

        Every chunk of a file may be whole and still not follow the one before it, as when two processes wrote it.
        """
        kept = History(self.structure, self.about)
        empty = np.empty(0, np.int64)
        state = State(self.structure, -1, empty, np.empty(0, np.int8), empty)
        for chunk in self.chunks:
            is_note = chunk.kind == file_format.NOTE
            at = int(file_format.unpack_json(chunk)[0]) if is_note else file_format.step_of(chunk)
            if at > step:
                return kept, None
            try:
                if at < state.step + (not is_note):
                    raise ValueError("it does not come after the record before it")
                state = state if is_note else state.then(file_format.read_difference(chunk))
            except ValueError as error:
                return kept, f"{'a note' if is_note else f'record {len(kept) + 1}'} is wrong: {error}"
            kept.add(chunk)
        return kept, self.damage

    def head(self) -> file_format.Chunk:
        return file_format.pack_json(file_format.HEAD, {"structure": self.structure.to_json(), "about": self.about})

    def to_bytes(self) -> bytes:
        """The history as a file holds it."""
        return b"".join([file_format.MAGIC, *(chunk.framed() for chunk in (self.head(), *self.chunks))])

    def save(self, path: str | Path) -> Path:
        """Write it to a file, whole or not at all."""
        try:
            with whole_file(Path(path)) as part:
                part.write_bytes(self.to_bytes())
        except OSError as error:
            raise WiringError(
                f"the history could not be written to {path}: {error.strerror}. Make room, or give another path."
            ) from error
        return Path(path)

    @classmethod
    def load(cls, path: str | Path, *, whole: bool = True) -> History:
        """Read a history from a file. With ``whole=False`` the good part of a damaged one will do."""
        path = Path(path)
        chunks, damage = file_format.read(path)
        try:
            if not chunks or chunks[0].kind != file_format.HEAD:
                raise ValueError("it has no head" if damage is None else damage)
            head = file_format.unpack_json(chunks[0])
            history = cls(Structure.from_json(head["structure"]), head["about"], chunks[1:])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise WiringError(
                f"{path} is damaged, and nothing of it can be read: {error}. Restore it, or train again."
            ) from error
        history.damage = damage
        if damage is not None and whole:
            good = f"up to step {history.steps[-1]:,}" if len(history) else "before the first record"
            raise WiringError(
                f"{path} is damaged: {damage}. It is good {good}: History.load(…, whole=False) takes that part; a run "
                "that goes on with --resume mends it."
            )
        return history

    def __repr__(self) -> str:
        last = f"to step {self.steps[-1]:,}" if len(self) else "yet"
        size = f"{self.structure.nodes:,} nodes, {self.structure.edges:,} possible edges"
        return f"<History: {len(self)} records {last}, {size}>"
