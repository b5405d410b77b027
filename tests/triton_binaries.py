"""Compiles the Triton kernels ahead of time, without a GPU, and reports what the machine code uses, as JSON.

    python tests/triton_binaries.py 80|90|100

Runs in a process of its own: the tests' process has chosen Triton's interpreter.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from fastenc.kernels import (
    attention,
    attention_relative,
    attention_short,
    bias_gelu,
    bias_glu,
    embedding_layer_norm,
    layer_norm,
    mlm_corruption,
    packing,
    segment_pool,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FLOAT32_POINTERS = {"lse", "delta", "dlse", "wide_dq", "mean", "rstd", "partial"}
FLOAT32_POINTERS |= {"alibi", "relative", "key_bias"}
INTEGER_POINTERS = {
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "starts", "ends"), "*i32"),
    "argmax": "*i32",
    **dict.fromkeys(("seed", "ids", "indices", "positions", "types", "order"), "*i64"),
    **dict.fromkeys(("choices", "corrupted", "cutoffs", "labels"), "*i64"),
    "special": "*i1",
}
FLOATS = {"scale", "eps", "drop_scale", "padding_value"}


def type_of(argument: str, element: str) -> str:
    """The type a kernel's argument has in use, told by its name."""
    if argument.endswith("_ptr"):
        name = argument.removesuffix("_ptr")
        return INTEGER_POINTERS.get(name) or (
            "*fp32" if name in FLOAT32_POINTERS else f"*{element}"
        )
    return "fp32" if argument in FLOATS else "i32"


def attention_cases() -> Iterator[tuple[str, object, str, dict]]:
    """Each kernel with dropout, for every head_dim; with window and all biases, and in float32, for some."""
    plain = {"alibi_ptr": None, "relative_ptr": None, "key_bias_ptr": None, "WINDOW": False}
    kernels = {
        "forward": attention._attention_fwd_kernel,
        "backward_kv": attention._attention_bwd_kv_kernel,
        "backward_q": attention._attention_bwd_q_kernel,
    }
    for dim in (32, 64, 96, 128):
        shared = {"H": 12, "D": dim, "BLOCK_D": triton.next_power_of_2(dim), "PRECISION": "ieee"}
        for kind, kernel in kernels.items():
            launch = attention.config(kind, dim, "half", False)
            yield f"attention {kind} {dim} bf16", kernel, "bf16", {**shared, **plain, **launch}
            if dim not in (64, 128):
                continue
            launch = attention.config(kind, dim, "half", True)
            constants = {**shared, "WINDOW": True, **launch}
            yield f"attention {kind} {dim} bf16 biased", kernel, "bf16", constants
            # IEEE float32 has no matrix instructions.
            launch = attention.config(kind, dim, "tf32", False)
            constants = {**shared, **plain, **launch, "PRECISION": "tf32"}
            yield f"attention {kind} {dim} tf32", kernel, "fp32", constants
        if dim not in (64, 128):
            continue
        constants = {**shared, "WINDOW": True, "SAME_LENGTHS": True}
        constants |= attention_relative.config(dim, "half")
        kernel = attention_relative._attention_bwd_relative_kernel
        yield f"attention backward_relative {dim} bf16", kernel, "bf16", constants
        for length in (64, 128):
            constants = {**shared, **attention_short.config(dim, length, False)}
            kernel = attention_short._attention_short_fwd_kernel
            yield f"attention short forward {dim} {length} bf16", kernel, "bf16", constants
            constants = {**shared, **attention_short.config(dim, length, True)}
            kernel = attention_short._attention_short_bwd_kernel
            yield f"attention short backward {dim} {length} bf16", kernel, "bf16", constants
    shared = {"H": 12, "D": 64, "BLOCK_D": 64, "PRECISION": "ieee", "wide_dq_ptr": None}
    launch = attention.config("backward_kv", 64, "half", False)
    kernel = attention._attention_bwd_kv_kernel
    yield "attention backward_kv 64 bf16 alone", kernel, "bf16", {**shared, **plain, **launch}


def cases() -> Iterator[tuple[str, object, str, dict]]:
    """(name, kernel, element type, constants and launch parameters); see the shipped tables in the kernels."""
    yield from attention_cases()
    flags = {"HAS_WEIGHT": True, "HAS_DROPOUT": True, "RMS": False}
    for width in (128, 384, 768, 1024, 4096, 8192):
        forward = {"HAS_RESIDUAL": True, "HAS_X_BIAS": True, "HAS_BIAS": True, "SAVE_H": True}
        constants = {**flags, **forward, "SAVE_STATISTICS": True, "WIDTH": width}
        launch = layer_norm.config(width, False)
        name = f"layer norm forward {width} bf16"
        yield name, layer_norm._layer_norm_fwd_kernel, "bf16", {**constants, **launch}
        constants = {**flags, "WANTS_AFFINE": True, "WANTS_X_BIAS": True, "WIDTH": width}
        launch = layer_norm.config(width, True)
        name = f"layer norm backward {width} bf16"
        yield name, layer_norm._layer_norm_bwd_kernel, "bf16", {**constants, **launch}
    activations = {"erf": 0, "tanh": 1, "silu": 2}
    for width in (1536, 3072):
        for kind, number in activations.items():
            for element in ("bf16", "fp32") if kind == "erf" else ("bf16",):
                flags = {"HAS_BIAS": True, "ACTIVATION": number, "NARROW": element == "bf16"}
                constants = {**flags, **bias_gelu.config(width)}
                pairs = [("gelu", bias_gelu, constants)] if kind != "silu" else []
                pairs.append(("glu", bias_glu, {**flags, **bias_glu.config(width)}))
                for op, module, constants in pairs:
                    for direction in ("fwd", "bwd"):
                        kernel = getattr(module, f"_bias_{op}_{direction}_kernel")
                        yield (
                            f"{op} {direction} {kind} {width} {element}",
                            kernel,
                            element,
                            constants,
                        )
    for element in ("bf16", "fp32"):
        launch = segment_pool.config(768)
        for mode in ("cls", "mean", "max"):
            constants = {"MODE": getattr(segment_pool, mode.upper()).value, **launch}
            name = f"segment pool forward {mode} {element}"
            yield name, segment_pool._segment_pool_fwd_kernel, element, constants
            name = f"segment pool backward {mode} {element}"
            yield name, segment_pool._segment_pool_bwd_kernel, element, constants
        yield f"unpack {element}", packing._unpack_kernel, element, packing.config(768)
    launch = mlm_corruption.config()
    yield "mlm corruption", mlm_corruption._mlm_corruption_kernel, "i64", launch

    flags = dict.fromkeys(("POSITION", "TYPE", "TYPE_IDS", "WEIGHT", "DROPOUT"), True)
    flags = {f"HAS_{name}": value for name, value in flags.items()}
    for width in (128, 768, 1024, 4096):
        module, name = embedding_layer_norm, f"embedding layer norm {width} bf16"
        constants = {**flags, "WIDTH": width, **module.config(width, False)}
        forward = {**constants, "HAS_BIAS": True, "SAVE_STATISTICS": True}
        yield f"{name} forward", module._embedding_layer_norm_fwd_kernel, "bf16", forward
        backward = {**flags, "WIDTH": width, "WANTS_AFFINE": True, **module.config(width, True)}
        yield f"{name} backward", module._embedding_layer_norm_bwd_kernel, "bf16", backward
        constants = {"WIDTH": width, "WINDOW": module.WINDOW, **module.config_add(width)}
        for kernel in (module._add_chunks_kernel, module._add_long_kernel):
            yield f"{name} {kernel.__name__}", kernel, "bf16", constants


def compile_case(kernel, element: str, constants: dict, capability: int) -> dict:
    """Registers, stack bytes, local loads and stores (spills), shared memory and matrix instructions."""
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    values = {name: value for name, value in constants.items() if name not in options}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in values else type_of(name, element) for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if (name.endswith("_ptr") or name.startswith("stride_") or name == "width")
        and name not in values
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs=aligned,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = lambda flag: (
            subprocess.run(
                [TOOLS / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True
            ).stdout
        )
        usage, code = dump("--dump-resource-usage"), dump("--dump-sass")
    number = lambda key: int(re.search(rf"{key}:(\d+)", usage)[1])
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)", code, re.M)
    count = lambda *wanted: sum(instruction in wanted for instruction in instructions)
    return {
        "registers": number("REG"),
        "stack": number("STACK"),
        "spills": count("LDL", "STL"),
        "shared": compiled.metadata.shared,
        "matrix": count("HMMA", "HGMMA", "UTCHMMA"),
        "warps": compiled.metadata.num_warps,
    }


def main() -> None:
    capability = int(sys.argv[1])
    print(json.dumps({name: compile_case(*case, capability) for name, *case in cases()}, indent=1))


if __name__ == "__main__":
    main()
