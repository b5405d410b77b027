"""Python in a process of its own, with the libraries that take seconds to import already there.

A server imports them once and forks for each process. It imports neither fastenc nor triton, which read the environment
and what is installed. A test of imports takes ``subprocess`` instead.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.helpers import ROOT

# The last two are most of torch._dynamo, which every optimiser imports, and which itself imports triton.
_PRELOADED = (
    "transformers.models.auto",
    "accelerate",
    "sklearn.metrics",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
)
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([*_PRELOADED, __name__])


def python(
    *arguments: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess:
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)``.

    Args:
        arguments: -c CODE, -m MODULE or a script's path, and what its ``sys.argv`` has; -W ignore may come first.
        env: the whole environment; that of this process by default. Torch has read its own variables already.
    """
    words = [str(argument) for argument in arguments]
    environment = dict(os.environ if env is None else env)
    return fork(_run, (words, environment), cwd, timeout, words)


def compiling(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """:func:`python` without Triton's interpreter, which the present process has chosen; it has to succeed."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = python(*arguments, env=kept | environment, timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def fork(
    target: Callable, arguments: tuple, cwd: Path, timeout: float, name: object
) -> subprocess.CompletedProcess:
    """Call ``target(*arguments)`` in a process, in the folder ``cwd``; what it prints is caught.

    Raises: subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, stream) for stream in ("stdout", "stderr")]
        process = _SERVER.Process(target=_redirected, args=(target, arguments, cwd, streams))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(str(name), timeout)
        written = [stream.read_text() if stream.exists() else "" for stream in streams]
        return subprocess.CompletedProcess(name, process.exitcode, *written)


def _redirected(target: Callable, arguments: tuple, cwd: Path, streams: list[Path]) -> None:
    gc.freeze()  # what was imported stays: no collection of garbage needs to look at it
    os.chdir(cwd)
    for number, stream in enumerate(streams, start=1):
        file = os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    try:
        target(*arguments)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def _run(words: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        words = words[2:]
    first, *rest = words
    sys.path.insert(0, os.getcwd())
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")
