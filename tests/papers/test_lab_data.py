"""Data sets in their published formats, on small files written the same way; and what is said of files that are not."""

from __future__ import annotations

import gzip
import pickle
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from conserved_papers.lab.data import UnusableDataError, open_images, open_text
from conserved_papers.lab.data.embedded import digits, standard_library, standard_library_text
from conserved_papers.lab.data.sources import kind_of
from conserved_papers.lab.recipes import examples_of, named


def idx(shape: tuple[int, ...], entries: bytes) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + entries


def fashion(folder: Path, *, compressed: bool = True, count: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = bytes((index * 7) % 256 for index in range(count * 28 * 28))
    for stem, content in (
        ("train-images-idx3-ubyte", idx((count, 28, 28), pixels)),
        ("train-labels-idx1-ubyte", idx((count,), bytes(index % 10 for index in range(count)))),
    ):
        name = f"{stem}.gz" if compressed else stem
        (folder / name).write_bytes(gzip.compress(content) if compressed else content)
    return folder


def cifar(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(5):
        records = [bytes([number]) + bytes((number + index) % 256 for index in range(3072)) for _ in range(2)]
        (folder / f"data_batch_{number + 1}.bin").write_bytes(b"".join(records))
    return folder


def photographs(folder: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for name, color in (("n01440764", (255, 0, 0)), ("n01443537", (0, 0, 255))):
        (folder / name).mkdir(parents=True)
        for number in range(2):
            image.new("RGB", (40, 30), color).save(folder / name / f"{name}_{number}.JPEG", quality=95)
    return folder


@pytest.mark.parametrize("compressed", [True, False], ids=["gz", "plain"])
def test_fashion_mnist_is_read_pixel_by_pixel(tmp_path: Path, compressed: bool) -> None:
    result = open_images(str(fashion(tmp_path, compressed=compressed)), size=28, limit=6)
    assert result.pixels.shape == (6, 1, 28, 28)
    assert result.pixels.flatten().tolist() == [(index * 7) % 256 for index in range(6 * 28 * 28)]
    assert result.labels.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"], ids=["the folder", "its parent"])
def test_cifar_is_read_plane_by_plane(tmp_path: Path, inner: str) -> None:
    cifar(tmp_path / "data" / inner)
    result = open_images(str(tmp_path / "data"), size=32, limit=10)
    assert result.pixels.shape == (10, 3, 32, 32)
    assert result.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    # Batch 3 counts up from 2 through red, then green, then blue.
    assert result.pixels[4, 1, 0, 0] == (2 + 1024) % 256
    assert result.pixels[4, 0, 0, 5] == 7


def test_folders_of_photographs_have_a_class_each(tmp_path: Path) -> None:
    result = open_images(str(photographs(tmp_path / "train").parent), size=24, limit=4)
    assert result.pixels.shape == (4, 3, 24, 24)
    assert sorted(result.labels.tolist()) == [0, 0, 1, 1]
    for picture, label in zip(result.pixels, result.labels, strict=True):
        strongest = picture.float().mean((1, 2)).argmax()
        assert strongest == (0 if label == 0 else 2)


def test_penn_treebank_has_an_end_for_every_line(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text(" no it was n't black monday \n but no <unk> was \n")
    result = open_text(str(tmp_path), vocabulary=10_000)
    assert len(result.tokens) == 6 + 1 + 4 + 1
    # "no", "was" and the end of line are the most frequent, in the order they come.
    assert result.tokens.tolist()[:3] == [0, 3, 1]
    assert result.tokens[6] == result.tokens[-1] == 2


def test_wikitext_is_found_in_the_folder_its_archive_unpacks_to(tmp_path: Path) -> None:
    (tmp_path / "wikitext-103").mkdir()
    (tmp_path / "wikitext-103" / "wiki.train.tokens").write_text(" \n = Valkyria = \n a b a \n")
    result = open_text(str(tmp_path), vocabulary=50)
    assert result.name == "WikiText-103"
    assert len(result.tokens) == 4 + 4


def test_words_beyond_the_vocabulary_are_one_token(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a a a a b b b c c d e")
    result = open_text(str(tmp_path / "book.txt"), vocabulary=3)
    assert result.tokens.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]


def test_a_vocabulary_of_256_means_bytes(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("aé")
    assert open_text(str(tmp_path / "book.txt"), vocabulary=256).tokens.tolist() == [97, 0xC3, 0xA9]


def test_targets_are_the_tokens_after_the_inputs() -> None:
    result = standard_library(4096).examples(3, length=16, seed=1)
    again, other = (standard_library(4096).examples(3, length=16, seed=seed) for seed in (1, 2))
    assert torch.equal(result.inputs[:, 1:], result.targets[:, :-1])
    assert torch.equal(result.inputs, again.inputs)
    assert not torch.equal(result.inputs, other.inputs)


def test_the_corpus_is_the_interpreters_own_text() -> None:
    assert b"import" in standard_library_text(4096)
    with pytest.raises(UnusableDataError, match="were asked for"):
        standard_library_text(1 << 40)


def test_digits_fill_the_range_of_bytes() -> None:
    result = digits()
    assert result.pixels.shape == (1797, 1, 8, 8)
    assert (int(result.pixels.min()), int(result.pixels.max())) == (0, 255)
    assert sorted(set(result.labels.tolist())) == list(range(10))


def test_images_are_resized_coloured_and_standardised(tmp_path: Path) -> None:
    result = open_images(str(fashion(tmp_path)), size=28, limit=6).examples(4, size=16, channels=3, classes=10)
    assert result.inputs.shape == (4, 3, 16, 16)
    assert torch.equal(result.inputs[:, 0], result.inputs[:, 2])
    assert float(result.inputs.mean()) == pytest.approx(0, abs=1e-6)
    assert float(result.inputs.std()) == pytest.approx(1, abs=1e-6)


def test_a_recipe_takes_data_of_its_own_kind_only(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("in the beginning " * 50)
    assert examples_of(named("bytes"), str(tmp_path / "book.txt")).name == "book.txt"
    with pytest.raises(UnusableDataError, match="trained on images"):
        examples_of(named("digits"), str(tmp_path / "book.txt"))
    with pytest.raises(UnusableDataError, match="--data PATH"):
        examples_of(named("cifar"))


def test_the_pickled_cifar_is_refused_and_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "load", lambda _: pytest.fail("a pickle was opened"))
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": 1}))
    for call in (lambda: kind_of(str(tmp_path)), lambda: open_images(str(tmp_path), size=32, limit=1)):
        with pytest.raises(UnusableDataError, match="cifar-10-binary"):
            call()


def _cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def broken(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Folders with one thing wrong each, and a part of what must be said."""
    made: dict[str, tuple[Path, str]] = {}
    made["half a gz"] = fashion(tmp_path / "gz"), "download complete"
    _cut(tmp_path / "gz" / "train-images-idx3-ubyte.gz", 60)
    made["half an idx"] = fashion(tmp_path / "idx", compressed=False), "truncated"
    _cut(tmp_path / "idx" / "train-images-idx3-ubyte", 1000)
    made["not an idx"] = fashion(tmp_path / "wrong", compressed=False), "00 00 08 03 was expected"
    (tmp_path / "wrong" / "train-images-idx3-ubyte").write_bytes(b"PK\x03\x04 something else")
    made["an empty idx"] = fashion(tmp_path / "zero", compressed=False), "begins with nothing"
    (tmp_path / "zero" / "train-images-idx3-ubyte").write_bytes(b"")
    made["no labels"] = fashion(tmp_path / "alone"), "train-labels-idx1-ubyte"
    (tmp_path / "alone" / "train-labels-idx1-ubyte.gz").unlink()
    made["half a batch"] = cifar(tmp_path / "cifar"), "3,073 bytes"
    _cut(tmp_path / "cifar" / "data_batch_3.bin", 5000)
    made["a missing batch"] = cifar(tmp_path / "four"), "data_batch_5.bin is missing"
    (tmp_path / "four" / "data_batch_5.bin").unlink()
    made["a broken photograph"] = photographs(tmp_path / "photos"), "cannot be read as an image"
    _cut(tmp_path / "photos" / "n01440764" / "n01440764_0.JPEG", 100)
    (tmp_path / "nothing").mkdir()
    made["an empty folder"] = tmp_path / "nothing", "Expected is a folder with Fashion-MNIST"
    made["no folder"] = tmp_path / "absent", "There is nothing at"
    return made


def test_what_is_wrong_with_images_is_said(tmp_path: Path) -> None:
    for name, (folder, says) in broken(tmp_path).items():
        with pytest.raises(UnusableDataError) as text:
            open_images(str(folder), size=32, limit=4)
        assert says in str(text.value), name
        assert str(folder) in str(text.value), name


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"  \n ", "is empty"), (b"\xff\xfe\x00a", "not a text in UTF-8"), (b"a\x00b", "zero bytes")],
    ids=["nothing", "blanks", "another encoding", "binary"],
)
@pytest.mark.parametrize("name", ["ptb.train.txt", "wiki.train.tokens", "book.txt"])
def test_what_is_wrong_with_texts_is_said(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnusableDataError, match=says):
        open_text(str(tmp_path / name), vocabulary=100)


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("short")
    with pytest.raises(UnusableDataError, match="at least 17"):
        open_text(str(tmp_path / "book.txt"), vocabulary=256).examples(1, length=16)


def test_labels_beyond_the_models_classes_are_refused(tmp_path: Path) -> None:
    images = open_images(str(fashion(tmp_path)), size=28, limit=6)
    with pytest.raises(UnusableDataError, match="tells 3 classes apart"):
        images.examples(6, size=28, channels=1, classes=3)
    with pytest.raises(UnusableDataError, match="were asked for"):
        images.examples(7, size=28, channels=1, classes=10)


class Rows:
    """The little of a data set's interface that is used."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows
        self.column_names = list(rows[0])

    def __getitem__(self, column: str) -> list[str]:
        return [row[column] for row in self.rows]


def test_anything_that_datasets_loads_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load(name: str, config: str | None, split: str) -> Rows:
        asked.append((name, config, split))
        if name == "missing":
            raise FileNotFoundError("no such data set")
        return Rows([{"text": "a b"}, {"text": "a c"}])

    stand_in = ModuleType("datasets")
    stand_in.__dict__["load_dataset"] = load
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert open_text("datasets:some/set:raw", vocabulary=9).tokens.tolist() == [0, 1, 0, 2]
    assert asked == [("some/set", "raw", "train")]
    with pytest.raises(UnusableDataError, match="no such data set"):
        open_text("datasets:missing", vocabulary=9)
    with pytest.raises(UnusableDataError, match="one of image, img was expected"):
        open_images("datasets:some/set", size=8, limit=2)


def test_datasets_itself_loads_a_local_folder(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    (tmp_path / "train.txt").write_text("a b\na c\n")
    assert open_text(f"datasets:{tmp_path}", vocabulary=9).tokens.tolist() == [0, 1, 0, 2]


def test_where_datasets_is_not_installed_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        open_text("datasets:some/set", vocabulary=9)


def test_a_recipe_takes_all_images_where_there_are_fewer_than_it_asks_for(tmp_path: Path) -> None:
    assert len(examples_of(named("digits"), str(fashion(tmp_path)))) == 6
    assert len(examples_of(named("digits"))) == named("digits").examples
