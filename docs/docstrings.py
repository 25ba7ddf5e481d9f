"""This package's docstrings as Markdown: `name: what it is` becomes an item of a list, and `>>>` a block of code."""

import re
from typing import Any

import griffe

# One argument, or several, at the beginning of a line: "top_k: ...", "temperature, top_k and min_p: ...".
ARGUMENT = re.compile(r"^(?P<names>[a-z_]\w*(?:(?:,| and) [a-z_]\w*)*(?: \([a-z]+\))?(?:, [a-z_]\w*)*): (?P<text>\S.*)")


def markdown(text: str) -> str:
    """A docstring of this package as Markdown.

    >>> markdown("dim: the one that sums to 1.")
    '- **dim**: the one that sums to 1.'
    """
    lines: list[str] = []
    in_code = in_list = False
    for line in text.splitlines():
        if line.startswith(">>> ") and not in_code:
            in_code, in_list = True, False
            lines += ["", "```pycon"]
        elif in_code and not line.strip():
            in_code = False
            lines.append("```")
        argument = None if in_code else ARGUMENT.match(line)
        if argument:
            if not in_list and lines and lines[-1].strip():
                lines.append("")
            in_list = True
            line = f"- **{argument['names']}**: {argument['text']}"
        elif in_list and line and not line.startswith(" "):
            in_list = False
            lines.append("")
        lines.append(line)
    return "\n".join([*lines, *(["```"] if in_code else [])])


class AsMarkdown(griffe.Extension):
    """Of every object that has a docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
