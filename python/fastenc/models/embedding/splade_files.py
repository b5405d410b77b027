"""sentence-transformers' files of a sparse encoder: modules.json, the pooling and the length of texts.

modules.json lists a masked-LM model and a SpladePooling (``1_SpladePooling/config.json``).
"""

from dataclasses import dataclass
from pathlib import Path

from fastenc._base.files import member
from fastenc.models.architectures.values import Rule, check
from fastenc.models.embedding.sentence_files import (
    MAIN,
    MODULES,
    PROMPTS,
    TEXT,
    json_in,
    max_length_in,
    steps_in,
    write_json,
)

POOLINGS = ("max", "sum")
ACTIVATIONS = ("relu", "log1p_relu")
POOLING = "SpladePooling"
PACKAGE = "sentence_transformers.sparse_encoder.models"


@dataclass(frozen=True)
class SpladeSettings:
    """How a text's weights are computed.

    Fields:
        pooling: "max" or "sum" over the text's tokens.
        activation: "relu": log(1 + relu(logit)), or "log1p_relu": the logarithm of one more than that.
        max_length: number of tokens to which a text is cut, special tokens included; None: the model's positions.
    Raises: ValueError for another pooling or activation.
    """

    pooling: str = "max"
    activation: str = "relu"
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("pooling", POOLINGS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")


def is_splade(folder: Path) -> bool:
    """Whether a folder holds a sparse encoder of sentence-transformers."""
    path = folder / MODULES
    return path.exists() and POOLING in [name for name, _ in steps_in(path)]


def read_splade(folder: Path) -> SpladeSettings | None:
    """The settings in a folder, or None if it has no modules.json: a masked-LM model.

    Raises: ValueError for steps that this library does not compute.
    """
    path = folder / MODULES
    if not path.exists():
        return None
    steps = steps_in(path)
    names = [name for name, _ in steps]
    if names not in (["MLMTransformer", POOLING], ["Transformer", POOLING]):
        remedy = "use sentence-transformers for other steps"
        if POOLING not in names:
            remedy = "it gives dense vectors, which Encoder.encode and fastenc embed without --sparse compute"
        raise ValueError(
            f"{path} must be a masked-LM model and {POOLING}, got {', '.join(names)}: {remedy}"
        )
    main = json_in(folder / MAIN) if (folder / MAIN).exists() else {}
    check(main, {"prompts": PROMPTS}, f"{folder / MAIN}: ")
    if any((main.get("prompts") or {}).values()):
        raise ValueError(
            f"{folder} must add no prompts to texts, got {main['prompts']}: use sentence-transformers"
        )
    source = member(folder, steps[1][1], path) / "config.json"
    values = json_in(source)
    text = Rule("a text", lambda value: isinstance(value, str))
    check(values, {"pooling_strategy": text, "activation_function": text}, f"{source}: ")
    return SpladeSettings(
        values.get("pooling_strategy", "max"),
        values.get("activation_function", "relu"),
        max_length_in(folder),
    )


def write_splade(folder: Path, settings: SpladeSettings, vocabulary: int, positions: int) -> None:
    """Write the files into a model's folder."""
    pooling = {
        "pooling_strategy": settings.pooling,
        "activation_function": settings.activation,
        "word_embedding_dimension": vocabulary,
    }
    # The name that every version reads. Its successor, Transformer, takes a masked-LM model since 5.4 only.
    modules = [("", "MLMTransformer"), (f"1_{POOLING}", POOLING)]
    for name, values in {
        f"1_{POOLING}/config.json": pooling,
        TEXT: {"max_seq_length": settings.max_length or positions, "do_lower_case": False},
        MAIN: {
            "model_type": "SparseEncoder",
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "dot",
        },
        # Written last, so that a folder with modules.json is complete.
        MODULES: [
            {"idx": index, "name": str(index), "path": path, "type": f"{PACKAGE}.{module}"}
            for index, (path, module) in enumerate(modules)
        ],
    }.items():
        write_json(folder / name, values)
