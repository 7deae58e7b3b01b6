"""Following the code: what a reader is told to open is all that is needed."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import conserved
from as_written import import_as_written
from conserved import audit, recognize
from conserved.moment import triton_backend
from models.nanogpt import build

ROOT = Path(__file__).parent.parent
SOURCE = Path(conserved.__file__).parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = {
    "a kind of group": "custom_kind",
    "an optimizer rule": "custom_optimizer",
    "a sink": "custom_sink",
    "a typing rule": "custom_operator",
}


def told(what: str) -> list[str]:
    """The files that the guide names for a change."""
    (row,) = (line for line in GUIDE.splitlines() if line.startswith(f"| {what} |"))
    return re.findall(r"`([\w/]+\.py)`", row.split("|")[2])


def defined_in(module: str, name: str) -> Path:
    """The file of the assignment, function or class that a name is imported from."""
    holder = importlib.import_module(module)
    found = getattr(holder, name)
    home = sys.modules.get(getattr(found, "__module__", module), holder)
    if name not in vars(home):
        home = holder
    assert home.__file__ is not None
    tree = ast.parse(Path(home.__file__).read_text(encoding="utf-8"))
    assigned = (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    names = {getattr(node, "name", "") for node in tree.body} | {getattr(target, "id", "") for target in assigned}
    assert name in names or found.__name__ in names, f"{name} is not defined in {home.__name__}"
    return Path(home.__file__)


@pytest.mark.parametrize("what", EXAMPLES)
def test_a_change_needs_at_most_three_files_and_the_example_no_others(what: str) -> None:
    files = told(what)
    assert 1 <= len(files) <= 3
    assert all((SOURCE / file).is_file() for file in files)
    tree = ast.parse((ROOT / "examples" / f"{EXAMPLES[what]}.py").read_text(encoding="utf-8"))
    used = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("conserved")
        for alias in node.names
        if alias.name not in conserved.__all__
    ]
    assert used
    homes = {name: defined_in(module, name).relative_to(SOURCE).as_posix() for module, name in used}
    assert {name: home for name, home in homes.items() if home not in files} == {}


def llama() -> tuple[nn.Module, conserved.LawSet | None, Callable[[nn.Module], torch.Tensor]]:
    """A small Llama, whose laws are inferred when it is audited first."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    ids = torch.randint(32, (2, 8))
    return transformers.LlamaForCausalLM(config), None, lambda model: model(input_ids=ids, labels=ids).loss


def gpt() -> tuple[nn.Module, conserved.LawSet | None, Callable[[nn.Module], torch.Tensor]]:
    """A GPT written in one file."""
    model, (ids,), _ = build()
    ids = torch.randint(7, ids.shape)
    return model, recognize(model, ids), lambda model: model(ids).square().mean()


def followed(
    model: nn.Module,
    laws: conserved.LawSet | None,
    loss: Callable[[nn.Module], torch.Tensor],
    *,
    spoiled: bool = False,
    printed: bool = False,
) -> set[str]:
    """The files of the package in which something runs when a model is audited a second time."""
    files: set[str] = set()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{SOURCE}/"):
            files.add(Path(frame.f_code.co_filename).relative_to(SOURCE).as_posix())

    for profile in (None, see):
        model.zero_grad()
        loss(model).backward()
        if spoiled:
            slopes = [p.grad for p in model.parameters() if p.ndim == 2 and p.grad is not None]
            slopes[len(slopes) // 2].mul_(1.5)
        sys.setprofile(profile)
        try:
            found = audit(model, laws)
            if printed:
                found.summary()
        finally:
            sys.setprofile(None)
        assert found.conclusive is not spoiled
    return files


FOLLOWED = GUIDE.split("### Following `audit(model)`")[1].split("\n#")[0]
LISTED = re.findall(r"^\| `([\w/]+\.py)` \|", FOLLOWED, re.M)


@pytest.mark.usefixtures("as_users_run_it")
def test_an_audit_is_followed_through_the_files_that_the_guide_lists() -> None:
    assert len(LISTED) <= 10
    torch.manual_seed(0)
    assert followed(*llama()) | followed(*gpt()) == set(LISTED)


def further(when: str) -> tuple[set[str], int]:
    """The files that the guide names beyond those listed, and how many there are in all."""
    (row,) = (line for line in FOLLOWED.splitlines() if line.startswith(f"| {when}"))
    _, _, files, count, _ = row.split("|")
    return set(re.findall(r"`([\w/]+\.py)`", files)) - set(LISTED), int(count)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(("when", "spoiled"), [("an identity", True), ("the result", False)])
def test_the_guide_names_the_further_files_of_longer_ways(when: str, spoiled: bool) -> None:
    torch.manual_seed(0)
    found = followed(*gpt(), spoiled=spoiled, printed=not spoiled)
    assert (found - set(LISTED), len(found)) == further(when)


@pytest.mark.usefixtures("as_users_run_it")
def test_the_guide_names_the_further_files_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import_as_written("conserved.moment.kernels")
    monkeypatch.setattr(triton_backend, "available", lambda device: True)
    torch.manual_seed(0)
    found = followed(*gpt())
    assert (found - set(LISTED), len(found)) == further("kernels read")
    broken = followed(*gpt(), spoiled=True)
    assert broken - set(LISTED) == further("kernels read")[0] | further("an identity")[0]
    assert len(broken) == further("both")[1]
