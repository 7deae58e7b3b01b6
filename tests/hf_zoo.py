"""Tiny random models of every recognised family of the transformers library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import float64
from conserved import LawSet, recognize

VOCAB, LENGTH, BATCH = 5, 4, int(__import__("os").environ.get("B", "3"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model class with a tiny config, the loss it is trained with, and how many laws it has.

    `conserved` is what is recognised. `unexplained` is how many more the Lie closure has, with the reason in `why`.
    """

    name: str
    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    conserved: int
    loss: str = "cross_entropy"
    unexplained: int = 0
    why: str = ""

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
        """The model at random parameters, gains and biases included, with norms of ε = 0."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**(self.options | changes), attn_implementation="eager")
        model: nn.Module = getattr(transformers, self.model)(config).to(dtype)
        return generic(model)

    def laws(self, model: nn.Module) -> LawSet:
        return recognize(model, loss=self.loss)

    @property
    def sample(self) -> Callable[[torch.Generator], Any]:
        if "image_size" in self.options:
            size = self.options["image_size"]
            return lambda generator: torch.randn(BATCH, 1, size, size, generator=generator, dtype=torch.float64)
        if "type_vocab_size" in self.options:
            return lambda generator: {
                "input_ids": torch.randint(VOCAB, (BATCH, LENGTH), generator=generator),
                "token_type_ids": torch.randint(2, (BATCH, LENGTH), generator=generator),
            }
        first = 1 if self.options.get("pad_token_id", 0) == 0 and "pad_token_id" in self.options else 0
        return lambda generator: torch.randint(first, VOCAB, (BATCH, LENGTH), generator=generator)


def generic(model: nn.Module, size: float = 0.6) -> nn.Module:
    """Random parameters everywhere, and norms that forget a scale exactly."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, dtype=torch.float64))
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.eval()


def logits(model: nn.Module, x: Any) -> Tensor:
    """What the model computes, in float64 throughout."""
    with float64.kept():
        output = model(**x) if isinstance(x, dict) else model(x)
    return output if isinstance(output, Tensor) else output[0] if not hasattr(output, "logits") else output.logits
