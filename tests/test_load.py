"""From options to a model: the values of ModelOptions, which module has the kernels, which draft is the default."""

import pytest
import torch

import generate
import load
import serve
from checkpoint import open_directory
from cli import UserError
from load import DraftOption, ModelOptions
from speculative import Speculation


def test_options_take_the_values_of_the_command_line():
    options = ModelOptions(dtype="float16", draft=["lookup:a:b", "medusa"], speculate_k="3")
    assert options == ModelOptions(
        dtype=torch.float16, draft=[DraftOption("lookup", "a:b"), DraftOption("medusa")], speculate_k=3
    )


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"dtype": "float64"}, "--dtype 'float64' is not one of bfloat16, float16, float32"),
        ({"dtype": torch.float64}, "--dtype torch.float64 is not one of"),
        ({"kernels": "avx512"}, "--kernels 'avx512' is not one of auto, avx2, torch"),
        ({"threads": 0}, "--threads must be between 1 and 1024, not 0"),
        ({"draft": ["lookup"]}, "--draft 'lookup' is not one of prompt-lookup, lookup:FILE"),
        ({"draft": ["medusa", "medusa"]}, "--draft medusa is given twice"),
        ({"draft": ["medusa"], "speculate_k": 0}, "--speculate_k must be auto, or between 1 and 15, not 0"),
        ({"speculate_k": 3}, "--speculate_k needs something that proposes"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(fields, why):
    with pytest.raises(UserError, match=why):
        ModelOptions(**fields)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_kernels_are_those_of_the_options(tiny, monkeypatch, kernels):
    """On a GPU, Triton is not imported for --kernels torch."""
    asked, choose_installer = [], load.choose_installer

    def record(device, kernels):
        asked.append(kernels)
        return choose_installer(device, kernels)

    monkeypatch.setattr(load, "choose_installer", record)
    options = ModelOptions(device="cpu", dtype=torch.float32, kernels=kernels)
    load.load_engine(open_directory(tiny("llama-mha")[2]), options, 1, 16)
    assert set(asked) == {kernels}


@pytest.mark.parametrize("line, looks_up", [
    ("", True), ("--draft none", False), ("--draft int4-self", False), ("--draft_checkpoint_path x", False),
    ("--compile", False),
])  # fmt: skip
def test_prompt_lookup_is_the_default_draft_of_conversations(line, looks_up):
    args = serve.parse_arguments(line.split())
    assert args.model.drafts_by_default == looks_up and not (looks_up and args.model.speculates)
    for chat in ("--chat", "--interactive"):
        assert generate.parse_arguments([chat, *line.split()]).model.drafts_by_default == looks_up
    assert not generate.parse_arguments(line.split()).model.drafts_by_default


def test_the_number_of_tokens_can_be_fixed_for_the_default_drafts(tiny):
    checkpoint = open_directory(tiny("llama-mha")[2])
    line = ["--chat", "--speculate_k", "4", "--device", "cpu"]
    engine = load.load_engine(checkpoint, generate.parse_arguments(line).model, 1, 16)
    if engine.model.backend.thread_invariant:
        assert (engine.decoding.k, engine.decoding.automatic) == (4, False)
    options = generate.parse_arguments([*line, "--kernels", "torch"]).model
    with pytest.raises(UserError, match="--speculate_k: no draft is the default here; name one with --draft"):
        load.load_engine(checkpoint, options, 1, 16)
    for more in (["--compile"], ["--draft", "none"]):
        with pytest.raises(UserError, match="--speculate_k needs something that proposes"):
            generate.parse_arguments([*line, *more])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_default_draft_needs_kernels_that_round_alike(tiny, kernels):
    options = ModelOptions(device="cpu", kernels=kernels, drafts_by_default=True)
    engine = load.load_engine(open_directory(tiny("llama-mha")[2]), options, 1, 16)
    assert isinstance(engine.decoding, Speculation) == engine.model.backend.thread_invariant == (kernels == "auto")


@pytest.mark.parametrize(
    "rows, length, why",
    [(0, 16, "not 0 of 16"), (1, 0, "not 1 of 0"), (1, 257, "257 is more than the model's context of 256")],
)
def test_an_engine_that_could_do_nothing(tiny, rows, length, why):
    with pytest.raises(UserError, match=why):
        load.load_engine(open_directory(tiny("llama-mha")[2]), ModelOptions(device="cpu"), rows, length)
