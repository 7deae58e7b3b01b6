"""The command `conserved`: parse, call, print; one file for each subcommand."""

from __future__ import annotations

import sys

from conserved.cli import attention, audit, certify, check, claims, demo, discover, laws, report, reproduce, transform
from conserved.cli.app import BAD_USAGE, INTERNAL, Usage, app, say
from conserved.optional import Missing

__all__ = ["COMMANDS", "main"]

COMMANDS = (laws, discover, certify, check, audit, transform, attention, claims, reproduce, report, demo)
"""Importing a command registers it. What a command computes with it imports when it runs, so that `--help`, `--version`
and completion answer at once."""


def main() -> None:
    """Run the command; what a user did wrong ends with one sentence and exit code 2."""
    try:
        app()
    except Exception as problem:
        from conserved.output.terminal import Console

        errors = Console(stderr=True)
        if _refusal(problem):
            say(f"conserved: {problem}", errors, "red")
            sys.exit(BAD_USAGE)
        # Neither "holds" nor "does not hold" nor the user's mistake: the exit code must not say any of them.
        errors.print_exception()
        sys.exit(INTERNAL)


def _refusal(problem: Exception) -> bool:
    """Whether it is one that is raised where a user gave something that cannot be used."""
    if isinstance(problem, Usage | Missing):
        return True
    # The others are the library's, which takes seconds to load.
    from conserved.attention import Unheard
    from conserved.certificates import Malformed
    from conserved.discovery import Unsuitable
    from conserved.integrations.configured_models import BadConfig
    from conserved.papers.claims import NoSuchClaim
    from conserved.papers.lab.data import Unusable
    from conserved.papers.lab.sweep import NoRoom
    from conserved.report import NoSuchRun, NotAStore, Unwritable
    from conserved.tracking import BrokenStore, RunTaken
    from conserved.transform import Unmovable

    of_stores = (BrokenStore, RunTaken, NotAStore, NoSuchRun, NoRoom, Unwritable)
    return isinstance(
        problem, (Unheard, Malformed, BadConfig, Unsuitable, Unmovable, Unusable, NoSuchClaim, *of_stores)
    )
