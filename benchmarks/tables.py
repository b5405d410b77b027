"""Tables from the committed results: python -m benchmarks.tables [--check | --output FILE]

Without an option it writes docs/benchmarks.md, and the tables between the markers of the README and of the guides.
With --check, a difference is an error. --output writes only the tables, of the results below $FASTENC_RESULTS if that
is set.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks import _gpu_tables
from benchmarks._harness import RESULTS

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
LIBRARIES = ROOT / "docs" / "with"
MEASURED = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- /measured -->)", re.DOTALL)
GUIDE = ROOT / "docs" / "int8.md"
IN_GUIDE = re.compile(r"(<!-- int8 -->\n).*?(<!-- /int8 -->)", re.DOTALL)
RECORD = ROOT / "docs" / "design" / "0005-cpu-kernels.md"
IN_RECORD = re.compile(r"(<!-- products: ([\w-]+) -->\n).*?(<!-- /products -->)", re.DOTALL)
MARKERS = re.compile(r"(<!-- (headline|speed|families|gpu) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
HEAD = """# Benchmarks

`python -m benchmarks.tables` writes this page from the JSON files in `benchmarks/results/`. The command above a table
measures it again; `FASTENC_DATA` names a folder of data sets. A provider whose result is wrong gets no time. Times are
medians of alternating runs in one process.

"""


def device_folders() -> list[Path]:
    return sorted(path for path in RESULTS.glob("*") if path.is_dir())


def load(device: Path, name: str) -> dict | None:
    path = device / f"{name}.json"
    return json.loads(path.read_text()) | {"folder": device.name} if path.exists() else None


def picture(data: dict, name: str, text: str) -> str:
    return f"![{text}](results/{data['folder']}/{name}.png)\n\n"


def machine_line(machine: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['device']}, {threads_of(machine)}; {versions}; {machine['date']}."


def title_of(machine: dict) -> str:
    """The device; of a processor with its cores, because machines with the same processor have different ones."""
    of_processor = "cores" in machine and not machine["device"].startswith("NVIDIA")
    return machine["device"] + (f", {machine['cores']} cores" if of_processor else "")


def threads_of(machine: dict) -> str:
    return "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"


def grid(cases: dict, columns: dict[str, str], unit: str, form) -> str:
    """A row for each provider, a column for each case."""
    providers = list(dict.fromkeys(name for case in columns for name in cases[case]))
    lines = [f"| {unit} | " + " | ".join(columns.values()) + " |", "|---|" + "---:|" * len(columns)]
    for provider in providers:
        cells = [form(cases[case].get(provider)) for case in columns]
        lines.append(f"| {provider} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def state(row: dict | None) -> str | None:
    """The words in place of a time, or None if there is a time."""
    if row is None:
        return "–"
    if "missing" in row:
        return row["missing"]
    return next((word for word in ("wrong", "failed") if word in row), None)


def speedup(row: dict | None) -> str:
    return state(row) or f"{row['speedup']:.2f}×"


def time_and_speedup(row: dict | None) -> str:
    return state(row) or _time(row) + (f", {row['speedup']:.2f}×" if "speedup" in row else "")


def time_and_roofline(row: dict | None) -> str:
    shown = time_and_speedup(row)
    if row and "percent_of_roofline" in row and not state(row):
        shown += f", {row['percent_of_roofline']:.0f} %"
    return shown


def tokens_and_mfu(row: dict | None) -> str:
    if state(row):
        return state(row)
    shown = f"{_digits(row['tokens_per_s'] / 1e3)} k/s, MFU {row['MFU_percent']:.0f} %"
    return shown + (f", {_digits(row['peak_MB'] / 1024)} GB" if "peak_MB" in row else "")


def _time(row: dict) -> str:
    return f"{_digits(row['median_ms'])} ms"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def section(title: str, command: str, text: str, body: str) -> str:
    return f"### {title}\n\n`{command}`\n\n{text}\n\n{body}\n"


def encoder(data: dict) -> str:
    columns = {case: case for case in data["cases"]}
    return section(
        "Inference: MiniLM (6 × 384)",
        "FASTENC_DATA=... python -m benchmarks.run encoder",
        "Speed relative to Hugging Face sdpa in float32; batches of 32 texts that are already tokenised. "
        "The last row computes only the matrix products of the packed tokens. "
        + machine_line(data["machine"]),
        grid(data["cases"], columns, "speed-up", speedup),
    )


def strings(data: dict) -> str:
    """A table for each number of sentences, a row for each provider."""
    parts = []
    for case, rows in data["cases"].items():
        lines = [f"| {case} | a second | speed-up | of the encoder alone |", "|---|" + "---:|" * 3]
        for provider, row in rows.items():
            if problem := state(row):
                lines.append(f"| {provider} | {problem} | | |")
                continue
            cells = [f"{row['sentences_per_s']:,.0f}", speedup(row)]
            cells.append(f"{row['percent_of_encoder']:.0f} %")
            lines.append(f"| {provider} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return section(
        "From strings to vectors: MiniLM (6 × 384)",
        "FASTENC_DATA=... python -m benchmarks.bench_strings --texts N",
        "Float32, strings in and an array out, batches of 32. The sentences are training phrases of SST-2 and English "
        "ones of Tatoeba. The encoder alone has tokenised and packed batches and does not pool. ONNX Runtime and "
        "OpenVINO run inside sentence-transformers' encode; the package of its own back-ends, optimum, needs other "
        "versions of transformers or torch. " + machine_line(data["machine"]),
        "\n\n".join(parts),
    )


def int8(data: dict) -> str:
    """Speed, then how near each provider's vectors are."""
    speeds = {case: case for case in data["cases"] if case != "accuracy"}
    lines = [
        "| STS-B | Spearman | worst cosine | mean cosine |",
        "|---|" + "---:|" * 3,
    ]
    for provider, row in data["cases"].get("accuracy", {}).items():
        cosines = "worst_cosine", "mean_cosine"
        cells = (
            [state(row)] * 3
            if state(row)
            else [f"{row['spearman']:.2f}", *(f"{row[name]:.4f}" for name in cosines)]
        )
        lines.append(f"| {provider} | {' | '.join(map(str, cells))} |")
    return section(
        "Inference in 8 bits: MiniLM (6 × 384) and BERT-base",
        "FASTENC_DATA=... python -m benchmarks.run int8",
        "Speed relative to Hugging Face sdpa in float32, with batches of 32 in the corpus's order; all others sort by "
        "length. Below, Spearman's correlation with the scores of STS-B's 1,379 test pairs × 100, and cosines of the "
        "2,758 texts' vectors with those of float32. OpenVINO's static ranges are measured on 300 texts of SST-2; "
        "sentence-transformers' qint8 is its recipe for AVX512-VNNI. BERT-base has random weights. "
        + machine_line(data["machine"]),
        grid(data["cases"], speeds, "speed-up", speedup)
        + ("\n\n" + "\n".join(lines) if "accuracy" in data["cases"] else ""),
    )


def int8_tasks(data: dict) -> str:
    lines = ["| | metric | float32 | int8 | changed answers |", "|---|---|---:|---:|---:|"]
    for case, rows in data["cases"].items():
        exact, quantized = rows["float32"], rows["int8"]
        if "changed" in quantized:
            changed = f"{quantized['changed']:,} of {quantized['answers']:,}"
        else:
            changed = f"{quantized['answers']:,} scores, at most {quantized['largest_difference']:.3f} off"
        scores = [f"{100 * row['score']:.2f}" for row in (exact, quantized)]
        lines.append(f"| {case} | {exact['metric']} | {' | '.join(scores)} | {changed} |")
    return section(
        "Fine-tuned models in 8 bits: MiniLM",
        "FASTENC_DATA=... python -m benchmarks.studies.int8_tasks",
        "Fine-tuned in float32, then evaluated on test (SST-2: on dev) in float32 and in int8. Scores × 100. "
        + machine_line(data["machine"]),
        "\n".join(lines),
    )


def masked_cross_entropy(data: dict) -> str:
    cases = data["cases"]
    if "memory, float32" not in cases:
        return ops(
            "Masked cross-entropy, 15 % labelled, loss and gradient", "masked_cross_entropy"
        )(data)
    timed = {case: case for case in cases if not case.startswith("memory")}
    memory = cases["memory, float32"]
    peaks = ", ".join(
        f"{name} {row['peak_MB_above_inputs']:.0f} MB"
        for name, row in memory.items()
        if isinstance(row, dict)
    )
    gradient = memory["gradient of the labelled rows, MB"]
    return section(
        "Masked cross-entropy: 2,048 × 30,522, 15 % labelled, loss and gradient",
        "python -m benchmarks.run masked_cross_entropy",
        f"Peak memory above the inputs, float32: {peaks}; the labelled rows' gradient itself is {gradient:.0f} MB. "
        + machine_line(data["machine"]),
        grid(cases, timed, "time, speed-up", time_and_speedup),
    )


def ops(title: str, name: str, about: str = ""):
    """A section for an op's benchmark with many cases: a row for each case, a column for each provider."""

    def make(data: dict) -> str:
        cases = data["cases"]
        providers = list(dict.fromkeys(name for rows in cases.values() for name in rows))
        lines = [f"| | {' | '.join(providers)} |", "|---|" + "---:|" * len(providers)]
        for case, rows in cases.items():
            cells = [time_and_roofline(rows.get(provider)) for provider in providers]
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
        command = f"python -m benchmarks.run {name}"
        note = about + ceilings_line(data) + machine_line(data["machine"])
        return section(title, command, note, "\n".join(lines))

    return make


def ceilings_line(data: dict) -> str:
    """The ceilings by which the shares of the roofline divide; empty for results without them."""
    ceilings = data.get("ceilings", {})
    if "copy_GB_per_s" not in ceilings:
        return ""
    rates = ceilings.get("product_TFLOP_per_s", {})
    products = "".join(f", {dtype} product {rate:.3g} TFLOP/s" for dtype, rate in rates.items())
    return f"Last figure: share of the roofline (copy {ceilings['copy_GB_per_s']:,.0f} GB/s{products}). "


def whole_model(name: str, mode: str):
    def make(data: dict) -> str:
        columns = {case: case.removeprefix(f"{mode}, ") for case in data["cases"]}
        steps = "forward, backward and AdamW" if mode == "training" else "last hidden states"
        return section(
            f"{name}, {mode}",
            f"python -m benchmarks.bench_models {name} {mode}",
            f"Real tokens per second ({steps}), MFU on real tokens, and peak memory above the weights. A column has "
            "the text lengths of one data set. " + machine_line(data["machine"]),
            grid(data["cases"], columns, "", tokens_and_mfu),
        )

    return make


def mlm_step(data: dict) -> str:
    cases = dict(data["cases"])
    memory = cases.pop("head memory, MB")
    shown = ", ".join(f"{name} {value:.0f} MB" for name, value in memory.items())
    return section(
        "A masked-LM training step: 6 × 384, batch 16 × 128 without padding, vocabulary 30,522",
        "python -m benchmarks.run mlm_step",
        "Forward, backward and AdamW. Memory that the head's forward and backward add, with the gradient of its "
        f"weights: {shown}. " + machine_line(data["machine"]),
        grid(cases, {case: "time, speed-up" for case in cases}, "", time_and_speedup),
    )


def training(title: str, name: str, about: str, baseline: str):
    """A section for training runs whose cases are "<name>, seed <n>": scores, times and memory over the seeds, a row
    for each provider."""

    def table(data: dict) -> str:
        sets: dict[str, dict[str, list[dict]]] = {}
        for case, rows in data["cases"].items():
            providers = sets.setdefault(case.rpartition(", seed ")[0], {})
            for provider, row in rows.items():
                providers.setdefault(provider, []).append(row)
        counted = any("trained" in row for rows in data["cases"].values() for row in rows.values())
        names = ["", *(["trained parameters"] if counted else []), "score", "time", "CPU time"]
        names += ["speed-up", "peak memory", "seeds"]
        lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
        for case, providers in sets.items():
            mean = lambda rows, key: statistics.mean(row[key] for row in rows)
            computed = {provider: mean(rows, "cpu_seconds") for provider, rows in providers.items()}
            base = computed.get(baseline)
            for provider, rows in providers.items():
                cells = [
                    f"{case}: {provider}",
                    *([f"{rows[0]['trained']:,}"] if counted else []),
                    f"{metric_of(rows)} {mean_score(rows)}",
                    f"{mean(rows, 'seconds'):,.0f} s",
                    f"{computed[provider]:,.0f} s",
                    f"{base / computed[provider]:.2f}×" if base else "",
                    f"{max(row['peak_memory'] for row in rows):,.0f} MiB",
                    str(len(rows)),
                ]
                lines.append(f"| {' | '.join(cells)} |")
        return section(
            title,
            f"FASTENC_DATA=... python -m benchmarks.studies.{name}",
            f"{about} Scores × 100: mean and standard deviation over seeds. Time is training with its evaluations. "
            "CPU time hardly depends on other work on the machine, so the speed-up is the ratio of CPU times. Memory "
            "is the whole process's. " + machine_line(data["machine"]),
            "\n".join(lines),
        )

    return table


def metric_of(rows: Sequence[dict]) -> str:
    return f"{rows[0]['metric']} ({'test' if 'test' in rows[0] else 'dev'})"


def mean_score(rows: Sequence[dict]) -> str:
    """Score × 100; of several seeds the mean and its standard deviation."""
    scores = [100 * row.get("test", row["dev"]) for row in rows]
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}"


def scores_of_every_seed(results: Sequence[dict]) -> str:
    """Fine-tuning scores of all machines together, which differ only by rounding. A seed that two machines ran counts
    once."""
    sets: dict[str, dict[str, dict[str, dict]]] = {}
    for data in results:
        for case, rows in data["cases"].items():
            what, _, seed = case.rpartition(", seed ")
            for provider, row in rows.items():
                sets.setdefault(what, {}).setdefault(provider, {}).setdefault(seed, row)
    providers = list(dict.fromkeys(provider for rows in sets.values() for provider in rows))
    lines = [f"|  | score | {' | '.join(providers)} |", "|---|---|" + "---:|" * len(providers)]
    for what, by_provider in sets.items():
        rows = {provider: list(seeds.values()) for provider, seeds in by_provider.items()}
        cells = [f"{mean_score(rows[p])} ({len(rows[p])})" if p in rows else "–" for p in providers]
        lines.append(f"| {what} | {metric_of(next(iter(rows.values())))} | {' | '.join(cells)} |")
    return section(
        "Fine-tuning: MiniLM, the defaults, the seeds of all machines together",
        "FASTENC_DATA=... python -m benchmarks.studies.train_tasks --seeds 0 1 2",
        "Scores × 100: mean and standard deviation (number of seeds).",
        "\n".join(lines),
    )


def predict_throughput(data: dict) -> str:
    lines = [
        "| | texts a second | texts a CPU second | memory at 5 %, peak |",
        "|---|" + "---:|" * 3,
    ]
    for case, rows in data["cases"].items():
        for name, row in rows.items():
            early = f"{row['early_memory']:,.0f} MiB, " if "early_memory" in row else ""
            cells = [f"{case}: {name}", f"{row['texts_per_second']:,.0f}"]
            cells += [
                f"{row['texts_per_cpu_second']:,.0f}",
                f"{early}{row['peak_memory']:,.0f} MiB",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return section(
        "A million short texts through `fastenc predict`",
        "FASTENC_DATA=... python -m benchmarks.studies.predict_throughput",
        "MiniLM with a classifier, on pieces of two to seven words of wikipedia_en in batches of 32. The encoder "
        "alone runs on batches that are already tokenised. The probabilities agree with transformers'. "
        + machine_line(data["machine"]),
        "\n".join(lines),
    )


def peak_memory(data: dict) -> str:
    mebibytes = lambda row: f"{row['MiB_above_weights']:,.0f} MiB"
    return section(
        "Peak memory of inference: 16,384 tokens through BERT-base",
        "python -m benchmarks.studies.peak_memory",
        "Float32, above the weights. One hidden state of the batch takes 48 MiB. "
        + machine_line(data["machine"]),
        grid(data["cases"], {case: case for case in data["cases"]}, "peak memory", mebibytes),
    )


def sparse_training(data: dict) -> str:
    def cell(row: dict | None) -> str:
        if row is not None and "MiB" in row:
            return f"{row['MiB']:,.0f} MiB"
        return time_and_speedup(row)

    return section(
        "SPLADE: MiniLM with 30,522 tokens",
        "FASTENC_DATA=... python -m benchmarks.studies.sparse_training",
        "Float32; questions of SQuAD with their paragraphs. A step is forward, SpladeLoss, backward and AdamW. Memory "
        "is what a step or encode takes above the weights and AdamW's moments, gradients included. "
        + machine_line(data["machine"]),
        grid(data["cases"], {case: case for case in data["cases"]}, "", cell),
    )


def train_objectives(data: dict) -> str:
    """A row for each term of each objective's loss."""
    names = ["", "constant guess", "first", "last", "step", "peer", "peer's step", "fastenc there"]
    names.append("largest difference")
    lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    for case, rows in data["cases"].items():
        ours, guess = rows["fastenc"], rows["constant guess"]
        peers = [row for name, row in rows.items() if name not in ("fastenc", "constant guess")]
        for term, curve in ours["curves"].items():
            (_, first), (step, last) = curve[0], curve[-1]
            cells = [f"{case}: {term}", f"{guess['curves'][term][-1][1]:.3f}", f"{first:.3f}"]
            cells += [f"{last:.3f}", f"{step:,}"]
            for peer in peers:
                there, values = dict(map(tuple, curve)), peer["curves"][term]
                peer_step, loss = values[-1]
                apart = max(abs(there[s] - value) for s, value in values if s in there)
                cells += [
                    f"{loss:.3f}",
                    f"{peer_step:,}",
                    f"{there[peer_step]:.3f}",
                    f"{apart:.1e}",
                ]
            cells += ["–"] * (len(names) - len(cells))
            lines.append(f"| {' | '.join(cells)} |")
    return section(
        "Pretraining: every objective on wikipedia_en",
        "FASTENC_DATA=... python -m benchmarks.studies.train_objectives",
        "Mean loss of each term on held-out articles, in nats. The constant guess is the best guess that does not "
        "read the text: the frequencies of tokens in training, the share of wrong pairs or of replaced tokens, the "
        "mean of the teacher's distributions or states. The peer starts with the same weights and takes the same "
        "batches, for fewer steps of the same schedule. It is transformers' BertForMaskedLM, BertForPreTraining or "
        "ELECTRA, with SpanBERT's boundary head and DistilBERT's loss in plain PyTorch. mlm and distill train 2 "
        "layers of 128 (the student has 1) with 4,000 word pieces. span and mlm+sop start from the encoder that mlm "
        "trained. The pairs of mlm+sop have 256 tokens. One pair in five holds its article's title, which alone "
        "tells the order and would give 0.55; so these 800 steps do not show that more than titles is learnt. mlm+nsp "
        "and electra start from MiniLM's encoder (6 layers of 384), because 2 layers hardly learnt either in 800 and "
        "2,000 steps. Their heads and ELECTRA's generator start from random weights. In 100 steps the generator does "
        "not learn the frequencies of tokens, so the tokens that it inserts are easy to detect. "
        + picture(data, "train_objectives", "Held-out losses")
        + machine_line(data["machine"]),
        "\n".join(lines),
    )


MODELS = ("minilm", "bert-base", "bert-large", "xlm-r-base")


def fine_tune_objectives(data: dict) -> str:
    """A row for each checkpoint, over its seeds."""
    checkpoints: dict[str, list[dict]] = {}
    for case, rows in data["cases"].items():
        checkpoints.setdefault(case.rpartition(", seed ")[0], []).append(rows)
    providers = ("fastenc", "transformers Trainer")
    lines = [f"| | {' | '.join(providers)} | spread of the states |", "|---|" + "---:|" * 3]
    for name, seeds in checkpoints.items():
        scores = [[rows[p] for rows in seeds if p in rows] for p in providers]
        cells = [f"{mean_score(rows)} ({len(rows)})" if rows else "–" for rows in scores]
        cells.append(f"{seeds[0]['fastenc']['spread']:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return section(
        "What the checkpoints of short pretraining are worth: 8,000 phrases of SST-2",
        "FASTENC_DATA=... python -m benchmarks.studies.fine_tune_objectives NAME=CHECKPOINT ...",
        "Accuracy on dev × 100 after 500 steps: mean and standard deviation (number of seeds). The more frequent "
        "class has 50.9. Checkpoints from random weights and checkpoints from MiniLM were measured on different "
        "devices of this page. ELECTRA's scores depend on whether its discriminator has learnt. A discriminator that "
        "only reached the constant guess's loss scores below random weights at every seed, in transformers' Trainer "
        "too. It gives nearly the same state to every token (spread: mean distance of the last states from their "
        "mean, divided by their mean length). A discriminator that has learnt (held-out loss 0.21, constant guess "
        "0.40) varies by half a point between seeds and stays within 1.5 points of MiniLM, from whose encoder it "
        "started; it is a larger model, too. So neither ELECTRA's head nor the settings make fine-tuning fail. The "
        "masked LM of 2,500 steps from random weights also scores below random weights, with their spread. "
        + machine_line(data["machine"]),
        "\n".join(lines),
    )


def word_vectors(data: dict) -> str:
    lines = [
        "| | CPU seconds a 1,000 sentences | times as fast | by CPU time |",
        "|---|" + "---:|" * 3,
    ]
    for case, rows in data["cases"].items():
        lines.append(f"| **{case}** | | | |")
        for provider, row in rows.items():
            ratios = f"{row['times_as_fast']:.2f}× | {row['times_as_fast_cpu']:.2f}×"
            each = 1000 * row["cpu_seconds"] / row["sentences"]
            lines.append(f"| {provider} | {each:.1f} | {ratios} |")
    return section(
        "Word vectors, and statistics of heads: MiniLM (6 × 384)",
        "FASTENC_DATA=... python -m benchmarks.studies.word_vectors 20000",
        "Sentences of UD English EWT, then of SemCor. transformers runs with output_hidden_states and batches sorted "
        "by length; both sides tokenise. Ratios of elapsed time and of CPU time are medians over alternating slices; "
        "CPU time leaves out other work on the machine. OMP_NUM_THREADS sets the threads. "
        + machine_line(data["machine"]),
        "\n".join(lines),
    )


def static_vectors(data: dict) -> str:
    names = ("word2vec", "distilled", "MiniLM, last layer", "MiniLM, best layer")
    lines = [f"| | {' | '.join(names)} | its number | items |", "|---|" + "---:|" * 6]
    for case, row in data["cases"].items():
        cells = " | ".join(f"{100 * row[name]:.1f}" for name in names)
        lines.append(f"| {case} | {cells} | {row['best layer']} | {row['items']:,} |")
    return section(
        "Static vectors against MiniLM's vectors of single words",
        "FASTENC_DATA=... python -m benchmarks.studies.static_vectors questions-words.txt",
        "× 100: Spearman's correlation with people's scores of word pairs, and the share of Google's analogies with "
        "the right answer among their words; on the items whose words word2vec knows. word2vec is gensim's skip-gram "
        "on 4.9 million words of Wikipedia, which are few for it. distilled is MiniLM's static model. "
        + machine_line(data["machine"]),
        "\n".join(lines),
    )


def word_senses(data: dict) -> str:
    lines = ["| | F1 | accuracy | mean over words |", "|---|---:|---:|---:|"]
    for case, rows in data["cases"].items():
        lines.append(f"| **{case}** | | | |")
        for provider, row in rows.items():
            shares = (row.get(name) for name in ("f1", "accuracy", "macro_accuracy"))
            cells = ["" if share is None else f"{share:.1%}" for share in shares]
            lines.append(f"| {provider} | {' | '.join(cells)} |")
    words = next(rows for rows in data["cases"].values() if "words" in next(iter(rows.values())))
    names = list(words)
    lines += ["", "| word | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for word in words[names[0]]["words"]:
        cells = [f"{words[name]['words'][word]:.1%}" for name in names]
        lines.append(f"| {word} | {' | '.join(cells)} |")
    return section(
        "Word senses: nearest mean vector",
        "FASTENC_DATA=... python -m benchmarks.studies.word_senses",
        "The layers are chosen on a tenth of the training rows (for WiC on dev). A lemma that is not in the training "
        "rows gets no sense, so F1 and accuracy differ. BERT-base's published figures on CoarseWSD-20 are 95.7 % and "
        "94.0 %. " + machine_line(data["machine"]),
        "\n".join(lines),
    )


def gpu_quick(data: dict) -> str:
    return section(
        "Kernels and training steps",
        "python -m benchmarks.gpu_quick check time step graphs peers invariant",
        "bfloat16, 16,384 tokens, width 768, 12 heads of 64. An op's time is that of its kernels from a cold cache. "
        "The least is what its bytes, or its FLOPs, take at the rates of a large copy or product in the same run. "
        + machine_line(data["machine"]),
        _gpu_tables.quick(data),
    )


def gpu() -> str:
    return _gpu_tables.summary(load, device_folders())


def op_sections() -> dict[str, Callable[[dict], str]]:
    """The sections that the ops' benchmarks declare as TABLES = {name of the results: title}."""
    sections = {}
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        module = import_module(f"benchmarks.{path.stem}")
        for name, title in getattr(module, "TABLES", {}).items():
            sections[name] = ops(
                title, path.stem.removeprefix("bench_"), getattr(module, "NOTE", "")
            )
    return sections


SECTIONS: dict[str, Callable[[dict], str]] = {
    "gpu_quick": gpu_quick,
    "encoder": encoder,
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
        "jina-embeddings-v3, ESM-2 (150M), Qwen3-0.6B and EmbeddingGemma six layers. Hugging Face runs sdpa, or eager "
        "for MPNet and DeBERTa, which have no sdpa. ",
    ),
    "peak_memory": peak_memory,
    "masked_cross_entropy": masked_cross_entropy,
    **op_sections(),
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
    sections, fine_tuned = [], []
    for device in device_folders():
        results = {name: load(device, name) for name in SECTIONS}
        results = {name: data for name, data in results.items() if data is not None}
        if results:
            sections.append(f"## {title_of(next(iter(results.values()))['machine'])}\n")
        for name, data in results.items():
            notes = f"\n{data['notes']}\n" if "notes" in data else ""
            sections.append(SECTIONS[name](data) + notes)
        fine_tuned += [results["train_tasks"]] if "train_tasks" in results else []
    if len(fine_tuned) > 1:
        sections += ["## All machines\n", scores_of_every_seed(fine_tuned)]
    return "\n".join(sections)


def readme_results() -> dict[Path, list[dict]]:
    """{device: its results of inference and of a training step}, for the devices that have both."""
    devices = device_folders()
    loaded = {d: [load(d, name) for name in ("encoder", "mlm_step")] for d in devices}
    return {device: results for device, results in loaded.items() if all(results)}


BASELINE, SORTED = "Hugging Face sdpa", "Hugging Face sdpa, sorted"


def against(rows: dict, provider: str, peer: str) -> float:
    """How many times as fast as the peer the provider is."""
    return rows[peer]["median_ms"] / rows[provider]["median_ms"]


def headline() -> str:
    """A line for each device: the speed against padding in the given order, and against batches sorted by length."""
    lines = []
    for inference, step in readme_results().values():
        machine, encoded = inference["machine"], inference["cases"]["lengths of SST-2"]
        trained = step["cases"]["6 x 384, batch 16 x 128"]["fastenc"]
        by_length = (
            f", {against(encoded, 'fastenc', SORTED):.1f} times as fast as on texts sorted by length,"
            if SORTED in encoded
            else ""
        )
        lines.append(
            f"- {machine['device']}, {machine['threads']} threads: MiniLM encodes sentences "
            f"{encoded['fastenc']['speedup']:.1f} times as fast as Hugging Face with sdpa on texts in the order given"
            f"{by_length} and trains {trained['speedup']:.1f} times as fast (float32)."
        )
    return "\n".join(lines) + "\n"


def speed() -> str:
    """The README's table: a row for each workload, a column for each device."""
    results = readme_results().values()
    step = "6 x 384, batch 16 x 128"
    # (title, 0 for inference or 1 for training, case, provider, peer; None: the benchmark's baseline)
    rows = [
        ("inference, lengths of SST-2, float32", 0, "lengths of SST-2", "fastenc", None),
        ("the same, Hugging Face sorted by length", 0, "lengths of SST-2", "fastenc", SORTED),
        ("inference, lengths 10 to 256, float32", 0, "lengths 10 to 256", "fastenc", None),
        ("the same, Hugging Face sorted by length", 0, "lengths 10 to 256", "fastenc", SORTED),
        ("inference, all 128 tokens, float32", 0, "all 128 tokens", "fastenc", None),
        ("inference, one text of 20 tokens, float32", 0, "one text of 20 tokens", "fastenc", None),
        ("inference, lengths 10 to 256, bfloat16", 0, "lengths 10 to 256", "fastenc bf16", None),
        ("masked-LM training step, float32", 1, step, "fastenc", None),
        ("masked-LM training step, bfloat16", 1, step, "fastenc, bf16 autocast", None),
    ]
    machines = [inference["machine"] for inference, _ in results]
    names = [f"{machine['device']}, {machine['threads']} threads" for machine in machines]
    lines = [f"| MiniLM (6 × 384) | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for title, benchmark, case, provider, peer in rows:
        measured = [pair[benchmark]["cases"][case] for pair in results]
        cells = [
            speedup(rows_of_case.get(provider))
            if peer is None
            else f"{against(rows_of_case, provider, peer):.2f}×"
            if peer in rows_of_case
            else "–"
            for rows_of_case in measured
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# Families of which the benchmark has six layers.
LARGER = {
    "jina-embeddings-v3": "jina-embeddings-v3",
    "esm2": "ESM-2 (150M)",
    "qwen3": "bidirectional Qwen3-0.6B",
    "gemma3": "EmbeddingGemma",
}


# In the README's table of encoders of base size, a provider for each number format.
FORMATS = ("Hugging Face, patched by fastenc", "fastenc, bfloat16, frozen", "fastenc, int8")


def factors_of_formats(rows: dict) -> str:
    """The factors of a case in each number format, as far as they were measured."""
    factors = [
        f"{rows[name]['speedup']:.1f}" for name in FORMATS if "speedup" in rows.get(name, {})
    ]
    return " / ".join(factors) or "–"


def families() -> str:
    """The README's table of encoders of base size: rows for each family, two columns for each device."""
    names = {"bert": "BERT", "mpnet": "MPNet", "albert": "ALBERT", "t5": "T5's encoder"}
    names |= {"modernbert": "ModernBERT", "eurobert": "EuroBERT", "deberta-v3": "DeBERTa-v3"}
    names |= {name: f"{title}, six layers" for name, title in LARGER.items()}
    devices = device_folders()
    on_cpus = [device for device in devices if not device.name.startswith("nvidia")]
    measurements = [data for device in on_cpus if (data := load(device, "families"))]
    workloads = ("lengths of SST-2", "lengths 10 to 256")
    head = [
        f"{data['machine']['device']}, {threads_of(data['machine'])}, {case}"
        for data in measurements
        for case in workloads
    ]
    lines = [f"| | {' | '.join(head)} |", "|---|" + "---:|" * len(head)]
    for family, title in names.items():
        cells = [
            factors_of_formats(data["cases"].get(f"{family}, {case}", {}))
            for data in measurements
            for case in workloads
        ]
        if set(cells) != {"–"}:
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# What multiplies 8 bits on a processor, as machine() names it, and its maker → such processors.
INT8_PRODUCTS = {
    ("AVX512-VNNI", "AMD"): "AVX512-VNNI of AMD (since Zen 4)",
    ("AVX512-VNNI", "Intel"): "AVX512-VNNI of Intel (since Cascade Lake)",
    ("AVX-VNNI", "Intel"): "AVX-VNNI (Intel since Alder Lake)",
    ("AMX", "Intel"): "AMX (Intel since Sapphire Rapids)",
    ("AVX2", "AMD"): "AVX2 alone, of AMD (before Zen 4)",
    ("AVX2", "Intel"): "AVX2 alone, of Intel (before Alder Lake, without AVX-512)",
}
INT8_PEERS = {
    "Hugging Face sdpa, float32, sorted": SORTED,
    "fastenc float32, frozen": "fastenc float32, frozen",
    "fastenc bfloat16, frozen": "fastenc bf16, frozen",
    "OpenVINO int8, the fastest of its ways": "OpenVINO int8",
    "ONNX Runtime int8": "ONNX Runtime int8",
    "sentence-transformers' qint8": "sentence-transformers' qint8",
}


def int8_by_processor() -> str:
    """The guide's table: a row for each workload and peer, a column for each device; then what was not measured."""
    devices = device_folders()
    measurements = [data for device in devices if (data := load(device, "int8"))]
    machines = [data["machine"] for data in measurements]
    maker = lambda machine: "AMD" if machine["device"].startswith("AMD") else "Intel"
    measured = {(machine["int8_products"], maker(machine)) for machine in machines}
    missing = [title for kind, title in INT8_PRODUCTS.items() if kind not in measured]
    not_measured = f"Not measured yet: {'; '.join(missing)}." if missing else ""
    if not measurements:
        return f"{not_measured}\n"
    names = [f"{m['device']}, {m['int8_products']}, {threads_of(m)}" for m in machines]
    lines = [f"| int8 is so many times as fast as | {' | '.join(names)} |"]
    lines.append("|---|" + "---:|" * len(names))
    for case in dict.fromkeys(name for data in measurements for name in data["cases"]):
        if case == "accuracy":
            continue
        model = "" if case.startswith("BERT-base") else "MiniLM, "
        lines.append(f"| **{model}{case}** |" + " |" * len(names))
        for title, begin in INT8_PEERS.items():
            cells = [_times_as_fast(data["cases"].get(case, {}), begin) for data in measurements]
            if set(cells) != {"–"}:
                lines.append(f"| {title} | {' | '.join(cells)} |")
    pairs = [_scores(data["cases"].get("accuracy")) for data in measurements]
    lines.append(f"| MiniLM on STS-B, Spearman × 100: int8 of float32 | {' | '.join(pairs)} |")
    return "\n".join([*lines, "", not_measured]).rstrip() + "\n"


def _scores(accuracy: dict | None) -> str:
    if accuracy is None:
        return "–"
    own, exact = (accuracy[name]["spearman"] for name in ("fastenc int8", BASELINE))
    return f"{own:.2f} of {exact:.2f}"


def _times_as_fast(rows: dict, begin: str) -> str:
    """How many times as fast int8 is as the fastest of the peers whose names begin so."""
    timed = {name: row["median_ms"] for name, row in rows.items() if "median_ms" in row}
    peers = [time for name, time in timed.items() if name.startswith(begin)]
    ours = timed.get("fastenc int8")
    return f"{min(peers) / ours:.2f}×" if peers and ours else "–"


# page in docs/with: how the names of its cases begin
CASES_OF = {
    "transformers": ("Trainer", "pipeline"),
    "sentence-transformers": ("Sentence", "CrossEncoder", "SparseEncoder"),
    "others": ("SetFit", "GLiNER", "KeyBERT", "BERTopic", "LangChain", "Haystack"),
}


def other_libraries(page: str) -> str:
    """A table for each device: what the libraries on this page gain."""
    parts = []
    for device in device_folders():
        data = load(device, "other_libraries")
        cases = {} if data is None else data["cases"]
        chosen = {case: rows for case, rows in cases.items() if case.startswith(CASES_OF[page])}
        if not chosen:
            continue
        lines = ["| | speed-up | largest difference | tested with |", "|---|---:|---:|---|"]
        for case, rows in chosen.items():
            row = rows["patched"]
            if problem := state(row):
                lines.append(f"| {case} | {problem} | | |")
                continue
            used = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
            apart = f"{row['largest_difference']:.1g}"
            lines.append(f"| {case} | {speedup(row)} | {apart} | {used} |")
        turns = min(rows["patched"].get("rounds", 0) for rows in chosen.values())
        parts += [machine_line(data["machine"]) + f" Medians of {turns} turns.", "", *lines, ""]
    return "\n".join(parts or ["Not measured yet."]) + "\n"


# The CPU record's names of the products' providers.
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
    data = load(RESULTS / device, "gemm")
    if data is None:
        return "Not measured yet.\n"
    shares: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for case, rows in data["cases"].items():
        if not (match := PRODUCT.search(case)):
            continue
        of_case = shares.setdefault(match.groups()[::-1], {})
        for provider in OF_PRODUCTS:
            if "median_ms" in rows.get(provider, {}):
                of_case.setdefault(provider, []).append(rows[provider]["percent_of_roofline"])
    lines = [f"| | rows | {' | '.join(OF_PRODUCTS.values())} |"]
    lines.append("|---|---:|" + "---:|" * len(OF_PRODUCTS))
    by_direction = sorted(shares.items(), key=lambda item: DIRECTIONS.index(item[0][0]))
    for (direction, rows), of_case in by_direction:
        cells = [_range(of_case.get(provider)) for provider in OF_PRODUCTS]
        lines.append(f"| {direction} | {rows} | {' | '.join(cells)} |")
    return "\n".join([machine_line(data["machine"]), "", *lines]) + "\n"


def _range(values: list[float] | None) -> str:
    if not values:
        return "–"
    least, most = round(min(values)), round(max(values))
    return f"{least} %" if least == most else f"{least} to {most} %"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.output:
        given.output.write_text(tables(), encoding="utf-8")
        return 0
    readme = README.read_text(encoding="utf-8")
    made = {"headline": headline, "speed": speed, "families": families, "gpu": gpu}
    wanted = {
        README: MARKERS.sub(lambda match: match[1] + made[match[2]]() + match[3], readme),
        PAGE: HEAD + tables(),
        GUIDE: IN_GUIDE.sub(
            lambda match: match[1] + int8_by_processor() + match[2],
            GUIDE.read_text(encoding="utf-8"),
        ),
    }
    wanted[RECORD] = IN_RECORD.sub(
        lambda match: match[1] + product_shares(match[2]) + match[3],
        RECORD.read_text(encoding="utf-8"),
    )
    for path in sorted(LIBRARIES.glob("*.md")):
        wanted[path] = MEASURED.sub(
            lambda match: match[1] + other_libraries(match[2]) + match[3],
            path.read_text(encoding="utf-8"),
        )
    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if given.check and stale:
        names = " and ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"{names}: not the committed results: run python -m benchmarks.tables")
        return 1
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
