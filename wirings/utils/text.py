"""Text from outside, such as names of layers and titles in files, made safe to print."""


def printable(text: str) -> str:
    r"""Escape characters that do not print, such as the control codes that move a terminal's cursor.

    >>> printable("conv1 \x1b[2J\n")
    'conv1 \\x1b[2J\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
