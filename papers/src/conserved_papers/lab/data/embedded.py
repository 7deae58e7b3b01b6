"""Data that needs no download: scikit-learn's digits, and the text of the running interpreter's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from conserved.optional import require
from conserved_papers.lab.data.examples import Images, Text, UnusableDataError, as_bytes

_MEGABYTE = 1 << 20

VOCABULARY = 256
"""The vocabulary of text by bytes."""


def digits() -> Images:
    """Return 1,797 handwritten digits of 8 × 8 pixels, shipped with scikit-learn."""
    result = require("sklearn.datasets", "The handwritten digits").load_digits()
    pixels = torch.as_tensor(result.images * (255 / 16)).round().to(torch.uint8)[:, None]
    return Images(name="digits", pixels=pixels, labels=torch.as_tensor(result.target))


def standard_library(size: int = _MEGABYTE) -> Text:
    """Return the first `size` bytes of the standard library's modules, in alphabetical order, one token per byte."""
    return as_bytes("standard library", standard_library_text(size))


def sequences(count: int, length: int, *, seed: int = 0) -> Int[Tensor, "count length"]:
    """Return `count` sequences of `length` bytes from random positions in the standard library's text."""
    result = standard_library().examples(count, length=length - 1, seed=seed)
    return torch.cat([result.inputs, result.targets[:, -1:]], dim=1)


def standard_library_text(size: int) -> bytes:
    """Return the bytes themselves."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= size:
            return bytes(text[:size])
    raise UnusableDataError(
        f"The standard library in {folder} has {len(text):,} bytes of Python source; {size:,} were asked for."
    )
