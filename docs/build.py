"""Build the documentation site into build/site, offline, and fail on any broken link: python docs/build.py

Three steps: copy docs/ to build/docs, with the files of the repository that its pages link to; render it with Zensical;
check every link, anchor and asset of the rendered pages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import yaml

ROOT = Path(__file__).parents[1]
DOCS, SOURCE, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "site"
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
OTHER_HOST = re.compile(r"(https?:)?//")
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[#)])")
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)


def main() -> None:
    problems = missing_from_navigation() + other_titles()
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    prepare()
    if subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT).returncode:
        sys.exit("Zensical found the problems above.")
    for name in ("404.html", "sitemap.xml"):  # they have to know the site's address, which is not fixed
        (SITE / name).unlink(missing_ok=True)
    problems += check(SITE)
    if problems:
        sys.exit("\n".join([f"The site has {len(problems)} problems:", *problems]))
    print(f"Open {SITE / 'index.html'}")


def missing_from_navigation() -> list[str]:
    """Pages that the navigation does not list, and entries without a page."""
    listed = {name for _, name in _navigation()}
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | {"contributing.md", "changelog.md"}
    return [f"mkdocs.yml: {name} is not in the navigation" for name in sorted(pages - listed)] + [
        f"mkdocs.yml: the navigation lists {name}, which does not exist" for name in sorted(listed - pages)
    ]


def other_titles() -> list[str]:
    """Pages whose heading is not their title in the navigation. The home page has a heading of its own."""
    problems, sources = [], {target: ROOT / name for name, target in OUTSIDE.items()}
    for title, name in _navigation():
        path = sources.get(name, DOCS / name)
        if name != "index.md" and path.exists() and f"# {title}" not in path.read_text(encoding="utf-8").splitlines():
            problems.append(f"mkdocs.yml: {name} is called {title!r} in the navigation, which is not its heading")
    return problems


def _navigation() -> list[tuple[str, str]]:
    """The title and the file of every page in the navigation."""
    return _leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def _leaves(nav: list[dict[str, Any]]) -> list[tuple[str, str]]:
    pages = []
    for title, value in (item for entry in nav for item in entry.items()):
        pages += [(title, value)] if isinstance(value, str) else _leaves(value)
    return pages


def prepare() -> None:
    """Copy docs/ to build/docs. Links to the rest of the repository lead to copies below build/docs/files."""
    shutil.copytree(DOCS, SOURCE, ignore=shutil.ignore_patterns("*.md", "*.py", "__pycache__"))
    for path in DOCS.rglob("*.md"):
        _copy_page(path, SOURCE / path.relative_to(DOCS))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        _copy_page(ROOT / name, SOURCE / OUTSIDE[name])


def _copy_page(path: Path, target: Path) -> None:
    def moved(match: re.Match[str]) -> str:
        found = (path.parent / unquote(match[1])).resolve()
        if "://" in match[1] or not found.exists():
            return match[1]  # a broken link fails the check of the rendered page
        return os.path.relpath(_in_site(found), target.parent)

    text = LINK.sub(moved, path.read_text(encoding="utf-8"))
    text = TABLE_ROW.sub(_table_row, text)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _table_row(row: re.Match[str]) -> str:
    """A row of a table in which lines break between figures, not within one."""
    return row[0].replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%").replace("; ", "; <wbr>")


def _in_site(path: Path) -> Path:
    """The path of a repository's file or folder in the site."""
    if path.is_relative_to(DOCS):
        return SOURCE / path.relative_to(DOCS)
    name = path.relative_to(ROOT)
    if str(name) in OUTSIDE:
        return SOURCE / OUTSIDE[str(name)]
    copy = SOURCE / "files" / name
    if path.is_dir():
        copy, folder = copy / "index.md", copy
        folder.mkdir(parents=True, exist_ok=True)
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith(("_", ".")))
        if not copy.exists():
            copy.write_text(f"# {name}\n")  # before its folders, which may link back
            lines = [f"- [{entry.name}]({os.path.relpath(_in_site(entry), folder)})" for entry in entries]
            copy.write_text("\n".join([f"# {name}", "", *lines, ""]))
    elif not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return copy


class Page(HTMLParser):
    """What a rendered page links to, what it loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text: list[str] = []
        self._code = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        self._code += tag in ("code", "pre", "script", "style")
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(found["href"])
        elif "src" in found:
            self.loaded.append(found["src"])

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.text.append(data)


def check(site: Path) -> list[str]:
    """Links to pages or anchors that do not exist, assets of other hosts, and references that were not resolved."""
    played = site / "pages"  # the playable pages are self-contained
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if not path.is_relative_to(played)}
    problems = []
    for path, page in pages.items():
        found = [f"loads {link} from another host" for link in page.loaded if OTHER_HOST.match(link)]
        for link in page.links + page.loaded:
            if OTHER_HOST.match(link) or link.startswith(("mailto:", "data:")):
                continue
            target, anchor = urldefrag(unquote(link))
            file = _file(site, path, target)
            if not file.exists():
                found.append(f"{link} does not exist")
            elif anchor and file in pages and anchor not in pages[file].ids:
                found.append(f"{link} has no such anchor")
        unresolved = re.findall(r"\[[^\]\n]*\]\[[\w.]*\]", "".join(page.text))
        found += [f"the reference {reference} was not resolved" for reference in unresolved]
        problems += [f"{path.relative_to(site)}: {problem}" for problem in found]
    return problems


def _file(site: Path, page: Path, target: str) -> Path:
    """The file that a link of a page leads to."""
    if not target:
        return page
    file = site / target[1:] if target.startswith("/") else (page.parent / target).resolve()
    return file / "index.html" if file.is_dir() else file


if __name__ == "__main__":
    main()
