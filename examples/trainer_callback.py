"""Fine-tune with transformers.Trainer and watch every conservation law of the model: one more callback.

The text is the standard library of the running interpreter, as bytes, so nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from conserved.integrations import ConservationCallback
from conserved.tracking import RunStore
from conserved_papers.lab.data.embedded import standard_library


class Bytes(Dataset[dict[str, Tensor]]):
    """Stretches of text as the Trainer wants them."""

    def __init__(self, count: int, length: int) -> None:
        self.rows = standard_library().examples(count, length=length).inputs

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def main() -> None:
    """Thirty steps of AdamW, and what they did to the laws."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    watching = ConservationCallback()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=30,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=10,
            **options,
        )
        Trainer(model=model, args=arguments, train_dataset=Bytes(64, 64), callbacks=[watching]).train()
        with RunStore(f"{folder}/conserved.db") as store:
            (run,) = store.runs()
            print(f"{len(store.entries(run, step=30))} laws watched over {len(store.steps(run))} steps")
    monitor = watching.monitor
    assert monitor is not None
    for family, error in sorted(monitor.errors(by="family").items(), key=lambda item: -item[1]):
        print(f"  {family:<14} changed by {error:.1e}")
    print(f"{len(monitor.alarms)} alarms: all of it is what AdamW does, none of it a wrong gradient")


if __name__ == "__main__":
    main()
