"""Other ways to run the same checkpoint on a CPU, for comparison: Hugging Face, ONNX Runtime, OpenVINO."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")


def hugging_face(folder: Path, attention: str = "sdpa"):
    from transformers import AutoModel

    # Nobody here reads the pooler's output, which the other peers' graphs do not have.
    return AutoModel.from_pretrained(
        folder, attn_implementation=attention, add_pooling_layer=False
    ).eval()


def padded(sequences: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """A padded batch as a tokenizer returns it."""
    length = max(map(len, sequences))
    ids = torch.tensor([s + [pad] * (length - len(s)) for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (length - len(s)) for s in sequences])
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def export_onnx(folder: Path, target: Path) -> Path:
    """The encoder as an ONNX graph from token ids to the last hidden state; batch and length are dynamic."""

    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = hugging_face(folder, "eager")

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.model(input_ids, attention_mask, token_type_ids).last_hidden_state

    example = padded([[101, 2000, 2001, 102], [101, 102]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Hidden(),
            tuple(example.values()),
            str(target),
            input_names=list(INPUT_NAMES),
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in (*INPUT_NAMES, "hidden")},
            opset_version=17,
            dynamo=False,
        )
    return target


class OnnxRuntime:
    """ONNX Runtime, by default with its fused attention, skip-LayerNorm and bias-GELU operators.

    Args: quantised: names of the ops to quantise dynamically in 8 bits, None: all that it can; (): none.
    """

    def __init__(
        self,
        onnx_file: Path,
        heads: int,
        hidden: int,
        threads: int,
        *,
        fused: bool = True,
        quantised: tuple[str, ...] | None = (),
    ):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        with tempfile.TemporaryDirectory() as folder:
            path = _fused(onnx_file, heads, hidden, Path(folder)) if fused else onnx_file
            if quantised != ():
                path = _quantised(path, quantised, Path(folder))
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        self.names = {value.name for value in self.session.get_inputs()}

    def __call__(self, batch: dict[str, torch.Tensor]) -> np.ndarray:
        # The fused embedding takes int32; the graph says whether it has one.
        kinds = {
            v.name: np.int32 if "int32" in v.type else np.int64 for v in self.session.get_inputs()
        }
        feed = {
            k: v.numpy().astype(kinds[k], copy=False) for k, v in batch.items() if k in self.names
        }
        return self.session.run(None, feed)[0]


def _fused(onnx_file: Path, heads: int, hidden: int, folder: Path) -> Path:
    from onnxruntime.transformers import optimizer

    fused = optimizer.optimize_model(
        str(onnx_file), model_type="bert", num_heads=heads, hidden_size=hidden, opt_level=1
    )
    statistics = fused.get_fused_operator_statistics()
    if not statistics["Attention"]:
        raise RuntimeError(f"ONNX Runtime's optimizer did not fuse attention: {statistics}")
    fused.save_model_to_file(str(folder / "fused.onnx"))
    return folder / "fused.onnx"


def _quantised(onnx_file: Path, ops: tuple[str, ...] | None, folder: Path) -> Path:
    """Weights s8 with a scale for each column; rows u8, whose range is measured over the whole tensor in the call."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.registry import IntegerOpsRegistry

    quantize_dynamic(
        str(onnx_file),
        str(folder / "int8.onnx"),
        weight_type=QuantType.QInt8,
        per_channel=True,
        op_types_to_quantize=list(IntegerOpsRegistry if ops is None else ops),
        extra_options={"DefaultTensorType": 1},  # float: the fused ops have no shape inference
    )
    return folder / "int8.onnx"


class OpenVino:
    """OpenVINO, compiled for latency on the given number of threads; precision "f32" or "bf16".

    Args: change: called with the model, returns the one that is compiled.
    """

    def __init__(
        self,
        onnx_file: Path,
        threads: int,
        precision: str = "f32",
        change: Callable = lambda model: model,
        **options: str,
    ):
        import openvino

        core = openvino.Core()
        self.model = core.compile_model(
            change(openvino.convert_model(str(onnx_file))),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": precision,
                "PERFORMANCE_HINT": "LATENCY",
                **options,
            },
        )

    def __call__(self, batch: dict[str, torch.Tensor]) -> np.ndarray:
        return self.model({k: v.numpy() for k, v in batch.items()})[0]
