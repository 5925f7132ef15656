"""From options to a model: the values of ModelOptions, which module has the kernels, which draft is the default."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import GEMMA4, ROOT, save_random, tiny_chat_llama
from gguf import GGMLQuantizationType
from gguf_writer import bpe_fields, write_gguf
from tokenizers import Tokenizer

import generate
import load
import serve
from checkpoint import open_directory
from cli import UserError
from convert_hf_checkpoint import convert
from formats import Quantization
from load import default_params, open_checkpoint
from options import DraftOption, ModelOptions
from quantize import quantize_checkpoint
from sampling import DEFAULTS
from server.api import ServedModel
from sources.opening import open_hf
from speculative import Speculation


def test_options_take_the_values_of_the_command_line():
    drafts = [DraftOption("lookup", "a:b"), DraftOption("medusa", "c"), DraftOption("lookup", "d")]
    options = ModelOptions(dtype="float16", draft=["lookup:a:b", "medusa:c", "lookup:d"], speculate_k="3")
    assert options == ModelOptions(dtype=torch.float16, draft=drafts, speculate_k=3)
    assert str(options.heads_path) == "c"


@pytest.mark.parametrize("fields, why", [
    ({"dtype": "float64"}, "dtype 'float64' is not one of bfloat16, float16, float32"),
    ({"dtype": torch.float64}, "dtype torch.float64 is not one of"),
    ({"kernels": "avx512"}, "kernels 'avx512' is not one of auto, avx2, torch"),
    ({"threads": 0}, "threads must be between 1 and 1024, not 0"),
    ({"draft": ["lookup"]}, "draft 'lookup' is not one of prompt-lookup, lookup:FILE"),
    ({"draft": ["medusa", "medusa"]}, "draft medusa is given twice"),
    ({"draft": ["medusa"], "speculate_k": 0}, "speculate_k must be auto, or between 1 and 15, not 0"),
    ({"speculate_k": 3}, "speculate_k needs something that proposes"),
], ids=str)  # fmt: skip
def test_wrong_options_are_one_line(fields, why):
    """They name the field, or the option if the value is that of a command line."""
    with pytest.raises(UserError, match="^" + why):
        ModelOptions(**fields)
    with pytest.raises(UserError, match="^--" + why):
        ModelOptions.from_arguments(SimpleNamespace(**fields))


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


@pytest.mark.parametrize("rows, length, why", [
    (0, 16, "not 0 of 16"), (1, 0, "not 1 of 0"), (1, 257, "257 is more than the model's context of 256"),
])  # fmt: skip
def test_an_engine_that_could_do_nothing(tiny, rows, length, why):
    with pytest.raises(UserError, match=why):
        load.load_engine(open_directory(tiny("llama-mha")[2]), ModelOptions(device="cpu"), rows, length)


FOUND = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.mark.parametrize("generation, expected, warns", [
    (FOUND | {"do_sample": True, "eos_token_id": 1}, FOUND, False), ({"top_p": 0.8}, {"top_p": 0.8}, False),
    ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0}, False),
    ({"do_sample": True, "bos_token_id": 0}, {}, False), ({"temperature": None, "top_k": -1, "top_p": 1.0}, {}, False),
    ({"temperature": "hot", "top_p": 0.5}, {}, True), ({"temperature": 0.6, "top_k": 2.5}, {}, True),
    ({"top_p": 7}, {}, True), ({"min_p": True}, {}, True),
], ids=str)  # fmt: skip
def test_what_a_models_files_recommend_is_the_default(checkpoints, tmp_path, capsys, generation, expected, warns):
    """In our directories, which also keep it when they are converted and quantized."""
    directory = shutil.copytree(checkpoints[None], tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = open_checkpoint(directory)
    params = replace(DEFAULTS, **expected)
    assert default_params(checkpoint, ModelOptions()) == params
    assert ("warning: the settings that" in capsys.readouterr().err) == warns
    assert default_params(checkpoint, ModelOptions(generation_config="none")) == DEFAULTS
    quantize_checkpoint(directory, tmp_path / "int8", Quantization("int8", 32, "int8"))
    assert default_params(open_checkpoint(tmp_path / "int8"), ModelOptions()) == params


def test_a_gguf_file_and_a_hugging_face_directory_recommend_alike(tmp_path, byte_level):
    """As llama.cpp's converter writes the fields of generation_config.json."""
    oracle, library = tiny_chat_llama(tmp_path / "hf", byte_level, 64, "{{ messages }}", seed=5)
    assert default_params(open_checkpoint(tmp_path / "hf"), ModelOptions()) == DEFAULTS
    path = tmp_path / "hf" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | FOUND))
    names = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
    fields = {f"general.sampling.{names.get(name, name)}": value for name, value in FOUND.items()}
    tokens = bpe_fields(Tokenizer.from_file(str(byte_level / "tokenizer.json")), "qwen2")
    write_gguf(tmp_path / "with.gguf", oracle, tokens, extra=fields)
    write_gguf(tmp_path / "strange.gguf", oracle, tokens, extra={"general.sampling.temp": "hot"})
    convert(open_checkpoint(tmp_path / "hf"), tmp_path / "ours", torch.float32)
    for name in ("hf", "with.gguf", "ours"):
        assert default_params(open_checkpoint(tmp_path / name), ModelOptions()) == replace(DEFAULTS, **FOUND)
    assert default_params(open_checkpoint(tmp_path / "strange.gguf"), ModelOptions()) == DEFAULTS


def test_all_programs_have_the_same_default_settings(checkpoints, tmp_path, monkeypatch, capsys):
    """A request without settings, generate.py, and a conversation. An option or a field that is named wins."""
    directory = shutil.copytree(checkpoints[None], tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(FOUND))
    seen = []

    def stop(checkpoint, options, rows, length, how):
        raise UserError("stop here")

    monkeypatch.setattr(generate, "load_engine", stop)
    monkeypatch.setattr(generate, "replace", lambda params, **given: seen.append(replace(params, **given)) or seen[-1])
    for args in ([], ["--interactive"], ["--generation_config", "none"], ["--temperature", "0.9", "--top_k", "0"]):
        monkeypatch.setattr(sys, "argv", ["generate.py", str(directory), *args])
        with pytest.raises(UserError, match="stop here"):
            generate.main()
    own = replace(DEFAULTS, **FOUND, seed=1234)
    assert seen == [own, own, replace(DEFAULTS, seed=1234), replace(own, temperature=0.9, top_k=0)]
    checkpoint = open_checkpoint(directory)
    params = default_params(checkpoint, ModelOptions())
    model = ServedModel(checkpoint.config, checkpoint.tokenizer_files, "tiny", 99, sampling=params)
    messages = [{"role": "user", "content": "Hi"}]
    bodies = [({}, {}), ({"top_p": 0.5, "temperature": None}, {"top_p": 0.5})]
    for body, more in [*bodies, ({"temperature": 0, "top_k": -1}, {"temperature": 0, "top_k": 0})]:
        chat, completion = model.parse_chat({"messages": messages} | body), {"prompt": "Hi"} | body
        for one in (chat, model.parse_completion(completion)):
            found = one.choices[0].request.params
            assert found == replace(own, **more, seed=found.seed)
    assert model.model_card()["sampling"] == FOUND


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"device": "toaster"}, "device toaster cannot be used here"),
        ({"draft": ["mtp"]}, "draft mtp: .* has no layer .*; (--)?draft prompt-lookup works"),
        ({"draft": ["lookup:x"]}, "draft lookup:FILE needs text"),
        (
            {"speculate_k": 2, "drafts_by_default": True, "kernels": "torch"},
            "speculate_k: no draft is the default here",
        ),
    ],
    ids=str,
)
def test_what_load_engine_refuses_names_fields_or_options(tiny, fields, why):
    checkpoint = open_directory(tiny("llama-mha")[2])
    for dashes in ("", "--"):
        options = ModelOptions(**{"device": "cpu"} | fields, from_command_line=dashes == "--")
        with pytest.raises(UserError, match=f"^{dashes}{why}") as caught:
            load.load_engine(checkpoint, options, 1, 16)
        assert ("--" in str(caught.value)) == bool(dashes)


@pytest.mark.slow
def test_the_table_of_the_layers_inputs_stays_in_its_file(tmp_path, byte_level):
    """Of a model with a table of 66 MB in bfloat16, loading and generating hold the other 7 MB, and the rows of some
    tokens. All kinds of files, also with plain PyTorch."""
    sizes = {"vocab_size": 16000, "vocab_size_per_layer_input": 16000, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 4, "hidden_size_per_layer_input": 512, "head_dim": 32, "global_head_dim": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_kv_shared_layers": 1}
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    oracle = save_random(GEMMA4(**sizes, layer_types=kinds), tmp_path / "hf", seed=4)
    fields = bpe_fields(Tokenizer.from_file(str(byte_level / "tokenizer.json")), "llama-bpe")
    fields["tokenizer.ggml.tokens"] += [f"<{i}>" for i in range(len(fields["tokenizer.ggml.tokens"]), 16000)]
    fields["tokenizer.ggml.token_type"] = [1] * 16000
    write_gguf(tmp_path / "x.gguf", oracle, fields, lambda name: GGMLQuantizationType.Q8_0)
    convert(open_hf(tmp_path / "hf"), tmp_path / "ours", torch.bfloat16)
    quantize_checkpoint(tmp_path / "ours", tmp_path / "q", Quantization("int4", 32, "int8"))
    code = """if True:
        import sys, torch
        from engine import EngineOptions, Request, generate
        from load import load_engine, open_checkpoint
        from options import ModelOptions
        def resident():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
        def run(path):
            checkpoint = open_checkpoint(path)
            checkpoint.empty_model()  # for which torch imports much more of itself
            before = resident()
            engine = load_engine(checkpoint, ModelOptions(device="cpu", kernels=sys.argv[1]), 1, 64)
            request = Request(list(range(40, 48)), max_new_tokens=4)
            generate(engine, [request])
            assert len(request.new_tokens) == 4 and request.error is None
            return resident() - before
        run(sys.argv[2])
        print(*[run(path) for path in sys.argv[2:]])"""
    files = [str(tmp_path / name) for name in ("ours", "hf", "q", "x.gguf")]
    for kernels in ("auto", "torch"):
        command = [sys.executable, "-c", code, kernels, *files]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert max(map(int, done.stdout.split())) < 25e6, done.stdout
