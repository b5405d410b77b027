"""Buckets, and the runner over them. A recorder that repeats the padded forward replaces CUDA graphs."""

import copy
from dataclasses import replace

import pytest
import torch

import fastenc
from fastenc.graphs import InferenceRunner
from fastenc.graphs.token_buckets import Bucket, bucket_of, pad_to
from fastenc.models import Encoder, EncoderConfig, MaskedLM, SequenceClassifier
from fastenc.packing import check_cu_seqlens, pack_sequences
from tests.helpers import families
from tests.helpers.checkpoints import packed

LONGEST = 40
CONFIG = EncoderConfig(97, 32, 2, 2, 48, LONGEST)


class Repeat:
    """Runs the function again at every replay and writes its result into that of the first run."""

    def __init__(self):
        self.recorded = 0

    def __call__(self, run):
        self.recorded += 1
        output = run()

        def replay():
            for name, value in vars(run()).items():
                kept = getattr(output, name)
                for a, b in zip(flat(kept), flat(value), strict=True):
                    a.copy_(b)

        return output, replay


def flat(value):
    return value if isinstance(value, tuple) else () if value is None else (value,)


def sequences(lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (n,), generator=draw).tolist() for n in lengths]


def a_batch(*lengths, seed=0):
    return pack_sequences(sequences(lengths, seed))


def a_runner(model, max_tokens=4096, max_graphs=8):
    return InferenceRunner(model.eval(), max_tokens, max_graphs, Repeat())


@pytest.mark.parametrize("seed", range(5))
def test_a_padded_batch_keeps_the_rules(seed):
    draw = torch.Generator().manual_seed(seed)
    for count in (1, 2, 3, 5, 7, 8, 31):
        for high in (1, 5, LONGEST):
            lengths = torch.randint(1, high + 1, (count,), generator=draw).tolist()
            batch = a_batch(*lengths)
            bucket = bucket_of(batch, LONGEST, 4096)
            padded = pad_to(batch, bucket, 7)
            assert (padded.total_tokens, padded.num_sequences, padded.max_seqlen) == bucket
            check_cu_seqlens(padded.cu_seqlens, padded.total_tokens, padded.max_seqlen)
            assert padded.max_seqlen <= LONGEST and padded.cu_seqlens.diff().min() >= 1
            assert bucket.num_sequences > count and bucket.total_tokens > bucket.num_sequences
            assert torch.equal(padded.cu_seqlens[: count + 1], batch.cu_seqlens)
            assert torch.equal(padded.input_ids[: batch.total_tokens], batch.input_ids)
            assert (padded.input_ids[batch.total_tokens :] == 7).all()


def test_buckets_waste_at_most_half_and_are_few():
    buckets = {bucket_of(a_batch(*[8] * count), 512, 10**6) for count in range(1, 200)}
    assert len(buckets) <= 16
    assert all(b.total_tokens <= max(32, 12 * b.num_sequences) for b in buckets)
    assert bucket_of(a_batch(8, 8), 512, 10**6) == Bucket(32, 3, 64)
    assert bucket_of(a_batch(8, 8), 512, 20) == Bucket(20, 3, 64)
    assert bucket_of(a_batch(8, 8), 512, 16) is None


@pytest.mark.parametrize("model_class", [Encoder, MaskedLM, SequenceClassifier])
def test_results_are_the_models(model_class):
    model = model_class(CONFIG).eval()
    runner = a_runner(model)
    options = {"output_hidden_states": True} if model_class is Encoder else {}
    for lengths in ((5, 3), (4, 4), (1,), (40, 40, 40), (1, 1, 1, 1, 1), (7, 2)):
        batch = a_batch(*lengths)
        with torch.no_grad():
            expected = model(batch, **options)
        result = runner(batch, **options)
        assert type(result) is type(expected)
        for name, value in vars(expected).items():
            for a, b in zip(flat(getattr(result, name)), flat(value), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
                assert not a.requires_grad


def test_the_encoder_of_a_patched_model_is_recorded():
    patched = fastenc.patch(families.model("bert").eval())
    runner, inputs = a_runner(fastenc.encoder_of(patched)), families.padded_batch("bert")
    with torch.no_grad():
        expected = patched(**inputs)
    for _ in range(2):
        output = runner(packed(inputs))
        torch.testing.assert_close(
            output.last_hidden_state, expected.last_hidden_state[inputs["attention_mask"].bool()]
        )
        torch.testing.assert_close(output.pooled, expected.pooler_output)
        with torch.no_grad():
            patched.encoder.layer[0].output.dense.bias.add_(1.0)
            expected = patched(**inputs)
    assert len(runner) == 1


def test_token_types_are_part_of_a_batch():
    model = Encoder(CONFIG).eval()
    runner, plain = a_runner(model), a_batch(5, 3)
    typed = replace(plain, token_type_ids=torch.tensor([0, 0, 1, 1, 1, 0, 1, 1]))
    for batch in (plain, typed, plain):
        expected = model(batch).last_hidden_state
        torch.testing.assert_close(runner(batch).last_hidden_state, expected, rtol=1e-5, atol=1e-6)
    assert len(runner) == 2


def test_what_stands_in_the_padding_changes_nothing():
    model = Encoder(CONFIG)
    batch = a_batch(5, 3)
    before = a_runner(model)(batch)
    with torch.no_grad():
        model.embeddings.word.weight[CONFIG.pad_token_id] = float("nan")
    after = a_runner(model)(batch)
    assert torch.equal(before.last_hidden_state, after.last_hidden_state)
    assert torch.equal(before.pooled, after.pooled)


def test_batches_of_one_bucket_share_a_recording_and_results_are_copies():
    runner = a_runner(Encoder(CONFIG))
    first = runner(a_batch(5, 3))
    kept = first.last_hidden_state.clone()
    runner(a_batch(4, 4, seed=1)), runner(a_batch(2, 6, seed=2))
    assert len(runner) == runner._recorder.recorded == 1
    assert torch.equal(first.last_hidden_state, kept)


def test_the_recording_not_used_for_longest_makes_room():
    runner = a_runner(Encoder(CONFIG), max_graphs=2)
    small, middle, large = a_batch(3), a_batch(20, 20), a_batch(*[30] * 6)
    for batch in (small, middle, small, large, small):
        runner(batch)
    assert len(runner) == 2 and runner._recorder.recorded == 3
    runner(middle)
    assert len(runner) == 2 and runner._recorder.recorded == 4


def test_weights_changed_in_place_are_seen_and_moved_ones_recorded_anew():
    model = Encoder(CONFIG)
    runner, batch = a_runner(model), a_batch(5, 3)
    runner(batch)

    def follows():
        expected = model(batch).last_hidden_state
        torch.testing.assert_close(runner(batch).last_hidden_state, expected, rtol=1e-5, atol=1e-6)

    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    follows()
    other = {name: value + 0.01 for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    follows()
    assert runner._recorder.recorded == 1
    model.layers[1].down.bias = torch.nn.Parameter(torch.ones(32))
    follows()
    assert runner._recorder.recorded == 2
    model.double()
    follows()
    assert runner._recorder.recorded == 3
    model.layers[0] = copy.deepcopy(model.layers[1])
    runner.reset()
    follows()


def test_it_may_be_called_inside_inference_mode_and_autocast():
    model = Encoder(CONFIG)
    runner, batch = a_runner(model), a_batch(5, 3)
    with torch.inference_mode():
        inside = runner(batch).last_hidden_state
    assert torch.equal(runner(batch).last_hidden_state, inside)
    with torch.autocast("cpu", torch.bfloat16):
        result = runner(batch).last_hidden_state
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, model(batch).last_hidden_state, rtol=0.02, atol=0.02)
    assert runner(batch).last_hidden_state.dtype == torch.float32
    assert len(runner) == 2


def test_batches_beyond_the_buckets_take_the_model_itself():
    model = Encoder(CONFIG).eval()
    runner = a_runner(model, max_tokens=16)
    for batch in (a_batch(10, 10), pack_sequences([])):
        assert torch.equal(runner(batch).last_hidden_state, model(batch).last_hidden_state)
    assert len(runner) == 0
    with pytest.raises(ValueError, match="at most 40 tokens, the model's positions, got 41"):
        runner(a_batch(41))


def test_on_a_cpu_it_is_the_model():
    model = SequenceClassifier(CONFIG).eval()
    runner, batch = fastenc.compile_inference(model), a_batch(5, 3)
    assert torch.equal(runner(batch).logits, model(batch).logits) and len(runner) == 0
    assert not runner(batch).logits.requires_grad


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"takes fastenc's own models, got Linear"):
        fastenc.compile_inference(torch.nn.Linear(1, 1))
    model = SequenceClassifier(CONFIG)
    with pytest.raises(ValueError, match="max_graphs must be at least 1, got 0"):
        fastenc.compile_inference(model, max_graphs=0)
    runner = fastenc.compile_inference(model.train())
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        runner(a_batch(3))
    model.eval()
    with pytest.raises(ValueError, match="call the model itself for a loss"):
        runner(a_batch(3), labels=torch.tensor([0]))
