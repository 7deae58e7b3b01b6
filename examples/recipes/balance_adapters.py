"""Balance the factors of LoRA adapters before saving them: the same function with the smallest norm.

    python examples/recipes/balance_adapters.py

Needs peft.
"""

import peft
import torch
import transformers

from conserved import transform

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
model = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=["q_proj"]))
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.3)  # as after training
tokens = torch.randint(64, (2, 8))
before = model(tokens).logits
laws = transform.symmetries_of(model, tokens)
adapters = [s for s in laws.symmetries if all("lora_" in name for name in s.parameters)]
print(transform.equalize(model, laws=adapters, objective="balanced"))
print(f"change of logits: {float((model(tokens).logits - before).abs().max()):.1e}")
