"""The one error class for users' mistakes."""

import difflib
from collections.abc import Iterable

from wirings.utils.text import printable


class WiringError(ValueError):
    """A mistake in how the library was used.

    Its message says what was expected, what it got, where, and how to fix it. The caller's model is unchanged. Control
    characters in it, as names of files and layers may have them, are escaped.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(one, keep="\n\t") if isinstance(one, str) else one for one in args))


def unknown(kind: str, name: str, choices: Iterable[str], listed: Iterable[str] | None = None) -> WiringError:
    """The error for a name that does not exist: lists the nearest one and all the choices, or ``listed`` of these."""
    known = sorted(choices)
    name = name if len(name) <= 100 else f"{name[:60]}…"  # whatever was given as a name, such as a tensor
    spelt = {_letters(choice): choice for choice in known}
    near = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(_letters(name), spelt, n=1)
    hint = f" Did you mean {spelt.get(_letters(near[0]), near[0])!r}?" if near else ""
    return WiringError(f"unknown {kind} {name!r}.{hint} Choose from: {', '.join(known if listed is None else listed)}.")


def _letters(name: str) -> str:
    """A name without case and separators, so that ``"RigL"`` and ``"soft-threshold"`` find their rules."""
    return "".join(character for character in name.lower() if character.isalnum())
