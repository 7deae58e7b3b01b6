"""The claims of the five source documents, from the package `conserved_papers`."""

from conserved.optional import require

require("conserved_papers.claims", "conserved.claims")

from conserved_papers.claims import *  # noqa: E402, F403
from conserved_papers.claims import __all__ as __all__  # noqa: E402
