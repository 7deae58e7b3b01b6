"""The errors that this package raises on purpose."""

from __future__ import annotations


class ConservedError(Exception):
    """The base of every error that this package raises on purpose."""


class InvalidInputError(ConservedError):
    """A model, a file or an argument cannot be used; the message says what to do. The command exits with code 2."""
