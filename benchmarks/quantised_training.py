"""Train small language models of four architectures on text until their loss stops falling, and save them as folders.

    python benchmarks/quantised_training.py FOLDER --seeds 3

`quantised_models.py` reads the folders. A folder that is there is not trained again. Training stops when the held-out
loss of the last tenth of the steps is within 1 % of that of the tenth before; `training.json` records both.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from conserved_papers.lab.data.sources import open_text

WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 64, 2, 4, 32, 256

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, intermediate_size=128, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, intermediate_size=128, num_key_value_heads=4, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "opt": lambda: transformers.OPTConfig(
        **COMMON | {"pad_token_id": 1}, ffn_dim=256, word_embed_proj_dim=WIDTH, dropout=0.0, attention_dropout=0.0
    ),
}


def batch(tokens: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Random windows of a text."""
    starts = torch.randint(0, len(tokens) - CONTEXT - 1, (size, 1), generator=generator)
    return tokens[(starts + torch.arange(CONTEXT + 1)).to(tokens.device)]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Cross-entropy of the next byte."""
    guessed = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(guessed.flatten(0, 1), windows[:, 1:].flatten())


def split_text() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes to test on."""
    tokens = open_text("standard-library", vocabulary=VOCABULARY).tokens.long()
    return tokens[:-100_000], tokens[-100_000:]


def train(name: str, seed: int, folder: Path, steps: int, device: str = "cpu") -> None:
    """Train one model, and save it with the curve of its held-out loss."""
    tokens, held = (text.to(device) for text in split_text())
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    test = batch(held, 64, torch.Generator().manual_seed(0))
    curve = []
    start = time.time()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(tokens, 16, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % (steps // 20) == 0:
            with torch.no_grad():
                curve.append(float(loss_of(model.eval(), test)))
            model.train()
    model.eval().save_pretrained(folder)
    record = {"steps": steps, "seconds": round(time.time() - start), "held-out loss": curve}
    (folder / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(name, seed, record["seconds"], "s", [round(v, 3) for v in curve[-5:]], flush=True)


def main() -> None:
    """Train what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    for seed in range(options.seeds):
        for name in CONFIGS:
            folder = options.folder / f"{name}-{seed}"
            if not (folder / "training.json").is_file():
                train(name, seed, folder, options.steps)


if __name__ == "__main__":
    main()
