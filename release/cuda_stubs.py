"""Empty libraries in the place of CUDA's, so that torch's AArch64 wheel, which is built for CUDA, loads without them.

python cuda_stubs.py TORCH_LIB SYSTEM_LIB... FOLDER    (Debian's binutils and gcc for aarch64-linux-gnu)

FOLDER gets a library of each missing name, and libstub.so, to be preloaded: it has each missing function, which returns
an error code. torch calls some of them to count the GPUs.
"""

import re
import subprocess
import sys
from pathlib import Path

TOOL = "aarch64-linux-gnu-"


def lines(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def symbols(library: Path, which: str) -> list[list[str]]:
    return [line.split() for line in lines(f"{TOOL}nm", "-D", which, str(library))]


def main() -> None:
    *sources, target = map(Path, sys.argv[1:])
    torch, *system = ([*folder.glob("*.so*")] for folder in sources)
    present = [*torch, *(path for paths in system for path in paths)]
    defined = {
        parts[-1].split("@")[0] for path in present for parts in symbols(path, "--defined-only")
    }
    needed, undefined = set(), set()
    for path in torch:
        dynamic = "\n".join(lines(f"{TOOL}readelf", "-d", str(path)))
        needed |= {*re.findall(r"NEEDED.*\[(.*)\]", dynamic)}
        undefined |= {
            parts[1].split("@")[0]
            for parts in symbols(path, "--undefined-only")
            if parts[0] == "U"
        }
    missing = {name for name in undefined - defined if not name.startswith(("Py", "_Py"))}
    target.mkdir(parents=True, exist_ok=True)
    source = target / "stub.s"
    labels = (f".globl {name}\n.type {name},%function\n{name}:\n" for name in sorted(missing))
    source.write_text(".text\n" + "".join(labels) + " mov x0,#999\n ret\n")  # CUDA's unknown error
    for name in (*(needed - {path.name for path in present}), "libstub.so"):
        code = [str(source)] if name == "libstub.so" else ["-xc", "/dev/null"]
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(target / name)]
        lines(f"{TOOL}gcc", *options, *code)


if __name__ == "__main__":
    main()
