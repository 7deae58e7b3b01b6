"""The cost of redoing the proofs of a certificate, estimated before anything is computed and refused if too large.

A file of a few kilobytes can describe tensors of millions of entries: a product of a column and a row, many times
over. Limits are therefore on the whole: on the numbers that are held at once, and on the products that are made.

A bracket of k letters runs the program on jets with k − 1 directions, so every entry has 2^(k−1) parts, values and
gradients; a product of two jets makes 3^(k−1) products of parts. Values of all nodes are kept until the gradient is
known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from conserved.certificates.program import MalformedError, Program

if TYPE_CHECKING:
    from conserved.certificates.contents import CertificateContents

MOST_NUMBERS = 6_000_000
"""Numbers held at once. A ball of 128 bits takes about 150 bytes with the object around it: a gigabyte."""

MOST_PRODUCTS = 200_000_000_000
"""Products of two numbers in all: a day of a processor, at two to three million balls in a second."""

POINTS = 16
"""Random points at which laws are enclosed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Numbers that are held at once, and products that are made."""

    numbers: int
    products: int


def program_cost(program: Program) -> Cost:
    """Return the cost of running a program on plain numbers: entries of all nodes, and the products it computes."""
    numbers = products = 0
    for node in program.nodes:
        entries = prod(node.shape)
        numbers += entries
        products += entries
        if node.op == "matmul":
            products += entries * program.nodes[node.inputs[0]].shape[-1]
        elif node.op in ("sum", "order"):
            products += prod(program.nodes[node.inputs[0]].shape)
    return Cost(numbers=numbers, products=products)


def cost_of(contents: CertificateContents) -> Cost:
    """Return the cost of all proofs of a certificate."""
    once = program_cost(contents.program)
    size, rows = contents.program.size, len(contents.words)
    lengths = Counter(map(len, contents.words))
    longest = max(lengths, default=1)
    # Values and gradients of one bracket, or values along a law. The matrix of all rows is no larger than the file
    # squared, and is counted where it is made (`matrix_fits`).
    numbers = 2 * once.numbers * 2 ** max(longest - 1, 1)
    # A gradient costs about three runs; the bracket of k letters has as many gradients, on ever larger jets.
    products = sum(count * 3 * once.products * length * 3 ** (length - 1) for length, count in lengths.items())
    products += POINTS * 3 * once.products * len(contents.laws)
    products += sum(size * count**2 for count in (rows, contents.found))
    return Cost(numbers=numbers, products=products)


def refuse_costly(contents: CertificateContents) -> None:
    """Raise `MalformedError` if the proofs would take more memory or work than any certificate should."""
    cost = cost_of(contents)
    if cost.numbers > MOST_NUMBERS:
        raise MalformedError(
            f"Expected proofs that hold at most {MOST_NUMBERS:,} numbers at once, got {cost.numbers:,}. Certify a "
            "narrower model, or raise conserved.certificates.cost.MOST_NUMBERS if you trust the file."
        )
    if cost.products > MOST_PRODUCTS:
        raise MalformedError(
            f"Expected proofs of at most {MOST_PRODUCTS:,} products, got {cost.products:,}. Certify a narrower model, "
            "or raise conserved.certificates.cost.MOST_PRODUCTS if you trust the file."
        )
    for label, count in (("words", len(contents.words)), ("laws", contents.found)):
        if count > contents.program.size:
            raise MalformedError(
                f"Expected at most {contents.program.size:,} {label}, one for each parameter, got {count:,}: more are "
                "never independent."
            )


def matrix_fits(rows: int, size: int) -> bool:
    """Return whether a matrix of balls, its pseudo-inverse and their product fit into the memory of a proof."""
    return 2 * rows * size + rows**2 <= MOST_NUMBERS
