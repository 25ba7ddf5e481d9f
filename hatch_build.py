"""What a package says of itself that pyproject.toml cannot: where the project is, and its readme as an index shows it.

An index shows the readme without the repository. Links into the repository, and pictures, get the project's address,
which FUSED_SOFTMAX_ADDRESS names at a release: `https://host/owner/name`. Without it pictures go, and links are their
text. A wheel that is made of an sdist has the sdist's address.
"""

import os
import re
from email import message_from_string
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE = r"(?![a-z]+:)"  # leads to no address
# A picture that may be a link; a link, where `kernel[grid](x)` is code; what HTML shows; and a link of HTML.
PICTURE = rf"\[!\[[^\]]*\]\({HERE}[^)\s]*\)\]\([^)\s]*\)\n*|!\[[^\]]*\]\({HERE}[^)\s]*\)\n*"
LINK = rf"(?<![\w)\]])\[([^\]]+)\]\({HERE}[^)\s]*\)"
SHOWN = rf'(?s)<picture>.*?</picture>\n*|<img\b[^>]*\bsrc="{HERE}[^>]*>\n*'
LED = rf'(?s)<a\b[^>]*\bhref="{HERE}[^>]*>(.*?)</a>'


def for_an_index(text: str, address: str | None = None, version: str = "") -> str:
    """A readme whose links and pictures need no repository beside it."""
    if address is None:
        for pattern, replacement in ((PICTURE, ""), (SHOWN, ""), (LINK, r"\1"), (LED, r"\1")):
            text = re.sub(pattern, replacement, text)
        return text
    pages, files = (f"{address}/{kind}/v{version}/" for kind in ("blob", "raw"))
    text = re.sub(rf'\b(src|srcset)="{HERE}([^"]*)"', rf'\1="{files}\2"', text)
    text = re.sub(rf"(!\[[^\]]*\]\(){HERE}([^)\s]*)\)", rf"\1{files}\2)", text)
    for before, after in ((r"(?<![\w)\]])(\[(?:!\[[^\]]*\]\([^)\s]*\)|[^\]])+\]\()", r"\)"), (r'(\bhref=")', '"')):
        text = re.sub(rf"{before}{HERE}(#[^)\s\"]*){after}", rf"\1{pages}README.md\2{after[-1]}", text)
        text = re.sub(rf"{before}{HERE}([^)\s\"]*){after}", rf"\1{pages}\2{after[-1]}", text)
    return text


def address_of(root: Path) -> str | None:
    """The project's, as the environment or the sdist in `root` has it."""
    if address := os.environ.get("FUSED_SOFTMAX_ADDRESS"):
        return address.rstrip("/")
    about = root / "PKG-INFO"
    urls = message_from_string(about.read_text()).get_all("Project-URL", []) if about.is_file() else []
    return next((url.removeprefix("Source, ") for url in urls if url.startswith("Source, ")), None)


def urls_of(address: str | None, version: str) -> dict[str, str]:
    if address is None:
        return {}
    return {
        "Source": address,
        "Documentation": f"{address}/tree/v{version}/docs",
        "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


class Hook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        root, version = Path(self.root), metadata["version"]
        address = address_of(root)
        metadata["urls"] = urls_of(address, version)
        text = for_an_index((root / "README.md").read_text(), address, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
