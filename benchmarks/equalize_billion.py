"""Time and memory of `equalize` on a billion parameters, against one read of the weights.

A Llama of 1.0 billion random parameters in bfloat16 is written to safetensors files; each objective is then run on the
files in a process of its own (weights are read, moved and written tensor by tensor), and one process only reads them.

    python benchmarks/equalize_billion.py --folder SCRATCH
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from conserved.transform import Checkpoint, equalize, symmetries_of
from conserved.transform.objectives import Range
from measure import save

SWEEPS = 3
"""How often ranges are gone round; the default goes on until they settle, twenty times at the most."""

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 20,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def written(folder: Path, layers: int) -> int:
    """Random weights in files; the number of parameters."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = transformers.LlamaConfig(**(SIZES | {"num_hidden_layers": layers}))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shard: dict[str, torch.Tensor] = {}
    count = number = 0
    for name, parameter in model.named_parameters():
        spread = torch.randn(parameter.shape[0], 1).exp() if parameter.ndim > 1 else torch.ones(1)
        shard[name] = (0.02 * spread * torch.randn(parameter.shape) + (parameter.ndim == 1)).to(torch.bfloat16)
        count += parameter.numel()
        if sum(t.numel() for t in shard.values()) > 150_000_000:
            save_file(shard, folder / f"model-{number}.safetensors")
            shard, number = {}, number + 1
    save_file(shard, folder / f"model-{number}.safetensors")
    return count


def worked(folder: Path, task: str) -> None:
    """One task in this process; prints seconds and peak memory."""
    begun = time.perf_counter()
    record: dict[str, float] = {}
    if task == "imports":
        pass
    elif task == "read":
        from safetensors import safe_open

        total = 0.0
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    total += float(opened.get_tensor(name).float().abs().amax())
    else:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        laws = symmetries_of(model)
        record["symmetries"] = time.perf_counter() - begun
        out = folder.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        weights = Checkpoint(folder, out, laws.parameters)
        record["copy"] = time.perf_counter() - begun - record["symmetries"]
        objective: Any = task
        if task == "range":
            objective = Range()
            objective.sweeps = SWEEPS
        found = equalize(weights, laws=laws, objective=objective)
        record |= {"sweeps": found.sweeps, "moved": len(found.moved.moved), "tensors": len(set(weights.written))}
        shutil.rmtree(out)
    record["seconds"] = time.perf_counter() - begun
    record["peak GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps(record))


def main() -> None:
    """Run every task in a process of its own, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--task", default="")
    options = parser.parse_args()
    if options.task:
        worked(options.folder / "in", options.task)
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    count = written(options.folder / "in", options.layers)
    rows = {}
    for task in ("imports", "read", "range", "incoherent"):
        command = [sys.executable, __file__, "--folder", str(options.folder), "--task", task]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        rows[task] = json.loads(lines[-1]) if lines else {"failed": done.stderr[-300:]}
        print(task, rows[task], flush=True)
    shutil.rmtree(options.folder)
    print(save("equalize_billion", {"parameters": count, "stored": "bfloat16", "rows": rows}))


if __name__ == "__main__":
    main()
