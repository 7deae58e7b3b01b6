"""Weights in safetensors files, read and overwritten tensor by tensor: a model is moved without being loaded.

Moving changes neither shapes nor precisions, so a moved checkpoint has the layout of the one it came from: files are
copied, and the bytes of the tensors that move are written over. Memory is that of the largest group of tensors that
move together. All of it happens in a hidden folder that gets its name when it is complete, so that no run that was
stopped leaves something that looks like a checkpoint. The format is described at
https://github.com/huggingface/safetensors; nothing is unpickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from conserved.symmetry import Symmetry, UnmovableError
from conserved.transform.moving import Weights

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The precisions in which weights are numbers."""

_HEADER = 100_000_000
"""The longest header that safetensors allows."""


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    file: Path
    start: int
    size: int
    shape: tuple[int, ...]
    code: str


class Checkpoint(Weights):
    """A folder of safetensors files as weights that `equalize` and `move` take.

    Args:
        folder: the folder of the files.
        into: the folder to make, with the moved tensors and all other files of `folder`. It appears when `move` or
            `equalize` is done. Without it nothing is written, and `written` lists the tensors that would be.
        known: names of the model's parameters; a further tensor with the same numbers is a tied copy.

    Raises:
        UnmovableError: the files cannot be read, hold a tensor twice, or `into` cannot be made.
    """

    def __init__(self, folder: str | Path, into: str | Path | None = None, known: Iterable[str] = ()) -> None:
        self.folder, self.into = Path(folder), None if into is None else Path(into)
        self._stored_tensors: dict[str, _StoredTensor] = {}
        for file in _files(self.folder):
            stored = _header(file)
            twice = next((name for name in stored if name in self._stored_tensors), None)
            if twice is not None:
                both = f"{self._stored_tensors[twice].file.name} and {file.name}"
                raise UnmovableError(
                    f"{twice} is in {both}, and nothing says which is loaded. Remove one of the files."
                )
            self._stored_tensors |= stored
        self._known = frozenset(known)
        self._names = {
            name: stored_name for name in self._known if (stored_name := self._stored_name(name)) is not None
        }
        stored_names = set(self._names.values())
        self._unexpected_names = (
            [name for name in self._stored_tensors if name not in stored_names] if self._names else []
        )
        self.state = {}
        self.written = []
        self.read_bytes = 0
        self.staging = None if self.into is None else _copy(self.folder, self.into)
        """Where files are until they are complete."""
        if self.staging is not None:
            self._tidy = finalize(self, shutil.rmtree, self.staging, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._stored_tensors)

    def _stored_name(self, name: str) -> str | None:
        """Return the name in the files: itself, or the only one that differs by the name of an outer module."""
        if name in self._stored_tensors:
            return name
        near = [
            other
            for other in self._stored_tensors
            if (other.endswith(f".{name}") or name.endswith(f".{other}")) and other not in self._known
        ]
        return near[0] if len(near) == 1 else None

    def _stored_tensor(self, name: str) -> _StoredTensor:
        return self._stored_tensors[self._names.get(name, name)]

    def movable(self, name: str, symmetry: Symmetry) -> None:
        """Refuse a tensor that cannot be moved.

        Args:
            name: the parameter, by its name in the model.
            symmetry: the symmetry that would move it, for the message.

        Raises:
            UnmovableError: no file holds it, its shape differs from the model's, or a quantiser stores it as codes.
        """
        stored_name = self._names.get(name) or self._stored_name(name)
        if stored_name is None:
            raise UnmovableError(
                f"{symmetry.name} moves {name}, which no file in {self.folder} holds: the library renames or joins "
                "tensors when it loads them. Load the model and equalise it in memory (on the command line: --load)."
            )
        self._names[name] = stored_name
        entry = self._stored_tensors[stored_name]
        views = [leg.view for leg in symmetry.legs if leg.view.parameter == name]
        if any(view.shape != entry.shape for view in views):
            raise UnmovableError(
                f"{stored_name} has shape {entry.shape} in the files and {views[0].shape} in the model."
            )
        if entry.code not in TYPES:
            raise UnmovableError(
                f"{stored_name} is stored as {entry.code}, codes of a quantiser and not numbers that can be scaled. "
                f"Move the model first and quantise it then, or leave {symmetry.name} out."
            )

    def stored(self, name: str) -> Tensor:
        """Return a tensor as it is in the files.

        Args:
            name: the parameter, by its name in the model or in the files.

        Returns:
            A new tensor in the stored precision.
        """
        entry = self._stored_tensor(name)
        with entry.file.open("rb") as file:
            file.seek(entry.start)
            data = bytearray(file.read(entry.size))
        self.read_bytes += entry.size
        return torch.frombuffer(data, dtype=TYPES[entry.code]).reshape(entry.shape)

    def precision(self, name: str) -> torch.dtype:
        """Return the precision a tensor is stored in."""
        return TYPES[self._stored_tensor(name).code]

    def read(self, name: str, least: torch.dtype = torch.float64) -> Tensor:
        """Return a tensor in a precision that moves are computed in.

        Args:
            name: the parameter, by its name in the model or in the files.
            least: the lowest precision wanted.

        Returns:
            A new tensor, in the stored precision if that is higher.
        """
        tensor = self.stored(name)
        return tensor.to(torch.promote_types(tensor.dtype, least))

    def write(self, work: Mapping[str, Tensor]) -> None:
        """Round tensors that move together to the stored precision and write them over the copies in `into`.

        Args:
            work: the moved tensors, by parameter name.

        Raises:
            UnmovableError: a number leaves the range of the stored precision, and none is written; or `into` is
                complete.
        """
        if self.into is not None and self.staging is None:
            raise UnmovableError(
                f"{self.into} has been written; open it as a checkpoint of its own to move it further."
            )
        rounded = {
            name: self.rounded(name, tensor, TYPES[self._stored_tensor(name).code]) for name, tensor in work.items()
        }
        for name, tensor in rounded.items():
            targets = [self._names.get(name, name), *self._tied_copies(name)]
            self.written += targets
            if self.staging is None:
                continue
            for target in targets:
                entry = self._stored_tensors[target]
                with (self.staging / entry.file.name).open("r+b") as file:
                    file.seek(entry.start)
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Collect the tensors that are written; `into` appears at the end, and after an error nothing does."""
        if self.into is None or self.staging is None:
            yield
            return
        try:
            yield
            if self.into.exists():
                self.into.rmdir()
            self.staging.rename(self.into)
        except OSError as problem:
            raise UnmovableError(f"{self.into} cannot be written to: {problem}.") from problem
        finally:
            self._tidy()
            self.staging = None

    def _tied_copies(self, name: str) -> list[str]:
        entry = self._stored_tensor(name)
        alike = [
            other
            for other in self._unexpected_names
            if (self._stored_tensors[other].shape, self._stored_tensors[other].code) == (entry.shape, entry.code)
        ]
        return [other for other in alike if torch.equal(self.stored(other), self.stored(name))]


def _files(folder: Path) -> list[Path]:
    """Return the files that hold the weights: those that the index lists, if there is one."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        hint = "" if pickled is None else f" {pickled.name} is not read: load the model and save it as safetensors."
        raise UnmovableError(f"There are no safetensors files in {folder}.{hint}")
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        return files
    if len(indices) > 1:
        raise UnmovableError(f"{folder} holds several indices: {', '.join(index.name for index in indices)}. Keep one.")
    try:
        listed = {str(name) for name in json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise UnmovableError(f"{indices[0]} is not an index of safetensors files: {problem!r}.") from problem
    lost = sorted(listed - {file.name for file in files})
    if lost:
        raise UnmovableError(
            f"{indices[0].name} lists {lost[0]}, which is not in {folder} ({len(lost)} files are missing)."
        )
    alone = "model.safetensors"
    if alone not in listed and (folder / alone).is_file():
        raise UnmovableError(
            f"{folder} holds {alone} and {indices[0].name}, which does not list it. Remove one of them."
        )
    return [file for file in files if file.name in listed]


def _header(file: Path) -> dict[str, _StoredTensor]:
    """Return where each tensor of a file lies."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_HEADER, size - 8):
            raise UnmovableError(f"{file} is not a safetensors file.")
        try:
            listed: dict[str, Any] = json.loads(opened.read(length))
        except (ValueError, RecursionError) as problem:
            raise UnmovableError(f"{file} is not a safetensors file: {problem}.") from problem
    result = {}
    for name, entry in listed.items():
        if name == "__metadata__":
            continue
        try:
            (first, last), code = map(int, entry["data_offsets"]), str(entry["dtype"])
            shape = tuple(int(extent) for extent in entry["shape"])
        except (KeyError, TypeError, ValueError) as problem:
            raise UnmovableError(f"{file}: the entry of {name} is damaged.") from problem
        bad = code in TYPES and last - first != prod(shape) * TYPES[code].itemsize
        if not 0 <= first <= last <= size - 8 - length or bad:
            raise UnmovableError(f"{file}: {name} does not lie within the file.")
        result[name] = _StoredTensor(file, 8 + length + first, last - first, shape, code)
    return result


def _copy(folder: Path, into: Path) -> Path:
    """Return a hidden copy of a folder's files beside the folder that is to be made."""
    if into.resolve() == folder.resolve():
        raise UnmovableError(f"{into} is the checkpoint itself; name another folder to write to.")
    if into.exists() and not into.is_dir():
        raise UnmovableError(f"{into} is a file; name a folder to write to.")
    if into.exists() and any(into.iterdir()):
        raise UnmovableError(f"{into} is not empty; name a folder that is.")
    staging = into.resolve().parent / f".{into.resolve().name}.{token_hex(4)}.partial"
    try:
        staging.mkdir(parents=True)
        try:
            for file in folder.iterdir():
                if file.is_file():
                    shutil.copyfile(file, staging / file.name)
            for part in _parts(folder):
                shutil.copytree(folder / part, staging / part)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as problem:
        raise UnmovableError(f"{into} cannot be written to: {problem}.") from problem
    return staging


def _parts(folder: Path) -> list[str]:
    """Return folders within one that a sentence-transformers model is loaded from as well; others are not copied."""
    try:
        listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        named = [str(entry.get("path") or "") for entry in listed]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return []
    return [name for name in named if name and Path(name).name == name and (folder / name).is_dir()]
