"""Reads of values and sizes by Python, and hooks on values, which no recorded operation shows."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conserved import _torch_compat
from conserved._torch_compat import tree_flatten
from conserved.inference.program import recorder as recording
from conserved.inference.program.control_flow import python_of
from conserved.inference.program.recorder import Recorder
from conserved.inference.program.user_frames import is_asked_by_program
from conserved.inference.program.values_on_host import FROM_PYTHON, INDEXING, index_with_values, make_with_values

_READS = {
    Tensor.__repr__: "printed",
    Tensor.__format__: "formatted",
    Tensor.tolist: "listed",
    Tensor.numpy: "converted to NumPy",
    Tensor.__array__: "converted to NumPy",
    Tensor.__dlpack__: "exported",
    Tensor.__reduce_ex__: "pickled",
    Tensor.data_ptr: "read by address",
    Tensor.untyped_storage: "read from its storage",
    Tensor.storage: "read from its storage",
    inspect.getattr_static(Tensor, "grad").__get__: "read from the last gradient",
    torch.equal: "compared",
    Tensor.equal: "compared",
    torch.allclose: "compared",
    Tensor.allclose: "compared",
}
"""Functions that hand values to Python without an operation that could be recorded."""

_SIZES = {
    inspect.getattr_static(Tensor, "shape").__get__,
    Tensor.size,
    Tensor.__len__,
    Tensor.numel,
    Tensor.nelement,
    Tensor._nnz,
}
"""Functions that tell the size of a tensor."""

_OWN_FILES = frozenset({__file__, recording.__file__, _torch_compat.__file__})
"""Files whose own reads of tensors, as of a storage, are not reads of the program."""


class ReadsAndHooks(TorchFunctionMode):
    """A mode that notes reads of values and hooks on them, after which Python may do anything to gradients."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (plain := python_of(func)) is not None:
            with self:
                return plain(*args, **(kwargs or {}))
        if func is Tensor.register_hook:
            self.recorder.program.hooked_values.add(self.recorder.value_of(args[0]))
        if func in _READS and not self.recorder.busy and sys._getframe(1).f_code.co_filename not in _OWN_FILES:
            self.recorder.reads([leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)])
        if func in _SIZES and not self.recorder.busy and is_asked_by_program(sys._getframe(1)):
            self.recorder.note_size_read(args[0])
        if func in FROM_PYTHON and (made := make_with_values(func, args, kwargs or {})) is not None:
            return made
        if func in INDEXING and args[0].is_meta:
            args = (args[0], index_with_values(args[1], args[0].device), *args[2:])
        validates = func is F.one_hot and (*args[1:], (kwargs or {}).get("num_classes", -1))[0] != -1
        former, self.recorder.validating = self.recorder.validating, self.recorder.validating or validates
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.recorder.validating = former
