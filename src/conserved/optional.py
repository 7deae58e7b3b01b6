"""The gate through which every optional package is imported."""

from __future__ import annotations

import importlib
from types import ModuleType

from conserved.errors import InvalidInputError

EXTRAS = {
    **dict.fromkeys(("transformers", "peft", "accelerate", "safetensors"), "conserved[hf]"),
    **{name: f"conserved[{name}]" for name in ("timm", "lightning", "tensorboard", "trackio", "wandb")},
    "matplotlib": "conserved[plots]",
    **dict.fromkeys(("typer", "rich"), "conserved[cli]"),
    **dict.fromkeys(("jinja2", "markupsafe", "latex2mathml"), "conserved[report]"),
    "flint": "conserved[certify]",
    "conserved_papers": "conserved_papers",
    **dict.fromkeys(("sklearn", "PIL"), "conserved_papers[data]"),
    "ray": "conserved_papers[ray]",
}
"""The requirement that brings an optional package: an extra of this distribution, or of `conserved_papers`."""


class MissingPackageError(InvalidInputError, ImportError):
    """An optional package is not installed, or cannot be imported; the message says what to do."""


def require(package: str, why: str) -> ModuleType:
    """Import an optional package, or raise an error that says why it is needed and what to install."""
    try:
        return importlib.import_module(package)
    except MissingPackageError:
        raise  # The package is there and names what it lacks.
    except ImportError as problem:
        root = package.partition(".")[0]
        requirement = EXTRAS.get(root, root)
        remedy = f"pip install '{requirement}'" if "[" in requirement else f"pip install {requirement}"
        raise MissingPackageError(
            f"{why} needs {root}, which cannot be imported ({problem}). Install it: {remedy}."
        ) from problem
