"""``python -m wirings`` and the command ``wirings``."""

import sys

from wirings.errors import WiringError


def main() -> None:
    """Run the command line; a user's mistake is one line, not a traceback."""
    try:
        from wirings.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f'The command line needs the package {error.name!r}: pip install "wirings[demo]"')
    try:
        app()
    except WiringError as error:
        sys.exit(f"Error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f'This command needs the package {error.name!r}: pip install "wirings[train]"')


if __name__ == "__main__":
    main()
