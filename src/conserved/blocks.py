"""The components of the papers as small plain modules, from the package `conserved_papers`."""

from conserved.optional import require

require("conserved_papers.blocks", "conserved.blocks")

from conserved_papers.blocks import *  # noqa: E402, F403
from conserved_papers.blocks import __all__ as __all__  # noqa: E402
