"""Files of the hub's remote code for NomicBERT and GTE: other names of values and weights, angles scaled by "NTK"."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fastenc
from fastenc.adapt import use_adaptation
from fastenc.data import train_tokenizer
from fastenc.models import Encoder, MaskedLM, SequenceClassifier
from fastenc.models.adapters.adaptations import name_of_task
from fastenc.ops import int8_products
from fastenc.packing import pack_sequences
from tests.helpers.checkpoints import close, packed
from tests.helpers.families import model, padded_batch

NOMIC_CONFIG = dict(
    model_type="nomic_bert",
    auto_map={"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    vocab_size=97,
    n_embd=32,
    n_head=2,
    n_layer=2,
    n_inner=48,
    n_positions=40,
    type_vocab_size=2,
    layer_norm_epsilon=1e-12,
    activation_function="swiglu",
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    initializer_range=0.02,
    max_trained_positions=20,
    qkv_proj_bias=False,
    mlp_fc1_bias=False,
    mlp_fc2_bias=False,
    prenorm=False,
    use_rms_norm=False,
    rotary_emb_base=1000,
    rotary_emb_fraction=1.0,
    rotary_emb_interleaved=False,
    rotary_emb_scale_base=None,
    rotary_scaling_factor=None,
)
GTE_CONFIG = dict(
    model_type="new",
    auto_map={"AutoModel": "modeling.NewModel"},
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=40,
    type_vocab_size=1,
    hidden_act="gelu",
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.0,
    layer_norm_eps=1e-12,
    layer_norm_type="layer_norm",
    logn_attention_clip1=False,
    logn_attention_scale=False,
    pack_qkv=True,
    pad_token_id=1,
    position_embedding_type="rope",
    rope_scaling={"factor": 8.0, "type": "ntk"},
    rope_theta=20000,
)
# For a layer: transformers' names → the remote code's.
NOMIC_NAMES = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}
GTE_NAMES = {
    "self_attn.o_proj": "attention.o_proj",
    "post_attention_layernorm": "attn_ln",
    "post_mlp_layernorm": "mlp_ln",
}


def remote_tensors(family, tensors):
    """The tensors of a transformers checkpoint, with the remote code's names."""
    path, names = ("layers", NOMIC_NAMES) if family == "nomic_bert" else ("layer", GTE_NAMES)
    qkv = "attn.Wqkv" if family == "nomic_bert" else "attention.qkv_proj"
    stored = {}
    for key, value in tensors.items():
        key = key.replace(f"{family}.", "bert." if family == "nomic_bert" else "new.", 1)
        key = re.sub(r"layers\.(\d+)\.", rf"encoder.{path}.\1.", key)
        for theirs, remote in names.items():
            key = key.replace(theirs, remote)
        if family == "nomic_bert":
            key = key.replace("embeddings.LayerNorm", "emb_ln")
        else:
            key = key.replace("lm_head.layer_norm", "lm_head.norm")
        stored[key] = value
    for key in [key for key in stored if ".self_attn.q_proj." in key]:
        parts = [stored.pop(key.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        stored[key.replace("self_attn.q_proj", qkv)] = torch.cat(parts)
    for key in [key for key in stored if ".mlp.up_proj." in key]:
        halves = stored.pop(key), stored.pop(key.replace("up_proj", "gate_proj"))
        stored[key.replace("up_proj", "up_gate_proj")] = torch.cat(halves)
    return stored


def remote_folder(family, theirs, folder, **changes):
    """``theirs`` as a folder that the remote code would write."""
    folder.mkdir(exist_ok=True)
    config = (NOMIC_CONFIG if family == "nomic_bert" else GTE_CONFIG) | changes
    name = type(theirs).__name__.replace("Gte", "New")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    tensors = remote_tensors(family, theirs.state_dict())
    save_file({key: value.clone() for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def with_ntk(theirs, theta=20000.0, factor=8.0, dim=16):
    """A transformers model with the frequencies of the remote code's "ntk" (kexue.fm/archives/9706)."""
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    frequencies = (factor * theta) ** (-2 * pairs / dim) * factor ** (-2 / dim)
    base = getattr(theirs, "gte", theirs)
    base.rotary_emb.inv_freq.copy_(frequencies)
    return theirs


MODELS = {
    "Model": Encoder,
    "ForMaskedLM": MaskedLM,
    "ForSequenceClassification": SequenceClassifier,
}


@pytest.mark.parametrize("task", MODELS)
@pytest.mark.parametrize("family", ["nomic_bert", "gte"])
def test_a_folder_of_the_remote_code(family, task, tmp_path):
    theirs = model(family, task)
    if family == "gte":
        theirs = with_ntk(theirs)
    ours = MODELS[task].from_pretrained(remote_folder(family, theirs, tmp_path / "hub"))
    batch = padded_batch(family)
    mask = batch["attention_mask"].bool()

    def agree(theirs):
        with torch.no_grad():
            output, expected = ours(packed(batch)), theirs(**batch)
        if task == "Model":
            close(output.last_hidden_state, expected.last_hidden_state[mask])
        else:
            logits = expected.logits
            close(output.logits, logits[mask] if task == "ForMaskedLM" else logits)

    agree(theirs)
    # The saved file has transformers' names, and the same angles.
    ours.save_pretrained(tmp_path / "saved")
    agree(type(theirs).from_pretrained(tmp_path / "saved").eval())
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_a_folder_of_the_remote_code_with_transformers_model_type(tmp_path):
    """snowflake-arctic-embed-m-v2.0, which transformers loads with its own class."""
    changes = dict(model_type="gte", rope_scaling=None, rope_theta=300)
    folder = remote_folder("gte", model("gte"), tmp_path, **changes)
    theirs = transformers.GteModel.from_pretrained(folder).eval()
    batch = padded_batch("gte")
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state[mask]
        ours = Encoder.from_pretrained(folder)(packed(batch))
        close(ours.last_hidden_state, expected)
        close(fastenc.patch(theirs)(**batch).last_hidden_state[mask], expected)


def test_nomics_scaling_by_length_begins_after_the_texts_of_pretraining(tmp_path):
    theirs = model("nomic_bert")
    folder = remote_folder("nomic_bert", theirs, tmp_path, rotary_scaling_factor=2.0)
    ours = Encoder.from_pretrained(folder)
    batch = padded_batch("nomic_bert", (5, 20))
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state[batch["attention_mask"].bool()]
        close(ours(packed(batch)).last_hidden_state, expected)
    assert ours.positions == 20
    with pytest.raises(ValueError, match="at most 20 tokens, the model's positions, got 21"):
        ours(pack_sequences([[5] * 21]))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("nomic_bert", {"num_experts": 8}, "must describe a dense model, got a mixture of experts"),
        ("nomic_bert", {"moe_every_n_layers": 2}, "got a mixture of experts"),
        ("nomic_bert", {"prenorm": True}, "prenorm must be False, got True"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction must be 1.0, got 0.5"),
        ("nomic_bert", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved must be False"),
        ("nomic_bert", {"activation_function": "gelu"}, "activation_function must be 'swiglu'"),
        ("gte", {"rope_scaling": {"type": "linear", "factor": 2}}, "must be of type 'ntk'"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 0.6}}, "without mixed_b"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type must be 'rope'"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale must be False, got True"),
    ],
)
def test_other_switches_of_the_remote_code_are_refused(family, change, message, tmp_path):
    folder = remote_folder(family, model(family), tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(folder)


def jina_folder(theirs, folder):
    """``theirs`` as a folder of jina-embeddings-v3's remote code, without the additions for tasks."""
    values = theirs.config.to_dict()
    rotary = {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    names = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}
    del values["rope_parameters"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | rotary | names, default=str))
    renames = {"self_attn.o_proj": "mixer.out_proj", "embeddings.LayerNorm": "emb_ln"}
    renames |= {"post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"}
    tensors = {}
    for key, value in theirs.state_dict().items():
        for ours, remote in renames.items():
            key = key.replace(ours, remote)
        tensors["roberta." + re.sub(r"layers\.", "encoder.layers.", key)] = value
    for key in [key for key in tensors if ".self_attn.q_proj." in key]:
        parts = [tensors.pop(key.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        tensors[key.replace("self_attn.q_proj", "mixer.Wqkv")] = torch.cat(parts)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_folder_of_jinas_remote_code(tmp_path):
    theirs, batch = model("jina_embeddings_v3"), padded_batch("jina_embeddings_v3")
    folder = jina_folder(theirs, tmp_path / "hub")
    ours = Encoder.from_pretrained(folder)
    ours.save_pretrained(tmp_path / "saved")
    for m in (theirs, type(theirs).from_pretrained(tmp_path / "saved").eval()):
        with torch.no_grad():
            expected = m(**batch).last_hidden_state[batch["attention_mask"].bool()]
            close(ours(packed(batch)).last_hidden_state, expected)


TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
RANK, ALPHA = 2, 3.0


def add_loras(folder):
    """Add random LoRA matrices as the remote code stores them: parametrizations of linear layers and embeddings."""
    values = json.loads((folder / "config.json").read_text())
    values |= {"lora_adaptations": TASKS, "lora_rank": RANK, "lora_alpha": ALPHA}
    values |= {"load_trained_adapters": True, "lora_dropout_p": 0.0}
    values["task_instructions"] = {task: f"good {task}: " for task in TASKS}
    (folder / "config.json").write_text(json.dumps(values))
    torch.manual_seed(3)
    tensors = {}
    for key, value in load_file(folder / "model.safetensors").items():
        if value.dim() != 2:
            tensors[key] = value
            continue
        name = key.removesuffix(".weight") + ".parametrizations.weight"
        (rows, columns), is_table = value.shape, key.endswith("_embeddings.weight")
        shapes = ((rows, RANK), (RANK, columns)) if is_table else ((RANK, columns), (rows, RANK))
        a, b = (0.3 * torch.randn(len(TASKS), *shape) for shape in shapes)
        tensors |= {f"{name}.original": value, f"{name}.0.lora_A": a, f"{name}.0.lora_B": b}
    save_file(tensors, folder / "model.safetensors")


def plain_folder(folder, target, task):
    """The folder without LoRA and with a task's weights by the published formula.

    That is W + B A alpha / rank for a linear layer, and E + A B alpha / rank for a table.
    """
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for key, value in tensors.items():
        if key.endswith(".original"):
            module = key.removesuffix(".parametrizations.weight.original")
            of_tasks = (tensors[key.replace("original", f"0.lora_{letter}")] for letter in "AB")
            a, b = (matrices[TASKS.index(task)] for matrices in of_tasks)
            product = a @ b if module.endswith("_embeddings") else b @ a
            weights[f"{module}.weight"] = value + product * ALPHA / RANK
        elif ".lora_" not in key:
            weights[key] = value
    values = json.loads((folder / "config.json").read_text())
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values | {"lora_adaptations": None}))
    save_file(weights, target / "model.safetensors")
    return target


def test_jinas_tasks(tmp_path):
    """A task's numbers are those of the published formula; PEFT loads what is written into transformers' class."""
    theirs, batch = model("jina_embeddings_v3"), padded_batch("jina_embeddings_v3")
    folder = jina_folder(theirs, tmp_path / "hub")
    add_loras(folder)
    ours = Encoder.from_pretrained(folder)
    texts = ["a good film", "bad"]
    ours.tokenizer = train_tokenizer(texts, vocab_size=60)
    ours.save_pretrained(tmp_path / "saved")
    again, mask = Encoder.from_pretrained(tmp_path / "saved"), batch["attention_mask"].bool()
    plain = ours.encode(texts)
    for task in TASKS[1], TASKS[4]:
        expected = Encoder.from_pretrained(plain_folder(folder, tmp_path / task, task))
        expected.tokenizer = ours.tokenizer
        vectors = expected.encode([f"good {task}: {text}" for text in texts])
        for encoder in ours, again:
            close(encoder.encode(texts, task=task), vectors)
            assert torch.equal(encoder.encode(texts), plain)
            assert not torch.allclose(encoder.encode(texts, task=task, prompt=""), plain, atol=0.01)
        name = name_of_task(task)
        use_adaptation(again, name)
        with torch.no_grad():
            output, got = expected(packed(batch)), again(packed(batch))
            close(got.last_hidden_state, output.last_hidden_state)
            close(got.pooled, output.pooled)
            with_peft = type(theirs).from_pretrained(tmp_path / "saved").eval()
            with_peft.load_adapter(tmp_path / "saved" / name)
            close(with_peft(**batch).last_hidden_state[mask], output.last_hidden_state)
        use_adaptation(again, None)
    with pytest.raises(ValueError, match=r"task must be one of .*'other'; it has retrieval.query"):
        ours.encode(texts, task="other")
    if int8_products.has_int8_products():
        in_8_bits = Encoder.from_pretrained(tmp_path / "saved", dtype="int8")
        with pytest.raises(ValueError, match="the LoRA of a task needs the weights in float32"):
            in_8_bits.encode(texts, task=TASKS[0])
    # A model with a head is a model of its own, without the tasks.
    MaskedLM.from_pretrained(folder).save_pretrained(tmp_path / "mlm")
    assert Encoder.from_pretrained(tmp_path / "mlm").adapted.tasks == ()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"lora_adaptations": TASKS[:2]}))
    with pytest.raises(ValueError, match="a matrix for each of the 2 lora_adaptations"):
        Encoder.from_pretrained(folder)
