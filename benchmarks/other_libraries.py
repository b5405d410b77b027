"""What libraries over transformers gain from fastenc.patch: MiniLM (6 × 384) in each, patched and unpatched.

FASTENC_DATA=... python -m benchmarks.other_libraries [--turns N] [CASE ...]    (minutes; a case by its first words)

Both sides call the library in the same way, by turns, in one process; the ratio is that of the median times. The
largest difference of their results is measured first. Texts are one to eight phrases of SST-2 in random order. Heads
that MiniLM lacks have random weights, and dropout is off. A library that is not installed gets no time. Earlier results
of other cases are kept.
"""

import argparse
import copy
import csv
import gzip
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks._compare import NOT_INSTALLED
from benchmarks._results import read_cases, write
from benchmarks._squad import questions_and_paragraphs
from fastenc import freeze, patch
from fastenc.demo.checkpoint import minilm_folder

BATCH = 32
OWN, PATCHED = "own forward", "patched"
FOLDER = str(minilm_folder())
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Prepare = Callable[[Any], Any]  # fastenc.patch, or the identity
Call = Callable[[], Any]  # returns numbers to compare, in any nesting


def texts(count: int) -> list[str]:
    path = Path(os.environ["FASTENC_DATA"]) / "sst2" / "dev.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        phrases = [row["sentence"].strip() for row in rows]
    rng = Random(0)
    return [" ".join(rng.choices(phrases, k=rng.randint(1, 8))) for _ in range(count)]


def with_head(name: str, **config: Any) -> Any:
    """MiniLM in a class of transformers; the head is the same for both sides."""
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls.from_pretrained(FOLDER, **NO_DROPOUT, **config).eval()


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def trainer(prepare: Prepare, closing: ExitStack, evaluates: bool = False, **options: Any) -> Call:
    from datasets import Dataset
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    tokens, base = tokenizer(), with_head("AutoModelForSequenceClassification", num_labels=2)
    lora = options.pop("lora", False)
    chosen = texts(64 if evaluates else 32)
    rows = Dataset.from_dict(
        {**tokens(chosen, truncation=True), "label": [i % 2 for i in range(len(chosen))]}
    )
    arguments = TrainingArguments(
        closing.enter_context(tempfile.TemporaryDirectory()),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=BATCH,
        max_steps=4,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )

    def make() -> Any:
        model = copy.deepcopy(base)
        if lora:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            settings = LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])
            model = get_peft_model(model, settings)
        collate = DataCollatorWithPadding(tokens)
        return Trainer(
            prepare(model), arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate
        )

    def train() -> list[float]:
        made = make()
        made.train()
        return [row["loss"] for row in made.state.log_history if "loss" in row]

    if not evaluates:
        return train
    once = make()
    return lambda: [once.evaluate()["eval_loss"]]


def pipeline(
    prepare: Prepare, closing: ExitStack, task: str, head: str, count: int = 64, **arguments: Any
) -> Call:
    import transformers

    labels = arguments.pop("labels", None)
    numbered = dict(enumerate(labels or ()))
    names = {"id2label": numbered, "label2id": {name: i for i, name in numbered.items()}}
    model = prepare(with_head(head, **(names if labels else {})))
    run = transformers.pipeline(task, model=model, tokenizer=tokenizer())
    chosen = texts(count)
    if task == "fill-mask":
        chosen = [f"{text} [MASK]" for text in chosen]
    if task != "feature-extraction":
        return lambda: run(chosen, batch_size=BATCH, **arguments)
    # In a batch the pipeline also returns the rows of padding tokens. They are 0 in a patched model.
    lengths = [len(ids) for ids in tokenizer()(chosen)["input_ids"]]
    of_tokens = lambda outputs: [rows[0][:n] for rows, n in zip(outputs, lengths, strict=True)]
    return lambda: of_tokens(run(chosen, batch_size=BATCH, **arguments))


def sentence_transformer(prepare: Prepare) -> Any:
    from sentence_transformers import SentenceTransformer

    return prepare(SentenceTransformer(FOLDER, device="cpu"))


def encode(prepare: Prepare, closing: ExitStack) -> Call:
    model, chosen = sentence_transformer(prepare), texts(64)
    return lambda: model.encode(chosen, batch_size=BATCH)


def encode_in_pool(prepare: Prepare, closing: ExitStack) -> Call:
    model, chosen = sentence_transformer(prepare), texts(128)
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    closing.callback(model.stop_multi_process_pool, pool)
    return lambda: model.encode(chosen, pool=pool, batch_size=BATCH, chunk_size=64)


def train_sentences(prepare: Prepare, closing: ExitStack) -> Call:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    chosen = texts(64)
    pairs = Dataset.from_dict({"anchor": chosen[:32], "positive": chosen[32:]})
    arguments = SentenceTransformerTrainingArguments(
        closing.enter_context(tempfile.TemporaryDirectory()),
        per_device_train_batch_size=8,
        max_steps=4,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )

    def train() -> list[float]:
        model = prepare(SentenceTransformer(FOLDER, device="cpu", config_kwargs=NO_DROPOUT))
        made = SentenceTransformerTrainer(
            model, arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
        )
        made.train()
        return [row["loss"] for row in made.state.log_history if "loss" in row]

    return train


def cross_encoder(prepare: Prepare, closing: ExitStack) -> Call:
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    model, chosen = CrossEncoder(FOLDER, num_labels=1, device="cpu"), texts(64)
    prepare(model)
    pairs = list(zip(chosen[:32], chosen[32:], strict=True))
    return lambda: model.predict(pairs, batch_size=BATCH)


def rerank(prepare: Prepare, closing: ExitStack, frozen: bool = False) -> Call:
    """64 questions of SQuAD with the first sentences of their paragraphs: pairs of at most 256 tokens.

    frozen: the patched model is also frozen.
    """
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    model, rng, pairs = CrossEncoder(FOLDER, num_labels=1, device="cpu"), Random(0), []
    for question, paragraph in questions_and_paragraphs(80):
        sentences = paragraph.split(". ")
        pair = question, ". ".join(sentences[: rng.randint(1, len(sentences))])
        if len(model.tokenizer(*pair)["input_ids"]) <= 256:
            pairs.append(pair)
    prepare(model)
    if frozen and prepare is patch:
        freeze(model.eval())
    return lambda: model.predict(pairs[:64], batch_size=BATCH)


def sparse_encoder(prepare: Prepare, closing: ExitStack) -> Call:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    torch.manual_seed(0)
    model = SparseEncoder(modules=[MLMTransformer(FOLDER), SpladePooling()], device="cpu")
    prepare(model)
    chosen = texts(32)
    return lambda: model.encode(chosen, batch_size=BATCH).to_dense()


def setfit(prepare: Prepare, closing: ExitStack) -> Call:
    from setfit import SetFitModel

    model, chosen = SetFitModel.from_pretrained(FOLDER, device="cpu"), texts(64)
    prepare(model.model_body)
    torch.manual_seed(0)
    model.fit(chosen[:32], [0, 1] * 16, num_epochs=1)
    return lambda: model.predict_proba(chosen, batch_size=BATCH)


def gliner(prepare: Prepare, closing: ExitStack) -> Call:
    from gliner import GLiNER

    torch.manual_seed(0)
    config = {"model_type": "gliner_uni_encoder_span", "model_name": FOLDER, "hidden_size": 384}
    model, chosen = GLiNER.from_config(config).eval(), texts(32)
    prepare(model.model.token_rep_layer.bert_layer.model)
    predict = partial(model.inference, chosen, ["person", "place"], threshold=0.0, batch_size=BATCH)
    return lambda: [[entity["score"] for entity in entities] for entities in predict()]


def keybert(prepare: Prepare, closing: ExitStack) -> Call:
    from keybert import KeyBERT

    model, chosen = KeyBERT(sentence_transformer(prepare)), texts(32)
    return lambda: [score for keywords in model.extract_keywords(chosen) for _, score in keywords]


def bertopic(prepare: Prepare, closing: ExitStack) -> Call:
    from bertopic import BERTopic
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    encoder, chosen = sentence_transformer(prepare), texts(64)

    def fit() -> Any:
        topics = BERTopic(
            embedding_model=encoder,
            umap_model=PCA(n_components=5, random_state=0),
            hdbscan_model=KMeans(n_clusters=5, n_init=1, random_state=0),
        )
        return topics.fit_transform(chosen)[0]

    return fit


def langchain(prepare: Prepare, closing: ExitStack) -> Call:
    from langchain_huggingface import HuggingFaceEmbeddings

    model, chosen = HuggingFaceEmbeddings(model_name=FOLDER), texts(64)
    prepare(model._client)
    return lambda: model.embed_documents(chosen)


def haystack(prepare: Prepare, closing: ExitStack) -> Call:
    from haystack import Document
    from haystack_integrations.components.embedders.sentence_transformers import (
        SentenceTransformersDocumentEmbedder,
        embedding_backend,
    )

    # Haystack shares one model among embedders of the same name, so each side gets a model of its own name.
    embedding_backend.backend._SentenceTransformersEmbeddingBackendFactory._instances.clear()
    model = SentenceTransformersDocumentEmbedder(model=FOLDER, progress_bar=False)
    model.warm_up()
    prepare(model.embedding_backend.model)
    documents = [Document(content=text) for text in texts(64)]
    return lambda: [document.embedding for document in model.run(documents)["documents"]]


SEQUENCES, TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
ENTAILED = ["contradiction", "neutral", "entailment"]
TOPICS = ["sport", "politics", "film"]
# {case: (packages on PyPI, function that makes the call)}
CASES: dict[str, tuple[tuple[str, ...], Callable[[Prepare, ExitStack], Call]]] = {
    "Trainer, training, float32": (("transformers",), trainer),
    "Trainer, training, bf16": (("transformers",), partial(trainer, bf16=True)),
    "Trainer, training with gradient checkpointing": (
        ("transformers",),
        partial(trainer, gradient_checkpointing=True),
    ),
    "Trainer, evaluation": (("transformers",), partial(trainer, evaluates=True)),
    "Trainer, LoRA": (("peft",), partial(trainer, lora=True)),
    "pipeline, text-classification": (
        ("transformers",),
        partial(pipeline, task="text-classification", head=SEQUENCES, top_k=None),
    ),
    "pipeline, token-classification": (
        ("transformers",),
        partial(pipeline, task="token-classification", head=TOKENS, ignore_labels=[]),
    ),
    "pipeline, zero-shot-classification": (
        ("transformers",),
        partial(
            pipeline,
            task="zero-shot-classification",
            head=SEQUENCES,
            labels=ENTAILED,
            count=32,
            candidate_labels=TOPICS,
        ),
    ),
    "pipeline, fill-mask": (
        ("transformers",),
        partial(pipeline, task="fill-mask", head="AutoModelForMaskedLM", count=32),
    ),
    "pipeline, feature-extraction": (
        ("transformers",),
        partial(pipeline, task="feature-extraction", head="AutoModel", count=32),
    ),
    "SentenceTransformer.encode": (("sentence-transformers",), encode),
    "SentenceTransformer.encode, pool of 2 processes": (
        ("sentence-transformers",),
        encode_in_pool,
    ),
    "SentenceTransformerTrainer": (("sentence-transformers",), train_sentences),
    "CrossEncoder.predict": (("sentence-transformers",), cross_encoder),
    "CrossEncoder.predict, SQuAD": (("sentence-transformers",), rerank),
    "CrossEncoder.predict, SQuAD, frozen": (
        ("sentence-transformers",),
        partial(rerank, frozen=True),
    ),
    "SparseEncoder.encode": (("sentence-transformers",), sparse_encoder),
    "SetFit, predict_proba": (("setfit",), setfit),
    "GLiNER, inference": (("gliner",), gliner),
    "KeyBERT, extract_keywords": (("keybert",), keybert),
    "BERTopic, fit_transform": (("bertopic",), bertopic),
    "LangChain, embed_documents": (("langchain-huggingface", "langchain-core"), langchain),
    "Haystack, document embedder": (("haystack-ai", "sentence-transformers-haystack"), haystack),
}


def numbers(result: Any) -> list[float]:
    """The numbers of a result in order, in any nesting; a pipeline's words and character offsets are left out."""
    if isinstance(result, dict):
        names = {"score", "scores"} & result.keys()
        return [x for name in sorted(names) for x in numbers(result[name])]
    if isinstance(result, list | tuple):
        return [x for each in result for x in numbers(each)]
    if hasattr(result, "tolist"):
        return numbers(result.tolist())
    return [float(result)]


def measure(case: str, turns: int) -> dict[str, dict]:
    packages, make = CASES[case]
    with ExitStack() as closing:
        try:
            calls = {OWN: make(lambda model: model, closing), PATCHED: make(patch, closing)}
        except ImportError as error:
            return {PATCHED: {"missing": f"{NOT_INSTALLED}: {error.name}"}}
        results = {side: numbers(predict()) for side, predict in calls.items()}
        apart = (
            max(abs(a - b) for a, b in zip(*results.values(), strict=True))
            if len(results[OWN]) == len(results[PATCHED])
            else float("inf")
        )
        times: dict[str, list[float]] = {side: [] for side in calls}
        for _ in range(turns):
            for side, predict in calls.items():
                start = time.perf_counter()
                predict()
                times[side].append(time.perf_counter() - start)
    rows: dict[str, dict] = {
        side: {
            "median_ms": 1e3 * statistics.median(taken),
            "p20_ms": 1e3 * sorted(taken)[turns // 5],
            "p80_ms": 1e3 * sorted(taken)[-1 - turns // 5],
            "rounds": turns,
        }
        for side, taken in times.items()
    }
    rows[PATCHED] |= {
        "speedup": rows[OWN]["median_ms"] / rows[PATCHED]["median_ms"],
        "largest_difference": apart,
        "versions": {package: version(package) for package in packages},
    }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    given = parser.parse_args()
    cases = read_cases("other_libraries")
    for case in CASES:
        if not given.cases or case.startswith(tuple(given.cases)):
            with redirect_stdout(io.StringIO()):  # a Trainer prints its losses
                cases[case] = measure(case, given.turns)
            write("other_libraries", {name: cases[name] for name in CASES if name in cases})


if __name__ == "__main__":
    main()
