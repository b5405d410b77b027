"""fastenc clean: what its datatrove pipeline drops and keeps, on one machine, after a kill, and in a script."""

import functools
import json
import random
import re
import signal
import sys
import sysconfig
from itertools import zip_longest

import pytest

from fastenc._base.locks import open_locked
from fastenc.data import read_texts
from fastenc.data.sentences import split_sentences
from tests.helpers.commands import failure, run
from tests.helpers.processes import python

datatrove = pytest.mark.skipif(
    "not __import__('importlib.util').util.find_spec('datatrove')",
    reason="needs fastenc[clean]",
)


# datatrove makes a logger for each task, and loguru asks for the same folders for each logger.
folder_of = functools.cache(sysconfig.get_path)


@pytest.fixture(autouse=True)
def each_folder_looked_up_once(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", folder_of)


def page(seed, sentences=20):
    """A text that every rule keeps."""
    draw = random.Random(seed)
    words = [
        f"{head}{tail}" for head in ("so", "river", "tall", "me") for tail in "abcdefghijklmnop"
    ]
    sentence = lambda: " ".join(draw.choices(words, k=9)).capitalize() + "."
    return " ".join(sentence() for _ in range(sentences))


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def clean(folder, texts, steps, *options):
    """(kept texts, number of dropped texts by reason) for documents in one file."""
    write(folder / "in.jsonl", texts)
    run("clean", folder / "in.jsonl", "--steps", steps, "-o", folder / "out", *options)
    report = json.loads((folder / "out" / "report.json").read_text())
    kept = read_texts(folder / "out" / "text" / "00000.jsonl")
    assert report["documents"] == {"read": len(texts), "kept": len(kept)}
    return kept, report["dropped"]


@datatrove
def test_each_filter_drops_its_kind(tmp_path):
    good = page(0)
    many = [page(seed, 1) for seed in range(20)]
    bad = {
        "gopher_short_doc": page(9, 4),
        "gopher_too_many_hashes": good + "#" * 40,
        "gopher_below_alpha_threshold": f"{good} {' '.join(str(7919 * i) for i in range(90))}",
        "dup_line_frac": "\n".join([page(1, 8), *many[2:4], many[2], many[2]]),
        "curly_bracket": page(4) + " function() {}",
        "lorem_ipsum": page(5) + " Lorem ipsum dolor.",
        "too_few_sentences": page(6).replace(".", ",") + ".",
        "short_line_ratio": "\n".join([page(7, 9), *(f"Menu {a} and more." for a in "abcdef")]),
        "line_punct_ratio": "\n".join(line[:-1] for line in many) + ".",
        "char_dup_ratio": "\n".join([page(1, 12), *many[2:9], many[2]]),
    }
    for why, text in bad.items():
        folder = tmp_path / why
        folder.mkdir()
        kept, dropped = clean(folder, [good, text], "gopher,c4,fineweb")
        assert kept == [good] and dropped.pop(why) == 1, why
        assert all(name.startswith("line-filter") for name in dropped), dropped
        (file,) = (folder / "out" / "dropped").glob("*/*.jsonl")
        (row,) = map(json.loads, file.read_text().splitlines())
        assert row["metadata"]["filter_reason"] == why


@datatrove
def test_lines_that_c4_drops(tmp_path):
    lines = ["Please enable Javascript to see this.", "You accept our Privacy Policy here.", "Menu"]
    text = "\n".join([page(0, 5), *lines])
    kept, dropped = clean(tmp_path, [text], "c4")
    assert kept == [page(0, 5)]
    names = ("javascript", "policy", "too_few_words")
    assert dropped == {f"line-filter-{name}": 1 for name in names}


@datatrove
def test_english_asks_for_marks_and_stop_words(tmp_path):
    english = page(0).replace("Soa", "The").replace("soa", "the").replace("sob", "of")
    kept, dropped = clean(tmp_path, [page(1), english], "gopher,c4", "--english")
    assert kept == [english] and dropped == {"gopher_enough_stop_words": 1}


def filtered(folder, text, steps, english):
    """The text that the filters of one script or of the other leave, or the reason why they drop it."""
    from datatrove.data import Document
    from datatrove.pipeline.filters.base_filter import get_filter_result

    from fastenc.data.cleaning import cleaning_stages

    stage = cleaning_stages(str(folder), {}, steps=steps, english=english)[0]
    document = Document(text, "0")
    for each in stage.pipeline[1:-1]:
        kept, reason = get_filter_result(each.filter(document))
        if not kept:
            return reason
    return document.text


@datatrove
@pytest.mark.parametrize("step", ["gopher", "c4", "fineweb"])
def test_the_rules_for_english_are_datatroves(step, tmp_path):
    """Compared with its filters' defaults, on lines with and without marks, and with zero to three stop words."""
    from datatrove.data import Document
    from datatrove.pipeline.filters.base_filter import get_filter_result
    from datatrove.pipeline.filters.c4_filters import C4QualityFilter
    from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
    from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter

    from fastenc.data.cleaning_steps import WORD, Words

    classes = {
        "gopher": GopherQualityFilter,
        "c4": C4QualityFilter,
        "fineweb": FineWebQualityFilter,
    }
    peer = classes[step](language=Words(WORD))
    found = set()
    for seed in range(60):
        draw = random.Random(seed)
        ends = draw.choices([".", "!", "..."], [4, 4, 1], k=draw.choice([0, 1, 2, 8, 12]))
        lines = [page(100 * seed + i, 1)[:-1] for i in range(12)]
        lines = [line + end for line, end in zip_longest(lines, ends, fillvalue="")]
        lines[0] = " ".join([*draw.sample(["the", "of", "and"], draw.randint(0, 3)), lines[0]])
        document = Document("\n".join(lines), "0")
        kept, reason = get_filter_result(peer.filter(document))
        expected = document.text if kept else reason
        assert filtered(tmp_path, "\n".join(lines), (step,), True) == expected
        found.add(reason)
    assert len(found) > 1, "some are kept, others dropped"


@datatrove
@pytest.mark.parametrize("step", ["gopher", "c4", "fineweb"])
def test_texts_that_are_not_english_need_neither_marks_nor_stop_words(step, tmp_path):
    text = "\n".join(page(seed, 1).replace(".", "") for seed in range(12))
    assert filtered(tmp_path, text, (step,), False) == text
    assert filtered(tmp_path, text, (step,), True) != text


@datatrove
@pytest.mark.parametrize("english", [False, True])
@pytest.mark.parametrize("language", ["zh", "ja", "th"])
def test_neither_short_nor_long_lines_matter_without_spaces(language, english, tmp_path):
    short = "\n".join(ARTICLES[language][start : start + 20] for start in range(0, 120, 20))
    assert filtered(tmp_path, short, ("c4", "fineweb"), english) == short
    long = "".join(ARTICLES[language].split()) * 10
    assert len(long) > 1000 and filtered(tmp_path, long, ("c4", "fineweb"), english) == long


@datatrove
def test_bad_words_drop_documents(tmp_path):
    (tmp_path / "bad").write_text("darn\n")
    texts = ["a Darn page", "a darned page"]
    kept, dropped = clean(tmp_path, texts, "exact", "--bad-words", tmp_path / "bad")
    assert kept == [texts[1]] and dropped == {"bad_word": 1}


@datatrove
@pytest.mark.parametrize(
    ("language", "word", "texts"),
    [
        ("en", "darn", ["a Darn page", "a darned page", "darn", "(darn)", "no word"]),
        ("zh", "赌博", ["他喜欢赌博吗", "赌博", "他喜欢"]),
        ("ja", "ばか", ["彼はばかです", "彼です"]),
        ("th", "ควาย", ["เขาเป็นควายมาก", "เขาเป็น"]),
    ],
)
def test_bad_words_are_found_as_by_c4(language, word, texts, tmp_path, monkeypatch):
    """Compared with datatrove's filter, whose words C4 publishes."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import c4_filters
    from datatrove.pipeline.filters.regex_filter import RegexFilter

    from fastenc.data.cleaning_steps import whole_words

    (tmp_path / "list").write_text(f"{word}\n", encoding="utf-8")
    monkeypatch.setattr(
        c4_filters, "cached_asset_path_or_download", lambda *_, **__: tmp_path / "list"
    )
    peer, ours = c4_filters.C4BadWordsFilter(), RegexFilter(whole_words([word]))
    kept = [ours.filter(Document(text, "0")) for text in texts]
    documents = [Document(text, "0", metadata={"language": language}) for text in texts]
    assert kept == [peer.filter(document) is True for document in documents]
    assert True in kept and False in kept


@datatrove
def test_a_bad_word_with_marks_is_whole(tmp_path):
    """Here C4's code finds कम in कमी, because Python takes the vowel sign for the end of a word."""
    (tmp_path / "bad").write_text(" कम \n \n", encoding="utf-8")
    texts = ["यह कमी है . -", "यह कम है"]
    kept, dropped = clean(tmp_path, texts, "exact", "--bad-words", tmp_path / "bad")
    assert kept == [texts[0]] and dropped == {"bad_word": 1}


@datatrove
def test_a_document_without_a_line_left_is_dropped(tmp_path):
    lines = ["请在您的浏览器中打开javascript功能以便继续阅读本网站的内容。"]
    kept, dropped = clean(tmp_path, [ARTICLES["zh"], "\n".join(lines)], "c4")
    assert kept == [ARTICLES["zh"]]
    assert dropped == {"line-filter-javascript": 1, "no_lines": 1}


# The first article of the Universal Declaration of Human Rights, and the beginnings of the next.
ARTICLES = {
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。人人有资"
    "格享有本宣言所载的一切权利和自由，不分种族、肤色、性别、语言、宗教、政治或其他见解、国籍或社会"
    "出身、财产、出生或其他身分等任何区别。人人有权享有生命、自由和人身安全。",
    "ja": "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性"
    "と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。すべて人は、生命、自"
    "由及び身体の安全に対する権利を有する。何人も、奴隷にされ、又は苦役に服することはない。",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม "
    "และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ คนทุกคนมีสิทธิในการดำรงชีวิต ในเสรีธรรม "
    "และในความมั่นคงแห่งร่างกาย บุคคลใดจะถูกบังคับให้เป็นทาส หรืออยู่ในภาระจำยอมใดๆ มิได้",
    "ar": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميراً وعليهم أن يعامل "
    "بعضهم بعضاً بروح الإخاء. لكل إنسان حق التمتع بكافة الحقوق والحريات الواردة في هذا الإعلان، دون "
    "أي تمييز، كالتمييز بسبب العنصر أو اللون أو الجنس أو اللغة أو الدين أو الرأي السياسي أو أي رأي "
    "آخر. فهل لكل فرد الحق في الحياة والحرية وسلامة شخصه؟",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। उन्हें "
    "बुद्धि और अन्तरात्मा की देन प्राप्त है और परस्पर उन्हें भाईचारे के भाव से बर्ताव करना चाहिए। "
    "प्रत्येक व्यक्ति को जीवन, स्वाधीनता और वैयक्तिक सुरक्षा का अधिकार है। कोई भी गुलामी या दासता "
    "की हालत में न रखा जाएगा।",
}


@datatrove
@pytest.mark.parametrize("language", ARTICLES)
def test_scripts_without_spaces_or_with_their_own_marks_are_kept(language, tmp_path):
    text = ARTICLES[language]
    # Arabic and Hindi have spaces, so C4 counts their sentences; these articles have fewer than five.
    steps = "gopher,fineweb" if language in ("ar", "hi") else "gopher,c4,fineweb"
    assert clean(tmp_path, [text], steps) == ([text], {})


@datatrove
@pytest.mark.parametrize("language", ARTICLES)
def test_words_and_sentences_without_a_dictionary(language):
    from fastenc.data.cleaning_steps import WORD, WORD_OR_CHARACTER, Words

    text = ARTICLES[language]
    words = Words(WORD)
    assert words.sent_tokenize(text) == [sentence.strip() for sentence in split_sentences(text)]
    assert "".join(words.word_tokenize(text)) == "".join(text.split())
    expected = text.split() if language in ("ar", "hi") else list("".join(text.split()))
    tokens = Words(WORD_OR_CHARACTER).word_tokenize(text)
    assert len(tokens) == pytest.approx(len(expected), rel=0.15)


@datatrove
def test_exact_duplicates_have_the_same_words(tmp_path):
    texts = ["A b.\nC", "other", "a  B. c", " \n", "ab. c"]
    kept, dropped = clean(tmp_path, texts, "exact")
    assert kept == ["A b.\nC", "other", "ab. c"] and dropped == {"empty": 1, "exact": 1}


@datatrove
def test_near_duplicates_are_looked_for_among_what_exact_ones_leave(tmp_path):
    """A text of less than five words has no near-duplicates."""
    kept, dropped = clean(tmp_path, ["one two", "One two", "one three"], "exact,near")
    assert kept == ["one two", "one three"] and dropped == {"exact": 1}


@datatrove
def test_near_duplicates_are_those_of_the_exact_similarity(tmp_path):
    """Compared with Jaccard similarities of five-grams: far above the threshold texts are dropped, far below kept."""
    draw = random.Random(0)
    words = [
        f"w{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}" for i in range(5000)
    ]
    base = [draw.choice(words) for _ in range(400)]

    def changed(count):
        text = list(base)
        for index in draw.sample(range(400), count):
            text[index] = draw.choice(words)
        return " ".join(text)

    grams = lambda text: {tuple(text.split()[i : i + 5]) for i in range(len(text.split()) - 4)}
    jaccard = lambda a, b: len(a & b) / len(a | b)
    texts = [" ".join(base), changed(3), changed(60), changed(2), "another text of only six words"]
    similar = [jaccard(grams(text), grams(texts[0])) for text in texts]
    assert min(similar[1], similar[3]) > 0.9 and similar[2] < 0.5
    kept, dropped = clean(tmp_path, texts, "near")
    assert dropped == {"near": 2} and set(kept) >= {texts[2], texts[4]}
    assert len(kept) == 3


@datatrove
def test_near_duplicates_are_found_as_often_as_the_formula_says(tmp_path):
    """Pairs of texts of 100 five-grams, of which k changed words change 5 k."""
    draw, texts = random.Random(0), []
    for pair in range(100):
        words = ["".join(draw.choices("abcdefghij", k=8)) for _ in range(104)]
        changes = 2 if pair < 50 else 7
        changed = {10 + 12 * i for i in range(changes)}
        other = [f"{word}z" if i in changed else word for i, word in enumerate(words)]
        texts += [" ".join(words), " ".join(other)]
    kept = {*clean(tmp_path, texts, "near")[0]}
    found = [len({*texts[2 * i : 2 * i + 2]} - kept) for i in range(100)]
    for changes, number in ((2, sum(found[:50])), (7, sum(found[50:]))):
        jaccard = (100 - 5 * changes) / (100 + 5 * changes)
        share = 1 - (1 - jaccard**8) ** 14
        assert abs(number - 50 * share) < 3 * (50 * share * (1 - share)) ** 0.5, changes


@datatrove
@pytest.mark.parametrize("language", ["zh", "ja", "th"])
def test_near_duplicates_in_scripts_without_spaces(language, tmp_path):
    """One more character at the beginning must not change all later words."""
    text = re.sub(r"[\s，、。]", "", ARTICLES[language])
    assert len(clean(tmp_path, [text, text[5] + text], "near")[0]) == 1


def corpus(folder):
    """Three files in two languages, and the arguments that clean them."""
    for number, language in enumerate(("en", "en", "mt")):
        (folder / language).mkdir(exist_ok=True)
        texts = [page(10 * number + i % 8) + " #" * (i % 3 == 0) * 40 for i in range(12)]
        write(folder / language / f"{number}.jsonl", texts)
    return ("clean", "--language", f"en={folder / 'en'}", "--language", f"mt={folder / 'mt'}")


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.json*")}


@datatrove
def test_the_options_reach_the_reader_and_the_executor(tmp_path, monkeypatch):
    from fastenc.data import cleaning_run

    workers = []

    class Executor(cleaning_run.LocalPipelineExecutor):
        def __init__(self, *arguments, **options):
            workers.append(options["workers"])
            super().__init__(*arguments, **(options | {"workers": 1}))

    monkeypatch.setattr(cleaning_run, "LocalPipelineExecutor", Executor)
    (tmp_path / "in.tsv").write_text('text\tbody\nno\t"a ""quoted"" text"\n')
    options = ("--text", "body", "--quoting", "csv", "--processes", 2, "--steps", "exact")
    run("clean", tmp_path / "in.tsv", "-o", tmp_path / "out", *options)
    assert read_texts(tmp_path / "out" / "text" / "00000.jsonl") == ['a "quoted" text']
    assert workers == [2] * 4


@datatrove
def test_a_run_is_not_continued_with_other_options_or_twice_at_once(tmp_path, capsys):
    """The first run ends at a malformed file."""
    (tmp_path / "in.tsv").write_text("text\tbody\na\tb\nc\n")
    (tmp_path / "bad").write_text("darn\n")
    command = ("clean", tmp_path / "in.tsv", "-o", tmp_path / "out")
    assert "in.tsv, line 3" in failure(capsys, *command)
    for name, options in {
        "files": ("--language", f"en={tmp_path / 'in.tsv'}"),
        "steps": ("--steps", "exact"),
        "english": ("--english",),
        "--bad-words": ("--bad-words", tmp_path / "bad"),
        "column": ("--text", "body"),
        "quoting": ("--quoting", "csv"),
    }.items():
        given = ("clean", *command[2:]) if name == "files" else command
        assert f"was begun with {name}=" in failure(capsys, *given, *options, "--resume")
    with open_locked(tmp_path / "out" / "work" / "lock"):
        for resume in ((), ("--resume",)):
            text = failure(capsys, *command, *resume)
            assert f"{tmp_path / 'out'} is the output of another run: wait for it" in text


KILLED = """
import os, signal
os.setsid()  # a process group of its own: the executor's helper process outlives a kill, and must be ended too
from datatrove.executor.local import LocalPipelineExecutor
from fastenc.cli import main
real, calls = LocalPipelineExecutor.mark_rank_as_completed, [0]
def kill(*arguments):
    calls[0] += 1
    if calls[0] == {call_number}:
        os.killpg(0, signal.SIGKILL)
    real(*arguments)
LocalPipelineExecutor.mark_rank_as_completed = kill
main()
"""


@datatrove
@pytest.mark.parametrize("call_number", [2, 9])
def test_a_killed_cleaning_goes_on_without_losing_or_repeating(call_number, tmp_path, capsys):
    command = corpus(tmp_path)
    run(*command, "-o", tmp_path / "whole")
    killed = [*map(str, command), "-o", str(tmp_path / "killed")]
    done = python("-c", KILLED.format(call_number=call_number), *killed, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert "holds a cleaning run that did not finish: continue it with --resume" in failure(
        capsys, *killed
    )
    other = failure(capsys, *killed, "--english", "--resume")
    assert "was begun with english=False, got True" in other
    run(*killed, "--resume")
    expected = files(tmp_path / "whole")
    assert {"en/00000.jsonl", "mt/00002.jsonl", "report.json"} <= expected.keys()
    assert files(tmp_path / "killed") == expected
    again = failure(capsys, *command, "-o", tmp_path / "whole")
    assert "must be an empty folder or hold a run that did not finish" in again
    assert files(tmp_path / "whole") == expected
    report = json.loads(expected["report.json"])
    assert report["documents"] == {"read": 36, "kept": 18 + 3}, "8 pages a file, a third with signs"


@datatrove
@pytest.mark.parametrize("executor", ["slurm", "ray"])
def test_the_printed_program_cleans_likewise(executor, tmp_path):
    """With the local executor in place of the cluster's."""
    command = corpus(tmp_path)
    run(*command, "-o", tmp_path / "here")
    program = run(*command, "-o", tmp_path / "there", "--script", executor)
    assert not (tmp_path / "there").exists()
    stand_in = (
        "import sys, types\nfrom datatrove.executor.local import LocalPipelineExecutor as Local\n"
        "class Stage(Local):\n"
        "    def __init__(self, pipeline, time=None, partition=None, **options):\n"
        "        super().__init__(pipeline, workers=1, **options)\n"
        f"name = {executor!r}\nmodule = types.ModuleType('datatrove.executor.' + name)\n"
        "setattr(module, name.capitalize() + 'PipelineExecutor', Stage)\n"
        "sys.modules[module.__name__] = module\n"
    )
    done = python("-c", stand_in + program, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, content in files(tmp_path / "here").items():
        if name != "report.json":
            assert (tmp_path / "there" / name).read_bytes() == content


@datatrove
def test_bad_input_is_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    command = ("clean", tmp_path / "a.txt", "-o", tmp_path / "o")
    assert "steps must be some of gopher, c4" in failure(capsys, *command, "--steps", "c5")
    assert "executor (--script) must be slurm or ray" in failure(
        capsys, *command, "--script", "k8s"
    )
    for language in ("work", "dropped", "report.json", "../elsewhere"):
        named = ("clean", "--language", f"{language}={tmp_path / 'a.txt'}", "-o", tmp_path / "o")
        message = "language must not be work, dropped, report.json, which the output folder"
        assert message in failure(capsys, *named)
        assert message in failure(capsys, *named, "--script", "slurm")
    few = failure(capsys, *command, "--processes", 0)
    assert "--processes must be at least 1, got 0: give more" in few
    assert not (tmp_path / "o").exists()
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    bad = ("clean", tmp_path / "bad.txt", "-o", tmp_path / "p")
    assert "bad.txt, line 1: not UTF-8" in failure(capsys, *bad)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    message = "none of 2 documents was kept (2 empty): look at the texts"
    assert message in failure(capsys, "clean", tmp_path / "empty.jsonl", "-o", tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datatrove", None)
    (tmp_path / "a.txt").write_text("text")
    text = failure(capsys, "clean", tmp_path / "a.txt", "-o", tmp_path / "o")
    assert "pip install 'fastenc[clean]'" in text
