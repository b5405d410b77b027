"""The stages of a datatrove pipeline that drops bad documents and duplicates from a corpus."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pprint import pformat

from datatrove.data import Document
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters.c4_filters import C4QualityFilter
from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter
from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter
from datatrove.pipeline.filters.regex_filter import RegexFilter
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.hashing import HashConfig

from fastenc.data.cleaning_steps import (
    WORD,
    WORD_OR_CHARACTER,
    ByScript,
    TextReader,
    TextWriter,
    Words,
    whole_words,
)

STEPS = ("gopher", "c4", "fineweb", "exact", "near")
SHA1 = HashConfig(hash_fc="sha1")
# What the output folder holds beside a folder of texts for each language.
BESIDE_TEXTS = ("work", "dropped", "report.json")


@dataclass(frozen=True)
class Stage:
    """One pass over the texts. The next stage can start when all tasks of this one have ended.

    Fields:
        pipeline: datatrove's steps, which each task runs.
        tasks: number of tasks; they can run in parallel.
        logs: folder of the tasks' logs, counts and completion marks.
    """

    name: str
    pipeline: list[object]
    tasks: int
    logs: str


def cleaning_stages(
    output: str,
    files: Mapping[str, Sequence[str]],
    *,
    steps: Sequence[str] = STEPS,
    english: bool = False,
    bad_words: Iterable[str] = (),
    column: str | None = None,
    quoting: str | None = None,
) -> list[Stage]:
    """The stages that clean files into ``output``. Any of datatrove's executors can run them, in this order.

    - "gopher" drops documents by Gopher's rules on repetition and on quality (50 to 100,000 words; limits on symbols,
      bullets, ellipses and words without letters).
    - "c4" drops lines that mention JavaScript or a policy, lines of fewer than three words and lines with a word of
      more than 1,000 characters, and removes marks such as [1] and [edit]. It drops documents with lorem ipsum, a
      curly bracket or fewer than five sentences.
    - "fineweb" drops documents whose lines are mostly short, repeated or without a punctuation mark at their end.
    - "exact" keeps one of several documents with the same words. Case and white space do not matter.
    - "near" keeps one document of each cluster of near-duplicates. Two documents are near-duplicates if their MinHash
      signatures (14 bands of 8 hashes over word five-grams) agree in at least one band. By the formula
      1 - (1 - s^8)^14 this finds 92 % of the pairs with a Jaccard similarity s of 0.8.

    In scripts without spaces, two characters (Han, Kana) or five (Thai to Khmer) count as a word. The rules on the
    lengths of words and lines, on marks at the end of lines and on C4's number of sentences do not apply to them.

    Args:
        output: folder of the result.
        files: {language: paths}, read by ``read_texts``; each file is a task.
        steps: some of ``STEPS``; they run in the order of ``STEPS``.
        english: also require marks at the end of lines (C4, FineWeb) and two stop words (Gopher). Without it, "fineweb"
            keeps a document of which no line ends with a mark.
        bad_words: a document that contains one of these words, in any case, is dropped. C4's list is not included.
        column, quoting: as in ``read_texts``.
    Returns: stages that write ``output``/<language>/<task>.jsonl ("text" for the language ""), dropped documents to
        ``output``/dropped, and intermediate files to ``output``/work.
    Raises: ValueError for an unknown step, and for a language whose folder would not be one of its own in ``output``.
    Source: Rae et al. 2021, arXiv:2112.11446; Raffel et al. 2020, arXiv:1910.10683; Penedo et al. 2024,
        arXiv:2406.17557; Broder 1997 (MinHash); datatrove.
    """
    if unknown := set(steps) - set(STEPS):
        raise ValueError(f"steps must be some of {', '.join(STEPS)}, got {sorted(unknown)}")
    for language in files:
        if language.split("/")[0] in (*BESIDE_TEXTS, ".."):
            raise ValueError(
                f"language must not be {', '.join(BESIDE_TEXTS)}, which the output folder holds beside the languages' "
                f"folders, or lead out of it, got {language!r}: give another name"
            )
    work = f"{output}/work"
    pairs = [(language or "text", path) for language, paths in files.items() for path in paths]
    passes = ["filter", *(step for step in ("exact", "near") if step in steps)]
    stages: list[Stage] = []

    def add(name: str, pipeline: list[object], tasks: int = len(pairs)) -> None:
        stages.append(Stage(name, pipeline, tasks, f"{work}/logs/{name}"))

    def dropped(name: str) -> JsonlWriter:
        return JsonlWriter(f"{output}/dropped/{name}", compression=None)

    def writer(name: str) -> JsonlWriter:
        if name == passes[-1]:
            return TextWriter(output, "${language}/${rank}.jsonl", compression=None)
        return JsonlWriter(f"{work}/{name}", compression=None)

    filters = _filters(steps, english, sorted(bad_words), dropped)
    add("filter", [TextReader(pairs, column, quoting), *filters, writer("filter")])
    source = JsonlReader(f"{work}/filter", add_file_path=False)
    if "exact" in steps:
        config = ExactDedupConfig(_normalized, hash_config=SHA1)
        signatures, duplicates = f"{work}/exact-signatures", f"{work}/exact-duplicates"
        add("exact-signatures", [source, ExactDedupSignature(signatures, config)])
        add("exact-duplicates", [ExactFindDedups(signatures, duplicates, config)], 1)
        add(
            "exact",
            [source, ExactDedupFilter(duplicates, config, dropped("exact")), writer("exact")],
        )
        source = JsonlReader(f"{work}/exact", add_file_path=False)
    if "near" in steps:
        hashes = MinhashConfig(hash_config=SHA1)
        signatures, buckets, clusters = (
            f"{work}/near-{name}" for name in ("signatures", "buckets", "clusters")
        )
        words = Words(WORD_OR_CHARACTER)
        add("near-signatures", [source, MinhashDedupSignature(signatures, hashes, words)])
        add(
            "near-buckets",
            [MinhashDedupBuckets(signatures, buckets, config=hashes)],
            hashes.num_buckets,
        )
        add("near-clusters", [MinhashDedupCluster(buckets, clusters, hashes)], 1)
        add("near", [source, MinhashDedupFilter(clusters, dropped("near")), writer("near")])
    return stages


def executor_script(executor: str, output: str, settings: Mapping[str, object]) -> str:
    """The source of a Python program that runs the stages on a cluster.

    Args:
        executor: "slurm" or "ray".
        output, settings: arguments of ``cleaning_stages``.
    Raises: ValueError for another executor.
    """
    arguments = {"slurm": ', time="24:00:00", partition="PARTITION"', "ray": ""}
    if executor not in arguments:
        raise ValueError(f"executor (--script) must be slurm or ray, got {executor!r}: give one")
    name = f"{executor.capitalize()}PipelineExecutor"
    return f"""from datatrove.executor.{executor} import {name}
from fastenc.data.cleaning import cleaning_stages

settings = {pformat(dict(settings), width=100)}

if __name__ == "__main__":
    last = None
    for stage in cleaning_stages({output!r}, **settings):
        last = {name}(
            stage.pipeline, tasks=stage.tasks, logging_dir=stage.logs, depends=last{arguments[executor]}
        )
    last.run()
"""


def _filters(
    steps: Sequence[str], english: bool, bad_words: list[str], dropped: Callable[[str], object]
) -> list[object]:
    language = Words(WORD)
    filters: list[object] = []
    if bad_words:
        filters.append(RegexFilter(whole_words(bad_words), dropped("bad-words")))
    if "gopher" in steps:
        filters.append(
            GopherRepetitionFilter(exclusion_writer=dropped("gopher-repetition"), language=language)
        )
        stop_words = 2 if english else 0
        filters.append(
            ByScript(
                GopherQualityFilter(min_stop_words=stop_words, language=language),
                GopherQualityFilter(
                    min_avg_word_length=None,
                    max_avg_word_length=None,
                    min_stop_words=0,
                    language=language,
                ),
                dropped("gopher-quality"),
            )
        )
    if "c4" in steps:
        filters.append(
            ByScript(
                C4QualityFilter(filter_no_terminal_punct=english, language=language),
                C4QualityFilter(
                    filter_no_terminal_punct=False,
                    min_num_sentences=-1,
                    min_words_per_line=-1,
                    max_word_length=-1,
                    language=language,
                ),
                dropped("c4"),
            )
        )
    if "fineweb" in steps:
        filters.append(
            ByScript(
                FineWebQualityFilter(line_punct_exclude_zero=not english, language=language),
                FineWebQualityFilter(line_punct_thr=0, short_line_thr=1, language=language),
                dropped("fineweb"),
            )
        )
    return filters


def _normalized(document: Document) -> str:
    """Documents for which this is equal are exact duplicates."""
    return " ".join(document.text.lower().split())
