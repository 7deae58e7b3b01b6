"""Audit weights and gradients that a run has written to files, on another machine and without its code.

A folder holds `weights*.safetensors` and `gradients*.safetensors`, with the same names in both, or a checkpoint of
torch.distributed.checkpoint of {"weights": …, "gradients": …}. Nothing in it is unpickled but the table of contents of
such a checkpoint, and of that only the classes that PyTorch writes there.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conserved._torch_compat import children_of
from conserved.auditing.audit_result import Audit
from conserved.auditing.model_audit import audit
from conserved.laws import LawSet
from conserved.laws.renaming import laws_for
from conserved.optional import require

WEIGHTS, GRADIENTS = "weights", "gradients"

_TRUSTED = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
"""Modules whose classes the table of contents of a checkpoint may name."""

_TRUSTED_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
}


def audit_dump(folder: str | Path, laws: LawSet | str | Path, *, precision: torch.dtype | None = None) -> Audit:
    """Test the gradient identities of weights and gradients in files.

    Args:
        folder: the folder of the dump.
        laws: the laws of the model, or the file that `LawSet.save` wrote.
        precision: the coarsest precision of the backward pass, if it is coarser than the files tell.

    Returns:
        The audit, as `conserved.audit` gives it.

    Raises:
        ValueError: the folder holds no dump, or none of the parameters of the laws.
    """
    read = laws if isinstance(laws, LawSet) else LawSet.load(laws)
    tensors = read_dump(Path(folder))
    model = _module_of(tensors[WEIGHTS], tensors[GRADIENTS])
    mapped = laws_for(read, dict(model.named_parameters()))
    if len(read) and not len(mapped):
        raise ValueError(
            f"Expected gradients of the parameters of the laws in {folder}, got none: "
            f"{mapped.dropped[-1].reason}. Check that the dump is of this model."
        )
    return audit(model, mapped, precision=precision)


def read_dump(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the weights and the gradients of a dump, by name.

    Args:
        folder: the folder.

    Raises:
        ValueError: it holds no dump.
    """
    if (folder / ".metadata").exists():
        return _read_checkpoint(folder)
    result: dict[str, dict[str, Tensor]] = {}
    for kind in (WEIGHTS, GRADIENTS):
        files = sorted(folder.glob(f"{kind}*.safetensors"))
        if not files:
            raise ValueError(
                f"Expected {kind}*.safetensors or a checkpoint in {folder}, got neither. Write the dump there first."
            )
        load = require("safetensors.torch", "Reading dumped gradients").load_file
        result[kind] = {name: tensor for file in files for name, tensor in load(file).items()}
    return result


class _ContentsUnpickler(pickle.Unpickler):
    """Reads the table of contents of a checkpoint, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _TRUSTED and isinstance(result := super().find_class(module, name), type):
            return result
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _TRUSTED_NAMES or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise ValueError(
            f"Expected a table of contents of PyTorch, got {module}.{name} in the checkpoint. Save it with torch.save."
        )


def _read_checkpoint(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Read a checkpoint of torch.distributed.checkpoint in one process, whatever number of processes wrote it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict_loader import load

    base: Any = FileSystemReader

    class CheckedContents(base):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            contents = _ContentsUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
            if getattr(contents, "storage_meta", None) is None:
                contents.storage_meta = StorageMeta()
            contents.storage_meta.load_id = self.load_id
            return contents

    reader = CheckedContents(folder)
    items = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(tuple(item.size), dtype=item.properties.dtype)
        for name, item in items.items()
        if hasattr(item, "size") and hasattr(item, "properties")
    }
    with warnings.catch_warnings():
        # One process reads what several wrote, which is intended here.
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        load(tensors, storage_reader=reader, no_dist=True)
    result: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, GRADIENTS: {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind in result:
            result[kind][rest] = tensor
    if not result[WEIGHTS] or not result[GRADIENTS]:
        raise ValueError(
            f"Expected a checkpoint of {{'weights': …, 'gradients': …}} in {folder}, got other keys. Save both "
            "dictionaries together."
        )
    return result


def _module_of(weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> nn.Module:
    """Return a module that holds parameters under their names, with their gradients, and computes nothing."""
    root = nn.Module()
    for name, value in weights.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in children_of(owner):
                owner.add_module(part, nn.Module())
            owner = children_of(owner)[part]  # type: ignore[assignment]
        parameter = nn.Parameter(value, requires_grad=value.is_floating_point() and name in gradients)
        if name in gradients:
            parameter.grad = gradients[name].to(value.dtype)
        owner.register_parameter(leaf, parameter)
    return root
