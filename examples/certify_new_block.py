"""Prove how many conservation laws a block has, and let someone else check the proof without the block.

The block of `discover_new_block.py`: floating point said seven laws. A certificate says that there are at most so many,
by ball arithmetic, and that each of those listed is a law, by a symbolic argument.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from conserved import Certificate, certify
from discover_new_block import BilinearGate


def main() -> None:
    """Make a certificate, write it, and check the file as a stranger would."""
    torch.manual_seed(0)
    certificate = certify(BilinearGate(dim=4, hidden=3, rank=2), torch.zeros(6, 4))
    print(certificate.summary())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bilinear_gate.json"
        certificate.save(path)
        print(f"\nthe file has {path.stat().st_size // 1024} kB; checked again from it alone:")
        print(Certificate.load(path).check())


if __name__ == "__main__":
    main()
