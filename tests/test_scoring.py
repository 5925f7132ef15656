"""Losses against transformers' logits, KL and agreement against their definitions, on both paths."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import random_prompts
from hypothesis import given
from hypothesis import strategies as st

from load import load_model
from scoring import Window, interval, scores, windows


@given(n=st.integers(2, 300), length=st.integers(2, 90), data=st.data())
def test_every_token_but_the_first_is_scored_once(n, length, data):
    """In windows that are never too long, and after as much context as the stride promises."""
    stride = data.draw(st.integers(1, length - 1))
    ids, scored = list(range(n)), []
    for window in windows(ids, length, stride):
        assert 1 < len(window.ids) <= length and window.ids == ids[window.ids[0] : window.ids[-1] + 1]
        assert window.first >= min(length - stride, window.ids[window.first]) or window.ids[0] == 0
        scored += window.ids[window.first :]
    assert scored == ids[1:]


@pytest.mark.parametrize("name", ["llama-gqa-biased", "bloom-7-post", "mistral-window"])
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_losses_equal_transformers(tiny, tiny_model, name, path):
    model, oracle = tiny_model(name, rows=3), tiny(name)[0]
    batch = [Window(ids, first) for ids, first in zip(random_prompts((200, 33, 140)), (1, 20, 139))]
    for window, found in zip(batch, scores([model], batch, path)):
        with torch.no_grad():
            logits = oracle(torch.tensor([window.ids])).logits[0]
        targets = torch.tensor(window.ids[window.first :])
        expected = F.cross_entropy(logits[window.first - 1 : -1], targets, reduction="none")
        assert torch.allclose(found["loss"].float(), expected, atol=1e-4)
        greedy = logits[window.first - 1 : -1].argmax(1) == targets
        assert found["greedy"].tolist() == greedy.tolist()


def test_kl_and_agreement_are_what_they_say(tiny, tiny_model):
    model, other = tiny_model("llama-mha", rows=1), load_model(tiny("llama-mha")[2], dtype=torch.float32)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    other.setup_caches(1, 256)
    [ids] = random_prompts((150,))
    [found] = scores([model, other], [Window(ids, 4)], "prefill")
    kl, same = found["kl"], found["top1"]
    position = torch.arange(150)[None]
    with torch.no_grad():
        logits = [m(torch.tensor([ids]), position, all_logits=True)[0, 3:-1] for m in (model, other)]
    ours, theirs = (numbers.log_softmax(-1) for numbers in logits)
    assert torch.allclose(kl.float(), F.kl_div(ours, theirs, log_target=True, reduction="none").sum(1), atol=1e-5)
    assert (kl > 0).all() and same.tolist() == (ours.argmax(1) == theirs.argmax(1)).tolist() and 0 < same.mean() < 1
    [found] = scores([model, model], [Window(ids, 4)], "prefill")
    assert not found["kl"].any() and found["top1"].all()


def test_kl_of_what_is_not_finite(tiny, tiny_model):
    """Zero probabilities of the reference count nothing; NaN stays NaN."""
    model, [ids] = tiny_model("bloom-5", rows=1), random_prompts((20,))
    broken = load_model(tiny("bloom-5")[2], dtype=torch.float32)
    broken.setup_caches(1, 64)
    head = broken.head
    broken.head = lambda x: head(x).index_fill(-1, torch.tensor([7]), -torch.inf)
    window = [Window(ids, 4)]
    [found] = scores([model, broken], window, "prefill")
    assert found["kl"].isfinite().all() and (found["kl"] > 0).any()
    [found] = scores([broken, model], window, "prefill")
    assert found["kl"].isposinf().all(), "what the model holds to be impossible"
    broken.head = lambda x: head(x) * torch.nan
    for pair in ([broken, model], [model, broken]):
        [found] = scores(pair, window, "prefill")
        assert found["kl"].isnan().all()


def test_interval_of_independent_numbers_and_of_repeated_ones():
    numbers = torch.randn(4000, generator=torch.Generator().manual_seed(0)).double() + 5
    mean, half = interval(list(numbers[:, None]))
    assert mean == pytest.approx(float(numbers.mean())) and half == pytest.approx(1.96 / math.sqrt(4000), rel=0.05)
    _, repeated = interval([number.expand(10) for number in numbers])
    assert repeated == pytest.approx(half, rel=1e-6), "ten copies say no more than one"
    assert math.isnan(interval([numbers])[1])
