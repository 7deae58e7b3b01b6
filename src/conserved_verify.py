"""A second checker of certificates, in one file: `python -m conserved_verify FILE.json`.

It imports nothing of the package `conserved`; it needs Python and python-flint. It was written from the specification
(docs/programs.md), not from the package, so that a mistake in one of the two shows as a disagreement. What is proved:

*At most.* The nested brackets of the gradient fields of the certificate's program are linearly independent at its θ.
Derivatives are computed by the rules below in Arb's ball arithmetic, where every ball contains the exact number.

*Each law is a law.* The program is run in exact algebra on θ + ε ∇h(θ), with letters for everything that does not
move. If the coefficient of ε in the output is zero as a quotient of polynomials, no gradient field changes h.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import flint

FORMAT, VERSIONS = "conserved.certificate", (1, 2)
MOST_BITS, MOST_ENTRIES, MOST_AXES, MOST_LETTERS, MOST_TERMS = 4096, 10_000_000, 32, 8, 20_000_000
MOST_NUMBERS, MOST_PRODUCTS, MOST_WORDS, MOST_DIGITS = 6_000_000, 200_000_000_000, 64_000_000, 16_384
"""Over all proofs: balls held at once (a gigabyte), products made, words of eight bytes of one symbolic argument."""
WHOLE, MACHINE = 2**53, 2**63
PROVED, VERIFIED, REFUTED, INCONCLUSIVE = "proved", "verified", "refuted", "inconclusive"
FUNCTIONS = ("exp", "log", "sqrt", "reciprocal", "tanh", "sigmoid", "erf", "sin", "cos")
ARITY = {
    **dict.fromkeys(("constant", "parameters", "input"), 0),
    **dict.fromkeys((*FUNCTIONS, "stop", "sum", "real", "order"), 1),
    **dict.fromkeys(("add", "subtract", "multiply", "matmul", "greater", "equal", "gather"), 2),
    **dict.fromkeys(("choose", "scatter"), 3),
}


class RefusedError(ValueError):
    """The file is not a certificate that means something; the message says why."""


class OpenError(ArithmeticError):
    """Balls leave a comparison open: more bits may decide it."""


class NoArgumentError(ArithmeticError):
    """The symbolic argument does not go through."""


# Reading. A file is not trusted: whatever is not of the form below is refused.


def need(condition: object, message: str) -> None:
    if not condition:
        raise RefusedError(message)


def integer(value: Any, least: int, most: int, label: str) -> int:
    need(type(value) is int and least <= value <= most, f"{label} is not a whole number from {least} to {most}")
    return int(value)


def real(value: Any, label: str, *, mask: bool = False) -> float:
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError):
        raise RefusedError(f"{label} is not a hexadecimal floating-point number") from None
    need(math.isfinite(number) or (mask and number == -math.inf), f"{label} is not finite")
    return number


def items(value: Any, label: str, count: int | None = None) -> list[Any]:
    need(isinstance(value, list) and (count is None or len(value) == count), f"{label} is not a list as expected")
    return list(value)


def words_of(polynomial: Polynomial) -> int:
    """The memory of a polynomial in words of eight bytes: 32 for a term, its letters, the digits of its coefficient."""
    return sum(32 + len(key) + digits(value) for key, value in polynomial.items())


def digits(value: Any) -> int:
    return int(value.height_bits()) // 32 if isinstance(value, flint.fmpq) else 1


def affordable(contents: Contents) -> None:
    """Refuse proofs that would take too much memory or work in all, counted before anything is computed.

    A bracket of k letters has 2^(k−1) parts in every entry, in values and gradients, and 3^(k−1) products of parts.
    """
    program, rows = contents.program, len(contents.words)
    laws = sum(map(len, contents.laws))
    entries = work = 0
    for node in program.nodes:
        count = prod(node.shape)
        entries, work = entries + count, work + count
        if node.op == "matmul":
            work += count * program.nodes[node.inputs[0]].shape[-1]
        elif node.op in ("sum", "order"):
            work += prod(program.nodes[node.inputs[0]].shape)
    letters = [len(word) for word in contents.words]
    need(max(rows, laws) <= program.size, "there are more words or laws than parameters")
    stored = 2 * entries * 2 ** max(max(letters, default=1) - 1, 1)
    matrix = 2 * max(rows, laws) * program.size + max(rows, laws) ** 2
    need(stored <= MOST_NUMBERS, f"its proofs would hold {stored:,} numbers at once, more than {MOST_NUMBERS:,}")
    need(matrix <= MOST_NUMBERS, f"its matrices have {matrix:,} numbers, more than {MOST_NUMBERS:,}")
    work = sum(3 * work * count * 3 ** (count - 1) for count in letters) + 48 * work * len(contents.laws)
    need(work <= MOST_PRODUCTS, f"its proofs would take {work:,} products, more than {MOST_PRODUCTS:,}")


def fields(value: Any, names: Iterable[str], label: str, optional: Iterable[str] = ()) -> dict[str, Any]:
    names = set(names)
    need(isinstance(value, dict), f"{label} is not an object")
    need(names <= value.keys() <= names | set(optional), f"{label} does not have the fields expected")
    return dict(value)


def parsed(data: bytes) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice in one object")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not a number")

    try:
        record = json.loads(data.decode(), object_pairs_hook=once, parse_constant=no_constant)
        json.dumps(record, ensure_ascii=False).encode()
    except RecursionError:
        raise RefusedError("it is nested too deeply") from None
    except ValueError as problem:
        raise RefusedError(f"it is not JSON: {ascii(str(problem))[1:-1][:120]}") from None
    return record


@dataclass(frozen=True)
class Node:
    op: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    discrete: bool
    places: tuple[int, ...]
    values: tuple[Any, ...]
    which: int


@dataclass(frozen=True)
class Program:
    nodes: tuple[Node, ...]
    output: int
    size: int

    @cached_property
    def moving(self) -> list[bool]:
        """Which nodes are reals that depend on θ."""
        result: list[bool] = []
        for node in self.nodes:
            result.append(not node.discrete and (node.op == "parameters" or any(result[i] for i in node.inputs)))
        return result

    @cached_property
    def analytic(self) -> bool:
        """Whether nothing that depends on θ or on real inputs is compared."""
        depends: list[bool] = []
        for node in self.nodes:
            leaf = node.op == "parameters" or (node.op == "input" and not node.discrete)
            depends.append(leaf or any(depends[i] for i in node.inputs))
            if depends[-1] and node.op in ("greater", "order", "equal"):
                return False
        return True

    @cached_property
    def given(self) -> list[Node]:
        return sorted((node for node in self.nodes if node.op == "input"), key=lambda node: node.which)


def read_node(record: Any, before: Sequence[Node], size: int) -> Node:
    name = f"node {len(before)}"
    need(isinstance(record, dict) and isinstance(record.get("op"), str), f"{name} is not an operation")
    op = record["op"]
    need(op in ARITY or op == "take", f"{name} is no operator of programs")
    extra = {"constant": ("values", "discrete"), "input": ("which", "discrete"), "take": ("places",)}.get(op, ())
    record = fields(record, ("op", "inputs", "shape"), name, extra)
    inputs = tuple(integer(i, 0, len(before) - 1, f"an input of {name}") for i in items(record["inputs"], name))
    shape = tuple(integer(s, 0, MOST_ENTRIES, f"shape of {name}") for s in items(record["shape"], name))
    need(len(shape) <= MOST_AXES and prod(s for s in shape if s) <= MOST_ENTRIES, f"{name} is too large")
    discrete = record.get("discrete", False)
    need(isinstance(discrete, bool), f"discrete of {name} is neither true nor false")
    indices: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()
    if op == "take":
        indices = tuple(integer(p, -1, MOST_ENTRIES, f"a place of {name}") for p in items(record.get("places"), name))
    if op == "constant":
        entries = items(record.get("values"), name)
        if discrete:
            values = tuple(integer(v, -WHOLE, WHOLE, f"a value of {name}") for v in entries)
        else:
            values = tuple(real(v, f"a value of {name}", mask=True) for v in entries)
    which = integer(record.get("which", 0), 0, 2**31, f"which of {name}")
    kinds, shapes = [before[i].discrete for i in inputs], [before[i].shape for i in inputs]
    need(len(inputs) == ARITY[op] if op != "take" else inputs, f"{name} does not have the inputs {op} needs")
    fits, kind = fit(op, shape, kinds, shapes, discrete, size)
    if op == "take":
        total = sum(map(prod, shapes))
        fits = fits and len(indices) == prod(shape) and all(-1 <= p < total for p in indices)
    elif op == "constant":
        fits = len(values) == prod(shape)
    need(fits, f"{name} ({op}) does not fit its inputs")
    return Node(op, inputs, shape, kind, indices, values, which)


def fit(
    op: str, shape: tuple[int, ...], kinds: list[bool], shapes: list[tuple[int, ...]], discrete: bool, size: int
) -> tuple[bool, bool]:
    """Return whether shapes and kinds are those of the specification, and whether the result is discrete."""
    if op in ("constant", "input"):
        return True, discrete
    if op == "parameters":
        return shape == (size,), False
    if op in ("add", "subtract", "multiply", "greater"):
        return shapes == [shape, shape] and kinds[0] == kinds[1], op == "greater" or kinds[0]
    if op == "matmul":
        a, b = shapes
        fits = not any(kinds) and len(a) == len(b) >= 2 and a[:-2] == b[:-2] and a[-1] == b[-2] > 0
        return fits and shape == (*a[:-1], b[-1]), False
    if op == "sum":
        return len(shapes[0]) > 0 and shapes[0][:-1] == shape and shapes[0][-1] > 0, kinds[0]
    if op == "take":
        return len(set(kinds)) == 1, kinds[0]
    if op in FUNCTIONS or op == "stop":
        return shapes == [shape] and not kinds[0], False
    if op == "real":
        return shapes == [shape] and kinds[0], False
    if op == "order":
        return shapes == [shape] and len(shape) > 0 and shape[-1] > 0, True
    if op == "equal":
        return shapes == [shape, shape] and all(kinds), True
    if op == "choose":
        return shapes == [shape] * 3 and kinds[0] and kinds[1] == kinds[2], kinds[1]
    if op == "gather":
        return shapes[1] == shape and kinds[1], kinds[0]
    return shapes[0] == shape and shapes[1] == shapes[2] and kinds[1] and kinds[0] == kinds[2], kinds[0]


def read_program(record: Any) -> Program:
    record = fields(record, ("nodes", "output", "size"), "the program")
    size = integer(record["size"], 1, MOST_ENTRIES, "size")
    nodes: list[Node] = []
    for item in items(record["nodes"], "nodes"):
        nodes.append(read_node(item, nodes, size))
    output = integer(record["output"], 0, len(nodes) - 1, "output")
    need(sum(node.op == "parameters" for node in nodes) == 1, "the program does not have exactly one parameters node")
    need(not nodes[output].discrete and len(nodes[output].shape) == 1, "the output is not a vector of reals")
    program = Program(tuple(nodes), output, size)
    need([n.which for n in program.given] == list(range(len(program.given))), "the inputs are not numbered 0, 1, …")
    return program


Law = tuple[list[tuple[int, int, float]], list[tuple[int, float]]]
"""½ Σ a_ij θ_i θ_j + Σ b_i θ_i: the entries (i, j, a_ij) and (i, b_i)."""
Input = list[list[Any]]
"""One input: for each tensor its entries."""


@dataclass(frozen=True)
class Contents:
    program: Program
    theta: list[float]
    inputs: list[Input]
    words: list[list[tuple[int, list[int]]]]
    """Samples, each an input and a direction v; a word (s, t, u) is the bracket [[X_s, X_t], X_u]."""
    laws: list[list[Law]]
    bits: int
    seed: int


def read_law(record: Any, size: int) -> Law:
    record = fields(record, ("quadratic", "linear"), "a law", ("name", "formula"))
    need(all(isinstance(record.get(key, ""), str) for key in ("name", "formula")), "the name of a law is not text")

    def terms(key: str, indices: int) -> list[Any]:
        result = []
        for entry in items(record[key], key):
            *where, value = items(entry, f"a term of {key}", indices + 1)
            result.append((*(integer(p, 0, size - 1, "a place of a law") for p in where), real(value, "a coefficient")))
        need(len({term[:-1] for term in result}) == len(result), "a law lists a term twice")
        return result

    quadratic, linear = terms("quadratic", 2), terms("linear", 1)
    need({(i, j, a) for i, j, a in quadratic} == {(j, i, a) for i, j, a in quadratic}, "a law is not symmetric")
    return quadratic, linear


def read(record: dict[str, Any]) -> Contents:
    program = read_program(record["program"])
    size = program.size
    names: set[str] = set()
    total = 0
    for item in items(record["parameters"], "parameters"):
        item = fields(item, ("name", "shape"), "a parameter")
        need(isinstance(item["name"], str) and item["name"] not in names, "a parameter has no name of its own")
        names.add(item["name"])
        total += prod(integer(s, 0, MOST_ENTRIES, "shape of a parameter") for s in items(item["shape"], "shape"))
    need(total == size, "the shapes of the parameters do not add up to the size of θ")
    about = record["about"]
    need(isinstance(about, dict) and all(isinstance(v, str) for v in about.values()), "about is not text")
    theta = [real(v, "an entry of θ") for v in items(record["theta"], "theta", size)]
    inputs = []
    for item in items(record["inputs"], "inputs"):
        tensors = []
        for entries, node in zip(items(item, "an input", len(program.given)), program.given, strict=True):
            entries = items(entries, "a tensor of an input", prod(node.shape))
            tensors.append(
                [integer(v, -WHOLE, WHOLE, "an input") if node.discrete else real(v, "an input") for v in entries]
            )
        inputs.append(tensors)
    samples = []
    for item in items(record["samples"], "samples"):
        item = fields(item, ("input", "v"), "a sample")
        v = items(item["v"], "v", program.nodes[program.output].shape[0])
        v = [integer(e, -WHOLE, WHOLE, "an entry of v") for e in v]
        samples.append((integer(item["input"], 0, len(inputs) - 1, "input of a sample"), v))
    words = []
    for word in items(record["words"], "words"):
        need(1 <= len(items(word, "a word")) <= MOST_LETTERS, f"a word does not have 1 to {MOST_LETTERS} letters")
        words.append([samples[integer(s, 0, len(samples) - 1, "a letter of a word")] for s in word])
    laws = [[read_law(law, size) for law in items(group, "a symmetry")] for group in items(record["laws"], "laws")]
    need(all(laws), "a symmetry has no laws")
    bits = integer(record["bits"], 2, MOST_BITS, "bits")
    return Contents(program, theta, inputs, words, laws, bits, integer(record["seed"], 0, 2**63, "seed"))


# Jets: {set of directions as bits: entries}, sums of products of ε_i with ε_i² = 0; a set that is missing is zero.

Jet = dict[int, list[Any]]


def plus(a: Jet, b: Jet) -> Jet:
    total = dict(a)
    for key, part in b.items():
        total[key] = [x + y for x, y in zip(total[key], part, strict=True)] if key in total else part
    return total


def minus(a: Jet) -> Jet:
    return {key: [-x for x in part] for key, part in a.items()}


def product(a: Jet, b: Jet, times: Callable[[list[Any], list[Any]], list[Any]] | None = None) -> Jet:
    total: Jet = {}
    for left, x in a.items():
        for right, y in b.items():
            if not left & right:
                term = times(x, y) if times else [p * q for p, q in zip(x, y, strict=True)]
                total = plus(total, {left | right: term})
    return total


def along(a: Jet, bit: int) -> Jet:
    """Return the coefficient of one direction."""
    return {key ^ bit: part for key, part in a.items() if key & bit}


def times_direction(a: Jet, bit: int) -> Jet:
    return {key | bit: part for key, part in a.items() if not key & bit}


def mapped(a: Any, move: Callable[[list[Any]], list[Any]]) -> Any:
    return {key: move(part) for key, part in a.items()} if isinstance(a, dict) else move(a)


class Balls:
    """Arb's real balls, at the precision of flint's context."""

    def number(self, value: float | int | Fraction) -> flint.arb:
        if isinstance(value, Fraction):
            return flint.arb(flint.fmpq(value.numerator, value.denominator))
        return flint.arb(value)

    def function(self, name: str, a: flint.arb) -> flint.arb:
        if name == "reciprocal":
            return 1 / a
        return 1 / (1 + (-a).exp()) if name == "sigmoid" else getattr(a, name)()

    def matmul(self, a: list[Any], b: list[Any], rows: int, inner: int, columns: int) -> list[Any]:
        return list((flint.arb_mat(rows, inner, a) * flint.arb_mat(inner, columns, b)).entries())

    def greater(self, index: int, a: list[Any], b: list[Any], moving: bool) -> list[int]:
        return [self._above(x, y, moving) for x, y in zip(a, b, strict=True)]

    def _above(self, x: flint.arb, y: flint.arb, moving: bool) -> int:
        if x > y:
            return 1
        if x < y or (not moving and x <= y):
            return 0
        raise OpenError("a kink lies inside the balls")

    def order(self, index: int, a: list[Any], moving: bool) -> list[int]:
        result = sorted(range(len(a)), key=lambda i: -float(a[i].mid()))
        for i, j in pairwise(result):
            if not a[i] > a[j] and (moving or not a[i] == a[j]):
                raise OpenError("a tie lies inside the balls")
        return result

    def two_over_root_pi(self) -> flint.arb:
        return 2 / flint.arb.const_sqrt_pi()

    def before(self, node: Node, inputs: list[Any]) -> Jet | None:
        return None

    def after(self, node: Node, value: Jet) -> Jet:
        return value


def applied(ring: Any, name: str, a: Jet) -> Jet:
    """φ(u + ε w) = φ(u) + ε φ'(u) w, one direction after the other."""
    top = max(a)
    if not top:
        return {0: [ring.function(name, x) for x in a[0]]}
    bit = 1 << top.bit_length() - 1
    low = {key: part for key, part in a.items() if not key & bit}
    value = applied(ring, name, low)
    return plus(value, times_direction(product(derivative(ring, name, low, value), along(a, bit)), bit))


def derivative(ring: Any, name: str, a: Jet, value: Jet) -> Jet:
    """φ'(a), given φ(a)."""
    if name == "exp":
        return value
    if name == "log":
        return applied(ring, "reciprocal", a)
    if name == "sqrt":
        return applied(ring, "reciprocal", plus(value, value))
    if name == "reciprocal":
        return minus(product(value, value))
    if name == "tanh":
        return plus({0: [ring.number(1)] * len(a[0])}, minus(product(value, value)))
    if name == "sigmoid":
        return plus(value, minus(product(value, value)))
    if name == "erf":
        bell = applied(ring, "exp", minus(product(a, a)))
        return product(bell, {0: [ring.two_over_root_pi()] * len(a[0])})
    return applied(ring, "cos", a) if name == "sin" else minus(applied(ring, "sin", a))


def forward(program: Program, ring: Any, theta: Jet, x: Input, *, stopped: bool = False) -> list[Any]:
    """Return the value of every node: jets of reals, lists of whole numbers.

    With `stopped`, directions end at `stop` as backpropagation does.
    """
    values: list[Any] = []
    for index, node in enumerate(program.nodes):
        inputs = [values[i] for i in node.inputs]
        value = None if node.discrete else ring.before(node, inputs)
        if value is None:
            value = computed(program, ring, index, inputs, theta, x)
        if stopped and node.op == "stop":
            value = {0: value[0]}
        values.append(value if node.discrete else ring.after(node, value))
    return values


def computed(program: Program, ring: Any, position: int, inputs: list[Any], theta: Jet, x: Input) -> Any:
    node = program.nodes[position]
    op, count = node.op, prod(node.shape)
    if op == "parameters":
        return theta
    if op in ("constant", "input"):
        entries = list(node.values if op == "constant" else x[node.which])
        return entries if node.discrete else {0: [ring.number(v) for v in entries]}
    if op == "real":
        return {0: [ring.number(v) for v in inputs[0]]}
    if op in FUNCTIONS:
        return applied(ring, op, inputs[0])
    if op == "stop":
        return inputs[0]
    if op in ("add", "subtract", "multiply"):
        a, b = inputs
        if not node.discrete:
            return product(a, b) if op == "multiply" else plus(a, b if op == "add" else minus(b))
        if op == "add":
            return machine([p + q for p, q in zip(a, b, strict=True)])
        return machine([p - q if op == "subtract" else p * q for p, q in zip(a, b, strict=True)])
    if op == "matmul":
        batch, rows, inner, columns = sizes(program, node)
        return product(inputs[0], inputs[1], lambda a, b: batched(ring, a, b, batch, rows, inner, columns))
    if op == "sum":
        n = program.nodes[node.inputs[0]].shape[-1]
        result = mapped(inputs[0], lambda part: [total(part[k * n : k * n + n]) for k in range(count)])
        return machine(result) if node.discrete else result
    if op == "take":
        return taken(program, ring, node, inputs)
    if op in ("greater", "equal", "order"):
        return compared(program, ring, position, inputs)
    if op == "choose":
        return joined(program, ring, node, inputs, [k if c else count + k for k, c in enumerate(inputs[0])])
    index = list(inputs[1])
    size = prod(program.nodes[node.inputs[0]].shape)
    need(all(0 <= i < size for i in index), "a computed index lies outside the tensor")
    if op == "gather":
        return mapped(inputs[0], lambda part: [part[i] for i in index])
    need(len(set(index)) == len(index), "an entry is scattered to twice")
    source = list(range(size))
    for k, i in enumerate(index):
        source[i] = size + k
    return joined(program, ring, node, inputs, source)


def total(entries: list[Any]) -> Any:
    result = entries[0]
    for entry in entries[1:]:
        result = result + entry
    return result


def machine(entries: list[int]) -> list[int]:
    need(all(-MACHINE < v < MACHINE for v in entries), "a whole number grows beyond 2⁶³")
    return entries


def sizes(program: Program, node: Node) -> tuple[int, int, int, int]:
    a, b = (program.nodes[i].shape for i in node.inputs)
    return prod(a[:-2]), a[-2], a[-1], b[-1]


def batched(ring: Any, a: list[Any], b: list[Any], batch: int, rows: int, inner: int, columns: int) -> list[Any]:
    if not inner or not rows or not columns:
        return [ring.number(0)] * (batch * rows * columns)
    result: list[Any] = []
    for k in range(batch):
        left = a[k * rows * inner : (k + 1) * rows * inner]
        right = b[k * inner * columns : (k + 1) * inner * columns]
        result += ring.matmul(left, right, rows, inner, columns)
    return result


def flipped(part: list[Any], batch: int, rows: int, columns: int) -> list[Any]:
    """Return the transposes of a batch of rows × columns matrices."""
    n = rows * columns
    return [part[k * n + i * columns + j] for k in range(batch) for j in range(columns) for i in range(rows)]


def taken(program: Program, ring: Any, node: Node, inputs: list[Any]) -> Any:
    """Entries of the joined inputs; the place −1 is a zero, put at the end."""
    if node.discrete:
        flat = [v for part in inputs for v in part] + [0]
        return [flat[p] for p in node.places]
    counts = [prod(program.nodes[i].shape) for i in node.inputs]
    zero, result = ring.number(0), {}
    for key in sorted(set().union(*inputs)):
        flat = []
        for part, size in zip(inputs, counts, strict=True):
            flat += part.get(key) or [zero] * size
        flat.append(zero)
        result[key] = [flat[p] for p in node.places]
    return result


def joined(program: Program, ring: Any, node: Node, inputs: list[Any], source: list[int]) -> Any:
    """Entries out of the two values of `choose` or `scatter`, laid one behind the other."""
    first, second = (inputs[1], inputs[2]) if node.op == "choose" else (inputs[0], inputs[2])
    if node.discrete:
        both = first + second
        return [both[k] for k in source]
    zero, result = ring.number(0), {}
    for key in sorted(first.keys() | second.keys()):
        both = (first.get(key) or [zero] * len(first[0])) + (second.get(key) or [zero] * len(second[0]))
        result[key] = [both[k] for k in source]
    return result


def compared(program: Program, ring: Any, index: int, inputs: list[Any]) -> list[int]:
    node = program.nodes[index]
    discrete = program.nodes[node.inputs[0]].discrete
    moving = any(program.moving[i] for i in node.inputs)
    if node.op == "equal":
        return [int(p == q) for p, q in zip(*inputs, strict=True)]
    if node.op == "greater":
        if discrete:
            return [int(p > q) for p, q in zip(*inputs, strict=True)]
        return list(ring.greater(index, inputs[0][0], inputs[1][0], moving))
    entries, n, result = inputs[0] if discrete else inputs[0][0], node.shape[-1], []
    for start in range(0, len(entries), n):
        row = entries[start : start + n]
        if discrete:
            result += sorted(range(n), key=lambda i, row=row: -row[i])  # type: ignore[misc]
        else:
            result += ring.order((index, start), row, moving)
    return result


# The gradient field X(θ) = ∇_θ ⟨f(x; θ), v⟩ by transposition, and brackets of fields.


def gradient(program: Program, theta: Jet, x: Input, v: list[int]) -> Jet:
    ring = Balls()
    values = forward(program, ring, theta, x)
    adjoints: dict[int, Jet] = {program.output: {0: [ring.number(e) for e in v]}}
    for index in range(program.output, -1, -1):
        if index not in adjoints or not program.moving[index]:
            continue
        node = program.nodes[index]
        if node.op == "parameters":
            return adjoints[index]
        for source, passed in zip(
            node.inputs, backward(program, ring, index, adjoints.pop(index), values), strict=True
        ):
            if passed is not None and program.moving[source]:
                adjoints[source] = plus(adjoints[source], passed) if source in adjoints else passed
    return {0: [ring.number(0)] * program.size}


def backward(program: Program, ring: Balls, index: int, g: Jet, values: list[Any]) -> list[Jet | None]:
    """Return what each input of a node receives of its adjoint g."""
    node = program.nodes[index]
    inputs = [values[i] for i in node.inputs]
    counts = [prod(program.nodes[i].shape) for i in node.inputs]
    op = node.op
    if op == "stop":
        return [None]
    if op in ("add", "subtract"):
        return [g, g if op == "add" else minus(g)]
    if op == "multiply":
        return [product(g, inputs[1]), product(g, inputs[0])]
    if op in FUNCTIONS:
        return [product(g, derivative(ring, op, inputs[0], values[index]))]
    if op == "sum":
        n = program.nodes[node.inputs[0]].shape[-1]
        return [mapped(g, lambda part: [e for e in part for _ in range(n)])]
    if op == "matmul":
        batch, rows, inner, columns = sizes(program, node)
        a = mapped(inputs[0], lambda p: flipped(p, batch, rows, inner))
        b = mapped(inputs[1], lambda p: flipped(p, batch, inner, columns))
        return [
            product(g, b, lambda p, q: batched(ring, p, q, batch, rows, columns, inner)),
            product(a, g, lambda p, q: batched(ring, p, q, batch, inner, rows, columns)),
        ]
    if op == "take":
        ends = list(accumulate([0, *counts]))
        back = mapped(g, lambda part: collected(ring, part, node.places, ends[-1] + 1))
        return [{key: part[start:end] for key, part in back.items()} for start, end in pairwise(ends)]
    if op == "gather":
        return [mapped(g, lambda part: collected(ring, part, inputs[1], counts[0])), None]
    zero = ring.number(0)
    if op == "choose":
        first = mapped(g, lambda part: [e if c else zero for e, c in zip(part, inputs[0], strict=True)])
        second = mapped(g, lambda part: [zero if c else e for e, c in zip(part, inputs[0], strict=True)])
        return [None, first, second]
    replaced = set(inputs[1])
    retained = mapped(g, lambda part: [zero if i in replaced else e for i, e in enumerate(part)])
    return [retained, None, mapped(g, lambda part: [part[i] for i in inputs[1]])]


def collected(ring: Balls, part: list[Any], indices: Sequence[int], size: int) -> list[Any]:
    """Each entry added to the place it was taken from; the last place is that of the zero, −1."""
    result = [ring.number(0)] * size
    for index, entry in zip(indices, part, strict=True):
        result[index] = result[index] + entry
    return result


def bracket(contents: Contents, theta: Jet, word: Sequence[tuple[int, list[int]]]) -> Jet:
    """[[…[X_0, X_1]…], X_k] with [A, X] = DX·A − DA·X."""
    *inner, (which, v) = word
    x = contents.inputs[which]
    if not inner:
        return gradient(contents.program, theta, x, v)
    bit = 1 << max(theta).bit_length()
    a = bracket(contents, theta, inner)
    both = gradient(contents.program, plus(theta, times_direction(a, bit)), x, v)
    back = bracket(contents, plus(theta, times_direction(both, bit)), inner)
    return plus(along(both, bit), minus(along(back, bit)))


def independent(rows: list[list[flint.arb]]) -> bool:
    """Whether balls show the rows M to be independent: M Mᵀ, rows scaled by powers of two, is then invertible."""
    if not rows:
        return True
    if len(rows) > len(rows[0]) or not all(e.is_finite() for row in rows for e in row):
        return False
    scaled = []
    for row in rows:
        exponent = max((magnitude(e) for e in row if e.mid() != 0), default=0)
        scaled += [e * flint.arb(2) ** (-exponent) for e in row]
    matrix = flint.arb_mat(len(rows), len(rows[0]), scaled)
    try:
        (matrix * matrix.transpose()).inv()
    except ZeroDivisionError:
        return False
    return True


def magnitude(a: flint.arb) -> int:
    mantissa, exponent = a.mid().man_exp()
    return int(abs(int(mantissa)).bit_length() + int(exponent))


# Exact algebra: quotients of polynomials in letters. Whatever does not move along ∇h is a letter of its own.

Polynomial = dict[tuple[int, ...], flint.fmpq]
"""Coefficients by monomial, a sorted tuple of letters."""
ONE: Polynomial = {(): flint.fmpq(1)}
KEPT = ("take", "gather", "scatter", "choose", "constant", "parameters", "input", "real", "exp", "stop")
"""Operators that make no new values, and exp, whose value at −∞ is 0."""


def poly_plus(a: Polynomial, b: Polynomial) -> Polynomial:
    total = dict(a)
    for key, value in b.items():
        total[key] = total.get(key, 0) + value
        if not total[key]:
            del total[key]
    return total


class Term:
    """A quotient of polynomials, or −∞."""

    __slots__ = ("algebra", "below", "top")

    def __init__(self, algebra: Algebra, top: Polynomial | None, below: Polynomial = ONE) -> None:
        self.algebra, self.top, self.below = algebra, top, below

    @property
    def number(self) -> flint.fmpq | None:
        """Its value, if it has no letters."""
        if self.top is None or self.below is not ONE or len(self.top) > 1:
            return None
        return self.top.get(()) if self.top else flint.fmpq(0)

    @property
    def simple(self) -> bool:
        """Whether it is a number, a letter or −∞."""
        if self.top is None or not self.top:
            return True
        return self.below is ONE and len(self.top) == 1 and (() in self.top or self.letter)

    @property
    def letter(self) -> bool:
        ((key, value),) = (self.top or {}).items()
        return len(key) == 1 and value == 1

    def __add__(self, other: Term) -> Term:
        if self.top is None or other.top is None:
            return self if self.top is None else other
        if not self.top or not other.top:
            return other if not self.top else self
        if self.below is other.below or self.below == other.below:
            return Term(self.algebra, poly_plus(self.top, other.top), self.below)
        times = self.algebra.times
        top = poly_plus(times(self.top, other.below), times(other.top, self.below))
        return Term(self.algebra, top, times(self.below, other.below))

    def __neg__(self) -> Term:
        if self.top is None:
            return self.algebra.fresh()
        return Term(self.algebra, {key: -value for key, value in self.top.items()}, self.below)

    def __mul__(self, other: Term) -> Term:
        if self.top is None or other.top is None:
            number = other.number if self.top is None else self.number
            if number is None or number <= 0:
                raise NoArgumentError("−∞ is multiplied")
            return self if self.top is None else other
        if not self.top or not other.top:
            return Term(self.algebra, {})
        times = self.algebra.times
        return Term(self.algebra, times(self.top, other.top), times(self.below, other.below))


class Algebra:
    """One run of a program on letters; `decided` holds what comparisons gave at the sample it is about."""

    def __init__(self, decided: Mapping[Any, list[int]]) -> None:
        self.decided, self.left, self.letters = decided, MOST_TERMS, 0
        self.words, self.pending = MOST_WORDS, 0
        self.roots: dict[int, Term] = {}
        self.known: dict[Any, Term] = {}
        self.pi = self.fresh()

    def fresh(self) -> Term:
        self.letters += 1
        return Term(self, {(self.letters,): flint.fmpq(1)})

    def number(self, value: float | int | Fraction) -> Term:
        if value == -math.inf:
            return Term(self, None)
        exact = Fraction(value)
        return Term(self, {(): flint.fmpq(exact.numerator, exact.denominator)} if exact else {})

    def times(self, a: Polynomial, b: Polynomial) -> Polynomial:
        if a is ONE or b is ONE:
            return b if a is ONE else a
        self.left -= len(a) * len(b)
        if self.left < 0:
            raise NoArgumentError("too many terms")
        longest = sum(max(map(digits, factor.values()), default=0) for factor in (a, b))
        if longest > MOST_DIGITS:
            raise NoArgumentError("too many digits")
        self.room(len(a) * len(b) * (32 + longest))
        result: Polynomial = {}
        for x, p in a.items():
            for y, q in b.items():
                key = tuple(sorted(x + y))
                result[key] = result.get(key, 0) + p * q
        self.pending += 32 * len(result)
        return {key: value for key, value in result.items() if value}

    def room(self, words: int) -> None:
        """No argument if so much more memory would be needed now."""
        if self.pending + words > self.words:
            raise NoArgumentError("too much memory")

    def keep(self, terms: Iterable[Term]) -> None:
        """Count the entries of a node, which stay to the end; products made on the way to them are gone."""
        self.pending = 0
        for term in terms:
            self.words -= words_of(term.top or {}) + (0 if term.below is ONE else words_of(term.below))
            self.room(0)

    def function(self, name: str, a: Term) -> Term:
        if name == "exp" and (a.top is None or not a.top):
            return self.number(0 if a.top is None else 1)
        if a.top is None:
            return self.fresh()
        if name == "reciprocal" and a.top:
            return Term(self, {(): 1 / a.number}) if a.number is not None else Term(self, a.below, a.top)
        key = (name, frozenset(a.top.items()), frozenset(a.below.items()))
        if key not in self.known:
            self.known[key] = self.fresh()
            if name == "sqrt":
                self.roots[self.letters] = a
        return self.known[key]

    def matmul(self, a: list[Any], b: list[Any], rows: int, inner: int, columns: int) -> list[Any]:
        return [
            total([a[i * inner + k] * b[k * columns + j] for k in range(inner)])
            for i in range(rows)
            for j in range(columns)
        ]

    def greater(self, index: int, a: list[Any], b: list[Any], moving: bool) -> list[int]:
        return self.decided[index]

    def order(self, index: Any, a: list[Any], moving: bool) -> list[int]:
        return self.decided[index]

    def two_over_root_pi(self) -> Term:
        return self.pi

    def before(self, node: Node, inputs: list[Any]) -> Jet | None:
        """New letters at once for a value computed of things that do not move."""
        reals = [value for value in inputs if isinstance(value, dict)]
        if node.op in KEPT or not reals or any(1 in value for value in reals):
            return None
        if all(e.top is None or e.number is not None for value in reals for e in value[0]):
            return None
        return {0: [self.fresh() for _ in range(prod(node.shape))]}

    def after(self, node: Node, value: Jet) -> Jet:
        """Letters for entries that do not move, or move in proportion to themselves by one term."""
        if 1 not in value and node.op in KEPT:
            return value
        entries, rates = [], []
        zero = self.number(0)
        for entry, rate in zip(value[0], value.get(1) or [zero] * len(value[0]), strict=True):
            if self.vanishes(rate):
                entries.append(entry if entry.simple else self.fresh())
                rates.append(zero)
                continue
            factor = None if entry.simple else self.ratio(rate, entry)
            if factor is not None:
                entry = self.fresh()
                rate = factor * entry
            entries.append(entry)
            rates.append(rate)
        self.keep((*entries, *rates))
        return {0: entries} | ({1: rates} if any(rate.top != {} for rate in rates) else {})

    def ratio(self, rate: Term, value: Term) -> Term | None:
        """The single term q with rate = q · value, if there is one."""
        if rate.top is None or value.top is None or rate.below != value.below or len(rate.top) != len(value.top):
            return None
        first, scale = next(iter(value.top.items()))
        for key, coefficient in rate.top.items():
            rest = list(key)
            if all(letter in rest and not rest.remove(letter) for letter in first):  # type: ignore[func-returns-value]
                q = {tuple(rest): coefficient / scale}
                if self.times(q, value.top) == rate.top:
                    return Term(self, q)
        return None

    def vanishes(self, term: Term) -> bool:
        """Return whether a term is zero once squares of roots are replaced by what they are roots of."""
        if term.top is None:
            return False
        top = term.top
        while top:
            root = next((a for key in top for a, b in pairwise(key) if a == b and a in self.roots), None)
            if root is None:
                return False
            inside = self.roots[root]
            assert inside.top is not None
            result: Polynomial = {}
            most = max(key.count(root) // 2 for key in top)
            for key, value in top.items():
                count = key.count(root)
                factor: Polynomial = {tuple(k for k in key if k != root) + (root,) * (count % 2): value}
                factor = {tuple(sorted(k)): v for k, v in factor.items()}
                for power in range(most):
                    factor = self.times(factor, inside.top if power < count // 2 else inside.below)
                result = poly_plus(result, factor)
            top = result
        return True


def argued(contents: Contents, laws: Sequence[Law], x: Input, decided: Mapping[Any, list[int]]) -> bool:
    """Whether no combination of the laws moves the output, for the discrete inputs and the decisions of one sample."""
    algebra, program = Algebra(decided), contents.program
    theta = [algebra.fresh() for _ in range(program.size)]
    moves = [algebra.number(0)] * program.size
    letters = [
        tensor if node.discrete else [algebra.fresh() for _ in tensor]
        for tensor, node in zip(x, program.given, strict=True)
    ]
    try:
        for quadratic, linear in laws:
            weight = algebra.fresh()
            for i, j, a in quadratic:
                moves[i] = moves[i] + algebra.number(a) * weight * theta[j]
            for i, b in linear:
                moves[i] = moves[i] + algebra.number(b) * weight
        ring = Lettered(algebra)
        return 1 not in forward(program, ring, {0: theta, 1: moves}, letters, stopped=True)[program.output]
    except NoArgumentError:
        return False


class Lettered:
    """The algebra, for inputs that are letters already."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algebra, name)

    def number(self, value: Any) -> Term:
        return value if isinstance(value, Term) else self.algebra.number(value)


# The verdict.


@dataclass(frozen=True)
class Result:
    """What was found: as many laws as `at_most` can exist, `found` are listed, and how well each symmetry is known."""

    status: str
    message: str
    at_most: int = 0
    found: int = 0
    tiers: tuple[str, ...] = ()
    analytic: bool = False

    @property
    def complete(self) -> bool:
        return self.status in (PROVED, VERIFIED) and self.found == self.at_most


def with_bits(bits: int, attempt: Callable[[], Any]) -> Any:
    """Try with more and more bits; None if balls decide with none of them."""
    while True:
        flint.ctx.prec = bits
        try:
            if (result := attempt()) is not None:
                return result
        except OpenError:
            pass
        if 2 * bits > MOST_BITS:
            return None
        bits *= 2


def point(theta: Sequence[float | Fraction]) -> Jet:
    return {0: [Balls().number(value) for value in theta]}


def rank_proved(contents: Contents) -> bool:
    def attempt() -> bool | None:
        theta, ring = point(contents.theta), Balls()
        zero = [ring.number(0)] * contents.program.size
        return independent([bracket(contents, theta, word).get(0, zero) for word in contents.words]) or None

    return not contents.words or bool(with_bits(contents.bits, attempt))


def gradient_of(law: Law, theta: Sequence[float | Fraction]) -> list[Fraction]:
    gradient = [Fraction(0)] * len(theta)
    for i, j, a in law[0]:
        gradient[i] += Fraction(a) * Fraction(theta[j])
    for i, b in law[1]:
        gradient[i] += Fraction(b)
    return gradient


def laws_independent(contents: Contents) -> bool:
    gradients = [gradient_of(law, contents.theta) for group in contents.laws for law in group]
    return bool(
        with_bits(contents.bits, lambda: independent([[Balls().number(e) for e in row] for row in gradients]) or None)
    )


def patterns(contents: Contents) -> list[tuple[Input, dict[Any, list[int]]]]:
    """Return an input for every pattern of tokens and decisions that occurs among the samples of the words."""
    program = contents.program
    by_pattern: dict[str, tuple[Input, dict[Any, list[int]]]] = {}
    for which in sorted({which for word in contents.words for which, _ in word}):
        x = contents.inputs[which]
        decided = with_bits(contents.bits, lambda x=x: decisions(program, contents.theta, x))  # type: ignore[misc]
        if decided is None:
            return []
        tokens = [tensor for tensor, node in zip(x, program.given, strict=True) if node.discrete]
        by_pattern.setdefault(repr((tokens, decided)), (x, decided))
    return list(by_pattern.values())


def decisions(program: Program, theta: Sequence[float], x: Input) -> dict[Any, list[int]]:
    values = forward(program, Balls(), point(theta), x)
    result: dict[Any, list[int]] = {}
    for index, node in enumerate(program.nodes):
        if node.op in ("greater", "order") and not program.nodes[node.inputs[0]].discrete:
            result[index] = values[index]
            for start in range(0, len(values[index]), node.shape[-1]) if node.op == "order" else ():
                result[index, start] = values[index][start : start + node.shape[-1]]
    return result


def enclosed(contents: Contents, laws: Sequence[Law]) -> bool:
    """Return whether ⟨∇h, X⟩ is pinned around zero at random points near θ, in 512 bits; evidence, not proof."""
    if not contents.inputs:
        return False
    flint.ctx.prec = 512
    rng, program, ring = random.Random(contents.seed), contents.program, Balls()
    for turn in range(16):
        steps = [Fraction(rng.randint(-(2**12), 2**12), 2**16) for _ in contents.theta]
        theta = [Fraction(t) * (1 + step) + step for t, step in zip(contents.theta, steps, strict=True)]
        x = [
            tensor if node.discrete else [e + rng.randint(-512, 512) / 2**14 for e in tensor]
            for tensor, node in zip(contents.inputs[turn % len(contents.inputs)], program.given, strict=True)
        ]
        v = [rng.randint(-3, 3) for _ in range(program.nodes[program.output].shape[0])]
        try:
            field = gradient(program, point(theta), x, v)[0]
        except OpenError:
            return False
        for law in laws:
            gradients = [ring.number(e) for e in gradient_of(law, theta)]
            moved = total([a * b for a, b in zip(gradients, field, strict=True)])
            size = total([abs(a) for a in gradients]).abs_upper() * max(abs(b).abs_upper() for b in field)
            if not moved.contains(0) or not moved.abs_upper() <= size * flint.arb(2) ** -100:
                return False
    return True


def verify(record: Any) -> Result:
    """Check a certificate given as plain data; `RefusedError` if it is none."""
    need(isinstance(record, dict) and record.get("format") == FORMAT, "it is not a certificate")
    version = record.get("version")
    need(
        type(version) is int and version in VERSIONS, f"its version is not one of {VERSIONS}, which this program reads"
    )
    parts = ("about", "parameters", "program", "theta", "inputs", "samples", "words", "laws", "bits", "seed")
    record = fields(record, (*parts, "format", "version", "claim", "digest"), "the certificate")
    contents = read(record)
    affordable(contents)
    rest = {key: value for key, value in record.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    claim = record["claim"]
    tiers = claim.get("tiers") if isinstance(claim, dict) else None
    need(
        isinstance(tiers, list)
        and len(tiers) == len(contents.laws)
        and all(tier in (PROVED, VERIFIED, INCONCLUSIVE) for tier in tiers),
        "the claim does not name a tier of evidence for each symmetry",
    )
    size, rank, law_count = contents.program.size, len(contents.words), sum(map(len, contents.laws))
    counted = {
        "parameters": size,
        "rank": rank,
        "at_most": size - rank,
        "found": law_count,
        "complete": law_count == size - rank,
        "analytic": contents.program.analytic,
        "tiers": tiers,
    }

    def result(status: str, message: str, known: Sequence[str] | None = None) -> Result:
        return Result(
            status, message, size - rank, law_count, tuple(known or claim["tiers"]), contents.program.analytic
        )

    if record["digest"] != hashlib.sha256(text.encode()).hexdigest():
        return result(REFUTED, "the file was changed after it was made")
    if json.dumps(claim, sort_keys=True) != json.dumps(counted, sort_keys=True):
        return result(REFUTED, "what the file claims does not follow from its contents")
    ranked = rank_proved(contents)
    pieces = patterns(contents)
    known = []
    for group in contents.laws:
        if pieces and all(argued(contents, group, x, decided) for x, decided in pieces):
            known.append(PROVED)
        else:
            known.append(VERIFIED if enclosed(contents, group) else INCONCLUSIVE)
    if known != tiers:
        return result(INCONCLUSIVE, "the laws are not known as well as the certificate says", known)
    if not ranked:
        return result(INCONCLUSIVE, "the rank could not be proved")
    if contents.laws and not laws_independent(contents):
        return result(INCONCLUSIVE, "the laws could not be shown to be independent")
    if INCONCLUSIVE in known:
        return result(INCONCLUSIVE, "a law could be neither proved nor enclosed around zero")
    where = "" if contents.program.analytic else " near θ, for inputs that activate what the samples activate"
    if any(node.discrete for node in contents.program.given):
        where += ", for the token sequences of the samples"
    listed = "all of them listed" if law_count == size - rank else f"{law_count} listed"
    message = f"at most {size - rank} independent laws of {size} parameters{where}; {listed}"
    return result(VERIFIED if VERIFIED in known else PROVED, message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check files; 0 if each is a complete certificate, 1 if one is not, 2 if one cannot be used."""
    paths = list(sys.argv[1:] if arguments is None else arguments)
    if not paths:
        sys.stderr.write("usage: python -m conserved_verify FILE.json …\n")
        return 2
    worst = 0
    for path in paths:
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path)
        try:
            result = verify(parsed(Path(path).read_bytes()))
        except (RefusedError, OSError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else problem
            sys.stderr.write(f"{shown}: cannot be used: {reason}\n")
            worst = 2
            continue
        sys.stdout.write(f"{shown}: {result.status.upper()}: {result.message}\n")
        worst = max(worst, 0 if result.complete else 1)
    return worst


if __name__ == "__main__":
    sys.exit(main())
