"""The components of the papers as small plain modules: a short path for `conserved.papers.blocks`."""

from conserved.papers.blocks import *  # noqa: F403
from conserved.papers.blocks import __all__ as __all__
