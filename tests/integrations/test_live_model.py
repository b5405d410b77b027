"""A patched model that is changed afterwards computes what the changed model computes, and warns once."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastenc
from fastenc.integrations.transformers.live_model import new_of_same_class
from fastenc.nn.ways import cpu_weights
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch
from tests.helpers.patching import assert_same_outputs

pytestmark = needs_cpp


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) + 1


class Halved(nn.Dropout):
    def forward(self, x):
        return x / 2


class Loud(torch.Tensor):
    """A tensor whose products are doubled."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        doubled = func is nn.functional.linear
        return (2 * result).as_subclass(torch.Tensor) if doubled else result


def set_weight(linear, change):
    linear.weight = nn.Parameter(change(linear.weight.detach()), requires_grad=False)


def cut(layer, width):
    up, down = layer.intermediate.dense, layer.output.dense
    up.weight = nn.Parameter(up.weight.detach()[:width])
    up.bias = nn.Parameter(up.bias.detach()[:width])
    down.weight = nn.Parameter(down.weight.detach()[:, :width])


def replace(owner, name, module):
    setattr(owner, name, module)


def hook(module, inputs, output):
    return output * 1.5


def other_forward(module, factor):
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) * factor


# What transformers reads: modules, constants, buffers, hooks.
CHANGES = {
    "a linear layer of another class": lambda m: replace(
        m.encoder.layer[0].attention.self, "query", Doubled(32, 32)
    ),
    "the activation": lambda m: replace(
        m.encoder.layer[1].intermediate, "intermediate_act_fn", nn.ReLU()
    ),
    "eps of the first norm": lambda m: replace(
        m.encoder.layer[0].attention.output.LayerNorm, "eps", 0.5
    ),
    "eps of the second norm": lambda m: replace(m.encoder.layer[1].output.LayerNorm, "eps", 0.5),
    "eps of the embeddings' norm": lambda m: replace(m.embeddings.LayerNorm, "eps", 0.5),
    "the scale of the scores": lambda m: replace(m.encoder.layer[0].attention.self, "scaling", 0.9),
    "the heads of one layer": lambda m: (
        replace(m.encoder.layer[0].attention.self, "num_attention_heads", 4),
        replace(m.encoder.layer[0].attention.self, "attention_head_size", 8),
    ),
    "position ids in place": lambda m: m.embeddings.position_ids.copy_(
        m.embeddings.position_ids.flip(1)
    ),
    "position ids by .data": lambda m: m.embeddings.position_ids.data.add_(1).remainder_(40),
    "a buffer of token types": lambda m: replace(
        m.embeddings, "token_type_ids", torch.ones_like(m.embeddings.token_type_ids)
    ),
    "a dropout of another class": lambda m: replace(
        m.encoder.layer[0].output, "dropout", Halved(0.1)
    ),
    "no dropout": lambda m: replace(m.encoder.layer[0].output, "dropout", nn.Identity()),
    "an embedding of another class": lambda m: replace(
        m.embeddings, "position_embeddings", Shifted(40, 32)
    ),
    "a forward of the instance": lambda m: other_forward(
        m.encoder.layer[0].attention.output.dense, 3.0
    ),
    "a method of the instance": lambda m: replace(
        m.encoder.layer[0], "feed_forward_chunk", lambda x: x
    ),
    "one layer less": lambda m: replace(m.encoder, "layer", m.encoder.layer[:1]),
    "layers in another order": lambda m: replace(
        m.encoder,
        "layer",
        nn.ModuleList([*m.encoder.layer[1:], m.encoder.layer[0], m.encoder.layer[0]]),
    ),
    "a norm without its affine map": lambda m: replace(
        m.encoder.layer[0].output, "LayerNorm", nn.LayerNorm(32, elementwise_affine=False)
    ),
    "a class changed in place": lambda m: replace(
        m.encoder.layer[0].output.dense, "__class__", Doubled
    ),
    "a hook on a layer": lambda m: m.encoder.layer[1].register_forward_hook(
        lambda module, inputs, output: output * 1.5
    ),
    "a hook on a dropout": lambda m: m.encoder.layer[0].output.dropout.register_forward_hook(hook),
    "a hook on an activation": lambda m: m.encoder.layer[
        0
    ].intermediate.intermediate_act_fn.register_forward_hook(hook),
    "a hook on the word embeddings": lambda m: m.embeddings.word_embeddings.register_forward_hook(
        hook
    ),
    "a hook before a linear layer": lambda m: m.encoder.layer[
        0
    ].output.dense.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
    "a parametrization": lambda m: nn.utils.parametrizations.weight_norm(
        m.encoder.layer[0].output.dense
    ),
    "a sparse weight": lambda m: set_weight(
        m.encoder.layer[0].output.dense, lambda weight: weight.to_sparse()
    ),
    "a weight of another class": lambda m: set_weight(
        m.encoder.layer[1].attention.self.key, lambda weight: weight.as_subclass(Loud)
    ),
    "a narrower feed-forward network": lambda m: cut(m.encoder.layer[0], 24),
    "a norm without a weight": lambda m: replace(
        m.encoder.layer[0].output.LayerNorm, "weight", None
    ),
    "a bias of one number": lambda m: replace(
        m.encoder.layer[0].intermediate.dense, "bias", nn.Parameter(torch.ones(1))
    ),
    "a dropout of everything": lambda m: (
        replace(m.embeddings.dropout, "p", 1.0),
        m.embeddings.dropout.train(),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("when", ["before", "after the first call"])
def test_a_changed_model_takes_its_own_forward_and_says_so_once(change, when):
    theirs = model("bert")
    ours, batch = copy.deepcopy(theirs), padded_batch("bert")
    with torch.no_grad():
        if when == "before":
            torch.manual_seed(1), change(ours)
            fastenc.patch(ours)
        else:
            fastenc.patch(ours)(**batch)
            torch.manual_seed(1), change(ours)
        torch.manual_seed(1), change(theirs)
        with pytest.warns(UserWarning, match="BertModel takes its own forward, because"):
            hidden = ours(**batch).last_hidden_state
        assert torch.equal(hidden, theirs(**batch).last_hidden_state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(ours(**batch).last_hidden_state, hidden)


def test_a_removed_module_is_named_before_the_models_own_error():
    ours = fastenc.patch(model("bert"))
    ours.encoder.layer[0].output.dropout = None
    with (
        pytest.warns(UserWarning, match=r"encoder\.layer\.0\.output\.dropout was removed"),
        pytest.raises(TypeError, match="'NoneType' object is not callable"),
    ):
        ours(**padded_batch("bert"))


def test_what_changes_nothing_stays_fused():
    theirs = model("bert")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastenc")
        for m in (ours, theirs):
            m(**batch)
            # transformers reads the activation module that was made from it.
            m.config.hidden_act = "relu"
            m.some_note = "by a user"
            m.encoder.layer[0].label = 3
            m.gradient_checkpointing_enable()
            m.enable_input_require_grads()
            m.resize_token_embeddings(120)
            m.train(), m.eval()
            torch.manual_seed(1)
            m.encoder.layer[0].output.dense = nn.Linear(48, 32)
            m.encoder.layer[0].output.dropout = nn.Dropout(0.3).eval()
        torch.manual_seed(0)
        ours.embeddings.word_embeddings.load_state_dict(
            theirs.embeddings.word_embeddings.state_dict()
        )
        output = ours(**batch)
        assert_same_outputs(output, theirs(**batch), batch["attention_mask"])
        assert not output.last_hidden_state[batch["attention_mask"] == 0].any()


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert", "deberta-v2"])
@pytest.mark.parametrize("size", [120, 90])
def test_a_masked_lm_with_another_vocabulary_stays_fused(family, size):
    theirs, batch = model(family, "ForMaskedLM"), padded_batch(family)
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch["input_ids"] = batch["input_ids"].clamp(max=80)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastenc")
        ours(**batch)
        for m in (ours, theirs):
            torch.manual_seed(0)
            m.resize_token_embeddings(size)
        output = ours(**batch)
        assert output.logits.shape[-1] == size
        assert_same_outputs(output, theirs(**batch), batch["attention_mask"])


@pytest.mark.parametrize("family", ["eurobert", "qwen3", "gemma3", "ultrabert"])
def test_an_encoder_that_notes_its_vocabulary_stays_fused_with_another(family):
    theirs = model(family)
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    for m in (ours, theirs):
        m.resize_token_embeddings(120)
        m.get_input_embeddings().weight.data[97:] = 0.5
    batch["input_ids"][0, 0] = 110
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_windows_that_the_configuration_now_names():
    theirs = model("modernbert")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("modernbert", (30,) * 3)
    with torch.no_grad():
        ours(**batch)
        for m in (ours, theirs):
            m.config.local_attention = 2
        with pytest.warns(UserWarning, match="its configuration names other windows"):
            hidden = ours(**batch).last_hidden_state
        assert torch.equal(hidden, theirs(**batch).last_hidden_state)


def test_global_hooks_are_called():
    theirs = model("bert")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert")
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.append(type(module).__name__)
    )
    try:
        with pytest.warns(UserWarning, match="there are global module hooks"):
            ours(**batch)
    finally:
        handle.remove()
    assert seen.count("BertLayer") == 2
    with torch.no_grad():
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_probabilities_and_modes_are_read_at_every_call():
    """As in transformers, a single layer may have dropout."""
    ours, batch = fastenc.patch(model("bert")), padded_batch("bert")
    real = batch["attention_mask"].bool()
    runs = lambda: [ours(**batch, output_hidden_states=True).hidden_states for _ in range(2)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.encoder.layer[1].train()
        a, b = runs()
        assert torch.equal(a[1][real], b[1][real]) and not torch.equal(a[2][real], b[2][real])
        for module in ours.encoder.layer[1].modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        a, b = runs()
        assert torch.equal(a[2], b[2])
    ours.encoder.layer[0].attention.train()
    with pytest.warns(UserWarning, match="some modules of encoder.layer.0 are in training mode"):
        ours(**batch)


@pytest.mark.parametrize("change", ["dense", "norm", "decoder"])
def test_a_changed_masked_lm_head_takes_its_own_forward(change):
    theirs = model("bert", "ForMaskedLM")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert")
    for m in (ours, theirs):
        head = m.cls.predictions
        if change == "dense":
            head.transform.dense.register_forward_hook(hook)
        if change == "norm":
            head.transform.LayerNorm.eps = 0.5
        if change == "decoder":
            other_forward(head.decoder, 2.0)
    with torch.no_grad(), pytest.warns(UserWarning, match="BertForMaskedLM takes its own forward"):
        output = ours(**batch)
    real = batch["attention_mask"].bool()
    expected = theirs(**batch).logits[real]
    torch.testing.assert_close(output.logits[real], expected, rtol=0, atol=1e-5)
    assert torch.equal(output.logits[~real][0], output.logits[~real][-1])  # the encoder is fused


def test_weights_that_float16_leaves_in_float32(tmp_path):
    """transformers keeps T5's ``wo`` in float32 beside float16, and computes it so. A CPU has no kernels of float16, so
    bfloat16 takes its place."""
    theirs = model("t5")
    theirs.save_pretrained(tmp_path)
    mixed = type(theirs).from_pretrained(tmp_path, dtype=torch.float16).bfloat16()
    for block in mixed.encoder.block:
        block.layer[1].DenseReluDense.wo.float()
    ours, batch = fastenc.patch(copy.deepcopy(mixed)), padded_batch("t5")
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="because its linear layers are of"),
    ):
        assert torch.equal(ours(**batch)[0], mixed(**batch)[0])
    with pytest.raises(
        ValueError, match=r"its linear layers are of .*bfloat16 and .*float32: undo that"
    ):
        fastenc.freeze(ours)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(**batch)


def test_a_new_model_has_buffers_and_no_other_memory_and_draws_nothing():
    theirs, state = model("bert"), torch.get_rng_state()
    new = new_of_same_class(theirs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in new.parameters())
    assert torch.equal(new.embeddings.position_ids, theirs.embeddings.position_ids)


def test_gemma3_is_fused_in_the_dtype_in_which_it_was_loaded(tmp_path):
    """transformers then makes the buffer with the embeddings' scale in that dtype."""
    model("gemma3").save_pretrained(tmp_path)
    theirs = type(model("gemma3")).from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("gemma3")
    real = batch["attention_mask"].bool()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        output = ours(**batch)[0][real].double()
        rounded = theirs(**batch)[0][real].double()
        exact = copy.deepcopy(theirs).double()(**batch)[0][real]
    assert (output - exact).norm() <= 1.1 * (rounded - exact).norm()


@pytest.mark.parametrize("converted", ["the parameters", "the model"])
def test_gemma3_keeps_its_rounded_scale_after_a_conversion(converted, tmp_path):
    """Loaded in bfloat16, it has a rounded scale, with which transformers goes on in float32."""
    model("gemma3").save_pretrained(tmp_path)
    theirs = type(model("gemma3")).from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("gemma3")
    with torch.no_grad():
        ours(**batch)
        for each in (ours, theirs):
            if converted == "the model":
                each.float()
            for parameter in each.parameters():
                parameter.data = parameter.data.float()
        with pytest.warns(UserWarning, match="embed_scale of embed_tokens was changed"):
            output = ours(**batch)
        assert_same_outputs(output, theirs(**batch), batch["attention_mask"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter_to_a_patch(dtype):
    theirs, batch = model("gemma3"), padded_batch("gemma3")
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        ours = fastenc.patch(copy.deepcopy(theirs))
    finally:
        torch.set_default_dtype(default)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_the_device_on_which_the_caller_makes_tensors_does_not_matter():
    theirs, batch = model("bert"), padded_batch("bert")
    with torch.device("meta"):
        ours = fastenc.patch(copy.deepcopy(theirs))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])


def test_the_default_device_does_not_matter_to_a_call():
    theirs = model("bert")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert")
    batch["position_ids"] = torch.arange(30)[None]
    batch["token_type_ids"] = torch.zeros(1, 30, dtype=torch.long)
    with torch.no_grad():
        expected = theirs(**batch)
        with torch.device("meta"):
            output = ours(**batch)
        assert_same_outputs(output, expected, batch["attention_mask"])


def test_classes_of_one_name_are_told_apart_by_their_modules():
    ours = fastenc.patch(model("bert"))
    other = type("Linear", (nn.Linear,), {})
    ours.encoder.layer[0].output.dense = other(48, 32)
    match = f"is a {__name__}.Linear, not a torch.nn.modules.linear.Linear"
    with torch.no_grad(), pytest.warns(UserWarning, match=match):
        ours(**padded_batch("bert"))


def replica_of(model, factor):
    """A replica as torch.nn.parallel.replicate makes it, but on the same device and with other weights."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            replica._modules[name] = None
            if child is not None:
                setattr(replica, name, copies[child])
        for name, parameter in module._parameters.items():
            if parameter is not None:
                setattr(replica, name, parameter.detach() * factor)
    return copies[model]


@pytest.mark.parametrize("task", ["Model", "ForSequenceClassification", "ForMaskedLM"])
def test_replicas_of_data_parallel_read_their_own_weights(task):
    theirs = model("bert", task)
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert")
    noted = fastenc.DataCollatorWithSeqlens(dict)(dict(batch))
    with torch.no_grad():
        before = ours(**batch)[0]
        with pytest.warns(UserWarning, match="it is a replica of DataParallel"):
            hidden = replica_of(ours, 1.5)(**noted)[0]
        assert torch.equal(hidden, replica_of(theirs, 1.5)(**batch)[0])
        assert torch.equal(ours(**batch)[0], before)
    assert "_replicate_for_data_parallel" not in fastenc.unpatch(ours).__dict__


def test_freezing_a_patched_model():
    """The packed weights are used until a call announces other weights."""
    theirs = model("bert", hidden_size=64, num_attention_heads=4)
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert", (30,) * 12)
    with torch.no_grad():
        before = theirs(**batch)
        fastenc.freeze(ours)
        assert_same_outputs(ours(**batch), before, batch["attention_mask"])
        for m in (ours, theirs):
            for parameter in m.encoder.parameters():
                parameter.mul_(1.5)
        fastenc.unfreeze(ours)
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])
        for announce in (
            lambda: ours.train().eval(),
            lambda: ours.load_state_dict(ours.state_dict()),
            lambda: ours.to(torch.float32),
        ):
            fastenc.freeze(ours)
            assert ours.fastenc_frozen._copies is not None
            announce()
            assert ours.fastenc_frozen._copies is None
        assert copy.deepcopy(fastenc.freeze(ours)).fastenc_frozen._copies is None
    ours(**batch)
    assert ours.fastenc_frozen._copies is None
    ours.encoder.layer[0].register_forward_hook(functools.partial(hook))
    with pytest.raises(ValueError, match=r"its own forward, because encoder.layer.0 has hooks"):
        fastenc.freeze(ours)
    with pytest.raises(ValueError, match=r"freeze needs .*fastenc.patch"):
        fastenc.freeze(fastenc.unpatch(ours))


def test_a_frozen_model_stacks_once_what_is_not_packed(monkeypatch):
    class Copies(TorchDispatchMode):
        """Counts how many weights are stacked."""

        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            stacks = function is torch.ops.aten.cat.default and arguments[0][0].shape == (32, 32)
            self.count += stacks
            return function(*arguments, **(options or {}))

    monkeypatch.setattr(cpu_weights, "packed_is_faster", lambda: False)
    theirs = model("bert")
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert", (30,) * 12)
    with torch.no_grad():
        with Copies() as in_a_call:
            ours(**batch)
        fastenc.freeze(ours)
        with Copies() as frozen:
            result = ours(**batch)
        assert_same_outputs(result, theirs(**batch), batch["attention_mask"])
    assert (in_a_call.count, frozen.count) == (len(theirs.encoder.layer), 0)


def doubled(m):
    """Replace the forward of a model of transformers by one that doubles the first output."""
    own = m.forward

    def forward(*args, **kwargs):
        output = own(*args, **kwargs)
        first = next(iter(output))
        output[first] = output[first] * 2
        return output

    m.forward = forward


@pytest.mark.parametrize(
    "task, which",
    [("Model", ""), ("ForMaskedLM", ""), ("ForMaskedLM", "bert"), ("ForTokenClassification", "")],
)
def test_a_forward_that_was_replaced_before_patch_is_called(task, which):
    theirs, batch = model("bert", task), padded_batch("bert")
    ours, real = copy.deepcopy(theirs), batch["attention_mask"].bool()
    for m in (theirs, ours):
        doubled(m.get_submodule(which))
    replaced = vars(ours.get_submodule(which))["forward"]
    fastenc.patch(ours)
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hidden = ours(**batch)[0][real]
        torch.testing.assert_close(hidden, theirs(**batch)[0][real], rtol=0, atol=1e-5)
    messages = ["its forward was replaced before it was patched" in str(w.message) for w in seen]
    # The head of token classification is transformers' own anyway.
    assert messages == [True] * (task != "ForTokenClassification")
    assert vars(fastenc.unpatch(ours).get_submodule(which))["forward"] is replaced


@pytest.mark.parametrize(
    "family, task, name",
    [
        ("bert", "Model", "BertIntermediate"),
        ("bert", "ForSequenceClassification", "BertForSequenceClassification"),
        ("roberta", "ForSequenceClassification", "RobertaClassificationHead"),
    ],
)
def test_a_class_whose_forward_is_replaced_between_calls(family, task, name, monkeypatch):
    theirs, batch = model(family, task), padded_batch(family, (9, 9))
    ours = fastenc.patch(copy.deepcopy(theirs))
    ours(**batch)
    replaced = next(type(m) for m in theirs.modules() if type(m).__name__ == name)
    own = replaced.forward

    def forward(module, *inputs, **batch):
        if batch:
            return (module.bert(**batch)[0].mean(1),)
        return 2 * own(module, *(x.mean(-2, keepdim=True) for x in inputs))

    monkeypatch.setattr(replaced, "forward", forward)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an encoder takes its own forward
        torch.testing.assert_close(ours(**batch)[0], theirs(**batch)[0], rtol=0, atol=1e-5)


def test_a_class_whose_forward_was_replaced(monkeypatch):
    """Libraries replace the forward of transformers' classes, or the classes themselves, in its modules."""
    from transformers.models.bert import modeling_bert

    own, batch = modeling_bert.BertIntermediate.forward, padded_batch("bert")
    monkeypatch.setattr(modeling_bert.BertIntermediate, "forward", lambda m, x: 2 * own(m, x))
    theirs = model("bert")
    ours = fastenc.patch(copy.deepcopy(theirs))
    with torch.no_grad():
        message = "the forward of BertIntermediate is not transformers'"
        with pytest.warns(UserWarning, match=message):
            hidden = ours(**batch).last_hidden_state
        assert torch.equal(hidden, theirs(**batch).last_hidden_state)
    monkeypatch.undo()

    class Louder(modeling_bert.BertIntermediate):
        def forward(self, x):
            return 2 * super().forward(x)

    monkeypatch.setattr(modeling_bert, "BertIntermediate", Louder)
    theirs = model("bert")
    ours = fastenc.patch(copy.deepcopy(theirs))
    with torch.no_grad():
        with pytest.warns(UserWarning, match="the forward of Louder is not transformers'"):
            assert torch.equal(ours(**batch)[0], theirs(**batch)[0])
        torch.testing.assert_close(ours(**batch)[0], hidden)


def test_attention_that_a_user_registered():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def hotter(module, query, *args, **kwargs):
        return sdpa_attention_forward(module, query / 2, *args, **kwargs)

    AttentionInterface.register("hotter", hotter)
    AttentionMaskInterface.register("hotter", sdpa_mask)
    theirs, batch = model("bert"), padded_batch("bert")
    ours = fastenc.patch(copy.deepcopy(theirs))
    fastenc.register_attention()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastenc")
        for known in ("eager", "sdpa", "fastenc"):
            ours.set_attn_implementation(known)
            assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])
    for m in (ours, theirs):
        m.set_attn_implementation("hotter")
    with torch.no_grad(), pytest.warns(UserWarning, match="its attention is hotter, a function of"):
        assert_same_outputs(ours(**batch), theirs(**batch), batch["attention_mask"])
