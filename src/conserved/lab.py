"""The experiments of the papers: a short path for `conserved.papers.lab`."""

from conserved.papers.lab import CODES

__all__ = ["CODES"]
