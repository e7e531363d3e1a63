"""``python -m wirings`` and the command ``wirings``."""

import io
import sys

from wirings.errors import WiringError
from wirings.utils.files import FULL, disk_problem
from wirings.utils.memory import is_out_of_memory
from wirings.utils.signals import stop_status
from wirings.utils.text import printable

CTRL_C = 130
"""The exit status of a command that Ctrl-C ended."""


def main() -> None:
    """Run the command line. A user's mistake is one message, not a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not every encoding has every character, such as Windows' in a pipe
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run()
    except KeyboardInterrupt:  # before a command could handle it
        sys.exit(stop_status())
    except SystemExit as ended:
        if ended.code == CTRL_C:  # typer's status for every KeyboardInterrupt, also one that SIGTERM raised
            sys.exit(stop_status())
        raise
    except WiringError as error:
        sys.exit(printable(f"Error: {error}", keep="\n\t"))
    except ModuleNotFoundError as error:
        sys.exit(f'This command needs the package {error.name!r}: pip install "wirings[train]"')
    except OSError as error:
        if error.filename is not None:
            sys.exit(f"Error: {printable(str(error.filename))}: {error.strerror}.")
        if error.errno in FULL:
            sys.exit(f"Error: could not write: {disk_problem(error)}.")
        raise
    except (MemoryError, RuntimeError, ImportError, SystemError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(
            "Error: there is not enough memory. Use smaller batches or images, or a smaller network; a run continues "
            "from its last checkpoint with --resume."
        )


def _run() -> None:
    try:
        from wirings.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f'The command line needs the package {error.name!r}: pip install "wirings[demo]"')
    app()


if __name__ == "__main__":
    main()
