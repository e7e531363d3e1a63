"""README and docs: Python blocks run, links and figures are right, and the site builds."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wirings
from wirings.graph.nodes import base as node_registry
from wirings.rules import registry as rule_registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.glob("**/*.md")])
names = [str(page.relative_to(ROOT)) for page in PAGES]
WITHOUT_CODE = {"CONTRIBUTING.md", "CHANGELOG.md"} | {
    f"docs/{name}.md" for name in ("costs", "design", "play", "reliability", "results", "security", "where")
}


@pytest.fixture
def registry() -> Iterator[None]:
    """Pages may register rules and nodes of their own: forget them afterwards."""
    registries: list[dict[str, Any]] = [rule_registry._registry, node_registry._registry]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.parametrize("page", PAGES, ids=names)
@pytest.mark.usefixtures("registry")
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))  # one namespace for a page, as a reader would type it
    runpy.run_path(str(script))
    name = str(page.relative_to(ROOT))
    assert blocks or name in WITHOUT_CODE or name.startswith("docs/api/")


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_rule_has_a_row() -> None:
    text = (DOCS / "rules.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    assert rows == set(rule_registry.names())


def test_figures_match_the_records() -> None:
    readme = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    for page in readme["PAGES"]:
        assert readme["rendered"](page) == (ROOT / page).read_text(), "run python -m benchmarks.readme"


@pytest.mark.parametrize("page", ["where.md", "design.md", "tutorials/training_step.md"])
def test_paths_in_the_code_exist(page: str) -> None:
    paths = re.findall(r"`((?:wirings|tests|benchmarks|examples|docs|tools)/[\w/.*-]+)`", (DOCS / page).read_text())
    assert len(paths) > 5
    for path in paths:
        assert list(ROOT.glob(path)), f"{page} names {path}, which does not exist"


def test_the_api_overview_is_complete() -> None:
    overview = (DOCS / "api" / "index.md").read_text()
    assert {name for name in wirings.__all__ if f"`{name}`" not in overview} == set()


def build() -> dict[str, object]:
    return runpy.run_path(str(DOCS / "build.py"))


def test_every_page_is_in_the_navigation() -> None:
    assert build()["missing_from_navigation"]() == []  # type: ignore[operator]


def test_headings_are_the_titles_in_the_navigation() -> None:
    assert build()["other_titles"]() == []  # type: ignore[operator]


def test_the_check_finds_broken_links(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#there">b</a><a href="#top">up</a><a href="https://example.org">out</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there">see [C][wirings.C]</p>')
    found = build()["check"](tmp_path)  # type: ignore[operator]
    assert found == ["b.html: the reference [C][wirings.C] was not resolved"]

    (tmp_path / "b.html").write_text('<a href="c.html">c</a><a href="a.html#nowhere">a</a><code>x[0][1]</code>')
    (tmp_path / "a.html").write_text('<img src="https://example.org/x.png"><script src="//example.org/x.js"></script>')
    assert build()["check"](tmp_path) == [  # type: ignore[operator]
        "a.html: loads https://example.org/x.png from another host",
        "a.html: loads //example.org/x.js from another host",
        "b.html: c.html does not exist",
        "b.html: a.html#nowhere has no such anchor",
    ]


@pytest.mark.slow
def test_the_site_builds() -> None:
    built = subprocess.run([sys.executable, DOCS / "build.py"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "build" / "site"
    assert (site / "api" / "rules.html").exists()
    for page in site.rglob("*.html"):
        absolute = re.findall(r"""\b(?:href|src)=["']?/[^"' >]*""", page.read_text())
        assert absolute == [], f"{page.relative_to(site)} works at the root of a host only"
