"""The activations of feed-forward layers, by name and by number; reference/activation.py has their formulas."""

# Our name of an activation → its number in csrc/activation.h and kernels/activation.py.
NUMBERS: dict[str, int] = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu": 3}
# Those that bias_glu computes in one pass.
GATED = ("gelu", "gelu_tanh", "silu")
# Name of an activation in a configuration → our name.
ACTIVATIONS: dict[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
