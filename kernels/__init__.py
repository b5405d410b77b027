"""Triton kernels, imported as ``fastenc.kernels``; one algorithm a file, forward and backward together."""

if __name__ != "fastenc.kernels":
    # Transformers probes for a top-level package called "kernels"; this folder must never be it.
    raise ImportError(
        f"this folder is fastenc.kernels and cannot be imported as {__name__!r}: "
        "take the repository root off sys.path or install the package"
    )
