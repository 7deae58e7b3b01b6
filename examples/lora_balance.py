"""How balanced are LoRA's factors while they train? A Aᵀ − Bᵀ B of every adapter, in plain SGD and in AdamW.

B starts at zero, so the law starts at A Aᵀ: gradient flow never lets the factors become balanced. SGD keeps it up to
the size of its steps. AdamW does not, and the ledger says through which of its parts.
"""

from __future__ import annotations

from collections import defaultdict

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conserved import Monitor

STEPS = 25


def adapted() -> peft.PeftModel:
    """A small Llama with LoRA on queries and values; only the factors are trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(LlamaForCausalLM(config), lora)


def train(optimizer_class: type[torch.optim.Optimizer], rate: float) -> Monitor:
    """A short run on one batch of tokens, watched."""
    model = adapted()
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], lr=rate)  # type: ignore[call-arg]
    monitor = Monitor(model, optimizer, every=1)
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        monitor.step()
    return monitor


def main() -> None:
    """Two optimizers, and what each of its parts did to the laws."""
    for optimizer, rate in ((torch.optim.SGD, 0.1), (torch.optim.AdamW, 0.003)):
        monitor = train(optimizer, rate)
        errors = monitor.errors()
        causes: dict[str, float] = defaultdict(float)
        for entry in monitor.ledger():
            for cause, part in entry.causes.items():
                causes[cause] += abs(part)
            causes["size of the steps"] += abs(entry.second_order)
        total = sum(causes.values())
        print(f"{optimizer.__name__}: relative change of A Aᵀ − Bᵀ B after {STEPS} steps {max(errors.values()):.1e}")
        for cause, part in sorted(causes.items(), key=lambda item: -item[1]):
            print(f"  {part / total:6.1%}  {cause}")
        print(f"  unaccounted for: {len(monitor.alarms)} alarms")


if __name__ == "__main__":
    main()
