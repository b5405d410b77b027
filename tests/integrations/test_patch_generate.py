"""generate of patched encoder-decoders: tokens, cache and logits are those of transformers' own decoder."""

import copy
from contextlib import contextmanager

import pytest
import torch
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqLMOutput

import fastenc
from fastenc.integrations.transformers.cached_decoding import CACHE_NAMES
from fastenc.integrations.transformers.decoder_cache import HeldLayer
from fastenc.nn.ways import cpu_weights
from fastenc.ops import int8_products
from tests.helpers.checkpoints import close
from tests.helpers.families import START_TOKENS, padded_batch, whole
from tests.models.test_seq2seq import FAMILIES

# The cache's name in outputs and arguments of the installed transformers.
CACHE = next(name for name in CACHE_NAMES if hasattr(Seq2SeqLMOutput, name))
pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags:UserWarning")


def pair(family="bart", **changes):
    """(transformers' model, its patched copy) in evaluation."""
    own = whole(family, **changes).eval()
    return own, fastenc.patch(copy.deepcopy(own))


def source_of(family):
    batch = padded_batch(family)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def decoder_of(model):
    return model.get_decoder()


@contextmanager
def own_calls(model):
    """The lengths of the inputs of the own forward of the decoder's first self-attention."""
    attention = next(
        module
        for name, module in decoder_of(model).named_modules()
        if name.endswith(("self_attn", "SelfAttention"))
    )
    calls, forward = [], type(attention).forward

    def counted(module, hidden_states, *args, **kwargs):
        if module is attention:
            calls.append(hidden_states.shape[1])
        return forward(module, hidden_states, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(attention), "forward", counted)
        counted.__module__ = (
            forward.__module__
        )  # or patch would see a forward that is not transformers'
        yield calls


OPTIONS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "top_k": 0, "num_beams": 3},
    "rules": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "a prompt of several tokens": {"decoder_input_ids": torch.tensor([[2, 7, 9]] * 4)},
}


def generated(model, source, family, **options):
    torch.manual_seed(0)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    start = START_TOKENS[family]
    settings["decoder_start_token_id"] = 3 if start is None else start
    settings |= options
    settings["min_new_tokens"] = settings["max_new_tokens"]
    return model.generate(**source, **settings)


@FAMILIES
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_and_scores_are_the_models_own(family, options):
    own, fused = pair(family)
    source = source_of(family)
    results = [
        generated(model, source, family, output_scores=True, **OPTIONS[options])
        for model in (own, fused)
    ]
    assert torch.equal(*(result.sequences for result in results))
    for ours, theirs in zip(*(result.scores for result in results), strict=True):
        close(ours, theirs, atol=1e-4)
    with own_calls(fused) as calls:
        generated(fused, source, family, **OPTIONS[options])
    assert not calls


@FAMILIES
@torch.no_grad()
def test_a_call_with_whole_targets(family):
    """Without labels. transformers' cache has the keys and values of its tokens."""
    own, fused = pair(family)
    source = source_of(family) | {"decoder_input_ids": torch.randint(5, 97, (4, 6))}
    with own_calls(fused) as calls:
        ours = fused(**source)
    theirs = own(**source)
    assert not calls
    close(ours.logits, theirs.logits, atol=1e-4)
    for part in ("self_attention_cache", "cross_attention_cache"):
        for mine, layer in zip(
            *(getattr(result[CACHE], part).layers for result in (ours, theirs)), strict=True
        ):
            is_real = torch.ones(4, layer.keys.shape[2], dtype=torch.bool)
            if part == "cross_attention_cache":
                is_real = source["attention_mask"].bool()
            for name in ("keys", "values"):
                close(*(getattr(each, name).transpose(1, 2)[is_real] for each in (mine, layer)))


def test_lora_runs_fused_once_it_is_merged():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    own = peft.get_peft_model(pair("bart")[0], settings).eval()
    fused = copy.deepcopy(own)
    fastenc.patch(fused.get_base_model())
    source = source_of("bart")
    for merged in (False, True):
        for model in (own, fused) if merged else ():
            model.merge_adapter()
        expected = generated(own, source, "bart").sequences
        with own_calls(fused.get_base_model()) as calls:
            assert torch.equal(generated(fused, source, "bart").sequences, expected)
        assert len(calls) == (0 if merged else 8)


# Searches that transformers' decoder takes, from the start or from some token on.
OWN = {
    "a prompt with padding": {
        "decoder_input_ids": torch.tensor([[2, 7, 9]] * 4),
        "decoder_attention_mask": torch.tensor([[0, 1, 1]] * 4),
    },
    "attentions": {"output_attentions": True},
    "hidden states": {"output_hidden_states": True},
    "no cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "candidates from the prompt": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.filterwarnings("ignore:fastenc.* takes its own forward:UserWarning")
@pytest.mark.parametrize("name", OWN)
def test_other_searches(name):
    own, fused = pair()
    if name == "attentions":
        for model in (own, fused):
            model.set_attn_implementation("eager")
    source = source_of("bart")
    if name == "candidates from the prompt":  # of one text
        source = {key: value[-1:] for key, value in source.items()}
    results = [generated(model, source, "bart", **OWN[name]) for model in (own, fused)]
    assert torch.equal(*(result.sequences for result in results))
    if name == "attentions":
        for ours, theirs in zip(*(r.decoder_attentions[-1] for r in results), strict=True):
            close(ours, theirs)


def test_autocast_gradients_and_other_dtypes_take_the_own_forward():
    own, fused = pair()
    source = source_of("bart")
    with torch.autocast("cpu", torch.bfloat16), own_calls(fused) as calls:
        generated(fused, source, "bart")
    assert len(calls) == 8
    first = next_token(fused, source)
    with own_calls(fused) as calls:
        next_token(fused, source, first)
    assert calls == [1], "a call with gradients"
    own, fused = (model.bfloat16() for model in (own, fused))
    with own_calls(fused) as calls:
        generated(fused, source, "bart")
    assert len(calls) == 8


@pytest.mark.filterwarnings("ignore:fastenc.* takes its own forward:UserWarning")
def test_an_empty_source():
    own, fused = pair()
    source = source_of("bart")
    source["attention_mask"] = source["attention_mask"].clone()
    source["attention_mask"][1] = 0
    tokens = [generated(model, source, "bart").sequences for model in (own, fused)]
    assert torch.equal(*tokens)


@torch.no_grad()
def test_a_layer_with_equal_values_of_all_sources():
    """They share no keys and values in the other layers."""
    own, fused = pair()
    ids = torch.randint(5, 97, (3, 7))
    source = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for model in (own, fused):
        decoder_of(model).layers[0].encoder_attn.v_proj.weight.zero_()
    logits = [
        generated(model, source, "bart", output_logits=True).logits[-1] for model in (own, fused)
    ]
    close(*logits, atol=1e-4)


def test_more_tokens_than_positions():
    """transformers' own error."""
    own, fused = pair(max_position_embeddings=40)
    source = source_of("bart")
    for model in (own, fused):
        with pytest.raises(IndexError):
            generated(model, source, "bart", max_new_tokens=60)


def next_token(model, source, earlier=None, tokens=None):
    """The output for one more token of each target.

    Args: earlier: the output for the tokens before, with their cache.
    """
    if earlier is None:
        states, cache = model.get_encoder()(**source).last_hidden_state, None
    else:
        states, cache = earlier.encoder_last_hidden_state, earlier[CACHE]
    return model(
        encoder_outputs=(states,),
        attention_mask=source["attention_mask"],
        decoder_input_ids=torch.full((len(states), 1), 7) if tokens is None else tokens,
        use_cache=True,
        **{CACHE: cache},
    )


@pytest.mark.skipif(not cpu_weights.packed_is_faster(), reason="this processor packs no weights")
@pytest.mark.parametrize("family", ["t5-gated", "marian"])
@pytest.mark.parametrize("dtype", [None, "int8"])
@torch.no_grad()
def test_a_frozen_decoder(family, dtype):
    if dtype == "int8" and not int8_products.has_int8_products():
        pytest.skip("this processor does not multiply 8 bits")
    own, fused = pair(family)
    fastenc.freeze(fused, dtype=dtype)
    source = source_of(family)
    first = [next_token(model, source) for model in (own, fused)]
    second = [next_token(*each) for each in zip((own, fused), (source, source), first, strict=True)]
    for outputs in (first, second):
        exact, logits = (output.logits for output in outputs)
        error = (logits - exact).norm() / exact.norm()
        assert error < (0.1 if dtype else 1e-5)
        assert (error > 1e-4) == (dtype == "int8")


def reorder_twice(cache):
    """With one tensor, whose values change: first beams of each source, then other sources."""
    rows = torch.tensor([1, 1, 3, 2])
    cache.reorder_cache(rows)
    cache.reorder_cache(rows.copy_(torch.tensor([3, 1, 0, 2])))


# What may happen to a cache between two calls.
CHANGES = {
    "nothing": lambda cache: None,
    "beams": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 3, 2])),
    "other sources": lambda cache: cache.reorder_cache(torch.tensor([3, 1, 0, 2])),
    "other sources after beams": reorder_twice,
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([3, 1, 0, 2])),
    "cropped": lambda cache: cache.crop(-1),
    "read": lambda cache: [*cache],
    "offloaded": lambda cache: [layer.offload() for layer in cache.self_attention_cache.layers],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("copied", [False, True])
@torch.no_grad()
def test_a_cache_can_be_used_as_transformers(change, copied):
    """Two texts in two rows each, as of two beams."""
    own, fused = pair()
    ids = torch.randint(5, 97, (2, 9)).repeat_interleave(2, 0)
    source = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    logits = {own: [], fused: []}
    for model in (own, fused):
        output = next_token(model, source)
        for _ in range(2):
            output = next_token(model, source, output, torch.tensor([[8], [9], [10], [11]]))
        layer = output[CACHE].self_attention_cache.layers[0]
        assert isinstance(layer, HeldLayer) == (model is fused)
        if copied:
            output[CACHE] = copy.deepcopy(output[CACHE])
        CHANGES[change](output[CACHE])
        assert output[CACHE].get_seq_length() == 3 - (change == "cropped")
        for _ in range(2):
            output = next_token(model, source, output)
            logits[model].append(output.logits)
    for ours, theirs in zip(logits[fused], logits[own], strict=True):
        close(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("packs", [False, True])
def test_a_cache_of_inference_mode_can_be_used_outside(packs, monkeypatch):
    """Also on processors that pack no weights."""
    monkeypatch.setattr(cpu_weights, "packed_is_faster", lambda: packs)
    own, fused = pair()
    source, rows = source_of("bart"), torch.tensor([1, 1, 3, 2])
    logits = []
    for model in (own, fused):
        with torch.inference_mode():
            output = next_token(model, source, next_token(model, source))
            output[CACHE].self_attention_cache.reorder_cache(rows)
        with torch.no_grad():
            for _ in range(2):
                output[CACHE].self_attention_cache.reorder_cache(rows)
                output = next_token(model, source, output)
        logits.append(output.logits)
    close(*logits, atol=1e-4)


@torch.no_grad()
def test_a_cache_of_one_searchs_targets_and_anothers_sources():
    own, fused = pair()
    source = source_of("bart")
    other = source | {"input_ids": source["input_ids"].roll(1, 0)}
    logits = []
    for model in (own, fused):
        first, second = (
            next_token(model, each, next_token(model, each)) for each in (source, other)
        )
        parts = first[CACHE].self_attention_cache, second[CACHE].cross_attention_cache
        first[CACHE] = EncoderDecoderCache(*parts)
        logits.append(next_token(model, source, first).logits)
    close(*logits, atol=1e-4)


@pytest.mark.skipif(CACHE != "cache", reason="transformers before 5.24 cannot use a cache again")
@torch.no_grad()
def test_an_emptied_cache():
    own, fused = pair()
    source = source_of("bart")
    logits = []
    for model in (own, fused):
        output = next_token(model, source, next_token(model, source))
        output[CACHE].reset()
        for _ in range(2):
            output = next_token(model, source, output)
        logits.append(output.logits)
    close(*logits, atol=1e-4)
