"""Text from outside, such as names of layers and titles in files, made safe to print."""

import html
import re


def printable(text: str, keep: str = "") -> str:
    r"""Return ``text`` with control characters escaped, so that a terminal shows them instead of obeying them.

    Args:
        text: any text.
        keep: control characters to leave as they are, such as ``"\n\t"``.

    >>> printable("conv1 \x1b[2J\n")
    'conv1 \\x1b[2J\\n'
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


MOST_BITS = 14_000
"""The largest integers that `brief` writes in digits: Python refuses to convert very large ones."""


def brief(value: object) -> str:
    """How messages show what they got: tensors and arrays by their shape, and the rest without its middle.

    >>> import torch
    >>> brief(torch.zeros(100, 3)), brief("conv1"), brief(0.5)
    ('a Tensor of shape (100, 3)', "'conv1'", '0.5')
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"an integer of {value.bit_length():,} bits"
    return shortened(repr(value), 100)


def shortened(text: str, most: int = 500) -> str:
    """A text without its middle if it is longer than ``most`` characters, as a message that quotes a file may be.

    >>> shortened("1234567890", most=6)
    '123 … 890'
    """
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-(most // 2) :]}"


LONGEST = 200
"""The most characters of a text in Markdown."""


def as_markdown(text: object) -> str:
    r"""Any text as Markdown that shows it: no markup, no links, no control characters, on one line.

    >>> as_markdown("a|b <b> [x](http://y)")
    'a\\|b &lt;b&gt; \\[x\\](http\\://y)'
    """
    shown = html.escape(printable(shortened(str(text), LONGEST)), quote=False)
    return re.sub(r"([\\`*_{}\[\]#|~$:@]|(?<=www)\.)", r"\\\1", shown, flags=re.IGNORECASE)
