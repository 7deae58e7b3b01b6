"""Triton's language is made ready for its interpreter once, and not anew for every call of every function of a kernel.

The interpreter replaces the functions of `triton.language` by its own whenever a kernel is launched, and whenever a
kernel calls another function that is compiled with it (`tl.sum`, say). Finding what is to be replaced took a third of
the time of tests of kernels.
"""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """For the rest of the process; nothing is done where kernels are compiled, or where it has been done."""
    from triton import language
    from triton.runtime import interpreter

    if os.environ.get("TRITON_INTERPRET") != "1" or interpreter._patch_lang is _replaced_already:
        return
    interpreter._patch_lang(eval("lambda: None", {"language": language, "core": language.core}))
    interpreter._patch_lang = _replaced_already


class _Nothing:
    """What is restored after a launch."""

    def restore(self) -> None:
        pass


def _replaced_already(function: Any) -> _Nothing:
    return _Nothing()
