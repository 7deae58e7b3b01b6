# For type checkers, which do not run `conserved.former_paths`.
from conserved.papers.claims import *  # noqa: F403
