"""The precision that PyTorch may round factors to before it multiplies numbers in single precision.

Tensor cores multiply numbers of ten fraction bits (TF32), and processors numbers of seven (bfloat16), where a program
allows it. Results are stored in float32, so that neither types nor bits show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SHORTENED = torch.bfloat16
"""The type that passes with rounded factors are judged as: the coarsest of those that factors are rounded to."""


def rounds_factors(device: str, *, convolutions: bool = False) -> bool:
    """Return whether products of float32 numbers on a type of device may round their factors first.

    Args:
        device: the type of the device, such as "cuda".
        convolutions: whether convolutions or recurrent layers count as well; cuDNN rounds their factors by default.
    """
    if device == "cpu":
        # "tf32" has no effect on processors.
        return _setting(getattr(torch.backends.mkldnn, "matmul", None)) == "bf16"
    if device != "cuda" or torch.version.hip is not None:
        return False
    settings = [_setting(torch.backends.cuda.matmul)]
    if convolutions:
        cudnn: Any = torch.backends.cudnn
        settings += [_setting(getattr(cudnn, part, cudnn)) for part in ("conv", "rnn")]
    return any(setting in ("tf32", "bf16") for setting in settings)


def read_switch(read: Callable[[], Any]) -> Any:
    """Return what a switch of an earlier version says; where PyTorch refuses, the settings that took its place.

    Reading `allow_tf32` raises in a program that has set `fp32_precision`.
    """
    try:
        return read()
    except RuntimeError:
        return [_setting(switch) for switch in (torch.backends.cuda.matmul, torch.backends.cudnn)]


def _setting(switch: Any) -> str:
    """Return what a backend rounds factors to. Versions before 2.9 have a flag; reading it in later ones may raise."""
    if hasattr(switch, "fp32_precision"):
        return str(switch.fp32_precision)
    return "tf32" if getattr(switch, "allow_tf32", False) else "ieee"
