"""Patched models of sentence-transformers: every method and trainer gives the numbers that it gave before."""

import copy
import warnings

import numpy
import pytest
import torch

import fastenc
from fastenc.data import train_tokenizer
from fastenc.models import CrossEncoder as CrossEncoderOfPairs
from fastenc.models import EncoderConfig, SentenceEmbedder, SparseEncoder
from fastenc.models.embedding.sentence_files import SentenceSettings

TEXTS = [
    "a small dog runs",
    "the dog is running in the rain and sings",
    "two men play chess",
    "rain",
]
PAIRS = [(one, other) for one in TEXTS[:2] for other in TEXTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models without dropout, in sentence-transformers' folders."""
    root = tmp_path_factory.mktemp("models")
    for name, cls in (
        ("vectors", SentenceEmbedder),
        ("scores", CrossEncoderOfPairs),
        ("weights", SparseEncoder),
    ):
        torch.manual_seed(0)
        model = cls(EncoderConfig(97, 32, 2, 2, 64, 64, hidden_dropout_p=0, attention_dropout_p=0))
        model.tokenizer = train_tokenizer(TEXTS, vocab_size=97)
        if cls is SentenceEmbedder:
            model.encoder.sentence = SentenceSettings(prompts={"query": "a game of "})
        model.save_pretrained(root / name)
    return root


def both(make):
    """(the model with its own forward, the patched model)."""
    model = make()
    return model, fastenc.patch(copy.deepcopy(model))


@pytest.fixture
def embedders(folders):
    from sentence_transformers import SentenceTransformer

    return both(lambda: SentenceTransformer(str(folders / "vectors"), device="cpu"))


@pytest.fixture
def cross_encoders(folders):
    from sentence_transformers import CrossEncoder

    return both(lambda: CrossEncoder(str(folders / "scores"), device="cpu"))


@pytest.fixture
def sparse_encoders(folders):
    from sentence_transformers import SparseEncoder

    return both(lambda: SparseEncoder(str(folders / "weights"), device="cpu"))


@pytest.mark.parametrize(
    "options",
    [
        {"truncate_dim": 20, "normalize_embeddings": True},
        {"prompt_name": "query"},
        {"prompt": "two "},
        {"output_value": "token_embeddings"},
        {"precision": "int8"},
        {"precision": "uint8"},
        {"precision": "binary"},
        {"precision": "ubinary"},
        {"convert_to_tensor": True, "batch_size": 1},
    ],
    ids=lambda options: "-".join(options),
)
def test_encode(embedders, options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*u?int8 quantization", category=UserWarning)
        expected, vectors = (model.encode(TEXTS, **options) for model in embedders)
    # A rounding error may put a number into the next bin of 8 bits.
    tolerance = {"int8": 1.0, "uint8": 1.0}.get(options.get("precision"), 1e-5)
    for ours, theirs in zip(vectors, expected, strict=True):
        ours, theirs = (numpy.asarray(each, dtype="float64") for each in (ours, theirs))
        numpy.testing.assert_allclose(ours, theirs, atol=tolerance)


@pytest.mark.parametrize("attend", [False, True])
def test_multi_vectors_with_query_expansion(folders, attend):
    """Late interaction reads the vectors of mask tokens that stand behind a query."""
    from sentence_transformers.base.modules import Transformer

    models = pytest.importorskip("sentence_transformers.multi_vector_encoder")
    expansion = {"strategy": "fixed", "attend": attend, "length": 16}
    steps = [Transformer(str(folders / "vectors"), query_expansion=expansion)]
    steps.append(models.modules.MultiVectorMask())
    own, patched = both(lambda: models.MultiVectorEncoder(modules=steps, device="cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not attend:
            warnings.filterwarnings("ignore", message="fastenc: .* masked tokens have the id")
        queries = patched.encode_query(TEXTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        documents = patched.encode_document(TEXTS)
    for ours, theirs in (
        *zip(queries, own.encode_query(TEXTS), strict=True),
        *zip(documents, own.encode_document(TEXTS), strict=True),
    ):
        numpy.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_predict_and_rank(cross_encoders):
    own, patched = cross_encoders
    numpy.testing.assert_allclose(patched.predict(PAIRS), own.predict(PAIRS), atol=1e-6)
    ranked, expected = (
        model.rank(TEXTS[0], TEXTS, top_k=3, return_documents=True) for model in (patched, own)
    )
    assert [each["text"] for each in ranked] == [each["text"] for each in expected]
    assert [e["score"] for e in ranked] == pytest.approx([e["score"] for e in expected], abs=1e-6)


def test_a_pool_of_another_process(embedders):
    own, patched = embedders
    pool = patched.start_multi_process_pool(["cpu"])
    try:
        vectors = patched.encode(TEXTS, pool=pool, chunk_size=2)
    finally:
        patched.stop_multi_process_pool(pool)
    numpy.testing.assert_allclose(vectors, own.encode(TEXTS), atol=1e-5)


def test_both_models_of_a_router_are_patched(folders):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Router

    steps = [SentenceTransformer(str(folders / "vectors"), device="cpu")[0] for _ in range(2)]
    with torch.no_grad():
        steps[1].auto_model.encoder.layer[0].output.dense.weight.mul_(2)
    router = Router.for_query_document(*([step, Pooling(32)] for step in steps))
    own, patched = both(lambda: SentenceTransformer(modules=[router], device="cpu"))

    def compare():
        vectors, expected = (
            (m.encode_query(TEXTS), m.encode_document(TEXTS)) for m in (patched, own)
        )
        numpy.testing.assert_allclose(vectors, expected, atol=1e-5)
        assert abs(vectors[0] - vectors[1]).max() > 1e-2

    encoders = [m for m in patched.modules() if type(m).__name__ == "BertModel"]
    assert len(encoders) == 2 and all("forward" in vars(m) for m in encoders)
    compare()
    fastenc.freeze(patched.eval())
    compare()
    with pytest.raises(ValueError, match="one model of transformers, got SentenceTransformer with"):
        fastenc.encoder_of(patched)
    fastenc.unpatch(patched)
    assert not any("forward" in vars(m) for m in encoders)
    compare()


@pytest.mark.parametrize("which", ["embedders", "cross_encoders", "sparse_encoders"])
def test_a_saved_model_is_the_unpatched_one(which, request, tmp_path):
    own, patched = request.getfixturevalue(which)
    patched.save(str(tmp_path / "saved"))
    loaded = type(own)(str(tmp_path / "saved"), device="cpu")
    call = {
        "embedders": lambda m: m.encode(TEXTS),
        "cross_encoders": lambda m: m.predict(PAIRS),
        "sparse_encoders": lambda m: m.encode(TEXTS).to_dense().numpy(),
    }[which]
    numpy.testing.assert_array_equal(call(loaded), call(own))
    numpy.testing.assert_allclose(call(fastenc.patch(loaded)), call(own), atol=1e-5)


def test_a_sparse_encoder_in_mixed_precision(sparse_encoders, accelerator):
    """Its copy has weights of its own, and it can be unwrapped."""
    own, patched = sparse_encoders
    prepared = accelerator.prepare(patched)
    weights = lambda model: model.encode(TEXTS).to_dense()
    before = weights(prepared)
    copied = copy.deepcopy(prepared)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert before.any() and not weights(copied).any()
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    torch.testing.assert_close(weights(unwrapped), weights(own), rtol=0, atol=1e-5)
    assert not any("forward" in vars(step) for step in fastenc.unpatch(unwrapped).modules())


def losses_of(model, trainer_class, arguments_class, rows, loss, folder):
    from datasets import Dataset

    arguments = arguments_class(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = trainer_class(
        model, arguments, train_dataset=Dataset.from_dict(rows), loss=loss(model)
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trainers_have_the_same_losses(embedders, cross_encoders, sparse_encoders, tmp_path):
    from sentence_transformers import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from sentence_transformers.sentence_transformer.losses import (
        MatryoshkaLoss,
        MultipleNegativesRankingLoss,
    )
    from sentence_transformers.sparse_encoder.losses import (
        SparseMultipleNegativesRankingLoss,
        SpladeLoss,
    )

    columns = dict(zip(("one", "other"), map(list, zip(*PAIRS, strict=True)), strict=True))
    matryoshka = lambda model: MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [32, 16])
    of_vectors = (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        columns,
        matryoshka,
    )
    labelled = columns | {"label": [float(i % 2) for i in range(len(PAIRS))]}
    of_pairs = CrossEncoderTrainer, CrossEncoderTrainingArguments, labelled, BinaryCrossEntropyLoss
    splade = lambda model: SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=3e-3,
        query_regularizer_weight=5e-3,
    )
    of_weights = SparseEncoderTrainer, SparseEncoderTrainingArguments, columns, splade
    for models, given in (
        (embedders, of_vectors),
        (cross_encoders, of_pairs),
        (sparse_encoders, of_weights),
    ):
        expected, losses = (losses_of(model, *given, tmp_path) for model in models)
        assert len(losses) == 3 and len({*expected}) == 3
        assert losses == pytest.approx(expected, rel=1e-4)
