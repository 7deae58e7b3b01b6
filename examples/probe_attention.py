"""What softmax attention can see of its queries and keys: the energy field, exactly, at any length.

First tensors of any origin at a length whose matrix would take four gigabytes, then a key that stands out, then a
live model with its own attention backend.
"""

from __future__ import annotations

import torch

from conserved import attention
from conserved.blocks import DecoderLM


def main() -> None:
    """Spectrum, evenness and coherence: of Gaussian keys, of a model, of a key that stands out."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 32_768, 64, generator=generator)
    field = attention.energy_field(q, k)
    mean, deviation = attention.gaussian_coherence(32_768, 64)
    print(f"32,768 Gaussian keys: rank {int(field.rank)} of at most {field.bound}")
    print(f"  participation {float(field.participation):.2f}, coherence {float(field.coherence):.2f}")
    print(f"  coherence of Gaussian keys of this size: {mean:.2f} ± {deviation:.2f}")

    k[0, 1000] *= 8
    sink = attention.energy_field(q, k)
    print(f"one key eight times as long: coherence {float(sink.coherence):.1f}")

    torch.manual_seed(0)
    model = DecoderLM(50, 32, 2, 4, 48)
    tokens = torch.randint(50, (2, 100), generator=generator)
    found = attention.probe(model, tokens)
    print(found.verdict)
    spread = sorted(found.rows, key=lambda row: row.participation)
    print(
        f"least evenly spread: head {spread[0].head} of {spread[0].layer}, participation {spread[0].participation:.2f}"
    )


if __name__ == "__main__":
    main()
