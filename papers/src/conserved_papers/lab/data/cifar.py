"""CIFAR-10 in its published binary version: per image one byte of label and 3 × 32 × 32 bytes of pixels."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from conserved_papers.lab.data.examples import Images, UnusableDataError

FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_FOLDERS = ("", "cifar-10-batches-bin")
_PICKLED = ("", "cifar-10-batches-py")
_RECORD = 1 + 3 * 32 * 32


def folder_of(folder: Path) -> Path | None:
    """Return where the binary batches are: in a folder, or in the one its archive unpacks to."""
    return next((folder / inner for inner in _FOLDERS if (folder / inner / FILES[0]).is_file()), None)


def refuse_pickled(folder: Path) -> None:
    """Refuse the version for Python: unpickling a file runs whatever its author wrote into it."""
    if any((folder / inner / "data_batch_1").is_file() for inner in _PICKLED):
        raise UnusableDataError(
            f"{folder} holds the Python version of CIFAR-10, whose files are pickles; unpickling a file can run any "
            "code, so they are not opened. Take the binary version (cifar-10-binary.tar.gz), whose folder "
            f"cifar-10-batches-bin holds {FILES[0]} to {FILES[-1]}."
        )


def cifar10(folder: Path) -> Images:
    """Return the five training batches."""
    records = torch.cat([_batch(folder / name) for name in FILES])
    return Images(name="CIFAR-10", pixels=records[:, 1:].reshape(-1, 3, 32, 32), labels=records[:, 0].int())


def _batch(path: Path) -> UInt8[Tensor, "images record"]:
    if not path.is_file():
        raise UnusableDataError(f"{path} is missing; CIFAR-10 has {FILES[0]} to {FILES[-1]} in one folder.")
    content = path.read_bytes()
    if not content or len(content) % _RECORD:
        raise UnusableDataError(
            f"{path} has {len(content):,} bytes, which is no whole number of images of {_RECORD:,} bytes; "
            "it is truncated or not in the binary format of CIFAR-10."
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, _RECORD)
    if int(records[:, 0].max()) > 9:
        raise UnusableDataError(f"{path} has a label {int(records[:, 0].max())}; CIFAR-10 has classes 0 to 9.")
    return records
