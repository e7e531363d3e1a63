"""Compiled code is loaded only if nobody but the user and root can have written it; damaged libraries are rebuilt."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from wirings.utils import compiler, trust
from wirings.utils.compiler import DamagedError, MissingError, Source
from wirings.utils.trust import UntrustedError, check_trusted_folder, open_trusted

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no owners and modes")
needs_compiler = pytest.mark.skipif(not compiler.compilers(""), reason="there is no C++ compiler")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
OTHER = 12345


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the user's own, beside the caches of these tests."""
    home = tmp_path / "home"
    home.mkdir(0o700)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return source_of(tmp_path / "source", "answer", 42)


def source_of(folder: Path, function: str, answer: int) -> Source:
    folder.mkdir()
    (folder / "answer.cpp").write_text(f'extern "C" int {function}() {{ return {answer}; }}\n')
    return Source("answers", folder, "answer.cpp")


def declared(library: compiler.ctypes.CDLL) -> compiler.ctypes.CDLL:
    library.answer.argtypes = []
    return library


def planted(tmp_path: Path, source: Source, cache: Path) -> Path:
    """A library in the cache that leaves a mark when it is loaded, under the name of the real one."""
    mark = tmp_path / "mark"
    code = tmp_path / "planted.cpp"
    code.write_text(
        "#include <cstdio>\n"
        f'__attribute__((constructor)) static void run() {{ fclose(fopen("{mark}", "w")); }}\n'
        'extern "C" int answer() { return -1; }\n'
    )
    (command, *_) = compiler.compilers("")
    folder = cache / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    part = tmp_path / "planted.so"
    subprocess.run([*command, *compiler.FLAGS, str(code), "-o", str(part)], check=True)
    stem = f"kernels-{source.key()}-{compiler.compiler_key(command)}"
    part.replace(folder / f"{stem}-{compiler._digest([part.read_bytes()])}.so")
    return mark


@needs_compiler
@pytest.mark.parametrize("which", ["cache", "cache/answers", "."])
def test_library_in_a_folder_of_everybody_is_not_loaded(
    which: str, source: Source, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "shared" / "cache"
    mark = planted(tmp_path, source, cache)
    (tmp_path / "shared" / which).chmod(0o777)
    for found in (compiler.compilers(""), []):
        monkeypatch.setattr(compiler, "compilers", lambda named, found=found: found)
        with pytest.warns(UserWarning, match=r"kept in .*home.* since other users may write to .*\(mode 777\)"):
            assert source.load("", cache, declared).answer() == 42
    assert not mark.exists(), "it was loaded"
    assert len(list((home / ".cache" / "wirings" / "answers").iterdir())) == 1


@needs_compiler
@needs_root
def test_library_of_another_user_is_not_loaded(source: Source, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    mark = planted(tmp_path, source, cache)
    os.chown(cache, OTHER, OTHER)
    with pytest.warns(UserWarning, match=rf"{cache} belongs to another user \({OTHER}\)"):
        assert source.load("", cache, declared).answer() == 42
    os.chown(cache, 0, 0)
    for library in (cache / "answers").iterdir():  # such as one that was there before the folder's mode was fixed
        os.chown(library, OTHER, OTHER)
    assert source.load("", cache, declared).answer() == 42
    assert not mark.exists(), "it was loaded"


@needs_compiler
def test_without_a_folder_of_the_users_own(source: Source, tmp_path: Path, home: Path) -> None:
    home.chmod(0o777)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(MissingError, match="Set WIRINGS_CACHE to a folder in which only you may write"):
        source.load("", tmp_path / "cache", declared)
    assert not list((tmp_path / "cache").iterdir())


@needs_compiler
@pytest.mark.parametrize("size", [0, 1, 100, 4096, -1])
def test_truncated_library_is_rebuilt(size: int, source: Source, tmp_path: Path) -> None:
    """In another process: a truncated library may end it with SIGBUS."""
    cache = tmp_path / "cache"
    library = source.built(compiler.compilers(""), cache / "answers")
    whole = library.read_bytes()
    library.write_bytes(whole[:size])
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from wirings.utils.compiler import Source\n"
        "source, cache = map(Path, sys.argv[1:])\n"
        "assert Source('answers', source, 'answer.cpp').load('', cache).answer() == 42\n"
    )
    command = [sys.executable, "-c", script, str(source.folder), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert library.read_bytes() == whole


@needs_compiler
def test_library_without_our_functions_is_rebuilt(source: Source, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    foreign = source_of(tmp_path / "foreign", "question", 0).built(compiler.compilers(""), tmp_path / "built")
    (own,) = [source.built(compiler.compilers(""), cache / "answers")]
    stem, digest = own.stem.rpartition("-")[0], foreign.stem.rpartition("-")[2]
    own.unlink()
    foreign.replace(own.with_name(f"{stem}-{digest}.so"))
    with pytest.raises(DamagedError, match="is not a library of wirings"):
        compiler.opened(own.with_name(f"{stem}-{digest}.so"), declared)
    assert source.load("", cache, declared).answer() == 42
    assert [path.name for path in (cache / "answers").iterdir()] == [own.name]


@needs_compiler
def test_two_libraries_are_not_confused(source: Source, tmp_path: Path) -> None:
    """Both are opened with the same descriptor number, by which the loader must not take them for one."""
    other = source_of(tmp_path / "other", "answer", 43)
    assert source.load("", tmp_path / "cache").answer() == 42
    assert other.load("", tmp_path / "cache").answer() == 43


@needs_compiler
def test_what_is_checked_is_what_is_loaded(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = source.built(compiler.compilers(""), tmp_path / "cache" / "answers")
    other = source_of(tmp_path / "other", "answer", 43).built(compiler.compilers(""), tmp_path / "cache" / "answers")
    name_of = compiler._name_of

    def replaced(file: int, path: Path) -> str:
        other.replace(path)  # after the check, before it is loaded
        return name_of(file, path)

    monkeypatch.setattr(compiler, "_name_of", replaced)
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("only Linux names open files")
    assert compiler.opened(library).answer() == 42


@needs_compiler
def test_any_umask(source: Source, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert source.load("", tmp_path / "cache").answer() == 42
    finally:
        os.umask(before)
    for path in (tmp_path / "cache").rglob("*"):
        assert not path.stat().st_mode & 0o022, path


def test_sticky_folders(tmp_path: Path) -> None:
    """Entries in a folder like /tmp are safe if they are the user's own, but such a folder is not a cache."""
    sticky = tmp_path / "sticky"
    (sticky / "own").mkdir(parents=True)
    sticky.chmod(0o1777)
    check_trusted_folder(sticky / "own")
    check_trusted_folder(sticky / "missing" / "cache")
    with pytest.raises(UntrustedError, match="sticky"):
        check_trusted_folder(sticky)
    sticky.chmod(0o777)
    with pytest.raises(UntrustedError, match="sticky"):
        check_trusted_folder(sticky / "own")


def test_folders_above_the_home_do_not_matter(tmp_path: Path, home: Path) -> None:
    tmp_path.chmod(0o777)
    try:
        check_trusted_folder(home / "cache")
        with pytest.raises(UntrustedError, match="other users may write"):
            check_trusted_folder(tmp_path / "cache")
    finally:
        tmp_path.chmod(0o700)


def test_private_group_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o775)
    monkeypatch.setattr(trust, "_is_alone_in_group", lambda path, info: True)
    check_trusted_folder(folder)
    monkeypatch.setattr(trust, "_is_alone_in_group", lambda path, info: False)
    with pytest.raises(UntrustedError, match="mode 775"):
        check_trusted_folder(folder)


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("code")
    os.close(open_trusted(tmp_path / "file"))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="symbolic links"):
        open_trusted(tmp_path / "link")
    with pytest.raises(UntrustedError, match="is not a file"):
        open_trusted(tmp_path / "pipe")
    (tmp_path / "file").chmod(stat.S_IRUSR | stat.S_IWOTH)
    with pytest.raises(UntrustedError, match="other users may write"):
        open_trusted(tmp_path / "file")


def test_a_link_that_changes_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "library").write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    checked = trust.check_trusted_folder

    def check(folder: Path) -> Path:
        found = checked(folder)
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(tmp_path / "other")
        return found

    monkeypatch.setattr(trust, "check_trusted_folder", check)
    with os.fdopen(trust.open_trusted(tmp_path / "link" / "library")) as file:
        assert file.read() == "own"
