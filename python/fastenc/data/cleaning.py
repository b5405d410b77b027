"""Drops documents that should not be trained on: duplicates, and those that the rules of C4 and Gopher reject."""

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastenc._extras import require
from fastenc.data.fertility import UNSPACED
from fastenc.data.sentences import SPACED_MARKS, UNSPACED_MARKS, split_sentences

STEPS = ("exact", "c4", "gopher", "near")
SHOWN, SHOWN_CHARACTERS = 3, 200
Drop = Callable[[str, str], Any]  # (reason, dropped text) → None

TERMINAL = (*SPACED_MARKS, *UNSPACED_MARKS, *"\"'”’»」』")
# Thai and Lao end sentences with a space, which also occurs elsewhere.
UNMARKED = re.compile("[\u0e00-\u0eff]")
POLICIES = re.compile(
    r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies",
    re.IGNORECASE,
)
CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
BULLETS = ("•", "‣", "▪", "●", "-", "*")
ELLIPSES = ("...", "…")
# A word is text between white space. In scripts without spaces a word is a run of the average length of words: two
# characters of Han and Kana, five (vowel signs included) of the scripts from Thai to Khmer, with its punctuation.
_RANGES = UNSPACED.pattern[1:-1]
WORD = re.compile(
    rf"(?:(?:(?![\u0e00-\u17ff])[{_RANGES}]){{1,2}}|[{_RANGES}]{{1,5}})[^\w\s{_RANGES}]*|[^\s{_RANGES}]+"
)


class Cleaner:
    """Drops documents and lines in up to four steps, and counts the reasons.

    "exact" drops a document with the same words as an earlier one; case and white space do not matter.

    "c4" removes citation markers and drops
        - lines that do not end in a terminal mark (an ellipsis is none), have fewer than five words, or contain
          "javascript" or a policy notice;
        - three consecutive sentences that occurred before, in this document or in one that was kept;
        - documents with lorem ipsum, a curly bracket, a bad word, or fewer than three sentences left.
    C4's language test is not included. In Thai and Lao, which have no terminal marks, lines need no mark and documents
    need no three sentences.

    "gopher" keeps documents with 50 to 100,000 words, 3 to 10 characters a word on average, at most one # or ellipsis
    for ten words, at most 90 % of lines that begin with a bullet and 30 % that end in an ellipsis, a letter in 80 % of
    the words and, if ``english``, two of eight stop words. Gopher's rules on repetition are not included.

    In scripts without spaces two characters (Han and Kana) or five (Thai, Lao, Tibetan, Myanmar, Khmer) count as a
    word, and the average length of words is not tested.

    "near" drops a document whose shingles of five words have an estimated Jaccard similarity of at least
    ``threshold`` with those of an earlier document that was kept. Text with few spaces has shingles of five characters.

    The first of several copies stays. The result depends on the documents and their order only. Memory: a hash of
    8 bytes for each document and sentence, and with "near" 128 numbers for each document that is kept.

    Args:
        steps: some of "exact", "c4", "gopher", "near"; they run in this order.
        threshold: similarity, in (0, 1).
        bad_words: words, in any case, that drop a document. C4's list is not included.
    Fields:
        memories: {step: its record of earlier documents}. A record has ``new``, an array of the 8-byte numbers that
            were added since the array was last emptied, and ``recall(numbers)``, which restores it.
    Raises: ValueError for an unknown step or a threshold out of range; ImportError without datasketch for "near".
    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.2; Rae et al. 2021, arXiv:2112.11446, appendix A.1.1;
        Broder 1997 (MinHash).
    """

    def __init__(
        self,
        steps: Sequence[str] = STEPS,
        *,
        threshold: float = 0.8,
        english: bool = False,
        bad_words: Iterable[str] = (),
    ):
        if unknown := set(steps) - set(STEPS):
            raise ValueError(f"steps must be some of {', '.join(STEPS)}, got {sorted(unknown)}")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must be a similarity in (0, 1), got {threshold}")
        self.c4 = C4Rules(bad_words)
        rules: dict[str, Any] = {
            "exact": ExactDuplicates(),
            "c4": self.c4,
            "gopher": GopherRules(english),
            "near": NearDuplicates(threshold) if "near" in steps else None,
        }
        self.rules = [rules[name] for name in STEPS if name in steps]
        self.memories: dict[str, Any] = {
            name: rules[name].seen for name in STEPS if name in steps and name != "gopher"
        }
        self.documents: Counter[str] = Counter(read=0, kept=0)
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def clean(self, documents: Iterable[str]) -> Iterator[str]:
        """The documents that are kept, without their dropped lines."""
        for document in documents:
            self.documents["read"] += 1
            text: str | None = document
            for rule in self.rules:
                text = rule(text, self._drop)
                if text is None:
                    break
            else:
                self.documents["kept"] += 1
                self.c4.remember_spans()
                yield text  # type: ignore[misc]

    def restore(self, report: Mapping[str, Any], memories: Mapping[str, array]) -> None:
        """Continue a cleaner with this report and these memories."""
        self.documents.update(report["documents"])
        self.dropped.update(report["dropped"])
        self.examples.update(report["examples"])
        for name, numbers in memories.items():
            self.memories[name].recall(numbers)

    def report(self) -> dict[str, Any]:
        """Numbers of documents read and kept, of dropped texts by reason, and examples of them."""
        return {
            "documents": dict(self.documents),
            "dropped": dict(sorted(self.dropped.items())),
            "examples": dict(sorted(self.examples.items())),
        }

    def _drop(self, why: str, what: str) -> None:
        self.dropped[why] += 1
        shown = self.examples.setdefault(why, [])
        if len(shown) < SHOWN:
            shown.append(what[:SHOWN_CHARACTERS])


class Hashes:
    """A set of hashes that records additions."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.new = array("Q")

    def __contains__(self, key: int) -> bool:
        return key in self.known

    def add(self, key: int) -> None:
        if key not in self.known:
            self.known.add(key)
            self.new.append(key)

    def recall(self, numbers: array) -> None:
        self.known.update(numbers)


class ExactDuplicates:
    def __init__(self) -> None:
        self.seen = Hashes()

    def __call__(self, text: str, drop: Drop) -> str | None:
        words = " ".join(text.lower().split())
        if not words:
            return drop("document: empty", text)
        if (key := _hash(words)) in self.seen:
            return drop("document: exact duplicate", text)
        self.seen.add(key)
        return text


class C4Rules:
    def __init__(self, bad_words: Iterable[str]):
        self.seen = Hashes()
        self.latest: set[int] = set()  # hashes of the last document's spans
        self.bad_words = re.compile(
            rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(bad_words)))})(?!\w)", re.IGNORECASE
        )
        self.has_bad_words = bool(bad_words)

    def __call__(self, text: str, drop: Drop) -> str | None:
        if "{" in text:
            return drop("document: curly bracket", text)
        if "lorem ipsum" in text.lower():
            return drop("document: lorem ipsum", text)
        if self.has_bad_words and self.bad_words.search(text):
            return drop("document: bad word", text)
        lines = []
        for line in text.split("\n"):
            if not line.strip():
                continue
            line = CITATION.sub("", line).strip()
            if line.endswith(ELLIPSES) or not (line.endswith(TERMINAL) or _unmarked(line)):
                drop("line: no mark at its end", line)
            elif len(WORD.findall(line)) < 5:
                drop("line: fewer than five words", line)
            elif "javascript" in line.lower():
                drop("line: javascript", line)
            elif POLICIES.search(line):
                drop("line: policy notice", line)
            else:
                lines.append(split_sentences(line))
        kept = self._without_repeated_spans(lines, drop)
        if sum(map(len, kept)) < (1 if _unmarked(text) else 3):
            return drop("document: fewer than three sentences", text)
        return "\n".join("".join(sentences).strip() for sentences in kept if sentences)

    def remember_spans(self) -> None:
        """Count the last document's spans as seen. A document that is dropped must not suppress a later copy."""
        for span in self.latest:
            self.seen.add(span)

    def _without_repeated_spans(self, lines: list[list[str]], drop: Drop) -> list[list[str]]:
        every = [sentence.strip() for sentences in lines for sentence in sentences]
        spans = [_hash("\n".join(every[start : start + 3])) for start in range(len(every) - 2)]
        repeated: set[int] = set()
        self.latest = set()
        for start, span in enumerate(spans):
            if span in self.seen or span in self.latest:
                repeated.update(range(start, start + 3))
            self.latest.add(span)
        for number in sorted(repeated):
            drop("sentence: in a span of three seen before", every[number])
        kept, first = [], 0
        for sentences in lines:
            kept.append([s for n, s in enumerate(sentences, first) if n not in repeated])
            first += len(sentences)
        return kept


class GopherRules:
    def __init__(self, english: bool):
        self.english = english

    def __call__(self, text: str, drop: Drop) -> str | None:
        words = WORD.findall(text)
        unspaced = 2 * sum(UNSPACED.match(word) is not None for word in words) > len(words)
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        symbols = max(text.count("#"), sum(text.count(mark) for mark in ELLIPSES))
        share = lambda flags, items: sum(flags) / max(len(items), 1)
        checks = {
            "document: not 50 to 100,000 words": 50 <= len(words) <= 100_000,
            "document: mean word length not 3 to 10": unspaced
            or 3 <= share(map(len, words), words) <= 10,
            "document: more than one # or ellipsis for ten words": symbols <= 0.1 * len(words),
            "document: over 90 % of lines with a bullet": share(
                (line.startswith(BULLETS) for line in lines), lines
            )
            <= 0.9,
            "document: over 30 % of lines end in an ellipsis": share(
                (line.endswith(ELLIPSES) for line in lines), lines
            )
            <= 0.3,
            "document: under 80 % of words have a letter": share(
                (any(map(str.isalpha, word)) for word in words), words
            )
            >= 0.8,
            "document: fewer than two stop words": not self.english
            or len(STOP_WORDS.intersection(map(str.lower, words))) >= 2,
        }
        for why, passed in checks.items():
            if not passed:
                return drop(why, text)
        return text


class NearDuplicates:
    """MinHash with 128 permutations. Bands of them find candidates; all of them estimate the similarity."""

    def __init__(self, threshold: float):
        self.seen = Sketches(threshold)

    def __call__(self, text: str, drop: Drop) -> str | None:
        sketch = self.seen.sketch(shingles(text))
        if self.seen.holds_similar(sketch):
            return drop("document: near duplicate", text)
        self.seen.add(sketch)
        return text


class Sketches:
    """MinHash sketches of documents, and an index of their bands."""

    PERMUTATIONS, SEED = 128, 1

    def __init__(self, threshold: float):
        self.library = require("datasketch", extra="clean")
        self.threshold = threshold
        self.index = self.library.MinHashLSH(threshold=threshold, num_perm=self.PERMUTATIONS)
        self.known: list[Any] = []
        self.new = array("Q")

    def sketch(self, items: Iterable[str]) -> Any:
        sketch = self._blank()
        sketch.update_batch([item.encode("utf-8", "replace") for item in items])
        return sketch

    def holds_similar(self, sketch: Any) -> bool:
        candidates = (self.known[number] for number in self.index.query(sketch))
        return any(sketch.jaccard(known) >= self.threshold for known in candidates)

    def add(self, sketch: Any) -> None:
        self.new.extend(sketch.hashvalues.tolist())
        self._index(self.library.LeanMinHash(sketch))

    def recall(self, numbers: array) -> None:
        numpy = require("numpy", extra="train")
        rows = numpy.frombuffer(numbers, dtype=numpy.uint64).reshape(-1, self.PERMUTATIONS)
        for row in rows:
            sketch = self._blank()
            sketch.hashvalues = row
            self._index(self.library.LeanMinHash(sketch))

    def _blank(self) -> Any:
        return self.library.MinHash(num_perm=self.PERMUTATIONS, seed=self.SEED)

    def _index(self, lean: Any) -> None:
        self.index.insert(len(self.known), lean)
        self.known.append(lean)


def shingles(text: str, length: int = 5) -> set[str]:
    """Runs of five lower-case words; of five characters if words have more than 20 characters on average."""
    words = text.lower().split()
    joined = " ".join(words)
    if len(joined) > 20 * len(words):
        return {joined[i : i + length] for i in range(max(1, len(joined) - length + 1))}
    return {" ".join(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


def _unmarked(text: str) -> bool:
    """Whether most letters belong to a script without terminal marks."""
    return 2 * len(UNMARKED.findall(text)) > sum(map(str.isalpha, text))


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
