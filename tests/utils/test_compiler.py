"""Sources are compiled once, by the first compiler that works, and by one process at a time."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wirings.utils import compiler, locks
from wirings.utils.compiler import MissingError, Source

needs_compiler = pytest.mark.skipif(not compiler.compilers(""), reason="there is no C++ compiler")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    return Source("answers", folder, "answer.cpp")


def counting_compiler(folder: Path) -> Path:
    """A compiler that writes a line into a log, and takes a moment."""
    fake = folder / "fake"
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && exit\n'
        f'echo compiled >> "{folder / "log"}"\n'
        "sleep 0.5\n"
        'for last; do :; done\necho library > "$last"\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    return fake


@needs_compiler
def test_changed_source_is_compiled_again(source: Source, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert source.load("", cache).answer() == 42
    (source.folder / "answer.h").write_text("#define ANSWER 43\n")
    assert source.load("", cache).answer() == 43
    assert len(list((cache / "answers").iterdir())) == 2, "the libraries, and no lock or part of a file"


def test_the_next_compiler_is_tried(source: Source, tmp_path: Path) -> None:
    working = counting_compiler(tmp_path)
    library = source.built([[str(tmp_path / "nothing")], [str(working)]], tmp_path / "cache" / "answers")
    assert library.read_text() == "library\n"


def test_all_failures_are_reported(source: Source, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"one could not be run.*two could not be run"):
        source.built([[str(tmp_path / "one")], [str(tmp_path / "two")]], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_processes_compile_once(source: Source, tmp_path: Path) -> None:
    fake = counting_compiler(tmp_path)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from wirings.utils.compiler import Source\n"
        "folder, fake, cache = map(Path, sys.argv[1:])\n"
        "print(Source('answers', folder, 'answer.cpp').built([[str(fake)]], cache))\n"
    )
    command = [sys.executable, "-c", script, str(source.folder), str(fake), str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    libraries = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(libraries) == 1
    assert (tmp_path / "log").read_text() == "compiled\n"


def test_threads_compile_once(source: Source, tmp_path: Path) -> None:
    fake = counting_compiler(tmp_path)
    threads = [threading.Thread(target=source.built, args=([[str(fake)]], tmp_path / "cache")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "log").read_text() == "compiled\n"


def test_a_lock_that_is_never_released_does_not_matter(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = counting_compiler(tmp_path)
    lock = locks.take(tmp_path / "cache" / "answers")
    monkeypatch.setattr(compiler, "SECONDS", 1.0)
    before = time.monotonic()
    assert source.built([[str(fake)]], tmp_path / "cache" / "answers").is_file()
    assert time.monotonic() - before >= 1.0
    lock.release()


@needs_compiler
def test_key_depends_on_compiler_and_processor(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    (command, *_) = compiler.compilers("")
    key = compiler.compiler_key(command)
    assert compiler.compiler_key(command) == key
    assert compiler.compiler_key([*command, "-DOTHER"]) != key
    own = source.key()
    assert source.key() == own
    monkeypatch.setattr(compiler, "processor", lambda: "another one")
    assert source.key() != own
