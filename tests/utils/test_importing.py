"""Functions named as package.module:function: found in the current directory, and errors that say what is wrong."""

import sys
from pathlib import Path

import pytest

from wirings import WiringError
from wirings.utils.importing import check_import_path, import_function, is_import_path


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])


def test_imports_from_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "things_here").mkdir()
    (tmp_path / "things_here" / "models.py").write_text("def net():\n    return 3\n")
    assert import_function("things_here.models:net", "model.name")() == 3
    assert sys.path[0] == str(tmp_path)
    import_function("things_here.models:net", "model.name")
    assert sys.path.count(str(tmp_path)) == 1


def test_tells_names_from_import_paths() -> None:
    assert not is_import_path("tiny_static")
    assert is_import_path("a.b:c")
    check_import_path("a.b:c", "model.name")


@pytest.mark.parametrize("path", [":net", "models:", "a b:net", "models:net()", "a..b:c", "a:b:c", "../x:net", "1a:b"])
def test_rejects_malformed_paths(path: str) -> None:
    with pytest.raises(WiringError, match=r"model.name must be a name or package.module:function, got "):
        import_function(path, "model.name")


def test_errors_say_what_failed(tmp_path: Path) -> None:
    (tmp_path / "broken_here.py").write_text("import no_such_dependency\n")
    (tmp_path / "raises_here.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "fine_here.py").write_text("def network():\n    pass\n\nNUMBER = 3\n")
    for path, message in [
        ("absent_here:net", r"data.name is 'absent_here:net', but there is no module 'absent_here' in "),
        ("fine_here.more:net", "there is no module 'fine_here.more' in "),
        (
            "broken_here:net",
            "importing 'broken_here' failed: ModuleNotFoundError: No module named 'no_such",
        ),
        ("raises_here:net", "importing 'raises_here' failed: RuntimeError: not today"),
        ("fine_here:netwrok", "has no function 'netwrok'. Did you mean fine_here:network"),
        ("fine_here:NUMBER", "has no function 'NUMBER'"),
    ]:
        with pytest.raises(WiringError, match=message):
            import_function(path, "data.name")


@pytest.mark.parametrize("path", ["torch.hub:load", "subprocess:run", "builtins:exec", "os:system", "runpy:run_path"])
def test_settings_cannot_call_functions_of_python_and_pytorch(path: str) -> None:
    """With options such as repo_or_dir they would run any code."""
    with pytest.raises(WiringError, match="must name a function of your own"):
        import_function(path, "model.name")


def test_own_modules_may_have_names_of_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "antigravity.py").write_text("def network():\n    return 3\n")
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    assert import_function("antigravity:network", "model.name")() == 3
    del sys.modules["antigravity"]
