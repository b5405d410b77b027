"""Only some tokens' last states: the last layer computes its feed-forward sublayer for these tokens alone."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastenc
from fastenc.adapt import PromptTuning, add_adaptation
from fastenc.models import (
    Encoder,
    EncoderConfig,
    MaskedLM,
    SequenceClassifier,
    SpanClassifier,
    encoder,
)
from fastenc.objectives.nsp import PairMaskedLM
from fastenc.ops import flops  # noqa: F401  (registers the formulas)
from fastenc.packing import PackedBatch, first_tokens, last_tokens, pack_sequences
from tests.helpers.checkpoints import close, save
from tests.helpers.compiled import compiled_once
from tests.helpers.extension import needs_cpp
from tests.helpers.families import ENCODERS, config, model
from tests.helpers.family_examples import Example, assert_same_results

EVERY_ENCODER = pytest.mark.parametrize("family", ENCODERS)


class ExampleOfSomeTokens(Example):
    """The states of three texts' first tokens, and of others, of which one is read twice and none of the third text."""

    def __init__(self, family: str):
        super().__init__(family, "Model")
        self.tokens = torch.tensor([0, 5, 23, 9, 4, 9, 50])
        self.weight = self.weight[: len(self.tokens)]

    def theirs(self, model):
        hidden = model(**self.padded).last_hidden_state[self.mask][self.tokens]
        return hidden, (hidden * self.weight.to(hidden)).sum()

    def ours(self, model):
        hidden = model(self.packed, output_tokens=self.tokens).last_hidden_state
        return hidden, (hidden * self.weight.to(hidden)).sum()


@EVERY_ENCODER
@needs_cpp
def test_states_and_every_gradient(family, tmp_path):
    theirs = model(family)
    assert_same_results(theirs, ExampleOfSomeTokens(family), folder=save(theirs, tmp_path))


@EVERY_ENCODER
@torch.no_grad()
def test_states_without_gradients(family, tmp_path):
    """Of a loaded encoder, and frozen."""
    theirs, example = model(family), ExampleOfSomeTokens(family)
    wanted, _ = example.theirs(theirs)
    encoder = Encoder.from_pretrained(save(theirs, tmp_path)).eval()
    close(example.ours(encoder)[0], wanted)
    close(example.ours(fastenc.freeze(encoder))[0], wanted)


def test_compiled(tmp_path):
    theirs, example = model("bert"), ExampleOfSomeTokens("bert")
    encoder = Encoder.from_pretrained(save(theirs, tmp_path)).eval()
    compiled = compiled_once(lambda: example.ours(encoder)[0])
    close(compiled(), example.theirs(theirs)[0])


def long_batch() -> PackedBatch:
    """More rows than threads share the columns of."""
    return pack_sequences([torch.randint(5, 97, (40,)).tolist() for _ in range(20)])


def multiplications(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2


@needs_cpp
@pytest.mark.parametrize("way", ["as it is", "frozen", "with gradients"])
def test_the_last_layer_computes_no_other_tokens(way):
    torch.manual_seed(0)
    width, inner = 64, 96
    encoder = Encoder(EncoderConfig(97, width, 2, 2, inner, 40, pooler=False)).eval()
    batch = long_batch()
    tokens = first_tokens(batch)
    if way == "frozen":
        fastenc.freeze(encoder)
    with torch.set_grad_enabled(way == "with gradients"):
        every = multiplications(lambda: encoder(batch))
        some = multiplications(lambda: encoder(batch, output_tokens=tokens))
    # With gradients the projection after attention is one op with it.
    of_each = 2 * inner * width + (0 if way == "with gradients" else width * width)
    assert every - some == (batch.total_tokens - len(tokens)) * of_each


def models_that_read_some_tokens() -> dict[str, tuple]:
    """For each a call, and the number of the tokens that it reads."""
    bert, batch = EncoderConfig(97, 64, 2, 2, 96, 40), long_batch()
    of_family = lambda family: EncoderConfig.from_hf(
        config(family).to_dict() | {"max_position_embeddings": 64}
    )
    labels = batch.input_ids.where(torch.arange(batch.total_tokens) % 7 == 3, -100)
    texts, labelled = batch.num_sequences, int((labels != -100).sum())
    spans = torch.arange(texts)
    words = dict(
        word_rows=first_tokens(batch) + 1, windows=spans[:, None], starts=spans, ends=spans
    )
    first = lambda model: model(batch)
    return {
        "through the pooler": (SequenceClassifier(bert), first, texts),
        "first token": (SequenceClassifier(of_family("roberta")), first, texts),
        "last token": (SequenceClassifier(of_family("qwen3")), first, texts),
        "vectors": (Encoder(bert), lambda model: model.pooled_vectors(batch, "cls"), texts),
        "words": (
            SpanClassifier(bert, label_names=["X"], max_span_words=1),
            lambda model: model(batch, **words),
            texts,
        ),
        "masked LM": (MaskedLM(bert), lambda model: model(batch, labels), labelled),
        "pairs": (
            PairMaskedLM(bert),
            lambda model: model(batch, labels, pair_labels=spans % 2),
            texts + labelled,
        ),
    }


@needs_cpp
@pytest.mark.parametrize("name", models_that_read_some_tokens())
def test_models_tell_the_encoder_which_tokens_they_read(name, monkeypatch):
    seen, run_stack = [], encoder.run_stack

    def recorded(*arguments, output_tokens=None, **options):
        seen.append(output_tokens)
        return run_stack(*arguments, output_tokens=output_tokens, **options)

    monkeypatch.setattr(encoder, "run_stack", recorded)
    read, call, tokens = models_that_read_some_tokens()[name]
    call(read)
    assert [len(each) for each in seen] == [tokens]


def test_a_text_without_tokens_has_no_first_token():
    config = EncoderConfig(97, 64, 2, 2, 96, 40)
    batch = pack_sequences([[5, 6], [], [7]])
    labels = torch.tensor([-100, 6, -100])
    message = "an empty sequence has nothing to pool, got one at index 1"
    for call in (
        lambda: Encoder(config).first_states(batch),
        lambda: PairMaskedLM(config)(batch, labels, pair_labels=torch.zeros(3).long()),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@needs_cpp
@torch.no_grad()
def test_every_second_of_some_indices():
    """Such a slice is not contiguous. A frozen encoder computes few tokens in one op."""
    encoder = fastenc.freeze(Encoder(EncoderConfig(97, 64, 2, 2, 96, 40)).eval())
    batch, tokens = pack_sequences([[5, 6, 7], [8, 9]]), torch.arange(5)[::2]
    whole = encoder(batch).last_hidden_state
    assert torch.equal(encoder(batch, output_tokens=tokens).last_hidden_state, whole[tokens])


@torch.no_grad()
def test_of_an_encoder_with_one_layer_and_a_convolution():
    values = config("deberta-v2").to_dict() | dict(num_hidden_layers=1, conv_kernel_size=3)
    encoder, batch = Encoder(EncoderConfig.from_hf(values)).eval(), long_batch()
    tokens = first_tokens(batch) + 1
    assert encoder.convolution is not None
    whole = encoder(batch).last_hidden_state
    close(encoder(batch, output_tokens=tokens).last_hidden_state, whole[tokens])


@needs_cpp
@torch.no_grad()
def test_the_states_have_the_same_bits():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(97, 64, 2, 2, 96, 40)).eval()
    batch = long_batch()
    tokens = last_tokens(batch, pad_token_id=0)
    for each in (encoder, fastenc.freeze(encoder)):
        whole = each(batch).last_hidden_state
        assert torch.equal(each(batch, output_tokens=tokens).last_hidden_state, whole[tokens])


@pytest.mark.parametrize("mix", [False, True])
@torch.no_grad()
def test_with_a_prompt_states_of_every_layer_and_stored_states(mix):
    """A prompt's rows are not counted. Where other states of the last layer are read, it computes all tokens."""
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(97, 64, 2, 2, 96, 60, layer_mix=mix)).eval()
    batch = long_batch()
    tokens = first_tokens(batch) + 1
    for prepare in (
        lambda: None,
        lambda: add_adaptation(encoder, PromptTuning(length=3)),
    ):
        prepare()
        whole = encoder(batch, output_hidden_states=True)
        some = encoder(batch, output_hidden_states=True, output_tokens=tokens)
        close(some.last_hidden_state, whole.last_hidden_state[tokens])
        close(some.hidden_states[-1], whole.hidden_states[-1])
        assert some.pooled is None
        alone = encoder(batch, output_tokens=tokens).last_hidden_state
        close(alone, whole.last_hidden_state[tokens])
        visited = {}
        encoder(batch, output_tokens=tokens, visit=visited.__setitem__)
        close(visited[2], whole.hidden_states[2])
    stored = replace(batch, hidden=whole.last_hidden_state)
    assert torch.equal(
        encoder(stored, output_tokens=tokens).last_hidden_state, whole.last_hidden_state[tokens]
    )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([0, 800]), r"in \[0, 800\), got 800"),
        (torch.tensor([-1]), "got -1"),
        (torch.tensor([0], dtype=torch.int32), r"must be int64 \(tokens,\), got torch.int32"),
        (torch.zeros(2, 1, dtype=torch.int64), r"of shape \(2, 1\)"),
        (torch.tensor(1), r"of shape \(\)"),
    ],
)
def test_other_tokens_are_an_error(tokens, message):
    encoder = Encoder(EncoderConfig(97, 64, 1, 2, 96, 40))
    with pytest.raises(ValueError, match=message):
        encoder(long_batch(), output_tokens=tokens)
