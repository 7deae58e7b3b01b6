"""Anything the package `datasets` can load, from its hub, its cache or a local folder: `datasets:NAME[:CONFIG]`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from conserved.optional import require
from conserved_papers.lab.data.examples import Images, Text, UnusableDataError, as_bytes, as_words

PREFIX = "datasets:"
_IMAGE_COLUMNS, _LABEL_COLUMNS, _TEXT_COLUMNS = (
    ("image", "img"),
    ("label", "labels", "fine_label"),
    ("text", "sentence"),
)


def hub_images(name: str, *, size: int, limit: int) -> Images:
    """Return the training images of a data set, resized to squares."""
    rows = _training_rows(name)
    picture, label = _column(rows, _IMAGE_COLUMNS, name), _column(rows, _LABEL_COLUMNS, name)
    chosen = rows.select(range(min(limit, len(rows))))
    pixels = torch.stack([_pixels(row[picture], size) for row in chosen])
    return Images(name=name, pixels=pixels, labels=torch.tensor([row[label] for row in chosen]))


def hub_text(name: str, vocabulary: int) -> Text:
    """Return the training text of a data set: bytes or words, as the vocabulary of the model has it."""
    rows = _training_rows(name)
    lines = rows[_column(rows, _TEXT_COLUMNS, name)]
    if vocabulary == 256:
        return as_bytes(name, "\n".join(lines).encode())
    return as_words(name, (word for line in lines for word in line.split()), vocabulary)


def _training_rows(name: str) -> Any:
    datasets = require("datasets", f"Loading {PREFIX}{name}")
    known, _, config = name.partition(":")
    try:
        return datasets.load_dataset(known, config or None, split="train")
    except Exception as problem:  # Whatever the package raises: no network, no such data set, no such file.
        raise UnusableDataError(f"datasets could not load {name!r}: {problem}") from problem


def _column(rows: Any, names: tuple[str, ...], source: str) -> str:
    for name in names:
        if name in rows.column_names:
            return name
    raise UnusableDataError(
        f"{source} has columns {', '.join(rows.column_names)}; one of {', '.join(names)} was expected."
    )


def _pixels(picture: Any, size: int) -> UInt8[Tensor, "3 size size"]:
    square = picture.convert("RGB").resize((size, size))
    return torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).reshape(size, size, 3).permute(2, 0, 1)
