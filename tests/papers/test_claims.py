"""Claims: verdicts come out of the checks, break when their subject is broken, and witnesses refute by themselves."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import conserved
from claim_mutations import MUTATIONS
from conserved import Evidence, Verdict
from conserved.claims import Claim, NoSuchClaimError, Outcome, claims
from conserved.verdict import Status
from conserved_papers.claims import errata, judging, passages, registry
from conserved_papers.claims.appendix import appendix_pages, line_parts
from conserved_papers.claims.claim_record import Severity, Standing
from conserved_papers.claims.page import pages
from conserved_papers.claims.recording import record_of_outcome
from conserved_papers.claims.tally import tallies
from conserved_papers.claims.typeset import typeset

pytestmark = pytest.mark.usefixtures("as_users_run_it")

ROOT = Path(__file__).parents[2]

ALL = [pytest.param(claim, id=claim.code, marks=[pytest.mark.slow] if claim.slow else []) for claim in claims()]


HOLDS = ("proved", "verified", "answered")


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the figures of its evidence, which differ in their last digits between machines."""
    return {**record, "evidence": [re.sub(r"\d[\d.]*(e[-+]\d+)?", "#", text) for text in record["evidence"]]}


@cache
def kept() -> dict[str, Any]:
    """The record as it lies in the package."""
    path = ROOT / "papers" / "src" / "conserved_papers" / "claims" / "recorded.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def reproduces(code: str) -> str:
    """Run the lines of a witness as a reader would, and return what they print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "witness", "exec"), {})
    return printed.getvalue()


@pytest.mark.parametrize("claim", ALL)
def test_a_claim_comes_out_as_recorded_with_evidence(claim: Claim) -> None:
    """One run for all that is asked of an outcome: runs are what takes time here."""
    outcome = registry.outcome(claim)
    assert not outcome.failure
    assert outcome.verdict.status.value == outcome.recorded
    assert not outcome.changed
    assert outcome.verdict.status is not Status.INCONCLUSIVE
    assert comparable(record_of_outcome(outcome)) == comparable(kept()[claim.code]), (
        "run python -m conserved_papers.claims.page"
    )
    _is_plain_data(outcome)
    _is_as_strong_as_its_weakest_part(outcome)
    if outcome.verdict == Verdict.REFUTED:
        assert outcome.severity is not None
        if outcome.witness is not None or not claim.under:
            _refutes_by_itself(outcome)
    else:
        assert outcome.witness is None
        assert claim.severity is None


def _is_as_strong_as_its_weakest_part(outcome: Outcome) -> None:
    if outcome.verdict == Verdict.PROVED:
        assert outcome.verdict.scope, "a proof says for which sizes it is one"
        assert "PROVED (" in str(outcome.verdict)
        assert outcome.evidence[0].proof


def _is_plain_data(outcome: Outcome) -> None:
    record = outcome.record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert {"code", "title", "statement", "latex", "hypotheses", "source", "place", "status", "message"} <= set(record)
    assert {"proof", "evidence", "witness", "corrected_by", "corrects", "recorded", "seconds"} <= set(record)
    assert bool(record["proof"]) is (record["status"] == "proved")
    assert all(record[field] for field in ("title", "statement", "place", "message", "evidence"))


def _refutes_by_itself(outcome: Outcome) -> None:
    assert outcome.witness is not None
    assert outcome.witness.data
    lines = outcome.witness.numpy.strip().splitlines()
    assert 2 <= len(lines) <= 10
    assert any(line.strip().startswith("assert") for line in lines), "it must fail where the claim holds"
    nodes = ast.walk(ast.parse(outcome.witness.numpy))
    used = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    assert used <= {"numpy", "math"}, "a witness needs NumPy alone"
    assert reproduces(outcome.witness.numpy)


@pytest.mark.parametrize("claim", ALL)
def test_a_claim_comes_out_the_other_way_when_its_subject_is_broken(claim: Claim) -> None:
    assert claim.code in MUTATIONS, "every claim needs a mutation in tests/claim_mutations.py"
    broken = claim.check(**MUTATIONS[claim.code])
    good = broken.holds or broken == Verdict.ANSWERED
    assert good is not (registry.recorded()[claim.code] in HOLDS), broken
    assert broken != Verdict.INCONCLUSIVE, broken


def test_no_mutation_is_left_over() -> None:
    assert set(MUTATIONS) == {claim.code for claim in claims()}


class TestTheLedger:
    def test_it_covers_the_sources(self) -> None:
        codes = [claim.code for claim in claims()]
        assert len(codes) >= 165
        assert {claim.document for claim in claims()} >= set(registry.SOURCES)
        for item in ("D1", "L2", "T3", "T4", "C5", "R6", "T7", "C8", "R9", "L10", "L11", "T12", "L13", "T14"):
            assert f"note.{item}" in codes

    def test_no_two_claims_say_the_same(self) -> None:
        for field in ("statement", "title"):
            text = [getattr(claim, field) for claim in claims()]
            assert len(set(text)) == len(text)

    def test_what_replaces_a_refuted_claim_is_a_claim_that_holds(self) -> None:
        recorded, codes = registry.recorded(), {claim.code: claim for claim in claims()}
        for claim in codes.values():
            if claim.corrected_by:
                assert recorded[claim.code] == "refuted", claim.code
                assert recorded[claim.corrected_by] in ("proved", "verified"), claim.code
            if claim.corrects:
                assert codes[claim.corrects].corrected_by == claim.code
            if claim.under:
                assert recorded[claim.under] == recorded[claim.code] == "refuted", claim.code
                assert not codes[claim.under].under, "errors are counted under one that stands by itself"

    def test_what_we_state_ourselves_is_not_the_sources(self) -> None:
        recorded = registry.recorded()
        for claim in claims():
            if claim.corrects and recorded[claim.corrects] == "refuted" and claim.code != "blog.T1":
                assert claim.whose == "ours", claim.code
            if recorded[claim.code] == "answered":
                assert claim.whose == "ours", "an answer is ours"
            if claim.whose == "ours":
                assert recorded[claim.code] != "refuted", claim.code

    def test_errors_that_are_one_are_counted_once(self) -> None:
        recorded = registry.recorded()
        errors = (Standing.FALSE, Standing.OVERCLAIM, Standing.SLIP, Standing.GAP)
        counted = sum(row.counts.get(name, 0) for row in tallies("source") for name in errors)
        refuted = [c for c in claims() if recorded[c.code] == "refuted" and not c.conjecture]
        dependent = [claim for claim in refuted if claim.under]
        assert dependent
        assert counted == len(refuted) - len(dependent)
        assert {c.code for c in dependent} >= {"paper.T4.7.pde", "paper.E1", "summary.moe"}

    def test_what_is_recorded_is_what_there_is(self) -> None:
        assert list(registry.recorded()) == [claim.code for claim in claims()]

    @pytest.mark.parametrize(
        ("pattern", "codes"),
        [
            ("note.L10", ["note.L10"]),
            ("NOTE.l10", ["note.L10"]),
            (
                "note.L1",
                [
                    "note.L10",
                    "note.L10.corrected",
                    "note.L10.index",
                    "note.L11",
                    "note.L11.corrected",
                    "note.L11.combined",
                ],
            ),
            ("*.L10*", ["note.L10", "note.L10.corrected", "note.L10.index"]),
        ],
        ids=str,
    )
    def test_patterns(self, pattern: str, codes: list[str]) -> None:
        names = [claim.code for claim in claims(pattern)]
        assert [name for name in names if not name.startswith("note.L13")] == codes

    def test_a_pattern_that_matches_nothing_says_what_there_is(self) -> None:
        with pytest.raises(NoSuchClaimError, match=r"Codes begin with paper, .*note"):
            claims("nothing")
        with pytest.raises(NoSuchClaimError, match=r"note.L10"):
            claims("note.L1O")

    def test_run_is_public(self) -> None:
        [outcome] = conserved.claims.run("note.L10")
        assert (outcome.claim.code, outcome.recorded) == ("note.L10", "refuted")
        assert outcome.verdict == Verdict.REFUTED
        assert outcome.evidence == outcome.verdict.evidence
        assert outcome.witness is not None


class TestPassages:
    def test_every_claim_points_to_lines_of_its_source(self) -> None:
        for claim in claims():
            where = claim.passage
            assert where.lines, claim.code
            assert all(1 <= first <= last <= passages.DOCUMENTS[claim.document].lines for first, last in where.lines)
            assert re.fullmatch(r"[0-9a-f]{16}", where.fingerprint), "run python -m conserved_papers.claims.page FOLDER"

    def test_no_fingerprint_is_left_over(self) -> None:
        used = {passages.key(claim.document, claim.passage.lines) for claim in claims()}
        assert set(passages.fingerprints()) == used

    def test_fingerprints_are_those_of_the_sources(self, request: pytest.FixtureRequest) -> None:
        folder = request.config.getoption("--sources")
        if folder is None:
            pytest.skip("the sources are not part of this package; give their folder with --sources")
        for document, about in passages.DOCUMENTS.items():
            text = passages.read(Path(folder), document)
            assert len(text) == about.lines
            for claim in claims(f"{document}."):
                assert passages.fingerprint(text, claim.passage.lines) == claim.passage.fingerprint, claim.code

    def test_a_changed_line_changes_the_fingerprint(self, tmp_path: Path) -> None:
        text = ["one", "two  ", "three"]
        assert passages.fingerprint(text, ((1, 2),)) == passages.fingerprint(["one", "two", "3"], ((1, 2),))
        assert passages.fingerprint(text, ((1, 2),)) != passages.fingerprint(["one", "too", "three"], ((1, 2),))
        with pytest.raises(FileNotFoundError, match="digest"):
            passages.read(tmp_path, "note")

    @pytest.mark.parametrize("text", ["3-1", "a", "1-b", "-4"], ids=repr)
    def test_lines_that_are_none_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="Lines are written as"):
            passages.spans(text)


class TestTheListOfStatements:
    """Every line of every source is in the list, and what judges it exists."""

    @pytest.mark.parametrize("document", passages.DOCUMENTS)
    def test_every_line_is_covered(self, document: str) -> None:
        covered = {
            line
            for sentence in passages.sentences()
            if sentence.document == document
            for first, last in sentence.lines
            for line in range(first, last + 1)
        }
        assert covered == set(range(1, passages.DOCUMENTS[document].lines + 1))

    def test_every_row_has_claims_that_exist_or_a_reason(self) -> None:
        codes = {claim.code for claim in claims()}
        for sentence in passages.sentences():
            assert sentence.words, sentence
            assert bool(sentence.codes) is not bool(sentence.reason), sentence
            assert set(sentence.codes) <= codes, sentence

    def test_every_claim_judges_something_in_its_own_passage(self) -> None:
        for claim in claims():
            rows = [sentence for sentence in passages.sentences() if claim.code in sentence.codes]
            assert rows, claim.code
            own = {n for first, last in claim.passage.lines for n in range(first, last + 1)}
            cited = {
                n
                for row in rows
                if row.document == claim.document
                for first, last in row.lines
                for n in range(first, last + 1)
            }
            assert own & cited, claim.code

    def test_no_sentence_of_a_source_is_copied(self, request: pytest.FixtureRequest) -> None:
        folder = request.config.getoption("--sources")
        if folder is None:
            pytest.skip("needs --sources")
        written = [*pages().values(), *(text for _, text in appendix_pages())]
        ours = " ".join(" ".join(written).split()).lower()
        for document in passages.DOCUMENTS:
            words = " ".join(passages.read(Path(folder), document)).lower().split()
            runs = {" ".join(words[i : i + 12]) for i in range(len(words) - 12)}
            copied = [run for run in runs if run in ours and not any(sign in run for sign in "\\$={}")]
            assert not copied, copied[:3]


class TestPages:
    def test_the_committed_pages_are_those_of_the_record(self) -> None:
        for path, text in pages().items():
            assert (ROOT / path).read_text(encoding="utf-8") == text, "run python -m conserved_papers.claims.page"

    def test_every_claim_has_one_row_on_the_page_of_its_source_and_one_block_in_the_appendix(self) -> None:
        anchors = re.compile(r'<a id="([\w.]+)"></a>')
        for document in passages.DOCUMENTS:
            codes = sorted(claim.code for claim in claims(f"{document}."))
            page = pages()[Path(f"docs/claims/{document}.md")]
            assert sorted(anchors.findall(page)) == codes
            appendix = dict(appendix_pages())[f"claims/appendix/{document}.md"]
            assert sorted(anchors.findall(appendix)) == codes

    def test_a_witness_is_printed_once(self) -> None:
        blocks = re.findall(r"```python\n(.*?)```", "".join(text for _, text in appendix_pages()), re.DOTALL)
        assert blocks
        assert len(set(blocks)) == len(blocks)

    def test_the_appendix_has_every_row_of_the_list_of_statements(self) -> None:
        rows = sum(text.count("\n| ") for index, text in appendix_pages() if index.endswith("-lines.md"))
        heads = sum(len(line_parts(document)) for document in passages.DOCUMENTS)
        assert rows == len(passages.sentences()) + heads


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("every ‖A_:,i‖² − ‖C_i,:‖²", "every ‖A<sub>:,i</sub>‖² − ‖C<sub>i,:</sub>‖²"),
        ("∇_B h = 0 and ∇_{W_i}h", "∇<sub>B</sub> h = 0 and ∇<sub>W<sub>i</sub></sub>h"),
        ("e^{az} of Q^(j)", "e<sup>az</sup> of Q<sup>(j)</sup>"),
        ("‖θ − θ*‖_F with `a_b*c`", "‖θ − θ\\*‖<sub>F</sub> with `a_b*c`"),
        ("the set {1, 2}", "the set \\{1, 2\\}"),
        ("V_iO_iᵀ, ½‖A‖_F² and a_jI", "V<sub>i</sub>O<sub>i</sub>ᵀ, ½‖A‖<sub>F</sub>² and a<sub>j</sub>I"),
        ("‖W_QK‖², a_1L and α_iβ_i", "‖W<sub>QK</sub>‖², a<sub>1L</sub> and α<sub>i</sub>β<sub>i</sub>"),
        ("laws of query_key", "laws of query\\_key"),
        ("Σ_{i<k} τ²", "Σ<sub>i&lt;k</sub> τ²"),
    ],
)
def test_formulas_are_typeset_and_nothing_in_them_is_markup(text: str, expected: str) -> None:
    assert typeset(text) == expected


class TestErrata:
    """A sheet cannot call a claim what it is not, and cannot leave out an error."""

    @pytest.mark.parametrize("document", passages.DOCUMENTS)
    def test_claims_stand_under_the_label_of_their_class(self, document: str) -> None:
        for line in errata.sheets()[document]:
            assert line.codes, line
            for code in line.codes:
                allowed = errata.ALLOWED.get(line.label)
                assert allowed is None or registry.records()[code].standing in allowed, (line.label, code)

    @pytest.mark.parametrize("document", passages.DOCUMENTS)
    def test_every_error_is_on_the_sheet(self, document: str) -> None:
        named = {code for line in errata.sheets()[document] for code in line.codes}
        wrong = {Standing.FALSE, Standing.OVERCLAIM, Standing.GAP, Standing.SLIP, Standing.CONJECTURE}
        errors = {
            claim.code
            for claim in claims(f"{document}.")
            if registry.records()[claim.code].standing in wrong and not claim.under
        }
        assert errors <= named

    @pytest.mark.parametrize("document", passages.DOCUMENTS)
    def test_a_sheet_is_short(self, document: str) -> None:
        assert 4 <= len(errata.sheets()[document]) <= 10


class TestClasses:
    @pytest.mark.parametrize(
        ("status", "scope", "marks", "standing"),
        [
            ("proved", "all sizes", {}, Standing.PROVED),
            ("proved", "at d = 3", {}, Standing.PROVED_HERE),
            ("verified", "argued, all sizes", {}, Standing.ARGUED),
            ("verified", "", {}, Standing.MEASURED),
            ("verified", "", {"proxy": True}, Standing.PROXY),
            ("refuted", "", {"severity": Severity.GAP}, Standing.GAP),
            ("refuted", "", {"severity": Severity.FALSE, "conjecture": True}, Standing.CONJECTURE),
            ("refuted", "", {}, Standing.FALSE),
            ("answered", "", {}, Standing.ANSWERED),
        ],
    )
    def test_the_class_of_an_outcome(self, status: str, scope: str, marks: Any, standing: Standing) -> None:
        verdict = Verdict(status=Status(status), message="", scope=scope, evidence=(Evidence(what="x", proof=True),))
        outcome = Outcome(claim=_mine(**marks), verdict=verdict, seconds=0.0)
        assert outcome.standing is standing

    def test_a_proof_for_all_sizes_has_no_step_in_words(self) -> None:
        for code, record in registry.records().items():
            if record.standing is Standing.PROVED:
                assert not any("in words" in text for text in record.evidence), code
            if record.standing is Standing.ARGUED:
                assert record.scope.startswith("argued"), code


class TestJudging:
    def test_a_verdict_is_as_strong_as_its_weakest_needed_part(self) -> None:
        proof, figure = Evidence(what="argument", proof=True), Evidence(what="run", value=0.1, limit=1.0)
        assert judging.confirm("", proof, figure, scope="all sizes") == Verdict.VERIFIED
        assert judging.confirm("", proof, scope="all sizes", beside=[figure]) == Verdict.PROVED
        with pytest.raises(ValueError, match="scope"):
            judging.confirm("", proof)
        strong, weak = judging.confirm("", proof, scope="at d = 1"), judging.confirm("", figure)
        assert judging.together(strong, strong) == Verdict.PROVED
        assert judging.together(strong, weak) == Verdict.VERIFIED
        assert judging.together(strong, judging.refute("no", figure)) == Verdict.REFUTED

    def test_an_answer_needs_support(self) -> None:
        proof = Evidence(what="argument", proof=True)
        result = judging.answer("Yes.", judging.confirm("So it is.", proof, scope="at d = 1"))
        assert (result.status, "Proved (at d = 1)" in result.message) == (Status.ANSWERED, True)
        assert judging.answer("Yes.", judging.refute("It is not.", proof)) == Verdict.REFUTED

    def test_an_answer_keeps_the_case_of_formulas(self) -> None:
        proof = Evidence(what="argument", proof=True)
        result = judging.answer("Yes.", judging.confirm("E‖A‖ is.", proof, scope="at L = 2, 4, 8"))
        assert result.message == "Yes. Proved (at L = 2, 4, 8): E‖A‖ is."

    def test_a_step_that_fails_breaks_the_argument(self) -> None:
        assert judging.by_steps("", "", ("one", True), ("two", True)) == Verdict.PROVED
        assert judging.by_steps("", "", ("one", True), ("two", False)) == Verdict.REFUTED

    def test_a_step_in_words_makes_an_argument_and_not_a_proof(self) -> None:
        result = judging.by_steps("", "", ("one", True), judging.InWords("two"))
        assert (result.status, result.scope) == (Status.VERIFIED, "argued, all sizes")
        assert judging.by_steps("", "", ("one", False), judging.InWords("two")) == Verdict.REFUTED
        both = judging.together(judging.by_steps("", "", ("one", True)), result)
        assert both.scope.startswith("argued")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that forgets what a test adds."""
    claims()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def _mine(**options: Any) -> Claim:
    given: dict[str, Any] = {
        "code": "mine.T1",
        "title": "Mine",
        "statement": "All is well.",
        "source": "me",
        "place": "page 1",
        "check": lambda: Verdict(status=Verdict.VERIFIED, message="So it is.", evidence=(Evidence(what="looked"),)),
    }
    return Claim(**given | options)


@pytest.mark.usefixtures("fresh")
class TestClaimsOfOthers:
    def test_a_claim_is_registered_with_one_function(self) -> None:
        conserved.claims.register(_mine())
        [outcome] = conserved.claims.run("mine")
        assert outcome.verdict == Verdict.VERIFIED
        assert outcome.changed, "it has never been recorded"

    def test_the_decorator_leaves_the_function_as_it_is(self) -> None:
        @conserved.claims.claim("mine.T2", "Two", statement="2 = 2.", place="page 2")
        def check(*, left: int = 2) -> Verdict:
            status = Verdict.VERIFIED if left == 2 else Verdict.REFUTED
            return Verdict(status=status, message="", evidence=(Evidence(what="left", value=left),))

        assert check(left=3) == Verdict.REFUTED
        [outcome] = conserved.claims.run("mine.T2")
        assert outcome.claim.source == "mine"

    def test_a_code_is_used_once(self) -> None:
        with pytest.raises(ValueError, match=r"already.*AAᵀ"):
            conserved.claims.register(_mine(code="note.L10"))

    @pytest.mark.parametrize("code", ["", "mine", "mine.", ".T1", "mine.T 1"], ids=repr)
    def test_a_code_names_a_source_and_a_place(self, code: str) -> None:
        with pytest.raises(ValueError, match="source and a place"):
            _mine(code=code)

    def test_a_check_that_fails_does_not_sink_the_rest(self) -> None:
        def bad() -> Verdict:
            raise ZeroDivisionError("no luck")

        conserved.claims.register(_mine(check=bad))
        conserved.claims.register(_mine(code="mine.T2", title="Other", statement="Other."))
        first, second = conserved.claims.run("mine")
        assert (first.verdict.status, first.failure) == (Status.INCONCLUSIVE, "ZeroDivisionError: no luck")
        assert first.changed
        assert second.verdict == Verdict.VERIFIED

    def test_random_numbers_of_a_check_do_not_depend_on_what_ran_before(self) -> None:
        import torch

        drawn: list[float] = []

        def check() -> Verdict:
            drawn.append(float(torch.randn(())))
            return Verdict(status=Verdict.INCONCLUSIVE, message="")

        torch.manual_seed(5)
        registry.outcome(_mine(check=check))
        after = float(torch.randn(()))
        torch.manual_seed(5)
        assert float(torch.randn(())) == after, "nor does it disturb those of the caller"
        registry.outcome(_mine(check=check))
        assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("fresh")
def test_the_example_for_contributors_runs() -> None:
    text = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "@claims.claim(" in block]
    shown = reproduces(code)
    assert "REFUTED: The mixed term is missing." in shown
    [outcome] = conserved.claims.run("mine.T1")
    _refutes_by_itself(outcome)


def test_claims_are_loaded_when_they_are_asked_for() -> None:
    code = "import sys, conserved; assert 'conserved_papers' not in sys.modules; conserved.claims.claims"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_laws_read_off_the_operations_say_so_and_others_do_not() -> None:
    proved = {code: registry.outcome(registry.claims(code)[0]).verdict.scope for code in ("paper.T4.6", "paper.T4.6.k")}
    assert proved["paper.T4.6"].startswith("the laws by rules that name no size, that there are no others at d = 3")
    # Inference does not see that one active expert leaves the router without a gradient.
    assert proved["paper.T4.6.k"].startswith("at d = 3")


def test_a_quantity_outside_the_span_of_the_typed_laws_is_not_said_to_be_among_them() -> None:
    from conserved_papers.claims import paper_blocks
    from conserved_papers.claims.certified import certificate, forms_of, typed_laws

    build, shape = paper_blocks.swiglu_network, (5, 3)
    contents = certificate(build, shape).contents
    right = forms_of(paper_blocks.neuron_differences, contents.parameters)
    wrong = forms_of(lambda theta: paper_blocks.neuron_differences(theta, sign=1.0), contents.parameters)
    assert typed_laws(build, shape, right, contents, "regression") is not None
    assert typed_laws(build, shape, wrong, contents, "regression") is None
