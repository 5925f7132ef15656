"""Conditions of benchmarks/exactness.py: the same bits in a tiny quantized model, and injected differences."""

import sys
from dataclasses import replace

import pytest
from conftest import ROOT, random_prompts

sys.path.append(str(ROOT / "benchmarks"))  # last: a program there is called as a file here

from answers import reread, run_alone, run_beside
from exactness import cell, compare

from engine import Engine
from load import load_model

NEW = 7


@pytest.fixture(scope="module")
def served(checkpoints):
    """An engine, and the prompts of the requests."""
    return Engine(load_model(checkpoints["int4"]), 3, 80), random_prompts((3, 17, 50), V=700)


def test_equal_bits_are_seen_as_the_same(served):
    engine, prompts = served
    base = run_alone(engine, prompts, NEW)
    warm = run_alone(engine, prompts, NEW, warm=True)
    assert warm.used == 2 + 11 + 33 and len(base.logprobs[2]) == NEW
    again = reread(lambda *arguments: run_alone(engine, *arguments), base, prompts, NEW)
    for answers in (warm, again, run_beside(engine, prompts, NEW, apart=2)):
        assert cell(compare(base, answers)) == "same"
    assert cell(compare(base, run_alone(engine, prompts, NEW, logprobs=None))) == "same (tokens only)"
    assert cell(compare(base, replace(warm, used=0))) == "same (not used)"
    assert compare(base, "no /a/b/draft") == {"left_out": "no draft"}


@pytest.mark.parametrize(("tokens", "found"), [(0, "bits 1 (3/3)"), (1, "token 1 (3/3), bits 1 (3/3)")])
def test_a_difference_is_seen(served, monkeypatch, tokens, found):
    """Decode in a batch changes the last bit of log-probabilities, or also the tokens."""
    engine, prompts = served
    base = run_alone(engine, prompts, NEW)
    decode = engine.next_steps.decode

    def wrong(*arguments):
        ids, logprobs, logits = decode(*arguments)
        return (ids + tokens) % 700, logprobs.nextafter(-logprobs.abs() - 1), logits

    monkeypatch.setattr(engine, "next_steps", replace(engine.next_steps, decode=wrong))
    assert cell(compare(base, run_beside(engine, prompts, NEW))) == found
