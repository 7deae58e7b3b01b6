"""Running a program without a trace: buffers, random numbers and written parameters are restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from conserved._torch_compat import buffers_of, preserve_version_counter
from conserved.inference.program.program_state import REWRITTEN


@contextlib.contextmanager
def undisturbed(model: nn.Module | None) -> Iterator[list[Tensor]]:
    """Restore buffers and random numbers afterwards, also for a live graph that will still be differentiated.

    A forward may count calls or update running statistics. Only buffers that changed are written back, and the
    counters by which autograd notices writes stay as they were: the values that graphs saved are there again.

    Yields a list that holds the buffers that changed, once the block has ended.
    """
    changed: list[Tensor] = []
    owned = [(module, dict(buffers_of(module))) for module in model.modules()] if model is not None else []
    buffers = [buffer for buffer in model.buffers() if not buffer.is_meta] if model is not None else []
    copies = [buffer.detach().clone() for buffer in buffers]
    counted = [buffer for buffer in buffers if not buffer.is_inference()]
    try:
        with (
            contextlib.ExitStack() as counters,
            torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []),
        ):
            for buffer in counted:
                # One by one: torch before 2.7 takes no tuple.
                counters.enter_context(preserve_version_counter(buffer))
            try:
                yield changed
            finally:
                for module, before in owned:
                    changed += [
                        b for name, b in before.items() if b is not None and buffers_of(module).get(name) is not b
                    ]
                    buffers_of(module).update(before)
                for buffer, value in zip(buffers, copies, strict=True):
                    if not _is_unchanged(buffer, value):
                        changed.append(buffer)
                        buffer.data.copy_(value)
    finally:
        del copies


@contextlib.contextmanager
def restored(rewritten: Mapping[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Write back the parameters that a program wrote to: each with what it held before."""
    try:
        yield
    finally:
        for parameter, value in rewritten.values():
            REWRITTEN[parameter] = True
            with preserve_version_counter(parameter):
                parameter.data.copy_(value)


def _is_unchanged(buffer: Tensor, value: Tensor) -> bool:
    """Return whether a buffer is what it was, NaN included."""
    same = buffer.detach() == value
    return bool((same | (buffer.detach() != buffer.detach())).all()) if buffer.is_floating_point() else bool(same.all())
