"""What gradient descent does to laws and to look-alikes, step size by step size, and to one head in full.

A decoder learns text for the same flow time with steps of five sizes. A quadratic law drifts in proportion to the step,
a linear one not at all, and a quantity that is no law drifts by the same amount however small the step. The figures of
the documentation are drawn from what this saves.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved import LawSet, recognize
from conserved.blocks import DecoderLM
from conserved_papers.lab.data import Examples
from conserved_papers.lab.data.embedded import standard_library
from measure import save

STEPS = (0.02, 0.01, 0.005, 0.0025, 0.00125)
TIME = 2.4
HEAD = "layers.0.attention"


def decoder() -> nn.Module:
    """Two layers of grouped rotary attention and gated experts, in float64."""
    torch.manual_seed(0)
    return DecoderLM(256, 32, 2, 4, 48, max_length=64, kv_heads=2, experts=4, positions="learned", norm="rms").double()


def trained(start: nn.Module, text: Examples, step: float) -> tuple[nn.Module, float]:
    """Plain gradient descent over the flow time; the model and its last loss."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    loss = torch.zeros(())
    for _ in range(round(TIME / step)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text.inputs).flatten(0, 1), text.targets.flatten())
        loss.backward()
        optimizer.step()
    return model, loss.item()


def watched(model: nn.Module) -> LawSet:
    """The exact laws, and the quantities that look like them."""
    result = recognize(model, loss="cross_entropy").select(lambda symmetry: symmetry.exact)
    return LawSet(symmetries=(*result, *result.baselines()), parameters=result.parameters)


def drifts(start: nn.Module, end: nn.Module) -> dict[str, float]:
    """The change of all laws of a family together, over the size of the terms they are made of."""
    laws = watched(start)
    before, after = laws.reference(), laws.values(dict(end.named_parameters()))
    change: dict[str, float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)
    for law in laws:
        change[law.family] += float((after[law.name] - before.values[law.name]).square().sum())
        size[law.family] += float(before.scales[law.name].square().sum())
    return {family: math.sqrt(change[family] / size[family]) for family in change}


def head(model: nn.Module) -> dict[str, list[list[float]]]:
    """The law of the first head of values, V Vᵀ − Oᵀ O over the query heads that share it, and its two parts."""
    law = recognize(model)[f"{HEAD}.value_output[0]"]
    parameters: dict[str, Any] = {name: value.detach() for name, value in model.named_parameters()}
    parts: dict[bool, Tensor] = {}
    for leg in law.legs:
        seen = leg.view.of_point(parameters[leg.view.parameter])
        sign = leg.degree > 0
        parts[sign] = parts.get(sign, torch.zeros(())) + seen @ seen.mT
    return {"plus": parts[True].tolist(), "minus": parts[False].tolist(), "law": (parts[True] - parts[False]).tolist()}


def main() -> None:
    """Every step size, from the same weights on the same text."""
    torch.set_num_threads(1)
    start, text = decoder(), standard_library().examples(8, length=47)
    runs = []
    for step in STEPS:
        model, loss = trained(start, text, step)
        runs.append({"step": step, "steps": round(TIME / step), "loss": loss, "drift": drifts(start, model)})
        print(runs[-1])
    heads = {"start": head(start), "end": head(model)}
    print(f"saved {save('order_test', {'time': TIME, 'runs': runs, 'head': HEAD, 'heads': heads})}")


if __name__ == "__main__":
    main()
