import pytest
import torch
import torch.nn.functional as F

from fastenc.ops import embedding_layer_norm, tied_embedding_layer_norm
from tests.helpers.compiled import compiled_once
from tests.helpers.embedding_layer_norm import (
    check_budget,
    check_constant_rows,
    check_tied_budget,
    decoded,
    inputs,
    plain,
)
from tests.helpers.extension import needs_cpp

# 200 tokens with 9 ids and 2 types: the rows of an id cross several of the backward's windows of 64.
SHAPES = [(1, 7, 33), (64, 64, 16), (65, 1, 40), (200, 9, 384), (130, 500, 129)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens,vocabulary,width", SHAPES)
def test_values_and_every_gradient_keep_the_budget(
    instruction_set, tokens, vocabulary, width, dtype
):
    check_budget(dtype, "cpp", tokens, vocabulary, width)


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_constant_rows_give_the_bias(instruction_set, impl):
    check_constant_rows(impl, "cpu")


@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_values_and_gradients_are_those_of_transformers_modules(instruction_set, impl, family):
    """The batch has padding tokens, whose rows get no gradient."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.bert.modeling_bert import BertEmbeddings
    from transformers.models.distilbert.modeling_distilbert import Embeddings
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    sizes = dict(vocab_size=30, hidden_size=24, max_position_embeddings=20, pad_token_id=1)
    theirs = {
        "bert": lambda: BertEmbeddings(transformers.BertConfig(**sizes)),
        "roberta": lambda: RobertaEmbeddings(transformers.RobertaConfig(**sizes)),
        "distilbert": lambda: Embeddings(
            transformers.DistilBertConfig(
                vocab_size=30, dim=24, n_heads=2, max_position_embeddings=20, pad_token_id=1
            )
        ),
    }[family]().eval()
    ids = torch.randint(30, (4, 16))
    ids[:, 11:] = 1
    types = {"token_type_ids": torch.randint(2, ids.shape)} if family == "bert" else {}
    expected = theirs(input_ids=ids, **types)
    norm, tables = theirs.LayerNorm, [theirs.word_embeddings, theirs.position_embeddings]
    if family != "distilbert":
        tables.append(theirs.token_type_embeddings)
    positions = torch.arange(16).expand(4, 16)
    if family == "roberta":
        positions = torch.where(ids == 1, -1, (ids != 1).cumsum(1) - 1)
    y = embedding_layer_norm(
        ids,
        theirs.word_embeddings.weight,
        norm.weight,
        norm.bias,
        position_ids=positions,
        position=theirs.position_embeddings.weight,
        token_type=tables[2].weight if family != "distilbert" else None,
        position_offset=2 if family == "roberta" else 0,
        padding_idx=theirs.word_embeddings.padding_idx,
        position_padding_idx=theirs.position_embeddings.padding_idx,
        eps=norm.eps,
        impl=impl,
        **types,
    )
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    parameters = [table.weight for table in tables] + [norm.weight, norm.bias]
    dy = torch.randn_like(y)
    ours, other = (torch.autograd.grad(out, parameters, dy) for out in (y, expected))
    assert not ours[0][1].any()
    for a, b in zip(ours, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tied_decoder_gets_the_gradient_of_both_uses(instruction_set, dtype):
    check_tied_budget(dtype, "cpp")


def test_either_use_of_a_tied_table_alone_and_gradients_that_accumulate(instruction_set):
    ids, tables = inputs(200, 30, 48, torch.float32)
    word, arguments = tables["word"], {**ids, "position_offset": 3}
    for use in (lambda y, table: y.square().sum(), lambda y, table: table.square().sum()):
        y, table = tied_embedding_layer_norm(**tables, **arguments)
        (alone,) = torch.autograd.grad(use(y, table), word)
        (expected,) = torch.autograd.grad(use(plain(**ids, **tables), word), word)
        torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4)
    for _ in range(2):
        decoded(*tied_embedding_layer_norm(**tables, **arguments)).backward()
    (once,) = torch.autograd.grad(decoded(plain(**ids, **tables), word), word)
    torch.testing.assert_close(word.grad, 2 * once, rtol=1e-4, atol=1e-6)


@needs_cpp
def test_tied_decoders_gradient_becomes_the_tables_without_a_copy():
    indices = []

    class Decoder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, table):
            ctx.save_for_backward(hidden, table)
            return hidden @ table.T

        @staticmethod
        def backward(ctx, dlogits):
            hidden, table = ctx.saved_tensors
            dtable = dlogits.T @ hidden
            indices.append(dtable.data_ptr())
            return dlogits @ table, dtable

    ids, tables = inputs(50, 30, 48, torch.float32)
    hidden, table = tied_embedding_layer_norm(**ids, **tables)
    assert table.data_ptr() == tables["word"].data_ptr()
    Decoder.apply(hidden, table).square().sum().backward()
    assert tables["word"].grad.data_ptr() == indices[0]


def test_frozen_table_stays_without_gradient(instruction_set):
    ids, tables = inputs(50, 30, 48, torch.float32)
    tables["word"].requires_grad_(False)
    hidden, table = tied_embedding_layer_norm(**ids, **tables)
    assert hidden.requires_grad and not table.requires_grad
    decoded(hidden, table).backward()
    assert tables["word"].grad is None and tables["position"].grad.any()


def test_dropout_mask_and_gradients_are_the_references(instruction_set):
    ids, tables = inputs(40, 30, 300, torch.float32)
    dy = torch.randn(40, 300)
    results = []
    for impl in ("cpp", "reference"):
        torch.manual_seed(5)
        y = embedding_layer_norm(**ids, **tables, dropout_p=0.3, impl=impl)
        results.append((y, *torch.autograd.grad(y, list(tables.values()), dy)))
    assert 0.2 < (results[0][0] == 0).float().mean() < 0.4
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@needs_cpp
def test_result_does_not_depend_on_the_number_of_threads():
    ids, tables = inputs(3000, 40, 129, torch.float32)
    dy = torch.randn(3000, 129)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        y = embedding_layer_norm(**ids, **tables, dropout_p=0.1)
        results.append([y, *torch.autograd.grad(y, list(tables.values()), dy)])
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@needs_cpp
def test_registration_passes_opcheck():
    ids, tables = inputs(5, 7, 24, torch.float32)
    every = (*ids.values(), *(table.detach() for table in tables.values()))
    rng_state = torch.tensor([3, 4])
    forward = torch.ops.fastenc.embedding_layer_norm_fwd.default
    torch.library.opcheck(forward, (*every, rng_state, 3, 0.1, 1e-12, True))
    only_word = (every[0], None, None, every[3], *(None,) * 5)
    torch.library.opcheck(forward, (*only_word, 0, 0.0, 1e-12, False))
    dy, statistics = torch.randn(5, 24), torch.randn(5)
    backward = torch.ops.fastenc.embedding_layer_norm_bwd.default
    tail = (rng_state, statistics, statistics, 3, 0.1, True)
    torch.library.opcheck(backward, (dy, *every[:7], *tail))
    sorted_ids, order = every[0].sort(stable=True)
    add = torch.ops.fastenc.add_rows_.default
    torch.library.opcheck(add, (torch.zeros(7, 24), dy, sorted_ids, order, 0, 2))


@needs_cpp
def test_torch_compile_full_graph_and_dynamic_shapes():
    def loss(tables, ids):
        return decoded(*tied_embedding_layer_norm(**ids, **tables))

    compiled = compiled_once(loss)
    for tokens in (20, 31):
        ids, tables = inputs(tokens, 30, 40, torch.float32)
        ours = torch.autograd.grad(compiled(tables, ids), list(tables.values()))
        theirs = torch.autograd.grad(loss(tables, ids), list(tables.values()))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_no_tokens_other_shapes_and_inputs_left_alone(instruction_set):
    ids, tables = inputs(24, 30, 40, torch.float32)
    before = {name: table.detach().clone() for name, table in tables.items()}
    expected = embedding_layer_norm(**ids, **tables)
    shaped = {name: value.view(4, 6).t().contiguous().t().int() for name, value in ids.items()}
    y = embedding_layer_norm(**shaped, **tables)
    assert torch.equal(y, expected.view(4, 6, 40))
    y.sum().backward()
    assert all(torch.equal(tables[name], before[name]) for name in tables)
    strided = {
        name: value.detach().repeat_interleave(2, -1)[..., ::2] for name, value in tables.items()
    }
    assert torch.equal(embedding_layer_norm(**ids, **strided), expected)
    word = tables["word"].detach().requires_grad_()
    empty = embedding_layer_norm(torch.empty(0, dtype=torch.long), word)
    empty.sum().backward()
    assert empty.shape == (0, 40) and not word.grad.any()
    no_position = embedding_layer_norm(ids["input_ids"], word, token_type=tables["token_type"])
    h = F.embedding(ids["input_ids"], word) + tables["token_type"][0]
    torch.testing.assert_close(no_position, F.layer_norm(h, (40,), eps=1e-12), rtol=1e-5, atol=1e-5)


def test_nan_stays_with_its_tokens(instruction_set):
    ids, tables = inputs(20, 30, 40, torch.float32)
    with torch.no_grad():
        tables["word"][0, 3] = float("nan")
    y = embedding_layer_norm(**ids, **tables)
    special = ids["input_ids"] == 0
    assert y[special].isnan().all() and y[~special].isfinite().all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_ids": torch.tensor([1, 9])}, r"token ids must be in \[0, 5\), got 9: was another"),
        ({"input_ids": torch.tensor([1, -1])}, r"token ids must be in \[0, 5\), got -1"),
        ({"input_ids": torch.ones(2)}, "input_ids must be int64 or int32, got torch.float32"),
        ({"position_ids": torch.tensor([0, 4])}, r"positions must be in \[-2, 4\), got 4: cut"),
        (
            {"position_ids": torch.tensor([[0, 1]])},
            r"position_ids must have the shape of input_ids",
        ),
        ({"position_ids": None}, "go together, got position only: give position_ids too"),
        ({"position": torch.ones(6, 4)}, r"position must have shape \(rows, 8\)"),
        ({"token_type_ids": torch.tensor([0, 1])}, "token_type_ids need the table token_type"),
        (
            {"token_type_ids": torch.tensor([0, 2]), "token_type": torch.ones(2, 8)},
            r"token types must be in \[0, 2\), got 2",
        ),
        ({"word": torch.ones(5, 8).half()}, "position must have .*word's dtype torch.float16"),
        ({"word": torch.ones(5)}, r"word must be floating point of shape \(vocabulary, width\)"),
        ({"weight": torch.ones(4)}, r"weight must have shape \(8,\)"),
        ({"padding_idx": 5}, r"padding_idx must be a row of its table, in \[0, 5\), got 5"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"impl": "fastest"}, "impl must be one of .* got 'fastest'"),
        ({"impl": "triton"}, "impl='triton' cannot take this call"),
    ],
)
def test_bad_input_is_named(arguments, message):
    given = {
        "input_ids": torch.tensor([1, 2]),
        "word": torch.ones(5, 8),
        "position_ids": torch.tensor([0, 1]),
        "position": torch.ones(6, 8),
        "position_offset": 2,
    }
    with pytest.raises(ValueError, match=message):
        embedding_layer_norm(**{**given, **arguments})


@needs_cpp
def test_ids_outside_a_table_are_never_followed():
    ids, word = torch.tensor([3, 9]), torch.ones(5, 8)
    with pytest.raises(RuntimeError, match="an id is outside its table"):
        torch.ops.fastenc.embedding_layer_norm_fwd(
            ids, None, None, word, None, None, None, None, None, 0, 0.0, 1e-12, False
        )
    with pytest.raises(RuntimeError, match="an id is outside its table"):
        torch.ops.fastenc.add_rows_(word, torch.ones(2, 8), ids, torch.tensor([0, 1]), 0, -1)


@pytest.mark.parametrize("table", ["word", "position", "token_type"])
def test_a_table_laid_out_by_columns_gets_its_rows_gradient(table):
    tables = {"word": torch.randn(11, 8), "position": torch.randn(7, 8)}
    tables["token_type"] = torch.randn(2, 8)
    arguments = dict(position_ids=torch.tensor([0, 6, 3]), token_type_ids=torch.tensor([0, 1, 1]))

    def gradient(leaf):
        y = embedding_layer_norm(
            torch.tensor([3, 5, 3]), **{**tables, table: leaf}, **arguments, impl="cpp"
        )
        return torch.autograd.grad(y.pow(3).sum(), leaf)[0]

    by_rows = tables[table].clone().requires_grad_()
    by_columns = tables[table].T.contiguous().T.requires_grad_()
    assert not by_columns.is_contiguous()
    torch.testing.assert_close(gradient(by_columns), gradient(by_rows), rtol=0, atol=0)


@needs_cpp
def test_a_large_tables_gradient_maps_few_pages_until_it_is_read():
    resource = pytest.importorskip("resource")
    word = torch.randn(20000, 512, requires_grad=True)  # 41 MB
    ids, dy = torch.tensor([7, 19999, 7]), torch.randn(3, 512)
    y = embedding_layer_norm(ids, word, impl="cpp")
    (expected,) = torch.autograd.grad(F.layer_norm(word[ids], (512,), eps=1e-12), word, dy)
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    before = faults()
    y.backward(dy)
    assert faults() - before < word.nbytes // resource.getpagesize() // 2
    torch.testing.assert_close(word.grad, expected, rtol=1e-4, atol=1e-5)
    for table in (torch.ones(5, 8), torch.ones(5, 8).T, torch.ones(5, 8).bfloat16()):
        torch.library.opcheck(torch.ops.fastenc.zero_table.default, (table,))


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_a_type_table_without_rows_is_an_error(impl):
    with pytest.raises(ValueError, match="token_type must have at least one row, got none"):
        embedding_layer_norm(
            torch.tensor([1]), torch.ones(3, 8), token_type=torch.ones(0, 8), impl=impl
        )
