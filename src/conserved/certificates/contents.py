"""The contents of a certificate, and how JSON stores them; nothing in a file is executed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from conserved.certificates.form import Form
from conserved.certificates.program import MalformedError, Program
from conserved.certificates.proof import MOST_BITS, Input
from conserved.certificates.validate import (
    LARGEST,
    WHOLE,
    format_value,
    kind_of,
    only,
    read_program,
    real_number,
    whole_number,
)
from conserved.output.printable import printable

FORMAT = "conserved.certificate"
VERSION = 2
READ = (1, 2)
"""Versions that are read. Version 1 has no `stop`, and free text for names and formulas, which is not shown."""

MOST_LETTERS = 8
"""Samples in the longest word."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CertificateContents:
    """A function, a point, samples, the words whose brackets are independent there, and the laws."""

    about: Mapping[str, str]
    """For people: what was certified, and with which versions."""
    parameters: Mapping[str, tuple[int, ...]]
    """Names and shapes of the pieces of θ."""
    program: Program
    theta: tuple[float, ...]
    inputs: tuple[Input, ...]
    samples: tuple[tuple[int, tuple[int, ...]], ...]
    """(which input, direction v of the output)."""
    words: tuple[tuple[int, ...], ...]
    """Places of samples; a word (i, j, k) is the bracket [[X_i, X_j], X_k]."""
    laws: tuple[tuple[Form, ...], ...]
    """Conserved numbers, those of one symmetry together."""
    bits: int
    """Precision to begin with."""
    seed: int
    """Seed of the random points at which laws are enclosed."""

    @property
    def found(self) -> int:
        return sum(map(len, self.laws))

    def spelled(self) -> list[list[tuple[Input, tuple[int, ...]]]]:
        """Return the words with their samples."""
        return [[(self.inputs[self.samples[s][0]], self.samples[s][1]) for s in word] for word in self.words]

    def record(self) -> dict[str, Any]:
        """Return plain data, for JSON. Reals are hexadecimal floating point, which is exact."""
        return {
            "about": dict(self.about),
            "parameters": [{"name": name, "shape": list(shape)} for name, shape in self.parameters.items()],
            "program": self.program.record(),
            "theta": [value.hex() for value in self.theta],
            "inputs": [
                [
                    [v if node.discrete else float(v).hex() for v in t.ravel().tolist()]
                    for t, node in zip(x.tensors, self.program.input_nodes, strict=True)
                ]
                for x in self.inputs
            ],
            "samples": [{"input": which, "v": list(v)} for which, v in self.samples],
            "words": [list(word) for word in self.words],
            "laws": [[_law_record(form) for form in group] for group in self.laws],
            "bits": self.bits,
            "seed": self.seed,
        }


def parse(text: str | bytes) -> Any:
    """Return JSON without what two readers could take differently: repeated names, NaN, bytes that are no text."""

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            raise ValueError("a name occurs twice in one object")
        return record

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a number")

    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        text.encode("utf-8")
        record = json.loads(text, object_pairs_hook=object_of, parse_constant=constant)
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise MalformedError("it holds characters that are not text.") from None
    except RecursionError:
        raise MalformedError("it is nested too deeply.") from None
    except ValueError as problem:
        raise MalformedError(f"it is not JSON: {printable(str(problem))}") from None
    return record


def digest(record: Mapping[str, Any]) -> str:
    """Return SHA-256 of everything but the digest."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    try:
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()
    except (TypeError, ValueError, RecursionError) as problem:
        raise MalformedError(f"The certificate holds what JSON does not: {printable(str(problem))[:120]}") from None


def read(record: Mapping[str, Any]) -> CertificateContents:
    """Read and check plain data; raises `MalformedError` with the place of the first thing that does not fit."""
    program = read_program(record.get("program"))
    theta = tuple(_each(record.get("theta"), "theta", real_number, program.size))
    parameters: dict[str, tuple[int, ...]] = {}
    for item in _each(record.get("parameters"), "parameters", _mapping):
        only(item, {"name", "shape"}, "A parameter")
        name = item.get("name")
        if not isinstance(name, str) or name in parameters:
            raise MalformedError(f"The parameter {format_value(name)} has no name of its own.")
        sizes = _each(item.get("shape"), f"shape of {format_value(name)}", partial(whole_number, most=LARGEST))
        parameters[name] = tuple(sizes)
    if sum(math.prod(shape) for shape in parameters.values()) != program.size:
        raise MalformedError("The shapes of the parameters do not add up to the size of θ.")
    inputs = tuple(_each(record.get("inputs"), "inputs", lambda value, name: _input(value, name, program)))

    def sample(value: Any, name: str) -> tuple[int, tuple[int, ...]]:
        item = _mapping(value, name)
        only(item, {"input", "v"}, name)
        which = whole_number(item.get("input"), f"input of {name}", most=len(inputs) - 1)
        return which, tuple(_each(item.get("v"), f"v of {name}", _integer, program.outputs))

    samples = tuple(_each(record.get("samples"), "samples", sample))

    def word(value: Any, name: str) -> tuple[int, ...]:
        inputs = tuple(_each(value, name, lambda v, n: whole_number(v, n, most=len(samples) - 1)))
        if not 1 <= len(inputs) <= MOST_LETTERS:
            raise MalformedError(f"{name} has {len(inputs)} letters; expected 1 to {MOST_LETTERS}.")
        return inputs

    return CertificateContents(
        about=_about(record.get("about")),
        parameters=parameters,
        program=program,
        theta=theta,
        inputs=inputs,
        samples=samples,
        words=tuple(_each(record.get("words"), "words", word)),
        laws=tuple(_each(record.get("laws"), "laws", lambda value, name: _group(value, name, program.size))),
        bits=whole_number(record.get("bits"), "bits", least=2, most=MOST_BITS),
        seed=whole_number(record.get("seed"), "seed", most=1 << 63),
    )


def _law_record(form: Form) -> dict[str, Any]:
    return {
        "quadratic": [[i, j, a.hex()] for i, j, a in form.quadratic],
        "linear": [[i, b.hex()] for i, b in form.linear],
    }


def _about(value: Any) -> dict[str, str]:
    mapping = _mapping(value, "about")
    for key, text in mapping.items():
        if not isinstance(text, str):
            raise MalformedError(f"about.{format_value(key)} is {kind_of(text)}; expected text.")
    return dict(mapping)


def _group(value: Any, name: str, size: int) -> tuple[Form, ...]:
    laws = tuple(_each(value, name, lambda v, n: _law(v, n, size)))
    if not laws:
        raise MalformedError(f"{name} is a symmetry without laws.")
    return laws


def _law(value: Any, name: str, size: int) -> Form:
    item = _mapping(value, name)
    only(item, {"quadratic", "linear", "name", "formula"}, name)
    for key in ("name", "formula"):
        if not isinstance(item.get(key, ""), str):
            raise MalformedError(f"{name}.{key} is {kind_of(item[key])}; expected text.")

    def terms(key: str, arity: int) -> list[tuple[Any, ...]]:
        return _each(item.get(key), f"{name}.{key}", lambda entry, where: _term(entry, where, arity, size))

    quadratic = tuple((i, j, a) for i, j, a in terms("quadratic", 2))
    linear = tuple((i, b) for i, b in terms("linear", 1))
    if {(i, j): a for i, j, a in quadratic} != {(j, i): a for i, j, a in quadratic}:
        raise MalformedError(f"{name}.quadratic is not symmetric, so it is not the derivative of a law.")
    if len({(i, j) for i, j, _ in quadratic}) != len(quadratic) or len({i for i, _ in linear}) != len(linear):
        raise MalformedError(f"{name} lists a term twice.")
    return Form(quadratic=quadratic, linear=linear)


def _term(entry: Any, where: str, arity: int, size: int) -> tuple[Any, ...]:
    *indices, coefficient = _each(entry, where, lambda value, name: value, arity + 1)
    return (*(whole_number(p, where, most=size - 1) for p in indices), real_number(coefficient, where))


def _input(value: Any, name: str, program: Program) -> Input:
    tensors = _each(value, name, lambda entries, name: entries, len(program.input_nodes))
    result = []
    for entries, node in zip(tensors, program.input_nodes, strict=True):
        numbers = _each(entries, name, _integer if node.discrete else real_number, math.prod(node.shape))
        result.append(np.array(numbers, dtype=np.int64 if node.discrete else np.float64).reshape(node.shape))
    return Input(tuple(result))


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise MalformedError(f"{name} is {kind_of(value)}; expected an object.")
    return value


def _each(value: Any, name: str, read_one: Callable[[Any, str], T], count: int | None = None) -> list[T]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        length = f"a list of {count}" if count is not None else "a list"
        raise MalformedError(f"{name} is not {length}.")
    return [read_one(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _integer(value: Any, name: str) -> int:
    return whole_number(value, name, least=-WHOLE, most=WHOLE)
