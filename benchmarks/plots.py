"""Pictures from the results' JSON alone: python -m benchmarks.plots [FOLDER]

For each device with results: <benchmark>.png has bars of every provider's time with its share of the roofline.
roofline.png has each op's rate over its FLOPs per byte, below the ceilings measured in the same run. Training runs have
their held-out losses. FOLDER: where to write; by default beside the JSON files.
"""

import json
import sys
from itertools import cycle
from pathlib import Path

from benchmarks._results import RESULTS
from fastenc._base.files import write_atomically

MOST_CASES = 16


def timed(rows: dict) -> dict[str, dict]:
    """Providers that have a time."""
    return {n: row for n, row in rows.items() if isinstance(row, dict) and "median_ms" in row}


def save(figure, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    write_atomically(path, lambda file: figure.savefig(file, dpi=120, format="png"))
    pyplot.close(figure)


def bars(name: str, data: dict, path: Path) -> None:
    """A group for each case, a bar for each provider: times relative to the slowest, p20–p80, the roofline's share."""
    from matplotlib import pyplot

    cases = {case: timed(rows) for case, rows in data["cases"].items()}
    cases = dict(list((case, rows) for case, rows in cases.items() if rows)[:MOST_CASES])
    providers = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    count = sum(len(rows) + 1 for rows in cases.values())
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.19 * count))
    colors = pyplot.get_cmap("tab20").colors
    at, ticks = 0, []
    for case, rows in cases.items():
        ticks.append((at + (len(rows) - 1) / 2, case))
        slowest = max(row["median_ms"] for row in rows.values())
        for provider, row in rows.items():
            low, high = row["median_ms"] - row["p20_ms"], row["p80_ms"] - row["median_ms"]
            axis.barh(
                at,
                row["median_ms"] / slowest,
                xerr=[[max(low, 0) / slowest], [max(high, 0) / slowest]],
                color=colors[providers.index(provider) % 20],
                error_kw={"linewidth": 0.8},
            )
            text = f"{provider}, {row['median_ms']:.3g} ms"
            if "percent_of_roofline" in row:
                text += f", {row['percent_of_roofline']:.0f} % of roofline"
            if "MFU_percent" in row:
                text += f", MFU {row['MFU_percent']:.0f} %"
            beside = axis.get_yaxis_transform()
            axis.text(1.01, at, text, va="center", fontsize=6, transform=beside)
            at += 1
        at += 1
    axis.set_yticks([t for t, _ in ticks], [case for _, case in ticks], fontsize=7)
    axis.invert_yaxis()
    axis.set(
        xlim=(0, 1.1),
        xlabel="time / the slowest provider's",
        title=f"{name}: {data['machine']['device']}",
    )
    save(figure, path)


def roofline(device: str, results: dict[str, dict], path: Path) -> bool:
    """Left: ops with matrix products, FLOPs per second over FLOPs per byte. Right: other ops, bytes per second.

    Returns: False if no result has bytes and ceilings.
    """
    from matplotlib import pyplot

    figure, (axis, bandwidth) = pyplot.subplots(1, 2, figsize=(12, 5.5), width_ratios=(3, 2))
    markers = "osD^vP*X<>"
    ceilings: dict = {}
    for position, (name, data) in enumerate(results.items()):
        rows = [
            row
            for case in data["cases"].values()
            for provider, row in timed(case).items()
            if provider.startswith("fastenc") and row.get("bytes")
        ]
        if not rows or "copy_GB_per_s" not in data.get("ceilings", {}):
            continue
        style = {"label": name, "marker": markers[position % 10]}
        products = [row for row in rows if row.get("flops")]
        if products:
            intensity = [row["flops"] / row["bytes"] for row in products]
            axis.scatter(intensity, [row["TFLOP_per_s"] for row in products], **style)
        others = [row["GB_per_s"] for row in rows if not row.get("flops")]
        if others:
            bandwidth.scatter(others, [name] * len(others), **style)
        rates = ceilings.get("product_TFLOP_per_s", {})
        measured = data["ceilings"]
        ceilings = ceilings | measured
        ceilings["product_TFLOP_per_s"] = rates | measured.get("product_TFLOP_per_s", {})
    if not ceilings:
        pyplot.close(figure)
        return False
    bandwidth.axvline(ceilings["copy_GB_per_s"], color="black", label="copy")
    bandwidth.set(xlabel="GB/s", title="bound by memory alone", xlim=(0, None))
    bandwidth.grid(alpha=0.3)
    slope = ceilings["copy_GB_per_s"] / 1e3  # TFLOP/s at one FLOP a byte
    intensities = [2.0**k for k in range(-2, 13)]
    for dtype, top in ceilings.get("product_TFLOP_per_s", {}).items():
        axis.plot(intensities, [min(top, slope * i) for i in intensities], label=f"{dtype} ceiling")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte",
        ylabel="TFLOP/s",
        title=f"fastenc on {device}",
    )
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7)
    save(figure, path)
    return True


def held_out_curves(data: dict) -> dict[str, dict[str, list]]:
    """{case and term of the loss: {run: [(step, held-out loss)]}}, for the cases that have any."""
    panels: dict[str, dict[str, list]] = {}
    for case, rows in data["cases"].items():
        for name, row in rows.items():
            curves = row.get("curves", {}) if isinstance(row, dict) else {}
            for term, points in curves.items():
                panels.setdefault(f"{case}: {term}", {})[name] = points
    return panels


def draw_curves(result: Path, path: Path | None = None) -> None:
    """Draw the held-out losses of a result's JSON, a panel for each term, to ``path`` or beside the JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = held_out_curves(json.loads(result.read_text()))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(1 + 3.2 * columns, 2.8 * rows), squeeze=False
    )
    for axis, (title, runs) in zip(axes.flat, panels.items(), strict=False):
        for (name, points), style in zip(runs.items(), cycle(("-", ":", "--"))):
            axis.plot(*zip(*points, strict=True), style, label=name)
        axis.set(xlabel="step", ylabel="held-out loss (nats)")
        axis.set_title(title, fontsize=9)
        axis.legend(fontsize=6)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    save(figure, path or result.with_suffix(".png"))


def main() -> int:
    import matplotlib

    matplotlib.use("Agg")
    for device in sorted(path for path in RESULTS.glob("*") if path.is_dir()):
        target = Path(sys.argv[1]) / device.name if len(sys.argv) > 1 else device
        target.mkdir(parents=True, exist_ok=True)
        results = {
            path.stem: json.loads(path.read_text()) for path in sorted(device.glob("*.json"))
        }
        for name, data in results.items():
            if any(timed(rows) for rows in data["cases"].values()):
                bars(name, data, target / f"{name}.png")
            if held_out_curves(data):
                draw_curves(device / f"{name}.json", target / f"{name}.png")
        roofline(device.name, results, target / "roofline.png")
        print(f"pictures of {len(results)} benchmarks in {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
