"""Tables inside the guides and design records of docs/."""

import re
from collections import defaultdict

from benchmarks.tables.cells import NOTHING, speedup, speedup_over, state
from benchmarks.tables.markdown import row as line
from benchmarks.tables.markdown import table
from benchmarks.tables.results import (
    BASELINE,
    SORTED,
    load,
    load_all,
    machine_line,
    threads_of,
)

# docs/int8.md

# {what multiplies 8 bits on a processor, as machine() names it, and its maker: such processors}
INT8_PRODUCTS = {
    ("AVX512-VNNI", "AMD"): "AVX512-VNNI of AMD (since Zen 4)",
    ("AVX512-VNNI", "Intel"): "AVX512-VNNI of Intel (since Cascade Lake)",
    ("AVX-VNNI", "Intel"): "AVX-VNNI (Intel since Alder Lake)",
    ("AMX", "Intel"): "AMX (Intel since Sapphire Rapids)",
    ("AVX2", "AMD"): "AVX2 alone, of AMD (before Zen 4)",
    ("AVX2", "Intel"): "AVX2 alone, of Intel (before Alder Lake, without AVX-512)",
}
# {title: how the names of the peers begin}
INT8_PEERS = {
    "Hugging Face sdpa, float32, sorted": SORTED,
    "fastenc float32, frozen": "fastenc float32, frozen",
    "fastenc bfloat16, frozen": "fastenc bf16, frozen",
    "OpenVINO int8, the fastest of its ways": "OpenVINO int8",
    "ONNX Runtime int8": "ONNX Runtime int8",
    "sentence-transformers' qint8": "sentence-transformers' qint8",
}


def int8_by_processor() -> str:
    """A row for each workload and peer, a column for each device; then what was not measured."""
    measurements = load_all("int8")
    machines = [data["machine"] for data in measurements]
    not_measured = _processors_not_measured(machines)
    if not measurements:
        return f"{not_measured}\n"
    names = [f"{m['device']}, {m['int8_products']}, {threads_of(m)}" for m in machines]
    lines = []
    for case in dict.fromkeys(name for data in measurements for name in data["cases"]):
        if case == "accuracy":
            continue
        model = "" if case.startswith("BERT-base") else "MiniLM, "
        lines.append(f"| **{model}{case}** |" + " |" * len(names))
        for title, begin in INT8_PEERS.items():
            cells = [_over_fastest(data["cases"].get(case, {}), begin) for data in measurements]
            if set(cells) != {NOTHING}:
                lines.append(line([title, *cells]))
    scores = (_scores(data["cases"].get("accuracy")) for data in measurements)
    lines.append(line(["MiniLM on STS-B, Spearman × 100: int8 of float32", *scores]))
    shown = table(line(["int8 is so many times as fast as", *names]), lines)
    return f"{shown}\n\n{not_measured}".rstrip() + "\n"


def _processors_not_measured(machines: list[dict]) -> str:
    maker = lambda machine: "AMD" if machine["device"].startswith("AMD") else "Intel"
    measured = {(machine["int8_products"], maker(machine)) for machine in machines}
    missing = [title for products, title in INT8_PRODUCTS.items() if products not in measured]
    return f"Not measured yet: {'; '.join(missing)}." if missing else ""


def _scores(accuracy: dict | None) -> str:
    if accuracy is None:
        return NOTHING
    own, exact = (accuracy[name]["spearman"] for name in ("fastenc int8", BASELINE))
    return f"{own:.2f} of {exact:.2f}"


def _over_fastest(rows: dict, begin: str) -> str:
    """How many times as fast int8 is as the fastest of the peers whose names begin so."""
    timed = [name for name, row in rows.items() if "median_ms" in row]
    peers = [name for name in timed if name.startswith(begin)]
    if not peers or "fastenc int8" not in timed:
        return NOTHING
    fastest = min(peers, key=lambda name: rows[name]["median_ms"])
    return f"{speedup_over(rows, 'fastenc int8', fastest):.2f}×"


# docs/with/

# {page: how the names of its cases begin}
CASES_OF = {
    "transformers": ("Trainer", "pipeline"),
    "sentence-transformers": ("Sentence", "CrossEncoder", "SparseEncoder"),
    "others": ("SetFit", "GLiNER", "KeyBERT", "BERTopic", "LangChain", "Haystack"),
}


def other_libraries(page: str) -> str:
    """A table for each device: what the libraries on this page gain."""
    parts = []
    for data in load_all("other_libraries"):
        patched = {
            case: rows["patched"]
            for case, rows in data["cases"].items()
            if case.startswith(CASES_OF[page])
        }
        if not patched:
            continue
        turns = min(row.get("rounds", 0) for row in patched.values())
        shown = table(
            "| | speed-up | largest difference | tested with |",
            (_gain(case, row) for case, row in patched.items()),
            left=(0, 3),
        )
        parts.append(f"{machine_line(data['machine'])} Medians of {turns} turns.\n\n{shown}\n")
    return "\n".join(parts or ["Not measured yet."]) + "\n"


def _gain(case: str, row: dict) -> str:
    if problem := state(row):
        return f"| {case} | {problem} | | |"
    used = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    return line([case, speedup(row), f"{row['largest_difference']:.1g}", used])


# docs/design/0005-cpu-kernels.md

# The record's names of the products' providers.
OF_PRODUCTS = {
    "fastenc, packed": "ours, packed before",
    "fastenc": "ours, not packed",
    "PyTorch": "MKL",
}
DIRECTIONS = ("y", "dx", "dW")
# "MiniLM, down: 20 x 1,536 x 384, y": the rows, and the product or its gradient.
PRODUCT = re.compile(r": ([\d,]+) x [\d,]+ x [\d,]+, (y|dx|dW)$")


def product_shares(device: str) -> str:
    """The least and the largest share of the roofline over the widths: a row for each direction and number of rows."""
    data = load(device, "gemm")
    if data is None:
        return "Not measured yet.\n"
    # {(direction, rows): {provider: its shares}}
    shares: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, rows in data["cases"].items():
        if match := PRODUCT.search(case):
            of_case = shares[match[2], match[1]]
            for provider in OF_PRODUCTS:
                if "median_ms" in rows.get(provider, {}):
                    of_case[provider].append(rows[provider]["percent_of_roofline"])
    lines = (
        line([direction, rows, *(_range(of_case[provider]) for provider in OF_PRODUCTS)])
        for (direction, rows), of_case in sorted(
            shares.items(), key=lambda item: DIRECTIONS.index(item[0][0])
        )
    )
    shown = table(f"| | rows | {' | '.join(OF_PRODUCTS.values())} |", lines)
    return f"{machine_line(data['machine'])}\n\n{shown}\n"


def _range(values: list[float]) -> str:
    if not values:
        return NOTHING
    least, most = round(min(values)), round(max(values))
    return f"{least} %" if least == most else f"{least} to {most} %"
