"""``wirings generate``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from wirings.cli.options import BestOption, DeviceOption, RunArgument
from wirings.utils.text import printable


def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.", show_default=False)] = "\n",
    length: Annotated[int, typer.Option("--length", help="Number of tokens to generate.")] = 500,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Above 1 for more varied text, 0 for the most likely tokens.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Draw from this many of the most likely tokens only.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    best: BestOption = False,
    device: DeviceOption = None,
) -> None:
    """Continue a text with a run that was trained on text, such as: wirings generate RUN --prompt "ROMEO:"."""
    from wirings.train.generate import generate as pieces

    found = pieces(
        run, prompt, length=length, temperature=temperature, top_k=top_k, seed=seed, best=best, device=device
    )
    _write(prompt.lstrip("\n"))
    for piece in found:
        _write(piece)
    _write("\n")


def _write(text: str) -> None:
    """Print text at once, without a line break, and with control characters escaped."""
    sys.stdout.write(printable(text, keep="\n\t"))
    sys.stdout.flush()
