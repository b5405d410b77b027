"""Compiles the Triton kernels ahead of time, without a GPU, and reads which resources the machine code uses.

    python -m tests.helpers.triton_binaries 90 [--processes N] [NAME ...]

Compiles the named binaries for sm_90, or all: those of each kernel's own rule, and those of the architecture's tuned
table. Prints {name: usage} as JSON. Triton's cache holds what has not changed.

It runs in a process of its own, because the tests' process has chosen Triton's interpreter.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import Pool
from pathlib import Path

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import triton
import triton.language as tl
from fastenc.kernels import (
    adamw,
    add_rows,
    attention_blocks,
    attention_delta,
    attention_relative,
    attention_short_record,
    column_sum,
    crf,
    head_statistics,
    index_sum,
    launch,
    linear,
    linear_segment_max,
    matrix_product,
    mlm_corruption,
    packing,
    segment_pool,
    sequence_bounds,
)
from fastenc.kernels.attention_tile import shape_constants
from fastenc.kernels.run import OPTIONS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FLOAT32_POINTERS = {"lse", "delta", "dlse", "log_sum", "wide_dq", "mean", "rstd", "partial", "sums"}
FLOAT32_POINTERS |= {"window_lse", "others_lse", "dwindow_lse", "dothers_lse"}
FLOAT32_POINTERS |= {"alibi", "relative", "key_bias", "table", "found_inf"}
INTEGER_POINTERS = {
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "bounds", "blocks"), "*i32"),
    **dict.fromkeys(("all_blocks", "long_blocks", "starts", "counts", "slots"), "*i32"),
    **dict.fromkeys(("argmax", "seqused", "last", "finished", "record"), "*i32"),
    **dict.fromkeys(("rng", "keys", "seed", "ids", "indices"), "*i64"),
    **dict.fromkeys(("positions", "types", "order"), "*i64"),
    **dict.fromkeys(("choices", "corrupted", "cutoffs", "labels", "tags", "path"), "*i64"),
    **dict.fromkeys(("tensors", "gradients"), "*i64"),
    "pointers": "*u8",
    "special": "*i1",
}
FLOATS = {"scale", "eps", "drop_scale", "padding_value"}
FLOATS |= {"lr", "decay", "rate1", "rate2", "log_beta1", "log_beta2"}


def type_of(argument: str, element: str) -> str:
    """The type that a kernel's argument has in use, told from its name."""
    if argument.endswith("_ptr"):
        name = argument.removesuffix("_ptr")
        return INTEGER_POINTERS.get(name) or (
            "*fp32" if name in FLOAT32_POINTERS else f"*{element}"
        )
    return "fp32" if argument in FLOATS else "i32"


ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Every kernel's module. Importing them puts the tunable launches into launch.registry.
MODULES = [
    import_module(f"fastenc.kernels.{path.stem}")
    for path in sorted(Path(launch.__file__).parent.glob("[!_]*.py"))
]


def module_of(tunable: launch.Tunable):
    return sys.modules[tunable.rule.__module__]


def cases(table: Path, capability: int = 90) -> Iterator[tuple[str, object, str, dict]]:
    """(name, kernel, element type, constants and launch parameters) of every rule and of the table's entries."""
    yield from untuned_cases()
    for op, tunable in launch.registry.items():
        for key in module_of(tunable).compiled_keys():
            if "warp_groups" in tunable.names:
                key = {**key, "warp_groups": capability == 90}
            parameters = tunable.rule(*(key[name] for name in tunable.names))
            yield from variants(op, key, parameters, "")
    if table.is_file():
        for entry in json.loads(table.read_text())["entries"]:
            yield from variants(entry["op"], entry["key"], entry["launch"], " tuned")


def variants(op: str, key: dict, parameters: dict, origin: str):
    values = " ".join(f"{name}={value}" for name, value in key.items())
    for variant, kernel, constants in module_of(launch.registry[op]).launched(key):
        name = f"{op}{origin} {values}{variant}"
        yield name, kernel, ELEMENTS[key["dtype"]], {**parameters, **constants}


def untuned_cases() -> Iterator[tuple[str, object, str, dict]]:
    """Kernels that take a small part of a step; the tuned table has no entries for them."""
    unbiased = {**dict.fromkeys(("alibi_ptr", "relative_ptr", "key_bias_ptr")), "WINDOW": False}
    for dim in (32, 64, 96, 128, 256):
        for precision in ("half", "tf32", "ieee") if dim <= 128 else ("half",):
            dtype = "bfloat16" if precision == "half" else "float32"
            key = {"head_dim": dim, "precision": precision, "dtype": dtype, "dropout": True}
            kernel = attention_delta._attention_delta_kernel
            name = f"attention delta {dim} precision={precision}"
            constants = shape_constants(key) | attention_delta.config(dim, precision, True)
            yield f"{name} biased", kernel, ELEMENTS[dtype], {**constants, "WINDOW": True}
            constants |= attention_delta.config(dim, precision, False)
            yield name, kernel, ELEMENTS[dtype], {**constants, **unbiased}
            constants = shape_constants(key) | {"WINDOW": True}
            constants |= attention_relative.config(dim, precision)
            name = f"attention backward_relative {dim} precision={precision}"
            kernel = attention_relative._attention_bwd_relative_kernel
            yield name, kernel, ELEMENTS[dtype], constants
    constants = {"BLOCK": 256, "num_warps": 4}
    kernel = attention_short_record._attention_short_record_kernel
    for dim in (32, 64):
        shape = {"GROUP": 1, "D": dim, "BLOCK_D": dim, "PRECISION": "ieee"}
        parameters = {**shape, **attention_short_record.LAUNCH}
        yield f"attention records of short sequences {dim}", kernel, "bf16", parameters
    yield "sequence bounds", sequence_bounds._sequence_bounds_kernel, "bf16", constants
    kernel = attention_blocks._attention_blocks_kernel
    yield "sequence blocks", kernel, "bf16", attention_blocks.config()
    for element in ELEMENTS.values():
        parameters = segment_pool.config(768)
        for mode in ("cls", "mean", "max"):
            constants = {"MODE": getattr(segment_pool, mode.upper()).value, **parameters}
            name = f"segment pool forward {mode} {element}"
            yield name, segment_pool._segment_pool_fwd_kernel, element, constants
            name = f"segment pool backward {mode} {element}"
            yield name, segment_pool._segment_pool_bwd_kernel, element, constants
        for dim, more in product((32, 64, 128), (True, False)):
            constants = {"D": dim, "BLOCK_D": dim, "TARGETS": more, "SKIP_ENDS": more}
            constants |= {"WINDOW": more} | ({} if more else {"relative_ptr": None})
            constants |= head_statistics.config(dim, 4 if element == "fp32" else 2, more)
            name = f"head statistics {dim} {element} targets, window, bias={more}"
            yield name, head_statistics._head_statistics_kernel, element, constants
        yield f"unpack {element}", packing._unpack_kernel, element, packing.config(768)
        yield f"column sum {element}", column_sum._column_sum_kernel, element, column_sum.config()
        itemsize = 4 if element == "fp32" else 2
        constants = {"HAS_BIAS": True, "EVEN": True, **linear_segment_max.config(itemsize)}
        constants["PRECISION"] = matrix_product.precision(itemsize)
        kernel = linear_segment_max._linear_segment_max_kernel
        yield f"linear segment max {element}", kernel, element, constants
        for precision in ("tf32x3", "tf32") if itemsize == 4 else ("ieee",):
            constants = {"EVEN": True, "PRECISION": precision, **linear.config(itemsize)}
            yield f"linear {element} {precision}", linear._linear_kernel, element, constants
        for size in (2, 512):
            constants = index_sum.config(size, 4 if element == "fp32" else 2)
            constants["PRECISION"] = "tf32x3" if element == "fp32" else "ieee"
            name = f"index sum {size} {element}"
            yield name, index_sum._index_sum_kernel, element, constants
    constants = {"COPIES": tl.bfloat16, "ALIGNED": True, **adamw.config()}
    yield "adamw", adamw._adamw_kernel, "fp32", constants
    yield "adamw count", adamw._adamw_count_kernel, "fp32", {"BLOCK": adamw.COUNTED}
    for module in MODULES:
        for (name, kernel, constants), element in product(
            getattr(module, "binaries", tuple)(), ELEMENTS.values()
        ):
            yield f"{name} {element}", kernel, element, constants
    for tags in (9, 25, 64):
        for kernel in (crf._crf_fwd_kernel, crf._crf_bwd_kernel, crf._crf_best_kernel):
            parameters = crf.config(tags, backward=kernel is crf._crf_bwd_kernel)
            yield f"crf {tags} tags {kernel.__name__}", kernel, "fp32", parameters
    constants = {"SEQUENCES": crf.SEQUENCES, "num_warps": 1}
    yield "crf _crf_back_kernel", crf._crf_back_kernel, "fp32", constants
    kernel = mlm_corruption._mlm_corruption_kernel
    yield "mlm corruption", kernel, "i64", mlm_corruption.config()
    for width, element in product((128, 768, 1024, 4096), ("bf16", "fp32")):
        for kernel, parameters in (
            (add_rows._add_chunks_kernel, add_rows.config(width)),
            (add_rows._add_long_kernel, add_rows.config_long()),
        ):
            constants = {"WIDTH": width, "WINDOW": add_rows.WINDOW, **parameters}
            yield f"add rows {width} {element} {kernel.__name__}", kernel, element, constants


MATRIX = {"HMMA", "HGMMA", "UTCHMMA"}
# Address, name and, for a branch, its target.
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)(?:[^;]*?`?\(?(0x[0-9a-f]+)\)?)?[^;]*;",
    re.M,
)


def inner_loops(places, targets, instructions) -> list[range]:
    """The loops that hold no other, as indices of their instructions."""
    order = {int(place, 16): number for number, place in enumerate(places)}
    loops = []
    for number, (name, target) in enumerate(zip(instructions, targets, strict=True)):
        begin = order.get(int(target, 16)) if name == "BRA" and target else None
        if begin is not None and begin < number:
            loops.append(range(begin, number + 1))
    holds = lambda loop, other: loop[0] <= other[0] and other[-1] <= loop[-1]
    return [
        loop for loop in loops if not any(other != loop and holds(loop, other) for other in loops)
    ]


def main_loop(loops, instructions) -> list[str]:
    """The instructions of the loop that takes the time: the shortest with matrix instructions (a masked tail is
    longer), else the longest."""
    inner = [[instructions[number] for number in loop] for loop in loops]
    multiplying = [loop for loop in inner if MATRIX & set(loop)]
    return min(multiplying, key=len) if multiplying else max(inner, key=len, default=[])


def source_of(
    kernel, element: str, constants: dict, source_class: type[ASTSource] = ASTSource
) -> tuple[ASTSource, dict]:
    """The source for Triton's compiler, and its options."""
    options = {"enable_fp_fusion": True}
    options |= {name: constants[name] for name in OPTIONS if name in constants}
    names = kernel.arg_names
    values = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in values else type_of(name, element) for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if (name.endswith("_ptr") or name.startswith("stride_") or name in ("width", "inner"))
        and name not in values
    }
    source = source_class(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs=aligned,
    )
    return source, options


class Accepted(Exception):
    """Triton's front end accepts a kernel."""


class FrontEnd(ASTSource):
    """A source whose compilation ends after Triton's front end."""

    def make_ir(self, *arguments):
        super().make_ir(*arguments)
        raise Accepted


def refused_by_front_end(capability: int) -> tuple[set[str], dict[str, str]]:
    """(names of the kernels, {case: error}). One case stands for all of its kernel that take the same branches.

    The interpreter runs code that the front end refuses, such as a variable that changes its type in a loop.
    """
    target, kernels, tried, refused = GPUTarget("cuda", capability, 32), set(), set(), {}
    for name, (kernel, element, constants) in wanted(capability).items():
        branches = {key: str(value) for key, value in constants.items() if not is_number(value)}
        variant = (kernel.__name__, *sorted(branches.items()))
        if variant in tried:
            continue
        tried.add(variant)
        kernels.add(kernel.__name__)
        source, options = source_of(kernel, element, constants, FrontEnd)
        try:
            triton.compile(source, target=target, options=options)
        except Accepted:
            pass
        except Exception as error:
            refused[name] = str(error)
    return kernels, refused


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def compile_case(kernel, element: str, constants: dict, capability: int) -> dict:
    """Registers, stack bytes, local loads and stores (spills), shared memory, matrix instructions and the main loop."""
    source, options = source_of(kernel, element, constants)
    return usage_of(
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    )


def usage_of(compiled) -> dict:
    """What :func:`compile_case` returns, of a kernel that Triton has compiled."""
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
    places, instructions, targets = zip(*INSTRUCTION.findall(code), strict=True)
    count = lambda *wanted: sum(instruction in wanted for instruction in instructions)
    loops = inner_loops(places, targets, instructions)
    loop = main_loop(loops, instructions)
    looped = {number for each in loops for number in each}
    straight = [name for number, name in enumerate(instructions) if number not in looped]
    return {
        "registers": number("REG"),
        "stack": number("STACK"),
        "spills": count("LDL", "STL"),
        "shared": compiled.metadata.shared,
        "matrix": count(*MATRIX),
        "warp group matrix": count("HGMMA"),
        "instructions": len(instructions) - count("NOP"),
        "loop": len(loop),
        "loop barriers": loop.count("BAR"),
        "loop spills": loop.count("LDL") + loop.count("STL"),
        "straight": len(straight) - straight.count("NOP"),
        "special functions": count("MUFU"),
        "loop special functions": loop.count("MUFU"),
        "straight special functions": straight.count("MUFU"),
        "warps": compiled.metadata.num_warps,
    }


def wanted(capability: int) -> dict[str, tuple]:
    """{name: arguments of compile_case before the capability}"""
    # sm_89 differs from sm_80 only in having less shared memory, of which attention alone needs much.
    start = "attention" if capability == 89 else ""
    table = launch.TABLES / f"sm_{capability}.json"
    return {name: case for name, *case in cases(table, capability) if name.startswith(start)}


def compile_named(capability: int, name: str) -> dict:
    return compile_case(*wanted(capability)[name], capability)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    names = options.names or [*wanted(options.capability)]
    with Pool(options.processes) as pool:
        # By name, because kernels cannot be sent to another process.
        usages = pool.map(partial(compile_named, options.capability), names, chunksize=1)
    print(json.dumps(dict(zip(names, usages, strict=True))))


if __name__ == "__main__":
    main()
