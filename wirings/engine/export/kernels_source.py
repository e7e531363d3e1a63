"""The kernels as one piece of C++ source code, without the files that they are divided into."""

from __future__ import annotations

import re
from pathlib import Path

from wirings.engine.build import SOURCE

OWN = Path(__file__).parent / "source"
_CONDITIONAL = re.compile(r"^#if [^\n]*\n(?:#include <[^\n]*\n)+#endif\n", re.MULTILINE)
"""Headers that only some processors have."""


def kernels_source() -> tuple[str, str]:
    """The directives that include headers of the system, which belong outside of any namespace, and the kernels."""
    headers: dict[str, None] = {}
    seen: set[Path] = set()
    code = _inlined(SOURCE.folder / SOURCE.main, headers, seen) + _inlined(OWN / "exported_network.h", headers, seen)
    code = re.sub(r'^(extern "C" \{|\}  // extern "C")\n', "", code, flags=re.MULTILINE)  # names stay in the namespace
    return "".join(headers), re.sub(r"\n{3,}", "\n\n", code)


def _inlined(path: Path, headers: dict[str, None], seen: set[Path]) -> str:
    if path in seen:
        return ""
    seen.add(path)
    text = path.read_text(encoding="utf-8").replace("#pragma once\n", "")
    for group in _CONDITIONAL.findall(text):
        headers[group] = None
        text = text.replace(group, "")
    lines = []
    for line in text.splitlines(keepends=True):
        if own := re.match(r'#include "(.+)"', line):
            lines.append(_inlined(path.parent / own[1], headers, seen))
        elif system := re.match(r"#include <.+?>", line):
            headers[f"{system[0]}\n"] = None
        else:
            lines.append(line)
    return f"\n// ---- {path.name} ----\n\n{''.join(lines)}"
