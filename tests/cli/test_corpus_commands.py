"""The commands that prepare a corpus, and pretraining on a store, from files to files."""

import json
import signal

import pytest

from fastenc.cli import corpus
from fastenc.data import TokenStore
from fastenc.objectives import OBJECTIVES
from fastenc.text import load_tokenizer, save_tokenizer
from fastenc.train.log import read_log
from tests.helpers.commands import failure, run
from tests.helpers.processes import python
from tests.helpers.training_run import assert_bitwise_equal, documents, weights, word_tokenizer

MODEL = ("--layers", 2, "--hidden", 32, "--heads", 2, "--block-size", 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer = word_tokenizer()
    # The objectives of encoder-decoders need T5's sentinels and UL2's modes.
    tokenizer.add_special_tokens(["[R]", "[S]", "[X]", *(f"<extra_id_{i}>" for i in range(20))])
    save_tokenizer(tokenizer, folder / "tokenizer")
    (folder / "en.txt").write_text("\n\n".join(documents(120)))
    (folder / "mt.txt").write_text("\n\n".join(reversed(documents(30))))
    return folder


@pytest.fixture(scope="module")
def store(folder):
    languages = ("--language", f"en={folder / 'en.txt'}", "--language", f"mt={folder / 'mt.txt'}")
    options = ("--tokenizer", folder / "tokenizer", "--shard-characters", 4000)
    text = run("prepare", *languages, *options, "-o", folder / "store")
    made = TokenStore(folder / "store")
    assert f"{made.tokens:,} tokens in {len(made.shards)} shards" in text
    assert made.languages == ["en", "mt"]
    assert "shards" in run("prepare", *languages, *options, "-o", folder / "store", "--resume")
    return folder / "store"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains_on_a_store_and_goes_on(objective, folder, store, tmp_path):
    options = ("--objective", objective, *MODEL, "--batch-tokens", 128)
    if objective == "distill":
        run("pretrain", store, "-o", tmp_path / "t", *MODEL, "--layers", 4, "--max-steps", 1)
        options = (*options, "--teacher", tmp_path / "t")
    run("pretrain", store, "-o", tmp_path / "a", *options, "--max-steps", 3)
    assert "perplexity" in run(
        "pretrain", store, "-o", tmp_path / "a", *options, "--max-steps", 3, "--resume"
    )
    tokens = [line["step"] for line in read_log(tmp_path / "a" / "log.jsonl") if "loss" in line]
    assert tokens == [3]


def test_unigram_replacements_and_other_held_out_texts(folder, store, tmp_path):
    options = (*MODEL, "--replacement", "unigram", "--dev", folder / "mt.txt", "--max-steps", 1)
    assert "perplexity" in run("pretrain", store, "-o", tmp_path, *options)


def test_a_killed_run_on_a_store_sees_every_example_once(store, tmp_path):
    """Killed by SIGKILL in the middle of the second epoch; the weights are those of a run that was not killed."""
    command = (
        *("pretrain", store, *MODEL, "--batch-tokens", 192, "--epochs", 2),
        *("--save-every", 3, "--alpha", 0.7),
    )
    run(*command, "-o", tmp_path / "whole")
    code = (
        "import json, os, signal, sys\n"
        "from fastenc.train.loop import Trainer\n"
        "real = Trainer._optimiser_step\n"
        "def step(self, batches):\n"
        "    if self.step == self.schedule.steps(0) + 5:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(self, batches)\n"
        "Trainer._optimiser_step = step\n"
        "from fastenc.cli import main\n"
        "sys.argv = ['fastenc', *json.loads(sys.argv[1])]\n"
        "main()"
    )
    arguments = json.dumps([str(part) for part in (*command, "-o", tmp_path / "killed")])
    done = python("-c", code, arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run(*command, "-o", tmp_path / "killed", "--resume")
    assert_bitwise_equal(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


def test_tokenizers_of_languages_and_their_report(folder, tmp_path):
    languages = ("--language", f"en={folder / 'en.txt'}", "--language", f"mt={folder / 'mt.txt'}")
    options = ("--model-type", "bpe", "--vocab-size", 300)
    text = run("tokenizer", *languages, *options, "-o", tmp_path / "t", "--alpha", 0.5)
    assert "mt: " in text and "300 tokens in" in text
    assert "en" in run(
        "tokens", tmp_path / "t", folder / "tokenizer", *languages, "-o", tmp_path / "r"
    )
    report = json.loads((tmp_path / "r" / "tokens.json").read_text())
    assert list(report) == [str(tmp_path / "t"), str(folder / "tokenizer")]
    counts = report[str(folder / "tokenizer")]["en"]
    words = len(" ".join(documents(120)).split())
    assert counts["words"] == counts["tokens"] == words and counts["tokens_per_word"] == 1
    assert (tmp_path / "r" / "tokens.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "quoted.tsv").write_text('text\n"two ""words"""\n')
    command = ("tokens", tmp_path / "t", "--language", f"en={tmp_path / 'quoted.tsv'}")
    run(*command, "--quoting", "csv", "-o", tmp_path / "q")
    counts = json.loads((tmp_path / "q" / "tokens.json").read_text())[str(tmp_path / "t")]["en"]
    assert counts["words"] == 2 and counts["characters"] == len('two"words"')
    run("tokenizer", folder / "en.txt", "--vocab-size", 60, "-o", tmp_path / "w")


def test_texts_are_read_from_the_column_and_with_the_quotes_asked_for(folder, tmp_path):
    (tmp_path / "t.tsv").write_text('text\tbody\nno\t"the ""cat"" sat"\n')
    asked = ("--text", "body", "--quoting", "csv")
    run("tokenizer", tmp_path / "t.tsv", *asked, "--vocab-size", 60, "-o", tmp_path / "trained")
    trained = load_tokenizer(tmp_path / "trained")
    assert trained.decode(trained.encode('the "cat" sat').ids) == 'the " cat " sat'
    languages = ("--language", f"en={tmp_path / 't.tsv'}", *asked)
    run("tokenizer", *languages, "--vocab-size", 60, "-o", tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").get_vocab() == trained.get_vocab()
    run("tokens", tmp_path / "trained", *languages, "-o", tmp_path / "tokens")
    report = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    counts = report[str(tmp_path / "trained")]["en"]
    assert (counts["words"], counts["characters"]) == (3, len('the"cat"sat'))
    own = ("--tokenizer", tmp_path / "trained")
    run("prepare", tmp_path / "t.tsv", *asked, *own, "-o", tmp_path / "store")
    assert TokenStore(tmp_path / "store").tokens == counts["tokens"] + 1, "with a separator"


def test_languages_are_sampled_by_alpha_and_seed(folder, tmp_path, monkeypatch):
    """With alpha 1 every line is taken once."""
    taken, real = [], corpus.train_tokenizer

    def train(lines, **options):
        taken.append([*lines])
        assert options["lowercase"] is False
        return real(lines, **options)

    monkeypatch.setattr(corpus, "train_tokenizer", train)
    languages = ("--language", f"en={folder / 'en.txt'}", "--language", f"mt={folder / 'mt.txt'}")
    for number, (alpha, seed) in enumerate(((1, 0), (0.3, 1), (0.3, 1), (0.3, 2))):
        options = ("--alpha", alpha, "--seed", seed, "--vocab-size", 60)
        run("tokenizer", *languages, *options, "-o", tmp_path / str(number))
    every, first, again, other = taken
    texts = "\n".join([*documents(120), *reversed(documents(30))])
    assert every == texts.split("\n")
    assert first == again and first != other and sorted(first) != sorted(every)


def test_errors_are_one_line(folder, store, tmp_path, capsys):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"the cat\nsat \xff on\n")
    save_tokenizer(other := word_tokenizer(), tmp_path / "other")
    other.add_tokens(["more"])
    save_tokenizer(other, tmp_path / "other")
    run("prepare", folder / "en.txt", "--tokenizer", tmp_path / "other", "-o", tmp_path / "theirs")
    run("pretrain", store, "-o", tmp_path / "run", *MODEL, "--max-steps", 1)
    with_tokenizer = ("--tokenizer", folder / "tokenizer")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "settings.json").write_text("{}")
    for command, message in (
        (
            ("prepare", bad, *with_tokenizer, "-o", tmp_path / "s"),
            "bad.txt, line 2: not UTF-8 ('utf-8' codec can't decode byte 0xff in position 4",
        ),
        (("prepare", "-o", tmp_path / "s", *with_tokenizer), "give either texts or --language"),
        (
            ("pretrain", tmp_path / "theirs", "--from", tmp_path / "run", "-o", tmp_path / "x"),
            "holds tokens of another tokenizer",
        ),
        (
            ("pretrain", tmp_path / "begun", "-o", tmp_path / "x"),
            "must be a finished token store",
        ),
        (
            ("pretrain", store, folder / "en.txt", "-o", tmp_path / "x"),
            "a token store must be the only training data",
        ),
        (
            ("pretrain", store, "-o", tmp_path / "x", *MODEL, "--batch-tokens", 20),
            "--batch-tokens must hold the longest example, of 32 tokens, got 20",
        ),
        (("pretrain", store, "-o", tmp_path / "x", *MODEL, "--alpha", 2), "--alpha must be in"),
        (
            ("pretrain", store, "-o", tmp_path / "x", *MODEL, "--vocab-size", 60),
            "the tokenizer that it was prepared with, got --vocab-size: leave it out",
        ),
        (
            ("pretrain", store, "-o", tmp_path / "x", "--tokenizer", "bpe"),
            "the tokenizer that it was prepared with, got --tokenizer: leave it out",
        ),
        (
            ("tokenizer", folder / "en.txt", "--vocab-size", 3, "-o", tmp_path / "y"),
            "--vocab-size must hold the 5 special tokens and every character of the texts, got 3",
        ),
        (("tokens", tmp_path / "other"), "give --language name=file, got none"),
    ):
        assert message in failure(capsys, *command)
