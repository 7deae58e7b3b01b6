"""Models of the transformers library with a proof that their recognised laws are all there are."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.func import functional_call

import conserved
import float64
import hf_zoo
from conserved import Certificate, Verdict
from hf_zoo import Family, named

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users_run_it")]


def certified(family: Family) -> Certificate:
    """A certificate of the model's logits as they are computed in float64 throughout, listing the recognised laws."""
    model = family.build()

    def f(values: dict[str, Tensor], x: Any) -> Tensor:
        with float64.kept():
            result = functional_call(model, values, (), x) if isinstance(x, dict) else functional_call(model, values, x)
        logits: Tensor = result.logits
        return logits

    params = dict(model.named_parameters())
    return conserved.certify(f, family.sample, loss=family.loss, params=params, laws=family.laws(model))


@pytest.fixture(autouse=True)
def _two_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for attention to attend, and a quarter of the time of four."""
    if not request.node.get_closest_marker("whole"):
        monkeypatch.setattr(hf_zoo, "LENGTH", 2)


@pytest.mark.parametrize(
    "name",
    [
        "Llama, tied",
        "Phi-3",
        *(pytest.param(name, marks=pytest.mark.whole) for name in ("Qwen 3", "Gemma 2", "Mixtral, one active expert")),
        pytest.param("BERT classifier", marks=pytest.mark.whole),
    ],
)
def test_the_recognised_laws_are_laws_and_there_are_no_others(name: str) -> None:
    """Of a BERT classifier float64 cannot count the laws; balls can."""
    result = certified(named(name))
    assert (result.at_most, result.found) == (named(name).conserved, named(name).conserved)
    assert result.verdict == Verdict.PROVED


@pytest.mark.parametrize("tokens", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_where_more_laws_are_possible_that_is_what_is_said(tokens: int) -> None:
    """OPT with norms behind its branches: 47 laws are proved; whether there are others stays open."""
    result = certified(named("OPT, norm last"))
    assert (result.at_most, result.found, result.complete) == ({2: 56, 4: 48}[tokens], 47, False)
    assert result.verdict == Verdict.PROVED
