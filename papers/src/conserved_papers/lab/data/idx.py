"""Fashion-MNIST, and MNIST, in the idx format they are published in, compressed or not.

A file begins with two zero bytes, the code of the entries' type (8: unsigned bytes) and the number of axes; then one
big-endian 32-bit number per axis, and the entries, last axis fastest.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from conserved_papers.lab.data.examples import Images, UnusableDataError

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_BYTES = 8


def is_fashion_mnist(folder: Path) -> bool:
    """Return whether a folder holds the training images."""
    return any((folder / f"{IMAGES}{suffix}").is_file() for suffix in ("", ".gz"))


def fashion_mnist(folder: Path) -> Images:
    """Return the training images and labels in a folder."""
    pixels, labels = (_one_of(folder, stem) for stem in (IMAGES, LABELS))
    images, classes = read_idx(pixels, axes=3), read_idx(labels, axes=1)
    return Images(name="Fashion-MNIST", pixels=images[:, None], labels=classes.int())


def _one_of(folder: Path, stem: str) -> Path:
    for suffix in ("", ".gz"):
        if (folder / f"{stem}{suffix}").is_file():
            return folder / f"{stem}{suffix}"
    raise UnusableDataError(
        f"{folder} has no {stem} and no {stem}.gz; Fashion-MNIST is published as {IMAGES}.gz and {LABELS}.gz."
    )


def read_idx(path: Path, *, axes: int) -> UInt8[Tensor, "..."]:
    """Return the entries of an idx file of unsigned bytes with a number of axes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as problem:
        raise UnusableDataError(f"{path} cannot be read: {problem}. Is the download complete?") from problem
    start = 4 + 4 * axes
    if len(content) < start or content[:4] != bytes((0, 0, _BYTES, axes)):
        raise UnusableDataError(
            f"{path} is not an idx file of bytes with {axes} axes: it begins with {content[:4].hex(' ') or 'nothing'}, "
            f"and 00 00 08 {axes:02x} was expected."
        )
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise UnusableDataError(
            f"{path} announces {' × '.join(map(str, shape))} bytes and holds {len(content) - start:,}; "
            "it is truncated or damaged."
        )
    if not math.prod(shape):
        raise UnusableDataError(f"{path} announces {' × '.join(map(str, shape))} bytes: it is empty.")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)
