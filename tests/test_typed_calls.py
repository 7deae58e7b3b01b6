"""Annotations are checked in the tests: in the first call of a function in a test, while that has tests left."""

from __future__ import annotations

import inspect
import re
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


def test_other_calls_run_the_code_as_it_is_written() -> None:
    def plain() -> None: ...

    plain.__qualname__ = "plain"
    written = plain.__code__
    checked = typed_calls.jaxtyped(plain, typechecker=beartype.beartype)
    for _ in range(2):
        typed_calls.begin_test()
        assert checked.__code__ is not written
        checked()
        assert checked.__code__ is written
    typed_calls.begin_test()
    assert checked.__code__ is written


def test_arguments_arrive_as_they_were_given() -> None:
    """Defaults, names that must be given, and variables of the function around."""
    outside = 7

    def sums(a: int, b: int = 2, *more: int, c: int = 3, **others: int) -> list[int]:
        return [a, b, *more, c, *others.values(), outside]

    sums.__qualname__ = "sums"
    signature = inspect.signature(sums)
    checked = typed_calls.jaxtyped(sums, typechecker=beartype.beartype)
    assert inspect.signature(checked) == signature
    for _ in range(2):
        typed_calls.begin_test()
        for _ in range(2):
            assert checked(1) == [1, 2, 3, 7]
        typed_calls.begin_test()
        assert checked(1, 5, 6, c=4, d=8) == [1, 5, 6, 4, 8, 7]
        assert inspect.signature(checked) == signature


def test_the_package_is_checked() -> None:
    """Whatever other tests of this process have called before, and whether its functions have tests left."""
    assert View.of.__wrapped__.__name__ == "of"  # type: ignore[attr-defined]
    (checking,) = (
        value for name, value in View.of.__globals__.items() if re.fullmatch(r"__checking_View_of_\d+", name)
    )
    assert checking.__code__.co_filename == typed_calls.__file__
