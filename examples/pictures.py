"""The pictures of the examples, by Altair: losses or rewards by step beside something else that is measured."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import altair as alt

Panel = alt.Chart | alt.LayerChart | alt.FacetChart
COLOURS = ["#0072B2", "#D55E00"]


def data(rows: Iterable[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.Data(values=[dict(row) for row in rows]))


def by_name() -> dict[str, Any]:
    """The encodings that tell two of `name` apart, in the order in which the data has them."""
    legend = alt.Legend(title=None, orient="top", labelLimit=0)
    return {
        "color": alt.Color("name:N", sort=None, scale=alt.Scale(range=COLOURS), legend=legend),
        "strokeDash": alt.StrokeDash("name:N", sort=None, scale=alt.Scale(range=[[1, 0], [6, 3]]), legend=legend),
    }


def losses(curves: Mapping[str, Iterable[float]], what: str = "loss") -> alt.Chart:
    rows = [{"name": name, "step": i, what: value} for name, curve in curves.items() for i, value in enumerate(curve)]
    chart = data(rows).mark_line().encode(x="step:Q", y=alt.Y(f"{what}:Q", scale=alt.Scale(zero=False)), **by_name())
    return chart.properties(title="the same model, tokens and steps", width=450)


def bars(values: Mapping[str, float], unit: str, title: str, form: str, below: str = "") -> Panel:
    """A bar for each name, with its value. form: of the value, as d3 has it. below: what stands under the names."""
    axis = alt.X("name:N", sort=None, title=below or None, axis=alt.Axis(labelAngle=0))
    of = data({"name": name, "value": value} for name, value in values.items()).encode(x=axis)
    colour = alt.Color("name:N", sort=None, scale=alt.Scale(range=COLOURS), legend=None)
    drawn = of.mark_bar().encode(y=alt.Y("value:Q", title=unit), color=colour)
    numbers = of.mark_text(dy=-6).encode(y="value:Q", text=alt.Text("value:Q", format=form))
    return (drawn + numbers).properties(title=title, width=180)


def save(path: Path, *panels: Panel) -> None:
    """Write the panels side by side, in the format of the path's suffix."""
    charts = alt.hconcat(*panels).resolve_scale(color="independent", strokeDash="independent")
    charts.save(str(path), scale_factor=2 if path.suffix == ".png" else 1)
