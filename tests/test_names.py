"""Names that a PyTorch user guesses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import conserved
import conserved_papers
from conserved import AuditHook, Evidence, LawSet, Status, Verdict, discover, recognize
from conserved.blocks import Attention, DecoderLM, FeedForward


def test_a_hook_takes_the_model_first_and_catches_a_wrong_gradient() -> None:
    torch.manual_seed(0)
    model = DecoderLM(vocab=16, dim=8, depth=1, heads=2, hidden=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(16, (2, 6))

    def step(spoil: bool) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        if spoil:
            gradient = model.get_parameter("layers.0.attention.q.weight").grad
            assert gradient is not None
            gradient *= 2
        optimizer.step()

    with AuditHook(model, optimizer, every=1) as hook:
        step(spoil=False)
        assert hook.audits == 1
        assert hook.last is not None
        assert hook.last.ok
        assert hook.laws is not None
        with pytest.raises(conserved.GradientsDoNotConserveError):
            step(spoil=True)
    step(spoil=True)
    assert hook.audits == 2, "nothing is audited once the hook is removed"


def test_discover_without_counting_gives_the_laws_alone() -> None:
    model, x = FeedForward(3, 4, activation="relu"), torch.zeros(5, 3)
    discovery = discover(model, x, count=False)
    assert isinstance(discovery, LawSet)
    assert [s.formula for s in discovery] == [s.formula for s in discover(model, x).laws]


def test_any_loss_is_regression() -> None:
    model, x = Attention(4, 2), torch.zeros(5, 4)
    assert discover(model, x, loss="any").count == discover(model, x, loss="regression").count == 12


def test_baselines_are_of_the_laws_families_and_are_not_laws() -> None:
    torch.manual_seed(0)
    model = Attention(8, 2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    laws = recognize(model, x)
    baselines = laws.baselines()
    assert {s.family for s in baselines} == {f"not_{s.family}" for s in laws}
    model(x).square().mean().backward()
    theta = {name: p.detach() for name, p in model.named_parameters()}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert max(float(s.identity(theta, grads).abs().max()) for s in laws) < 1e-12
    assert min(float(s.identity(theta, grads).abs().max()) for s in baselines) > 1e-6


def test_assert_backward_is_beside_check() -> None:
    assert conserved.assert_backward is conserved.testing.assert_backward
    conserved.assert_backward(F.silu, torch.randn(3, 4))


def test_a_law_is_its_symmetry() -> None:
    laws = recognize(FeedForward(3, 4, activation="relu"), torch.zeros(5, 3))
    assert laws.laws == laws.symmetries
    assert all(isinstance(law, conserved.Law) for law in laws.laws)


def test_a_law_set_has_a_record_as_all_results_do() -> None:
    laws = recognize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(5, 3))
    assert laws.record()["symmetries"] == [symmetry.record() for symmetry in laws]


def test_equality_of_verdicts_and_statuses_is_transitive() -> None:
    one = Verdict(status=Status.VERIFIED, message="one", evidence=(Evidence(what="a"),))
    other = Verdict(status=Status.VERIFIED, message="other", evidence=(Evidence(what="b"),))
    assert one == Status.VERIFIED == other
    assert one == other
    assert hash(one) == hash(other) == hash(Status.VERIFIED)
    assert one != Status.REFUTED


def test_no_class_shares_its_name_with_another_class_or_type() -> None:
    """One word for one thing; what begins with an underscore is of its file alone."""
    classes, types = dict[str, list[str]](), dict[str, list[str]]()
    packages = (Path(conserved.__file__).parent, Path(conserved_papers.__file__).parent)
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(path.stem)
        for node in tree.body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    types.setdefault(getattr(target, "id", ""), []).append(path.stem)
    shared = {name: homes + types.get(name, []) for name, homes in classes.items() if not name.startswith("_")}
    assert {name: homes for name, homes in shared.items() if len(homes) > 1} == {}
