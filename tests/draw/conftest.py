"""A headless Chromium for the tests of the page, which are skipped if none is installed."""

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
        pytest.skip("Chromium is not installed; run `make browser`")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open the page of a history. Fails the test if the page logs to the console or requests anything but itself."""
    messages: list[str] = []
    requests: list[str] = []
    contexts: list[Any] = []

    def open_one(history: History, title: str = "a test", whole: bool = False, **options: Any) -> Any:
        path = write_page(history, tmp_path / "page.html", title, whole)
        options = {"viewport": {"width": 1100, "height": 700}, "reduced_motion": "no-preference", **options}
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function("() => window.wirings && window.wirings.drawn")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert messages == []
    assert all(url.startswith("file:") and url.endswith("/page.html") for url in requests), requests
    assert len(requests) == len(contexts)
