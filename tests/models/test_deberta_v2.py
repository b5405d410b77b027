"""DeBERTa from files to files, with a tokenizer of its own class: a Unigram model over words with a leading space."""

import json

import pytest
import torch
import transformers

import fastenc
from fastenc.models import Encoder, MaskedLM
from fastenc.packing import pack_sequences
from tests.helpers.commands import failure, run
from tests.helpers.training_run import documents

SIZES = ("--layers", 1, "--hidden", 32, "--heads", 2, "--block-size", 96)
TEXTS = ["The cat sat.", "A dog ran slowly under a tree.", "the mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, texts, and files of the tasks."""
    folder, texts = tmp_path_factory.mktemp("deberta"), documents(60)
    tokenizer = transformers.DebertaV2Tokenizer().train_new_from_iterator(texts + TEXTS, 90)
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text("\n\n".join(texts))
    labelled = [f"{text}\t{label}" for text, label in zip(TEXTS, "aba", strict=True)]
    (folder / "classes.tsv").write_text("\n".join(["sentence\tlabel", *labelled]) + "\n")
    (folder / "pairs.tsv").write_text("sentence1\tsentence2\nthe cat\tthe dog\na mat\ta tree\n")
    (folder / "words.conll").write_text("The O\ncat B-X\n\nA O\ndog B-X\nran O\n")
    first_word = lambda text: {"text": [text.split()[0]], "answer_start": [0]}
    questions = [
        {"id": text, "question": "Who?", "context": text, "answers": first_word(text)}
        for text in TEXTS
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return folder


def pretrain(folder, objective, *options):
    """The folder of a new model after two steps."""
    output = folder / objective
    family = ("--family", "deberta-v2", "--tokenizer", folder / "tokenizer", *SIZES)
    steps = ("--objective", objective, "--batch-size", 4, "--max-steps", 2)
    run("pretrain", folder / "text.txt", "-o", output, *family, *steps, *options)
    return output


@pytest.fixture(scope="module")
def pretrained(folder):
    return pretrain(folder, "mlm")


def finetuned(folder, pretrained, task, data):
    output = folder / task
    run("finetune", pretrained, folder / data, "--task", task, "-o", output, "--max-steps", 1)
    return output


def loaded(folder, task):
    """(transformers' model and tokenizer of a folder, the padded batch of the texts)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("the")[0].startswith("▁")
    model = getattr(transformers, f"AutoModel{task}").from_pretrained(folder).eval()
    return model, tokenizer, tokenizer(TEXTS, padding=True, return_tensors="pt")


@pytest.mark.parametrize("objective", ["mlm", "span", "distill"])
def test_pretrained_models_predict_in_transformers_as_here(objective, folder, pretrained):
    teacher = ("--teacher", pretrained) if objective == "distill" else ()
    made = pretrained if objective == "mlm" else pretrain(folder, objective, *teacher)
    theirs, _, batch = loaded(made, "ForMaskedLM")
    assert type(theirs).__name__ == "DebertaV2ForMaskedLM"
    ours, real = MaskedLM.from_pretrained(made).eval(), batch["attention_mask"].bool()
    ids = [ours.own_tokenizer().encode(text).ids for text in TEXTS]
    assert [i for row in ids for i in row] == batch["input_ids"][real].tolist()
    with torch.no_grad():
        logits, expected = ours(pack_sequences(ids)).logits, theirs(**batch).logits[real]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_the_mask_decoder_is_trained_and_goes_on(folder, pretrained, capsys):
    made, further, plain = (folder / name for name in ("decoded", "further", "plain"))
    steps = ("--batch-size", 4, "--max-steps", 2, "--block-size", 96)
    new = ("--family", "deberta-v2", "--tokenizer", folder / "tokenizer", *SIZES[:-2])
    run("pretrain", folder / "text.txt", "-o", made, *new, *steps, "--mask-decoder")
    run("pretrain", folder / "text.txt", "-o", further, "--from", made, *steps)
    before, after = (
        MaskedLM.from_pretrained(each).mask_positions.weight for each in (made, further)
    )
    assert not torch.equal(before, after)
    run("pretrain", folder / "text.txt", "-o", plain, "--from", made, *steps, "--no-mask-decoder")
    assert MaskedLM.from_pretrained(plain).mask_positions is None
    refused = ("--from", pretrained, *steps, "--mask-decoder", "-o", folder / "refused")
    message = failure(capsys, "pretrain", folder / "text.txt", *refused)
    assert "lacks embeddings.position_embeddings.weight" in message


def test_classes_are_transformers(folder, pretrained):
    model = finetuned(folder, pretrained, "sequence-classification", "classes.tsv")
    theirs, _, batch = loaded(model, "ForSequenceClassification")
    with torch.no_grad():
        expected = theirs(**batch).logits.softmax(1)
    for row, probabilities in zip(fastenc.predictor(model).predict(TEXTS), expected, strict=True):
        predicted = [row[f"p({name})"] for name in ("a", "b")]
        assert predicted == pytest.approx(probabilities.tolist(), abs=1e-5)


def test_tags_are_transformers(folder, pretrained):
    model = finetuned(folder, pretrained, "token-classification", "words.conll")
    theirs, tokenizer, _ = loaded(model, "ForTokenClassification")
    for text in TEXTS:
        words = text.split()
        batch = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            best = theirs(**batch).logits[0].argmax(1).tolist()
        of_words = batch.word_ids()
        expected = [theirs.config.id2label[best[of_words.index(i)]] for i in range(len(words))]
        (row,) = fastenc.predictor(model).predict([words])
        assert row["tags"] == expected


def test_vectors_are_transformers(folder, pretrained):
    model = finetuned(folder, pretrained, "sentence-embedding", "pairs.tsv")
    theirs, _, batch = loaded(model, "")
    mask = batch["attention_mask"][..., None]
    with torch.no_grad():
        expected = (theirs(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    vectors = Encoder.from_pretrained(model).encode(TEXTS, normalize=False)
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)


def test_answers_are_transformers(folder, pretrained):
    """The span with the largest sum of its two logits, without white space at its ends."""
    model = finetuned(folder, pretrained, "question-answering", "questions.jsonl")
    theirs, tokenizer, _ = loaded(model, "ForQuestionAnswering")
    asked = [{"question": "Who?", "context": text} for text in TEXTS]
    for row, text in zip(fastenc.predictor(model).predict(asked), TEXTS, strict=True):
        batch = tokenizer("Who?", text, return_tensors="pt", return_offsets_mapping=True)
        offsets = batch.pop("offset_mapping")[0].tolist()
        of_text = torch.tensor([part == 1 for part in batch.sequence_ids()])
        with torch.no_grad():
            output = theirs(**batch)
        scores = output.start_logits[0][:, None] + output.end_logits[0]
        allowed = (of_text[:, None] & of_text).triu()
        first, last = divmod(int(scores.where(allowed, -torch.inf).argmax()), len(of_text))
        assert row["answer"] == text[offsets[first][0] : offsets[last][1]].strip() != ""


def test_entities_are_found_in_words_of_the_texts(folder, pretrained):
    model = finetuned(folder, pretrained, "span-ner", "words.conll")
    # After one step no span is above "no entity".
    rows = fastenc.predictor(model, null_offset=-1e6).predict(TEXTS)
    assert [row["words"] for row in rows][2] == ["the", "mat"]
    for row, text in zip(rows, TEXTS, strict=True):
        assert row["entities"]
        for entity in row["entities"]:
            words = row["words"][entity["first_word"] : entity["end_word"]]
            assert entity["type"] == "X"
            assert entity["text"] == text[entity["start"] : entity["end"]]
            assert entity["text"].replace(" ", "") == "".join(words)
