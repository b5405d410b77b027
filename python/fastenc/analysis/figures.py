"""Figures of an analysis: a drawing for light and dark backgrounds, a caption, and the data.

Drawings are narrow and their letters large, so that they can be read on a telephone.
"""

import html
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from xml.etree import ElementTree

from fastenc._base.extras import require
from fastenc.analysis.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure
    from matplotlib.ticker import MaxNLocator

INK = "#010203"  # placeholder that is replaced by the page's text colour in the SVG
# Okabe and Ito's colours, which colour-blind people can distinguish. Each is visible on white and on black.
COLOURS = ("#0a84c6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999")
MARKERS = "osD^vP"  # distinguish groups with the same colour
LEVEL_STYLES = (":", "-.", (0, (1, 4)))  # of horizontal lines
WIDTH = 5.0  # inches
LETTERS = 10  # points
SMALL = 8.5
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


@dataclass(frozen=True)
class Figure:
    """One figure of a report.

    Fields:
        name: name of its CSV file and of its anchor.
        title: what the figure shows, and for which data.
        caption: how to read it, with the number of items.
        drawing: an SVG or an HTML table. Text and lines have the page's text colour. "" if nothing could be drawn.
        columns, rows: the data.
    """

    name: str
    title: str
    caption: str
    drawing: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]


@dataclass(frozen=True)
class Panel:
    """Lines over the layers, from the embeddings' output (0), with one unit.

    Fields:
        title: what the panel shows.
        axis: label of the vertical axis: the quantity and its unit.
        lines: {label: a value for each layer}. A label has the same colour in all panels of a figure.
        note: second line of the title, such as the number of items.
        intervals: {label: an interval for each layer} of some of the lines.
        levels: {label: value} of horizontal lines, such as chance.
    """

    title: str
    axis: str
    lines: Mapping[str, Sequence[float]]
    note: str = ""
    intervals: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)


def left_out(name: str, title: str, reason: str) -> Figure:
    """The place of a figure that cannot be drawn."""
    return Figure(name, title, f"Left out: {reason}", "", (), [])


def draw(
    paint: Callable[[list["Axes"]], None],
    name: str,
    height: float,
    panels: tuple[int, int] = (1, 1),
    number: int | None = None,
    same_axis: bool = False,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """The SVG of a figure. Labels of all panels are in one legend above them.

    Args:
        paint: function that draws on the panels' axes.
        height: in inches, without the legend.
        panels: numbers of rows and columns.
        number: number of panels; None: all of the grid.
        same_axis: all panels have the same vertical axis.
        texts: {gid of a matplotlib collection: a text for each of its points}, which a browser shows when the pointer
            is over the point.
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
        "axes.titlesize": LETTERS,
        "font.size": LETTERS,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "legend.fontsize": SMALL,
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # makes ids that are unique in the page and the same in every run
        "font.family": "sans-serif",
        "legend.frameon": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with matplotlib.rc_context(settings):
        figure = figure_module.Figure(figsize=(WIDTH, height), layout="constrained")
        backend.FigureCanvasSVG(figure)
        grid = figure.subplots(*panels, squeeze=False, sharey=same_axis).flatten().tolist()
        for axes in grid[number:] if number else []:
            axes.remove()
        paint(grid[:number])
        _add_legend(figure, grid[:number])
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = _with_texts(text[text.index("<svg") :], texts or {}).replace(INK, "currentColor")
    # Ids that are not referred to are removed, because other figures of the page have the same.
    used = set(re.findall(r"#(\w+)", text))
    return re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in used else "", text)


def _major_locator(axes: "Axes") -> "MaxNLocator":
    """The places of the ticks of a linear x axis."""
    return cast("MaxNLocator", axes.xaxis.get_major_locator())


def _add_legend(figure: "MatplotlibFigure", grid: Sequence["Axes"]) -> None:
    """Put a legend in rows above the panels, and make the figure higher by these rows."""
    entries: dict[str, Artist] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    columns = max(1, min(len(entries), 60 // (max(map(len, entries)) + 6)))
    rows = -(-len(entries) // columns)
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.19 * rows)
    handles, labels = list(entries.values()), list(entries)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.2)


def _with_texts(svg: str, texts: Mapping[str, Sequence[str]]) -> str:
    """The SVG with a <title> in each point of the collections."""
    if not texts:
        return svg
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(svg)
    for name, of_points in texts.items():
        points = root.findall(f".//*[@id='{name}']//{{{SVG}}}use")
        for point, text in zip(points, of_points, strict=True):
            ElementTree.SubElement(point, f"{{{SVG}}}title").text = text
    return ElementTree.tostring(root, encoding="unicode")


def by_layer(name: str, title: str, caption: str, panels: Sequence[Panel]) -> Figure:
    """Panels of lines over the layers. Only as many lines are drawn as there are colours; the data have all."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    colours = dict(zip(labels, COLOURS, strict=False))
    same_axis = len(panels) > 1 and len({panel.axis for panel in panels}) == 1

    def paint(grid: list["Axes"]) -> None:
        for axes, panel in zip(grid, panels, strict=True):
            for label, values in panel.lines.items():
                if label not in colours:
                    continue
                layers = range(len(values))
                axes.plot(layers, values, "-o", ms=4, label=label, color=colours[label])
                if label in panel.intervals:
                    low, high = zip(*panel.intervals[label], strict=True)
                    axes.fill_between(layers, low, high, alpha=0.2, color=colours[label], lw=0)
            for (label, value), style in zip(panel.levels.items(), LEVEL_STYLES, strict=False):
                axes.axhline(value, linestyle=style, color=INK, lw=1.2, label=label)
            axes.set_title("\n".join(filter(None, (panel.title, panel.note))), loc="left")
            axes.set_xlabel("layer (0: embeddings)")
            place = axes.get_subplotspec()
            if place is None or place.is_first_col() or not same_axis:
                axes.set_ylabel(panel.axis)
            _major_locator(axes).set_params(integer=True, nbins=7)

    columns: dict[str, Sequence[float]] = {}
    for panel in panels:
        before = f"{panel.title}, " if len(panels) > 1 else ""
        for label, values in panel.lines.items():
            columns[before + label] = values
            if label in panel.intervals:
                low, high = zip(*panel.intervals[label], strict=True)
                columns |= {f"{before}{label}, low": low, f"{before}{label}, high": high}
        number = len(next(iter(panel.lines.values())))
        columns |= {before + label: [value] * number for label, value in panel.levels.items()}
    rows = [(layer, *values) for layer, values in enumerate(zip(*columns.values(), strict=True))]
    down, across = -(-len(panels) // 2), min(2, len(panels))
    svg = draw(paint, name, 2.5 * down, (down, across), len(panels), same_axis)
    return Figure(name, title, caption, svg, ("layer", *columns), rows)


def scatter(
    name: str,
    title: str,
    caption: str,
    points: Sequence[tuple[float, float, str, str]],
    axes_labels: tuple[str, str],
) -> Figure:
    """Points (x, y, group, text) in a plane.

    The groups have different colours. A point under the pointer shows its text.
    """
    groups = sorted({point[2] for point in points})
    of_group = {group: [point for point in points if point[2] == group] for group in groups}

    def paint(grid: list["Axes"]) -> None:
        (axes,) = grid
        for position, (group, chosen) in enumerate(of_group.items()):
            x, y = zip(*((point[0], point[1]) for point in chosen), strict=True)
            round_, place = divmod(position, len(COLOURS))
            colour, marker = COLOURS[place], MARKERS[round_ % len(MARKERS)]
            label = f"{textwrap.shorten(group, 40)} (n = {len(chosen):,})"
            gid = f"{name}-{position}"
            axes.scatter(
                x,
                y,
                s=16,
                color=colour,
                marker=marker,
                alpha=0.7,
                linewidths=0,
                label=label,
                gid=gid,
            )
        axes.set_xlabel(axes_labels[0])
        axes.set_ylabel(axes_labels[1])

    texts = {
        f"{name}-{position}": [f"{group}: {point[3]}" for point in chosen]
        for position, (group, chosen) in enumerate(of_group.items())
    }
    svg = draw(paint, name, 4.0, texts=texts)
    return Figure(name, title, caption, svg, ("x", "y", "group", "text"), list(points))


def heat_maps(
    name: str, title: str, caption: str, maps: Mapping[str, Sequence[Sequence[float]]]
) -> Figure:
    """A heat map of layers (vertical) and heads (horizontal) for each statistic. The highest value is framed and named.

    Args:
        maps: {statistic: values (layers, heads)}.
    """

    def paint(grid: list["Axes"]) -> None:
        patches = require("matplotlib.patches", extra="plots")
        for axes, (label, values) in zip(grid, maps.items(), strict=True):
            image = axes.imshow(values, cmap="viridis", aspect="auto")
            layer, head = highest(values)
            frame = {"fill": False, "edgecolor": COLOURS[4], "lw": 2}
            axes.add_patch(patches.Rectangle((head - 0.5, layer - 0.5), 1, 1, **frame))
            axes.set_title(f"{label}\nmost: layer {layer + 1}, head {head}", loc="left")
            axes.set_xlabel("head")
            axes.set_ylabel("layer")
            ticks = range(0, len(values), -(-len(values) // 6))
            axes.set_yticks(ticks, [str(tick + 1) for tick in ticks])
            _major_locator(axes).set_params(integer=True, nbins=6)
            axes.figure.colorbar(image, ax=axes).outline.set_visible(False)

    first = next(iter(maps.values()))
    rows = [
        (layer + 1, head, *(float(values[layer][head]) for values in maps.values()))
        for layer in range(len(first))
        for head in range(len(first[0]))
    ]
    down = (len(maps) + 1) // 2
    svg = draw(paint, name, 2.3 * down, (down, 2), len(maps))
    return Figure(name, title, caption, svg, ("layer", "head", *maps), rows)


def highest(values: Sequence[Sequence[float]]) -> tuple[int, int]:
    """(row, column) of the largest value."""
    cells = [
        (value, row, column)
        for row, of_row in enumerate(values)
        for column, value in enumerate(of_row)
    ]
    _, row, column = max(cells, key=lambda cell: cell[0])
    return row, column


def table(
    name: str, title: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> Figure:
    """A table of texts. On a narrow page each cell is a line behind its column's name."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    cell = lambda column, text: f'<td data-column="{html.escape(column)}">{html.escape(text)}</td>'
    body = "".join(
        f"<tr>{''.join(cell(column, text) for column, text in zip(columns, row, strict=True))}</tr>"
        for row in rows
    )
    drawing = f"<table class='stacked'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return Figure(name, title, caption, drawing, tuple(columns), [tuple(row) for row in rows])


def bars(
    name: str,
    title: str,
    caption: str,
    labels: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    axis: str,
    notes: Iterable[str] = (),
    intervals: Mapping[str, Sequence[Interval]] | None = None,
    extra: Mapping[str, Sequence[object]] | None = None,
) -> Figure:
    """Horizontal bars.

    Args:
        labels: the items on the vertical axis.
        groups: {group: a value for each label}; each group has a bar at each label.
        axis: label of the horizontal axis.
        notes: a second line for each label, such as the number of items.
        intervals: {group: an interval for each label} of some of the groups, drawn as a line on the bar.
        extra: further columns of the data.
    """
    intervals, notes = intervals or {}, list(notes)
    lines = [textwrap.fill(label, 22) for label in labels]
    lines = [f"{line}\n{note}" for line, note in zip(lines, notes, strict=True)] if notes else lines

    def paint(grid: list["Axes"]) -> None:
        (axes,) = grid
        height = 0.8 / len(groups)
        for position, (group, values) in enumerate(groups.items()):
            at = [i + (position - (len(groups) - 1) / 2) * height for i in range(len(labels))]
            label = group if len(groups) > 1 else None
            axes.barh(at, values, height, color=COLOURS[position], label=label)
            if group in intervals:
                low, high = zip(*intervals[group], strict=True)
                axes.hlines(at, low, high, color=INK, lw=1.2)
        axes.set_yticks(range(len(labels)), lines)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(axis)

    columns: dict[str, Sequence[object]] = dict(groups)
    for group, bounds in intervals.items():
        low, high = zip(*bounds, strict=True)
        columns |= {f"{group}, low": low, f"{group}, high": high}
    columns |= extra or {}
    rows = list(zip(labels, *columns.values(), strict=True))
    text_lines = max(sum(line.count("\n") + 1.4 for line in lines), 1.2 * len(labels) * len(groups))
    height = max(2.0, 0.6 + 0.145 * text_lines)
    return Figure(name, title, caption, draw(paint, name, height), ("label", *columns), rows)
