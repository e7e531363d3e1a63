"""Text from outside, such as names of layers and titles in files, made safe to print."""


def printable(text: str, keep: str = "") -> str:
    r"""Return ``text`` with control characters escaped, so that a terminal shows them instead of obeying them.

    Args:
        text: any text.
        keep: control characters to leave as they are, such as ``"\n\t"``.

    >>> printable("conv1 \x1b[2J\n")
    'conv1 \\x1b[2J\\n'
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
