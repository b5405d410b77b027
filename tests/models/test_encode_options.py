"""Prompts, shorter vectors and other precisions: the numbers of sentence-transformers."""

import json

import numpy
import pytest
import torch

from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig, SentenceEmbedder
from fastenc.models.embedding.quantization import PRECISIONS, quantize_vectors
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.tasks.embedding_file import embed_file

TEXTS = ["a small dog runs", "the dog is running", "two men play chess", "query: it rains", ""]
PROMPTS = {"query": "query: ", "chess": "a game of chess "}


@pytest.fixture
def folder(tmp_path):
    encoder = Encoder(EncoderConfig(97, 44, 2, 2, 64, 32))
    encoder.tokenizer = train_tokenizer([*TEXTS, *PROMPTS.values()], vocab_size=97)
    encoder.sentence = SentenceSettings(prompts=PROMPTS)
    encoder.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def sentence_transformer(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").eval()


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "a game of "},
        {"prompt_name": "chess"},
        {"truncate_dim": 20},
        {"truncate_dim": 20, "normalize": True, "prompt_name": "query"},
    ],
)
def test_vectors_are_sentence_transformers(folder, options):
    encoder, peer = Encoder.from_pretrained(folder), sentence_transformer(folder)
    renamed = {("normalize_embeddings" if k == "normalize" else k): v for k, v in options.items()}
    expected = peer.encode(TEXTS, **renamed)
    vectors = encoder.encode(TEXTS, convert_to_numpy=True, **options)
    numpy.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-6)
    changed = not numpy.allclose(vectors, encoder.encode(TEXTS)[:, : vectors.shape[1]], atol=1e-3)
    assert changed == (options != {"truncate_dim": 20})
    one = encoder.encode(TEXTS[0], **options)
    torch.testing.assert_close(one, torch.from_numpy(vectors[0]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("truncate_dim", [None, 20])
def test_vectors_keep_their_length_if_that_is_asked_for(folder, truncate_dim):
    from sentence_transformers import SentenceTransformer

    *modules, _ = sentence_transformer(folder)
    peer = SentenceTransformer(modules=modules, device="cpu", truncate_dim=truncate_dim).eval()
    options = {"normalize": False, "truncate_dim": truncate_dim}
    vectors = Encoder.from_pretrained(folder).encode(TEXTS, convert_to_numpy=True, **options)
    numpy.testing.assert_allclose(vectors, peer.encode(TEXTS), rtol=1e-4, atol=1e-6)
    assert (abs(numpy.linalg.norm(vectors, axis=1) - 1) > 1e-3).all()


def test_the_default_prompt_is_put_before_each_text_unless_another_is_given(folder, tmp_path):
    main = folder / "config_sentence_transformers.json"
    main.write_text(json.dumps({"prompts": PROMPTS, "default_prompt_name": "chess"}))
    Encoder.from_pretrained(folder).save_pretrained(tmp_path / "again")
    for each in (folder, tmp_path / "again"):
        encoder, peer = Encoder.from_pretrained(each), sentence_transformer(each)
        for options in ({}, {"prompt": ""}, {"prompt": "two "}, {"prompt_name": "query"}):
            expected = peer.encode(TEXTS, **options)
            vectors = encoder.encode(TEXTS, convert_to_numpy=True, **options)
            numpy.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(encoder.encode(TEXTS[0]), encoder.encode(TEXTS[0], prompt=""))


def test_texts_are_cut_where_max_tokens_says(folder, tmp_path):
    encoder, peer = Encoder.from_pretrained(folder), sentence_transformer(folder)
    encoder.max_tokens = peer.max_seq_length = 5
    encoder.save_pretrained(tmp_path / "again")
    again = Encoder.from_pretrained(tmp_path / "again")
    assert again.max_tokens == 5
    for each in (encoder, again):
        numpy.testing.assert_allclose(each.encode(TEXTS), peer.encode(TEXTS), rtol=1e-4, atol=1e-6)
    assert not numpy.allclose(peer.encode(TEXTS), Encoder.from_pretrained(folder).encode(TEXTS))
    with pytest.raises(ValueError, match="from 1 to the model's 32 positions, got 33"):
        encoder.max_tokens = 33
    encoder.max_tokens = 1
    with pytest.raises(ValueError, match=r"at least 2, the number of .* got 1: set encoder"):
        encoder.encode(TEXTS)


def test_dimensions_are_cut_where_the_folder_says(folder, tmp_path):
    peer = sentence_transformer(folder)
    peer.truncate_dim = 20
    peer.save_pretrained(str(tmp_path / "saved"))
    Encoder.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "again")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:4]) + "\n")
    for each in (tmp_path / "saved", tmp_path / "again"):
        encoder, peer = Encoder.from_pretrained(each), sentence_transformer(each)
        vectors = encoder.encode(TEXTS, convert_to_numpy=True)
        numpy.testing.assert_allclose(vectors, peer.encode(TEXTS), rtol=1e-4, atol=1e-6)
        output = each / "vectors.npy"
        assert embed_file(encoder, tmp_path / "texts.txt", output).width == 20
        numpy.testing.assert_array_equal(numpy.load(output), vectors[:4])
        assert encoder.encode(TEXTS, truncate_dim=44).shape == (5, 44)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_texts_are_cut_and_lowercased_as_the_folder_says(folder, tmp_path, name):
    encoder = Encoder.from_pretrained(folder)
    encoder.tokenizer = train_tokenizer([*TEXTS, "Dog RUN A"], vocab_size=97, lowercase=False)
    encoder.save_pretrained(folder)
    (folder / "sentence_bert_config.json").unlink()
    (folder / name).write_text(json.dumps({"max_seq_length": 6, "do_lower_case": True}))
    texts = ["A small Dog RUNS", "a small dog runs", "[MASK] Dog"]
    encoder = Encoder.from_pretrained(folder)
    encoder.save_pretrained(tmp_path / "again")
    expected = sentence_transformer(folder).encode(texts)
    embedder = SentenceEmbedder.from_pretrained(folder)
    for each in (encoder, embedder, Encoder.from_pretrained(tmp_path / "again")):
        numpy.testing.assert_allclose(each.encode(texts), expected, rtol=1e-4, atol=1e-6)
    numpy.testing.assert_array_equal(expected[0], expected[1])


def test_a_folder_that_cuts_texts_on_the_left_is_named(folder):
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"truncation_side": "left", "model_max_length": 6}))
    with pytest.warns(UserWarning, match="cuts longer texts at their start"):
        encoder = Encoder.from_pretrained(folder)
    long, peer = "a small dog runs " * 9, sentence_transformer(folder)
    assert peer.encode("a " + long) == pytest.approx(peer.encode(long)), "the begin is left out"
    assert encoder.encode(long + "a") == pytest.approx(encoder.encode(long), abs=1e-6)


def test_a_tokenizer_without_a_limit_leaves_the_models_positions(folder, tmp_path):
    for name, limit in (("sentence_bert_config.json", None), ("tokenizer_config.json", 1e30)):
        values = json.loads((folder / name).read_text())
        values.pop("max_seq_length", None)
        (folder / name).write_text(
            json.dumps(values | ({"model_max_length": limit} if limit else {}))
        )
    long = "a small dog runs " * 30
    encoder = Encoder.from_pretrained(folder)
    encoder.save_pretrained(tmp_path / "again")
    peer = sentence_transformer(tmp_path / "again")
    assert encoder.max_tokens == peer.max_seq_length == 32
    numpy.testing.assert_allclose(encoder.encode(long), peer.encode(long), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_are_sentence_transformers(folder, precision):
    from sentence_transformers.util import quantize_embeddings

    x = torch.randn(40, 21)
    x[:, 3] = 0.5  # a dimension without a range
    ranges = x[:30].min(0).values, x[:30].max(0).values  # others are cut
    for given in (None, ranges):
        stacked = None if given is None else torch.stack(given).numpy()
        expected = quantize_embeddings(x.numpy(), precision, ranges=stacked)
        quantized = quantize_vectors(x, precision, given).numpy()
        assert quantized.dtype == expected.dtype
        numpy.testing.assert_array_equal(quantized, expected)
    encoder = Encoder.from_pretrained(folder)
    plain = encoder.encode(TEXTS, truncate_dim=20)
    assert torch.equal(
        encoder.encode(TEXTS, truncate_dim=20, precision=precision),
        quantize_vectors(plain, precision),
    )


def test_prompts_stay_with_the_files(folder, tmp_path):
    encoder = Encoder.from_pretrained(folder)
    encoder.save_pretrained(tmp_path / "again")
    assert Encoder.from_pretrained(tmp_path / "again").sentence.prompts == PROMPTS
    main = tmp_path / "again" / "config_sentence_transformers.json"
    main.write_text(json.dumps({"similarity_fn_name": "dot"}))
    Encoder.from_pretrained(tmp_path / "again").save_pretrained(tmp_path / "once more")
    assert sentence_transformer(tmp_path / "once more").similarity_fn_name == "dot"
    main.write_text(json.dumps({"prompts": {"query": 3}}))
    with pytest.warns(UserWarning, match="prompts must be an object of texts"):
        Encoder.from_pretrained(tmp_path / "again")


def test_a_file_of_shorter_vectors(folder, tmp_path):
    encoder, output = Encoder.from_pretrained(folder), tmp_path / "vectors.npy"
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:4]) + "\n")
    written = embed_file(
        encoder, tmp_path / "texts.txt", output, truncate_dim=8, prompt_name="query"
    )
    expected = encoder.encode(TEXTS[:4], truncate_dim=8, prompt="query: ", convert_to_numpy=True)
    assert written.width == 8
    numpy.testing.assert_array_equal(numpy.load(output), expected)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt_name": "title"}, "got 'title'; it has query, chess: give prompt"),
        ({"prompt_name": "query", "prompt": "x"}, "give prompt or prompt_name, got both"),
        ({"truncate_dim": 45}, "from 1 to the vectors' width 44, got 45"),
        ({"truncate_dim": 0}, "from 1 to the vectors' width 44, got 0"),
        ({"precision": "int4"}, "precision must be one of float32, int8, .*, got 'int4'"),
        ({"precision": "int8"}, "over the texts of the call, got 1: give more texts"),
    ],
)
def test_what_cannot_be_computed_is_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(folder).encode("a text", **options)


@pytest.mark.parametrize(
    "texts, got",
    [
        (None, "NoneType"),
        ({"text": "a dog"}, "dict"),  # its items are its keys
        (numpy.array("a dog"), "ndarray of 0 dimensions"),
        (numpy.array([["a dog", "rain"]]), "ndarray of 2 dimensions"),
    ],
)
def test_what_is_no_list_of_texts_is_named(texts, got, folder):
    message = f"encode takes a text or a list of texts, got {got}: give"
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(folder).encode(texts)


def test_the_columns_of_a_dataframe_are_not_its_texts(folder):
    pandas = pytest.importorskip("pandas")
    encoder, frame = Encoder.from_pretrained(folder), pandas.DataFrame({"sentence": TEXTS})
    with pytest.raises(ValueError, match="got DataFrame of 2 dimensions: give a list of texts"):
        encoder.encode(frame)
    peer = sentence_transformer(folder).encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(encoder.encode(frame["sentence"]), peer, rtol=1e-4, atol=1e-5)


def test_batch_invariance_is_for_cpus_and_cuda(folder):
    encoder = Encoder.from_pretrained(folder).to("meta")
    with pytest.raises(ValueError, match="for a CPU and for CUDA, got a model on meta"):
        encoder.encode("a text", batch_invariant=True)


def test_a_prompt_that_the_pooling_leaves_out(folder):
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "include_prompt": False}))
    encoder = Encoder.from_pretrained(folder)
    encoder.encode(TEXTS)
    with pytest.raises(
        ValueError, match=r"tokens of its prompt.*, got the prompt 'query: ': give prompt=''"
    ):
        encoder.encode(TEXTS, prompt_name="query")
