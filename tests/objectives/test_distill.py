import json
import re

import pytest
import torch
import torch.nn.functional as F

from fastenc.models import MaskedLM
from fastenc.objectives import DistilledLM
from fastenc.objectives.distill import kept_layers
from fastenc.packing import pack
from tests.helpers.families import FAMILIES, padded_batch
from tests.helpers.families import model as hf_model
from tests.helpers.references import distill as reference


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.fixture(params=FAMILIES)
def models(request, tmp_path):
    """transformers' student and teacher, and ours from their checkpoints."""
    theirs = hf_model(request.param, "ForMaskedLM")
    teacher = hf_model(request.param, "ForMaskedLM")
    with torch.no_grad():
        for parameter in teacher.parameters():
            if parameter.requires_grad:  # RoFormer's table of angles is a constant
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "student")
    teacher.save_pretrained(tmp_path / "teacher")
    own_teacher = MaskedLM.from_pretrained(tmp_path / "teacher")
    ours = DistilledLM.from_pretrained(tmp_path / "student", teacher=own_teacher)
    return request.param, ours, theirs, teacher


def test_loss_and_gradients_are_those_of_transformers_models(models):
    family, ours, theirs, teacher = models
    batch = padded_batch(family)
    mask = batch["attention_mask"].bool()
    labels = torch.where((torch.rand(mask.shape) < 0.4) & mask, batch["input_ids"], -100)
    packed = pack(batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))
    output = ours(packed, labels[mask])

    student = theirs(**batch, labels=labels, output_hidden_states=True)
    with torch.no_grad():
        expected = teacher(**batch, output_hidden_states=True)
    rows = labels != -100
    kl = 4 * F.kl_div(
        (student.logits[rows] / 2).log_softmax(1),
        (expected.logits[rows] / 2).softmax(1),
        reduction="batchmean",
    )
    states = student.hidden_states[-1][mask], expected.hidden_states[-1][mask]
    cosine = F.cosine_embedding_loss(*states, torch.ones(len(states[0])))
    close(output.terms["mlm"].mean, student.loss)
    close(output.terms["kl"].mean, kl)
    close(output.terms["cosine"].mean, cosine)
    loss = 2 * student.loss + 5 * kl + cosine
    close(output.loss, loss, 1e-4)
    with torch.no_grad():  # rows without a label fill up the labelled ones
        close(ours(packed, labels[mask], int(rows.sum()) + 2).loss, loss, 1e-4)
    logits = student.logits[mask], expected.logits[mask]
    close(reference.distillation_loss(*logits, labels[mask], *states), loss, 1e-4)

    output.loss.backward()
    loss.backward()
    ours_grad = ours.encoder.embeddings.word.weight.grad
    theirs_grad = theirs.get_input_embeddings().weight.grad
    assert (ours_grad - theirs_grad).norm() / theirs_grad.norm() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_a_shorter_student_of_every_family(family, tmp_path):
    teacher = hf_model(family, "ForMaskedLM")
    teacher.save_pretrained(tmp_path / "teacher")
    layers = 2 if family == "albert" else 1  # its groups have two layers here
    own_teacher = MaskedLM.from_pretrained(tmp_path / "teacher").eval()
    student = DistilledLM.from_teacher(own_teacher, layers)
    student.eval().save_pretrained(tmp_path / "student")
    theirs = type(teacher).from_pretrained(tmp_path / "student").eval()
    batch = padded_batch(family)
    mask = batch["attention_mask"].bool()
    packed = pack(batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))
    with torch.inference_mode():
        close(student(packed).logits, theirs(**batch).logits[mask])


def test_layers_are_taken_from_the_teacher(tmp_path):
    hf_model("bert", "ForMaskedLM", num_hidden_layers=5).save_pretrained(tmp_path)
    teacher = MaskedLM.from_pretrained(tmp_path)
    student = DistilledLM.from_teacher(teacher, 3)
    assert student.config.num_layers == 3
    for index, source in enumerate((0, 2, 4)):
        a, b = student.encoder.layers[index], teacher.encoder.layers[source]
        for own, other in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(own, other) and own.data_ptr() != other.data_ptr()
    rest = {**student.encoder.embeddings.state_dict(), **student.head.state_dict()}
    expected = {**teacher.encoder.embeddings.state_dict(), **teacher.head.state_dict()}
    assert all(torch.equal(rest[name], expected[name]) for name in expected)
    assert kept_layers(12, 6) == [0, 2, 4, 7, 9, 11], "DistilBERT's"
    assert kept_layers(12, 1) == [0] and kept_layers(3, 3) == [0, 1, 2]


def check_student_is_teacher_without_a_layer(family, folder, *absent):
    """``absent``: the keys that the teacher's config.json lacks."""
    teacher = hf_model(family, "ForMaskedLM", num_hidden_layers=4)
    teacher.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    types = values.get("layer_types")
    path.write_text(json.dumps({key: each for key, each in values.items() if key not in absent}))
    student = DistilledLM.from_teacher(MaskedLM.from_pretrained(folder), 3).eval()

    kept = (0, 2, 3)
    changes = {"layer_types": [types[number] for number in kept]} if types else {}
    theirs = hf_model(family, "ForMaskedLM", num_hidden_layers=3, **changes)
    weights = teacher.state_dict()
    source = lambda match: f"{match[1]}.{kept[int(match[2])]}."
    of_teacher = lambda name: weights[re.sub(r"(layers?)\.(\d)\.", source, name)]
    theirs.load_state_dict({name: of_teacher(name) for name in theirs.state_dict()})
    batch = padded_batch(family)
    mask = batch["attention_mask"]
    packed = pack(batch["input_ids"], mask, batch.get("token_type_ids"))
    with torch.inference_mode():
        close(student(packed).logits, theirs(**batch).logits[mask.bool()])


@pytest.mark.parametrize(
    "family", ["bert", "megatron-bert", "xlm-roberta-xl", "modernbert", "eurobert"]
)
def test_a_student_is_the_teacher_without_a_layer(family, tmp_path):
    check_student_is_teacher_without_a_layer(family, tmp_path)


@pytest.mark.parametrize("family", ["modernbert", "ultrabert"])
def test_layers_keep_their_types_where_the_file_does_not_name_them(family, tmp_path):
    check_student_is_teacher_without_a_layer(family, tmp_path, "layer_types")


def test_the_teacher_is_no_part_of_the_student(models, tmp_path):
    from transformers import AutoModelForMaskedLM

    family, ours, theirs, _ = models
    assert len(ours.state_dict()) == len(MaskedLM(ours.config).state_dict())
    batch = padded_batch(family)
    packed = pack(batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))
    (teacher,) = ours._teacher
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    ours.train()(packed, packed.input_ids).loss.backward()
    assert not teacher.training and all(p.grad is None for p in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    ours.eval().save_pretrained(tmp_path / "saved")
    again, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert type(again) is type(theirs) and not info["missing_keys"] and not info["unexpected_keys"]


def test_bad_input_is_named(tmp_path):
    hf_model("bert", "ForMaskedLM").save_pretrained(tmp_path)
    teacher = MaskedLM.from_pretrained(tmp_path)
    for layers in (0, 3):
        with pytest.raises(ValueError, match=rf"num_layers must be in \[1, 2\], .*got {layers}"):
            DistilledLM.from_teacher(teacher, layers)
    for name in ("vocab_size", "hidden_size"):
        config = teacher.config.replace(**{name: 64, "embedding_size": 0})
        with pytest.raises(ValueError, match=f"the same {name}, got 64 and "):
            DistilledLM(config, teacher)
    with pytest.raises(ValueError, match="needs a teacher, got a student without one: load it"):
        DistilledLM(teacher.config)(pack(torch.tensor([[1, 2]])), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="call teacher"):
        DistilledLM(teacher.config, teacher.train())
