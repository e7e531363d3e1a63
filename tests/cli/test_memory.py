"""How the command line ends: out of memory, interrupted early, or with characters that the output does not have."""

import io
import sys
from pathlib import Path

import pytest
import torch

from wirings.__main__ import main
from wirings.utils.memory import is_out_of_memory


def test_images_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["wirings", "compact", "table1/static-dnw", "--image-size", "10000000"])
    with pytest.raises(SystemExit, match=r"^Error: there is not enough memory\. Use smaller batches or images"):
        main()


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("wirings.__main__._run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main()


def test_early_interrupts_end_with_their_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wirings.__main__._run", interrupted)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


def test_characters_that_the_output_cannot_encode_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252"))
    monkeypatch.setattr(sys, "argv", ["wirings", "show", "table1/static-dnw"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    sys.stdout.flush()
    assert rb"\u2588" in written.getvalue()  # a block of a curve


def test_errors_of_allocators() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(ImportError("x.so: failed to map segment from shared object"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert is_out_of_memory(RuntimeError("can't start new thread"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.parametrize(("left", "ends"), [(2**20, SystemExit), (2**40, SystemError)])
def test_failures_of_python_itself_are_a_lack_of_memory_if_little_is_left(
    monkeypatch: pytest.MonkeyPatch, left: int, ends: type[BaseException]
) -> None:
    def failed() -> None:
        raise SystemError("returned NULL without setting an exception")

    monkeypatch.setattr("wirings.utils.memory.available_memory", lambda: left)
    monkeypatch.setattr("wirings.__main__._run", failed)
    with pytest.raises(ends, match="not enough memory" if ends is SystemExit else "returned NULL"):
        main()
