"""README and docs: every Python block runs, every link within leads somewhere, every figure is a record's."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from wirings import rules

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
names = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture
def registry() -> Iterator[None]:
    """Pages may register rules of their own: forget them afterwards."""
    before = dict(rules.registry._registry)
    yield
    rules.registry._registry.clear()
    rules.registry._registry.update(before)


@pytest.mark.parametrize("page", PAGES, ids=names)
@pytest.mark.usefixtures("registry")
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))  # one namespace a page, as a reader would type it
    runpy.run_path(str(script))
    assert blocks or page.name in ("CONTRIBUTING.md", "CHANGELOG.md", "design.md", "results.md")


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_rule_has_a_row() -> None:
    text = (ROOT / "docs" / "rules.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    assert rows == set(rules.names())


def test_figures_are_the_records() -> None:
    readme = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    for page in readme["PAGES"]:
        assert readme["rendered"](page) == (ROOT / page).read_text(), "run python -m benchmarks.readme"
