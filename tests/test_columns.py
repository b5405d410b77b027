import gzip

import pytest

from fastenc.data import read_tagged, read_words

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
        found = [each.text[s : s + len(w)] for s, w in zip(each.starts, each.words, strict=True)]
        assert found == each.words


def test_entity_tags_are_converted(tmp_path):
    path = write(tmp_path / "x.conll", "a I-P\nb I-P\nc B-P\nd O\n")  # IOB1
    assert tags(read_tagged(path, tag_scheme="iob2")) == [["B-P", "I-P", "B-P", "O"]]
    data = read_tagged(path, tag_scheme="bioes")
    assert tags(data) == [["B-P", "E-P", "S-P", "O"]]
    assert data.label_names == ["O", "B-P", "I-P", "E-P", "S-P"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.conll", "a\tO\nb\n", r"x.conll, line 2: 1 columns where line 1 has 2: is a word or"),
        ("x.conll", "a\tO\n\tO\n", r"x.conll, line 2: no word in column 1: fill it in"),
        ("x.conll", "a\tO\nb\t\n", r"x.conll, line 2: no tag in column 2: fill it in"),
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
            r"x.conllu, line 1: tag_column must be from 1 .* 3 columns, got 4",
        ),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read_tagged(path, label_names=["O", "B-PER"])


def test_other_errors(tmp_path):
    path = write(tmp_path / "x.conll", "a\tO\n")
    with pytest.raises(
        ValueError, match=r"word_column must be from 1 to the line's 2 columns, got 3"
    ):
        read_words(path, 3)
    with pytest.raises(ValueError, match=r"tag_scheme must be one of .*, got 'iob1'"):
        read_tagged(path, tag_scheme="iob1")
    with pytest.raises(ValueError, match=r"empty.txt holds no words"):
        read_words(write(tmp_path / "empty.txt", "\n \n"))
    with pytest.raises(ValueError, match=r"nowhere.conll is not a file"):
        read_words(tmp_path / "nowhere.conll")


def test_real_files(data_dir):
    wnut = read_tagged(data_dir / "wnut17" / "train.conll.gz")
    assert len(wnut) == 3394 and len(wnut.label_names) == 13
    assert sum(tag.startswith("B-") for each in wnut.sentences for tag in each.tags) == 1975
    dev = read_tagged(data_dir / "ud_english_ewt" / "dev.conllu.gz")
    assert len(dev) == 2001 and sum(map(len, words(dev))) == 25147 and len(dev.label_names) == 17
    german = read_tagged(data_dir / "germeval2014_nested" / "dev.conll.gz", tag_column=2)
    assert len(german) == 2200 and sum(map(len, words(german))) == 41653
