"""The description on a package index: the README, with links that lead somewhere there.

An index shows the README alone, so that a relative link or picture is dead on it. `links` in pyproject.toml is the
address that they are relative to. As long as there is none, links become plain text and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
PICTURE = re.compile(r"<picture>.*?</picture>\n*", flags=re.DOTALL)
SOURCE = re.compile(r'((?:src|srcset)=")(?!https?:)([^"]+)')


def on_an_index(text: str, links: str = "") -> str:
    """Return a README whose relative links and pictures are below an address, or without them if that is empty."""
    if not links:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    base = links.rstrip("/")
    return SOURCE.sub(rf"\1{base}/\2", LINK.sub(rf"[\1]({base}/\2)", text))


class Description(MetadataHookInterface):
    """Sets the description of the distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the README as an index shows it into the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": on_an_index(text, self.config.get("links", ""))}
