"""The gate through which every optional package is imported."""

from __future__ import annotations

import importlib
from types import ModuleType

from conserved.errors import InvalidInputError

EXTRAS = {
    **dict.fromkeys(("transformers", "peft", "accelerate", "safetensors"), "hf"),
    **{name: name for name in ("timm", "lightning", "tensorboard", "trackio", "wandb")},
    "matplotlib": "plots",
    **dict.fromkeys(("sklearn", "PIL"), "lab"),
    "ray": "ray",
    **dict.fromkeys(("typer", "rich"), "cli"),
    **dict.fromkeys(("jinja2", "markupsafe", "latex2mathml"), "report"),
    "flint": "certify",
}
"""Which extra of this package brings an optional one."""


class Missing(InvalidInputError, ImportError):
    """An optional package is not installed, or cannot be imported; the message says what to do."""


def require(package: str, why: str) -> ModuleType:
    """An optional package, or an error that names the extra to install and why it is needed."""
    try:
        return importlib.import_module(package)
    except ImportError as problem:
        root = package.partition(".")[0]
        extra = EXTRAS.get(root)
        remedy = f"pip install 'conserved[{extra}]'" if extra else f"pip install {root}"
        raise Missing(f"{why} needs {root}, which cannot be imported ({problem}). Install it: {remedy}.") from problem
