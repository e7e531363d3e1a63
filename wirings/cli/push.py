"""``wirings push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wirings.cli.options import BestOption, RunArgument, check_path
from wirings.utils.console import echo


def push(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the Hub, such as user/network.")],
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--result",
            help="Folder of another finished run of the recipe, or its result.json, for the model card. Repeatable.",
            callback=check_path,
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is new.")] = False,
    best: BestOption = False,
) -> None:
    """Upload a trained run to the Hugging Face Hub, with a model card. Log in first: hf auth login."""
    from wirings.train import hub

    echo(f"wrote {hub.push_to_hub(run, name, results=results or [], private=private or None, best=best)}")
