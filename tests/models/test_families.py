"""What every family must do: values and gradients, files, dropout, autocast, compile, adaptations.

tests/integrations/test_patch_families.py has further tests of patched transformers models.
"""

import copy
import json

import pytest
import torch
from torch.utils import checkpoint

import fastenc
from fastenc.adapt import (
    Adapters,
    Lora,
    PrefixTuning,
    PromptTuning,
    add_adaptation,
    merge_adaptation,
)
from fastenc.models import Encoder, SequenceClassifier
from fastenc.models.adapters.adaptation_methods import encoder_parts
from fastenc.models.architectures import ARCHITECTURES
from fastenc.packing import pack_sequences
from tests.helpers.adaptations import disturb
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import (
    BY_NAME,
    ENCODERS,
    FAMILIES,
    config,
    dropouts,
    model,
    padded_batch,
    skip_without_autocast,
)
from tests.helpers.family_examples import (
    MODEL_CLASSES,
    WITH_QUESTIONS,
    Example,
    assert_same_results,
    in_dtype,
)

EVERY_ENCODER = pytest.mark.parametrize("family", ENCODERS)
EVERY_MODEL = pytest.mark.parametrize(
    ("family", "task"),
    [
        *((family, "Model") for family in ENCODERS),
        *((family, task) for family in FAMILIES for task in [*MODEL_CLASSES][1:4]),
        *((family, "ForQuestionAnswering") for family in WITH_QUESTIONS),
        *((family, task) for family in ENCODERS for task in BY_NAME[family].heads),
    ],
)
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]
)


def dropouts_of_encoder(family):
    """The names of the encoder's dropout probabilities in a configuration, all 0."""
    heads = ("classif", "qa_", "summary", "pooler_")
    return {
        name: p for name, p in dropouts(family).items() if not any(head in name for head in heads)
    }


@EVERY_MODEL
@EVERY_DTYPE
@needs_cpp
def test_logits_loss_and_every_gradient(family, task, dtype, tmp_path):
    theirs = in_dtype(model(family, task), dtype)
    assert_same_results(theirs, Example(family, task), dtype, save(theirs, tmp_path))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_padding_tokens_within_a_text_are_not_its_last_token(family, tmp_path):
    """Qwen3's tokenizer ends a text with the token that pads."""
    theirs = model(family, "ForSequenceClassification")
    ours = SequenceClassifier.from_pretrained(save(theirs, tmp_path))
    padded = padded_batch(family)
    pad, ids = ours.config.pad_token_id, padded["input_ids"]
    ids[0, 4], ids[1, 3], ids[2] = pad, pad, pad
    with torch.no_grad():
        close(ours(packed(padded)).logits, theirs(**padded).logits)


@EVERY_MODEL
def test_files_both_ways_bit_for_bit(family, task, tmp_path):
    theirs = model(family, task)
    ours = MODEL_CLASSES[task].from_pretrained(save(theirs, tmp_path / "theirs"))
    ours.save_pretrained(tmp_path / "ours")
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == [type(theirs).__name__]
    wanted, restored = theirs.state_dict(), again.state_dict()
    assert wanted.keys() == restored.keys()
    for name, value in wanted.items():
        assert torch.equal(restored[name], value), name
    back = MODEL_CLASSES[task].from_pretrained(save(again, tmp_path / "again")).state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(back[name], value), name


@EVERY_ENCODER
@needs_cpp
def test_each_dropout_is_transformers(family, tmp_path):
    """A text in 600 rows: mean and deviation of each output over the rows, for one dropout at a time.

    Of a loaded model, and of a patched model.
    """
    rows = torch.tensor([[5, 9, 30, 11, 7, 8]]).expand(600, -1)
    batch = pack_sequences([row.tolist() for row in rows])
    for name in dropouts_of_encoder(family):
        theirs = model(family, **dropouts_of_encoder(family) | {name: 0.4}).train()
        loaded = Encoder.from_pretrained(save(theirs, tmp_path / name)).train()
        patched = fastenc.patch(copy.deepcopy(theirs))
        with torch.no_grad():
            wanted = theirs(input_ids=rows).last_hidden_state
            hidden = {
                "loaded": loaded(batch).last_hidden_state.view(600, 6, 32),
                "patched": patched(input_ids=rows).last_hidden_state,
            }
            off = loaded.eval()(batch).last_hidden_state.view(600, 6, 32)
        assert wanted.std(0).mean() > 0.01, f"{name} changes nothing"
        assert off.std(0).max() < 1e-5
        for which, values in hidden.items():
            a, b = values.std(0), wanted.std(0)
            ratio = float((a / b).log().mean())
            assert abs(ratio) < 0.03, f"{name}, {which}: {ratio:.3f}"
            error = (values.mean(0) - wanted.mean(0)) / ((a**2 + b**2) / 600).sqrt()
            assert error.abs().max() < 5.5, f"{name}, {which}"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(
            (family, "classifier_dropout")
            for family in ("bert", "roberta", "electra", "modernbert", "ultrabert")
        ),
        ("distilbert", "seq_classif_dropout"),
        ("albert", "classifier_dropout_prob"),
        ("deberta-v2", "pooler_dropout"),
        ("deberta-v2", "cls_dropout"),
    ],
)
@needs_cpp
def test_dropout_of_a_classifiers_head_is_transformers(family, name, tmp_path):
    """The deviation of each logit over 2,000 rows of the same text."""
    options = dropouts(family) | {name: 0.4}
    theirs = model(family, "ForSequenceClassification", num_labels=5, **options).train()
    ours = SequenceClassifier.from_pretrained(save(theirs, tmp_path)).train()
    rows = torch.tensor([[5, 9, 30, 11, 7, 8]]).expand(2000, -1)
    with torch.no_grad():
        wanted = theirs(input_ids=rows).logits
        logits = ours(pack_sequences(rows.tolist())).logits
    assert wanted.std(0).min() > 0.01
    assert abs((logits.std(0) / wanted.std(0)).log().mean()) < 0.08


@EVERY_ENCODER
@needs_cpp
def test_autocast(family, tmp_path):
    skip_without_autocast(family)
    theirs, example = model(family), Example(family, "Model")
    loaded = Encoder.from_pretrained(save(theirs, tmp_path))
    patched = fastenc.patch(copy.deepcopy(theirs))
    wanted = example.theirs(copy.deepcopy(theirs).double())[0].detach()
    with torch.autocast("cpu", torch.bfloat16):
        plain = example.theirs(theirs)[0]
        results = example.ours(loaded), example.theirs(patched)
    error = lambda x: float((x.detach().double() - wanted).norm())
    for output, loss in results:
        assert error(output) <= 2 * (error(plain) + 2**-9 * float(wanted.norm()))
        loss.backward()
    for m in (loaded, patched):
        assert all(p.grad.dtype == torch.float32 for p in m.parameters() if p.grad is not None)


# Together they have what a compiled layer can be made of; a graph takes seconds.
COMPILED = (
    "bert",
    "modernbert",
    "umt5",
    "embedding_gemma2",  # its layers have all that those of Gemma 3 have
    "deberta-v2",
    "longformer",
    "big_bird",
)


@pytest.mark.parametrize("family", COMPILED)
def test_compiled_it_is_one_graph_with_the_same_gradients(family, tmp_path):
    layers = ARCHITECTURES[config(family).model_type].config_names["num_layers"]
    # As few layers as show everything: compiling a graph takes a second.
    count = 2 if family in ("modernbert", "umt5", "embedding_gemma2") else 1
    ours = Encoder.from_pretrained(save(model(family, **{layers: count}), tmp_path))
    torch.compiler.reset()  # otherwise it would give up after some recompilations
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    example, results = Example(family, "Model"), []
    for m in (ours, compiled):
        ours.zero_grad()
        example.ours(m)[1].backward()
        # The compiled graph returns zeros for a pooler that the loss does not read.
        gradient = lambda p: torch.zeros_like(p) if p.grad is None else p.grad
        results.append({name: gradient(p) for name, p in ours.named_parameters()})
    floor = 1e-3 * max(grad.norm() for grad in results[0].values())
    for name, grad in results[0].items():
        error = (results[1][name] - grad).norm() / torch.maximum(grad.norm(), floor)
        assert error < 1e-4, f"{name}: {error:.2g}"


@EVERY_ENCODER
def test_gradient_checkpointing_gives_the_same_gradients(family, tmp_path, monkeypatch):
    """With dropout: the recomputed forward draws the same masks as the first."""
    ours = Encoder.from_pretrained(save(model(family), tmp_path)).train()
    recomputed = []
    counted = lambda *arguments, **options: (
        recomputed.append(1),
        checkpoint.checkpoint(*arguments, **options),
    )[1]
    monkeypatch.setattr("fastenc.nn.stack.checkpoint", counted)
    example, results = Example(family, "Model"), []
    for on in (False, True):
        ours.gradient_checkpointing = on
        ours.zero_grad()
        torch.manual_seed(0)
        example.ours(ours)[1].backward()
        results.append([p.grad for p in ours.parameters() if p.grad is not None])
    assert len(recomputed) == ours.config.num_layers
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def lora(ours):
    targets = ours.config.architecture.lora_targets(ours.config).values()
    linears = [target for several in targets for target in several]
    return Lora(rank=2, targets=[*linears, *encoder_parts(ours.config)])


METHODS = {
    "lora": lora,
    "adapters": lambda _: Adapters(4),
    "prefix": lambda _: PrefixTuning(3),
    "prompt": lambda _: PromptTuning(2),
}


@EVERY_ENCODER
@pytest.mark.parametrize("method", METHODS)
def test_adaptations(family, method, tmp_path):
    """Only the adaptations are trained, their gradients match finite differences, and files hold nothing else."""
    ours = Encoder.from_pretrained(save(model(family), tmp_path / "base"))
    plain = ours(Example(family, "Model").packed).last_hidden_state
    if method == "prefix" and (BY_NAME[family].sees_distances or family == "albert"):
        with pytest.raises(ValueError, match=r"a prefix cannot be added to a .* model, because"):
            add_adaptation(ours, PrefixTuning(3))
        return
    add_adaptation(ours, METHODS[method](ours))
    example = Example(family, "Model")
    if method in ("lora", "adapters"):
        torch.testing.assert_close(ours(example.packed).last_hidden_state, plain, rtol=0, atol=1e-5)
    disturb(ours)
    ours.save_pretrained(tmp_path / "adapted")
    assert not (tmp_path / "adapted" / "model.safetensors").exists()
    expected = ours(example.packed).last_hidden_state
    assert not torch.allclose(expected, plain, atol=1e-2)
    again = Encoder.from_pretrained(tmp_path / "adapted")
    assert torch.equal(again(example.packed).last_hidden_state, expected)
    if method == "lora":
        # In float64: layers may multiply the rounding of the merged weights.
        separate = again.double()(example.packed).last_hidden_state
        merge_adaptation(again)
        merged = again(example.packed).last_hidden_state
        assert (merged - separate).norm() < 1e-9 * separate.norm()

    ours.double()
    example.ours(ours)[1].backward()
    added = [(n, p) for n, p in ours.named_parameters() if p.grad is not None]
    assert added and all(
        any(part in n for part in (".adaptations.", "prompts.", ".parts."))
        for n, _ in added
        if "pooler" not in n
    )
    torch.manual_seed(2)
    steps = [(p, torch.randn_like(p)) for _, p in added]
    values = []
    with torch.no_grad():
        for size in (1e-7, -2e-7):
            for parameter, direction in steps:
                parameter.add_(size * direction)
            values.append(float(example.ours(ours)[1]))
    slope = (values[0] - values[1]) / 2e-7
    assert float(sum((p.grad * d).sum() for p, d in steps)) == pytest.approx(slope, rel=1e-3)


# Configurations that differ from those of tests.helpers.families in one switch.
SWITCHES = [
    ("bert", dict(hidden_act="relu")),
    ("bert", dict(tie_word_embeddings=False)),
    ("roberta", dict(type_vocab_size=2, tie_word_embeddings=False)),
    ("xlm-roberta-xl", dict(hidden_act="gelu_new", tie_word_embeddings=False)),
    ("distilbert", dict(activation="relu", sinusoidal_pos_embds=True)),
    ("electra", dict(embedding_size=32, hidden_act="gelu_new")),
    ("mpnet", dict(hidden_act="relu", layer_norm_eps=1e-5)),
    ("deberta", dict(max_relative_positions=8, pos_att_type=["p2c", "p2p"], embedding_size=16)),
    ("deberta", dict(pos_att_type=["c2p"], legacy=False, type_vocab_size=2)),
    ("deberta", dict(relative_attention=False, position_biased_input=True, hidden_act="relu")),
    ("deberta-v2", dict(share_att_key=False, max_relative_positions=20)),
    ("deberta-v2", dict(share_att_key=False, pos_att_type="c2p", norm_rel_ebd="none")),
    ("deberta-v2", dict(pos_att_type=["p2c"], position_buckets=-1)),
    ("deberta-v2", dict(position_buckets=-1, max_relative_positions=6, pos_att_type=None)),
    ("deberta-v2", dict(relative_attention=False, position_biased_input=True, type_vocab_size=2)),
    ("deberta-v2", dict(embedding_size=16, hidden_act="relu", pooler_hidden_act="tanh")),
    ("deberta-v2", dict(legacy=False, conv_kernel_size=3, conv_act="gelu", conv_groups=2)),
    ("deberta-v2", dict(conv_kernel_size=5, tie_word_embeddings=False, pooler_hidden_act="relu")),
    ("deberta-v2", dict(legacy=False, tie_word_embeddings=False, layer_norm_eps=1e-5)),
    ("longformer", dict(attention_window=[4, 64], type_vocab_size=2, hidden_act="relu")),
    ("longformer", dict(attention_window=16, tie_word_embeddings=False, layer_norm_eps=1e-3)),
    ("big_bird", dict(use_bias=False, rescale_embeddings=True, hidden_act="gelu")),
    ("megatron-bert", dict(hidden_act="gelu_new", tie_word_embeddings=False)),
    ("ernie", dict(use_task_id=False, type_vocab_size=4, hidden_act="relu")),
    ("rembert", dict(input_embedding_size=32, output_embedding_size=40, hidden_act="relu")),
    ("albert", dict(num_hidden_groups=1, hidden_act="gelu")),
    # The number of groups does not divide the number of layers.
    ("albert", dict(num_hidden_layers=5, inner_group_num=1, tie_word_embeddings=False)),
    ("t5", dict(relative_attention_num_buckets=8, relative_attention_max_distance=20)),
    ("t5", dict(feed_forward_proj="gated-silu", num_heads=3, d_kv=16)),
    ("t5", dict(feed_forward_proj="gated-relu", tie_word_embeddings=False)),
    ("umt5", dict(relative_attention_num_buckets=8)),
    ("bart", dict(scale_embedding=True, activation_function="relu")),
    ("mbart", dict(scale_embedding=False)),
    ("marian", dict(scale_embedding=True, activation_function="swish")),
    ("pegasus", dict(d_model=33, encoder_attention_heads=3, scale_embedding=False)),
    ("m2m_100", dict(d_model=36, scale_embedding=False, pad_token_id=4)),
    (
        "modernbert",
        dict(attention_bias=True, mlp_bias=True, norm_bias=True, decoder_bias=False)
        | dict(classifier_bias=True, classifier_pooling="mean", classifier_activation="silu"),
    ),
    ("modernbert", dict(layer_types=["sliding_attention"] * 4, local_attention=6)),
    ("modernbert", dict(global_attn_every_n_layers=2, hidden_activation="silu")),
    ("modernbert", dict(tie_word_embeddings=False)),
    # As mmBERT's files have it; transformers reads no such value.
    ("modernbert", dict(position_embedding_type="sans_pos")),
    ("nomic_bert", dict(head_dim=32, hidden_act="gelu", tie_word_embeddings=False)),
    ("gte", dict(type_vocab_size=0)),
    (
        "jina_embeddings_v3",
        dict(hidden_act="gelu_new", rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    ),
    (
        "eurobert",
        dict(attention_bias=True, mlp_bias=True, classifier_pooling="bos", hidden_act="gelu"),
    ),
    ("eurobert-grouped", dict(num_key_value_heads=1, attention_bias=True)),
    ("qwen3", dict(num_key_value_heads=4, attention_bias=True)),
    ("qwen3", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    ("qwen3", dict(head_dim=32, rms_norm_eps=1e-3, hidden_act="gelu")),
    ("gemma3", dict(head_dim=32, attention_bias=True, hidden_activation="silu", rms_norm_eps=1e-3)),
    (
        "gemma3",
        dict(
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=5,
            num_key_value_heads=4,
        ),
    ),
    ("embedding_gemma2", dict(embedding_dim=48, hidden_size_per_layer_input=24, sliding_window=3)),
    (
        "embedding_gemma2",
        dict(num_key_value_heads=4, num_global_key_value_heads=2, attention_bias=True)
        | dict(hidden_activation="silu", rms_norm_eps=1e-3),
    ),
    ("eurobert", dict(tie_word_embeddings=True, classifier_pooling="mean", head_dim=32)),
    (
        "esm",
        dict(token_dropout=False, emb_layer_norm_before=True, position_embedding_type="absolute"),
    ),
    ("esm", dict(emb_layer_norm_before=True, tie_word_embeddings=False, rope_theta=100.0)),
    (
        "esmc",
        dict(num_hidden_layers=5, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    ),
    ("gte", dict(type_vocab_size=2, hidden_act="silu")),
]


@pytest.mark.parametrize(("family", "changes"), SWITCHES, ids=str)
@needs_cpp
def test_switches(family, changes, tmp_path):
    entry = BY_NAME[family]
    for task in ["Model", *entry.heads] if entry.no_heads else [*MODEL_CLASSES][:3]:
        theirs = model(family, task, **changes)
        assert_same_results(theirs, Example(family, task), folder=save(theirs, tmp_path / task))


@needs_cpp
def test_sparse_prediction():
    """ModernBERT's switch that computes logits only of labelled tokens."""
    theirs = model("modernbert", "ForMaskedLM", sparse_prediction=True)
    example = Example("modernbert", "ForMaskedLM")
    patched = fastenc.patch(copy.deepcopy(theirs))
    arguments = {**example.padded, "labels": example.tokens}
    with torch.no_grad():
        with pytest.warns(UserWarning, match="returns the logits of labelled tokens only"):
            output = patched(**arguments)
        wanted = theirs(**arguments)
    torch.testing.assert_close(output.logits, wanted.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.loss, wanted.loss, rtol=0, atol=1e-5)


AGREEING = {"dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True}


@pytest.mark.parametrize("family", ["t5-gated", "mt5", "umt5"])
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (AGREEING, None),
        ({"dense_act_fn": "gelu_new"}, None),
        ({"dense_act_fn": "gelu"}, "dense_act_fn"),
        ({"dense_act_fn": "relu"}, "dense_act_fn"),
        ({"is_gated_act": False}, "is_gated_act"),
    ],
    ids=str,
)
def test_t5s_feed_forward_layer_is_described_twice(family, changes, wrong, tmp_path):
    """transformers computes with ``dense_act_fn`` and ``is_gated_act`` and ignores feed_forward_proj."""
    theirs, batch = model(family, **changes), padded_batch(family)
    folder = save(theirs, tmp_path)
    if wrong is None:
        with torch.no_grad():
            hidden = Encoder.from_pretrained(folder)(packed(batch)).last_hidden_state
            expected = theirs(**batch).last_hidden_state
        close(hidden, expected[batch["attention_mask"].bool()])
        return
    for load in (Encoder.from_pretrained, lambda folder: fastenc.patch(theirs)):
        with pytest.raises(ValueError, match=rf"{wrong} must agree with feed_forward_proj"):
            load(folder)
