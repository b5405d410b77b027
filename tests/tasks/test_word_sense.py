"""Word senses, compared with centroids computed by numpy and scikit-learn; the commands from files to files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score
from sklearn.metrics.pairwise import cosine_similarity
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer

from fastenc.data import train_tokenizer
from fastenc.data.senses import SenseData, Target, encode_senses, read_senses
from fastenc.models import Encoder, WordSenseModel
from fastenc.models.heads.sense_model import nearest
from fastenc.tasks import WordSense
from fastenc.tasks.word_sense import SensePrediction, accuracy_by_lemma, sense_metrics
from fastenc.text.special_tokens import BERT_TOKENS
from fastenc.train import TrainConfig, task_trainer
from tests.helpers.commands import failure
from tests.helpers.commands import run as run_command
from tests.helpers.families import model

RIVER = ["the bank of a river", "a muddy bank near water", "water by the bank"]
MONEY = ["the bank lends money", "a bank of money", "money in a bank"]
SPRING = ["a spring of water", "the muddy spring", "spring near a river"]
SEASON = ["spring is warm", "the warm spring", "in spring it is warm"]
SENTENCES = [("bank", "river", RIVER), ("bank", "money", MONEY)]
SENTENCES += [("spring", "water", SPRING), ("spring", "season", SEASON)]


def table(path, rows, header="word\tindex\tsense\tsentence"):
    path.write_text("\n".join([header, *("\t".join(map(str, row)) for row in rows)]) + "\n")
    return path


def rows(which):
    return [
        (word, text.split().index(word), sense, text)
        for word, sense, texts in SENTENCES
        for text in texts[which]
    ]


@pytest.fixture
def base(tmp_path):
    texts = [text for *_, group in SENTENCES for text in group]
    tokenizer = train_tokenizer(texts, vocab_size=60)
    model("bert", num_hidden_layers=4, vocab_size=tokenizer.get_vocab_size()).save_pretrained(
        tmp_path / "base"
    )
    encoder = Encoder.from_pretrained(tmp_path / "base")
    encoder.tokenizer = tokenizer
    encoder.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def files(tmp_path):
    train = table(tmp_path / "train.tsv", rows(slice(0, 2)))
    return train, table(tmp_path / "dev.tsv", rows(slice(2, 3)))


def expected(base, train, dev, layers):
    """The nearest centroids, computed from word vectors."""
    encoder = Encoder.from_pretrained(base)
    vectors = {}
    for name, data in (("train", train), ("dev", dev)):
        word_vectors = encoder.embed_words(data.sentences, layers=layers)
        vectors[name] = np.stack([word_vectors[t.sentence][t.word].numpy() for t in data.targets])
    predicted = []
    for target, vector in zip(dev.targets, vectors["dev"], strict=True):
        senses = sorted({t.senses[0] for t in train.targets if t.lemma == target.lemma})
        own = lambda sense, target=target: [
            i
            for i, t in enumerate(train.targets)
            if (t.lemma, t.senses[0]) == (target.lemma, sense)
        ]
        centroids = np.stack([vectors["train"][own(sense)].mean(0) for sense in senses])
        predicted.append(senses[cosine_similarity(vector[None], centroids)[0].argmax()])
    return predicted


@pytest.mark.parametrize("layers", [[4], [1, 2, 3, 4], [0]])
def test_nearest_centroids_are_numpys(base, files, tmp_path, layers):
    task = WordSense(word_layers=",".join(map(str, layers)))
    train, dev = task.read(files[0]), task.read(files[1])
    ours = task.load(base, train)
    task.fit(ours, train, None, batch_size=3)
    assert ours.layers == layers
    senses = [prediction.sense for prediction in task.predict(ours, dev, batch_size=2)]
    assert senses == expected(base, train, dev, layers)
    gold = [target.senses[0] for target in dev.targets]
    metrics = task.evaluate(ours, dev, task.encode(dev, ours))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(gold, senses))
    assert "loss" not in metrics
    ours.save_pretrained(tmp_path / "saved")
    again = WordSenseModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again.inventory.vectors, ours.inventory.vectors)
    assert again.layers == layers and again.inventory.senses == ours.inventory.senses
    assert task.predict(again, dev) == task.predict(ours, dev)


@pytest.mark.parametrize(
    ("word", "letters", "max_length", "inside", "span"),
    [
        (6, 3, 20, "xxxxxxbBBxxxxx", (7, 10)),
        (6, 3, 9, "xxbBBxx", (3, 6)),
        (0, 3, 9, "bBBxxxx", (1, 4)),
        (11, 3, 9, "xxxxbBB", (5, 8)),
        (6, 9, 7, "bBBBB", (1, 6)),
    ],
)
def test_a_target_has_all_tokens_of_its_word_in_the_middle(word, letters, max_length, inside, span):
    """Of twelve words, the target alone has several tokens: b ##b ##b."""
    vocabulary = {t: i for i, t in enumerate([*BERT_TOKENS, "x", "b", "##b"])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    words = ["x"] * word + ["b" * letters] + ["x"] * (11 - word)
    data = SenseData([words], [Target(0, word, "b", (), "line 1")])
    (example,) = encode_senses(data, tokenizer, max_length)
    assert example.input_ids == [2, *(5 + "xbB".index(each) for each in inside), 3]
    assert example.spans == [span]


def test_layers_are_chosen_on_dev(base, files, tmp_path):
    task = WordSense()
    train, dev = task.read(files[0]), task.read(files[1])
    choices = [[1, 2, 3, 4], *([layer] for layer in range(5))]
    gold = [target.senses[0] for target in dev.targets]
    shares = [accuracy_score(gold, expected(base, train, dev, layers)) for layers in choices]
    trainer = task_trainer(
        task, task.load(base, train), train, TrainConfig(str(tmp_path / "run")), dev=dev
    )
    metrics = trainer.train()
    assert metrics["accuracy"] == pytest.approx(max(shares))
    assert trainer.model.layers == choices[int(np.argmax(shares))]
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == metrics


def test_the_metric_chooses_the_layers(base, files, tmp_path, monkeypatch):
    task = WordSense()
    train, dev = (task.read(path) for path in files)
    of_choices = [{"f1": 0.5, "macro_accuracy": share} for share in (0.1, 0.2, 0.3, 0.9, 0.4, 0.5)]
    monkeypatch.setattr(WordSense, "_compare", lambda *_: of_choices)
    config = TrainConfig(str(tmp_path / "run"))
    chosen = task_trainer(
        task, task.load(base, train), train, config, dev=dev, metric="macro_accuracy"
    )
    assert chosen.train() == of_choices[3] and chosen.model.layers == [2]


def test_from_files_to_files(base, files, tmp_path, capsys):
    run = str(tmp_path / "run")
    finetune = ["finetune", str(base), str(files[0]), "--task", "word-sense", "-o", run]
    run_command(*finetune, "--dev", str(files[1]))
    run_command("evaluate", run, str(files[1]), "-o", str(tmp_path / "test.json"))
    trained = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert json.loads((tmp_path / "test.json").read_text()) == pytest.approx(trained)
    unlabelled = table(
        tmp_path / "new.tsv",
        [(word, position, text) for word, position, _, text in rows(slice(2, 3))],
        "word\tindex\tsentence",
    )
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert " parameters, 0 of them trained" in card
    command = card.split("```sh\nfastenc ")[1].split("\n```")[0].split()
    run_command(
        *[str(unlabelled) if word == "words.tsv" else word for word in command[:-1]],
        str(tmp_path / "out.tsv"),
    )
    run_command("predict", run, str(unlabelled), "-o", str(tmp_path / "out.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["lemma"] for line in lines] == ["bank", "bank", "spring", "spring"]
    right = np.mean([a["sense"] == b[2] for a, b in zip(lines, rows(slice(2, 3)), strict=True)])
    assert right == pytest.approx(trained["accuracy"])
    header, *cells = (tmp_path / "out.tsv").read_text().splitlines()
    assert header == "lemma\tsense\tscore"
    assert [cell.split("\t")[1] for cell in cells] == [line["sense"] for line in lines]


def test_options_of_training_steps_are_refused(base, files, tmp_path, capsys):
    command = ("finetune", base, files[0], "--task", "word-sense", "-o", tmp_path / "run")
    for option, value in (("--epochs", 5), ("--learning-rate", 0.1)):
        text = failure(capsys, *command, option, value)
        assert f"{option} must be left out for word-sense, which is not trained by steps" in text
    assert not (tmp_path / "run").exists()


COLUMNS = """# d00 s1
The\tthe\tDT\t-\t-
bank\tbank\tNN\tbank%1\t001-n
lends\tlend\tVBZ\tlend%2;lend%3\t002-v;003-v
Grand_Jury\tgrand_jury\tNNP\t-\t-

banks\tbank\tNNS\tbank%2\t004-n
"""


def test_all_words_files(tmp_path):
    path = tmp_path / "all.tsv"
    path.write_text(COLUMNS)
    data = read_senses(path)
    assert data.sentences[0] == ["The", "bank", "lends", "Grand Jury"]
    assert [(t.sentence, t.word, t.lemma, t.senses) for t in data.targets] == [
        (0, 1, "bank.n", ("001-n",)),
        (0, 2, "lend.v", ("002-v", "003-v")),
        (1, 0, "bank.n", ("004-n",)),
    ]
    assert read_senses(path, sense_column=4).targets[1].senses == ("lend%2", "lend%3")
    every = read_senses(path, labelled=False).targets
    assert [t.lemma for t in every] == ["bank.n", "lend.v", "grand_jury.n", "bank.n"]
    assert every[0].senses == ()


def test_only_nouns_verbs_adjectives_and_adverbs_are_predicted(tmp_path):
    # The tags of Universal Dependencies and of the Penn Treebank.
    wanted = {"NOUN": "n", "VERB": "v", "ADJ": "a", "ADV": "r"}
    wanted |= {"NN": "n", "NNP": "n", "VBZ": "v", "JJR": "a", "RBS": "r"}
    others = ["NUM", "AUX", "ADP", "PRON", "DET", "PART", "RP", "MD", "IN", "CD"]
    path = tmp_path / "all.tsv"
    path.write_text("".join(f"w\t{tag}\t{tag}\t-\n" for tag in [*others, *wanted]))
    lemmas = [target.lemma for target in read_senses(path, labelled=False).targets]
    assert lemmas == [f"{tag.lower()}.{letter}" for tag, letter in wanted.items()]


def test_a_sense_that_a_cell_names_twice_counts_once(base, tmp_path):
    path = tmp_path / "all.tsv"
    path.write_text("the\tthe\tDT\t-\nbank\tbank\tNN\tx;x\n\nbank\tbank\tNN\ty\n")
    task = WordSense(word_layers="-1")
    data = task.read(path)
    ours = task.load(base, data)
    task.fit(ours, data, None)
    # Each sense has one word, whose vector is the nearest to itself.
    assert [prediction.sense for prediction in task.predict(ours, data)] == ["x", "y"]
    assert ours.inventory.counts.tolist() == [1, 1]


def test_too_few_examples_back_off_to_the_most_frequent_sense():
    vectors, counts = torch.eye(3), torch.tensor([1, 3, 2])
    vector = torch.tensor([1.0, 0.5, 0.2])
    assert nearest(vector, vectors, counts, 1).argmax() == 0
    assert nearest(vector, vectors, counts, 2).argmax() == 1, "the first has too few"
    assert nearest(vector, vectors, torch.tensor([1, 3, 4]), 5).argmax() == 2
    both = torch.stack((vector, vector.flip(0)))
    assert nearest(both, vectors, counts, 1).argmax(1).tolist() == [0, 2]


def test_scores_are_cosines_of_the_senses_that_have_a_vector(base, files):
    once = {"money", "water", "season"}
    task = WordSense(min_examples=2, word_layers="4")
    train, dev = task.read(files[0]), task.read(files[1])
    kept = [t for i, t in enumerate(train.targets) if i % 2 == 0 or t.senses[0] not in once]
    ours = task.load(base, train)
    task.fit(ours, replace(train, targets=kept), None)
    predictions = task.predict(ours, dev)
    assert [p.sense for p in predictions] == ["river", "river", "water", "water"]
    encoder = Encoder.from_pretrained(base)
    of_train = encoder.embed_words(train.sentences, layers=[4])
    river = [of_train[t.sentence][t.word] for t in kept if t.senses == ("river",)]
    first = encoder.embed_words(dev.sentences, layers=[4])[0][dev.targets[0].word]
    cosine = cosine_similarity(np.mean(river, 0)[None], first[None])[0, 0]
    assert predictions[0].scores == {"river": pytest.approx(cosine, abs=1e-6)}
    assert predictions[2].scores == {}, "no sense of the lemma has a vector"
    rows = [json.loads(line) for line in task.lines(ours, dev, predictions, ".jsonl")]
    assert rows[0]["score"] == predictions[0].scores["river"] and rows[2]["score"] == 0


def test_metrics_by_hand(tmp_path):
    path = tmp_path / "all.tsv"
    path.write_text(COLUMNS)
    data = read_senses(path)
    predictions = [SensePrediction(s, {}) for s in ("001-n", "003-v", None)]
    assert accuracy_by_lemma(data, predictions) == {"bank.n": (0.5, 2), "lend.v": (1.0, 1)}
    metrics = sense_metrics(data, predictions)
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["macro_accuracy"] == pytest.approx(0.75)
    assert metrics["f1"] == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))


def test_of_a_long_sentence_the_tokens_around_the_word(base, tmp_path):
    words = ["water"] * 70
    words[35] = "bank"
    path = table(tmp_path / "x.tsv", [("bank", 35, "river", " ".join(words))])
    task = WordSense(max_length=12)
    data = task.read(path)
    tokenizer = Encoder.from_pretrained(base).tokenizer
    (example,) = encode_senses(data, tokenizer, 12)
    (start, stop), ids = example.spans[0], example.input_ids
    assert len(ids) == 12 and "".join(tokenizer.decode([i]) for i in ids[start:stop]) == "bank"


@pytest.mark.parametrize(
    "content, message",
    [
        (
            "word\tindex\tsense\tsentence\nbank\t4\tx\tthe bank of",
            r"line 2: .* 'bank' is not in the sen",
        ),
        (
            "word\tindex\tsense\tsentence\nbank\t1\t\tthe bank of",
            "line 2: column 'sense' must hold",
        ),
        ("word\tindex\tlabel\tsentence\nbank\t1\tx\tthe bank of", "there must be a column 'sense'"),
        # Tables without the columns, which looked like columns of words.
        (
            "word\tindex\ttext\tsense\nbank\t1\tthe bank of\tx",
            r"line 2: the third column .* part of speech, got 'the bank of': .* index, sentence",
        ),
        (
            "word\tpos\tindex1\tindex2\tlabel\nbank\tN\t2\t2\tF",
            r"line 2: the third column must hold a part of speech, got '2'",
        ),
        ("The\tthe\tDT\t-\nend\tend\tNN\t-", "must have a word with a sense, .* sense_column"),
        ("The\tDT\nend\tNN", "line 1: a line must hold word, lemma, part of speech and sense"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "x.tsv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_senses(path)


def test_sense_columns_count_from_1(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text(COLUMNS)
    with pytest.raises(ValueError, match="got 5 columns and sense column 0"):
        read_senses(path, sense_column=0)


def test_bad_input_is_named(base, files):
    with pytest.raises(ValueError, match="min_examples must be at least 1, got 0"):
        WordSense(min_examples=0)
    with pytest.raises(ValueError, match="word_layers must be numbers"):
        WordSense(word_layers="last")
    task = WordSense(min_examples=9)
    train = task.read(files[0])
    ours = task.load(base, train)
    with pytest.raises(ValueError, match="no sense has 9 examples, the most frequent has 2"):
        task.fit(ours, train, None)
    with pytest.raises(ValueError, match="the model must have vectors of senses"):
        task.predict(ours, train)
    with pytest.raises(ValueError, match=r"word_layers must be from 0 .* got 7"):
        WordSense(word_layers="7").fit(ours, train, None)
    with pytest.raises(ValueError, match="trains no head, so it reads no cached features, got"):
        task_trainer(task, ours, train, TrainConfig("x"), features="f")
