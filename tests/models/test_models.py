import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder, EncoderConfig, MaskedLM, SentenceEmbedder, SequenceClassifier
from fastenc.ops import unpack
from fastenc.packing import offsets, pack_sequences
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import ENCODERS, FAMILIES, model, padded_batch

EVERY_ENCODER = pytest.mark.parametrize("family", ENCODERS)
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@EVERY_ENCODER
def test_encoder_agrees_with_transformers_at_every_real_token(family, tmp_path):
    theirs = model(family)
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    batch = padded_batch(family)
    mask = batch["attention_mask"].bool()
    with torch.inference_mode():
        expected = theirs(**batch, output_hidden_states=True)
        result = ours(packed(batch), output_hidden_states=True)
        *states, last = result.hidden_states
        # transformers' last state is the output, which a linear layer may make of ours.
        states.append(ours.project_output(last))
    close(result.last_hidden_state, expected.last_hidden_state[mask])
    for a, b in zip(states, expected.hidden_states, strict=True):
        close(a, b[mask])
    pooled = getattr(expected, "pooler_output", None)
    assert (result.pooled is None) == (pooled is None)
    if pooled is not None:
        close(result.pooled, pooled)
    padded = unpack(result.last_hidden_state, packed(batch))
    close(padded[mask], expected.last_hidden_state[mask])
    assert not padded[~mask].any()


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_inference_in_blocks_of_rows_agrees_with_transformers(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("fastenc.nn.layer.ROWS_AT_ONCE", rows)
    theirs = model("bert")
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    batch = padded_batch("bert")
    with torch.inference_mode():
        expected = theirs(**batch).last_hidden_state[batch["attention_mask"].bool()]
        close(ours(packed(batch)).last_hidden_state, expected)


def test_regression_and_label_names(tmp_path):
    theirs = model("bert", "ForSequenceClassification", num_labels=1, problem_type="regression")
    ours = SequenceClassifier.from_pretrained(save(theirs, tmp_path))
    batch, targets = padded_batch("bert"), torch.tensor([0.5, 1.0, -1.0, 2.0])
    close(ours(packed(batch), targets).loss, theirs(**batch, labels=targets).loss)
    for wrong, shape in ((targets[:, None], r"\(4, 1\)"), (targets[:1], r"\(1,\)")):
        with pytest.raises(ValueError, match=rf"shape \(4,\), a number to .* got shape {shape}"):
            ours(packed(batch), wrong)
    fresh = SequenceClassifier(
        EncoderConfig(vocab_size=97, hidden_size=32, num_layers=1, num_heads=2),
        label_names=["no", "yes"],
    )
    fresh.save_pretrained(tmp_path / "named")
    assert SequenceClassifier.from_pretrained(tmp_path / "named").label_names == ["no", "yes"]


@EVERY_FAMILY
def test_several_labels_a_sequence_agree_with_transformers(family, tmp_path):
    theirs = model(
        family, "ForSequenceClassification", num_labels=3, problem_type="multi_label_classification"
    )
    ours = SequenceClassifier.from_pretrained(save(theirs, tmp_path))
    batch, targets = padded_batch(family), torch.randint(2, (4, 3)).float()
    expected, output = theirs(**batch, labels=targets), ours(packed(batch), targets)
    close(output.loss, expected.loss)
    expected.loss.backward()
    output.loss.backward()
    for name, ours_name in (("weight", "out.weight"), ("bias", "out.bias")):
        head = [p for n, p in theirs.named_parameters() if n.startswith("classifier")]
        grad = next(
            p.grad
            for p in reversed(head)
            if p.shape[0] == 3 and (p.dim() == 2) == (name == "weight")
        )
        close(ours.get_parameter(f"head.{ours_name}").grad, grad)
    with pytest.raises(
        ValueError, match=r"floating point of shape \(4, 3\), 0 or 1 for each label"
    ):
        ours(packed(batch), torch.tensor([0, 1, 2, 0]))


def test_a_head_that_the_checkpoint_lacks_gets_first_weights(tmp_path):
    folder = save(model("bert"), tmp_path)
    ours = SequenceClassifier.from_pretrained(folder, num_labels=4)
    assert ours.head["out"].weight.shape == (4, 32) and 0 < ours.head["out"].weight.std() < 0.05
    assert not ours.head["out"].bias.any()
    assert not any(parameter.is_meta for parameter in ours.parameters())
    assert not any(p.is_meta for p in MaskedLM.from_pretrained(folder).parameters())


@pytest.mark.parametrize("change", ["in place", "through .data", "fused optimiser"])
def test_inference_follows_changed_weights(tmp_path, change):
    """The weights reordered for inference are made again, even after writes that torch's counters do not see."""
    ours = Encoder.from_pretrained(save(model("bert"), tmp_path))
    batch = packed(padded_batch("bert"))
    ours(batch).last_hidden_state.square().sum().backward()
    with torch.inference_mode():
        ours(batch)
    weight = ours.layers[0].up.weight
    if change == "in place":
        with torch.no_grad():
            weight.mul_(2)
    elif change == "through .data":
        weight.data.mul_(2)
    else:
        torch.optim.AdamW(ours.parameters(), lr=0.1, fused=True).step()
    with torch.no_grad():
        fused = ours(batch).last_hidden_state
    with torch.enable_grad():
        plain = ours(batch).last_hidden_state
    close(fused, plain)


@pytest.fixture(scope="module")
def minilm():
    return Encoder.from_pretrained(minilm_folder())


def test_real_minilm_within_1e5_of_transformers(minilm):
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(minilm_folder()).eval()
    draw = torch.Generator().manual_seed(0)
    ids = [
        [101, *torch.randint(1000, 29000, (n - 2,), generator=draw).tolist(), 102]
        for n in (3, 7, 20, 64, 128, 511)
    ]
    with torch.inference_mode():
        ours = minilm(pack_sequences(ids)).last_hidden_state
        expected = torch.cat([theirs(torch.tensor([row])).last_hidden_state[0] for row in ids])
    assert (ours - expected).abs().max() < 1e-5


def test_encode_agrees_with_sentence_transformers(minilm):
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(minilm_folder()), device="cpu")
    texts = ["Short.", "A somewhat longer sentence about nothing in particular.", "x " * 200, ""]
    theirs.max_seq_length = 512
    expected = torch.tensor(theirs.encode(texts, normalize_embeddings=True))
    for batch_size in (1, 3, 32):
        close(minilm.encode(texts, batch_size=batch_size), expected)
    close(minilm.encode(texts[1]), expected[1])
    assert minilm.encode([]).shape == (0, 384)
    cls = minilm.encode(texts[:2], pooling="cls", normalize=False)
    with torch.inference_mode():
        ids = [e.ids for e in minilm.tokenizer.encode_batch(texts[:2])]
        close(cls[0], minilm(pack_sequences(ids)).last_hidden_state[0])
        largest = minilm(pack_sequences(ids[1:])).last_hidden_state.amax(0)
    close(minilm.encode(texts[:2], pooling="max", normalize=False)[1], largest)
    long = minilm.encode("word " * 2000)
    assert long.isfinite().all()


@needs_cpp
def test_bfloat16_stays_close(minilm):
    half = Encoder.from_pretrained(minilm_folder(), dtype="bfloat16")
    texts = ["A text to embed.", "Another text, of another length and meaning."]
    similarity = F.cosine_similarity(half.encode(texts).float(), minilm.encode(texts))
    assert (similarity > 0.999).all()


def test_loading_needs_no_transformers(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from fastenc import Encoder\n"
        f"print(Encoder.from_pretrained({str(minilm_folder())!r}).encode('a text').shape)\n"
        "assert 'torch._dynamo' not in sys.modules, 'importing the compiler takes as long as importing torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "384" in done.stdout


def test_broken_checkpoints_are_named(tmp_path):
    good = save(model("bert"), tmp_path / "good")

    def broken(change):
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        change(folder)
        return folder

    def drop_tensor(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors["encoder.layer.1.attention.self.key.weight"]
        save_file(tensors, folder / "model.safetensors")

    def narrow(folder):
        config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 40}
        (folder / "config.json").write_text(json.dumps(config))

    def change_config(**values):
        def change(folder):
            config = json.loads((folder / "config.json").read_text()) | values
            (folder / "config.json").write_text(
                json.dumps({k: v for k, v in config.items() if v != "drop"})
            )

        return change

    def truncate(folder):
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])

    def pickle_only(folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    def index(content):
        def change(folder):
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors.index.json").write_text(json.dumps(content))

        return change

    lost_shard = index({"weight_map": {"a": "model-00001-of-00002.safetensors"}})

    def narrow_query(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors["encoder.layer.1.attention.self.query.weight"] = torch.zeros(32, 16)
        save_file(tensors, folder / "model.safetensors")

    for change, message in (
        (drop_tensor, r"incomplete: it lacks encoder.layer.1.attention.self.key.weight"),
        (
            narrow,
            r"intermediate.dense.weight has shape \(48, 32\), but config.json asks for \(40, 32\)",
        ),
        (truncate, r"model.safetensors is corrupt or incomplete"),
        (pickle_only, r"has no model.safetensors: it has pytorch_model.bin, a pickle"),
        (lost_shard, r"incomplete: .*model-00001-of-00002.safetensors is named by"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config.json"),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            r"config.json is not valid JSON \(.*\): write it again",
        ),
        (change_config(model_type="gpt2"), r"model_type must be one of .*'bert'.*got 'gpt2'"),
        (
            change_config(position_embedding_type="relative_key"),
            r"position_embedding_type must be 'absolute'",
        ),
        (change_config(hidden_act="mish"), r"hidden_act must be one of .*got 'mish'"),
        (change_config(num_attention_heads=5), r"multiple of num_heads, got 32 and 5"),
        (change_config(hidden_size="drop"), r"config.json must give hidden_size"),
        (
            index({"weight_map": {"a": "../good/model.safetensors"}}),
            r"index.json must name files inside its folder, got '../good/model.safetensors'",
        ),
        (
            index({"weight_map": {"a": str(good / "model.safetensors")}}),
            r"index.json must name files inside its folder, got '/.*/good/model.safetensors'",
        ),
        (index([]), r"index.json is not an index of weights"),
        (
            narrow_query,
            r"model.safetensors: encoder.layer.1.attention.self.query.weight has shape \(32, 16\), "
            r"but config.json asks for \(32, 32\)",
        ),
        # A hundred thousand layers would take minutes to build.
        (
            change_config(num_hidden_layers=100_000),
            r"model.safetensors has 2 layers, but config.json says num_hidden_layers 100000",
        ),
        (
            change_config(num_hidden_layers=1),
            r"model.safetensors has 2 layers, but config.json says num_hidden_layers 1",
        ),
        (
            change_config(type_vocab_size=0),
            r"model.safetensors has embeddings.token_type_embeddings.weight, which the model of "
            r"config.json does not have",
        ),
        (change_config(type_vocab_size=-1), r"type_vocab_size must be an integer of at least 0"),
        (change_config(layer_norm_eps=-1e-12), r"eps must be a finite number of at least 0"),
        (change_config(layer_norm_eps=float("nan")), r"eps must be a finite number .* got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            Encoder.from_pretrained(broken(change))


@pytest.mark.parametrize(
    ("model_class", "option", "message"),
    [
        (
            Encoder,
            "device",
            "options dtype, layer_mix, got device: call .to\\(device\\) on the loaded",
        ),
        (
            MaskedLM,
            "activation",
            "options dtype, layer_mix, mask_decoder, got activation: leave it out",
        ),
        (SentenceEmbedder, "temperature", ", scale, .*, got temperature: leave it out"),
    ],
)
def test_unknown_options_are_named_before_the_files_are_read(model_class, option, message):
    with pytest.raises(ValueError, match=message):
        model_class.from_pretrained("nowhere", **{option: "cpu"})


def test_shards_that_are_links_are_read(tmp_path):
    """As they are in the hub's cache."""
    good, blobs = save(model("bert"), tmp_path / "good"), tmp_path / "blobs"
    blobs.mkdir()
    names = list(load_file(good / "model.safetensors"))
    (good / "model.safetensors").rename(blobs / "a")
    (good / "model-1.safetensors").symlink_to("../blobs/a")
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (good / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Encoder.from_pretrained(good).config.num_layers == 2


def test_an_error_in_encode_leaves_the_mode_as_it_was(tmp_path, minilm, monkeypatch):
    monkeypatch.setattr(minilm, "pooled_vectors", lambda *_: 1 / 0)
    minilm.train()
    try:
        with pytest.raises(ZeroDivisionError):
            minilm.encode("a text")
        assert minilm.training
    finally:
        minilm.eval()


def test_bad_batches_are_named(tmp_path, minilm):
    with pytest.raises(
        ValueError, match=r"token ids must be in \[0, 30522\), got 40000: was another model's"
    ):
        minilm(pack_sequences([[101, 40000]]))
    with pytest.raises(ValueError, match=r"token ids must be in .* got -1"):
        minilm(pack_sequences([[101, -1]]))
    with pytest.raises(ValueError, match=r"at most 512 tokens, the model's positions, got 513"):
        minilm(pack_sequences([[101] * 513]))
    with pytest.raises(ValueError, match=r"token types must be in \[0, 2\), got 2"):
        minilm(pack_sequences([[101, 102]], [[0, 2]]))
    with pytest.raises(ValueError, match=r"pooling must be one of .*got 'sum'"):
        minilm.encode(["a"], pooling="sum")
    with pytest.raises(ValueError, match=r"batch_size must be at least 1, got 0"):
        minilm.encode(["a"], batch_size=0)
    bare = Encoder(EncoderConfig(vocab_size=50, hidden_size=32, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match=r"takes a PackedBatch, got str: encode\(\) takes texts"):
        bare("a text")
    with pytest.raises(ValueError, match=r"encode needs the checkpoint's tokenizer.json"):
        bare.encode(["a"])
    classifier = SequenceClassifier(bare.config)
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\), got 2"):
        classifier(pack_sequences([[1, 2]]), torch.tensor([2]))
    masked = MaskedLM(bare.config)
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\)"):
        masked(pack_sequences([[1, 2]]), torch.tensor([2]))
    with pytest.raises(ValueError, match=r"labels must be in \[0, 50\)"):
        masked(pack_sequences([[1, 2]]), torch.tensor([-100, 50]))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("tokens", [40, 400], ids=["few", "many"])
def test_offsets_are_checked_once_a_batch(grad, tokens, monkeypatch):
    checked, check = [], offsets._check_offsets
    monkeypatch.setattr(offsets, "_check_offsets", lambda *a: (checked.append(a), check(*a)))
    encoder = Encoder(EncoderConfig(50, 32, 4, 2, 48, 16)).train(grad)
    batch = pack_sequences([[1] * 10] * (tokens // 10))
    with torch.set_grad_enabled(grad):
        for times in (1, 2):
            if times == 2:  # written to since
                batch.cu_seqlens.mul_(1)
            encoder(batch)
            assert len(checked) == times
