"""A sample of the catalogue and of the random programs: every inferred law holds, and the number is the Lie closure's.

The whole lists run as benchmarks (inference_table, inferred_programs); counts were taken by benchmarks/law_counts.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import program_grammar
from catalogue import BY_HAND, Entry, named
from conserved import Verdict
from law_checks import check, count, drifts, gradients, residual_by_action, subject

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = Path(__file__).parents[1] / "data"
COUNTS: dict[str, Any] = json.loads((DATA / "law_counts.json").read_text())
PROGRAMS: dict[str, Any] = json.loads((DATA / "program_counts.json").read_text())

COMPLETE = [
    "nanoGPT, width 4",
    "minGPT, width 4",
    "llama2.c, width 4",
    "VAE",
    "MLP-Mixer",
    "LSTM cell by hand",
    "gated linear attention",
    "experts, index_add loop",
    "experts, gathered weights",
    "experts, grouped bmm",
    "graph convolution",
    "hypernetwork",
    "weight norm by hand",
    "W Wᵀ",
    "siamese",
    "DCGAN generator in training",
    "channel shuffle",
    "attention, stacked heads",
    "attention, grouped, QK norm, rotary",
    "attention, perceiver",
    "deep linear",
    "PReLU",
]
"""Models by hand of which inference finds every law."""

SAMPLE = range(0, 40)
"""Seeds of random programs."""


def inferred(entry: Entry) -> Any:
    inference = pytest.importorskip("conserved.inference", reason="laws are not inferred from programs yet")
    torch.manual_seed(0)
    model, args, kwargs = entry.build()
    return inference.recognize(model, *args, loss=entry.loss, **kwargs)


@pytest.mark.parametrize("name", COMPLETE)
def test_a_model_nobody_described_has_the_laws_that_were_counted(name: str) -> None:
    entry = named(name)
    laws, prepared = inferred(entry), entry.subject()
    assert check(laws, prepared).wrong == {}
    theta = {n: p.detach() for n, p in prepared.model.named_parameters(remove_duplicate=False)}
    assert (laws.independent(theta) if len(laws) else 0) == COUNTS[name]["count"]


@pytest.mark.parametrize("seed", SAMPLE)
def test_no_law_of_a_random_program_is_wrong(seed: int) -> None:
    inference = pytest.importorskip("conserved.inference", reason="laws are not inferred from programs yet")
    program, x, loss, words = program_grammar.compose(seed)
    laws = inference.recognize(program, x, loss=loss)
    prepared = subject(program_grammar.build(seed), loss=loss)
    assert check(laws, prepared).wrong == {}, f"{words}\n{program}"
    assert {n: d for n, d in drifts(laws, prepared).items() if d > 1e-3} == {}, f"{words}\n{program}"
    theta = {n: p.detach() for n, p in prepared.model.named_parameters()}
    known = PROGRAMS.get(str(seed), {})
    if known.get("settled"):
        assert (laws.independent(theta) if len(laws) else 0) <= known["count"], f"{words}\n{program}"


def test_a_count_that_was_kept_can_be_taken_again() -> None:
    name = "attention, sink logits"
    result = count(named(name).subject(), seed=COUNTS[name]["seed"])
    assert result.verdict == Verdict.VERIFIED
    assert result.count == COUNTS[name]["count"]
    assert list(result.ranks) == COUNTS[name]["ranks"]


def test_every_model_by_hand_runs_and_has_gradients() -> None:
    for entry in BY_HAND:
        grads = gradients(entry.subject())
        assert all(bool(torch.isfinite(g).all()) for g in grads.values()), entry.name
        assert any(bool(g.any()) for g in grads.values()), entry.name


def test_the_identity_by_its_definition_agrees_with_the_moment_map() -> None:
    """The slope of the loss along the orbit, without the moment map, for the laws of a block and for spoiled ones."""
    from conserved import recognize

    prepared = named("attention, rotary (blocks)").subject()
    grads = gradients(prepared)
    laws = recognize(prepared.model)
    assert len(laws) > 0
    assert max(residual_by_action(symmetry, prepared, grads) for symmetry in laws) < 1e-8
    spoiled = laws.baselines()
    assert min(residual_by_action(symmetry, prepared, grads) for symmetry in spoiled) > 1e-4
    assert set(check(spoiled, prepared).wrong) == {symmetry.name for symmetry in spoiled}


def test_baselines_of_rotary_laws_pair_the_rows_of_each_plane() -> None:
    """Whether a view faces planes and members as two axes or as the rows of one."""
    from conserved import recognize
    from conserved.blocks import Attention

    model = Attention(dim=8, heads=2, rotary=True).double()
    laws = recognize(model, torch.randn(1, 3, 8, dtype=torch.float64)).select(lambda s: s.family == "query_key")
    assert len(laws) == 2
    result = laws.baselines()
    assert {symmetry.family for symmetry in result} == {"not_query_key"}
    q = dict(model.named_parameters())["q.weight"].detach()
    k = dict(model.named_parameters())["k.weight"].detach()
    for head, spoiled in enumerate(result):
        rows = slice(4 * head, 4 * head + 4)
        wanted = [
            sum(float(w[rows][2 * j].square().sum() - w[rows][2 * j + 1].square().sum()) for w in (q, k))
            for j in range(2)
        ]
        assert spoiled.law({"q.weight": q, "k.weight": k}).flatten().tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["batched_mm", "grouped_mm"])
def test_experts_have_their_laws_however_they_are_multiplied(way: str, device: str) -> None:
    import transformers

    from conserved import recognize
    from hf_zoo import named as family

    mixtral = family("Mixtral")
    config = mixtral.configured()
    config._experts_implementation = way
    with torch.device(device):
        laws = recognize(transformers.MixtralForCausalLM(config), loss="cross_entropy")
    assert laws.numbers == mixtral.conserved
    assert {symmetry.family for symmetry in laws} >= {"gated_neurons", "shift", "stream_scale"}
    assert not laws.unknown


def test_a_model_without_values_that_decides_by_them_is_followed_with_made_up_ones() -> None:
    from conserved import recognize

    class Chosen(torch.nn.Module):
        """Rows with a positive sum go through the second map as well."""

        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(3, 4, bias=False)
            self.second = torch.nn.Linear(4, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return self.second(h[torch.nonzero(x.sum(-1) > -9)[:, 0]])

    with torch.device("meta"):
        model = Chosen()
    laws = recognize(model, torch.empty(5, 3, device="meta"))
    assert laws.numbers == recognize(Chosen(), torch.ones(5, 3)).numbers == 10
    assert all(laws.parameters[name] is parameter for name, parameter in model.named_parameters())
