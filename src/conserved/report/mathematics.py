"""LaTeX as MathML that browsers render by themselves; what is not understood stays LaTeX, as text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from markupsafe import Markup

_ELEMENTS = frozenset(
    {"math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "ms", "msub", "msup", "msubsup", "munder", "mover"}
    | {"munderover", "mfrac", "msqrt", "mroot", "mstyle", "mtable", "mtr", "mtd", "mpadded", "mphantom", "menclose"}
)
_ATTRIBUTES = frozenset(
    {"display", "displaystyle", "scriptlevel", "stretchy", "fence", "separator", "accent", "accentunder", "form"}
    | {"width", "height", "depth", "lspace", "rspace", "minsize", "maxsize", "movablelimits", "notation"}
    | {"linethickness", "columnalign", "rowspacing", "columnspacing"}
)
"""Elements that the page may contain. Links and styles of LaTeX (\\href, \\style) are not among them."""

_NAMED = re.compile(r"\\(?:mathtt|texttt)\{((?:[^{}\\]|\\.)*)\}")
_MARK = re.compile("\ue000(\\d+)\ue001")
"""Parameter names are set aside while LaTeX is parsed: they are text, and MathML has no typewriter letters."""

_LONGEST = 4000


def typeset(latex: str, *, display: bool = True) -> Markup:
    """Return a formula as MathML with its source as a label; the escaped source itself where it is not understood."""
    mathml = _convert(latex, display)
    return Markup("<code class='latex'>{}</code>").format(latex) if mathml is None else mathml


def _convert(latex: str, display: bool) -> Markup | None:
    from latex2mathml.converter import convert

    if not latex.strip() or len(latex) > _LONGEST:
        return None
    names: list[str] = []

    def aside(match: re.Match[str]) -> str:
        names.append(re.sub(r"\\(.)", r"\1", match[1]))
        return rf"\text{{{chr(0xE000)}{len(names) - 1}{chr(0xE001)}}}"

    try:
        text = _NAMED.sub(aside, latex).replace("{aligned}", "{align*}")
        tree = ElementTree.fromstring(convert(text, display="block" if display else "inline"))
        return _clean(tree, names, latex)
    except Exception:
        # The text may be anything, and the parser's complaints share no base class: it is shown as it is.
        return None


def _clean(tree: ElementTree.Element, names: list[str], latex: str) -> Markup | None:
    for element in tree.iter():
        element.tag = element.tag.rpartition("}")[2]
        text = element.text or ""
        # An unknown command comes back as its own name with its backslash.
        if element.tag not in _ELEMENTS or "\\" in text:
            return None
        unknown = set(element.attrib) - _ATTRIBUTES - {"mathvariant"}
        if unknown:
            return None
        # Of the variants browsers know "normal" alone; the other alphabets come as letters of their own.
        variant = element.attrib.pop("mathvariant", "")
        if variant == "normal":
            element.set("mathvariant", variant)
        elif variant:
            element.set("class", variant if variant.isalpha() else "")
        if _MARK.search(text):
            element.tag = "mtext"
            element.set("class", "name")
            element.text = _MARK.sub(lambda match: names[int(match[1])], text)
    tree.set("aria-label", latex)
    tree.set("role", "math")
    return Markup(ElementTree.tostring(tree, encoding="unicode"))
