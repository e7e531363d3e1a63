"""``python -m wirings`` and the command ``wirings``."""

import sys

from wirings.errors import WiringError
from wirings.utils.text import printable


def main() -> None:
    """Run the command line. A user's mistake is one message, not a traceback."""
    try:
        from wirings.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f'The command line needs the package {error.name!r}: pip install "wirings[demo]"')
    try:
        app()
    except WiringError as error:
        sys.exit(printable(f"Error: {error}", keep="\n\t"))
    except ModuleNotFoundError as error:
        sys.exit(f'This command needs the package {error.name!r}: pip install "wirings[train]"')
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"Error: {printable(str(error.filename))}: {error.strerror}.")


if __name__ == "__main__":
    main()
