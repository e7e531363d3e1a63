"""A real Chromium, without a window, for the tests of the page; they are skipped where there is none."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wirings.draw.html import write_page
from wirings.history import History

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here; `make browser` installs one where it can")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open the page of a history. At the end of the test: no error in the console, no request but for the page."""
    said: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def open_one(history: History, title: str = "a test", whole: bool = False, **options: Any) -> Any:
        path = write_page(history, tmp_path / "page.html", title, whole)
        options = {"viewport": {"width": 1100, "height": 700}, "reduced_motion": "no-preference", **options}
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function("() => window.wirings && window.wirings.drawn")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith("file:") and url.endswith("/page.html") for url in asked), asked
    assert len(asked) == len(contexts)
