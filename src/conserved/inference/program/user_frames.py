"""The lines of user code that ask for operations, found among the frames of PyTorch and of this package."""

from __future__ import annotations

import sys
from types import FrameType

NOT_THE_USERS = (
    "/torch/",
    "/conserved/inference/",
    "/conserved/tracking/",
    "/conserved/auditing/",
    "/conserved/boundary.py",
    "/conserved/_torch_compat.py",
    "/jaxtyping/",
    "/beartype/",
    "<@beartype",
    "/typeguard/",
    "/wrapt/",
    "/functools.py",
    "/contextlib.py",
)
"""Parts of the paths of code that stands between the operation and the line that asked for it."""


def user_line() -> str:
    """Return the innermost line outside PyTorch, this package and wrappers of functions."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in NOT_THE_USERS):
            return f"{frame.f_code.co_name} ({path.rpartition('/')[2]}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def is_asked_by_program(frame: FrameType | None) -> bool:
    """Return whether code of the program called a method of a tensor, and not a function of torch."""
    while frame is not None and frame.f_code.co_filename.endswith(("/torch/overrides.py", "/torch/_tensor.py")):
        frame = frame.f_back
    return frame is not None and not any(part in frame.f_code.co_filename for part in NOT_THE_USERS)
