"""A Griffe extension that renders doctests in docstrings as code, in any section."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *\n| *$).*)*", re.MULTILINE)
HEADING = re.compile(r"Examples?:\s*$")


class Doctests(griffe.Extension):
    """Put a code fence around every doctest that is not in an ``Examples:`` section, which Griffe renders itself."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    if HEADING.search(match.string[: match.start()].rstrip()):
        return match[0]
    return f"\n{match['indent']}```pycon\n{match[0]}\n{match['indent']}```\n"
