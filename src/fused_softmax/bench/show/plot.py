"""The picture of a run, and whether a picture shows a run's figures. Standard library only, except for drawing.

It shows kernel figures if the run has them, wall time otherwise, and never both.
"""

import hashlib
import struct
import zlib
from pathlib import Path

from fused_softmax.bench.results.record import Run
from fused_softmax.core import files

SOURCE = "figures of fused-softmax bench "


def plot(run: Run, path: Path, beside: Run | None = None) -> None:
    """Draw the run's figures, one panel for each operation and dtype, as the path's suffix says.

    beside: a run whose figures stand below these.
    """
    from fused_softmax.bench.show import charts

    image = charts.drawn(charts.pictures([run, *([beside] if beside else [])]), path.suffix, scale=1.5)
    files.write_whole(path, signed(image, path.suffix, f"{SOURCE}{digest(run)}"))


def signed(image: bytes, suffix: str, text: str) -> bytes:
    """The image with a text that no reader shows."""
    if suffix != ".png":
        return image + f"<!-- {text} -->\n".encode() if suffix == ".svg" else image + f"\n% {text}\n".encode()
    chunk = b"tEXt" + f"Description\0{text}".encode()
    end = len(b"\x89PNG....") + 25  # of the header, after which any other chunk may stand
    sized = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return image[:end] + sized + image[end:]


def digest(run: Run) -> str:
    """A digest of the plotted figures. It is stored in the picture, so that a stale picture can be told."""
    shown = [
        (
            str(p.case),
            p.provider,
            *(f"{figure.gb_per_s:.6g}" if figure else "" for figure in (p.kernel, p.call, p.ceiling)),
        )
        for p in run.points
    ]
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def shows(path: Path, run: Run) -> bool:
    """Whether a file that `plot` wrote shows the figures of this run."""
    return f"{SOURCE}{digest(run)}".encode() in path.read_bytes()
