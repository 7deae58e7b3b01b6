"""No false alarm: right backward passes of every family, precision and habit of training.

Thousands more are in `benchmarks/clean_passes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_zoo
import zoo
from conserved import LawSet, audit, blocks, recognize
from test_recognize_timm import CASES as TIMM_CASES
from torch_zoo import TORCH_CASES, encoder

ADAPTERS, CHECKPOINTED, COMPILED = 3, 5, 10
"""Passes of each of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """How the pass is computed and what is done to its gradients before they are audited."""

    name: str
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scale: float = 1.0
    passes: int = 1
    clip: float | None = None
    told: bool = False
    """Whether the audit is told the precision: with few entries, sums that were clipped do not show it."""


HABITS = [
    Habit(name="float64", dtype=torch.float64),
    Habit(name="float32"),
    Habit(name="float32, clipped", clip=0.01),
    Habit(name="float32, 3 accumulated", passes=3),
    Habit(name="bfloat16 autocast", autocast=torch.bfloat16, told=True),
    Habit(name="bfloat16 autocast, 3 accumulated, clipped", autocast=torch.bfloat16, passes=3, clip=0.01, told=True),
    Habit(name="bfloat16", dtype=torch.bfloat16),
    Habit(name="float16 autocast, scaled", autocast=torch.float16, scale=2.0**10, told=True),
]


CASES = {
    "blocks": zoo.LAWFUL,
    "torch layers": [case for case in TORCH_CASES if case.conserved],
    "modules built as timm builds them": TIMM_CASES,
}


def alarms(model: nn.Module, laws: LawSet, losses: list[Callable[[], Tensor]], habit: Habit) -> list[str]:
    """What the audit holds against a right pass."""
    scaler = torch.amp.GradScaler("cpu", init_scale=habit.scale, enabled=habit.scale != 1)
    for objective in losses:
        with _casting(habit):
            loss = objective()
        scaler.scale(loss.float()).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    if habit.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), habit.clip)
    result = audit(model, laws, precision=habit.autocast if habit.told else None, accumulated=habit.passes)
    return [f"{row.name}: {row.residual:.2g} > {row.tolerance:.2g}" for row in result.failures]


@contextmanager
def _casting(habit: Habit) -> Iterator[None]:
    with nullcontext() if habit.autocast is None else torch.autocast("cpu", dtype=habit.autocast):
        yield


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.name)
@pytest.mark.parametrize("kind", CASES)
def test_no_alarm_on_modules(kind: str, habit: Habit, request: pytest.FixtureRequest) -> None:
    """Every second case, and the others under the next habit; all under each with `--whole`."""
    result = {}
    seed = HABITS.index(habit)
    for case in CASES[kind] if request.config.getoption("--whole") else CASES[kind][seed % 2 :: 2]:
        model = case.model(seed, epsilon=None, dtype=habit.dtype)
        losses: list[Callable[[], Tensor]] = [
            lambda m=model, c=case, n=n: c.objective(seed + 7 * n + 1, habit.dtype)(m)  # type: ignore[misc]
            for n in range(habit.passes)
        ]
        heard = alarms(model, of_this_model(laws_of(kind, case.name, habit.dtype), model), losses, habit)
        if heard:
            result[case.name] = heard
    assert result == {}


@cache
def laws_of(kind: str, name: str, dtype: torch.dtype) -> LawSet:
    """The laws of a case, which are those of all models of its architecture and precision."""
    case = next(case for case in CASES[kind] if case.name == name)
    return case.laws(case.model(0, epsilon=None, dtype=dtype))


def of_this_model(laws: LawSet, model: nn.Module) -> LawSet:
    """Laws read off another model of the same architecture."""
    own = dict(model.named_parameters())
    return replace(laws, parameters={name: own[name] for name in laws.parameters})


FEW = [Habit(name="float32"), Habit(name="bfloat16 autocast", autocast=torch.bfloat16, told=True)]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("habit", FEW, ids=lambda habit: habit.name)
def test_no_alarm_on_transformers(habit: Habit, request: pytest.FixtureRequest) -> None:
    """Every second family, the others under the other habit; all under both with `--whole`; images in float32."""
    result = {}
    for number, family in enumerate(hf_zoo.FAMILIES):
        images = "image_size" in family.options
        if images and habit.autocast is not None:
            continue
        if not images and number % 2 != FEW.index(habit) and not request.config.getoption("--whole"):
            continue
        # Images are drawn in float64, and the models' own norms run in float32 all the same.
        model = hf_zoo.generic(family.build(0, torch.float64 if images else habit.dtype), epsilon=1e-6)
        losses: list[Callable[[], Tensor]] = [lambda f=family, m=model: f.objective(m, 0)]  # type: ignore[misc]
        heard = alarms(model, family.laws(model), losses, habit)
        if heard:
            result[family.name] = heard
    assert result == {}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("habit", FEW, ids=lambda habit: habit.name)
@pytest.mark.parametrize("base", ["frozen", "trained"])
def test_no_alarm_on_adapters(base: str, habit: Habit) -> None:
    family = hf_zoo.named("Llama")
    heard = []
    for seed in range(ADAPTERS):
        torch.manual_seed(seed)
        options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(family.build(seed, habit.dtype), options)
        model = hf_zoo.generic(model, epsilon=1e-6)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad or base == "trained")
        laws = recognize(model, loss="cross_entropy")
        assert len(laws) > 0
        heard += alarms(model, laws, [lambda m=model, s=seed: family.objective(m, s)], habit)  # type: ignore[misc]
    assert heard == []


class Checkpointed(nn.Module):
    """A decoder each of whose layers is computed again in the backward pass."""

    def __init__(self, model: Any, *, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embedding(tokens)
        for layer in self.model.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.model.head(self.model.norm(x))


def _decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return blocks.DecoderLM(48, 16, 2, 4, 24, kv_heads=2)


def _next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), tokens.roll(-1, -1).flatten())


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_no_alarm_on_checkpointed_layers(reentrant: bool) -> None:
    heard = []
    laws = recognize(_decoder(0), loss="cross_entropy")
    for seed in range(CHECKPOINTED):
        model = _decoder(seed)
        run = Checkpointed(model, reentrant=reentrant)
        tokens = torch.randint(48, (2, 12))
        for habit in FEW:
            model.zero_grad()
            own = of_this_model(laws, model)
            heard += alarms(model, own, [lambda r=run, t=tokens: _next_token(r(t), t)], habit)  # type: ignore[misc]
    assert heard == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_no_alarm_on_a_compiled_model() -> None:
    model = encoder(norm_first=True, layers=2)
    laws = recognize(model)
    compiled = torch.compile(model, backend="aot_eager")
    heard = []
    for seed in range(COMPILED):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        heard += alarms(model, laws, [lambda x=x: compiled(x).sin().mean()], FEW[0])  # type: ignore[misc]
    assert len(laws) > 0
    assert heard == []


def test_there_are_hundreds_of_passes() -> None:
    lawful = sum(map(len, CASES.values()))
    assert lawful * sum(habit.passes for habit in HABITS) + len(hf_zoo.FAMILIES) * len(FEW) >= 500
