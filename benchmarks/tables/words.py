"""Sections about vectors of words: their speed, static vectors, and word senses."""

from benchmarks.tables.markdown import row as line
from benchmarks.tables.markdown import section, table


def word_vectors(data: dict) -> str:
    lines = []
    for case, rows in data["cases"].items():
        lines.append(f"| **{case}** | | | |")
        for provider, row in rows.items():
            ratios = (f"{row[name]:.2f}×" for name in ("times_as_fast", "times_as_fast_cpu"))
            each = 1000 * row["cpu_seconds"] / row["sentences"]
            lines.append(line([provider, f"{each:.1f}", *ratios]))
    return section(
        data,
        "Word vectors, and statistics of heads: MiniLM (6 × 384)",
        "FASTENC_DATA=... python -m benchmarks.studies.word_vectors 20000",
        "Sentences of UD English EWT, then of SemCor. transformers runs with output_hidden_states and batches sorted "
        "by length; both sides tokenise. Ratios of elapsed time and of CPU time are medians over alternating slices; "
        "CPU time leaves out other work on the machine. OMP_NUM_THREADS sets the threads.",
        table("| | CPU seconds a 1,000 sentences | times as fast | by CPU time |", lines),
    )


def static_vectors(data: dict) -> str:
    names = ("word2vec", "distilled", "MiniLM, last layer", "MiniLM, best layer")
    lines = []
    for case, row in data["cases"].items():
        shares = (f"{100 * row[name]:.1f}" for name in names)
        lines.append(line([case, *shares, str(row["best layer"]), f"{row['items']:,}"]))
    return section(
        data,
        "Static vectors against MiniLM's vectors of single words",
        "FASTENC_DATA=... python -m benchmarks.studies.static_vectors questions-words.txt",
        "× 100: Spearman's correlation with people's scores of word pairs, and the share of Google's analogies with "
        "the right answer among their words; on the items whose words word2vec knows. word2vec is gensim's skip-gram "
        "on 4.9 million words of Wikipedia, which are few for it. distilled is MiniLM's static model.",
        table(f"| {line(names)} its number | items |", lines),
    )


def word_senses(data: dict) -> str:
    """The shares of right senses of each provider; then those of each word, for the set that has them."""
    cases = data["cases"]
    lines = []
    for case, rows in cases.items():
        lines.append(f"| **{case}** | | | |")
        for provider, row in rows.items():
            shares = (row.get(name) for name in ("f1", "accuracy", "macro_accuracy"))
            cells = ("" if share is None else f"{share:.1%}" for share in shares)
            lines.append(line([provider, *cells]))
    of_words = next(rows for rows in cases.values() if "words" in next(iter(rows.values())))
    by_word = (
        line([word, *(f"{row['words'][word]:.1%}" for row in of_words.values())])
        for word in next(iter(of_words.values()))["words"]
    )
    return section(
        data,
        "Word senses: nearest mean vector",
        "FASTENC_DATA=... python -m benchmarks.studies.word_senses",
        "The layers are chosen on a tenth of the training rows (for WiC on dev). A lemma that is not in the training "
        "rows gets no sense, so F1 and accuracy differ. BERT-base's published figures on CoarseWSD-20 are 95.7 % and "
        "94.0 %.",
        table("| | F1 | accuracy | mean over words |", lines)
        + "\n\n"
        + table(line(["word", *of_words]), by_word),
    )
