"""Errors say what was expected, what came and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import conserved
from conserved import Evidence, LawSet, Status, Symmetry, Verdict, View, recognize
from conserved.blocks import FeedForward
from conserved.symmetry.kinds.scaling import Scaling

SENTENCES = re.compile(r"^Expected .+?, got .+?(\. |: ).*[.)]$", re.DOTALL)


def laws() -> LawSet:
    return recognize(FeedForward(3, 4, activation="relu"), torch.zeros(5, 3))


def model() -> nn.Module:
    return FeedForward(3, 4, activation="relu")


WRONG: dict[str, Callable[[], Any]] = {
    "audit without a model": lambda: conserved.audit(3),  # type: ignore[arg-type]
    "audit before backward()": lambda: conserved.audit(model()),
    "audit in an integer type": lambda: conserved.audit(model(), precision=torch.int8),
    "audit of no backward pass": lambda: conserved.audit(model(), accumulated=0),
    "a hook that never audits": lambda: conserved.AuditHook(model(), torch.optim.SGD(model().parameters()), every=0),
    "a certificate with one bit": lambda: conserved.certify(nn.Linear(2, 2), torch.zeros(2), bits=1),
    "a check of no function": lambda: conserved.check(3, torch.ones(2)),  # type: ignore[arg-type]
    "a check without tensors": lambda: conserved.check(torch.tanh),
    "a check of infinite inputs": lambda: conserved.check(torch.tanh, torch.tensor([torch.inf])),
    "a discovery of nothing": lambda: conserved.discover(nn.Linear(2, 2).requires_grad_(False), torch.ones(2)),
    "a discovery for an unknown loss": lambda: conserved.discover(nn.Linear(2, 2), torch.ones(2), loss="hinge"),
    "laws of a dictionary": lambda: recognize({}),
    "laws for an unknown loss": lambda: recognize(model(), torch.zeros(5, 3), loss="hinge"),
    "a law by a wrong name": lambda: laws()["nonsense"],
    "a law set of another format": lambda: LawSet.from_dict({"format": "other"}),
    "laws at missing parameters": lambda: laws().values({}),
    "a symmetry without legs": lambda: Symmetry(block="", family="empty", kind=Scaling(), legs=()),
    "a kind by a wrong code": lambda: Symmetry.from_dict(laws().symmetries[0].record() | {"kind": "affine"}),
    "a view of an axis that is not there": lambda: View.of("w", (2, 3), axes=2),
    "a monitor of no model": lambda: conserved.Monitor(3, None),  # type: ignore[arg-type]
    "a monitor of no optimizer": lambda: conserved.Monitor(model(), 3),  # type: ignore[arg-type]
    "a monitor at no step": lambda: conserved.Monitor(model(), torch.optim.SGD(model().parameters()), every=0),
    "a verdict without evidence": lambda: Verdict(status=Status.VERIFIED, message="Nothing was measured."),
    "a verdict as a bool": lambda: bool(Verdict(status=Status.VERIFIED, message="", evidence=(Evidence(what="a"),))),
}


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_an_error_says_what_was_expected_what_came_and_what_to_do(wrong: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)) as caught:
        wrong()
    assert SENTENCES.match(str(caught.value.args[0])), caught.value


PUBLIC = ("auditing", "checking", "discovery", "laws", "symmetry", "tracking", "attention", "layout", "verdict.py")


def literal(node: ast.expr) -> str:
    """The text of a message, with a mark for everything that is filled in."""
    parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    texts = []
    for part in parts:
        if isinstance(part, ast.JoinedStr):
            texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in part.values))
        elif isinstance(part, ast.Constant):
            texts.append(str(part.value))
    return "\n".join(texts)


def test_every_message_of_a_wrong_argument_is_written_so() -> None:
    """Read from the source: every ValueError and TypeError with a message, in the packages of the public API."""
    odd, count = [], 0
    root = Path(conserved.__file__).parent
    paths = [root / part for part in PUBLIC]
    for path in sorted(p for part in paths for p in ([part] if part.is_file() else part.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            raised = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(raised, ast.Call) or not raised.args or not isinstance(raised.func, ast.Name):
                continue
            if raised.func.id not in ("ValueError", "TypeError"):
                continue
            message = literal(raised.args[0])
            count += 1
            if message.strip("…: ") and not message.startswith("…") and not SENTENCES.match(message):
                odd.append(f"{path.relative_to(root)}:{raised.lineno}: {message}")
    assert count > 60
    assert not odd, "\n".join(odd)
