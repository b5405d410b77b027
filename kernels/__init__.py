"""Triton kernels, imported as ``fastenc.kernels``.

An op is one file, forward and backward together. That of a long op has what the op calls. Its kernels are in files
beside it (``<op>_forward.py``, ``<op>_backward.py``), their launch parameters in ``<op>_config.py``.
"""

if __name__ != "fastenc.kernels":
    # In a Python that runs in the repository's root, `import kernels` finds this folder. Transformers probes for a
    # package of that name. An exception here would end the import of Transformers. A version older than any that
    # Transformers accepts tells it that its package is not installed.
    __version__ = "0"
