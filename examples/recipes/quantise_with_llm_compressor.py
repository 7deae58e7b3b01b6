"""Quantise with llm-compressor after moving the model to the point that its scheme rounds best.

    python examples/recipes/quantise_with_llm_compressor.py FOLDER OUT

FOLDER is a checkpoint of transformers. Needs llmcompressor.
"""

import sys

import transformers
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier

from conserved import transform

folder, out = sys.argv[1:3]
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
print(transform.fit_to_scheme(model, scheme="int8-channel"))
recipe = QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])
oneshot(model=model, recipe=recipe, pipeline="datafree", output_dir=out)
print(f"written to {out}")
