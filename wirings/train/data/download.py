"""Download a file."""

from __future__ import annotations

import contextlib
import http.client
import urllib.request
from collections.abc import Iterator

TIMEOUT = 30.0
"""Seconds without an answer after which a download is aborted."""


class UnreachableError(Exception):
    """A source cannot be reached from here; the next one may be."""


def download(url: str) -> bytes:
    """Return the contents of a file on the web."""
    return b"".join(download_chunks(url))


def download_chunks(url: str) -> Iterator[bytes]:
    """Yield the contents of a file on the web, chunk by chunk."""
    with _network("could not be reached"):
        answer = urllib.request.urlopen(url, timeout=TIMEOUT)
    with answer:
        while chunk := _receive(answer):
            yield chunk


def _receive(answer: http.client.HTTPResponse) -> bytes:
    with _network("the download was interrupted"):
        return answer.read(2**20)


@contextlib.contextmanager
def _network(what: str) -> Iterator[None]:
    """Tell network errors from disk errors, both of which are OSErrors."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"{what} ({error})") from error
