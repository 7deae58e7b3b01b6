"""Legs that are seen with an offset: the law is that of 1 + γ, gradients and updates are not shifted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conserved import LawSet, Leg, Symmetry, View, recognize
from conserved.symmetry import ComplexScaling, OneScale, Scaling, Translation
from hf_zoo import named
from test_recognize_blocks import gradients

KINDS = [Scaling(), OneScale(), Translation()]


def pair(kind: Scaling | OneScale | Translation, offset: float) -> Symmetry:
    """A gain of four channels, seen with an offset, against the columns of a map."""
    gain = (
        View.of("gain", (4,), offset=offset) if not kind.linear else View.of("gain", (4,), grid=(1, 4), offset=offset)
    )
    reader = View.of("map", (3, 4), axes=0 if kind.linear else 1)
    return Symmetry(block="", family="gain", kind=kind, legs=(Leg(gain), Leg(reader, -1)))


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "gain": torch.randn(4, generator=generator, dtype=torch.float64),
        "map": torch.randn(3, 4, generator=generator, dtype=torch.float64),
    }


def shifted(theta: dict[str, Tensor]) -> dict[str, Tensor]:
    return theta | {"gain": theta["gain"] + 1}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "as a set"])
def test_everything_is_what_it_would_be_for_the_shifted_parameter(
    kind: Scaling | OneScale | Translation, together: bool
) -> None:
    theta, grad = tensors(0), tensors(1)
    seen, plain = pair(kind, 1.0), pair(kind, 0.0)
    if together:
        one = LawSet(symmetries=(seen,), parameters=theta)
        other = LawSet(symmetries=(plain,), parameters=shifted(theta))
        for result, expected in (
            (one.values(), other.values()),
            (one.identities(grad), other.identities(grad)),
            (one.drift(grad), other.drift(grad)),
            (one.reference().scales, other.reference().scales),
        ):
            assert torch.allclose(result["gain"], expected["gain"])
        assert one.residuals(grad) == pytest.approx(other.residuals(grad))
        assert one.independent() == other.independent()
        return
    assert torch.allclose(seen.law(theta), plain.law(shifted(theta)))
    assert torch.allclose(seen.identity(theta, grad), plain.identity(shifted(theta), grad))
    assert torch.allclose(seen.drift(theta, grad), plain.drift(shifted(theta), grad))
    g = seen.element(generator=torch.Generator().manual_seed(2))
    assert torch.allclose(seen.act(theta, g)["gain"] + 1, plain.act(shifted(theta), g)["gain"])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_the_drift_is_the_change_of_the_law(kind: Scaling | OneScale | Translation) -> None:
    theta, update = tensors(0), tensors(1)
    symmetry = pair(kind, 1.0)
    after = {name: theta[name] - update[name] for name in theta}
    assert torch.allclose(symmetry.law(after) - symmetry.law(theta), symmetry.drift(theta, update))


def test_an_offset_is_written_in_formulas_and_files() -> None:
    symmetry = pair(Scaling(), 1.0)
    assert symmetry.formula == "(1 + gain)[i]² − ‖map[:,i]‖²"
    assert Symmetry.from_dict(symmetry.record()) == symmetry
    assert symmetry != pair(Scaling(), 0.0)


def test_heads_turned_in_part_are_read_alike_one_by_one_and_together() -> None:
    """Rows chosen from each of several heads: the batched path must choose within every head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=5, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    config.rope_parameters["partial_rotary_factor"] = 0.5
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(config).double()
    laws = recognize(model)
    turned = laws.select(lambda symmetry: isinstance(symmetry.kind, ComplexScaling))
    assert len(turned) == 4
    theta = dict(model.named_parameters())
    together = turned.values()
    for symmetry in turned:
        assert torch.allclose(together[symmetry.name], symmetry.law(theta))
    family = named("GPT-NeoX")
    family.objective(model).backward()
    assert all(r < 1e-11 for r in turned.residuals(gradients(model)).values())
