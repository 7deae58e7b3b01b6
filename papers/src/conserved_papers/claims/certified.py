"""Claims about the laws of a block, settled by a certificate: are these its laws, are they all, and which PDE says so.

*Laws.* Quantities are maps of the parameters, as a source writes them. They are polynomials of degree two. Their
gradients are known exactly, and a symbolic argument shows that the output does not move along them, or balls show at
some point that a field does change them.

*All of them.* The certificate proves that at most D − r independent laws exist; the rank of the quantities' gradients
at its rational θ is computed exactly.

*The constraints.* A source's PDE is linear in ∇h. At the certificate's θ its solutions have dimension D − rank C,
exactly. They are the orthogonal complement of the gradient fields if (a) as many fields as there are constraints are
independent, which balls prove, and (b) the solutions are the infinitesimal symmetries, which a symbolic argument shows
to leave the output alone. Everything is analytic in θ, so the same holds on an open dense set, and for h with a
continuous gradient that is enough.

*All sizes.* A certificate speaks of one size. Laws that `conserved.recognize` reads off a block's operations follow
from rules that name no size; they were read off at this size, and that is what the verdict says of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from conserved.certificates import Certificate, certify
from conserved.certificates.certificate import pieces
from conserved.certificates.contents import CertificateContents
from conserved.certificates.form import Form
from conserved.certificates.proof import departure, proved_by_argument, random_fields
from conserved.inference import recognize
from conserved.verdict import Evidence, Verdict, Witness
from conserved_papers.claims.judging import confirm, decide, refute
from conserved_papers.claims.polynomials import Matrix, fractions, rank

Build = Callable[[], nn.Module]
Parameters = Mapping[str, Tensor]
Quantities = Callable[[Parameters], Tensor]
"""Numbers of degree at most two in the parameters."""
Constraints = Callable[[Parameters, Parameters], Tensor]
"""The left-hand side of a PDE, for parameters θ and the gradient of h; linear in the gradient."""


def certificate(build: Build, shape: tuple[int, ...], loss: str = "any") -> Certificate:
    """Return the certificate of a block; made once for all claims about it."""
    return _certificate(build, shape, loss)


@cache
def _certificate(build: Build, shape: tuple[int, ...], loss: str) -> Certificate:
    # With a default here, a call that leaves the loss out and one that names it would each make their own.
    return certify(build().double(), torch.zeros(shape, dtype=torch.float64), loss=loss)


def named(vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return a vector of all parameters as tensors by name."""
    parts = vector.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def forms_of(quantities: Quantities, shapes: Mapping[str, tuple[int, ...]]) -> list[Form]:
    """Quantities as explicit polynomials, from their gradients."""
    return affine_forms(torch.func.jacrev(lambda vector: quantities(named(vector, shapes)).flatten()), shapes)


def affine_forms(grad: Callable[[Tensor], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> list[Form]:
    """Forms by their gradients, which are affine, so values at zero and at unit vectors suffice."""
    units = torch.eye(sum(math.prod(shape) for shape in shapes.values()), dtype=torch.float64)
    constant = grad(torch.zeros_like(units[0]))
    columns = torch.func.vmap(grad)(units) - constant
    return [
        Form(
            quadratic=tuple((i, j, float(columns[j, k, i])) for j, i in columns[:, k].nonzero().tolist()),
            linear=tuple((i, float(constant[k, i])) for (i,) in constant[k].nonzero().tolist()),
        )
        for k in range(len(constant))
    ]


def gradients(forms: Sequence[Form], theta: Sequence[float]) -> Matrix:
    """Return the gradients of forms at θ, exactly."""
    point = [Fraction(value) for value in theta]
    return np.array([form.gradient(point) for form in forms], dtype=object).reshape(len(forms), len(point))


def proved(contents: CertificateContents, forms: Sequence[Form]) -> bool:
    """Return whether the symbolic argument shows, for every piece of the function, that no form moves the output."""
    return all(proved_by_argument(contents.program, forms, x, decided) for x, decided in pieces(contents))


def laws_hold(
    build: Build, shape: tuple[int, ...], quantities: Quantities, *, size: str, witness: Witness | None = None
) -> Verdict:
    """Return whether all quantities are conserved."""
    contents = certificate(build, shape).contents
    forms = forms_of(quantities, contents.parameters)
    # Balls first: an argument for what is no law can take long to fail.
    sampled = random_fields(contents.program, contents.theta, contents.inputs, seed=1)
    moved = [form for form in forms if departure(form, sampled) > 0]
    if moved:
        what = f"quantities that some field changes, by balls that exclude zero, {size}"
        evidence = Evidence(what=what, value=f"{len(moved)} of {len(forms)}", limit="0", proof=True)
        message = f"Some data changes {len(moved)} of these {len(forms)} quantities."
        return refute(message, evidence, witness=witness)
    if proved(contents, forms):
        what = f"symbolic argument that the output does not move along ∇h, {len(forms)} numbers"
        return confirm("The listed quantities are laws.", Evidence(what=what, proof=True), scope=f"at {size}")
    return Verdict(status=Verdict.INCONCLUSIVE, message="Neither an argument nor a counterexample was found.")


def all_laws(
    build: Build,
    shape: tuple[int, ...],
    quantities: Quantities | None,
    *,
    size: str,
    loss: str = "any",
    witness: Witness | None = None,
) -> Verdict:
    """Return whether the quantities are all laws there are: as many independent ones as the certificate allows."""
    result = certificate(build, shape, loss)
    contents = result.contents
    forms = [] if quantities is None else forms_of(quantities, contents.parameters)
    independent = rank(gradients(forms, contents.theta)) if forms else 0
    at_most = Evidence(what=f"independent laws that exist at most, {size}", value=result.at_most, proof=True)
    what = "independent quantities listed" + (", each a law by a symbolic argument" if forms else "")
    listed = Evidence(what=what, value=independent, limit=result.at_most, proof=True)
    if not result.verdict.holds or (independent < result.at_most and not result.complete):
        return Verdict(
            status=Verdict.INCONCLUSIVE, message=f"The certificate decides nothing. {result.verdict.message}"
        )
    if independent == result.at_most:
        if quantities is not None and not proved(contents, forms):
            return laws_hold(build, shape, quantities, size=size, witness=witness)
        plural = "" if independent == 1 else "s"
        exactly = (
            f"Exactly {independent} independent law{plural} of" if independent else "There is no nonconstant law of the"
        )
        typed = typed_laws(build, shape, forms, contents, loss) if forms else None
        scope = f"the laws by rules that name no size, that there are no others at {size}" if typed else f"at {size}"
        message = f"{exactly} {result.parameters} parameters."
        return confirm(message, at_most, listed, scope=scope, beside=(typed,) if typed else ())
    short = independent < result.at_most
    message = "There are more laws than those listed." if short else "Fewer laws exist than are listed."
    return refute(message, at_most, listed, witness=witness)


def typed_laws(
    build: Build, shape: tuple[int, ...], forms: Sequence[Form], contents: CertificateContents, loss: str
) -> Evidence | None:
    """Return the evidence that the forms are combinations of laws read off the block's operations, by rules that name
    no size; or None.
    """
    laws = recognize(build().double(), torch.zeros(shape, dtype=torch.float64), loss=loss)
    typed = laws.select(lambda symmetry: symmetry.exact and symmetry.source == "typed")
    if not len(typed):
        return None
    read = gradients(
        forms_of(lambda theta: torch.cat([one.law(theta).flatten() for one in typed]), contents.parameters),
        contents.theta,
    )
    spanned = rank(read)
    if rank(np.concatenate([read, gradients(forms, contents.theta)])) > spanned:
        return None
    what = "independent laws read off the block's operations, by rules that name no size; those listed are among them"
    return Evidence(what=what, value=spanned, proof=True)


def constraints_characterise(
    build: Build, shape: tuple[int, ...], constraints: Constraints, *, size: str, witness: Witness | None = None
) -> Verdict:
    """Return whether the solutions of a PDE at θ are exactly the gradients orthogonal to all fields."""
    result = certificate(build, shape)
    contents, theta = result.contents, torch.tensor(result.contents.theta, dtype=torch.float64)
    shapes = contents.parameters
    here = named(theta, shapes)
    matrix = torch.func.jacrev(lambda g: constraints(here, named(g, shapes)).flatten())(torch.zeros_like(theta))
    exact = fractions(matrix.tolist())
    solutions = result.parameters - rank(exact)
    fields = sum(len(word) == 1 for word in contents.words)
    moves = _symmetry_moves(build, shapes)
    directions = gradients(moves, contents.theta)
    solved = not moves or not (exact @ directions.T).any()
    spanned = (rank(directions) if moves else 0) == solutions
    unmoved = not moves or proved(contents, moves)
    proof = result.verdict == Verdict.PROVED and solved and spanned and unmoved
    evidence = (
        Evidence(what=f"dimension of the solutions at a rational θ, {size}", value=solutions, proof=proof),
        Evidence(
            what=f"independent gradient fields there, in balls, of {result.parameters}", value=fields, proof=proof
        ),
        Evidence(what="symmetries that span the solutions, by a symbolic argument", value=len(moves), proof=proof),
    )
    good = proof and fields + solutions == result.parameters
    if result.verdict != Verdict.PROVED:
        return Verdict(
            status=Verdict.INCONCLUSIVE, message=f"The certificate decides nothing. {result.verdict.message}"
        )
    return decide(
        good,
        "The solutions are exactly the complement of the gradient fields.",
        "The solutions are not the complement of the gradient fields.",
        *evidence,
        witness=None if good else witness,
        scope=f"at {size}",
    )


def _symmetry_moves(build: Build, shapes: Mapping[str, tuple[int, ...]]) -> list[Form]:
    """Return the directions in which generators of the recognised symmetries move θ: gradients of μ(θ, G) in G."""
    laws = recognize(build().double())
    if not len(laws):
        return []

    def pairing(theta: Tensor, gradient: Tensor) -> Tensor:
        a, b = named(theta, shapes), named(gradient, shapes)
        return torch.cat([symmetry.identity(a, b).flatten() for symmetry in laws])

    grad = torch.func.jacrev(pairing, argnums=1)
    return affine_forms(lambda theta: grad(theta, torch.zeros_like(theta)), shapes)
