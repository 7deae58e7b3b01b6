"""Adapters equalised while they train: factors are balanced, the function stays, the optimizer's averages go along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from conserved.integrations import EqualizeCallback
from conserved.transform import EqualizeEvery

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def adapted() -> Any:
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    return peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))


def factors(model: nn.Module) -> list[tuple[Any, Any]]:
    own = dict(model.named_parameters())
    return [(p, own[n.replace("lora_A", "lora_B")]) for n, p in own.items() if "lora_A" in n]


def imbalance(model: nn.Module) -> float:
    return max(float((a @ a.T - b.T @ b).norm() / (a.norm() ** 2 + b.norm() ** 2)) for a, b in factors(model))


def test_adapters_alone_are_moved_and_the_outputs_stay() -> None:
    model, ids = adapted(), torch.arange(2, 10)[None]
    with torch.no_grad():
        for _, b in factors(model):
            b.normal_(0, 0.01)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = model(ids).logits
    assert imbalance(model) > 0.5
    equalizer = EqualizeEvery(model, ids, every=2)
    assert imbalance(model) < 1e-6
    torch.testing.assert_close(model(ids).logits, before)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert len(equalizer.symmetries) == 2


def test_zero_factors_are_left_alone_at_the_start() -> None:
    model, ids = adapted(), torch.arange(2, 10)[None]
    start = [a.detach().clone() for a, _ in factors(model)]
    equalizer = EqualizeEvery(model, ids, every=0)
    assert equalizer.last is not None
    assert all("zero" in why for why in equalizer.last.skipped.values())
    assert all(torch.equal(a, old) for (a, _), old in zip(factors(model), start, strict=True))


def test_momentum_goes_along_so_that_descent_in_a_scaled_frame_is_the_same() -> None:
    """With balanced scalars (a, b) the averages after a move are those of a run that had been there all along."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False)).double()
    with torch.no_grad():
        model[2].weight.mul_(4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.randn(5, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    optimizer.step()
    gradient = model[0].weight.grad.clone()
    scale = model[0].weight.norm(dim=1) ** -0.5 * model[2].weight.norm(dim=0) ** 0.5
    EqualizeEvery(model, x, optimizer=optimizer, every=0)
    state = optimizer.state[model[0].weight]
    torch.testing.assert_close(state["exp_avg"], 0.1 * gradient / scale.detach()[:, None])
    torch.testing.assert_close(state["exp_avg_sq"], 0.001 * (gradient / scale.detach()[:, None]) ** 2)


def test_a_trainer_calls_it(tmp_path: Path) -> None:
    model = adapted()
    rows = [{"input_ids": torch.arange(2, 10), "labels": torch.arange(2, 10)} for _ in range(8)]
    callback = EqualizeCallback(every=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    assert callback.equalizer is not None
    assert callback.equalizer.steps == 4
    assert imbalance(model) < 1e-4


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="every"):
        EqualizeEvery(nn.Linear(2, 2), torch.zeros(1, 2), every=-1)
