"""Losses against transformers' logits, KL and top-token agreement against their definitions, and the command."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, random_prompts
from hypothesis import given
from hypothesis import strategies as st

import evaluate
from cli import UserError
from drafts.loading import read_lookup_text
from evaluate import Window, interval, scores, windows
from load import load_model
from quantize import calibration_text


@given(n=st.integers(2, 300), length=st.integers(2, 90), data=st.data())
@pytest.mark.slow
def test_every_token_but_the_first_is_scored_once(n, length, data):
    """Windows are never too long, and tokens have as much context as the stride promises."""
    stride = data.draw(st.integers(1, length - 1))
    ids, scored = list(range(n)), []
    for window in windows(ids, length, stride):
        assert 1 < len(window.ids) <= length and window.ids == ids[window.ids[0] : window.ids[-1] + 1]
        assert window.first >= min(length - stride, window.ids[window.first]) or window.ids[0] == 0
        scored += window.ids[window.first :]
    assert scored == ids[1:]
    plain, marked = windows(ids, length, stride), windows(ids, length, stride, bos=-1)
    assert marked == [plain[0], *(Window([-1, *window.ids[1:]], window.first) for window in plain[1:])]


@pytest.mark.parametrize("name", ["llama-gqa-biased", "bloom-7-post", "mistral-window"])
def test_losses_equal_transformers(tiny, tiny_model, name):
    model, oracle = tiny_model(name, rows=1), tiny(name)[0]
    for ids, first in zip(random_prompts((200, 33, 140)), (1, 20, 139)):
        window = Window(ids, first)
        found = scores([model], window)
        with torch.no_grad():
            logits = oracle(torch.tensor([window.ids])).logits[0]
        targets = torch.tensor(window.ids[window.first :])
        expected = F.cross_entropy(logits[window.first - 1 : -1], targets, reduction="none")
        assert torch.allclose(found["loss"].float(), expected, atol=1e-4)


def test_kl_and_agreement_equal_their_definitions(tiny, tiny_model):
    model, other = tiny_model("llama-mha", rows=1), load_model(tiny("llama-mha")[2], dtype=torch.float32)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    other.setup_caches(1, 256)
    [ids] = random_prompts((150,))
    found = scores([model, other], Window(ids, 4))
    kl, same = found["kl"], found["top1"]
    position = torch.arange(150)[None]
    with torch.no_grad():
        logits = [m(torch.tensor([ids]), position, all_logits=True)[0, 3:-1] for m in (model, other)]
    ours, theirs = (numbers.log_softmax(-1) for numbers in logits)
    assert torch.allclose(kl.float(), F.kl_div(ours, theirs, log_target=True, reduction="none").sum(1), atol=1e-5)
    assert (kl > 0).all() and same.tolist() == (ours.argmax(1) == theirs.argmax(1)).tolist() and 0 < same.mean() < 1
    found = scores([model, model], Window(ids, 4))
    assert not found["kl"].any() and found["top1"].all()


def test_kl_of_what_is_not_finite(tiny, tiny_model):
    """Zero probabilities of the reference count as zero, and NaN stays NaN."""
    model, [ids] = tiny_model("bloom-5", rows=1), random_prompts((20,))
    broken = load_model(tiny("bloom-5")[2], dtype=torch.float32)
    broken.setup_caches(1, 64)
    head = broken.head

    def kl(*pair):
        return scores(pair, Window(ids, 4))["kl"]

    broken.head = lambda x: head(x).index_fill(-1, torch.tensor([7]), -torch.inf)
    assert kl(model, broken).isfinite().all() and (kl(model, broken) > 0).any()
    assert kl(broken, model).isposinf().all(), "the model gives such a token probability 0"
    broken.head = lambda x: head(x) * torch.nan
    assert kl(broken, model).isnan().all() and kl(model, broken).isnan().all()


def test_interval_of_independent_numbers_and_of_repeated_ones():
    numbers = torch.randn(4000, generator=torch.Generator().manual_seed(0)).double() + 5
    mean, half = interval(list(numbers[:, None]))
    assert mean == pytest.approx(float(numbers.mean())) and half == pytest.approx(1.96 / math.sqrt(4000), rel=0.05)
    _, repeated = interval([number.expand(10) for number in numbers])
    assert repeated == pytest.approx(half, rel=1e-6), "ten copies are no more evidence than one"
    assert math.isnan(interval([numbers])[1])


# ---------------------------------------------------------------- the command


class Characters:
    """A tokenizer whose ids are the characters."""

    vocabulary = "all"

    def encode(self, text, add_bos=True):
        return list(map(ord, text))


CONFIG = SimpleNamespace(max_seq_length=1, vocab_size=1 << 21)
READERS = {
    "evaluate.py --text": lambda path: evaluate.read_ids(path, Characters(), None),
    "--draft lookup": lambda path: read_lookup_text(path, SimpleNamespace(tokenizer=Characters(), config=CONFIG)),
    # This takes each of a text's 32 characters as a sequence.
    "quantize.py": lambda path: sum(calibration_text(SimpleNamespace(config=CONFIG), Characters(), path), []),
}
TEXTS = ["one\r\ntwo\r\n", "one\rtwo\n\r", "a\u2028b\x85c\x0cd\x1ce", "\r\n\n \ttabs\r\n\n"]


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_files_are_read_as_they_are(tmp_path, read, text):
    """Line ends are not translated. A byte order mark is not a part of the text."""
    text = text.rjust(32, "x")
    for mark in ("", "\ufeff"):
        (tmp_path / "text").write_bytes((mark + text).encode())
        assert read(tmp_path / "text") == list(map(ord, text))


@pytest.mark.slow
def test_the_command(default_checkpoint, checkpoints, tiny, tmp_path, monkeypatch, capsys):
    text, empty, binary = (tmp_path / name for name in ("text.txt", "empty", "binary"))
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8 + "Ende: süß.\n", encoding="utf-8")
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00")

    def run(*args) -> str:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--text", *map(str, args)])
        evaluate.main()
        return capsys.readouterr().out

    same = ("--checkpoint_path", default_checkpoint, "--reference_checkpoint_path", default_checkpoint)
    result = json.loads(run(text, *same, "--json", "--window", 50))
    assert set(result) >= {"perplexity", "bits_per_byte", "kl_nats", "kl_ci95", "top1_agreement", "top1_ci95", "tokens"}
    assert result["kl_nats"] == 0 and result["top1_agreement"] == 1 and 1 < result["perplexity"] < 20
    bits = math.log2(result["perplexity"]) * result["tokens"]
    assert result["bits_per_byte"] == pytest.approx(bits / (len(text.read_bytes()) - len("The")))
    assert result["kl_ci95"] is not None
    # The default model in its own bits: with kernels, activations are rounded to 8 bits; weights are not rounded again.
    file = json.loads(run(text, "--reference_checkpoint_path", default_checkpoint, "--json"))
    assert 0 <= file["kl_nats"] < 0.03 and file["top1_agreement"] > 0.9
    small = ("--checkpoint_path", checkpoints[None], "--reference_checkpoint_path", checkpoints[None])
    one = json.loads(run(text, *small, "--json", "--max_tokens", 9))
    assert one["kl_ci95"] is None, "a single window has no interval"
    command = [sys.executable, str(ROOT / "evaluate.py"), "--text", str(text), "--max_tokens", "9"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("perplexity ")
    for args, why in (
        ([empty], "has 0 tokens, but at least 2 are needed"), ([binary], "cannot be read"),
        ([text, "--window", 1], "must be at least 2"), ([text, "--limit", 3], "need --tasks"),
        ([text, "--stride", 60, "--window", 50], "--stride 60 must be less than the window of 50"),
        ([text, "--reference_checkpoint_path", tiny("llama-mha")[2]], "vocabularies of 49152 and 131"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=why):
            run(*args)
