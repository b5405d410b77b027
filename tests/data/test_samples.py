"""The files for the commands of the documents."""

import re

from fastenc.data import read_labelled, read_tagged, read_texts
from fastenc.data.entities import read_entities
from fastenc.data.pairs import read_pairs
from fastenc.data.questions import read_questions
from fastenc.data.samples import sample_files, write_samples
from fastenc.data.senses import read_senses
from tests.helpers import ROOT
from tests.helpers.commands import failure, run

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_the_files_are_read_by_their_readers(tmp_path):
    write_samples(tmp_path)
    assert (
        len(read_texts(tmp_path / "wiki.txt.gz"))
        == len(read_texts(tmp_path / "mt/texts.txt"))
        == 40
    )
    assert read_labelled(tmp_path / "train.tsv").label_names == ["negative", "positive"]
    assert read_pairs(tmp_path / "stsb.tsv", similarity="score").highest == 5.0
    assert {target.lemma for target in read_senses(tmp_path / "senses.tsv").targets} == {"bank"}
    assert {len(each.answers) for each in read_questions(tmp_path / "questions.jsonl")} == {1}
    assert read_tagged(tmp_path / "train.conll").label_names[0] == "O"
    assert len(read_entities(tmp_path / "german.conll", inner_tag_column=(3,)).entities[0]) == 3


def test_every_file_that_a_command_of_the_documents_reads_is_there():
    """Names with a suffix of data files, except those after -o, which a command writes."""
    commands = [
        line.removeprefix("fastenc ")
        for page in PAGES
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(commands) > 20
    for command in commands:
        inputs = re.sub(r"(-o|--output) \S+", "", command)
        named = re.findall(r"\b[\w/.]+\.(?:tsv|conll|txt\.gz|txt|jsonl)\b", inputs)
        assert set(named) <= sample_files().keys(), command


def test_no_file_is_overwritten_unless_it_is_asked_for(tmp_path, capsys):
    run("samples", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run("samples", tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "train.tsv").write_text("mine")
    (tmp_path / "en" / "texts.txt").unlink()
    text = failure(capsys, "samples", tmp_path)
    assert "train.tsv exists with another content: give another folder, or replace" in text
    assert text.strip().endswith("with --overwrite")
    assert not (tmp_path / "en" / "texts.txt").exists()
    run("samples", tmp_path, "--overwrite")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
