"""From what a user names to data: which format a path holds is read off the files that are there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from conserved_papers.lab.data import cifar, corpora, folders, hub, idx
from conserved_papers.lab.data.embedded import digits, standard_library
from conserved_papers.lab.data.examples import Images, Text, UnusableDataError

DIGITS, LIBRARY = "digits", "standard-library"
"""The sources that are available everywhere."""

_IMAGES_EXPECTED = (
    f"Fashion-MNIST ({idx.IMAGES}.gz, {idx.LABELS}.gz), CIFAR-10 in binary ({cifar.FILES[0]} …), "
    "or one folder of JPEG files per class (ImageNet)"
)
_TEXT_EXPECTED = f"Penn Treebank ({corpora.PENN}), WikiText-103 ({corpora.WIKI}), or a text file in UTF-8"


def kind_of(source: str) -> Literal["images", "text", "either"]:
    """Return what a source holds; a name for `datasets` may be either."""
    if source.startswith(hub.PREFIX):
        return "either"
    if source in (DIGITS, LIBRARY):
        return "images" if source == DIGITS else "text"
    path = _existing(source)
    if path.is_file() or corpora.corpus_in(path):
        return "text"
    if _images_in(path) is not None:
        return "images"
    raise UnusableDataError(f"{path} holds nothing that is known. Images: {_IMAGES_EXPECTED}. Texts: {_TEXT_EXPECTED}.")


def open_images(source: str, *, size: int, limit: int) -> Images:
    """Return the images of a source; of photographs in single files, at most `limit`, cut to squares of `size`."""
    if source == DIGITS:
        return digits()
    if source.startswith(hub.PREFIX):
        return hub.hub_images(source.removeprefix(hub.PREFIX), size=size, limit=limit)
    path = _existing(source)
    if (opened := _images_in(path)) is None:
        raise UnusableDataError(f"{path} holds no images that are known. Expected is a folder with {_IMAGES_EXPECTED}.")
    return opened(size=size, limit=limit)


def _images_in(path: Path) -> Callable[..., Images] | None:
    """Return how to open the images of a folder, if it holds any."""
    if not path.is_dir():
        return None
    if idx.is_fashion_mnist(path):
        return lambda **_: idx.fashion_mnist(path)
    if (inner := cifar.folder_of(path)) is not None:
        return lambda **_: cifar.cifar10(inner)
    cifar.refuse_pickled(path)
    root = folders.root_of(path)
    return None if root is None else partial(folders.class_folders, root)


def open_text(source: str, *, vocabulary: int) -> Text:
    """Return the text of a source, in at most `vocabulary` kinds of token; 256 means bytes."""
    if source == LIBRARY:
        return standard_library()
    if source.startswith(hub.PREFIX):
        return hub.hub_text(source.removeprefix(hub.PREFIX), vocabulary)
    path = _existing(source)
    if (corpus := corpora.corpus_in(path)) is not None:
        return corpora.tokenised(corpus[1], corpus[0], vocabulary)
    if path.is_file():
        return corpora.plain_text(path, vocabulary)
    raise UnusableDataError(f"{path} holds no text that is known. Expected is {_TEXT_EXPECTED}.")


def _existing(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.exists():
        raise UnusableDataError(
            f"There is nothing at {path}. Give the folder or file of a data set: {_IMAGES_EXPECTED}; {_TEXT_EXPECTED}; "
            f"or {hub.PREFIX}NAME."
        )
    return path
