"""The page: one HTML file that holds recordings. No text in a recording can leave its script element."""

import base64
import gzip
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUILT = Path(__file__).with_name("page.html")
# An HTML parser looks for "</script" and "<!--".
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def embed(
    recordings: Sequence[dict[str, Any]],
    presets: Sequence[dict[str, Any]] = (),
    page: str | None = None,
    server: dict[str, Any] | None = None,
) -> str:
    """The page with these recordings, in order, and with its presets.

    page: by default the built page. It must contain `<script id="recordings" type="application/json">` and the same
        element for presets and server, once each. Their contents are replaced, by null if there is nothing to hold.
        Presets are packed, into a tenth.
    server: what the server of the page records (`serve.known`). Without it the page is one of a disk, and asks nobody.
    """
    page = BUILT.read_text(encoding="utf-8") if page is None else page
    page = _fill(page, "presets", pack(presets) if presets else None)
    return _fill(_fill(page, "recordings", list(recordings) or None), "server", server)


def pack(recordings: Sequence[dict[str, Any]]) -> str:
    """Recordings as base64 of gzip of their JSON, which the page unpacks."""
    text = json.dumps(list(recordings), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def unpack(packed: str) -> list[dict[str, Any]]:
    """What `pack` packed."""
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def _fill(page: str, name: str, value: Any) -> str:
    opening = f'<script id="{name}" type="application/json">'
    if page.count(opening) != 1:
        raise ValueError(f"a page must hold {opening} once, this one holds it {page.count(opening)} times")
    before, _, rest = page.partition(opening)
    _, closing, after = rest.partition("</script>")
    return before + opening + script_json(value) + closing + after


def script_json(value: Any) -> str:
    """JSON that is safe in a script element: hostile text cannot leave it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII, so no line ends but JavaScript's own
    return text.translate(_ESCAPES)


class Page:
    """A page with recordings. A notebook displays it in a frame of its own."""

    def __init__(self, recordings: Sequence[dict[str, Any]], height: int = 900) -> None:
        self.recordings = list(recordings)
        self.height = height

    def __str__(self) -> str:
        return embed(self.recordings)

    def _repr_html_(self) -> str:
        # The frame may run scripts but has no origin, so it cannot reach the notebook.
        return (
            f'<iframe srcdoc="{html.escape(str(self))}" sandbox="allow-scripts allow-downloads" title="recording" '
            f'style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )
