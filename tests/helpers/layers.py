"""Layers of every variant, and the same layers from torch's own functions, one sequence at a time."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastenc.nn.layer import run_single_ops, start
from fastenc.nn.layer_call import LayerCall
from fastenc.nn.layer_dropout import NO_DROPOUT, LayerDropout
from fastenc.nn.layer_inputs import AttentionInputs, LayerState, RelativePositions
from fastenc.nn.layer_spec import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from fastenc.nn.layer_weights import LayerVectorWeights, LayerWeights
from fastenc.nn.relative_positions import RelativePositionSpec, distance_slots
from fastenc.nn.rotary import RotarySpec, rotary_table
from tests.helpers.attention_cases import EDGE_LENGTHS, offsets_of

WIDTH, INNER, HEADS, HEAD_DIM = 64, 96, 2, 32
EPS = 1e-6
REACH = 20  # of relative positions
ATTENTION = AttentionSpec(HEADS, HEAD_DIM, HEAD_DIM**-0.5)


@dataclass(frozen=True)
class LayerVariant:
    """The description of a layer, and the options that the description does not hold.

    own_projections: whether relative positions have weights of their own.
    """

    spec: LayerSpec
    biases: bool = True
    norm_biases: bool = True
    rotary: bool = False
    relative_bias: bool = False
    own_projections: bool = False


def layer_variant(
    activation="gelu",
    *,
    gated=False,
    pre_norm=False,
    norm="layer",
    window=(-1, -1),
    scale=None,
    inner=INNER,
    terms=(),
    key_heads=0,
    head_norm_eps=None,
    own_norms=False,
    normalises_values=False,
    vector_size=0,
    **rest,
):
    scale = ATTENTION.scale if scale is None else scale
    attention = AttentionSpec(
        HEADS,
        HEAD_DIM,
        scale,
        window,
        terms,
        key_heads=key_heads,
        head_norm_eps=head_norm_eps,
        normalises_values=normalises_values,
    )
    spec = LayerSpec(
        attention,
        FeedForwardSpec(inner, activation, gated),
        NormSpec(norm, EPS),
        NormSpec(norm, EPS),
        pre_norm,
        own_norms=own_norms,
        layer_vector_size=vector_size,
    )
    return LayerVariant(spec, **rest)


KINDS = {
    "bert": layer_variant(),
    "tanh": layer_variant("gelu_tanh"),
    "relu": layer_variant("relu"),
    "mpnet": layer_variant(relative_bias=True),
    "deberta": layer_variant(terms=("c2p", "p2c")),
    "deberta v2": layer_variant(terms=("c2p",), own_projections=True),
    "mbart": layer_variant(pre_norm=True),
    "modernbert": layer_variant(
        gated=True, pre_norm=True, window=(3, 3), biases=False, norm_biases=False, rotary=True
    ),
    "nomic": layer_variant("silu", gated=True, biases=False, rotary=True),
    "t5": layer_variant(
        "relu", pre_norm=True, norm="rms", scale=1.0, biases=False, norm_biases=False,
        relative_bias=True,
    ),
    "t5 v1.1": layer_variant(
        "gelu_tanh", gated=True, pre_norm=True, norm="rms", scale=1.0, biases=False,
        norm_biases=False, relative_bias=True,
    ),
    "qwen3": layer_variant(
        "silu", gated=True, pre_norm=True, norm="rms", biases=False, norm_biases=False, rotary=True,
        key_heads=1, head_norm_eps=1e-3,
    ),
    "gemma3": layer_variant(
        "gelu_tanh", gated=True, pre_norm=True, norm="rms", window=(3, 3), biases=False,
        norm_biases=False, rotary=True, key_heads=1, head_norm_eps=1e-3, own_norms=True,
    ),
    "embedding gemma2": layer_variant(
        "gelu_tanh", gated=True, pre_norm=True, norm="rms", window=(3, 3), biases=False, scale=0.5,
        norm_biases=False, rotary=True, key_heads=1, head_norm_eps=1e-3, own_norms=True,
        normalises_values=True, vector_size=16,
    ),
}  # fmt: skip


class Layer:
    """A layer of one variant: random weights, sequences of these lengths. ``values``: {name: tensor}, x first."""

    def __init__(self, what: LayerVariant, lengths=EDGE_LENGTHS, dtype=torch.float32, grad=True):
        torch.manual_seed(3)
        self.variant, self.spec, self.lengths = what, what.spec, tuple(lengths)
        inner = self.spec.feed_forward.intermediate_size
        values = {"x": torch.randn(sum(lengths), WIDTH)}
        for name, (rows, columns, biased) in self.shapes(inner).items():
            values[name] = torch.randn(rows, columns) * columns**-0.5
            if biased:
                values[f"{name}_bias"] = 0.3 * torch.randn(rows)
        for name in ("attention_norm", "out_norm"):
            values[name] = 1 + 0.3 * torch.randn(WIDTH)
            if what.norm_biases:
                values[f"{name}_bias"] = 0.3 * torch.randn(WIDTH)
        attention = self.spec.attention
        of_heads = ("query_norm", "key_norm") if attention.head_norm_eps is not None else ()
        own = ("attention_own_norm", "down_own_norm") if self.spec.own_norms else ()
        for name in (*of_heads, *own):
            values[name] = 1 + 0.3 * torch.randn(HEAD_DIM if name in of_heads else WIDTH)
        if what.relative_bias:
            values["relative_bias"] = 0.3 * torch.randn(HEADS, 9)
        if attention.position_terms:
            values["positions"] = torch.randn(2 * REACH, WIDTH)
        if size := self.spec.layer_vector_size:
            values["vectors"] = torch.randn(sum(lengths), size)
            values["vector_gate"] = torch.randn(size, WIDTH) * WIDTH**-0.5
            values["vector_out"] = torch.randn(WIDTH, size) * size**-0.5
            values["vector_norm"] = 1 + 0.3 * torch.randn(WIDTH)
            values["vector_scale"] = torch.tensor([0.7])
        self.values = {name: v.to(dtype).requires_grad_(grad) for name, v in values.items()}
        self.offsets, self.longest = offsets_of(lengths), max(lengths, default=0)

    def shapes(self, inner):
        biased, width = self.variant.biases, HEADS * HEAD_DIM
        halves = ("gate", "up") if self.spec.feed_forward.gated else ("up",)
        rows = zip(("query", "key", "value"), self.spec.attention.heads, strict=True)
        return {
            **{name: (heads * HEAD_DIM, WIDTH, biased) for name, heads in rows},
            **({"position_key": (width, WIDTH, biased)} if self.variant.own_projections else {}),
            "attention_out": (WIDTH, width, biased),
            **{name: (inner, WIDTH, biased) for name in halves},
            "down": (WIDTH, inner, biased),
        }

    def weights(self, values=None) -> LayerWeights:
        v = values or self.values
        halves = ("gate", "up") if "gate" in v else ("up",)
        several = lambda names: tuple(v[name] for name in names)
        biases = lambda names: tuple(v.get(f"{name}_bias") for name in names)
        qkv = ("query", "key", "value")
        return LayerWeights(
            several(qkv),
            biases(qkv),
            v["attention_out"],
            v.get("attention_out_bias"),
            v["attention_norm"],
            v.get("attention_norm_bias"),
            several(halves),
            biases(halves),
            v["down"],
            v.get("down_bias"),
            v["out_norm"],
            v.get("out_norm_bias"),
            v.get("position_key"),
            v.get("position_key_bias"),
            query_norm_weight=v.get("query_norm"),
            key_norm_weight=v.get("key_norm"),
            attention_own_norm_weight=v.get("attention_own_norm"),
            down_own_norm_weight=v.get("down_own_norm"),
            layer_vectors=LayerVectorWeights(
                *(v[f"vector_{name}"] for name in LayerVectorWeights._fields)
            )
            if "vectors" in v
            else None,
        )

    def inputs(self, values=None) -> AttentionInputs:
        table = None
        if self.variant.rotary:
            table = rotary_table(RotarySpec(HEAD_DIM, 100.0), max(self.longest, 1), "cpu")
        bias = (values or self.values).get("relative_bias")
        positions = None
        if self.spec.attention.position_terms:
            slots = distance_slots(RelativePositionSpec(0, REACH), REACH)
            positions = RelativePositions((values or self.values)["positions"], slots)
        vectors = (values or self.values).get("vectors")
        return AttentionInputs(
            self.offsets, self.longest, table, bias, positions, layer_vectors=vectors
        )

    def layer_call(self, dropout: LayerDropout = NO_DROPOUT, values=None, **rest) -> LayerCall:
        """The LayerCall of this layer."""
        v = values or self.values
        state = start(v["x"], None, self.spec.out_norm)
        return LayerCall(state, self.inputs(v), self.weights(v), self.spec, dropout, **rest)

    def run(self, run_layer=run_single_ops, dropout: LayerDropout = NO_DROPOUT, **rest):
        torch.manual_seed(7)
        return self.results(run_layer(self.layer_call(dropout, **rest)))

    def results(self, state: LayerState) -> tuple[Tensor, ...]:
        """The tensors that the next layer reads, each once."""
        return tuple(state) if self.spec.pre_norm else (state.x,)

    def plain(self, values=None) -> tuple[Tensor, ...]:
        """The same results from torch's own functions."""
        v = values or self.values
        spec = self.spec
        linear = lambda x, name: F.linear(x, v[name], v.get(f"{name}_bias"))
        attended = torch.cat([self._attend(x, v, linear) for x in v["x"].split(list(self.lengths))])
        own = lambda x, name: self._norm(x, v, name) if name in v else x
        s = v["x"] + own(linear(attended, "attention_out"), "attention_own_norm")
        h = self._norm(s, v, "attention_norm")
        act = {
            "gelu": F.gelu,
            "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
            "relu": F.relu,
            "silu": F.silu,
        }[spec.feed_forward.activation]
        inner = act(linear(h, "gate")) * linear(h, "up") if "gate" in v else act(linear(h, "up"))
        total = (s if spec.pre_norm else h) + own(linear(inner, "down"), "down_own_norm")
        if "vectors" in v:
            gated = act(linear(total, "vector_gate")) * v["vectors"]
            added = self._norm(linear(gated, "vector_out"), v, "vector_norm")
            total = (total + added) * v["vector_scale"]
        y = self._norm(total, v, "out_norm")
        return (y, total) if spec.pre_norm else (y,)

    def _norm(self, x, v, name):
        if self.spec.out_norm.norm_type == "rms":
            return F.rms_norm(x, (WIDTH,), v[name], EPS)
        return F.layer_norm(x, (WIDTH,), v[name], v.get(f"{name}_bias"), EPS)

    def _attend(self, x, v, linear):
        length = len(x)
        counts = zip(("query", "key", "value"), self.spec.attention.heads, strict=True)
        q, k, u = (
            linear(x, name).view(length, heads, HEAD_DIM).transpose(0, 1) for name, heads in counts
        )
        eps = self.spec.attention.head_norm_eps
        if eps is not None:
            q = F.rms_norm(q, (HEAD_DIM,), v["query_norm"], eps)
            k = F.rms_norm(k, (HEAD_DIM,), v["key_norm"], eps)
        if self.spec.attention.normalises_values:
            u = F.rms_norm(u, (HEAD_DIM,), None, eps)
        k, u = (each.repeat_interleave(HEADS // len(each), 0) for each in (k, u))
        if self.variant.rotary:
            table = self.inputs(v).rotary[:length].to(x.dtype)
            cos, sin = (half.repeat(1, 2) for half in table.chunk(2, 1))
            turn = lambda t: torch.cat([-t[..., HEAD_DIM // 2 :], t[..., : HEAD_DIM // 2]], -1)
            q, k = (t * cos + turn(t) * sin for t in (q, k))
        distance = torch.arange(length) - torch.arange(length)[:, None]
        scores = q @ k.transpose(1, 2) * self.spec.attention.scale
        if self.variant.relative_bias:
            scores = scores + v["relative_bias"][:, distance.clamp(-4, 4) + 4]
        terms, own = self.spec.attention.position_terms, self.variant.own_projections
        rows = (REACH - distance).clamp(0, 2 * REACH - 1)
        project = lambda name: linear(v["positions"], name).view(-1, HEADS, HEAD_DIM)[rows]
        if "c2p" in terms:
            position_keys = project("position_key" if own else "key")
            added = torch.einsum("hid,ijhd->hij", q, position_keys)
            scores = scores + added * self.spec.attention.scale
        if "p2c" in terms:
            added = torch.einsum("hjd,ijhd->hij", k, project("query"))
            scores = scores + added * self.spec.attention.scale
        left, right = self.spec.attention.window
        if left >= 0:
            outside = (distance < -left) | (distance > right)
            scores = scores.masked_fill(outside, -torch.inf)
        return (scores.softmax(-1) @ u).transpose(0, 1).flatten(1)


def widened(values):
    return {name: v.detach().double().requires_grad_() for name, v in values.items()}


def gradients(results, values):
    """Gradients of a weighted sum of the results, for every value that requires one."""
    torch.manual_seed(8)
    wanted = {name: v for name, v in values.items() if v.requires_grad}
    dys = [torch.randn(y.shape).to(y.dtype) for y in results]
    grads = torch.autograd.grad(results, tuple(wanted.values()), dys)
    return dict(zip(wanted, grads, strict=True))


def exact_gradients(results, values, dtype):
    """:func:`gradients` with the same weights of the sum as results of another dtype get."""
    torch.manual_seed(8)
    dys = [torch.randn(y.shape).to(dtype).double() for y in results]
    grads = torch.autograd.grad(results, tuple(values.values()), dys)
    return dict(zip(values, grads, strict=True))
