"""Kernels that read the legs of many layers at once, in Triton's interpreter, against the same sums layer by layer."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from as_written import import_as_written
from conserved import Monitor, audit, blocks, recognize
from conserved.moment import Direction, LawPairs, Moments, Plan, Point, triton_backend
from conserved.moment.forms import FormValues, WantedNumbers, forms
from conserved.moment.launches import Launch, Tile
from conserved.moment.layouts import Layout, PlacedProduct, PlainTensors
from conserved.moment.leg_programs import LegProgram, ProgramLeg
from conserved.moment.torch_backend import TORCH
from conserved.moment.triton_backend import KernelCall
from conserved.symmetry import KINDS, Kind, Leg, Symmetry, Tensors, View
from sampling import sampled

pytest.importorskip("triton")
import_as_written("conserved.moment.kernels")

VIEWS = {
    "rows of a head": View.of("w", (24, 5), grid=(3, 8, 5), axes=1, pick={0: 0}),
    "columns of a head": View.of("w", (5, 24), grid=(5, 3, 8), axes=2, pick={1: 0}),
    "one of three fused": View.of("w", (3, 3 * 8, 5), grid=(3, 3, 8, 5), axes=2, pick={0: 1, 1: 0}),
    "rotary pairs side by side": View.of("w", (24, 5), grid=(3, 4, 2, 5), axes=(1, 2), pick={0: 0}),
    "rotary pairs half a head apart": View.of("w", (24, 5), grid=(3, 2, 4, 5), axes=(2, 1), pick={0: 0}),
    "columns of two axes": View.of("w", (4, 8, 5), axes=1),
    "a bias": View.of("w", (24,), grid=(3, 8), axes=1, pick={0: 0}),
    "a range of rows": View.of("w", (24, 5), pick={0: (8, 20)}),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets kernels run on the processor, and lists their launches."""
    launched: list[str] = []
    launch = KernelCall.run

    def counted(self: KernelCall, *args: Any, **options: Any) -> None:
        launched.append(self.kernel)
        launch(self, *args, **options)

    monkeypatch.setattr(triton_backend, "available", lambda device: True)
    monkeypatch.setattr(KernelCall, "run", counted)
    run = Launch.run

    def noted(self: Launch, *args: Any) -> None:
        launched.append("placed_sums")
        run(self, *args)

    monkeypatch.setattr(Launch, "run", noted)
    return launched


def drawn(view: View, dtypes: tuple[torch.dtype, ...]) -> tuple[Layout, list[list[Tensor]], list[list[Tensor]]]:
    """A leg, three sets of tensors of these types, and the (batch, n, m) matrices the leg sees in each."""
    reading = view.reading(tuple(axis for axis, pick in enumerate(view.pick) if pick == 0))
    layout = Layout.of(reading)
    assert layout is not None
    generator = torch.Generator().manual_seed(0)
    sets = [[torch.randn(view.shape, generator=generator).to(one) for one in dtypes] for _ in range(3)]
    seen = [[reading.of(tensor).reshape(-1, view.n, view.m).double() for tensor in some] for some in sets]
    return layout, sets, seen


def run(leg: ProgramLeg, sets: list[list[Tensor]]) -> FormValues:
    tensors = [(len(some) * number, leg.layout.offset) for number, some in enumerate(sets)]
    program = LegProgram.of([(replace(leg, layout=leg.layout.from_first()), tensors)])
    return program.blocks[0].forms(program.run(placed([tensor for some in sets for tensor in some])))


def placed(tensors: list[Tensor]) -> PlainTensors:
    result = PlainTensors.of(tensors)
    assert result is not None
    return result


CASES = {
    "sizes": (torch.float32, WantedNumbers(sizes=True), -1),
    "law": (torch.bfloat16, WantedNumbers(law=True), 1),
    "all": (torch.float16, WantedNumbers(), -1),
}
READ = [code for code, kind in KINDS.items() if not kind.linear]
"""Translations have a kernel of their own."""


@pytest.mark.parametrize("case", sampled(product(VIEWS, READ, CASES), 30), ids="-".join)
def test_a_program_gives_what_its_matrices_give(case: tuple[str, str, str], kernels: list[str]) -> None:
    view, kind, (dtype, wanted, degree) = VIEWS[case[0]], KINDS[case[1]], CASES[case[2]]
    layout, sets, seen = drawn(view, (dtype, dtype))
    assert triton_backend.takes(kind.products, layout, view.n)
    pairs, constants = ((0, 0), (0, 1), (1, 1)), (1.0, 0.0)
    result, squares = run(ProgramLeg(kind.products, degree, layout, pairs, (dtype, dtype), wanted), sets)
    assert (squares is not None) == wanted.sizes
    for entry, matrices in enumerate(seen):
        expected, spread = forms(TORCH, kind.products, degree, matrices, pairs, constants, torch.float64, wanted)
        torch.testing.assert_close(result[:, entry].double(), expected, rtol=2e-6, atol=2e-6)
        if squares is not None and spread is not None:
            torch.testing.assert_close(squares[:, entry].double(), spread, rtol=2e-6, atol=0)
    assert kernels


@pytest.mark.parametrize(
    ("view", "aligned"),
    [
        (View.of("w", (24, 16), grid=(3, 8, 16), axes=1, pick={0: 0}), True),
        (View.of("w", (16, 24), grid=(16, 3, 8), axes=2, pick={1: 0}), True),
        (View.of("w", (24, 15), grid=(3, 8, 15), axes=1, pick={0: 0}), False),
        (View.of("w", (16, 24), grid=(16, 8, 3), axes=1, pick={2: 0}), False),
        (View.of("w", (16, 24), pick={1: (4, 20)}), False),
    ],
    ids=["rows", "columns", "rows of odd length", "heads next to each other", "an odd beginning"],
)
def test_many_entries_are_fetched_at_once_only_where_all_strides_allow_it(view: View, aligned: bool) -> None:
    batch = tuple(axis for axis, pick in enumerate(view.pick) if pick == 0)
    layout = Layout.of(view.reading(batch))
    assert layout is not None
    assert Tile.of(PlacedProduct(layout, layout)).aligned == aligned


def test_views_without_few_strides_have_no_layout() -> None:
    rows = View.of("w", (8, 5), rows=(0, 3, 5))
    assert Layout.of(rows.reading()) is None
    assert Layout.of(View.of("w", (2, 3, 4, 5, 6), grid=(2, 3, 4, 5, 6), axes=(4, 2, 0)).reading()) is None


MODELS = {
    "grouped rotary decoder": lambda: blocks.DecoderLM(
        12, 8, 2, 4, 6, kv_heads=2, max_length=8, positions="rotary-half", norm="rms"
    ),
    "decoder with biases and a centring norm": lambda: blocks.DecoderLM(12, 8, 2, 2, 6, max_length=8, bias=True),
    "decoder with experts": lambda: blocks.DecoderLM(12, 8, 2, 2, 3, max_length=8, experts=4, top_k=2),
}


def text_loss(model: nn.Module) -> Tensor:
    text = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())


def identities(plan: Plan, theta: Tensors, grads: Tensors, *, together: bool = True) -> Moments:
    plan = plan if together else replace(plan, kernels=False)
    return plan.evaluate([Point(theta), Direction(grads)], [(0, 1)], sizes=True)


def in_order(plan: Plan, theta: Tensors, grads: Tensors, *, together: bool) -> Tensor:
    indices, tables = identities(plan, theta, grads, together=together).sizes()
    result = torch.empty(len(indices), 2, dtype=torch.float64)
    result[indices] = torch.cat([table.double() for table in tables])
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_identities_of_all_layers_together_are_those_of_each(name: str, dtype: torch.dtype, kernels: list[str]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    text_loss(model).backward()
    plan = recognize(model, loss="cross_entropy").plan
    theta = {key: p.detach() for key, p in model.named_parameters()}
    grads = {key: p.grad + 0.1 * torch.randn_like(p) for key, p in model.named_parameters() if p.grad is not None}
    together = in_order(plan, theta, grads, together=True)
    assert {"placed_sums", "outer_products"} == set(kernels)
    launches = len(kernels)
    torch.testing.assert_close(together, in_order(plan, theta, grads, together=False), rtol=1e-5, atol=1e-9)
    assert len(kernels) == launches < 80, "launches do not grow with the layers"


def _replaced(grads: dict[str, Tensor], name: str) -> None:
    grads[name] = 2 * grads[name]


def _turned(grads: dict[str, Tensor], name: str) -> None:
    grads[name] = grads[name].T.contiguous().T


def _coarse(grads: dict[str, Tensor], name: str) -> None:
    grads[name] = grads[name].bfloat16()


def _fine(grads: dict[str, Tensor], name: str) -> None:
    grads[name] = grads[name].double()


def _off(grads: dict[str, Tensor], name: str) -> None:
    grads[name] = torch.cat((grads[name].new_zeros(1), grads[name].flatten()))[1:].view_as(grads[name])


CHANGED = {
    "replaced": _replaced,
    "not contiguous": _turned,
    "of another type": _coarse,
    "of a type that kernels do not read": _fine,
    "not aligned": _off,
}


# One parameter of an outer product and one of row products, in turn.
@pytest.mark.parametrize(
    ("change", "which", "name"),
    [
        (change, which, ("layers.0.attention.q.weight", "layers.1.feedforward.down.weight")[(row + column) % 2])
        for row, change in enumerate(CHANGED)
        for column, which in enumerate(["parameter", "gradient"])
    ],
)
def test_what_is_kept_of_a_plan_is_not_used_for_tensors_that_changed(
    change: str, which: str, name: str, kernels: list[str]
) -> None:
    torch.manual_seed(0)
    model = MODELS["grouped rotary decoder"]()
    text_loss(model).backward()
    plan = recognize(model, loss="cross_entropy").plan
    theta = {key: p.detach().clone() for key, p in model.named_parameters()}
    grads = {key: p.grad + 0.1 * torch.randn_like(p) for key, p in model.named_parameters() if p.grad is not None}
    assert name in plan.needs
    for _ in range(2):
        in_order(plan, theta, grads, together=True)
    assert kernels
    CHANGED[change](theta if which == "parameter" else grads, name)
    for _ in range(2):
        together = in_order(plan, theta, grads, together=True)
        torch.testing.assert_close(together, in_order(plan, theta, grads, together=False), rtol=1e-5, atol=1e-8)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("some", [[], [0], [1, 0, 1]], ids=str)
def test_plain_tensors_are_told_from_others(some: list[int]) -> None:
    tensors = [torch.randn(2, 3), nn.Parameter(torch.randn(3).bfloat16())]
    chosen = [tensors[index] for index in some]
    result = PlainTensors.of(chosen)
    if not chosen:
        assert result is None
        return
    assert result is not None
    assert result.types == tuple(tensor.dtype for tensor in chosen)
    assert result.addresses.tolist() == [tensor.data_ptr() for tensor in chosen]
    assert result.aligned == (not any(tensor.data_ptr() % 16 for tensor in chosen))
    last = result.some(np.array([len(chosen) - 1]))
    assert (last.types, last.addresses.tolist()) == ((chosen[-1].dtype,), [chosen[-1].data_ptr()])
    others = {
        "transposed": torch.randn(2, 3).T,
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "elsewhere": torch.empty(3, device="meta"),
        "of another class": torch.randn(2).as_subclass(_Own),
    }
    assert {name for name, other in others.items() if PlainTensors.of([*chosen, other]) is None} == {*others}


class _Own(Tensor):
    pass


@pytest.mark.parametrize("case", sampled(product(MODELS, [torch.float32, torch.bfloat16]), 3), ids=str)
def test_laws_of_all_layers_together_are_those_of_each(case: tuple[str, torch.dtype], kernels: list[str]) -> None:
    torch.manual_seed(0)
    name, dtype = case
    model = MODELS[name]().to(dtype)
    laws = recognize(model, loss="cross_entropy")
    theta = {key: value.detach() for key, value in model.named_parameters()}
    for pairs in (LawPairs([(0, 0)]), [(0, 0)]):
        kernels.clear()
        together, apart = (
            plan.evaluate([Point(theta)], pairs).values() for plan in (laws.plan, replace(laws.plan, kernels=False))
        )
        assert kernels
        for result, expected in zip(together, apart, strict=True):
            assert torch.allclose(result, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_laws_that_gradients_are_followed_through_are_read_by_pytorch(kernels: list[str]) -> None:
    torch.manual_seed(0)
    model = blocks.DecoderLM(vocab=16, dim=8, depth=1, heads=2, hidden=8)
    laws = recognize(model)
    values = laws.plan.evaluate([Point(dict(model.named_parameters()))], LawPairs([(0, 0)])).values()
    sum(value.square().sum() for value in values).backward()  # type: ignore[union-attr]
    assert not kernels
    assert model.get_parameter("layers.0.attention.q.weight").grad is not None


def test_launches_do_not_grow_with_depth(kernels: list[str]) -> None:
    counts = []
    for depth in (2, 4):
        model = blocks.DecoderLM(12, 8, depth, 2, 6, max_length=8, positions="rotary", norm="rms")
        text_loss(model).backward()
        kernels.clear()
        assert audit(model, loss="cross_entropy").ok
        counts.append(len(kernels))
    assert counts[0] == counts[1] > 0


def test_a_tensor_that_is_not_contiguous_is_read_another_way(kernels: list[str]) -> None:
    torch.manual_seed(0)
    model = MODELS["grouped rotary decoder"]()
    text_loss(model).backward()
    plan = recognize(model, loss="cross_entropy").plan
    theta = {key: p.detach() for key, p in model.named_parameters()}
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    strange = {key: value.t().contiguous().t() if value.ndim == 2 else value for key, value in grads.items()}
    result = in_order(plan, theta, strange, together=True)
    torch.testing.assert_close(result, in_order(plan, theta, grads, together=False), rtol=1e-5, atol=1e-7)


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum and decay": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize(
    ("optimizer", "temporary"),
    [("SGD", 1 << 25), ("momentum and decay", 1 << 25), ("AdamW", 1 << 25), ("AdamW", 300)],
    ids=["SGD", "momentum and decay", "AdamW", "AdamW, a few legs at a time"],
)
def test_the_ledger_is_the_same_read_together_and_one_by_one(
    optimizer: str, temporary: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conserved.tracking.ledger._TEMPORARY", temporary)

    def ledger() -> list[tuple[float, ...]]:
        torch.manual_seed(0)
        model = MODELS["grouped rotary decoder"]()
        stepper = OPTIMIZERS[optimizer](model)
        with Monitor(model, stepper, loss="cross_entropy", where="*attention*") as monitor:
            text_loss(model).backward()
            stepper.step()
            monitor.step()
            assert not monitor.alarms
            return [(row.first_order, row.second_order, row.observed) for row in monitor.ledger()]

    together = ledger()
    assert kernels
    with monkeypatch.context() as patched:
        patched.setattr(triton_backend, "available", lambda device: False)
        kernels.clear()
        one_by_one = ledger()
        assert not kernels
    torch.testing.assert_close(torch.tensor(together), torch.tensor(one_by_one), rtol=1e-3, atol=1e-5)


def test_without_a_gpu_nothing_is_compiled() -> None:
    assert not triton_backend.available(torch.device("cpu"))


def test_reading_rows_brings_the_norms_of_gradients_and_parameters_along(kernels: list[str]) -> None:
    torch.manual_seed(0)
    model = MODELS["grouped rotary decoder"]()
    text_loss(model).backward()
    theta = {key: p.detach() for key, p in model.named_parameters()}
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    result = identities(recognize(model, loss="cross_entropy").plan, theta, grads)
    for tensors, norms in ((grads, result.norms), (theta, result.lengths)):
        assert norms is not None
        expected = torch.stack([tensors[name].norm() for name in norms.names])
        torch.testing.assert_close(norms.values.float(), expected)


TYPES = {
    "five": (torch.float32,) * 5,
    "four of several types": (torch.bfloat16, torch.float32, torch.float16, torch.float32),
    "three of several types": (torch.float32, torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize("dtypes", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("code", ["scaling", "complex_scaling", "general_linear", "one_scale"])
@pytest.mark.parametrize("law", [True, False], ids=["law", "all of it"])
def test_factors_of_any_number_and_types_are_told_apart(
    law: bool, code: str, dtypes: tuple[torch.dtype, ...], kernels: list[str]
) -> None:
    """Four factors are read once each; more of them, pair by pair."""
    view, products = VIEWS["rows of a head"], KINDS[code].products
    layout, sets, seen = drawn(view, dtypes)
    wanted, pairs = WantedNumbers(law=law), ((0, 0), (0, 1), (1, 2), (len(dtypes) - 1, 0), (2, 2))
    result, _ = run(ProgramLeg(products, -1, layout, pairs, dtypes, wanted), sets)
    for number, matrices in enumerate(seen):
        expected, _ = forms(TORCH, products, -1, matrices, pairs, (0.0,) * len(dtypes), torch.float64, wanted)
        torch.testing.assert_close(result[:, number].double(), expected, rtol=1e-5, atol=1e-5)
    if law and len(dtypes) < 5 and code != "general_linear":
        assert kernels == ["row_sums"]


def test_a_program_reads_addresses_anew_every_time(kernels: list[str]) -> None:
    layout, sets, _ = drawn(VIEWS["rows of a head"], (torch.float32, torch.float32))
    leg = ProgramLeg(KINDS["scaling"].products, 1, layout, ((0, 1),), (torch.float32, torch.float32), WantedNumbers())
    program = LegProgram.of([(leg, [(0, 0), (2, 0), (4, 0)])])
    doubled = [2 * tensor for some in sets for tensor in some]
    once, twice = program.run(placed([tensor for some in sets for tensor in some])), program.run(placed(doubled))
    torch.testing.assert_close(twice, 4 * once)


def test_layers_that_step_in_different_ways_are_accounted_for_alike(kernels: list[str]) -> None:
    """Rates by layer, and some parameters that do not decay: legs of one law, and one leg of many layers, differ."""

    def ledger() -> list[tuple[object, ...]]:
        torch.manual_seed(0)
        model = blocks.DecoderLM(12, 8, 3, 4, 6, kv_heads=2, max_length=8, positions="rotary-half", norm="rms")
        groups = [
            {"params": [p], "lr": 1e-2 / (1 + (".1." in n)), "weight_decay": 0.1 * (p.ndim > 1)}
            for n, p in model.named_parameters()
        ]
        stepper = torch.optim.AdamW(groups)
        with Monitor(model, stepper, loss="cross_entropy") as monitor:
            for _ in range(2):
                stepper.zero_grad()
                text_loss(model).backward()
                stepper.step()
                monitor.step()
            assert not monitor.alarms
            return [(row.law, row.first_order, row.second_order, row.observed) for row in monitor.ledger()]

    together = ledger()
    assert kernels
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(triton_backend, "available", lambda device: False)
        one_by_one = ledger()
    assert [row[0] for row in together] == [row[0] for row in one_by_one]
    for mine, other in zip(together, one_by_one, strict=True):
        assert mine[1:] == pytest.approx(other[1:], rel=1e-3, abs=2e-5)


def symmetry(name: str, kind: Kind, *legs: Leg) -> Symmetry:
    return Symmetry(block="", family=name, kind=kind, legs=legs)


WHOLE = Leg(View.of("w", (16, 24)), 1)
LAWS = {
    "rows and everything": (
        symmetry("rows", KINDS["scaling"], WHOLE, Leg(View.of("g", (16,)), -1)),
        symmetry("everything", KINDS["one_scale"], WHOLE, Leg(View.of("v", (8, 3)), -2)),
    ),
    "everything of a shifted parameter, which rows are not": (
        symmetry("rows", KINDS["scaling"], WHOLE, Leg(View.of("g", (16,)), -1)),
        symmetry("everything", KINDS["one_scale"], Leg(View.of("w", (16, 24), offset=1.0), 1)),
    ),
    "everything of stacked layers": tuple(
        symmetry(f"layer {n}", KINDS["one_scale"], Leg(View.of("w", (3, 16, 24), pick={0: n}, axes=1), 1))
        for n in range(3)
    ),
    "everything by heads": (
        symmetry("columns", KINDS["scaling"], Leg(View.of("w", (16, 24), axes=1), 1)),
        *(
            symmetry(f"head {h}", KINDS["one_scale"], Leg(View.of("w", (16, 24), grid=(2, 8, 24), axes=1, pick={0: h})))
            for h in range(2)
        ),
    ),
    "heads that share a leg": tuple(
        symmetry(
            f"head {h}",
            KINDS["scaling"],
            Leg(View.of("w", (16, 24), grid=(2, 8, 24), axes=1, pick={0: h}), 1),
            Leg(View.of("v", (8, 3)), -1),
        )
        for h in range(2)
    ),
    "a part of a parameter": (symmetry("part", KINDS["scaling"], Leg(View.of("w", (16, 24), pick={0: (3, 9)}), 1)),),
    "everything of long parameters": (
        symmetry("everything", KINDS["one_scale"], *(Leg(View.of(f"v{n}", (n,)), 1) for n in (7, 128, 300, 131_200))),
    ),
    "a shift": (
        symmetry("shift", KINDS["translation"], Leg(View.of("v", (8, 3)), 1), Leg(View.of("u", (5, 3)), -2)),
        symmetry("everything", KINDS["one_scale"], Leg(View.of("v", (8, 3)), 1)),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_what_laws_read_together_is_what_each_reads(name: str, kernels: list[str]) -> None:
    plan = Plan.of(LAWS[name])
    generator = torch.Generator().manual_seed(0)
    shapes = {leg.view.parameter: leg.view.shape for law in LAWS[name] for leg in law.legs}
    theta, grads = ({key: torch.randn(s, generator=generator) for key, s in shapes.items()} for _ in range(2))
    result = identities(plan, theta, grads).rows
    assert result is not None
    assert set(result.indices) == set(range(len(LAWS[name])))
    together, one_by_one = (in_order(plan, theta, grads, together=way) for way in (True, False))
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    for tensors, norms in ((grads, result.norms), (theta, result.lengths)):
        torch.testing.assert_close(norms.values.float(), torch.stack([tensors[key].norm() for key in norms.names]))


def test_a_law_of_all_entries_has_few_sums(kernels: list[str]) -> None:
    law = symmetry("everything", KINDS["one_scale"], Leg(View.of("w", (1 << 17,)), 1))
    plan, theta = Plan.of([law]), {"w": torch.randn(1 << 17)}
    assert identities(plan, theta, theta).rows is not None
    (program,) = plan.row_identities.programs.values()
    assert program.rows == 128


COMPILED = """
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from conserved.moment.kernels import placed_sums

for height, width, turned in ((8, 128, False), (64, 16, True)):
    options = dict(FIELDS=17, A=tl.bfloat16, B=tl.bfloat16, HEIGHT=height, WIDTH=width,
                   TURNED=turned, MERGED=False, ALIGNED=True, LIFTED=False)
    types = dict.fromkeys(placed_sums.arg_names, "*fp64") | dict(
        programs="*i32", fields="*i64", shifts="*fp32", table="*i64") | dict.fromkeys(options, "constexpr")
    source = triton.compiler.ASTSource(fn=placed_sums, signature=types, constexprs=options)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"].count("ld.global.v4"))
"""


def test_compiled_for_a_gpu_neighbours_are_fetched_sixteen_bytes_at_a_time() -> None:
    """Whether the compiler knows that it may is not seen in any result."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "2"]


def test_a_law_of_all_entries_reads_nothing_that_another_reads(kernels: list[str]) -> None:
    rows, everything = LAWS["rows and everything"]
    shapes = {"w": (16, 24), "g": (16,), "v": (8, 3)}
    theta, grads = ({key: torch.randn(shape) for key, shape in shapes.items()} for _ in range(2))

    def programs(*laws: Symmetry) -> int:
        plan = Plan.of(laws)
        assert identities(plan, theta, grads).rows is not None
        (program,) = plan.row_identities.programs.values()
        return sum(len(launch.fields) for launch in program.launches)

    assert programs(rows) == 2
    assert programs(everything) == 2
    assert programs(rows, everything) == programs(everything, rows) == 3


def test_kernels_never_read_a_parameter_whose_data_got_another_shape(kernels: list[str]) -> None:
    torch.manual_seed(0)
    model = blocks.Attention(16, 2)
    laws = recognize(model, torch.randn(2, 5, 16))
    model(torch.randn(2, 5, 16)).square().sum().backward()
    assert audit(model, laws).ok
    assert kernels
    shrunk = model.q.weight
    shrunk.data, shrunk.grad = shrunk.data[:8], None
    shrunk.grad = torch.zeros_like(shrunk)
    kernels.clear()
    for read in (lambda: audit(model, laws).ok, laws.values):
        with pytest.raises(ValueError, match=r"shape \(16, 16\) for q\.weight, got \(8, 16\)"):
            read()
    assert not kernels
