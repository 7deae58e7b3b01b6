"""Models of the transformers library: every law that is recognised holds, and there are as many as there can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import float64
from conserved import Verdict, discover
from hf_zoo import COUNTED, FAMILIES, Computing, Family, ids, named
from sampling import sampled
from test_recognize_blocks import gradients
from tolerances import FUNCTION_UNCHANGED

HOLDS = 1e-11
"""Relative residual of an identity in float64."""


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_all_identities_hold_and_there_are_as_many_as_expected(family: Family) -> None:
    model = family.build()
    laws = family.laws(model)
    family.objective(model).backward()
    wrong = {name: r for name, r in laws.residuals(gradients(model)).items() if not r <= HOLDS}
    assert wrong == {}
    assert laws.independent() == family.conserved


@pytest.mark.parametrize("family", sampled(FAMILIES, 18), ids=ids)
def test_the_identities_hold_in_deeper_models(family: Family) -> None:
    depth = "n_layer" if "n_layer" in family.options else "num_hidden_layers"
    options: dict[str, Any] = {depth: 3}
    model = family.build(**options)
    laws = family.laws(model)
    family.objective(model).backward()
    wrong = {name: r for name, r in laws.residuals(gradients(model)).items() if not r <= HOLDS}
    assert wrong == {}


@pytest.mark.parametrize("family", FAMILIES, ids=ids)
def test_the_model_computes_the_same_after_any_group_element(family: Family) -> None:
    model = Computing(family.build())
    theta = {name: parameter.detach() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    x = family.sample(generator)
    before = _seen_by_the_loss(family, model, theta, x)
    laws = family.laws(model.model)
    # A router of one active expert, and what feeds it, may move freely only while the same expert stays on top.
    spread = 1e-3 if any(symmetry.family == "frozen" for symmetry in laws) else 0.3
    for symmetry in laws:
        moved = symmetry.act(dict(model.model.named_parameters()), symmetry.element(spread=spread, generator=generator))
        after = _seen_by_the_loss(family, model, {f"model.{name}": moved[name].detach() for name in moved}, x)
        assert (after - before).norm() <= FUNCTION_UNCHANGED * before.norm(), symmetry


def _seen_by_the_loss(family: Family, model: Computing, theta: dict[str, Tensor], x: object) -> Tensor:
    with torch.no_grad():
        z = functional_call(model, theta, (), x) if isinstance(x, dict) else functional_call(model, theta, (x,))
    return z.log_softmax(-1) if family.loss == "cross_entropy" else z


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("family", sampled(COUNTED, 5), ids=ids)
def test_there_are_as_many_laws_as_the_lie_closure_has(family: Family) -> None:
    assert family.seed is not None
    model = family.build()
    discovery = discover(Computing(model), family.sample, loss=family.loss, forms=False, seed=family.seed)
    assert discovery.verdict == Verdict.VERIFIED, discovery.verdict
    assert discovery.count == family.conserved + family.unexplained, family.why


def test_the_casts_to_float32_are_what_the_tests_pass_over() -> None:
    """Without passing over them, a float64 Llama computes as precisely as its norms do: in float32."""
    family = named("Llama")
    model = family.build()
    x = family.sample(torch.Generator().manual_seed(0))
    plain = model(x).logits.detach()
    with float64.kept():
        exact = model(x).logits.detach()
    assert plain.dtype == exact.dtype == torch.float64
    assert 1e-12 < float((plain - exact).abs().max()) < 1e-4
