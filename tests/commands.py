"""Runs `wirings` commands in this process."""

from typing import Any

from typer.testing import CliRunner

from wirings.cli.app import app


def call(*arguments: Any, status: int = 0, columns: int | None = None) -> str:
    """What a command prints. Its exceptions are raised.

    Args:
        *arguments: those of the command line, after ``wirings``.
        status: the exit status to expect.
        columns: the width of the terminal; by default, that of the environment.
    """
    environment = None if columns is None else {"COLUMNS": str(columns)}
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output
