"""Figures of an analysis: a drawing for light and dark backgrounds, a caption, and the data."""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastenc._extras import require

INK = "#010203"  # placeholder that is replaced by the page's text colour in the SVG
# Okabe and Ito's colours, which colour-blind people can distinguish. Each is visible on white and on black.
COLOURS = ("#0a84c6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999")
MARKERS = "osD^vP"  # distinguish groups with the same colour


@dataclass(frozen=True)
class Figure:
    """One figure of a report.

    Fields:
        name: name of its CSV file and of its anchor.
        caption: what the figure shows.
        drawing: an SVG or an HTML table. Text and lines have the page's text colour.
        columns, rows: the data.
    """

    name: str
    title: str
    caption: str
    drawing: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def draw(
    paint: Callable[[Any], None],
    name: str,
    size: tuple[float, float] = (7, 3.6),
    panels: tuple[int, int] = (1, 1),
) -> str:
    """The SVG of a figure.

    Args:
        paint: function that draws on matplotlib's axes: one, or an array of them for several panels.
        size: in inches.
        panels: numbers of rows and columns.
    """
    matplotlib = require("matplotlib", extra="plots")
    backend = require("matplotlib.backends.backend_svg", extra="plots")
    figure_module = require("matplotlib.figure", extra="plots")
    ink = {key: INK for key in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")}
    settings = {
        **ink,
        "axes.edgecolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # makes ids that are unique in the page and the same in every run
        "font.family": "sans-serif",
        "legend.frameon": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with matplotlib.rc_context(settings):
        figure = figure_module.Figure(figsize=size, layout="constrained")
        backend.FigureCanvasSVG(figure)
        axes = figure.subplots(*panels)
        paint(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Ids that are not referred to are removed, because other figures of the page have the same.
    used = set(re.findall(r"#(\w+)", text))
    return re.sub(r' id="(\w+)"', lambda found: found[0] if found[1] in used else "", text)


def by_layer(
    name: str,
    title: str,
    caption: str,
    lines: Mapping[str, Sequence[float]],
    label: str,
    pairs: bool = False,
) -> Figure:
    """Lines over the layers, from the embeddings' output (0). Only as many are drawn as there are colours.

    Args:
        lines: {label: a value for each layer}.
        label: label of the vertical axis.
        pairs: each two lines are a pair with the same colour; the second is dashed.
    """

    def paint(axes: Any) -> None:
        for position, (line, values) in enumerate(lines.items()):
            number = position // 2 if pairs else position
            if number == len(COLOURS):
                break
            look = {"color": COLOURS[number], "marker": "o", "ms": 4}
            style = "--" if pairs and position % 2 else "-"
            axes.plot(range(len(values)), values, style, label=line, **look)
        axes.set_xlabel("layer (0: embeddings)")
        axes.set_ylabel(label)
        axes.set_xticks(range(len(next(iter(lines.values())))))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)

    rows = [(layer, *values) for layer, values in enumerate(zip(*lines.values(), strict=True))]
    return Figure(name, title, caption, draw(paint, name), ("layer", *lines), rows)


def scatter(
    name: str, title: str, caption: str, points: Sequence[tuple[float, float, str, str]]
) -> Figure:
    """Points (x, y, group, text) in a plane. The groups have different colours."""
    groups = sorted({point[2] for point in points})

    def paint(axes: Any) -> None:
        for position, group in enumerate(groups):
            chosen = [point for point in points if point[2] == group]
            x, y = zip(*((point[0], point[1]) for point in chosen), strict=True)
            round_, colour = divmod(position, len(COLOURS))
            look = {"color": COLOURS[colour], "marker": MARKERS[round_ % len(MARKERS)]}
            axes.scatter(x, y, s=14, alpha=0.8, linewidths=0, label=group, **look)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)

    columns = ("x", "y", "group", "text")
    return Figure(name, title, caption, draw(paint, name, (7, 4)), columns, list(points))


def heat_maps(
    name: str, title: str, caption: str, maps: Mapping[str, Sequence[Sequence[float]]]
) -> Figure:
    """A heat map of layers (vertical) and heads (horizontal) for each statistic.

    Args:
        maps: {statistic: values (layers, heads)}.
    """

    def paint(axes: Any) -> None:
        for axis, (label, values) in zip(axes.flat, maps.items(), strict=True):
            image = axis.imshow(values, cmap="viridis", aspect="auto")
            axis.set_title(label, fontsize=9)
            axis.set_xlabel("head")
            axis.set_ylabel("layer")
            axis.set_yticks(range(len(values)), [str(i + 1) for i in range(len(values))])
            bar = axis.figure.colorbar(image, ax=axis)
            bar.outline.set_visible(False)

    first = next(iter(maps.values()))
    rows = [
        (layer + 1, head, *(float(values[layer][head]) for values in maps.values()))
        for layer in range(len(first))
        for head in range(len(first[0]))
    ]
    down = (len(maps) + 1) // 2
    svg = draw(paint, name, (8, 2.7 * down), (down, 2))
    return Figure(name, title, caption, svg, ("layer", "head", *maps), rows)


def table(
    name: str, title: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> Figure:
    """A table of texts."""
    line = lambda row, tag: "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    drawing = f"<table><thead><tr>{line(columns, 'th')}</tr></thead><tbody>{body}</tbody></table>"
    return Figure(name, title, caption, drawing, tuple(columns), [tuple(row) for row in rows])


def bars(
    name: str,
    title: str,
    caption: str,
    labels: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    axis: str,
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> Figure:
    """Horizontal bars.

    Args:
        labels: the items on the vertical axis.
        groups: {group: a value for each label}; each group has a bar at each label.
        axis: label of the horizontal axis.
        extra: further columns of the data.
    """

    def paint(axes: Any) -> None:
        height = 0.8 / len(groups)
        for position, (group, values) in enumerate(groups.items()):
            at = [i + (position - (len(groups) - 1) / 2) * height for i in range(len(labels))]
            axes.barh(at, values, height, color=COLOURS[position], label=group)
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(axis)
        if len(groups) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)

    columns = {**groups, **(extra or {})}
    rows = list(zip(labels, *columns.values(), strict=True))
    size = (7, max(2.4, 0.5 + 0.3 * len(labels)))
    return Figure(name, title, caption, draw(paint, name, size), ("label", *columns), rows)
