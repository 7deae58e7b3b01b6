"""From a function to the number of its laws, and the laws themselves, with no knowledge of architectures."""

from conserved.discovery.discovery import Discovery, discover, find_laws
from conserved.discovery.inputs import UnsuitableError

__all__ = ["Discovery", "UnsuitableError", "discover", "find_laws"]
