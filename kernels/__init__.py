"""Triton kernels, imported as ``fastenc.kernels``. Each file has one algorithm, forward and backward together."""

if __name__ != "fastenc.kernels":
    # In a Python that runs in the repository's root, `import kernels` finds this folder. Transformers probes for a
    # package of that name. An exception here would end the import of Transformers. A version older than any that
    # Transformers accepts tells it that its package is not installed.
    __version__ = "0"
