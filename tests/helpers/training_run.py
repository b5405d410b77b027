"""Small runs that tests start, kill and resume."""

import os
import signal
from itertools import cycle, islice
from pathlib import Path
from pkgutil import resolve_name
from random import Random

import tokenizers
import torch
from safetensors.torch import load_file

from fastenc.data import EntityData, LabelledData, TaggedData, sentence
from fastenc.data.pairs import TextPairs
from fastenc.data.questions import Answer, Question
from fastenc.data.tokenizer_training import T5_LAST
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.models.architectures import architecture_named
from fastenc.objectives import (
    OBJECTIVES,
    MlmCollator,
    evaluate_objective,
)
from fastenc.tasks import (
    QuestionAnswering,
    SentenceEmbedding,
    SequenceClassification,
    SpanNer,
    SparseEmbedding,
    TokenClassification,
)
from fastenc.text.tags import Span
from fastenc.train import ObjectiveOptions, TrainConfig, Trainer, objective_trainer, task_trainer
from fastenc.train.processes import process_state

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "quickly",
    "slowly",
    "gone",
]


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def assert_bitwise_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def word_tokenizer():
    """A tokenizer that is the same in every process; a trained one is not."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: index for index, token in enumerate(special + WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def build(folder, dropout=0.1, probability=0.3, texts=60, **settings):
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    number = lambda low, high: int(torch.randint(low, high, (), generator=draw))
    # Words in a fixed order that starts at a random word: a pattern to learn.
    sentences = [
        " ".join(islice(cycle(WORDS), start := number(0, len(WORDS)), start + number(4, 20)))
        for _ in range(60)
    ]
    tokenizer = word_tokenizer()
    sequences = [tokenizer.encode(text).ids for text in sentences[-texts:]]
    held_out, sequences = sequences[-10:], sequences[:-10]
    torch.manual_seed(1)
    model = MaskedLM(small_config(tokenizer, dropout, max_positions=32))
    model.tokenizer = tokenizer
    held_out_masks = MlmCollator(tokenizer, seed=99)
    values = dict(
        epochs=3, batch_size=4, accumulation=2, learning_rate=1e-2, save_every=3, log_every=1
    )
    return Trainer(
        model,
        TrainConfig(str(folder), **(values | settings)),
        sequences,
        [len(sequence) for sequence in sequences],
        MlmCollator(tokenizer, seed=5, probability=probability),
        evaluate=lambda m: evaluate_objective(m, held_out, held_out_masks, 4),
        settings={"probability": probability},
        show_progress=False,
    )


def build_objective(folder, objective, **settings):
    """A run of any objective, on documents of three sentences."""
    torch.set_num_threads(1)
    model = small_model(objective, tokenizer_of(objective), settings.pop("dropout", 0.1))
    texts = documents(40)
    share = {"probability": 0.3} if "probability" in OBJECTIVES[objective].options else {}
    options = ObjectiveOptions(objective, block_size=32, **share)
    values = dict(max_steps=6, batch_size=4, learning_rate=5e-3, eval_every=3, log_every=1)
    config = TrainConfig(str(folder), **(values | settings))
    return objective_trainer(options, model, texts[5:], config, dev=texts[:5], show_progress=False)


def build_task(folder, task, gather=False, tokens_at_once=20, metric="loss", **settings):
    """A run of any task, on sentences whose first word decides label, tags and answers."""
    torch.set_num_threads(1)
    texts = [text.split("\n")[0] for text in documents(25)]
    ran = [int("ran" in text) for text in texts]
    if task == "sequence-classification":
        chosen, data = SequenceClassification(), LabelledData(texts, ran, ["no", "yes"])
    elif task == "chunks":
        chosen = SequenceClassification(max_length=6, chunks="transformer", stride=1)
        data = LabelledData(texts, ran, ["no", "yes"])
    elif task == "token-classification":
        tags = [["B-X" if word in ("cat", "dog") else "O" for word in t.split()] for t in texts]
        sentences = [sentence(t.split(), own) for t, own in zip(texts, tags, strict=True)]
        chosen, data = TokenClassification(crf=True), TaggedData(sentences, ["O", "B-X", "I-X"])
    elif task in ("sentence-embedding", "sparse-embedding"):
        options = {"gather": gather, "tokens_at_once": tokens_at_once}
        if task == "sentence-embedding":
            chosen = SentenceEmbedding(**options, symmetric=True)
        else:
            chosen = SparseEmbedding(**options, query_flops=0.05, document_flops=0.03)
        data = TextPairs(list(zip(texts, [*texts[1:], texts[0]], strict=True)), [])
    elif task == "span-ner":
        words = [text.split() for text in texts]
        entities = [
            [Span("X", i, i + 1) for i, w in enumerate(row) if w in ("cat", "dog")] for row in words
        ]
        chosen, data = (
            SpanNer(span_size=16),
            EntityData(list(map(sentence, words)), entities, ["X"]),
        )
    else:
        answer = lambda text: [Answer(0, text.split()[0])]
        chosen, data = (
            QuestionAnswering(stride=16),
            [Question(str(n), "the cat", text, answer(text)) for n, text in enumerate(texts)],
        )
    base = Path(folder) / f"base-{process_state().process_index}"
    small_model("mlm", word_tokenizer(), settings.pop("dropout", 0.0)).save_pretrained(base)
    torch.manual_seed(3)
    model = chosen.load(str(base), data)
    values = dict(max_steps=6, batch_size=4, learning_rate=5e-3, eval_every=3, log_every=1)
    config = TrainConfig(str(Path(folder) / "run"), **(values | settings))
    return task_trainer(chosen, model, data, config, dev=data, metric=metric)


def documents(count):
    """Texts of three sentences, each with words in a fixed order that starts at a random word: a pattern to learn."""
    draw = Random(0)
    sentence = lambda: " ".join(
        islice(cycle(WORDS), start := draw.randrange(len(WORDS)), start + draw.randint(4, 9))
    )
    return ["\n".join(sentence() for _ in range(3)) for _ in range(count)]


def small_config(tokenizer, dropout=0.0, max_positions=64, **options):
    return EncoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        max_positions=max_positions,
        hidden_dropout_p=dropout,
        attention_dropout_p=dropout,
        **options,
    )


def tokenizer_of(objective):
    """A tokenizer of words, with what the objective needs beside them."""
    tokenizer = word_tokenizer()
    if OBJECTIVES[objective].has_decoder:
        tokenizer.add_special_tokens(T5_LAST)
    return tokenizer


def small_model(objective, tokenizer, dropout=0.0):
    torch.manual_seed(1)
    chosen = OBJECTIVES[objective]
    own = architecture_named(chosen.family).new_config if chosen.has_decoder else {}
    config = small_config(tokenizer, dropout, family=chosen.family, **own)
    if chosen.student is None:
        model = chosen.model(config)
    else:
        teacher = MaskedLM(config.replace(num_layers=3)).eval()
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model = chosen.model(config, teacher)
    model.tokenizer = tokenizer
    return model


def killed(folder, owner, name, call_number):
    """Fork a run that kills itself at the ``call``-th call of ``owner.name``; returns its status from ``os.waitpid``.

    Only for a process that has computed nothing: torch's threads do not survive a fork.
    """
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    owner = resolve_name(owner)
    real, calls = getattr(owner, name), [0]

    def kill(*arguments, **options):
        calls[0] += 1
        if calls[0] == call_number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, kill)
    build(folder).train()
    os._exit(0)
