"""Certificates: how many laws a function has at most, which were found, and a check that needs no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conserved.certificates.arithmetic import UndecidedError
from conserved.certificates.contents import FORMAT, READ, VERSION, CertificateContents, digest, parse, read
from conserved.certificates.cost import refuse_costly
from conserved.certificates.form import Form, formula
from conserved.certificates.program import MalformedError
from conserved.certificates.proof import (
    ENCLOSURE_BITS,
    Independence,
    Input,
    decisions_at,
    encloses_zero,
    enclosure,
    prove_independent_laws,
    prove_rank,
    proved_by_argument,
    random_fields,
)
from conserved.certificates.validate import format_value, only
from conserved.output import html
from conserved.output.lines import counted
from conserved.output.printable import printable
from conserved.verdict import Evidence, Status, Verdict

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of the proofs of a certificate."""

    rank: Independence
    laws: Independence | None
    """None if there are no laws."""
    tiers: tuple[Status, ...]
    """For each symmetry how well its laws are known: PROVED, VERIFIED, or INCONCLUSIVE if they are not."""
    patterns: int
    """Pieces of f for which the symbolic argument was made."""
    enclosed: float
    """The widest enclosure of the laws that are only verified."""


def examine(contents: CertificateContents, progress: Progress | None = None) -> Findings:
    """Redo every proof from the contents alone."""
    say = progress or (lambda message: None)
    refuse_costly(contents)
    say(f"proving {len(contents.words)} brackets of {contents.program.size} parameters independent")
    rank = prove_rank(contents.program, contents.theta, contents.spelled(), contents.bits)
    forms = [form for group in contents.laws for form in group]
    laws = prove_independent_laws(forms, contents.theta, contents.bits) if forms else None
    try:
        patterns = pieces(contents)
    except UndecidedError:
        patterns = []
    tiers, enclosed = [], 0.0
    for index, group in enumerate(contents.laws):
        say(f"laws of symmetry {index + 1} of {len(contents.laws)}")
        tier, width = _tier(contents, group, patterns)
        tiers.append(tier)
        enclosed = max(enclosed, width)
    return Findings(rank=rank, laws=laws, tiers=tuple(tiers), patterns=len(patterns), enclosed=enclosed)


def _tier(
    contents: CertificateContents, group: tuple[Form, ...], patterns: list[tuple[Input, Any]]
) -> tuple[Status, float]:
    program = contents.program
    if patterns and all(proved_by_argument(program, group, x, decided) for x, decided in patterns):
        return Status.PROVED, 0.0
    sampled = random_fields(program, contents.theta, contents.inputs, contents.seed)
    width = max(enclosure(form, sampled) for form in group)
    return (Status.VERIFIED if encloses_zero(width) else Status.INCONCLUSIVE), width


def pieces(contents: CertificateContents) -> list[tuple[Input, Any]]:
    """Return inputs that differ in their discrete tensors or in what comparisons give; one for each pattern."""
    used = sorted({contents.samples[s][0] for word in contents.words for s in word})
    by_pattern: dict[Any, tuple[Input, Any]] = {}
    for index in used:
        x = contents.inputs[index]
        decided = decisions_at(contents.program, contents.theta, x, contents.bits)
        discrete = [t for t, n in zip(x.tensors, contents.program.input_nodes, strict=True) if n.discrete]
        key = tuple(tuple(a.ravel().tolist()) for a in (*discrete, *decided.values()))
        by_pattern.setdefault(key, (x, decided))
    return list(by_pattern.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Certificate:
    """At most `at_most` independent laws exist; `found` are listed. `complete` when the two agree.

    `verdict` was reached when the certificate was made, or by `check()`; a certificate that was only loaded says
    nothing yet.
    """

    contents: CertificateContents = field(repr=False)
    tiers: tuple[Status, ...]
    verdict: Verdict
    digest: str

    @property
    def parameters(self) -> int:
        """D, the number of parameters."""
        return self.contents.program.size

    @property
    def rank(self) -> int:
        """The proved number of independent fields and brackets at θ."""
        return len(self.contents.words)

    @property
    def at_most(self) -> int:
        """An upper bound on the number of independent laws: D − rank."""
        return self.parameters - self.rank

    @property
    def found(self) -> int:
        """The number of laws listed; their gradients are independent at θ."""
        return self.contents.found

    @property
    def complete(self) -> bool:
        """Whether the verdict holds and the laws listed are all there are."""
        return self.verdict.holds and self.found == self.at_most

    @property
    def formulas(self) -> list[str]:
        """Formulas of the laws of each symmetry, rendered from their terms; only names are quoted from the file."""
        return [formula(group, self.contents.parameters) for group in self.contents.laws]

    def __repr__(self) -> str:
        return f"<Certificate: at most {counted(self.at_most, 'law')}, {self.found} found; {self.verdict.status.value}>"

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """Return the verdict and the laws with their tier of evidence, for notebooks."""
        cells = zip(self.contents.laws, self.formulas, self.tiers, strict=True)
        rows = [(tier.value, f"{len(group):,}", text) for group, text, tier in cells]
        table = html.table(("evidence", "numbers", "conserved"), rows, numbers=(1,), wraps=2) if rows else ""
        return html.panel(html.badge(self.verdict), table)

    def summary(self) -> str:
        """Return the laws with their tier of evidence, and the verdict."""
        lines = [
            f"{tier.value.upper():12s} {len(group):4d}  {text}"
            for group, text, tier in zip(self.contents.laws, self.formulas, self.tiers, strict=True)
        ]
        return "\n".join([*lines, *([""] if lines else []), str(self.verdict)])

    def record(self) -> dict[str, Any]:
        """Return the file as plain data."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            **self.contents.record(),
            "claim": claim(self.contents, self.tiers),
        }
        return body | {"digest": digest(body)}

    def save(self, path: str | Path) -> None:
        """Write a self-contained JSON file.

        Args:
            path: the file to write, in place of one that is there.
        """
        Path(path).write_text(json.dumps(self.record(), ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Certificate:
        """Read a certificate. Its claims count as unverified until `check()`.

        Args:
            path: a file that `save` wrote.

        Returns:
            The certificate. Its verdict is INCONCLUSIVE, or REFUTED if the file was changed after it was made.

        Raises:
            MalformedError: the file is no certificate; the message says what is wrong with it.
        """
        try:
            return Certificate.of(parse(Path(path).read_bytes()))
        except MalformedError as problem:
            raise MalformedError(f"{printable(str(path))} cannot be used: {problem}") from None

    @staticmethod
    def of(record: Any) -> Certificate:
        """Return a certificate from plain data, as `load` reads it.

        Args:
            record: the contents of a file, parsed as JSON.

        Returns:
            The certificate, not checked.

        Raises:
            MalformedError: the data is no certificate.
        """
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise MalformedError(
                f"Expected a certificate in format {FORMAT!r}, got a file without that format. Write certificates "
                "with Certificate.save."
            )
        version = record.get("version")
        if type(version) is not int or version not in READ:
            known = " or ".join(map(str, READ))
            raise MalformedError(
                f"Expected a certificate of version {known}, got {format_value(version)}. Certify again, or use a "
                "newer version of conserved."
            )
        only(record, {*_FIELDS, "format", "version", "claim", "digest"}, "The certificate")
        contents = read(record)
        refuse_costly(contents)
        stated = record.get("claim")
        named = stated.get("tiers") if isinstance(stated, dict) else None
        if (
            not isinstance(named, list)
            or len(named) != len(contents.laws)
            or not all(isinstance(name, str) and name in _TIERS for name in named)
        ):
            raise MalformedError("The claim does not name a tier of evidence for each symmetry.")
        tiers = tuple(Status(name) for name in named)
        verdict = Verdict(status=Verdict.INCONCLUSIVE, message="Not checked yet; call check().")
        problem = ""
        if record.get("digest") != digest(record):
            problem = "The file was changed after it was made: its digest does not fit its contents."
        elif json.dumps(stated, sort_keys=True) != json.dumps(claim(contents, tiers), sort_keys=True):
            problem = "What the file claims does not follow from its contents."
        if problem:
            verdict = Verdict(status=Verdict.REFUTED, message=problem, evidence=(Evidence(what="integrity"),))
        return Certificate(contents=contents, tiers=tiers, verdict=verdict, digest=printable(str(record.get("digest"))))

    def checked(self, progress: Progress | None = None) -> Certificate:
        """Return the same certificate with the verdict of `check()`.

        Args:
            progress: called with one line for every stage of the proof.

        Returns:
            A copy.
        """
        return replace(self, verdict=self.check(progress))

    def outcome(self) -> dict[str, Any]:
        """Return the statement of the certificate and how well it is known, without the data of the proof."""
        return claim(self.contents, self.tiers) | {
            "complete": self.complete,
            "verdict": self.verdict.status.value,
            "message": self.verdict.message,
            "evidence": [str(item) for item in self.verdict.evidence],
            "about": dict(self.contents.about),
            "laws": [
                {"formula": text, "numbers": len(group), "evidence": tier.value}
                for group, text, tier in zip(self.contents.laws, self.formulas, self.tiers, strict=True)
            ],
            "digest": self.digest,
        }

    def check(self, progress: Progress | None = None) -> Verdict:
        """Redo the whole proof from the contents, with derivatives by this library's own rules in ball arithmetic.

        Args:
            progress: called with one line for every stage of the proof.

        Returns:
            PROVED, or VERIFIED where laws could only be enclosed at random points; INCONCLUSIVE if a step could not be
            redone, REFUTED if the file was changed after it was made.
        """
        if self.verdict == Verdict.REFUTED:
            return self.verdict
        findings = examine(self.contents, progress)
        if findings.tiers != self.tiers:
            return Verdict(
                status=Verdict.INCONCLUSIVE,
                message="The laws are not known as well as the certificate says.",
                evidence=tuple(
                    Evidence(what=text, value=tier.value, limit=claimed.value)
                    for text, tier, claimed in zip(self.formulas, findings.tiers, self.tiers, strict=True)
                    if tier != claimed
                ),
            )
        return verdict_of(self.contents, findings)


_TIERS = (Status.PROVED, Status.VERIFIED, Status.INCONCLUSIVE)
"""The tiers of evidence for the laws of a symmetry."""

_FIELDS = ("about", "parameters", "program", "theta", "inputs", "samples", "words", "laws", "bits", "seed")


def claim(contents: CertificateContents, tiers: tuple[Status, ...]) -> dict[str, Any]:
    """Return the claim of a certificate as plain data."""
    size, rank = contents.program.size, len(contents.words)
    return {
        "parameters": size,
        "rank": rank,
        "at_most": size - rank,
        "found": contents.found,
        "complete": contents.found == size - rank,
        "analytic": contents.program.analytic,
        "tiers": [tier.value for tier in tiers],
    }


def verdict_of(contents: CertificateContents, findings: Findings) -> Verdict:
    """Return the verdict on a claim, with its evidence; proofs and enclosures are never counted together."""
    size, rank = contents.program.size, len(contents.words)
    at_most, law_count = size - rank, contents.found
    known = list(zip(contents.laws, findings.tiers, strict=True))
    by_tier = {tier: sum(len(group) for group, t in known if t is tier) for tier in Status}
    bits = findings.rank.bits
    evidence = [
        Evidence(
            what=f"‖I − MP‖ for {rank} brackets of {size} parameters, {bits} bits",
            value=findings.rank.bound,
            limit=1.0,
            proof=findings.rank.proved,
        )
    ]
    if findings.laws is not None:
        quantity = f"‖I − MP‖ for the gradients of {counted(law_count, 'law')}"
        evidence.append(Evidence(what=quantity, value=findings.laws.bound, limit=1.0, proof=findings.laws.proved))
    if by_tier[Status.PROVED]:
        patterns = "" if findings.patterns == 1 else f", for {findings.patterns} patterns of tokens and decisions"
        quantity = f"laws proved by a symbolic argument{patterns}"
        evidence.append(Evidence(what=quantity, value=by_tier[Status.PROVED], proof=True))
    if by_tier[Status.VERIFIED]:
        quantity = f"{by_tier[Status.VERIFIED]} laws enclosed around zero at random points, {ENCLOSURE_BITS} bits"
        evidence.append(Evidence(what=quantity, value=findings.enclosed))
    problem = ""
    if not findings.rank.proved:
        problem = f"The rank {rank} could not be proved. {findings.rank.reason}"
    elif findings.laws is not None and not findings.laws.proved:
        problem = "The laws listed could not be shown to be independent."
    elif by_tier[Status.INCONCLUSIVE]:
        problem = "A law that is listed could be neither proved nor enclosed around zero."
    if problem:
        return Verdict(status=Verdict.INCONCLUSIVE, message=problem.strip(), evidence=tuple(evidence))
    status = Verdict.VERIFIED if by_tier[Status.VERIFIED] else Verdict.PROVED
    return Verdict(status=status, message=_sentence(contents, at_most, law_count, by_tier), evidence=tuple(evidence))


def _sentence(contents: CertificateContents, at_most: int, law_count: int, by_tier: Mapping[Status, int]) -> str:
    scope = "" if contents.program.analytic else " near θ, for inputs that activate what the samples activate"
    if any(node.discrete for node in contents.program.input_nodes):
        scope += ", for the token sequences of the samples" if scope else " for the token sequences of the samples"
    laws = f"{at_most} independent law{'' if at_most == 1 else 's'}"
    if law_count != at_most:
        return f"At most {laws} exist{scope} (proved); {law_count} are listed, so the list may not be complete."
    if not by_tier[Status.VERIFIED]:
        return f"Exactly {laws} of {contents.program.size} parameters{scope}, all listed."
    return (
        f"At most {laws} of {contents.program.size} parameters exist{scope} (proved), and as many are listed: "
        f"{by_tier[Status.PROVED]} proved, {by_tier[Status.VERIFIED]} verified at random points."
    )
