"""Quantise with torchao after moving the model to the point that its scheme rounds best.

    python examples/recipes/quantise_with_torchao.py FOLDER

Needs torchao.
"""

import sys
from typing import Any

import torch
import transformers
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

from conserved import transform

model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokens = torch.randint(model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
before = model(tokens).logits
batches: list[dict[str, Any]] = [{"input_ids": tokens, "use_cache": False}]  # use text of your own here
print(transform.fit_to_scheme(model, **batches[0], scheme="w8a8", batches=batches))
quantize_(
    model,
    Int8DynamicActivationInt8WeightConfig(),
    filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and "lm_head" not in name,
)
with torch.no_grad():
    print(f"relative change of logits: {float((model(tokens).logits - before).norm() / before.norm()):.2g}")
