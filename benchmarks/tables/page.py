"""docs/benchmarks.md: the sections of every device."""

from collections.abc import Callable

from benchmarks.tables.inference import (
    classifier,
    encoder,
    int8,
    int8_tasks,
    peak_memory,
    predict_throughput,
    strings,
    whole_model,
)
from benchmarks.tables.ops import declared_sections, gpu_quick, masked_cross_entropy, ops
from benchmarks.tables.pretraining import train_objectives
from benchmarks.tables.results import devices, load, title_of
from benchmarks.tables.training import (
    fine_tune_objectives,
    mlm_step,
    scores_of_every_seed,
    sparse_training,
    training,
)
from benchmarks.tables.words import static_vectors, word_senses, word_vectors

HEAD = """# Benchmarks

`python -m benchmarks.tables` writes this page from the JSON files in `benchmarks/results/`. The command above a table
measures it again; `FASTENC_DATA` names a folder of data sets. A provider whose result is wrong gets no time. Times are
medians of alternating runs in one process.

"""
MODELS = ("minilm", "bert-base", "bert-large", "xlm-r-base")
# {name of the results: the function that makes their section}, in the page's order.
SECTIONS: dict[str, Callable[[dict], str]] = {
    "gpu_quick": gpu_quick,
    "encoder": encoder,
    "classifier": classifier,
    "strings": strings,
    "int8": int8,
    "int8_tasks": int8_tasks,
    **{
        f"models_{name}_{mode}": whole_model(name, mode)
        for name in MODELS
        for mode in ("inference", "training")
    },
    "families": ops(
        "Encoders of base size, random weights",
        "families",
        "On a CPU in float32 where nothing else is said, on a GPU in bfloat16; results in bfloat16 and int8 may be 5 % "
        "from float32's, T5's gradients 10 %. Inference of batches of 32 texts, on a GPU 128 or 16, in the corpus's "
        "order, on a CPU of five texts for 10 to 2,048 tokens, and a training step of one batch without dropout. Of "
        "RemBERT, jina-embeddings-v3, ESM-2 (150M), ESM C (300M), Qwen3-0.6B and EmbeddingGemma six layers. Hugging "
        "Face runs sdpa, or eager for MPNet, DeBERTa and RemBERT, which have no sdpa.",
    ),
    "peak_memory": peak_memory,
    "masked_cross_entropy": masked_cross_entropy,
    **declared_sections(),
    "mlm_step": mlm_step,
    "train_tasks": training(
        "Fine-tuning: MiniLM, the defaults",
        "train_tasks",
        "The same batches in the same order.",
        "transformers Trainer",
    ),
    "train_long_documents": training(
        "Fine-tuning: MiniLM on film reviews of 851 tokens",
        "train_long_documents",
        "Cut at 512 tokens, or read in chunks of 256 tokens that overlap by 64.",
        "transformers Trainer, head",
    ),
    "sparse_training": sparse_training,
    "predict_throughput": predict_throughput,
    "word_vectors": word_vectors,
    "static_vectors": static_vectors,
    "word_senses": word_senses,
    "train_adapted": training(
        "Ways to adapt MiniLM, the defaults",
        "train_adapted",
        "Time includes computing the cached features.",
        "full",
    ),
    "train_objectives": train_objectives,
    "fine_tune_objectives": fine_tune_objectives,
}


def tables() -> str:
    """The page without its head."""
    sections, fine_tuned = [], []
    for device in devices():
        results = {name: data for name in SECTIONS if (data := load(device, name)) is not None}
        if results:
            sections.append(f"## {title_of(next(iter(results.values()))['machine'])}\n")
        for name, data in results.items():
            notes = f"\n{data['notes']}\n" if "notes" in data else ""
            sections.append(SECTIONS[name](data) + notes)
        fine_tuned += [results["train_tasks"]] if "train_tasks" in results else []
    if len(fine_tuned) > 1:
        sections += ["## All machines\n", scores_of_every_seed(fine_tuned)]
    return "\n".join(sections)
