"""The page: one HTML file, into which recordings are put. What they say can leave no script element."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUILT = Path(__file__).with_name("page.html")
SLOT = '<script id="recordings" type="application/json">'
_EMPTY = SLOT + "null</script>"
# An HTML parser looks for "</script" and "<!--".
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def embed(recordings: Sequence[dict[str, Any]], page: str | None = None) -> str:
    """The page with recordings in it, in the order given; of the built page unless another is given."""
    page = BUILT.read_text() if page is None else page
    if page.count(_EMPTY) != 1:
        raise ValueError(f"a page must hold {_EMPTY} once, this one holds it {page.count(_EMPTY)} times")
    before, after = page.split(_EMPTY)
    return f"{before}{SLOT}{script_json(recordings)}</script>{after}"


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: hostile text cannot leave it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII, so no line ends but JavaScript's own
    return text.translate(_ESCAPES)


class Page:
    """A page with recordings, which a notebook displays in a frame of its own."""

    def __init__(self, recordings: Sequence[dict[str, Any]], height: int = 900) -> None:
        self.recordings = list(recordings)
        self.height = height

    def __str__(self) -> str:
        return embed(self.recordings)

    def _repr_html_(self) -> str:
        # Scripts alone: the frame has no origin, so nothing of the notebook is in its reach.
        return (
            f'<iframe srcdoc="{html.escape(str(self))}" sandbox="allow-scripts allow-downloads" title="recording" '
            f'style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )
