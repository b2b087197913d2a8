"""The entry point of the command line, ``kda`` or ``python -m kda_core``; its commands need the extra ``cli``."""

import errno
import os
import sys
from importlib import import_module

from kda_core._cli import EXIT_BAD_ARGUMENTS


def main() -> None:
    """Run the command line; exits with status 2 and the command to install when the extra ``cli`` is missing."""
    try:
        # By its name: ``from`` would take the package's attribute of an import that came before.
        app = import_module("kda_core._commands").app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(f'The command line needs {missing}: pip install ".[cli]" in a checkout of kda-core', file=sys.stderr)
        sys.exit(EXIT_BAD_ARGUMENTS)
    try:
        app(prog_name="kda")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # Python would write the rest at its exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"kda: {error.strerror}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
