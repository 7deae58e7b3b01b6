# For type checkers, which do not run `conserved.former_paths`.
from conserved.papers.blocks import *  # noqa: F403
