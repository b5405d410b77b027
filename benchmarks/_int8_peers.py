"""An encoder in 8 bits by OpenVINO and ONNX Runtime.

Each function returns {name: a callable from a padded batch to hidden states, or why there is none}.
"""

from pathlib import Path

from benchmarks._compare import peer
from benchmarks._peers import OnnxRuntime, OpenVino, padded

CALIBRATION_TEXTS = 300


def openvino(graph: Path, threads: int, samples: list[list[int]]) -> dict:
    """Args: samples: token ids of the texts by which static quantisation measures its ranges."""

    def make(quantise, precision="f32", **options):
        return lambda nncf: OpenVino(graph, threads, precision, quantise(nncf), **options)

    def weights_in_8_bits(nncf):
        return lambda model: nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)

    def static(nncf):
        inputs = [{k: v.numpy() for k, v in padded([ids]).items()} for ids in samples]
        return lambda model: nncf.quantize(
            model,
            nncf.Dataset(inputs),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(inputs),
        )

    row = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"}
    return {
        "OpenVINO int8 static, sorted": peer("nncf", make(static)),
        "OpenVINO int8 static, rest bf16, sorted": peer("nncf", make(static, "bf16")),
        "OpenVINO int8 dynamic, sorted": peer("nncf", make(weights_in_8_bits, **row)),
    }


def onnx_runtime(graph: Path, heads: int, hidden: int, threads: int) -> dict:
    def make(fused, ops):
        return lambda _: OnnxRuntime(graph, heads, hidden, threads, fused=fused, quantised=ops)

    return {
        "ONNX Runtime int8 dynamic, fused, sorted": peer(
            "onnxruntime", make(True, ("MatMul", "Attention"))
        ),
        # sentence-transformers' export_dynamic_quantized_onnx_model(model, "avx512_vnni"): every op that ONNX Runtime
        # can quantise in the call, of the graph that is not fused.
        "sentence-transformers' qint8, sorted": peer("onnxruntime", make(False, None)),
    }
