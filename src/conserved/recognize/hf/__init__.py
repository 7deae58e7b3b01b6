"""The architectures of the transformers library, one file per family; the library itself is never imported."""

from conserved.recognize.hf import bert, decoder, experts, gpt2, heads, latent, neox, opt, parts, vit

__all__ = ["bert", "decoder", "experts", "gpt2", "heads", "latent", "neox", "opt", "parts", "vit"]
