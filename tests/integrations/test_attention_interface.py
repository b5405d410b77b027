"""attn_implementation="fastenc" against transformers' sdpa."""

import pytest
import torch

import fastenc
from tests.helpers.families import padded_batch

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
)
CONFIGS = {
    "Bert": SIZES,
    "ModernBert": SIZES
    | dict(
        local_attention=8,
        global_attn_every_n_layers=3,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "EuroBert": SIZES | dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=2),
    "Esmc": SIZES,
}
EVERY_MODEL = pytest.mark.parametrize("name", [*CONFIGS])
CONFIGS["EmbeddingGemma2Text"] = SIZES | dict(
    num_hidden_layers=4,
    num_key_value_heads=1,
    head_dim=16,
    hidden_size_per_layer_input=16,
    embedding_dim=32,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
)


@pytest.fixture(autouse=True)
def registered():
    fastenc.register_attention()


def models(name, dtype=torch.float32, **options):
    """The same random model with our attention and with sdpa."""
    if not hasattr(transformers, f"{name}Model"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    pair = []
    for implementation in ("fastenc", "sdpa"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(
            **CONFIGS[name] | options, attn_implementation=implementation
        )
        pair.append(getattr(transformers, f"{name}Model")(config).eval().to(dtype))
    assert pair[0].config._attn_implementation == "fastenc"
    return pair


@EVERY_MODEL
@pytest.mark.parametrize("padding", ["right", "left", "both", "holes", "none"])
def test_padded_batches(name, padding):
    ours, theirs = models(name)
    batch = padded_batch("roberta", (5, 17, 1, 30) if padding != "none" else (12, 12))
    mask = batch["attention_mask"]
    if padding == "left":
        batch = {key: value.flip(1) for key, value in batch.items()}
        mask = batch["attention_mask"]
    if padding in ("both", "holes"):
        mask[1, :2] = mask[3, :3] = 0
    if padding == "holes":  # one hole is wider than ModernBERT's window
        mask[1, 5:7] = mask[3, 8:20] = mask[3, 23] = 0
    if padding == "none":
        del batch["attention_mask"]
    results = []
    for m in (ours, theirs):
        x = m(**batch).last_hidden_state[mask.bool()]
        x.square().sum().backward()
        results.append((x, [p.grad for p in m.parameters() if p.grad is not None]))
    (x, gradients), (y, expected) = results
    torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    scale = max(g.abs().max() for g in expected)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(scale))


def test_windows_of_half_the_layers_and_heads_of_several_widths():
    """In float64: in float32 both models' gradients are 5e-5 from those in float64."""
    ours, theirs = models("EmbeddingGemma2Text", torch.float64)
    assert {layer.self_attn.head_dim for layer in ours.layers} == {16, 512}
    batch = padded_batch("roberta")
    real = batch["attention_mask"].bool()
    x, y = (m(**batch).last_hidden_state[real] for m in (ours, theirs))
    torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
    for m, out in ((ours, x), (theirs, y)):
        out.square().sum().backward()
        m.gradients = [p.grad for p in m.parameters() if p.grad is not None]
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_a_mask_may_change_between_calls():
    """transformers hands a mask of bool to the layers as it is."""
    ours, theirs = models("Bert")
    batch = padded_batch("roberta", (9, 12))
    batch["attention_mask"] = mask = batch["attention_mask"].bool()
    for _ in range(2):
        with torch.no_grad():
            x, y = (m(**batch).last_hidden_state[mask] for m in (ours, theirs))
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
        mask[0, 5:] = False


@EVERY_MODEL
def test_flattened_batches(name):
    ours, theirs = models(name)
    batch = padded_batch("roberta")
    rows = [
        {"input_ids": ids[mask.bool()].tolist()}
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    flat = collator(rows)
    del flat["labels"]
    with torch.no_grad():
        hidden = ours(**flat).last_hidden_state[0]
        expected = theirs(**batch).last_hidden_state[batch["attention_mask"].bool()]
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


def test_bfloat16_and_checkpoints(tmp_path):
    ours, theirs = models("Bert", torch.bfloat16)
    exact = models("Bert", torch.float64)[1]
    batch = padded_batch("roberta")
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        a, b, c = (m(**batch).last_hidden_state[real].double() for m in (ours, theirs, exact))
    assert (a - c).norm() < 1.5 * (b - c).norm()
    theirs.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="fastenc").eval()
    with torch.no_grad():
        assert torch.equal(again(**batch).last_hidden_state[real].double(), a)


def test_dropout_is_drawn_from_the_default_generator():
    ours, _ = models("Bert", hidden_dropout_prob=0.0)
    batch = padded_batch("roberta")
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(ours.train()(**batch).last_hidden_state)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_dropout_is_sdpas():
    """A text in 600 rows: mean and deviation of each output over the rows."""
    options = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.4)
    ours, theirs = models("Bert", **options)
    rows = torch.tensor([[5, 9, 30, 11, 7, 8]]).expand(600, -1)
    with torch.no_grad():
        x, y = (m.train()(input_ids=rows).last_hidden_state for m in (ours, theirs))
    assert abs((x.std(0) / y.std(0)).log().mean()) < 0.03
    error = (x.mean(0) - y.mean(0)) / ((x.var(0) + y.var(0)) / 600).sqrt()
    assert error.abs().max() < 5.5


def test_calls_that_the_kernel_does_not_compute_are_refused():
    sizes = SIZES | dict(is_decoder=True)
    decoder = transformers.BertModel(
        transformers.BertConfig(**sizes, attn_implementation="fastenc")
    )
    batch = padded_batch("roberta")
    with pytest.raises(ValueError, match=r"is bidirectional, and the layer is causal.*sdpa"):
        decoder(**batch)
    ours, _ = models("Bert")
    square = batch["attention_mask"][:, None, None, :].bool()
    with pytest.raises(
        ValueError, match=r"takes masks \(batch, length\), got shape \(4, 1, 1, 30\)"
    ):
        ours(input_ids=batch["input_ids"], attention_mask=square)
    with pytest.raises(ValueError, match="has no softcap"):
        ours(**batch, softcap=30.0)
    layout_lm = transformers.LayoutLMModel(
        transformers.LayoutLMConfig(**SIZES, attn_implementation="fastenc")
    )
    with pytest.raises(
        ValueError, match=r"takes masks \(batch, length\), got shape \(1, 1, 1, 2\)"
    ):
        layout_lm(input_ids=torch.tensor([[5, 6]]))
