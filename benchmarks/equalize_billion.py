"""Time and memory of `equalize` on a billion parameters, against one read of the weights.

A Llama of 1.0 billion random parameters in bfloat16 is written to safetensors files. Each task runs in a process of its
own: `conserved equalize FOLDER -o OUT` for each objective that needs no data (files are read, moved and written group
by group), `equalize(model)` on the model in memory, only importing what these import, and only reading the weights
once, as float32. Seconds include imports and the inference of the symmetries, which are also given by themselves.

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

from measure import save

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
    indices: dict[str, str] = {}
    count = number = 0
    for name, parameter in model.named_parameters():
        spread = torch.randn(parameter.shape[0], 1).exp() if parameter.ndim > 1 else torch.ones(1)
        shard[name] = (0.02 * spread * torch.randn(parameter.shape) + (parameter.ndim == 1)).to(torch.bfloat16)
        indices[name] = f"model-{number}.safetensors"
        count += parameter.numel()
        if sum(t.numel() for t in shard.values()) > 150_000_000:
            save_file(shard, folder / f"model-{number}.safetensors")
            shard, number = {}, number + 1
    save_file(shard, folder / f"model-{number}.safetensors")
    index = {"metadata": {"total_size": 2 * count}, "weight_map": indices}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return count


def worked(folder: Path, task: str) -> None:
    """One task in this process; prints seconds and peak memory."""
    start = time.perf_counter()
    from conserved.transform import Checkpoint, equalize, symmetries_of

    record: dict[str, Any] = {}

    def lap(name: str) -> None:
        record[name] = round(time.perf_counter() - start - sum(record.values()), 2)

    lap("imports")
    way, _, objective = task.partition(" ")
    if way == "read":
        from safetensors import safe_open

        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    opened.get_tensor(name).float()
        lap("reading")
    elif way == "files":
        from conserved.cli.models import load_model

        laws = symmetries_of(load_model(str(folder), [], weights=False))
        lap("symmetries")
        out = folder.parent / "out"
        weights = Checkpoint(folder, out, laws.parameters)
        lap("copying files")
        result = equalize(weights, laws=laws, objective=objective)
        lap("equalising")
        shutil.rmtree(out)
    elif way == "memory":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        lap("loading")
        laws = symmetries_of(model)
        lap("symmetries")
        result = equalize(model, laws=laws, objective=objective)
        lap("equalising")
    record["seconds"] = round(time.perf_counter() - start, 2)
    record["processor seconds"] = round(time.process_time(), 2)
    record["peak GB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)
    if way in ("files", "memory"):
        record |= {
            "sweeps": result.sweeps,
            "moved": len(result.moved.moved),
            "tensors": len(set(result.moved.parameters)),
        }
    print(json.dumps(record))


TASKS = (
    "imports",
    "read",
    "files range",
    "files incoherent",
    "memory range",
    "files balanced",
)


def main() -> None:
    """Run every task in a process of its own, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--task", default="", help="run one in this process")
    parser.add_argument("--tasks", default="", help="those to run, with semicolons in between")
    options = parser.parse_args()
    if options.task and options.task != "write":
        worked(options.folder / "in", options.task)
        return
    if options.task == "write":
        print(written(options.folder / "in", options.layers))
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    own = [sys.executable, __file__, "--folder", str(options.folder), "--layers", str(options.layers), "--task"]
    # In a process of its own: a child's peak memory starts from what its parent had.
    made = subprocess.run([*own, "write"], capture_output=True, text=True, check=True)
    count = int(made.stdout.splitlines()[-1])
    rows: dict[str, Any] = {}
    for task in TASKS if not options.tasks else options.tasks.split(";"):
        done = subprocess.run([*own, task], capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        rows[task] = json.loads(lines[-1]) if lines else {"failed": done.stderr[-300:]}
        print(task, rows[task], flush=True)
    shutil.rmtree(options.folder)
    print(save("equalize_billion", {"parameters": count, "stored": "bfloat16", "rows": rows}))


if __name__ == "__main__":
    main()
