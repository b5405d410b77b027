import json
import random
import re
import signal
import subprocess
import sys

import pytest

from fastenc.data import clean_files, read_texts
from fastenc.data.cleaning import Cleaner, shingles
from tests.helpers.commands import failure, run

PAGE = (
    "The first sentence has more than enough words. So has the second one here.\n"
    "A third follows on a line of its own."
)


def outcome(steps, *documents, **options):
    cleaner = Cleaner(steps, **options)
    kept = list(cleaner.clean(documents))
    return kept, cleaner.report()["dropped"]


def test_the_first_of_exact_duplicates_stays():
    kept, dropped = outcome(["exact"], "A b.\nC", "other", "a  B. c", " \n")
    assert kept == ["A b.\nC", "other"]
    assert dropped == {"document: empty": 1, "document: exact duplicate": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PAGE + "\nfunction() {}", "document: curly bracket"),
        (PAGE + "\nLorem ipsum dolor sit amet for ever.", "document: lorem ipsum"),
        (PAGE + "\nThis line of it has a darn word.", "document: bad word"),
        ("Only one sentence of several words here.", "document: fewer than three sentences"),
    ],
)
def test_documents_that_c4_drops(text, why):
    assert outcome(["c4"], text, bad_words=["darn"]) == ([], {why: 1})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("Home and news and sport and more", "line: no mark at its end"),
        ("A line that is cut off ...", "line: no mark at its end"),
        ("Another line that is cut off…", "line: no mark at its end"),
        ("Read more.", "line: fewer than five words"),
        ("Please enable Javascript to see this page.", "line: javascript"),
        ("By going on you accept our Privacy Policy.", "line: policy notice"),
    ],
)
def test_lines_that_c4_drops(line, why):
    assert outcome(["c4"], f"{line}\n{PAGE}") == ([PAGE], {why: 1})


def test_what_c4_keeps():
    """Citation markers go, "darned" is another word than "darn", and scripts without spaces have long words."""
    cited = PAGE.replace("here.", "darned[12] here[citation needed].")
    assert outcome(["c4"], cited, bad_words=["darn"])[0] == [PAGE.replace("here", "darned here")]
    chinese = (
        "这是一个足够长的句子，用来测试没有空格的文字系统。这里还有第二个句子。还有第三个句子。"
    )
    assert outcome(["c4"], chinese) == ([chinese], {})


def test_spans_of_three_sentences_stay_once():
    """By the definition: any three sentences in a row that an earlier place had are dropped there, no others."""
    own = " Then something that was never said before. And one thing more, quite new. A last one, new as well."
    kept, dropped = outcome(["c4"], PAGE, PAGE + own, own.strip().replace("A last", "The last"))
    assert kept[0] == PAGE and kept[1] == own.strip()
    assert dropped == {"sentence: in a span of three seen before": 3}
    assert len(kept) == 3, "two sentences in common are no span of three"


WORDS = [
    "the",
    "quick",
    "foxes",
    "of",
    "that",
    "forest",
    "have",
    "seen",
    "many",
    "people",
    "with",
    "dogs",
]
GOOD = " ".join(WORDS * 5) + "."


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (" ".join(WORDS * 4), "document: not 50 to 100,000 words"),
        (" ".join(WORDS * 9000), "document: not 50 to 100,000 words"),
        ("a of " * 40, "document: mean word length not 3 to 10"),
        ("international administration " * 40, "document: mean word length not 3 to 10"),
        (GOOD + " #" * 8, "document: more than one # or ellipsis for ten words"),
        (GOOD + " so…" * 8, "document: more than one # or ellipsis for ten words"),
        (
            "\n".join(f"- {' '.join(WORDS)}" for _ in range(9)),
            "document: over 90 % of lines with a bullet",
        ),
        (
            "\n".join([" ".join(WORDS * 2) + "..."] * 4 + [" ".join(WORDS)] * 9),
            "document: over 30 % of lines end in an ellipsis",
        ),
        (GOOD + " 12345" * 20, "document: under 80 % of words have a letter"),
        ("quick foxes saw many people " * 12, "document: fewer than two stop words"),
    ],
)
def test_documents_that_gopher_drops(text, why):
    assert outcome(["gopher"], text, english=True) == ([], {why: 1})


def test_what_gopher_keeps():
    assert outcome(["gopher"], GOOD, english=True) == ([GOOD], {})
    other = "quick foxes saw many people " * 12
    assert outcome(["gopher"], other) == ([other], {})


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


@pytest.mark.parametrize("language", ARTICLES)
def test_scripts_without_spaces_or_with_their_own_marks_are_kept(language):
    text = ARTICLES[language]
    assert outcome(["exact", "c4", "gopher"], text) == ([text], {})
    short = text[: len(text) // 6]
    assert outcome(["gopher"], short) == ([], {"document: not 50 to 100,000 words": 1})


def test_spans_of_documents_that_a_later_step_drops_are_not_seen():
    page = " ".join(f"{number} {GOOD}" for number in ("One", "Two", "Three"))
    spoilt = f"{page}\n{'12345 ' * 80}."
    kept, dropped = outcome(["c4", "gopher"], spoilt, page, page)
    assert kept == [page]
    assert dropped == {
        "document: under 80 % of words have a letter": 1,
        "sentence: in a span of three seen before": 3,
        "document: fewer than three sentences": 1,
    }


def test_lines_of_menus_are_dropped_in_scripts_without_spaces():
    for language, line in (("zh", "首页 新闻"), ("zh", "点击这里。"), ("th", "หน้าแรก ข่าว")):
        kept, dropped = outcome(["c4"], f"{line}\n{ARTICLES[language]}")
        assert kept == [ARTICLES[language]] and sum(dropped.values()) == 1


def test_near_duplicates_are_those_of_the_exact_similarity():
    """Against Jaccard similarities computed outright: far above the threshold dropped, far below kept."""
    draw = random.Random(0)
    words = [f"w{i}" for i in range(5000)]
    base = [draw.choice(words) for _ in range(400)]

    def changed(count):
        text = list(base)
        for place in draw.sample(range(400), count):
            text[place] = draw.choice(words)
        return " ".join(text)

    texts = [" ".join(base), changed(3), changed(60), changed(2), "another text of six words"]
    jaccard = lambda a, b: len(a & b) / len(a | b)
    similar = [jaccard(shingles(text), shingles(texts[0])) for text in texts]
    assert min(similar[1], similar[3]) > 0.9 and similar[2] < 0.5
    kept, dropped = outcome(["near"], *texts)
    assert kept == [texts[0], texts[2], texts[4]] and dropped == {"document: near duplicate": 2}
    thai = "ภาษาไทยเป็นภาษาที่ไม่มีช่องว่างระหว่างคำ" * 3
    assert len(outcome(["near"], thai, thai[:-1])[0]) == 1


def test_the_command_writes_texts_and_a_report_and_the_same_again(tmp_path):
    pages = [PAGE, PAGE, PAGE.replace("first", "other") + " Read on: a fourth sentence is here."]
    (tmp_path / "en.txt").write_text("\n\n".join(pages))
    (tmp_path / "bad").write_text("darn\n")
    command = ("clean", tmp_path / "en.txt", "--steps", "exact,c4", "--bad-words", tmp_path / "bad")
    text = run(*command, "-o", tmp_path / "a")
    assert "document: exact duplicate   e.g. 'The first" in text
    assert "2 of 3 documents kept" in text
    assert read_texts(tmp_path / "a" / "text.jsonl") == [pages[0], pages[2]]
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["documents"] == {"read": 3, "kept": 2}
    assert report["dropped"] == {"document: exact duplicate": 1}
    assert report["examples"] == {"document: exact duplicate": [PAGE]}
    run(*command, "-o", tmp_path / "b")
    for name in ("text.jsonl", "report.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


STEPS_OF_THE_KILLED = "exact,c4,near"


def pages(count):
    """Half of them seen before: exactly, in three sentences, or nearly."""
    draw = random.Random(1)
    words = [f"word{i}" for i in range(300)]
    sentence = lambda: " ".join(draw.choices(words, k=9)) + "."
    made: list[str] = []
    while len(made) < count:
        made.append(" ".join(sentence() for _ in range(20)))
        again = draw.choice(made)
        change = draw.randrange(6)
        if change == 0:
            made.append(again)
        elif change == 1:
            made.append(" ".join([*re.split(r"(?<=\.) ", again)[:3], *map(str, made[-1:])]))
        elif change == 2:
            made.append(again.replace("word1 ", "word2 "))
    return made[:count]


KILLED = """
import os, signal, sys
from fastenc.cli import main
from fastenc.data import clean_files
clean_files.CHUNK = 20
owner = clean_files if {name!r} != "replace" else clean_files.os
real, calls = getattr(owner, {name!r}), [0]
def kill(*arguments, **options):
    calls[0] += 1
    if calls[0] == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr(owner, {name!r}, kill)
main()
"""


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("_append", 14),  # between two files of a part
        ("_note", 3),  # all files of a part are written, not noted
        ("replace", 13),  # notes are replaced too: one of two files is published
    ],
)
def test_a_killed_cleaning_goes_on_without_losing_or_repeating(
    name, call, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(clean_files, "CHUNK", 20)
    every = pages(200)
    for language, own in (("en", every[:120]), ("mt", every[120:])):
        (tmp_path / f"{language}.txt").write_text("\n\n".join(own))
    command = ["clean", "--steps", STEPS_OF_THE_KILLED]
    for language in ("en", "mt"):
        command += ["--language", f"{language}={tmp_path / language}.txt"]
    run(*command, "-o", tmp_path / "whole")
    killed = [*command, "-o", str(tmp_path / "killed")]
    code = KILLED.format(name=name, call=call)
    done = subprocess.run([sys.executable, "-c", code, *killed], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if (tmp_path / "killed" / "unfinished" / "progress.json").exists():
        assert "holds a cleaning that did not end: resume it" in failure(capsys, *killed)
        other = failure(capsys, *killed, "--threshold", 0.7, "--resume")
        assert "was begun with threshold=0.8, now it is 0.7" in other
    run(*killed, "--resume")
    names = {path.name for path in (tmp_path / "killed").iterdir()}
    assert names == {"en.jsonl", "mt.jsonl", "report.json"}
    for file in names:
        expected = (tmp_path / "whole" / file).read_bytes()
        assert (tmp_path / "killed" / file).read_bytes() == expected
    dropped = json.loads((tmp_path / "whole" / "report.json").read_text())["dropped"]
    assert len(dropped) == 3 and min(dropped.values()) > 3, "every step has something to remember"


def test_a_cleaning_goes_on_with_the_same_texts_only(tmp_path, monkeypatch):
    monkeypatch.setattr(clean_files, "CHUNK", 20)

    def broken():
        yield from pages(50)
        raise ValueError("x.txt, line 9: not UTF-8")

    clean = lambda texts, resume: clean_files.clean_files(
        Cleaner(["exact"]), {"": texts}, tmp_path, {"steps": ["exact"]}, resume=resume
    )
    with pytest.raises(ValueError, match="line 9"):
        clean(broken(), False)
    for texts in (["another", *pages(50)[1:]], pages(50)[:30]):
        with pytest.raises(ValueError, match="was begun with other texts than those given now"):
            clean(texts, True)
    report = clean(pages(60), True)
    kept, dropped = outcome(["exact"], *pages(60))
    assert report["documents"] == {"read": 60, "kept": len(kept)} and report["dropped"] == dropped
    assert read_texts(tmp_path / "text.jsonl") == kept


def test_bad_input_is_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    command = ("clean", tmp_path / "a.txt", "-o", tmp_path / "o")
    assert "steps must be some of exact, c4" in failure(capsys, *command, "--steps", "c5")
    assert "threshold must be a similarity" in failure(capsys, *command, "--threshold", "1")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    bad = ("clean", tmp_path / "bad.txt", "-o", tmp_path / "p")
    assert "bad.txt, line 1: not UTF-8" in failure(capsys, *bad)
    assert not (tmp_path / "p").exists(), "half of an output is left"
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    message = "none of 2 documents was kept (2 document: empty): look at the texts"
    assert message in failure(capsys, "clean", tmp_path / "empty.jsonl", "-o", tmp_path / "q")
    assert not (tmp_path / "q").exists()
