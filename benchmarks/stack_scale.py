"""What laws and audits of a 405-billion-parameter decoder cost on 1,024 processes, by simulation.

    python benchmarks/stack_scale.py [--layers N …] [--out FOLDER]

One process stands for rank 0 of 1,024 through PyTorch's fake process group; parameters are on the meta device. The
decoder has the sizes of Llama 3.1 405B and is cut eight ways by tensor parallelism, as Megatron marks it, with 128
data-parallel replicas. Nothing is trained: what is measured is the time and memory to read the laws of one process's
pieces, and what is counted are the bytes and messages of an audit, from the same plan that an audit follows.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import conserved
from conserved.layout import LawAssembly, layout_of
from conserved.layout.leg_sums import small_shape
from measure import RESULTS, commit, machine, save
from stack_by_hand import CopyToPieces, SumOfPieces
from stack_models import Decoder, DecoderConfig

WORLD, TENSOR = 1024, 8
WHOLE = {"vocabulary": 128256, "width": 16384, "heads": 128, "key_heads": 8, "hidden": 53248, "length": 64}
"""Sizes of Llama 3.1 405B, which has 126 layers."""

FLOAT = 8
"""Bytes of a number that is added up over processes."""


class Cut(nn.Module):
    """A layer of which this process holds an eighth of the heads or hidden units, marked as Megatron marks it."""

    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner = inner
        for name, linear in inner.named_children():
            axis = 1 if name in ("wo", "w2") else 0
            weight: Any = linear.weight
            shape = list(weight.shape)
            shape[axis] //= TENSOR
            linear.weight = nn.Parameter(torch.empty(shape, device="meta"))
            vars(linear.weight).update(tensor_model_parallel=True, partition_dim=axis, partition_stride=1)
            vars(linear)["tp_group"] = group

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Return the sum of what all processes compute."""
        summed: torch.Tensor = SumOfPieces.apply(self.inner(CopyToPieces.apply(x, True), *more))
        return summed


def make_pieces(layers: int) -> Decoder:
    """Return rank 0's pieces of the decoder, on the meta device."""
    groups = [dist.new_group(list(range(first, first + TENSOR))) for first in (0,)]
    with torch.device("meta"):
        model = Decoder(DecoderConfig(layers=layers, **WHOLE))
    for layer in model.layers.values():
        assert isinstance(layer.attention, nn.Module)
        assert isinstance(layer.feed_forward, nn.Module)
        layer.attention = Cut(layer.attention, groups[0])
        layer.feed_forward = Cut(layer.feed_forward, groups[0])
    return model


def count_audit(model: nn.Module, laws: conserved.LawSet) -> dict[str, Any]:
    """Return the bytes and messages of one audit on one process, and the largest leg it converts."""
    layout = layout_of(model)
    assembly = LawAssembly.of(layout, laws.symmetries)
    numbers = dict.fromkeys(assembly.groups, 0)
    for part in assembly.sums.values():
        rows, columns = small_shape(part.kind, part.leg)
        # A row's length, and the products and squares of the rows of its unit.
        count = 3 * part.leg.view.m if part.kind.linear else rows + rows * columns
        for group in part.groups:
            numbers[group] += count
    added = sum(2 * (group.size - 1) * FLOAT * count // group.size for group, count in numbers.items())
    compared = {group: 2 * len(names) for group, names in layout.replica_groups().items()}
    prints = sum((group.size - 1) * 3 * FLOAT * tensors for group, tensors in compared.items())
    largest = max((leg.view.n * leg.view.m for law in laws for leg in law.legs), default=0)
    local = sum(p.numel() for p in model.parameters())
    return {
        "parameters_of_process": local,
        "laws_over_processes": len(assembly.names),
        "laws_of_process": len(laws) - len(assembly.names),
        "numbers_added_up": sum(numbers.values()),
        "bytes_sent": added + prints,
        "bytes_sent_if_gathered": 2 * (TENSOR - 1) * local * 4,
        "messages": 2 * len(numbers) + 2 * len(compared),
        "largest_leg_bytes_in_float64": 2 * FLOAT * largest,
    }


def measure(layers: int) -> dict[str, Any]:
    """Read the laws of a decoder of some layers, and count an audit of it."""
    model = make_pieces(layers)
    tokens = torch.zeros(1, WHOLE["length"], dtype=torch.long, device="meta")
    began = time.perf_counter()
    laws = conserved.recognize(model, tokens)
    seconds = time.perf_counter() - began
    whole = sum(p.numel() * (TENSOR if hasattr(p, "partition_dim") else 1) for p in model.parameters())
    return {
        "layers": layers,
        "parameters": whole,
        "laws": len(laws),
        "identities": sum(law.kind.identities(law.legs[0].view.n, law.legs[0].view.m) for law in laws)
        if hasattr(next(iter(laws)).kind, "identities")
        else None,
        "reading_seconds": round(seconds, 2),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **count_audit(model, laws),
    }


def main() -> None:
    """Measure decoders of some depths, and save after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 16, 126])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    rows = []
    for layers in given.layers:
        rows.append(measure(layers))
        print(rows[-1], flush=True)
        record = {"commit": commit(), "machine": machine(), "processes": WORLD, "tensor_parallel": TENSOR, "rows": rows}
        print(save("stack_scale", record, given.out), flush=True)


if __name__ == "__main__":
    main()
