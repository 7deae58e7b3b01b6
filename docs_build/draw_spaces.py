"""Draws the graph of a decoder block with the spaces of its laws in colour: docs/assets/spaces.svg.

    python docs_build/draw_spaces.py

Nothing is drawn by hand: the operations are those of a forward pass, and an arrow has a law's colour if the tensor it
stands for moves when the law's parameters do. Operations of one module are one box; views and copies are left out.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch

from conserved import blocks, recognize
from conserved.inference.derivation import Derivation
from conserved.inference.rules import base_name

TARGET = Path(__file__).parent.parent / "docs" / "assets" / "spaces.svg"
COLOURS = {
    "stream_scale": ("#6b7280", "scale of the residual stream (up to ε)"),
    "norm1.gain": ("#d97706", "channels of the first norm"),
    "attention.query_key[0]": ("#2563eb", "rotary planes of queries and keys, head 0"),
    "attention.value_output[0]": ("#059669", "values of head 0, GL(4)"),
    "norm2.gain": ("#db2777", "channels of the second norm"),
    "feedforward.gated_neurons": ("#7c3aed", "gated neurons"),
}
WORDS = {
    "bmm": "product",
    "masked_fill": "mask",
    "_softmax": "softmax",
    "add": "+",
    "silu": "SiLU",
    "mul": "×",
    "embedding": "look up",
}
QUIET = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "clone", "_to_copy"),
    *("slice", "split", "stack", "cat", "neg", "alias", "detach", "select", "unbind", "contiguous"),
}
WIDTH, STEP, BOX = 760, 62, 34


def main() -> None:
    """Follow one block, gather its operations into boxes, place them in layers, draw."""
    torch.manual_seed(0)
    model = blocks.DecoderLM(16, 8, 1, 2, 12)
    laws = recognize(model, torch.zeros(1, 3, dtype=torch.int64))
    derivation = laws.derivation
    assert isinstance(derivation, Derivation)
    program = derivation.typing.program
    moving: dict[str, set[int]] = {}
    for key in COLOURS:
        (symmetry,) = (one for one in laws if one.name.endswith(key))
        moving[key] = derivation.moved_values(symmetry)
    box: dict[int, str] = {}
    label: dict[str, str] = {}
    edges: dict[tuple[str, str], set[str]] = defaultdict(set)
    order: list[str] = []
    for number in derivation.typing.live:
        operation = program.operations[number]
        name = base_name(operation.name).removeprefix("aten::")
        sources = [value for value in operation.inputs() if value in box]
        module = operation.module.removeprefix("layers.0.")
        whole = module.endswith(
            ("norm1", "norm2", "norm", ".q", ".k", ".v", ".o", ".gate", ".up", ".down", "head", "embedding")
        )
        if name in QUIET and len({box[v] for v in sources}) <= 1 and not whole:
            for result in operation.results:
                if sources:
                    box[result] = box[sources[0]]
            continue
        if not sources and not whole:
            continue
        key = module if whole else f"{module}:{number}"
        if not whole and name in ("mul", "add", "sub", "cat", "neg") and module == "attention":
            # Everything between a projection and the product it goes into: rotary positions.
            feeds = sorted({box[v] for v in sources})
            key = (
                feeds[0]
                if feeds and feeds[0].startswith("rotary")
                else f"rotary of {feeds[0].rpartition('.')[2]}"
                if feeds
                else key
            )
        if key not in label:
            label[key] = (
                module.rpartition(".")[2] if whole else key if key.startswith("rotary") else WORDS.get(name, name)
            )
            order.append(key)
        for value in sources:
            if box[value] != key:
                edges[box[value], key].update(key_ for key_, mine in moving.items() if value in mine)
        for result in operation.results:
            box[result] = key
    draw(order, label, edges)


def draw(order: list[str], label: dict[str, str], edges: dict[tuple[str, str], set[str]]) -> None:
    """Boxes in layers from top to bottom, arrows as coloured strands."""
    layer: dict[str, int] = {}
    for key in order:
        layer[key] = 1 + max((layer[a] for a, b in edges if b == key and a in layer), default=-1)
    rows: dict[int, list[str]] = defaultdict(list)
    for key in order:
        rows[layer[key]].append(key)
    x: dict[str, float] = {}
    y: dict[str, float] = {}
    for depth, members in sorted(rows.items()):
        members.sort(
            key=lambda key: (
                sum(x.get(a, WIDTH / 2) for a, b in edges if b == key) / max(1, sum(b == key for _, b in edges))
            )
        )
        for place, key in enumerate(members):
            x[key], y[key] = WIDTH * (place + 1) / (len(members) + 1), 30 + depth * STEP
    height = int(max(y.values())) + 60 + 20 * len(COLOURS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for (a, b), keys in edges.items():
        strands = [key for key in COLOURS if key in keys] or [""]
        for n, key in enumerate(strands):
            shift = 4 * (n - (len(strands) - 1) / 2)
            colour, width = (COLOURS[key][0], 2.6) if key else ("#cbd5e1", 1.2)
            x1, y1, x2, y2 = x[a] + shift, y[a] + BOX / 2, x[b] + shift, y[b] - BOX / 2
            bend = 0.45 * (y2 - y1)
            aside = 0.0 if y2 - y1 < 1.5 * STEP else (-120.0 if x1 <= WIDTH / 2 else 120.0)
            parts.append(
                f'<path d="M{x1:.1f} {y1:.1f} C{x1 + aside:.1f} {y1 + bend:.1f} '
                f'{x2 + aside:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}" '
                f'fill="none" stroke="{colour}" stroke-width="{width}"/>'
            )
    for key in order:
        width = 16 + 8 * len(label[key])
        parts.append(
            f'<rect x="{x[key] - width / 2:.1f}" y="{y[key] - BOX / 2:.1f}" width="{width}" height="{BOX}" '
            'rx="7" fill="white" stroke="#334155"/>'
            f'<text x="{x[key]:.1f}" y="{y[key] + 4.5:.1f}" text-anchor="middle" fill="#0f172a">{label[key]}</text>'
        )
    for n, (colour, meaning) in enumerate(COLOURS.values()):
        top = height - 20 * (len(COLOURS) - n)
        parts.append(
            f'<rect x="24" y="{top - 9}" width="22" height="5" fill="{colour}"/>'
            f'<text x="54" y="{top - 2}" fill="#0f172a">{meaning}</text>'
        )
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text("\n".join([*parts, "</svg>"]) + "\n")
    print("wrote", TARGET)


if __name__ == "__main__":
    main()
