"""The README's headline and its tables of speed."""

from typing import NamedTuple

from benchmarks.tables.cells import NOTHING, speedup, speedup_over
from benchmarks.tables.markdown import row, table
from benchmarks.tables.results import (
    BASELINE,
    SORTED,
    devices,
    is_gpu,
    load,
    load_all,
    threads_of,
)

STEP = "6 x 384, batch 16 x 128"


class Workload(NamedTuple):
    """A row of the table of speed: the provider's speed in a case, relative to the peer's."""

    title: str
    results: str  # "encoder" or "mlm_step"
    case: str
    provider: str = "fastenc"
    peer: str = BASELINE


WORKLOADS = (
    Workload("inference, lengths of SST-2, float32", "encoder", "lengths of SST-2"),
    Workload("the same, Hugging Face sorted by length", "encoder", "lengths of SST-2", peer=SORTED),
    Workload("inference, lengths 10 to 256, float32", "encoder", "lengths 10 to 256"),
    Workload(
        "the same, Hugging Face sorted by length", "encoder", "lengths 10 to 256", peer=SORTED
    ),
    Workload("inference, all 128 tokens, float32", "encoder", "all 128 tokens"),
    Workload("inference, one text of 20 tokens, float32", "encoder", "one text of 20 tokens"),
    Workload(
        "inference, lengths 10 to 256, bfloat16", "encoder", "lengths 10 to 256", "fastenc bf16"
    ),
    Workload("masked-LM training step, float32", "mlm_step", STEP),
    Workload("masked-LM training step, bfloat16", "mlm_step", STEP, "fastenc, bf16 autocast"),
)
# {family's name in the results: title of its row}
FAMILIES = {
    "bert": "BERT",
    "mpnet": "MPNet",
    "albert": "ALBERT",
    "t5": "T5's encoder",
    "modernbert": "ModernBERT",
    "eurobert": "EuroBERT",
    "deberta-v3": "DeBERTa-v3",
    "jina-embeddings-v3": "jina-embeddings-v3, six layers",
    "esm2": "ESM-2 (150M), six layers",
    "esmc": "ESM C (300M), six layers",
    "rembert": "RemBERT, six layers",
    "qwen3": "bidirectional Qwen3-0.6B, six layers",
    "gemma3": "EmbeddingGemma, six layers",
    "embedding_gemma2": "EmbeddingGemma 2, six layers",
}
# In the table of families, a provider for each number format.
FORMATS = ("Hugging Face, patched by fastenc", "fastenc, bfloat16, frozen", "fastenc, int8")


def measured() -> list[dict[str, dict]]:
    """{name: results} of inference and of a training step, for each device that has both."""
    names = ("encoder", "mlm_step")
    loaded = [{name: load(device, name) for name in names} for device in devices()]
    return [results for results in loaded if all(results.values())]


def headline() -> str:
    """The range over the devices: inference, against texts in the given order and sorted by length, and training."""
    every = measured()
    encoded = [results["encoder"]["cases"]["lengths of SST-2"] for results in every]
    trained = [results["mlm_step"]["cases"][STEP] for results in every]
    in_order, by_length, steps = (
        _range(cases, peer)
        for cases, peer in ((encoded, BASELINE), (encoded, SORTED), (trained, BASELINE))
    )
    return (
        f"With two threads on {len(every)} processors of AMD and Intel, MiniLM in float32 encodes sentences {in_order} "
        f"times as fast as Hugging Face with sdpa on texts in the order given, {by_length} times as fast as on texts "
        f"sorted by length, and trains {steps} times as fast. [The tables](#speed) have bfloat16 and int8, which are "
        "faster on most processors, and NVIDIA's GPUs.\n"
    )


def _range(cases: list[dict], peer: str) -> str:
    factors = [speedup_over(rows, "fastenc", peer) for rows in cases if peer in rows]
    return f"{min(factors):.1f} to {max(factors):.1f}"


def speed() -> str:
    """A row for each workload, a column for each device."""
    every = measured()
    machines = [results["encoder"]["machine"] for results in every]
    names = [f"{machine['device']}, {machine['threads']} threads" for machine in machines]
    lines = (
        row([workload.title, *(_factor(results, workload) for results in every)])
        for workload in WORKLOADS
    )
    return table(row(["MiniLM (6 × 384)", *names]), lines) + "\n"


def _factor(results: dict[str, dict], workload: Workload) -> str:
    rows = results[workload.results]["cases"][workload.case]
    if workload.peer == BASELINE:
        return speedup(rows.get(workload.provider))
    if workload.peer not in rows:
        return NOTHING
    return f"{speedup_over(rows, workload.provider, workload.peer):.2f}×"


def families() -> str:
    """Encoders of base size on CPUs: a row for each family, two columns for each device."""
    columns = [
        (data, case)
        for data in load_all("families")
        if not is_gpu(data["machine"])
        for case in ("lengths of SST-2", "lengths 10 to 256")
    ]
    head = [
        f"{data['machine']['device']}, {threads_of(data['machine'])}, {case}"
        for data, case in columns
    ]
    lines = []
    for family, title in FAMILIES.items():
        cells = [
            factors_of_formats(data["cases"].get(f"{family}, {case}", {})) for data, case in columns
        ]
        if set(cells) != {NOTHING}:
            lines.append(row([title, *cells]))
    return table(f"| {row(head)}", lines) + "\n"


def factors_of_formats(rows: dict) -> str:
    """The factors of a case in each number format, as far as they were measured."""
    factors = [
        f"{rows[name]['speedup']:.1f}" for name in FORMATS if "speedup" in rows.get(name, {})
    ]
    return " / ".join(factors) or NOTHING
