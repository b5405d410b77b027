"""Triton kernels, imported as ``fastenc.kernels``; one algorithm a file, forward and backward together."""

if __name__ != "fastenc.kernels":
    # Run from the repository's root, Python finds this folder under the name of the package "kernels" that
    # Transformers probes for. Refusing would end Transformers' own import; a version older than any it accepts
    # tells it that its package is not here.
    __version__ = "0"
