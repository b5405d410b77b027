"""The README's chart of inference on CPUs, from the committed results: python -m benchmarks.speed_chart

It writes docs/images/speed.svg: a group of bars for each processor that ``python -m benchmarks.run int8`` has measured.
A bar is a speed relative to Hugging Face's in float32, with texts in the order given.
"""

from pathlib import Path

from benchmarks.tables.cells import speedup_over
from benchmarks.tables.results import BASELINE, SORTED, load_all, threads_of
from fastenc._base.files import write_atomically

CHART = Path(__file__).parents[1] / "docs" / "images" / "speed.svg"
CASE = "lengths 10 to 256"
OTHERS = ("OpenVINO", "ONNX Runtime", "sentence-transformers")
# {label of a bar: (how the providers' names begin, colour)}; of several providers, the fastest.
BARS = {
    "Hugging Face float32, sorted": ((SORTED,), "#c8ccd2"),
    "best int8 of OpenVINO, ONNX Runtime": (OTHERS, "#8d96a3"),
    "fastenc float32": (("fastenc float32, frozen",), "#9ecae1"),
    "fastenc bfloat16": (("fastenc bf16, frozen",), "#4292c6"),
    "fastenc int8": (("fastenc int8",), "#08519c"),
}


def factors() -> dict[str, dict[str, float]]:
    """{processor: {label: speed relative to Hugging Face}}, of the committed results."""
    found = {}
    for data in load_all("int8"):
        rows = {name: row for name, row in data["cases"][CASE].items() if "median_ms" in row}
        found[f"{data['machine']['device']}, {threads_of(data['machine'])}"] = {
            label: max(
                speedup_over(rows, name, BASELINE) for name in rows if name.startswith(begin)
            )
            for label, (begin, _) in BARS.items()
        }
    return found


def text_of(factor: float) -> str:
    return f"{factor:.1f}×"


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = factors()
    # Text stays text, and the file does not change with the date or between runs.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "speed"}
    figure, axis = pyplot.subplots(figsize=(8, 1.1 + 1.1 * len(groups)), layout="constrained")
    height = 1 / (len(BARS) + 1.5)
    for position, (label, (_, colour)) in enumerate(BARS.items()):
        values = [group[label] for group in groups.values()]
        at = [index + height * (position - (len(BARS) - 1) / 2) for index in range(len(groups))]
        bars = axis.barh(at, values, height, color=colour, label=label)
        axis.bar_label(bars, [text_of(value) for value in values], padding=2, fontsize=7)
    axis.set_yticks(range(len(groups)), groups, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("times the speed of Hugging Face (sdpa, float32, texts in the order given)")
    axis.xaxis.label.set_size(8)
    axis.set_title("MiniLM, inference, texts of 10 to 256 tokens", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None}
    write_atomically(path, lambda file: figure.savefig(file, format="svg", metadata=metadata))
    pyplot.close(figure)


if __name__ == "__main__":
    draw(CHART)
