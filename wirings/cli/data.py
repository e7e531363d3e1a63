"""``wirings data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wirings.cli.options import check_path
from wirings.errors import WiringError
from wirings.utils.console import echo


def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set to prepare: cifar10.")],
    folder: Annotated[
        Path | None,
        typer.Option("--data", help="Folder that holds the data already, in any known layout.", callback=check_path),
    ] = None,
) -> None:
    """Download, check and prepare a data set."""
    if name != "cifar10":
        raise WiringError(
            f"data set {name!r} cannot be downloaded, only cifar10 can. Other data is read from your folder: --data."
        )
    from wirings.train.data import cifar10

    echo(f"ready: {cifar10.prepare(folder)}")
