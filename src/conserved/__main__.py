"""The command `conserved`, also as `python -m conserved`."""

from __future__ import annotations

import sys

from conserved.optional import MissingPackageError, require

BAD_USAGE = 2


def main() -> None:
    """Run the command, or say which extra brings the packages it needs."""
    try:
        for package in ("typer", "rich"):
            require(package, "The command")
    except MissingPackageError as problem:
        sys.stderr.write(f"conserved: {problem}\n")
        sys.exit(BAD_USAGE)
    from conserved import cli

    cli.main()


if __name__ == "__main__":
    main()
