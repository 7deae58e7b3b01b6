"""Data for training: images with labels and texts as tokens, and the inputs and targets made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from conserved.errors import InvalidInputError

LossName = Literal["cross_entropy", "square"]

UNKNOWN = "<unk>"
"""Stands for every word outside a vocabulary."""


class UnusableDataError(InvalidInputError, ValueError):
    """Data that cannot be read or used; the message says what was expected and where."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """Inputs, targets and the loss that compares them; the first axis runs over examples."""

    name: str
    inputs: Shaped[Tensor, "count ..."]
    targets: Shaped[Tensor, "count ..."]
    loss: LossName = "cross_entropy"

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device, dtype: torch.dtype) -> Examples:
        """On a device, with real numbers in a precision and integers as they are."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

        return Examples(name=self.name, inputs=moved(self.inputs), targets=moved(self.targets), loss=self.loss)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Pictures of one size as bytes, with a class each."""

    name: str
    pixels: UInt8[Tensor, "count channels height width"]
    labels: Int[Tensor, " count"]

    def __post_init__(self) -> None:
        if not len(self.pixels):
            raise UnusableDataError(f"{self.name} holds no image.")
        if len(self.pixels) != len(self.labels):
            raise UnusableDataError(f"{self.name} has {len(self.pixels):,} images and {len(self.labels):,} labels.")

    def __len__(self) -> int:
        return len(self.pixels)

    def to(self, device: str) -> Images:
        """On a device."""
        return Images(name=self.name, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def examples(self, count: int, *, size: int, channels: int, classes: int, seed: int = 0) -> Examples:
        """Return `count` images drawn without repetition, resized, with zero mean and unit variance over all."""
        if count > len(self.pixels):
            raise UnusableDataError(f"{count:,} images were asked for; {self.name} has {len(self.pixels):,}.")
        worst = int(self.labels.max())
        if worst >= classes:
            raise UnusableDataError(f"{self.name} has a label {worst}; the model tells {classes} classes apart.")
        order = torch.randperm(len(self.pixels), generator=torch.Generator().manual_seed(seed))[:count]
        pictures = _resized(self.pixels[order], size, channels)
        spread, mean = torch.std_mean(pictures)
        return Examples(
            name=self.name, inputs=(pictures - mean) / spread.clamp_min(1e-6), targets=self.labels[order].long()
        )

    def rows(self, count: int, *, side: int, seed: int = 0) -> Examples:
        """Return every image as a sequence of its rows, the class as a number in [0, 1] to be regressed at each row."""
        classes = int(self.labels.max()) + 1
        result = self.examples(count, size=side, channels=1, classes=classes, seed=seed)
        marks = (result.targets.float() / max(1, classes - 1))[:, None, None].expand(-1, side, 1)
        return Examples(name=self.name, inputs=result.inputs[:, 0], targets=marks.contiguous(), loss="square")


def _resized(
    pixels: UInt8[Tensor, "count old height width"], size: int, channels: int
) -> Float[Tensor, "count channels size size"]:
    """Resize by bilinear interpolation; grey is repeated over colours, colours are averaged to grey."""
    pictures = pixels.float() / 255
    if pictures.shape[1] != channels:
        pictures = pictures.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if pictures.shape[-2:] != (size, size):
        parts = pictures.split(1024)
        pictures = torch.cat([F.interpolate(p, (size, size), mode="bilinear", align_corners=False) for p in parts])
    return pictures.contiguous()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """A corpus as one long line of tokens, with the size of its vocabulary."""

    name: str
    tokens: Int[Tensor, " count"]
    vocabulary: int

    def examples(self, count: int, *, length: int, seed: int = 0) -> Examples:
        """Return `count` sequences from random positions; the target of each token is the one after it."""
        if len(self.tokens) <= length:
            raise UnusableDataError(
                f"{self.name} has {len(self.tokens):,} tokens; sequences of {length} need at least {length + 1}."
            )
        starts = torch.randint(len(self.tokens) - length, (count,), generator=torch.Generator().manual_seed(seed))
        spans = self.tokens[starts[:, None] + torch.arange(length + 1)].long()
        return Examples(name=self.name, inputs=spans[:, :-1].contiguous(), targets=spans[:, 1:].contiguous())


def as_bytes(name: str, text: bytes) -> Text:
    """Return one token for each byte."""
    if not text:
        raise UnusableDataError(f"{name} is empty.")
    return Text(name=name, tokens=torch.frombuffer(bytearray(text), dtype=torch.uint8).int(), vocabulary=256)


def as_words(name: str, words: Iterable[str], vocabulary: int) -> Text:
    """Return one token per word: the most frequent ones, and one for all others; of equally frequent ones the first."""
    listed = list(words)
    if not listed:
        raise UnusableDataError(f"{name} is empty.")
    number = {word: index for index, (word, _) in enumerate(Counter(listed).most_common(vocabulary))}
    if len(set(listed)) > vocabulary and UNKNOWN not in number:
        # The rarest word makes room for the one that stands for all others.
        number[UNKNOWN] = number.popitem()[1]
    rest = number.get(UNKNOWN, 0)
    tokens = torch.tensor([number.get(word, rest) for word in listed], dtype=torch.int32)
    return Text(name=name, tokens=tokens, vocabulary=vocabulary)
