"""Small models in place of the hub's models that the documents name: the same classes, random weights, offline."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from fastenc.demo.checkpoint import minilm_folder

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 64, "vocab_size": 30522, "pad_token_id": 0}
ENTITIES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
RELATIONS = ["contradiction", "neutral", "entailment"]


def local_folders(folder: Path, code: str) -> dict[str, Path]:
    """{name on the hub: folder} for the names in the code; missing folders are made."""
    folders = {}
    for name, make in MODELS.items():
        if f'"{name}"' in code:
            folders[name] = folder / name.replace("/", "--")
            if not folders[name].exists():
                make(folders[name])
    return folders


def _small_minilm(folder: Path) -> None:
    """MiniLM's files with two small layers: a static model computes a vector for each of its 30,522 tokens."""
    import transformers

    shutil.copytree(minilm_folder(), folder)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64}
    config = transformers.AutoConfig.from_pretrained(folder, **sizes)
    transformers.AutoModel.from_config(config).save_pretrained(folder)


def _model(name: str, labels: list[str] | None = None, **changes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        import transformers

        torch.manual_seed(0)
        cls = getattr(transformers, name)
        names = {} if labels is None else {"id2label": dict(enumerate(labels))}
        if labels is not None:
            names["label2id"] = {label: number for number, label in enumerate(labels)}
        cls(cls.config_class(**SMALL | changes, **names)).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(minilm_folder()).save_pretrained(folder)

    return make


def _gliner(folder: Path) -> None:
    """GLiNER's bi-encoder: one encoder for texts, one for the names of entity types."""
    from gliner import GLiNER

    torch.manual_seed(0)
    text, labels = folder / "text", folder / "labels"
    _model("ModernBertModel", **MODERNBERT)(text)
    _model("BertModel")(labels)
    sizes = {"model_name": str(text), "labels_encoder": str(labels), "hidden_size": 32}
    config = {"model_type": "gliner_bi_encoder_span", "max_len": 64, "max_width": 4} | sizes
    GLiNER.from_config(config, resize_token_embeddings=False).save_pretrained(folder)


def _gliner_of_deberta(folder: Path) -> None:
    """GLiNER with one encoder, which reads a text together with the names of the types."""
    from gliner import GLiNER

    torch.manual_seed(0)
    _model("DebertaV2Model", **DEBERTA_V3)(folder / "text")
    sizes = {"model_name": str(folder / "text"), "hidden_size": 32, "max_len": 64, "max_width": 4}
    GLiNER.from_config({"model_type": "gliner_uni_encoder_span"} | sizes).save_pretrained(folder)


def _colbert(folder: Path) -> None:
    """A ColBERT in sentence-transformers' files, whose attention sees the mask tokens of a query."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    _model("ModernBertModel", **MODERNBERT)(folder / "encoder")
    expansion = {"strategy": "fixed", "attend": True, "length": 32}
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    steps = [
        Transformer(str(folder / "encoder"), query_expansion=expansion),
        Dense(32, 16, bias=False, activation_function=torch.nn.Identity(), **names),
        MultiVectorMask(),
    ]
    MultiVectorEncoder(modules=steps).save_pretrained(str(folder))


def _m3(folder: Path) -> None:
    """BGE-M3: an XLM-RoBERTa, and two linear heads in the files that the published checkpoint has."""
    _model("XLMRobertaModel")(folder)
    for name, outputs in (("sparse_linear", 1), ("colbert_linear", 32)):
        torch.save(torch.nn.Linear(32, outputs).state_dict(), folder / f"{name}.pt")


def _nllb(folder: Path) -> None:
    """Its tokenizer has a token for each language."""
    import transformers

    vocabulary = SMALL["vocab_size"] + 1
    _model("M2M100ForConditionalGeneration", **TRANSLATOR | {"vocab_size": vocabulary})(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["deu_Latn"], special_tokens=True)
    tokenizer.save_pretrained(folder)


TRANSLATOR = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
TRANSLATOR |= {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
TRANSLATOR |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
TRANSLATOR |= {f"{part}_layerdrop": 0.0 for part in ("encoder", "decoder")}
TRANSLATOR |= {"eos_token_id": 102, "forced_eos_token_id": 102, "decoder_start_token_id": 0}
MODERNBERT = {"cls_token_id": 101, "sep_token_id": 102, "bos_token_id": 101, "eos_token_id": 102}
DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
MODELS: dict[str, Callable[[Path], None]] = {
    "sentence-transformers/all-MiniLM-L6-v2": _small_minilm,
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": _model(
        "DistilBertForSequenceClassification",
        ["NEGATIVE", "POSITIVE"],
        n_layers=2,
        dim=32,
        n_heads=2,
        hidden_dim=64,
    ),
    "dslim/bert-base-NER": _model("BertForTokenClassification", ENTITIES),
    "FacebookAI/roberta-large-mnli": _model("RobertaForSequenceClassification", RELATIONS),
    "google-bert/bert-base-uncased": _model("BertForMaskedLM"),
    "cross-encoder/ms-marco-MiniLM-L6-v2": _model("BertForSequenceClassification", ["LABEL_0"]),
    "naver/splade-v3": _model("BertForMaskedLM"),
    "BAAI/bge-m3": _m3,
    "lightonai/GTE-ModernColBERT-v1": _colbert,
    "knowledgator/modern-gliner-bi-base-v1.0": _gliner,
    "urchade/gliner_medium-v2.1": _gliner_of_deberta,
    "facebook/nllb-200-distilled-600M": _nllb,
    "Helsinki-NLP/opus-mt-en-de": _model("MarianMTModel", **TRANSLATOR),
    "MoritzLaurer/deberta-v3-base-zeroshot-v2.0": _model(
        "DebertaV2ForSequenceClassification", ["entailment", "not_entailment"], **DEBERTA_V3
    ),
}
