"""Threads share a patched model: with and without gradients, training while serving."""

import copy
import os
import sys
import threading
import warnings

import pytest
import torch

import fastenc
from fastenc.integrations.transformers import live_reading
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch

pytestmark = needs_cpp
# To run 20,000 calls by hand: FASTENC_CALLS=20000.
CALLS = int(os.environ.get("FASTENC_CALLS", 600))
THREADS = 4


@pytest.fixture(params=[5e-3, 1e-4, 1e-6], ids=lambda value: f"{value:g} s")
def switch_interval(request):
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


def in_threads(work):
    """Call work(number) in each thread; raise the first error."""
    errors = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("task", ["Model", "ForSequenceClassification", "ForMaskedLM"])
def test_half_of_the_threads_with_gradients(task, switch_interval):
    theirs = model("bert", task, hidden_size=64, num_attention_heads=4)
    ours = fastenc.patch(copy.deepcopy(theirs))
    batches = [padded_batch("bert", (30,) * 8), padded_batch("bert", (9, 3)), padded_batch("bert")]
    result = lambda m, batch: (
        m(**batch)[0][batch["attention_mask"].bool()]
        if task != "ForSequenceClassification"
        else m(**batch)[0]
    )
    with torch.no_grad():
        expected = [result(theirs, batch) for batch in batches]

    def work(number):
        with torch.set_grad_enabled(number % 2 == 0):
            for i in range(CALLS // (3 * 3 * THREADS)):
                index = (i + number) % len(batches)
                output = result(ours, batches[index])
                assert output.requires_grad == (number % 2 == 0)
                torch.testing.assert_close(output, expected[index], rtol=0, atol=1e-5)

    in_threads(work)


def test_own_and_fused_forwards_at_once(switch_interval):
    """A loss that includes padding in one thread does not change which forward another thread's call takes."""
    theirs = model("deberta-v2", "ForTokenClassification")
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = padded_batch("deberta-v2")
    padding = batch["attention_mask"] == 0
    labels = torch.ones_like(batch["input_ids"])  # of padding tokens too
    with torch.no_grad():
        loss, logits = theirs(**batch, labels=labels).loss, theirs(**batch).logits
        with pytest.warns(UserWarning, match="a padding token has a label"):
            ours(**batch, labels=labels)

    @torch.no_grad()
    def work(number):
        for _ in range(CALLS // (3 * THREADS)):
            if number % 2:
                assert torch.equal(ours(**batch, labels=labels).loss, loss)
                continue
            output = ours(**batch).logits
            torch.testing.assert_close(output[~padding], logits[~padding], rtol=0, atol=1e-5)
            # The fused forward gives every padding token the head's value for a zero vector.
            assert torch.equal(output[padding], ours.classifier.bias.expand(int(padding.sum()), -1))

    in_threads(work)


def test_frozen_weights_and_a_call_with_gradients(switch_interval):
    theirs = model("bert", hidden_size=64, num_attention_heads=4)
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = padded_batch("bert", (30,) * 8)
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state

    def work(number):
        with torch.set_grad_enabled(number == 0):
            for i in range(CALLS // (3 * THREADS)):
                if number == 1 and i % 4 == 0:
                    fastenc.freeze(ours)
                hidden = ours(**batch).last_hidden_state
                torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)

    in_threads(work)


def test_a_call_while_another_thread_compares_a_table(monkeypatch):
    """RoFormer's angles are compared once. A call in the meantime is fused, and does not warn, as one alone."""
    theirs, batch = model("roformer"), padded_batch("roformer")
    ours, mask = fastenc.patch(copy.deepcopy(theirs)), batch["attention_mask"].bool()
    compare, compared, results = live_reading.is_table, threading.Event(), []

    def compare_slowly(*tables):
        if not compared.is_set():
            compared.set()
            other = threading.Thread(target=call)
            other.start()
            other.join()
        return compare(*tables)

    def call():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            results.append(ours(**batch).last_hidden_state[mask])

    monkeypatch.setattr(live_reading, "is_table", compare_slowly)
    call()
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state[mask]
    assert len(results) == 2
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
