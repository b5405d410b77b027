"""Sections of benchmarks of inference."""

from collections.abc import Callable

from benchmarks.tables.cells import grid, speedup, state, tokens_and_mfu
from benchmarks.tables.markdown import row as line
from benchmarks.tables.markdown import section, table


def same_names(cases: dict) -> dict[str, str]:
    """The columns of a grid whose headings are the names of the cases."""
    return {case: case for case in cases}


def encoder(data: dict) -> str:
    return section(
        data,
        "Inference: MiniLM (6 × 384)",
        "FASTENC_DATA=... python -m benchmarks.run encoder",
        "Speed relative to Hugging Face sdpa in float32; batches of 32 texts that are already tokenised. "
        "The last row computes only the matrix products of the packed tokens.",
        grid(data["cases"], same_names(data["cases"]), "speed-up", speedup),
    )


def classifier(data: dict) -> str:
    return section(
        data,
        "Classification and reranking: MiniLM (6 × 384) with BERT's head",
        "FASTENC_DATA=... python -m benchmarks.run classifier",
        "Speed relative to Hugging Face sdpa in float32; batches of 32 texts that are already tokenised. The head "
        "reads a text's first token.",
        grid(data["cases"], same_names(data["cases"]), "speed-up", speedup),
    )


def strings(data: dict) -> str:
    """A table for each number of sentences, a row for each provider."""

    def of_provider(provider: str, row: dict) -> str:
        if problem := state(row):
            return f"| {provider} | {problem} | | |"
        share = f"{row['percent_of_encoder']:.0f} %"
        return line([provider, f"{row['sentences_per_s']:,.0f}", speedup(row), share])

    parts = (
        table(
            f"| {case} | a second | speed-up | of the encoder alone |",
            (of_provider(provider, row) for provider, row in rows.items()),
        )
        for case, rows in data["cases"].items()
    )
    return section(
        data,
        "From strings to vectors: MiniLM (6 × 384)",
        "FASTENC_DATA=... python -m benchmarks.bench_strings --texts N",
        "Float32, strings in and an array out, batches of 32. The sentences are training phrases of SST-2 and English "
        "ones of Tatoeba. The encoder alone has tokenised and packed batches and does not pool. ONNX Runtime and "
        "OpenVINO run inside sentence-transformers' encode; the package of its own back-ends, optimum, needs other "
        "versions of transformers or torch.",
        "\n\n".join(parts),
    )


def int8(data: dict) -> str:
    """Speed, then how near each provider's vectors are."""
    cases = dict(data["cases"])
    accuracy = cases.pop("accuracy", None)
    parts = [grid(cases, same_names(cases), "speed-up", speedup)]
    if accuracy is not None:
        lines = (line([provider, *_nearness(row)]) for provider, row in accuracy.items())
        parts.append(table("| STS-B | Spearman | worst cosine | mean cosine |", lines))
    return section(
        data,
        "Inference in 8 bits: MiniLM (6 × 384) and BERT-base",
        "FASTENC_DATA=... python -m benchmarks.run int8",
        "Speed relative to Hugging Face sdpa in float32, with batches of 32 in the corpus's order; all others sort by "
        "length. Below, Spearman's correlation with the scores of STS-B's 1,379 test pairs × 100, and cosines of the "
        "2,758 texts' vectors with those of float32. OpenVINO's static ranges are measured on 300 texts of SST-2; "
        "sentence-transformers' qint8 is its recipe for AVX512-VNNI. BERT-base has random weights.",
        "\n\n".join(parts),
    )


def _nearness(row: dict) -> list[str]:
    if problem := state(row):
        return [problem] * 3
    cosines = (row["worst_cosine"], row["mean_cosine"])
    return [f"{row['spearman']:.2f}", *(f"{cosine:.4f}" for cosine in cosines)]


def int8_tasks(data: dict) -> str:
    def of_case(case: str, exact: dict, quantized: dict) -> str:
        if "changed" in quantized:
            changed = f"{quantized['changed']:,} of {quantized['answers']:,}"
        else:
            changed = f"{quantized['answers']:,} scores, at most {quantized['largest_difference']:.3f} off"
        scores = (f"{100 * row['score']:.2f}" for row in (exact, quantized))
        return line([case, exact["metric"], *scores, changed])

    lines = (of_case(case, rows["float32"], rows["int8"]) for case, rows in data["cases"].items())
    return section(
        data,
        "Fine-tuned models in 8 bits: MiniLM",
        "FASTENC_DATA=... python -m benchmarks.studies.int8_tasks",
        "Fine-tuned in float32, then evaluated on test (SST-2: on dev) in float32 and in int8. Scores × 100.",
        table("| | metric | float32 | int8 | changed answers |", lines, left=(0, 1)),
    )


def whole_model(name: str, mode: str) -> Callable[[dict], str]:
    """The section of a model's inference or, with ``mode="training"``, of its training steps."""

    def make(data: dict) -> str:
        columns = {case: case.removeprefix(f"{mode}, ") for case in data["cases"]}
        steps = "forward, backward and AdamW" if mode == "training" else "last hidden states"
        return section(
            data,
            f"{name}, {mode}",
            f"python -m benchmarks.bench_models {name} {mode}",
            f"Real tokens per second ({steps}), MFU on real tokens, and peak memory above the weights. A column has "
            "the text lengths of one data set.",
            grid(data["cases"], columns, "", tokens_and_mfu),
        )

    return make


def predict_throughput(data: dict) -> str:
    def of_row(name: str, row: dict) -> str:
        early = f"{row['early_memory']:,.0f} MiB, " if "early_memory" in row else ""
        rates = (f"{row[name]:,.0f}" for name in ("texts_per_second", "texts_per_cpu_second"))
        return line([name, *rates, f"{early}{row['peak_memory']:,.0f} MiB"])

    lines = (
        of_row(f"{case}: {name}", row)
        for case, rows in data["cases"].items()
        for name, row in rows.items()
    )
    return section(
        data,
        "A million short texts through `fastenc predict`",
        "FASTENC_DATA=... python -m benchmarks.studies.predict_throughput",
        "MiniLM with a classifier, on pieces of two to seven words of wikipedia_en in batches of 32. The encoder "
        "alone runs on batches that are already tokenised. The probabilities agree with transformers'.",
        table("| | texts a second | texts a CPU second | memory at 5 %, peak |", lines),
    )


def peak_memory(data: dict) -> str:
    mebibytes = lambda row: f"{row['MiB_above_weights']:,.0f} MiB"
    return section(
        data,
        "Peak memory of inference: 16,384 tokens through BERT-base",
        "python -m benchmarks.studies.peak_memory",
        "Float32, above the weights. One hidden state of the batch takes 48 MiB.",
        grid(data["cases"], same_names(data["cases"]), "peak memory", mebibytes),
    )
