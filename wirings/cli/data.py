"""``wirings data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wirings.cli.options import check_path
from wirings.errors import WiringError
from wirings.utils.console import echo


def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set to prepare, such as cifar10.")],
    folder: Annotated[
        Path | None,
        typer.Option("--data", help="Folder that holds the data already, in any known layout.", callback=check_path),
    ] = None,
) -> None:
    """Download, check and prepare a data set."""
    from wirings.train import data as data_sets

    dataset = data_sets.get(name)
    if not dataset.can_fetch and folder is not None:
        raise WiringError(f"data set {name!r} needs no preparation. Give the folder to wirings train: --data {folder}.")
    if not dataset.can_fetch:
        known = ", ".join(each for each in data_sets.names() if data_sets.get(each).can_fetch)
        raise WiringError(
            f"data set {name!r} cannot be downloaded, only {known} can. Other data is read from your folder: --data."
        )
    echo(f"ready: {dataset.fetch(folder)}")
