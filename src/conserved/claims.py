"""The claims of the papers, as functions that can be run: a short path for `conserved.papers.claims`."""

from conserved.papers.claims import *  # noqa: F403
from conserved.papers.claims import __all__ as __all__
