"""Data for experiments: what every installation has at hand, and published data sets in their own file formats."""

from conserved_papers.lab.data.examples import Examples, Images, Text, UnusableDataError
from conserved_papers.lab.data.sources import open_images, open_text

__all__ = ["Examples", "Images", "Text", "UnusableDataError", "open_images", "open_text"]
