"""A Trainer on a small Llama, one head's key gradient wrong from step 21 on: when the callback says so, and that clean
runs stay quiet.

    python benchmarks/watched_training.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from measure import save

OPTIMIZERS: dict[str, tuple[str, float]] = {
    "AdamW 1e-3": ("adamw_torch", 1e-3),
    "AdamW 3e-4": ("adamw_torch", 3e-4),
    "SGD 0.1": ("sgd", 0.1),
}
FACTORS = (1.1, 2.0, 10.0, -1.0, 0.0)
WRONG_FROM = 21


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens in which the next is often the last one plus one."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        start = torch.randint(3, 60, (1,), generator=generator)
        row = (start + torch.arange(24)) % 57 + 3
        noise = torch.rand(24, generator=generator) < 0.2
        row = torch.where(noise, torch.randint(3, 60, (24,), generator=generator), row)
        return {"input_ids": row, "labels": row}


def trained(optimizer: str, rate: float, factor: float | None, steps: int, folder: Path) -> dict[str, Any]:
    """One run: the alarms, and the first step that was audited while the gradient was wrong."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from conserved.integrations import ConservationCallback

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    callback = ConservationCallback(sinks=())

    class Planted(Trainer):  # type: ignore[misc]
        """A trainer whose backward pass gets one head's keys wrong."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            if factor is not None and self.state.global_step + 1 >= WRONG_FROM:
                gradient = model.model.layers[0].self_attn.k_proj.weight.grad
                gradient[:8].mul_(factor)
            return loss

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=rate,
        optim=optimizer,
        logging_steps=500,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    began = time.perf_counter()
    Planted(model=model, args=arguments, train_dataset=Text(), callbacks=[callback]).train()
    monitor = callback.monitor
    assert monitor is not None
    audited = [entry.step for entry in monitor.audits if entry.step >= WRONG_FROM]
    return {
        "alarms": [str(alarm) for alarm in monitor.alarms],
        "codes": [(alarm.code, alarm.step, alarm.law, alarm.value) for alarm in monitor.alarms],
        "first_audited": audited[0] if audited else None,
        "first_refuted": next((entry.step for entry in monitor.audits if entry.refuted), None),
        "audits": len(monitor.audits),
        "conclusive": sum(entry.conclusive for entry in monitor.audits),
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Run the table and the clean runs, print and save them."""
    warnings.filterwarnings("ignore")
    logging.getLogger("conserved").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--planted", type=int, default=125)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name, (optimizer, rate) in OPTIMIZERS.items():
        for factor in FACTORS:
            with tempfile.TemporaryDirectory() as folder:
                result = trained(optimizer, rate, factor, options.planted, Path(folder))
            seen = result["first_refuted"] is not None and result["first_refuted"] == result["first_audited"]
            rows.append({"optimizer": name, "factor": factor, "seen_at_first_audit": seen, **result})
            codes = [(code, step, law) for code, step, law, _ in result["codes"]]
            print(
                f"{name} × {factor}: first audited {result['first_audited']}, refuted {result['first_refuted']}",
                codes,
                flush=True,
            )
    clean = []
    for name, (optimizer, rate) in OPTIMIZERS.items():
        with tempfile.TemporaryDirectory() as folder:
            result = trained(optimizer, rate, None, options.steps, Path(folder))
        clean.append({"optimizer": name, "steps": options.steps, **result})
        print(
            f"{name}, {options.steps} clean steps: {len(result['alarms'])} alarms, {result['audits']} audits, "
            f"{result['conclusive']} conclusive, {result['seconds']:.0f} s",
            flush=True,
        )
    if options.out:
        save("watched_training", {"planted": rows, "clean": clean}, options.out)


if __name__ == "__main__":
    main()
