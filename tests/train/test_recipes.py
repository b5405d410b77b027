"""The published recipes are complete, have the published sizes, and train from the command line."""

import re
import sys

import pytest
import torch
import transformers

from fastenc._base.config_files import read_config
from fastenc.cli.pretrain import Pretrain
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.train import TrainConfig
from fastenc.train.checkpoint import read_state
from fastenc.train.recipe import SHIPPED, read_recipe, recipe_names
from tests.helpers.commands import failure, run
from tests.helpers.training_run import documents

EVERY = pytest.mark.parametrize("name", recipe_names())
# Smaller than published, so that the run is short.
SMALL = {
    "vocab-size": 60,
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "intermediate": 64,
    "block-size": 32,
    "batch-size": 2,
    "global-batch-size": 4,
    "max-steps": 3,
    "warmup-steps": 1,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(documents(60)))
    return path


def given(values):
    return [part for key, value in values.items() for part in (f"--{key}", value)]


def transformers_model(name):
    """The models that the recipe's publication trains, on the meta device."""
    t = transformers
    roberta = dict(type_vocab_size=1, max_position_embeddings=514, pad_token_id=1)
    if name == "bert-base":
        return [t.BertForPreTraining(t.BertConfig())]
    if name == "roberta-base":
        return [t.RobertaForMaskedLM(t.RobertaConfig(vocab_size=50265, **roberta))]
    if name == "xlm-r-base":
        return [t.XLMRobertaForMaskedLM(t.XLMRobertaConfig(vocab_size=250002, **roberta))]
    if name == "spanbert-base":
        return [t.BertForMaskedLM(t.BertConfig(vocab_size=28996))]
    if name == "distilbert-base":
        return [t.DistilBertForMaskedLM(t.DistilBertConfig())]
    if name == "t5-base":
        return [
            t.T5ForConditionalGeneration(
                t.T5Config(num_heads=12, d_model=768, d_ff=3072, num_layers=12)
            )
        ]
    if name == "bart-base":
        parts = {f"{part}_{key}": value for part in ("encoder", "decoder")
                 for key, value in (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072))}  # fmt: skip
        return [
            t.BartForConditionalGeneration(
                t.BartConfig(d_model=768, max_position_embeddings=512, **parts)
            )
        ]
    if name == "deberta-v3-base":
        sizes = dict(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
        relative = dict(relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm")
        terms = dict(share_att_key=True, pos_att_type="p2c|c2p", position_biased_input=False)
        config = lambda layers: t.DebertaV2Config(
            num_hidden_layers=layers, **sizes, **relative, **terms
        )
        return [t.DebertaV2Model(config(12)), t.DebertaV2ForMaskedLM(config(6))]
    small = dict(hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    # The small model's generator has a quarter of its sizes, the base model's a third.
    own, generator = {
        "electra-small": (
            small,
            dict(hidden_size=64, num_attention_heads=1, intermediate_size=256),
        ),
        "electra-base": (
            dict(
                hidden_size=768, num_attention_heads=12, intermediate_size=3072, embedding_size=768
            ),
            dict(small, embedding_size=768),
        ),
    }[name]
    return [
        t.ElectraForPreTraining(t.ElectraConfig(**own)),
        t.ElectraForMaskedLM(t.ElectraConfig(**generator)),
    ]


# Numbers of weights that fastenc's model has and transformers' lacks.
SBO = 20 * 200 + (2 * 768 + 200) * 768 + 768 + 2 * 768 + 768 * 768 + 768 + 2 * 768 + 28996
DIFFERENCE = {
    "spanbert-base": SBO,  # the span-boundary head
    "distilbert-base": 2 * 768,  # token types
    # The generator shares the discriminator's tables of words, positions and token types.
    "electra-small": -(30522 + 512 + 2) * 128,
    "electra-base": -(30522 + 512 + 2) * 768,
    "deberta-v3-base": 2 * 768 + 768 * 768 + 768 + 768 + 1,  # the head for replaced tokens
}


@EVERY
def test_the_model_has_the_published_number_of_parameters(name, text):
    command = Pretrain.from_arguments("pretrain", [str(text), "-o", "out", "--recipe", name])
    new, objective = command.new, command.objective.definition
    with torch.device("meta"):
        if objective.student is None:
            pad = 1 if "roberta" in new.family else 0
            model = new.build(objective, new.vocab_size, pad, 512)
        else:
            model = objective.student(MaskedLM(EncoderConfig()).eval(), new.layers)
        theirs = [m.parameters() for m in transformers_model(name)]
    expected = sum(p.numel() for parameters in theirs for p in parameters)
    ours = sum(parameter.numel() for parameter in model.parameters())
    assert ours == expected + DIFFERENCE.get(name, 0)


@EVERY
def test_a_smaller_one_trains_end_to_end_and_its_resolved_recipe_repeats_it(name, text, tmp_path):
    small = dict(SMALL)
    if name == "distilbert-base":
        sizes = [part for key in ("layers", "hidden", "heads") for part in (f"--{key}", small[key])]
        new = ("--vocab-size", 60, "--block-size", 32, "--batch-size", 4, "--max-steps", 1)
        run("pretrain", text, "-o", tmp_path / "teacher", *sizes, *new)
        small = {
            k: small[k] for k in ("block-size", "batch-size", "global-batch-size", "max-steps")
        }
        small |= {"teacher": tmp_path / "teacher", "layers": 1}
    elif name.startswith("electra"):
        small["embedding-size"] = 16
    elif name in ("roberta-base", "xlm-r-base", "bart-base", "t5-base"):
        small["vocab-size"] = 300  # all bytes, or the sentinels
    run("pretrain", text, "-o", tmp_path / "a", "--recipe", name, *given(small))
    resolved = tmp_path / "a" / "recipe.toml"
    values = read_config(resolved)
    expected = read_recipe(name).values | {
        k: v if k != "teacher" else str(v) for k, v in small.items()
    }
    assert {key: values[key] for key in expected} == expected
    run("pretrain", text, "-o", tmp_path / "b", "--config", resolved)
    # With a newly trained vocabulary, losses and checksums of tokens differ: equally frequent tokens can come in
    # another order each time.
    a, b = (read_state(tmp_path / run_ / "checkpoint-00000003")["settings"] for run_ in "ab")
    checksums = {name for name, value in a.items() if str(value).startswith("checksum ")}
    assert a.keys() == b.keys() and all(a[name] == b[name] for name in a.keys() - checksums)


@EVERY
def test_each_published_value_names_its_source_and_makes_a_configuration(name):
    for line in (SHIPPED / f"{name}.toml").read_text().splitlines():
        key = line.partition(" = ")[0]
        if " = " in line and key not in ("description", "family"):
            own = key == "tokenizer" and name in ("bert-base", "electra-small", "electra-base")
            assert "#" in line or own, f"{name}: {line}"
    fields = {key.replace("-", "_"): value for key, value in read_recipe(name).values.items()}
    known = {key: fields[key] for key in TrainConfig.__dataclass_fields__ if key in fields}
    config = TrainConfig("runs", **known)
    assert config.micro_batches(1) * config.batch_size == config.global_batch_size
    assert {"learning_rate", "betas", "adam_eps", "weight_decay", "max_grad_norm"} <= known.keys()


# (learning rate, warm-up, betas, epsilon, weight decay, steps or epochs, sequences a step, tokens a sequence, dropout,
# share of tokens to predict), and the source of the numbers.
PUBLISHED = {
    # Devlin et al. 2018, arXiv:1810.04805, appendix A.2; epsilon: optimization.py of google-research/bert
    "bert-base": (1e-4, 10_000, (0.9, 0.999), 1e-6, 0.01, 1_000_000, 256, 512, 0.1, 0.15),
    # Liu et al. 2019, arXiv:1907.11692, table 9, column "BASE"; sections 2.3 and 3.1 for the last and the length
    "roberta-base": (6e-4, 24_000, (0.9, 0.98), 1e-6, 0.01, 500_000, 8192, 512, 0.1, 0.15),
    # Conneau et al. 2019, arXiv:1911.02116, section 5.2: steps and batch; the others are RoBERTa-base's
    "xlm-r-base": (6e-4, 24_000, (0.9, 0.98), 1e-6, 0.01, 1_500_000, 8192, 512, 0.1, 0.15),
    # Joshi et al. 2019, arXiv:1907.10529, section 4.2 and, for the share, section 3.1
    "spanbert-base": (1e-4, 10_000, (0.9, 0.999), 1e-8, 0.1, 2_400_000, 256, 512, 0.1, 0.15),
    # Clark et al. 2020, arXiv:2003.10555, table 6; lengths: section 3.4, configure_pretraining.py
    "electra-small": (5e-4, 10_000, (0.9, 0.999), 1e-6, 0.01, 1_000_000, 128, 128, 0.1, 0.15),
    "electra-base": (2e-4, 10_000, (0.9, 0.999), 1e-6, 0.01, 766_000, 256, 512, 0.1, 0.15),
    # experiments/language_model/rtd.sh and optims/args.py of microsoft/DeBERTa
    "deberta-v3-base": (1e-4, 10_000, (0.9, 0.999), 1e-6, 0.01, 1_000_000, 256, 512, 0.1, 0.15),
    # Sanh et al. 2019, arXiv:1910.01108, section 3: the batch; the others are defaults of train.py in transformers'
    # examples/research_projects/distillation: epochs, and the warm-up is a share of the steps
    "distilbert-base": (5e-4, 0.05, (0.9, 0.98), 1e-6, 0.0, 3, 4000, 512, None, 0.15),
    # Raffel et al. 2019, arXiv:1910.10683, sections 3.1 and 3.3.4; AdamW's settings are not the paper's, see the recipe
    "t5-base": (4e-4, 10_000, (0.9, 0.999), 1e-8, 0.0, 524_288, 128, 512, 0.1, 0.15),
    # Lewis et al. 2019, arXiv:1910.13461, section 5.1; of the optimiser: RoBERTa-base's
    "bart-base": (6e-4, 24_000, (0.9, 0.98), 1e-6, 0.01, 500_000, 8000, 512, 0.1, 0.3),
}
# 0: RoBERTa's table 9.
NORMS = {"roberta-base": 0.0, "xlm-r-base": 0.0, "distilbert-base": 5.0, "bart-base": 0.0}


@EVERY
def test_the_values_are_the_published_ones(name):
    values = read_recipe(name).values
    first = lambda *keys: next((values[key] for key in keys if key in values), None)
    used = (
        values["learning-rate"],
        first("warmup-steps", "warmup"),
        tuple(values["betas"]),
        values["adam-eps"],
        values["weight-decay"],
        first("max-steps", "epochs"),
        values["global-batch-size"],
        values["block-size"],
        first("dropout"),
        first("probability", "infilling"),
    )
    assert used == PUBLISHED[name]
    assert values["max-grad-norm"] == NORMS.get(name, 1.0)


def test_the_command_line_has_the_last_word_in_other_units_too(tmp_path):
    given = ["text", "--recipe", "bert-base", "-o", "run"]
    config = Pretrain.from_arguments("pretrain", given).training
    assert config.max_steps == 1_000_000 and config.global_batch_size == 256
    other = ["--epochs", "3", "--warmup", "0.1", "--batch-tokens", "4096"]
    (tmp_path / "file.toml").write_text("epochs = 3\nwarmup = 0.1\nbatch-tokens = 4096")
    for form in (other, ["--config", str(tmp_path / "file.toml")]):
        config = Pretrain.from_arguments("pretrain", [*given, *form]).training
        assert config.epochs == 3 and config.warmup == 0.1 and config.batch_tokens == 4096
        assert config.max_steps is config.warmup_steps is config.global_batch_size is None


def test_the_names_are_listed():
    assert re.findall(r"^(\S+) +\S", run("recipes"), re.M) == recipe_names()


def test_errors_are_one_line(text, tmp_path, capsys):
    own = tmp_path / "own.toml"
    command = ("pretrain", text, "-o", tmp_path / "x", "--config")
    for content, message in (
        ("learning-rat = 1e-4", "there is no option learning-rat (is it learning-rate?)"),
        ("[a]\nseed = 1\n[b]\nseed = 2", "gives seed twice"),
        ("seed = ", "is not TOML"),
        ("warmup-steps = 10\nmax-steps = 4", "at most the run's 4 steps, got 10"),
        ("generator-size = 0.5", "--generator-size is an option of the objective electra, got 0.5"),
        (
            "embedding-size = 16",
            "--embedding-size is an option of ELECTRA, ALBERT, DeBERTa, RemBERT and RoFormer, got 16",
        ),
        ("global-batch-size = 24", "multiple of --batch-size * processes, got 24 and 16 * 1"),
        ("betas = [0.9, 1.0]", "--betas must be two numbers in [0, 1)"),
    ):
        own.write_text(content)
        assert message in failure(capsys, *command, own)
    command = (*command[:-1], "--recipe")
    assert "(is it bert-base?)" in failure(capsys, *command, "bert-bas")
    assert "give one of them, or a file by --config" in failure(capsys, *command, "none.toml")


def test_a_file_has_a_byte_order_mark_or_another_encoding(tmp_path, capsys):
    """Editors on Windows write both."""
    for name, content in (("own.toml", "seed = 7\r\n"), ("own.yaml", "seed: 7\r\n")):
        file = tmp_path / name
        file.write_text(content, encoding="utf-8-sig", newline="")
        command = ["text", "-o", "run", "--config", str(file)]
        assert Pretrain.from_arguments("pretrain", command).training.seed == 7
        file.write_text(f"{content}# Größe", encoding="latin-1")
        assert f"{name} is not UTF-8" in failure(capsys, "pretrain", *command)


def test_names_of_a_yaml_file(tmp_path, capsys):
    """TOML's own reader refuses such files."""
    file = tmp_path / "own.yaml"
    command = ["text", "-o", "run", "--config", str(file)]
    for content, message in (
        ("seed: 1\nseed: 2", "own.yaml gives seed twice: leave one of them"),
        ("a:\n  seed: 1\n  seed: 2", "own.yaml gives seed twice: leave one of them"),
        ("5: 1", "own.yaml: there is no option 5"),
        ("on: 1", "own.yaml: there is no option True"),
    ):
        file.write_text(content)
        assert message in failure(capsys, "pretrain", *command)


def test_without_a_toml_reader_the_error_names_the_extra(monkeypatch):
    for module in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"fastenc\[train\]"):
        read_recipe("bert-base")
