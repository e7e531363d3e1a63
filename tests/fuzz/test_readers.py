"""What the fuzzer of readers counts as a mistake."""

from pathlib import Path

import pytest

from tests.fuzz.readers import KINDS, Kind, outcome, prepared
from tests.fuzz.runner import MISTAKE
from wirings import WiringError
from wirings.history import file_format


def test_a_damaged_history_that_is_read_is_a_prefix(tmp_path: Path) -> None:
    kind = KINDS["history"]
    path, _, intact = prepared(kind, tmp_path)
    chunks, _ = file_format.read_chunks(path)
    notes = [i for i, chunk in enumerate(chunks) if chunk.kind == file_format.NOTE]

    def outcome_of(kept: list[file_format.Chunk]) -> str:
        path.write_bytes(file_format.MAGIC + b"".join(chunk.framed() for chunk in kept))
        return outcome(kind, path, tmp_path, intact)

    assert outcome_of(chunks[:-2]) == "read"
    assert outcome_of([chunk for i, chunk in enumerate(chunks) if i != notes[0]]).startswith(MISTAKE)
    assert outcome_of([*chunks, chunks[notes[-1]]]).startswith(MISTAKE)
    changed = file_format.pack_json(file_format.NOTE, [0, {"loss": 2.0}])
    assert outcome_of([*chunks[: notes[0]], changed, *chunks[notes[0] + 1 :]]).startswith(MISTAKE)


@pytest.mark.parametrize(
    ("named", "folder", "expected"),
    [
        ("part/file.txt", False, "refused"),
        ("part/file.txt", True, "refused"),
        ("part", True, "refused"),
        ("part", False, MISTAKE),
        ("", True, MISTAKE),
    ],
)
def test_errors_must_name_what_is_read(named: str, folder: bool, expected: str, tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        raise WiringError(f"{tmp_path / named} is damaged.")

    kind = Kind("file.txt", lambda folder: None, read, lambda raw, draw: raw, folder=folder)
    assert outcome(kind, tmp_path / "part" / "file.txt", tmp_path / "part").startswith(expected)
