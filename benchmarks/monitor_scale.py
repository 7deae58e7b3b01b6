"""Default monitors on clean and on broken runs at 125 million parameters in half precision.

    python benchmarks/monitor_scale.py --steps 500 --seconds 240 --out benchmarks/results

A Llama of transformers on bytes of Python's own standard library. The monitor gets the model and the optimizer and
nothing else; further clean runs have it as the callback of transformers' Trainer and of Lightning. Clean runs must
raise no alarm; each defect begins at one step, and the alarm must come at the first audit from then on, with the right
law and the right kind.
"""

from __future__ import annotations

import argparse
import gc
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import conserved
from measure import commit, machine, save

Plant = Callable[[nn.Module, int], None]

SIZE: dict[str, dict[str, int]] = {
    "cuda": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "cpu": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
}


def text(device: str) -> Tensor:
    """Bytes of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:120]
    return torch.tensor([*b"".join(file.read_bytes() for file in files)], dtype=torch.long, device=device)


def from_step(first: int, name: str, rows: slice, factor: float) -> Plant:
    """Multiply the gradient of some rows by a factor from a step on."""

    def plant(model: nn.Module, step: int) -> None:
        gradient = model.get_parameter(name).grad
        if step >= first and gradient is not None:
            gradient[rows] *= factor

    return plant


def once(at: int, name: str) -> Plant:
    """Flip one entry of a gradient to ten times its norm, in one step."""

    def plant(model: nn.Module, step: int) -> None:
        gradient = model.get_parameter(name).grad
        if step == at and gradient is not None:
            gradient[5, 7] = 10 * gradient.float().norm()

    return plant


def defects(first: int) -> dict[str, tuple[Plant, str, str]]:
    """By name: what is planted, a part of the law that must be named, the kind of alarm.

    A value that is wrong in one step alone is planted in a step that every monitor looks at: a power of two.
    """
    looked_at = 1 << (first - 1).bit_length()
    layer = "model.layers.2." if not torch.cuda.is_available() else "model.layers.5."
    width = 32 if not torch.cuda.is_available() else 64
    return {
        "key head × −1": (
            from_step(first, layer + "self_attn.k_proj.weight", slice(0, width), -1),
            "query_key",
            "gradient",
        ),
        "value head × 1.05": (
            from_step(first, layer + "self_attn.v_proj.weight", slice(0, width), 1.05),
            "value_output",
            "gradient",
        ),
        "up × 0": (from_step(first, layer + "mlp.up_proj.weight", slice(None), 0), "gated_neurons", "gradient"),
        "gain × 1.05": (from_step(first, layer + "input_layernorm.weight", slice(None), 1.05), "gain", "gradient"),
        "one entry once": (once(looked_at, layer + "mlp.up_proj.weight"), "", "hardware"),
    }


def build(precision: str, device: str) -> nn.Module:
    """A Llama with a vocabulary of 32,000."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=512, **SIZE[device])
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config)
    return model.bfloat16() if precision == "bf16" else model


class Batches:
    """A data set of random places in a text, the same in every run."""

    def __init__(self, count: int, length: int) -> None:
        self.data, self.count, self.length = text("cpu"), count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        start = int(torch.randint(len(self.data) - self.length, (), generator=generator))
        tokens = self.data[start : start + self.length]
        return {"input_ids": tokens, "labels": tokens}


def train(precision: str, optimizer_name: str, steps: int, plant: Plant | None, device: str) -> dict[str, Any]:
    """Train with a default monitor; what it said, and what it took."""
    model = build(precision, device)
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    hidden_ids = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in hidden_ids]
    if optimizer_name == "Muon":
        optimizers = [torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(others, lr=3e-4)]
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4)]
    monitor = conserved.Monitor(model, optimizers if len(optimizers) > 1 else optimizers[0])
    data, generator = text(device), torch.Generator().manual_seed(0)
    length, batch = (512, 4) if device == "cuda" else (64, 4)
    began, loss = time.perf_counter(), torch.zeros(())
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - length, (batch,), generator=generator).tolist()
        tokens = torch.stack([data[start : start + length] for start in starts])
        with torch.autocast(device, torch.bfloat16, enabled=precision == "autocast"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if plant is not None:
            plant(model, step)
        for optimizer in optimizers:
            optimizer.step()
        monitor.step(loss=loss)
        for optimizer in optimizers:
            optimizer.zero_grad()
    seconds = time.perf_counter() - began
    monitor.close()
    return summarize(monitor, precision, optimizer_name, steps, seconds) | {"loss": float(loss.detach())}


def train_by_trainer(precision: str, steps: int, device: str) -> dict[str, Any]:
    """Train by transformers' Trainer with the callback and nothing else."""
    from transformers import Trainer, TrainingArguments

    from conserved.integrations import ConservationCallback

    length, batch = (512, 4) if device == "cuda" else (64, 4)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=3e-4,
            bf16=precision == "autocast",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        callback, began = ConservationCallback(), time.perf_counter()
        data: Any = Batches(steps * batch, length)
        Trainer(model=build(precision, device), args=options, train_dataset=data, callbacks=[callback]).train()
        assert callback.monitor is not None
        return summarize(callback.monitor, precision, "AdamW, Trainer", steps, time.perf_counter() - began)


def train_by_lightning(precision: str, steps: int, device: str) -> dict[str, Any]:
    """Train by Lightning with the callback and nothing else."""
    import lightning.pytorch as pl

    from conserved.integrations import LightningConservation

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(precision, device)

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    length, batch = (512, 4) if device == "cuda" else (64, 4)
    with tempfile.TemporaryDirectory() as folder:
        callback, began = LightningConservation(), time.perf_counter()
        trainer = pl.Trainer(
            max_steps=steps,
            precision="bf16-mixed" if precision == "autocast" else "32-true",
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        data: Any = Batches(steps * batch, length)
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=batch))
        assert callback.monitor is not None
        return summarize(callback.monitor, precision, "AdamW, Lightning", steps, time.perf_counter() - began)


def summarize(monitor: Any, precision: str, optimizer: str, steps: int, seconds: float) -> dict[str, Any]:
    """What a monitor said of a run."""
    audits = monitor.audits
    return {
        "precision": precision,
        "optimizer": optimizer,
        "steps": steps,
        "seconds": seconds,
        "state": str(monitor.state),
        "audits": len(audits),
        "conclusive": sum(entry.conclusive for entry in audits),
        "refuted": [entry.step for entry in audits if entry.refuted],
        "audited": [entry.step for entry in audits],
        "seconds of audits": [round(entry.seconds, 4) for entry in audits],
        "replays": sum(entry.replays for entry in audits),
        "notes": list(monitor.notes),
        "alarms": [
            {
                "code": a.code,
                "kind": a.kind,
                "step": a.step,
                "last": a.last,
                "laws": list(a.laws)[:6],
                "message": a.message[:400],
            }
            for a in monitor.alarms
        ],
    }


def main() -> None:
    """Clean runs first, then one run for each defect."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--name", default="monitor_scale")
    parser.add_argument("--optimizers", default="AdamW,Muon,Trainer,Lightning")
    parser.add_argument("--precisions", default="bf16,autocast")
    parser.add_argument("--defects", type=int, default=1, help="0 for clean runs alone")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases: list[tuple[str, str, str, int, Any]] = [
        ("clean", precision, name, chosen.steps, None)
        for name in filter(None, chosen.optimizers.split(","))
        for precision in chosen.precisions.split(",")
        if name != "Muon" or hasattr(torch.optim, "Muon")
    ]
    planted = defects(chosen.first) if chosen.defects else {}
    for precision in chosen.precisions.split(","):
        cases += [(label, precision, "AdamW", chosen.first + 60, case) for label, case in planted.items()]
    began, done = time.perf_counter(), []
    for label, precision, name, steps, case in cases:
        if time.perf_counter() - began > chosen.seconds:
            print(f"not run for lack of time: {label} {precision} {name}")
            continue
        try:
            if name == "Trainer":
                record = train_by_trainer(precision, steps, device)
            elif name == "Lightning":
                record = train_by_lightning(precision, steps, device)
            else:
                record = train(precision, name, steps, case[0] if case else None, device)
            record["case"] = label
        except Exception as problem:
            record = {"case": label, "precision": precision, "error": f"{type(problem).__name__}: {problem}"[:400]}
        done.append(record)
        print({key: value for key, value in record.items() if key not in ("audited", "steps")}, flush=True)
        if chosen.out:
            save(chosen.name, {"commit": commit(), "machine": machine(), "runs": done}, chosen.out)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
