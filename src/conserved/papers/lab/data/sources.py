"""From what a user names to data: which format a path holds is read off the files that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from conserved.papers.lab.data import cifar, corpora, folders, hub, idx
from conserved.papers.lab.data.embedded import digits, standard_library
from conserved.papers.lab.data.examples import Images, Text, Unusable

DIGITS, LIBRARY = "digits", "standard-library"
"""What is at hand everywhere."""

_IMAGES_EXPECTED = (
    f"Fashion-MNIST ({idx.IMAGES}.gz, {idx.LABELS}.gz), CIFAR-10 in binary ({cifar.FILES[0]} …), "
    "or one folder of JPEG files per class (ImageNet)"
)
_TEXT_EXPECTED = f"Penn Treebank ({corpora.PENN}), WikiText-103 ({corpora.WIKI}), or a text file in UTF-8"


def kind_of(source: str) -> Literal["images", "text", "either"]:
    """What a source holds; a name for `datasets` may be either."""
    if source.startswith(hub.PREFIX):
        return "either"
    if source in (DIGITS, LIBRARY):
        return "images" if source == DIGITS else "text"
    path = _existing(source)
    if path.is_file() or corpora.penn_file(path) or corpora.wiki_file(path):
        return "text"
    if cifar.is_pickled(path) and cifar.folder_of(path) is None:
        cifar.refuse_pickled(path)
    if idx.is_fashion_mnist(path) or cifar.folder_of(path) or folders.root_of(path):
        return "images"
    raise Unusable(f"{path} holds nothing that is known. Images: {_IMAGES_EXPECTED}. Texts: {_TEXT_EXPECTED}.")


def open_images(source: str, *, size: int, limit: int) -> Images:
    """The images of a source; of photographs in single files, at most `limit`, cut to squares of `size`."""
    if source == DIGITS:
        return digits()
    if source.startswith(hub.PREFIX):
        return hub.hub_images(source.removeprefix(hub.PREFIX), size=size, limit=limit)
    path = _existing(source)
    if path.is_dir():
        if idx.is_fashion_mnist(path):
            return idx.fashion_mnist(path)
        if (inner := cifar.folder_of(path)) is not None:
            return cifar.cifar10(inner)
        if cifar.is_pickled(path):
            cifar.refuse_pickled(path)
        if (root := folders.root_of(path)) is not None:
            return folders.class_folders(root, size=size, limit=limit)
    raise Unusable(f"{path} holds no images that are known. Expected is a folder with {_IMAGES_EXPECTED}.")


def open_text(source: str, *, vocabulary: int) -> Text:
    """The text of a source, in at most `vocabulary` kinds of token; 256 means bytes."""
    if source == LIBRARY:
        return standard_library()
    if source.startswith(hub.PREFIX):
        return hub.hub_text(source.removeprefix(hub.PREFIX), vocabulary)
    path = _existing(source)
    for name, file, expected in (
        ("Penn Treebank", corpora.penn_file(path), corpora.PENN),
        ("WikiText-103", corpora.wiki_file(path), corpora.WIKI),
    ):
        if file is not None or path.name == expected:
            return corpora.tokenised(file or path, name, vocabulary)
    if path.is_file():
        return corpora.plain_text(path, vocabulary)
    raise Unusable(f"{path} holds no text that is known. Expected is {_TEXT_EXPECTED}.")


def _existing(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.exists():
        raise Unusable(
            f"There is nothing at {path}. Give the folder or file of a data set: {_IMAGES_EXPECTED}; {_TEXT_EXPECTED}; "
            f"or {hub.PREFIX}NAME."
        )
    return path
