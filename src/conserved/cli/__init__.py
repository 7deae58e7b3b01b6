"""The command `conserved`: parse, call, print; one file for each subcommand."""

from __future__ import annotations

import sys

from conserved.cli import (
    attention,
    audit,
    certify,
    check,
    checkpoints,
    claims,
    demo,
    discover,
    laws,
    report,
    reproduce,
    transform,
    watch,
)
from conserved.cli.app import BAD_USAGE, INTERNAL, app, say
from conserved.errors import InvalidInputError

__all__ = ["COMMANDS", "main"]

COMMANDS = (
    laws,
    discover,
    certify,
    check,
    audit,
    checkpoints,
    transform,
    attention,
    claims,
    reproduce,
    report,
    watch,
    demo,
)
"""Importing a command registers it. What a command computes with it imports when it runs, so that `--help`, `--version`
and completion answer at once."""


def main() -> None:
    """Run the command; what a user did wrong ends with one sentence and exit code 2."""
    try:
        app()
    except Exception as problem:
        from conserved.output.terminal import Console

        errors = Console(stderr=True)
        if isinstance(problem, InvalidInputError):
            say(f"conserved: {problem}", errors, "red")
            sys.exit(BAD_USAGE)
        # Neither "holds" nor "does not hold" nor the user's mistake: the exit code must not say any of them.
        errors.print_exception()
        sys.exit(INTERNAL)
