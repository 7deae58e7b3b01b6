"""Work on a GPU that is recorded when it comes again, and from then on queued as a whole.

Launching the hundred small kernels of an audit takes the host longer than the device needs for them. What they read is
where it was in the step before: parameters stay, and PyTorch's allocator hands out the memory of gradients in the same
order in every step. So the work is recorded as a CUDA graph, for the addresses it read, and replayed while they are the
same; when one of them is another, it is queued launch by launch as if there were no recording.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from conserved.moment.launches import tables_held

Result = TypeVar("Result")

_PLAIN = {Tensor, nn.Parameter}


@dataclass(frozen=True, slots=True)
class Memory:
    """Where tensors of one device lie, and what lies there."""

    device: torch.device
    addresses: tuple[int, ...]
    types: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]


def memory_of(tensors: Sequence[Tensor]) -> Memory | None:
    """Where tensors lie and what lies there; None unless all are plain, contiguous ones of one device."""
    if not {*map(type, tensors)} <= _PLAIN or {*map(attrgetter("layout"), tensors)} != {torch.strided}:
        return None
    if len({*map(attrgetter("device"), tensors)}) > 1 or not all(map(Tensor.is_contiguous, tensors)):
        return None
    addresses, types = map(Tensor.data_ptr, tensors), map(attrgetter("dtype"), tensors)
    return Memory(tensors[0].device, (*addresses,), (*types,), (*map(attrgetter("shape"), tensors),))


@dataclass(frozen=True, slots=True, eq=False)
class _Recording(Generic[Result]):
    key: Hashable
    replay: Callable[[], None]
    result: Result
    """In memory of the recording: the next replay writes over it."""
    tables: list[Tensor]
    """Addresses and places that the recorded kernels read."""


@dataclass(slots=True, eq=False)
class Replays(Generic[Result]):
    """The last work that was recorded, and what was seen before it."""

    refused: bool = False
    """Whether work could not be recorded once: it is not tried again."""
    _seen: Hashable = field(default=None, init=False)
    _recording: _Recording[Result] | None = field(default=None, init=False)

    def run(self, memory: Memory, options: Hashable, work: Callable[[], Result]) -> Result:
        """The result of `work`, queued on the current stream of the device.

        Args:
            memory: where all tensors lie that `work` reads.
            options: whatever else it depends on.
            work: launches kernels and does nothing else on the device; it sends nothing to it and waits for nothing.

        Returns:
            What `work` returns. Tensors in it may be written over by the next call.

        """
        key = memory, options
        if self.refused:
            return work()
        if self._recording is not None and self._recording.key == key:
            self._recording.replay()
            return self._recording.result
        if self._seen != key:
            self._seen = key
            return work()
        self._recording = None
        try:
            self._recording = _recorded(key, memory.device, work)
        except RuntimeError as problem:
            self.refused = True
            warnings.warn(
                f"Work on the GPU cannot be recorded ({str(problem)[:200]}). It is queued launch by launch, which "
                "takes the host longer and gives the same numbers.",
                RuntimeWarning,
                stacklevel=2,
            )
            return work()
        self._recording.replay()
        return self._recording.result


def _recorded(key: Hashable, device: torch.device, work: Callable[[], Result]) -> _Recording[Result]:
    """Work, recorded and not run."""
    graph = torch.cuda.CUDAGraph()
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with ExitStack() as undo:
        tables = undo.enter_context(tables_held())
        undo.enter_context(torch.cuda.stream(stream))
        # Other threads, such as one that loads data, go on using the device meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        undo.callback(graph.capture_end)
        result = work()
    current.wait_stream(stream)
    return _Recording(key, graph.replay, result, tables)
