"""The layout of the package: imports go one way, names are unique, files are short."""

import ast
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tools.check_imports import LAYERS, check, layer_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "wirings"
MAX_LINES = 400


def test_imports_go_one_way() -> None:
    assert check(PACKAGE) == []


def test_every_package_has_a_layer() -> None:
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/__init__.py")}
    named = {name.partition(".")[0] for names in LAYERS for name in names}
    assert {str(folder) for folder in folders} <= named


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        ("selection/planted.py", "from wirings.wire.targets import find", "selection must not import wire.targets"),
        ("rules/planted.py", "def f():\n    from wirings import graph", "rules must not import graph"),
        ("train/data/planted.py", "import wirings.cli.app", "train.data must not import cli.app"),
        ("graph/planted.py", "from wirings.rules.set import _planted", "_planted is private to rules"),
        ("graph/planted.py", "from wirings.rules import set\nset._planted()", "_planted is private to rules"),
        ("utils/planted.py", "from wirings import wire_", "utils must not import the root"),
        ("selection/planted.py", "from ..train import recipes", "selection must not import the root"),
    ],
)
def test_planted_violations_are_found(module: str, line: str, message: str, tmp_path: Path) -> None:
    package = tmp_path / "wirings"
    shutil.copytree(
        PACKAGE, package, ignore=shutil.ignore_patterns("*.npz", "*.safetensors", "*.wirings", "__pycache__")
    )
    (package / module).write_text(line + "\n")
    assert any(message in found for found in check(package))
    done = subprocess.run(
        [sys.executable, "-m", "tools.check_imports", str(package)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert message in done.stdout


def test_imports_for_annotations_are_allowed(tmp_path: Path) -> None:
    package = tmp_path / "wirings"
    (package / "utils").mkdir(parents=True)
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from wirings.wire.handle import Wiring\n"
    (package / "utils" / "planted.py").write_text(text)
    assert check(package) == []


def test_layer_of_a_module() -> None:
    assert layer_of("train.data.cifar10") == "train.data"
    assert layer_of("train.loop") == "train"
    assert layer_of("") == ""


def test_the_root_has_few_entries() -> None:
    known = {"__init__.py", "__main__.py", "errors.py", "version.py", "py.typed", "__pycache__"}
    assert len({path.name for path in PACKAGE.iterdir()} - known) <= 14


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_files_are_short() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if not path.name.endswith("_cuda.py")]
    assert {str(f.relative_to(PACKAGE)) for f in files if len(f.read_text().splitlines()) > MAX_LINES} == set()


def test_test_files_have_names_of_their_own() -> None:
    """Pytest imports them by name, so that of two in folders without ``__init__.py`` only one can be."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
