"""Models of the transformers library from a config alone: a class with options, or a config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conserved.errors import InvalidInputError
from conserved.optional import require

_WHY = "Building a model from its config"

_AUTO = (
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModel",
)
"""Which class is built for a config that does not name one: the first that knows it."""


class BadConfigError(InvalidInputError, ValueError):
    """A config cannot be used; the message says what to do."""


def is_config_file(name: str) -> bool:
    """Return whether a name is that of a config.json, or of a folder with one."""
    path = Path(name)
    return path.suffix == ".json" or (path / "config.json").is_file()


def from_file(name: str, options: Mapping[str, Any], *, empty: bool = True) -> nn.Module:
    """Return the model that a local config.json describes, with some of its entries replaced."""
    library: Any = require("transformers", _WHY)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise BadConfigError(f"There is no file {path}.")
    try:
        config = library.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, OSError, KeyError) as problem:
        raise BadConfigError(
            f"{path} is not a config that transformers {library.__version__} knows: {problem}"
        ) from problem
    return _build(library, _replace_options(config, options, config.to_diff_dict()), empty=empty)


def load_pretrained(path: str, texts: Sequence[str]) -> tuple[nn.Module, Mapping[str, Tensor] | None]:
    """Return a model with weights from a local folder, and texts tokenized by the tokenizer in that folder."""
    library: Any = require("transformers", "Loading a model from a folder")
    try:
        config = library.AutoConfig.from_pretrained(path, local_files_only=True)
        named = [getattr(library, name) for name in config.architectures or () if hasattr(library, name)]
        cls = named[0] if named else library.AutoModel
        # Weights are read from safetensors alone: nothing is unpickled.
        model: nn.Module = cls.from_pretrained(path, local_files_only=True, use_safetensors=True)
        if not texts:
            return model.eval(), None
        tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
        if len(texts) > 1 and tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return model.eval(), tokenizer(list(texts), padding=len(texts) > 1, return_tensors="pt")
    except (ValueError, OSError, KeyError) as problem:
        raise BadConfigError(f"{path} does not hold a model that can be loaded: {problem}") from problem


def tokenize(path: str, texts: Sequence[str], limit: int = 512) -> list[dict[str, Tensor]]:
    """Return texts as the tokenizer in a local folder writes them, each by itself, so that no padding is in between."""
    library: Any = require("transformers", "Reading text with a tokenizer")
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
        longest = getattr(library.AutoConfig.from_pretrained(path, local_files_only=True), "max_position_embeddings", 0)
        limit = min(limit, int(tokenizer.model_max_length), int(longest or limit))
        return [dict(tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")) for text in texts]
    except (ValueError, OSError, KeyError) as problem:
        raise BadConfigError(f"{path} holds no tokenizer that can be loaded: {problem}") from problem


def has_weights(path: str) -> bool:
    """Return whether a folder holds weights in safetensors beside a config."""
    return is_config_file(path) and any(Path(path).glob("*.safetensors"))


def from_class(model_class: Any, options: Mapping[str, Any], *, empty: bool = True) -> nn.Module | None:
    """Return the model of a config class or of a model class of transformers; None if `found` is neither."""
    library: Any = require("transformers", _WHY)
    if not isinstance(model_class, type):
        return None
    if issubclass(model_class, library.PreTrainedConfig):
        return _build(library, _replace_options(model_class(), options, {}), empty=empty)
    config_class = getattr(model_class, "config_class", None)
    if issubclass(model_class, library.PreTrainedModel) and isinstance(config_class, type):
        return _make(model_class, _replace_options(config_class(), options, {}), empty=empty)
    return None


def _replace_options(config: Any, options: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
    """Return a config with some entries replaced, built again with the rest so that what depends on them follows."""
    unknown = [name for name in options if not hasattr(config, name)]
    if unknown:
        raise BadConfigError(f"{type(config).__name__} has no option {unknown[0]!r}.")
    return type(config)(**{**rest, **options}) if options else config


def _build(library: Any, config: Any, *, empty: bool) -> nn.Module:
    """Return the class the config names, or else the first that knows it."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(library, name):
            return _make(getattr(library, name), config, empty=empty)
    for name in _AUTO:
        auto = getattr(library, name)
        if type(config) in auto._model_mapping:
            return _make(auto._model_mapping[type(config)], config, empty=empty)
    raise BadConfigError(f"transformers {library.__version__} has no model for {type(config).__name__}.")


def _make(cls: Any, config: Any, *, empty: bool) -> nn.Module:
    with torch.device("meta") if empty else nullcontext():
        model: nn.Module = cls(config)
    return model.eval()
