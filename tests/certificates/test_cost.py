"""Small files that describe huge proofs are refused, by both checkers, before they take memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conserved_verify
from conserved.certificates import MalformedError, cost
from conserved.certificates.certificate import Certificate
from conserved.certificates.contents import CertificateContents
from conserved.certificates.cost import MOST_NUMBERS, cost_of, program_cost
from conserved.certificates.form import Form
from conserved.certificates.program import Node, Program
from conserved.certificates.proof import Input
from conserved.certificates.symbols import Budget, Symbols, TooLargeError
from conserved.verdict import Status, Verdict

GIGABYTE = 1 << 30


def certificate(nodes: list[Node], size: int, word: tuple[int, ...] = (0,), laws: int = 0) -> dict[str, Any]:
    """The record of a certificate of a program without inputs, as a file would have it."""
    program = Program(nodes=tuple(nodes), output=len(nodes) - 1, size=size)
    contents = CertificateContents(
        about={"function": "f", "loss": "regression"},
        parameters={"w": (size,)},
        program=program,
        theta=tuple(1.0 + k for k in range(size)),
        inputs=(Input(()),),
        samples=((0, (1,) * program.outputs),),
        words=(word,),
        laws=tuple((Form(quadratic=(), linear=((k, 1.0),)),) for k in range(laws)),
        bits=64,
        seed=0,
    )
    tiers = (Status.PROVED,) * laws
    made = Certificate(
        contents=contents, tiers=tiers, verdict=Verdict(status=Verdict.INCONCLUSIVE, message=""), digest=""
    )
    return made.record()


def outer_products(width: int, times: int) -> list[Node]:
    """A column times a row, added to itself many times over."""
    indices = np.zeros(width, dtype=np.int64)
    nodes = [
        Node(op="parameters", shape=(2,)),
        Node(op="take", inputs=(0,), shape=(width, 1), places=indices),
        Node(op="take", inputs=(0,), shape=(1, width), places=indices),
        Node(op="matmul", inputs=(1, 2), shape=(width, width)),
    ]
    for _ in range(times):
        nodes.append(Node(op="multiply", inputs=(len(nodes) - 1, 3), shape=(width, width)))
    nodes.append(Node(op="sum", inputs=(len(nodes) - 1,), shape=(width,)))
    nodes.append(Node(op="sum", inputs=(len(nodes) - 1,), shape=()))
    nodes.append(Node(op="take", inputs=(len(nodes) - 1,), shape=(1,), places=np.zeros(1, dtype=np.int64)))
    return nodes


def powers_of_a_sum(letters: int, squared: int) -> list[Node]:
    """(θ₁ + θ₂ + …)^(2^k): a few nodes, and as many terms as there are monomials."""
    nodes = [Node(op="parameters", shape=(letters,)), Node(op="sum", inputs=(0,), shape=())]
    nodes.append(Node(op="take", inputs=(1,), shape=(1,), places=np.zeros(1, dtype=np.int64)))
    for _ in range(squared):
        last = len(nodes) - 1
        nodes.append(Node(op="multiply", inputs=(last, last), shape=(1,)))
    return nodes


def powers_of_a_number(squared: int) -> list[Node]:
    """1.5^(2^k), exact in symbols: as many digits."""
    nodes = [Node(op="parameters", shape=(2,)), Node(op="constant", shape=(1,), values=(1.5,))]
    for _ in range(squared):
        last = len(nodes) - 1
        nodes.append(Node(op="multiply", inputs=(last, last), shape=(1,)))
    nodes.append(Node(op="take", inputs=(0,), shape=(1,), places=np.zeros(1, dtype=np.int64)))
    nodes.append(Node(op="multiply", inputs=(len(nodes) - 2, len(nodes) - 1), shape=(1,)))
    return nodes


MEASURE = """
import json, sys
record = json.load(open(sys.argv[2]))
try:
    if sys.argv[1] == "first":
        from conserved.certificates.certificate import Certificate
        outcome = Certificate.of(record).check().status.value
    else:
        import conserved_verify
        outcome = conserved_verify.verify(record).status
except ValueError as problem:
    outcome = f"refused: {problem}"
# ru_maxrss of a started process has the size of the one that started it.
status = open("/proc/self/status").read()
print(json.dumps([outcome, int(status.partition("VmHWM:")[2].split()[0]) * 1024]))
"""

HOSTILE = {
    "outer products": lambda: certificate(outer_products(1500, 40), 2),
    "long words": lambda: certificate(outer_products(250, 2), 2, word=(0,) * 8),
    "powers of a sum": lambda: certificate(powers_of_a_sum(60, 4), 60, laws=1),
    "powers of a number": lambda: certificate(powers_of_a_number(40), 2, laws=1),
}


@pytest.mark.parametrize("checker", ["first", "second"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_file_takes_little_memory(name: str, checker: str, tmp_path: Path) -> None:
    record = HOSTILE[name]()
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(record))
    assert path.stat().st_size < 40_000
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, checker, str(path)], capture_output=True, text=True, check=True, timeout=300
    )
    outcome, peak = json.loads(run.stdout)
    assert peak < 1.5 * GIGABYTE, outcome
    assert outcome != "proved"
    if name in ("outer products", "long words"):
        assert outcome.startswith("refused")
        assert "numbers at once" in outcome


def test_both_checkers_refuse_by_a_stated_error() -> None:
    record = certificate(outer_products(1500, 40), 2)
    with pytest.raises(MalformedError, match=r"Expected proofs that hold at most 6,000,000 numbers at once, got"):
        Certificate.of(record)
    with pytest.raises(conserved_verify.RefusedError, match="more than 6,000,000"):
        conserved_verify.verify(record)


def test_proofs_of_too_many_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = certificate(outer_products(300, 1), 2)
    contents = Certificate.of(record).contents
    assert cost_of(contents).numbers < MOST_NUMBERS
    monkeypatch.setattr(cost, "MOST_PRODUCTS", cost_of(contents).products)
    Certificate.of(record)
    monkeypatch.setattr(cost, "MOST_PRODUCTS", cost_of(contents).products - 1)
    with pytest.raises(MalformedError, match="products, got"):
        Certificate.of(record)


def test_more_words_than_parameters_are_refused() -> None:
    record = certificate(outer_products(300, 1), 2)
    record["words"] = [[0]] * 3
    with pytest.raises(MalformedError, match="at most 2 words"):
        Certificate.of(record)


def test_costs_are_those_of_the_program() -> None:
    """Three nodes of 2, 3 and 3 entries, one outer product of 9, a sum of 9 and of 3."""
    program = Program(nodes=tuple(outer_products(3, 0)), output=6, size=2)
    run = program_cost(program)
    assert run.numbers == 2 + 3 + 3 + 9 + 3 + 1 + 1
    assert run.products == run.numbers + 9 + 9 + 3


def test_the_memory_of_a_symbolic_argument_is_bounded_over_all_its_nodes() -> None:
    budget = Budget(10**9, words=40_000)
    numbers = Symbols({}, budget)
    total = numbers.fresh()
    for _ in range(30):
        total = total + numbers.fresh()
    square = total * total
    budget.keep([square])
    with pytest.raises(TooLargeError, match="memory"):
        budget.keep([square] * 5)
