"""The command `conserved`: parse, call, print; one file for each subcommand."""

from __future__ import annotations

import sys

from rich.console import Console

from conserved import configured
from conserved.attention.capture import Unheard
from conserved.certify import Malformed
from conserved.cli import attention, audit, certify, claims, demo, discover, laws, report, reproduce
from conserved.cli.app import BAD_USAGE, INTERNAL, Usage, app
from conserved.discover import Unsuitable
from conserved.optional import Missing

__all__ = ["COMMANDS", "main"]

COMMANDS = (laws, discover, certify, audit, attention, claims, reproduce, report, demo)
"""Importing a command registers it."""


def main() -> None:
    """Run the command; what a user did wrong ends with one sentence and exit code 2."""
    try:
        app()
    except (Usage, Unheard, Unsuitable, Malformed, Missing, configured.BadConfig) as problem:
        Console(stderr=True).print(f"conserved: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(BAD_USAGE)
    except Exception:
        # Neither "holds" nor "does not hold" nor the user's mistake: the exit code must not say any of them.
        Console(stderr=True).print_exception()
        sys.exit(INTERNAL)
