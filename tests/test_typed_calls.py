"""Annotations are checked in the tests: in the first call of a function in a test, while that has tests left."""

from __future__ import annotations

from dataclasses import dataclass

import beartype
import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import typed_calls
from conserved import View


def trace(matrix: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    return matrix.diagonal().sum()


@dataclass(frozen=True)
class Square:
    matrix: Float[Tensor, "n n"]


@pytest.fixture(autouse=True)
def _two_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_calls, "TESTS", 2)
    monkeypatch.setattr(typed_calls, "_calls", {})


@pytest.mark.parametrize("kind", ["function", "dataclass"])
def test_the_first_call_of_a_test_is_checked_in_so_many_tests(kind: str) -> None:
    made = type("Square", (), dict(vars(Square))) if kind == "dataclass" else trace
    checked = typed_calls.jaxtyped(made, typechecker=beartype.beartype)
    wrong = torch.zeros(2, 3)
    for _ in range(2):
        typed_calls.begin_test()
        with pytest.raises(jaxtyping.TypeCheckError):
            checked(wrong)
        checked(wrong)
    typed_calls.begin_test()
    checked(wrong)


def test_functions_that_are_defined_again_are_the_same() -> None:
    def defined() -> object:
        def inner(matrix: Float[Tensor, "n n"]) -> None: ...

        return typed_calls.jaxtyped(inner, typechecker=beartype.beartype)

    typed_calls.begin_test()
    for expected in (True, False):
        function = defined()
        assert callable(function)
        if expected:
            with pytest.raises(jaxtyping.TypeCheckError):
                function(torch.zeros(2, 3))
        else:
            function(torch.zeros(2, 3))


def test_the_package_is_checked() -> None:
    """Whatever other tests of this process have called before, and whether its functions have tests left."""
    assert View.of.__code__.co_filename == typed_calls.__file__
    assert View.of.__wrapped__.__name__ == "of"  # type: ignore[attr-defined]
