"""From a function to the number of its laws, and the laws themselves, with no knowledge of architectures."""

from conserved.discover.discovery import Discovery, discover, find_laws
from conserved.discover.function import Unsuitable

__all__ = ["Discovery", "Unsuitable", "discover", "find_laws"]
