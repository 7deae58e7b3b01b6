"""Images in one folder per class, as ImageNet's training set unpacks: train/n01440764/n01440764_10026.JPEG."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from conserved.optional import require
from conserved_papers.lab.data.examples import Images, UnusableDataError

_SUFFIXES = {".jpeg", ".jpg", ".png"}


def root_of(folder: Path) -> Path | None:
    """Return the folder whose subfolders are the classes, if there is one: itself, or its train."""
    for root in (folder / "train", folder):
        if root.is_dir() and any(_pictures(inner) for inner in _classes(root)):
            return root
    return None


def class_folders(root: Path, *, size: int, limit: int, seed: int = 0) -> Images:
    """Return up to `limit` images over all classes, scaled so that the shorter side fits and cut to the middle."""
    files = [(path, label) for label, inner in enumerate(_classes(root)) for path in _pictures(inner)]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed))[:limit]
    chosen = [files[index] for index in order.tolist()]
    pixels = torch.stack([_picture(path, size) for path, _ in chosen])
    return Images(name=root.name, pixels=pixels, labels=torch.tensor([label for _, label in chosen]))


def _classes(root: Path) -> list[Path]:
    return sorted(inner for inner in root.iterdir() if inner.is_dir())


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)


def _picture(path: Path, size: int) -> UInt8[Tensor, "3 size size"]:
    image = require("PIL.Image", "Reading JPEG images")
    try:
        with image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as problem:
        raise UnusableDataError(f"{path} cannot be read as an image: {problem}.") from problem
    scale = size / min(picture.size)
    picture = picture.resize((max(size, round(picture.width * scale)), max(size, round(picture.height * scale))))
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    cut = picture.crop((left, top, left + size, top + size))
    return torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).reshape(size, size, 3).permute(2, 0, 1)
