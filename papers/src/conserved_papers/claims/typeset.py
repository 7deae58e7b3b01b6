"""Typeset plain text of readings and verdicts for Markdown: subscripts, superscripts, and signs that mean markup."""

from __future__ import annotations

import re

_SCRIPT = re.compile(
    r"(?<![a-z]{2})([_^])(\{(?:[^{}]|\{[^{}]*\})*\}|\([^()]*\)|:,[a-z0-9]+|[a-z0-9]+,:"
    r"|:,[α-ω]|[0-9]+L?|[a-zℓ]+|[α-ω]|[A-Z]+|⊥|∞|\*|−1|⁺)"
)
"""An index or a power: in braces or brackets, a row or a column (A_:,i and C_i,:), a number, letters, or a sign.

Letters end where their case or alphabet changes, so that Q_iK_iᵀ is a product; other indices stand in braces.
The underscore of a name such as query_key is none.
"""


def typeset(text: str) -> str:
    """Return text whose formulas show as they are meant; what stands in backticks is code and stays as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _formulas(part) for part in parts)


def _formulas(text: str) -> str:
    escaped = re.sub(r"\*", r"\\*", text).replace("<", "&lt;")
    return re.sub(r"[{}]", lambda brace: f"\\{brace[0]}", _scripts(escaped))


def _scripts(text: str) -> str:
    def script(result: re.Match[str]) -> str:
        tag = "sub" if result[1] == "_" else "sup"
        inner = result[2][1:-1] if result[2].startswith("{") else result[2]
        return f"<{tag}>{_scripts(inner)}</{tag}>"

    # What is left of a single underscore is not an index, and not emphasis either.
    return re.sub(r"_", r"\\_", _SCRIPT.sub(script, text.replace("\\*", "∗"))).replace("∗", "\\*")
