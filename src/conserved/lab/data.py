"""Data that comes with every Python: the text of the running interpreter's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

VOCABULARY = 256
"""Byte-level tokens."""


def standard_library_text(size: int) -> bytes:
    """The first `size` bytes of the standard library's modules, in alphabetical order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= size:
            return bytes(text[:size])
    raise ValueError(
        f"The standard library in {folder} has {len(text):,} bytes of Python source; {size:,} were asked for."
    )


def sequences(count: int, length: int, *, seed: int = 0) -> Int[Tensor, "count length"]:
    """`count` stretches of `length` bytes from random places of the first megabyte of text."""
    corpus = torch.frombuffer(bytearray(standard_library_text(1 << 20)), dtype=torch.uint8).long()
    starts = torch.randint(len(corpus) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([corpus[start : start + length] for start in starts.tolist()])
