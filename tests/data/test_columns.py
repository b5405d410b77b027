import gzip
import warnings

import pytest
import regex

from fastenc.data import read_tagged, read_words
from fastenc.data.senses import read_senses

CONLLU = """# sent_id = 1
# text = He didn't
1\tHe\the\tPRON\tPRP\t_\t2\tnsubj\t_\t_
2-3\tdidn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdid\tdo\tAUX\tVBD\t_\t0\troot\t_\t_
3\tn't\tnot\tPART\tRB\t_\t2\tadvmod\t_\t_
3.1\tgone\tgo\tVERB\tVBN\t_\t_\t_\t_\t_

# sent_id = 2
1\t20 000\t20000\tNUM\tCD\t_\t0\troot\t_\t_
"""


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def words(data):
    return [each.words for each in data.sentences]


def tags(data):
    return [each.tags for each in data.sentences]


@pytest.mark.parametrize("between", ["\t", " ", "  "])
def test_columns_and_sentences(tmp_path, between):
    lines = ["-DOCSTART- -X- O", "", "EU NNP B-ORG", "# NN O", "", "", "it PRP O"]
    path = write(tmp_path / "x.conll", "\r\n".join(line.replace(" ", between) for line in lines))
    data = read_tagged(path)
    assert words(data) == [["EU", "#"], ["it"]] and tags(data) == [["B-ORG", "O"], ["O"]]
    assert data.label_names == ["O", "B-ORG", "I-ORG"]
    assert [each.lines for each in data.sentences] == [[3, 4], [7]]
    assert tags(read_tagged(path, tag_column=2)) == [["NNP", "NN"], ["PRP"]]
    assert words(read_tagged(path, word_column=2)) == [["NNP", "NN"], ["PRP"]]
    assert words(read_words(path)) == words(data) and tags(read_words(path)) == [[], []]


def test_comments_are_no_hash_tags(tmp_path):
    content = "# \tO\n\n# id 7, from a forum\n#wow\tO\n# \tO\n#\tO\n\n# one more\nyes\tO\n"
    data = read_tagged(write(tmp_path / "x.conll.gz", gzip.compress(content.encode())))
    assert words(data) == [["# "], ["#wow", "# ", "#"], ["yes"]]
    spaced = write(tmp_path / "y.conll", "# id 7 and so on\n#wow O\n\n# O\nyes O\n")
    assert words(read_tagged(spaced)) == [["#wow"], ["#", "yes"]]


def test_conllu(tmp_path):
    path = write(tmp_path / "x.conllu", CONLLU)
    data = read_tagged(path)
    assert words(data) == [["He", "did", "n't"], ["20 000"]]
    assert tags(data) == [["PRON", "AUX", "PART"], ["NUM"]]
    assert data.label_names == ["AUX", "NUM", "PART", "PRON"]
    assert tags(read_tagged(path, tag_column=5)) == [["PRP", "VBD", "RB"], ["CD"]]
    assert words(read_words(path)) == words(data)


def test_running_text_and_offsets(tmp_path):
    path = write(tmp_path / "x.txt", "Dr. Ada  went,\n\nO'Neil\n")
    data = read_words(path)
    assert words(data) == [["Dr", ".", "Ada", "went", ","], [], ["O", "'", "Neil"]]
    tagged = read_tagged(write(tmp_path / "x.conll", "Dr.\tO\nAda\tO\n"))
    assert tagged.sentences[0].text == "Dr. Ada"
    for each in (*data.sentences, *tagged.sentences):
        slices = [each.text[s : s + len(w)] for s, w in zip(each.starts, each.words, strict=True)]
        assert slices == each.words


def test_words_of_every_script_are_whole(tmp_path):
    """Marks and joiners belong to words, as by Unicode's rule, which the library regex follows."""
    lines = ["हिन्दी में लिखा है।", "un cafe\u0301, s'il", "می\u200cخواهم", "ශ්\u200dරී ලංකා", "a_b 3.5"]
    data = read_words(write(tmp_path / "x.txt", "\n".join([*lines, "I \u2764\ufe0f it"])))
    *plain, with_symbol = words(data)
    assert plain == [regex.findall(r"\w+|[^\w\s]", line) for line in lines]
    assert with_symbol == ["I", "\u2764\ufe0f", "it"], "a variation selector is no word"
    for each in data.sentences:
        for word, start in zip(each.words, each.starts, strict=True):
            assert each.text[start : start + len(word)] == word


def test_entity_tags_are_converted(tmp_path):
    path = write(tmp_path / "x.conll", "a I-P\nb I-P\nc B-P\nd O\n")  # IOB1
    assert tags(read_tagged(path, tag_scheme="iob2")) == [["B-P", "I-P", "B-P", "O"]]
    data = read_tagged(path, tag_scheme="bioes")
    assert tags(data) == [["B-P", "E-P", "S-P", "O"]]
    assert data.label_names == ["O", "B-P", "I-P", "E-P", "S-P"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "x.conll",
            "a\tO\nb\n",
            r"x.conll, line 2: each line must have 2 columns as line 1 has, got 1: add",
        ),
        (
            "x.conll",
            "a\tO\n\tO\n",
            r"x.conll, line 2: column 1 must hold a word, got nothing: fill it in",
        ),
        (
            "x.conll",
            "a\tO\nb\t\n",
            r"x.conll, line 2: column 2 must hold a tag, got nothing: fill it in",
        ),
        ("x.conll", b"a\tO\n\xff\tO\n", r"x.conll, line 2: not UTF-8"),
        (
            "x.conll",
            "a\tO\n\nb\tB-LOC\n",
            r"x.conll, line 3: the tag 'B-LOC' of the word 'b' is not one of .*\['O', 'B-PER'\]: ",
        ),
        ("x.conll", "\n# nothing\n\n", r"x.conll holds no sentences: give a file with a word"),
        (
            "x.conllu",
            "1\ta\tb\n",
            r"x.conllu, line 1: tag_column must be from 1 to 3, .* got 4",
        ),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read_tagged(path, label_names=["O", "B-PER"])


@pytest.mark.parametrize(
    "name, content", [("x.csv", "London,B-LOC\n"), ("x.jsonl.gz", "{}\n"), ("x.json", "[]\n")]
)
def test_files_of_another_kind_are_refused(tmp_path, name, content):
    content = gzip.compress(content.encode()) if name.endswith(".gz") else content
    path = write(tmp_path / name, content)
    message = rf"{name}: words are read from .*, got a .{name.split('.')[1]} file: give a file"
    for read in (read_tagged, read_words):
        with pytest.raises(ValueError, match=message):
            read(path)


def test_tables_of_texts_are_no_columns(tmp_path):
    rows = "".join(f"{words}\t1\n" for words in ("a good film", "a bad one", "so so"))
    path = write(tmp_path / "x.tsv", f"sentence\tlabel\n{rows}")
    for read in (read_tagged, read_words):
        with pytest.raises(
            ValueError, match=r"x.tsv, line 2: column 1 must hold .* 'a good film': give words"
        ):
            read(path)
    few = "In\tADP\nall\tDET\n20 000\tNUM\n\nPhnom Penh\tPROPN\n"
    columns = words(read_words(write(tmp_path / "y.tsv", few)))
    assert columns == [["In", "all", "20 000"], ["Phnom Penh"]]
    assert words(read_words(write(tmp_path / "z.conll", "New York\tLOC\n"))) == [["New York"]]


def test_words_and_tags_are_two_columns(tmp_path):
    one = write(tmp_path / "x.conll", "\nLondon,B-LOC\nis,O\n")
    message = r"x.conll, line 2: words and tags must be in two columns, got column 1 of 1 for both"
    with pytest.raises(ValueError, match=message):
        read_tagged(one)
    assert words(read_words(one)) == [["London,B-LOC", "is,O"]]
    two = write(tmp_path / "y.conll", "London B-LOC\n")
    with pytest.raises(
        ValueError, match=r"got column 1 of 2 for both: give a file with a word and"
    ):
        read_tagged(two, tag_column=1)
    assert tags(read_tagged(two, word_column=2, tag_column=1)) == [["London"]]


@pytest.mark.parametrize("tag", ["Z", "b-LOC", "U-LOC", "B-", "0"])
def test_a_mistyped_tag_of_entities_is_named(tmp_path, tag):
    path = write(tmp_path / "x.conll", f"in O\nParis B-LOC\n\nnow {tag}\n")
    message = (
        rf"x.conll, line 4: the tag '{tag}' of the word 'now' is neither an IOB2 nor a BIOES tag,"
    )
    with pytest.warns(UserWarning, match=message):
        read_tagged(path)
    for names in (None, ["O", "B-LOC", "I-LOC"]):
        with pytest.raises(ValueError, match=message):
            read_tagged(path, label_names=names, tag_scheme="bioes")


def test_tags_to_convert_are_of_entities(tmp_path):
    path = write(tmp_path / "x.conllu", CONLLU)
    with pytest.raises(
        ValueError, match=r"line 3: the tag 'PRON' of the word 'He' is neither an IOB2"
    ):
        read_tagged(path, tag_scheme="iob2")


def test_parts_of_speech_are_no_mistyped_tags(tmp_path):
    plain = ["-LRB-", "WP$", "NN|SYM", "HYPH", "X-SYM", "O", "ADJ-B", "''"]
    content = "".join(f"word {tag}\n" for tag in plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tags(read_tagged(write(tmp_path / "x.conll", content))) == [plain]
    arabic = write(tmp_path / "y.conll", "wa C---------\nhu S----3MS2-\n")
    with pytest.warns(
        UserWarning, match=r"line 1: the tag 'C---------' of the word 'wa' is neither"
    ):
        data = read_tagged(arabic)
    assert data.label_names == ["C---------", "S----3MS2-"]


def test_other_errors(tmp_path):
    path = write(tmp_path / "x.conll", "a\tO\n")
    for column in (3, 0):
        message = rf"word_column must be from 1 to 2, the number of columns .*, got {column}"
        with pytest.raises(ValueError, match=message):
            read_words(path, column)
        with pytest.raises(ValueError, match=message):
            read_tagged(path, column)
    with pytest.raises(ValueError, match=r"tag_column must be from 1 to 2, .*, got 0"):
        read_tagged(path, tag_column=0)
    with pytest.raises(ValueError, match=r"tag_scheme must be one of .*, got 'iob1'"):
        read_tagged(path, tag_scheme="iob1")
    with pytest.raises(ValueError, match=r"empty.txt holds no words"):
        read_words(write(tmp_path / "empty.txt", "\n \n"))
    with pytest.raises(ValueError, match=r"nowhere.conll is not a file"):
        read_words(tmp_path / "nowhere.conll")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"tokens": [["a"]]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"words are read from files .*, got a data set: give"):
        read_senses(tmp_path / "saved")


def test_real_files(data_dir):
    wnut = read_tagged(data_dir / "wnut17" / "train.conll.gz")
    assert len(wnut) == 3394 and len(wnut.label_names) == 13
    assert sum(tag.startswith("B-") for each in wnut.sentences for tag in each.tags) == 1975
    dev = read_tagged(data_dir / "ud_english_ewt" / "dev.conllu.gz")
    assert len(dev) == 2001 and sum(map(len, words(dev))) == 25147 and len(dev.label_names) == 17
    for part, column in (("dev", 5), ("test", 4), ("test", 5)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read_tagged(data_dir / "ud_english_ewt" / f"{part}.conllu.gz", tag_column=column)
    # A file of columns whose name ends in .tsv, with a space in one word.
    senses = read_tagged(data_dir / "wsd_allwords" / "semeval2013_en.tsv.gz", tag_column=3)
    assert len(senses) == 306
    german = read_tagged(data_dir / "germeval2014_nested" / "dev.conll.gz", tag_column=2)
    assert len(german) == 2200 and sum(map(len, words(german))) == 41653
