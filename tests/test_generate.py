"""The main program as a user runs it: what it prints, what it counts, and what it refuses."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, hf_greedy, random_prompts
from programs import ids, main, printed_lines, run

import generate as program
from checkpoint import open_directory
from cli import VERSION, UserError, piped_text, run_command
from config import Config, RopeScaling
from costs import weight_bytes
from engine import Engine, Request, generate
from generate import Output, parse_arguments
from load import choose_cache_length, load_model, open_checkpoint
from report import measurements
from sampling import SamplingParams
from sources.wheels import default_gguf
from text.chat_template import mark_ids
from text.tokenizer import Tokenizer

GREEDY, GREEDY_PARAMS = ["--temperature", "0"], SamplingParams(temperature=0.0)
JSON_FIELDS = """samples load_s compile_s time_to_first_token_s prefill_tokens_per_s decode_tokens_per_s
    weight_bytes_per_token weight_bytes_by_format kv_bytes_per_token state_bytes_per_token bandwidth_bytes_per_s
    read_bandwidth_bytes_per_s peak_memory_bytes mean_accepted_tokens recompiles graph_breaks device dtype kernels torch
    threads other_programs_cpus"""


def test_prompt_ids_through_the_program_equal_transformers(tiny, capsys, monkeypatch):
    """From a Hugging Face directory, in float32, for a batch of prompts of different lengths and copies of them."""
    oracle, hf, ours = tiny("qwen3-gqa")
    prompts = random_prompts((4, 19, 1))
    args = [part for prompt in prompts for part in ("--prompt_ids", ids(prompt))]
    args += ["--batch_size", 2, "--max_new_tokens", 30, "--dtype", "float32", "--json", *GREEDY]
    result, _ = main(capsys, monkeypatch, "--checkpoint_path", ours, *args)
    expected = [hf_greedy(oracle, prompt, 30) for prompt in prompts for _ in range(2)]
    assert [sample["token_ids"] for sample in result["samples"]] == expected
    assert [sample["prompt_tokens"] for sample in result["samples"]] == [4, 4, 19, 19, 1, 1]
    assert {sample["finish_reason"] for sample in result["samples"]} == {"length"}
    assert set(result) == set(JSON_FIELDS.split())


def test_report_counts_what_it_says(tiny_model):
    """The bytes per token are all weights divided by the rows, plus the live keys and values within the window."""
    model = tiny_model("mistral-window", rows=3)
    config, engine = model.config, Engine(model, 3, 256)
    timing = engine.timing
    generate(engine, [Request(prompt, GREEDY_PARAMS, 6) for prompt in random_prompts((2, 9, 30))])
    assert (timing.prefill_tokens, timing.decode_tokens, timing.decode_steps) == (41, 15, 5)
    looks = sum(min(n + i, config.sliding_window) for n in (2, 9, 30) for i in range(1, 6))
    assert timing.kv_bytes == looks * config.n_layer * 2 * config.n_kv_head * config.head_dim * 4
    found = measurements(engine, profiled=False)
    total = sum(weight.nbytes for weight in model.parameters())
    table, row = model.embedding.weight.nbytes, model.embedding.weight[0].nbytes
    assert weight_bytes(model, 3) == total - table + 3 * row, "of an untied embedding, only the rows that are looked up"
    assert found["weight_bytes_per_token"] == pytest.approx((total - table + 3 * row) / 3)
    bytes_per_token = found["weight_bytes_per_token"] + found["kv_bytes_per_token"]
    assert found["bandwidth_bytes_per_s"] == pytest.approx(bytes_per_token * found["decode_tokens_per_s"])
    assert found["decode_tokens_per_s"] == pytest.approx(15 / timing.decode_s)


def test_sampling_options_reach_the_rows(tiny, capsys, monkeypatch):
    """The same seed gives the same text, the next row or sample has the next seed, and rows are independent."""
    args = ["--checkpoint_path", tiny("llama-mha")[2], "--dtype", "float32", "--json", "--max_new_tokens", 20]
    args += ["--prompt_ids", "5,6,7", "--top_p", 0.9, "--min_p", 0.01, "--repetition_penalty", 1.2]

    def texts(*more):
        return [tuple(s["token_ids"]) for s in main(capsys, monkeypatch, *args, *more)[0]["samples"]]

    batch = texts("--batch_size", 3, "--num_samples", 2, "--seed", 7)
    assert len(set(batch)) == 6
    assert batch == texts("--batch_size", 3, "--num_samples", 2, "--seed", 7)
    assert [texts("--seed", 7 + i)[0] for i in range(6)] == batch
    assert len(set(texts("--num_samples", 3, "--temperature", 0))) == 1


def test_stops_at_any_end_token(tiny, tmp_path, capsys, monkeypatch):
    oracle, _, ours = tiny("qwen2-gqa")
    [prompt] = random_prompts((6,))
    expected = hf_greedy(oracle, prompt, 40)
    shutil.copytree(ours, tmp_path / "ours")
    file, ends = tmp_path / "ours" / "tokenizer_config.json", [expected[12], expected[30]]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_ids": [130, *ends]}))
    first = min(expected.index(end) for end in ends)
    args = ["--checkpoint_path", tmp_path / "ours", "--dtype", "float32", "--json", "--prompt_ids", ids(prompt)]
    # At last, the last token that is allowed is an EOS token.
    cases = ([40], first + 1, "stop"), ([40, "--ignore_eos"], 40, "length"), ([first + 1], first + 1, "stop")
    for more, n, reason in cases:
        [sample] = main(capsys, monkeypatch, *args, *GREEDY, "--max_new_tokens", *more)[0]["samples"]
        assert sample["token_ids"] == expected[:n] and sample["finish_reason"] == reason


@pytest.mark.slow
def test_stop_strings_end_each_row_for_itself(default_checkpoint, capsys, monkeypatch):
    """Texts with --stop are the texts without it, cut before the first stop string in them."""
    args = ["--prompt", "The three largest", "--prompt", "def f(x):\n", "--prompt", "1, 2, 3,", "--dtype", "float32"]
    args += ["--max_new_tokens", 24, "--ignore_eos", *GREEDY]
    whole = main(capsys, monkeypatch, *args, "--json")[0]["samples"]
    texts = [sample["text"] for sample in whole]
    stops = [texts[0][50:61], texts[1][31:33], texts[2][-2:], "never to be found", texts[0][50:62] + "#"]
    flags = [part for stop in stops for part in ("--stop", stop)]
    stopped = main(capsys, monkeypatch, *args, *flags, "--json")[0]["samples"]
    for sample, before in zip(stopped, whole):
        end = min((before["text"].find(stop) for stop in stops if stop in before["text"]), default=None)
        assert sample["text"] == before["text"][:end]
        assert sample["token_ids"] == before["token_ids"][: len(sample["token_ids"])]
        assert sample["finish_reason"] == ("length" if end is None else "stop")
    assert len(stopped[0]["token_ids"]) < 24


@pytest.mark.slow
def test_chat_sets_prompts_in_the_template(default_checkpoint, capsys, monkeypatch):
    tokenizer = Tokenizer(default_checkpoint)
    ask = ["--prompt", "What is the capital of France?", "--max_new_tokens", 12, *GREEDY]
    talk = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    usual = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    question = "What is the capital of France?"
    for flags, system in ((["--system", "Be brief."], "Be brief."), (["--chat"], usual)):
        [sample] = main(capsys, monkeypatch, *ask, *flags, "--json")[0]["samples"]
        assert sample["prompt_tokens"] == len(tokenizer.encode(talk.format(system, question)))
    answer = sample["text"]
    assert main(capsys, monkeypatch, *ask, *flags)[0] == answer + "\n", "the answer and nothing else"
    shown, _ = main(capsys, monkeypatch, *ask, "--chat", "--batch_size", 2)
    said = f"system\n{usual}\nuser\n{question}\nassistant\n{answer}\n\n"  # the prompt comes before the answer
    assert shown == f"--- prompt 1, sample 1 ---\n{said}--- prompt 1, sample 2 ---\n{said}"


def test_marks_of_thoughts_are_shown(default_checkpoint):
    """Also where they are special tokens, which are not shown otherwise."""
    tokenizer = Tokenizer(default_checkpoint)
    ids = tokenizer.encode("<|im_start|>Hm.<|im_end|><|endoftext|>Yes", add_bos=False)
    marks = mark_ids(tokenizer, ("<|im_start|>", "<|im_end|>"))
    args = SimpleNamespace(chat=True, stop=[], params=SamplingParams(), max_new_tokens=9, shown_ids=marks)
    args.make_grammar = lambda: None
    output = Output(args, tokenizer, [5], frozenset(), 0)
    for token in ids:
        output.add(token)
    output.finish()
    assert (output.text, mark_ids(tokenizer, None)) == ("<|im_start|>Hm.<|im_end|>Yes", [])


def test_several_samples_have_headings(checkpoints, capsys, monkeypatch):
    """Each says which prompt and which of its samples it is. A synthetic prompt is described, not printed."""
    args = ["--checkpoint_path", checkpoints[None], "--max_new_tokens", 5, *GREEDY, "--synthetic_prompt", 9]
    [sample] = main(capsys, monkeypatch, *args, "--json")[0]["samples"]
    assert sample["prompt_tokens"] == 9
    assert main(capsys, monkeypatch, *args)[0] == f"(9 arbitrary tokens, not shown)\n{sample['text']}\n"
    args += ["--prompt", "One", "--prompt", "Two", "--batch_size", 2, "--num_samples", 2]
    shown, _ = main(capsys, monkeypatch, *args)
    found = re.findall(r"^--- prompt (\d), sample (\d) ---\n(.{3})", shown, re.M)
    places = [("1", "One"), ("2", "Two"), ("3", "(9 ")]
    assert found == [(prompt, i, text) for samples in ("12", "34") for prompt, text in places for i in samples]
    shown, _ = main(capsys, monkeypatch, "--prompt", "One", "--num_samples", 2, *args[:6])
    assert re.findall("---.*", shown) == ["--- prompt 1, sample 1 ---", "--- prompt 1, sample 2 ---"]


def test_a_roofline_measures_the_bandwidth(tiny, capsys, monkeypatch):
    args = ["--checkpoint_path", tiny("bloom-3")[2], "--dtype", "float32", "--roofline", "--json"]
    [entry] = main(capsys, monkeypatch, *args)[0]["roofline"]
    assert entry["context"] == 1 and entry["bandwidth_bytes_per_s"] > 0


def test_every_kind_of_prompt(default_checkpoint):
    tokenizer = Tokenizer(default_checkpoint)
    args = parse_arguments(["--prompt", "one", "--prompt", "", "--prompt_ids", "5, 6", "--synthetic_prompt", "300"])
    *prompts, synthetic = program.read_prompts(args, open_directory(default_checkpoint), None)
    assert prompts == [tokenizer.encode("one"), [1], [5, 6]]
    assert len(synthetic) == 300 and len(set(synthetic)) > 200
    with pytest.raises(UserError, match="not valid UTF-8"):
        tokenizer.encode("\udcff")


LINE_ENDS = "a\u2028b\u2029c\x85d\x0ce\x0bf\x1cg\rh"  # what str.splitlines takes for ends of lines


@pytest.mark.parametrize("data, prompts", [
    (f"{LINE_ENDS}\nnext\n", [LINE_ENDS, "next"]), ("one\r\ntwo\r\n\r\nthree", ["one", "two", "three"]),
    ("one\r\r\ntwo\r", ["one\r", "two\r"]), ("\n\n one \n \n", [" one ", " "]),
    ("\ufeffone\n\ufefftwo", ["one", "\ufefftwo"]),
], ids=["other ends", "Windows", "carriage returns", "spaces", "byte order mark"])  # fmt: skip
def test_the_lines_of_a_prompt_file(tmp_path, data, prompts):
    """A line ends at a newline, and nowhere else. The carriage return of a Windows file belongs to the newline."""
    (tmp_path / "p.txt").write_bytes(data.encode())
    args = parse_arguments(["--prompt_file", str(tmp_path / "p.txt"), "--prompt", "first"])
    assert program.read_texts(args) == ["first", *prompts]


def standard_input(monkeypatch, data: bytes, is_terminal=False):
    stream = io.TextIOWrapper(io.BytesIO(data))
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdin", stream)


@pytest.mark.parametrize("data, prompt", [
    ("one\n\ntwo\n\n", "one\n\ntwo\n"), ("one\r\ntwo\r\n", "one\r\ntwo"), (f"{LINE_ENDS}\r", f"{LINE_ENDS}\r"),
    ("\ufeff def f():\n\treturn 1\x00\n", " def f():\n\treturn 1\x00"), ("word " * 50_000, "word " * 50_000),
], ids=["newlines", "Windows", "other ends", "byte order mark", "250 kB"])  # fmt: skip
def test_a_prompt_from_standard_input(monkeypatch, data, prompt):
    """It is one prompt, as it is, but without one newline at its end, which `echo` and editors write."""
    standard_input(monkeypatch, data.encode())
    args = parse_arguments(["--prompt", "first", "--prompt", "-", "--prompt=last"])
    assert program.read_texts(args) == ["first", prompt, "last"]


@pytest.mark.parametrize("data, why", [
    (b"\r\n", "--prompt - is empty"), (b"caf\xe9\n", "--prompt - cannot be read: 'utf-8' codec can't decode byte 0xe9"),
])  # fmt: skip
def test_standard_input_without_a_text_is_one_line(monkeypatch, data, why):
    standard_input(monkeypatch, data)
    with pytest.raises(UserError, match=why):
        program.read_texts(parse_arguments(["--prompt", "-"]))


def test_standard_input_is_read_once_and_announced_at_a_terminal(monkeypatch, capsys):
    for args in (["--prompt", "-", "--prompt", "-"], ["--prompt", "-", "--interactive"]):
        with pytest.raises(UserError, match="--prompt - reads all of standard input: give it once"):
            parse_arguments(args)
    standard_input(monkeypatch, b"typed\n", is_terminal=True)
    assert program.read_texts(parse_arguments(["--prompt", "-"])) == ["typed"]
    assert capsys.readouterr().err == "--prompt -: type the text, and end it with Ctrl-D on a line of its own\n"


@pytest.fixture
def pipe(monkeypatch):
    """A pipe as standard input. Returns its other end."""
    ours, theirs = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(ours))
    with os.fdopen(theirs, "wb", 0) as writer:
        yield writer


@pytest.mark.parametrize("args, data, texts", [
    ([], "piped\n", ["piped"]), (["--prompt", "Say:"], "\ufeffpiped\r\n", ["Say:\n\npiped"]),
    (["-p", "one", "--prompt", "two"], "a\n\nb\n\n", ["one\n\na\n\nb\n", "two\n\na\n\nb\n"]),
    ([], "\n", ["Hello, my name is"]), (["--prompt", "first", "--prompt", "-"], "piped", ["first", "piped"]),
    (["--prompt_file", "lines.txt"], "piped", ["one line"]), (["--prompt_ids", "5,6"], "piped", []),
])  # fmt: skip
def test_piped_text_follows_the_prompt_or_is_it(checkpoints, tmp_path, monkeypatch, capsys, pipe, args, data, texts):
    """It is not read if standard input has another use, or prompts come from elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("one line\n")
    pipe.write(data.encode())
    pipe.close()
    read = []
    monkeypatch.setattr(program, "read_texts", lambda args, real=program.read_texts: read.append(real(args)) or ["Hi"])
    main(capsys, monkeypatch, "--checkpoint_path", checkpoints[None], "--max_new_tokens", 2, *args)
    assert read == [texts]


def test_a_silent_pipe_is_not_waited_for(checkpoints, monkeypatch, capsys, pipe):
    """Programs inherit pipes that nobody writes to. What has come when the model is loaded is read to its end."""
    options = ["--checkpoint_path", checkpoints[None], "--max_new_tokens", 2, "--json"]
    [silent] = main(capsys, monkeypatch, *options, "--prompt", "one")[0]["samples"]
    lengths = []

    def load(checkpoint, options, rows, length, how, real=program.load_engine):
        lengths.append(length)
        if len(lengths) == 1:
            pipe.write(b"late")
            threading.Timer(0.5, lambda: pipe.write(b" and more" * 80) and pipe.close()).start()
        return real(checkpoint, options, rows, length, how)

    monkeypatch.setattr(program, "load_engine", load)
    [late] = main(capsys, monkeypatch, *options, "--prompt", "one")[0]["samples"]
    tokenizer = Tokenizer(checkpoints[None])
    assert silent["prompt_tokens"] == len(tokenizer.encode("one"))
    assert late["prompt_tokens"] == len(tokenizer.encode("one\n\nlate" + " and more" * 80))
    assert lengths[1] >= late["prompt_tokens"]


def test_what_is_no_pipe_is_not_read(monkeypatch, tmp_path):
    (tmp_path / "text").write_text("in a file\n")
    for path, text in ((os.devnull, ""), (tmp_path / "text", "in a file")):
        with open(path) as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert piped_text() == text
    monkeypatch.setattr(sys, "stdin", io.StringIO("not a file of the system"))
    assert piped_text() == ""
    leader, follower = os.openpty()
    with os.fdopen(follower) as terminal, os.fdopen(leader, "wb", 0) as keyboard:
        keyboard.write(b"typed\n")
        monkeypatch.setattr(sys, "stdin", terminal)
        assert piped_text() == ""


@pytest.mark.parametrize("args, why", [
    (["--max_tokns", "3"], "unrecognized arguments: --max_tokns 3; did you mean --max_new_tokens?"),
    (["--temprature=2", "--quiet"], "unrecognized arguments: --temprature=2; did you mean --temperature?"),
    (["--zzz"], "unrecognized arguments: --zzz (--help"),
    (["-ngl", "99"], "unrecognized arguments: -ngl 99 (--help"),  # not -n with the value "gl"
    (["a", "b"], "unrecognized arguments: b; a prompt needs --prompt"),
    (["a", "--checkpoint_path", "b"], "'a' and --checkpoint_path 'b' both name a model; name one"),
])  # fmt: skip
def test_wrong_options_are_refused_with_the_nearest_one(args, why):
    with pytest.raises(UserError, match=re.escape(why)):
        parse_arguments(args)


def test_options_as_other_programs_write_them(capsys):
    usual = parse_arguments(["--checkpoint_path", "a", "--prompt", "--x-y z", "--max_new_tokens", "5"])
    for args in (
        ["a", "-p", "--x-y z", "--max-new-tokens", "5"],
        ["-p", "--x-y z", "-m", "a", "--max_new-tokens=5"],
        ["--model=a", "--prompt=--x-y z", "--max-new", "5"],
        ["--max-new-tokens", "5", "--model", "a", "--prompt", "--x-y z", "a"],
    ):
        assert vars(parse_arguments(args)) == vars(usual)
    for command in (["quantize.py", "no/model", "--mode", "int8"], ["evaluate.py", "no/model", "--text", __file__]):
        done = subprocess.run([sys.executable, ROOT / command[0], *command[1:]], capture_output=True, text=True)
        assert done.returncode == 2 and "no/model" in done.stderr, done.stderr
    with pytest.raises(SystemExit):
        parse_arguments(["--version"])
    assert re.fullmatch(rf"fastpath {re.escape(VERSION)}( [0-9a-f]{{7,}})?\n", capsys.readouterr().out)


@pytest.mark.parametrize("args, why", [
    (["--json_schema", "missing.json"], "missing.json is not a readable JSON schema"),
    (["--json_schema", "broken.json"], "broken.json is not a readable JSON schema"),
    (["--json_schema", "wrong.json"], "wrong.json: "),
    (["--prompt_file", "missing.txt"], "--prompt_file missing.txt cannot be read"),
])  # fmt: skip
def test_what_can_be_refused_before_loading_is(checkpoints, tmp_path, monkeypatch, capsys, args, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "wrong.json").write_text('{"type": 5}')
    monkeypatch.setattr(program, "load_engine", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match=re.escape(why)):
        main(capsys, monkeypatch, "--checkpoint_path", checkpoints[None], *args)
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    with pytest.raises(UserError, match="llguidance"):
        main(capsys, monkeypatch, "--checkpoint_path", checkpoints[None], "--json_schema", "broken.json")


@pytest.mark.parametrize("length", [None, 100])
def test_cache_length(tiny_model, length):
    assert choose_cache_length(length, tiny_model("llama-mha").config, 50) == (length or 256), "the model's context"
    big = Config(1, 2, 2, 4, 8, 8, 10, 100_000)
    lengths = [choose_cache_length(None, big, n) for n in (1, 512, 513, 8193, 40_000)]
    assert lengths == [512, 512, 2048, 32768, 100_000]
    assert choose_cache_length(None, big, wanted=4096) == 4096


def test_cache_lengths_of_longrope_stay_within_the_original_context():
    """Unless more is needed or given."""
    scaling = RopeScaling("longrope", original_max_seq_length=3000, factors=(2.0, 3.0), long_factors=(5.0, 7.0))
    config = Config(1, 2, 2, 4, 8, 8, 10, 100_000, rope_scaling=scaling)
    assert [choose_cache_length(None, config, n) for n in (1, 2049, 3000, 3001)] == [512, 3000, 3000, 8192]
    assert choose_cache_length(None, config, wanted=8192) == 3000 < choose_cache_length(3001, config) == 3001


@pytest.mark.parametrize("factors, positions, prompt, new, options", [
    ("short", 95, 20, 9, []), ("long", 256, 90, 7, []), ("long", 96, 20, 9, ["--max_seq_length", 96]),
    (None, 95, 20, 9, ["--quiet"]),
])  # fmt: skip
def test_a_line_says_which_factors_of_longrope_run(tiny, capsys, monkeypatch, factors, positions, prompt, new, options):
    sizes = ["--synthetic_prompt", prompt, "--max_new_tokens", new, *options]
    _, err = main(capsys, monkeypatch, "--checkpoint_path", tiny("phi3-longrope")[2], "--json", *sizes)
    line = f"longrope: the {factors} factors, because rows have {positions} positions and the original context is 95"
    assert re.findall("longrope.*", err) == [line] * (factors is not None)


@pytest.mark.parametrize("args, why", [
    (["--top_p", "-0.1"], "--top_p must be a number from 0 to 1: -0.1"),
    (["--top_k", "-1"], "--top_k must be an integer from 0 to 2147483648: -1"),
    (["--batch_size", "1" + "0" * 30, "--prompt_ids", "5"], "the model needs .* GB on cpu"),
    (["--synthetic_prompt", "1" + "0" * 30], "the prompt has 10+ tokens, the context is 256"),
    (["--device", "meta"], "--device meta cannot be used here: known are cpu"),
    (["--checkpoint_path", "~nosuchuser/x"], "~nosuchuser/x does not exist"),
    (["--temperature", "warm"], "--temperature: invalid float value: 'warm'"),
    (["--max_new_tokens", "0"], "--max_new_tokens: must be at least 1, not 0"),
    (["--seed", str(2**63)], "--seed: must be within"), (["--stop", ""], "--stop is empty"),
    (["--prompt_ids", "1,x"], "--prompt_ids: must be token ids such as 5,17,33, not '1,x'"),
    (["--device", "cuda"], "--device cuda cannot be used here"),
    (["--prompt_ids", "131"], r"token id 131 is outside the vocabulary of 131 \(0 to 130\)"),
    (["--max_seq_length", "257"], "--max_seq_length 257 is more than the model's context of 256"),
    (["--quiet", "--report"], "--report and --quiet exclude each other"),
    (["--roofline", "--report"], "--roofline generates nothing"), (["--devices", "2"], "--devices is for --roofline"),
    (["--prompt", "text"], "has no tokenizer; give --prompt_ids"),
    (["--prompt", "x", "--chat"], "has no chat template; use the model without --chat"),
    (["--checkpoint_path", ""], "the path of a model is empty"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_bad_input_is_one_line(tiny, monkeypatch, args, why):
    if not {"--checkpoint_path", "--prompt_ids", "--prompt", "--synthetic_prompt"} & set(args):
        args = [*args, "--prompt_ids", "5"]
    if "--checkpoint_path" not in args:
        args = ["--checkpoint_path", str(tiny("llama-mha")[2]), *args]
    if torch.cuda.is_available() and "cuda" in args:
        args[args.index("cuda")] = "cuda:99"
        why = "--device cuda:99 cannot be used here"
    monkeypatch.setattr(sys, "argv", ["generate.py", *args])
    with pytest.raises(UserError, match=why) as caught:
        program.main()
    assert "\n" not in str(caught.value)


def test_empty_prompt_without_a_bos_token(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny("llama-mha")[2], tmp_path / "x")
    (tmp_path / "x" / "tokenizer_config.json").write_text('{"bos_token_id": null}')
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint_path", str(tmp_path / "x"), "--prompt_ids", ""])
    with pytest.raises(UserError, match="the prompt is empty; give at least one token"):
        program.main()


@pytest.mark.slow
def test_exit_codes_and_streams(tiny, default_checkpoint):
    """Errors are one line on stderr and exit code 2; text goes to stdout, the report to stderr; pipes may close."""
    command = f"{sys.executable} {ROOT / 'generate.py'} --max_new_tokens 30 | head -c 5; exit ${{PIPESTATUS[0]}}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", command], **pipes) as piped:
        good = run("--prompt", "Once upon a time", "--max_new_tokens", 8, *GREEDY)
        assert good.returncode == 0 and good.stdout == "Once upon a time, the city of Nova Haven was a\n"
        assert re.search(r"^8 tokens, [\d.]+ tokens/s; prefill \d+ ms; \d+ MB\n$", good.stderr, re.M)
        bad = run("--checkpoint_path", "/no/place")
        assert (bad.returncode, bad.stdout) == (2, "")
        assert bad.stderr.startswith("generate.py: error: /no/place") and len(bad.stderr.splitlines()) == 1
        out, err = piped.communicate()
    assert out == "Hello" and "Traceback" not in err and piped.returncode == 141


@pytest.mark.parametrize("error, code", [
    (UserError("two\nlines"), 2), (OSError(28, "No space left on device"), 2), (MemoryError(), 2),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2), (KeyboardInterrupt(), 130),
    (ModuleNotFoundError("No module named 'drafts'", name="drafts.loading"), 2),  # an optional file, deleted
], ids=repr)  # fmt: skip
def test_exceptions_that_end_a_command_are_one_line(error, code, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        run_command(main)
    assert end.value.code == code
    assert len(capsys.readouterr().err.splitlines()) == (code == 2)


@pytest.mark.parametrize("args, line", [
    (["--prompt_ids", "5,6"], r"7 tokens, [\d.]+ tokens/s; prefill \d+ ms; "),
    (["--synthetic_prompt", 40], r"7 tokens, [\d.]+ tokens/s; prefill \d+ tokens/s; "),
    (["--prompt_ids", "5,6", "--max_new_tokens", 1], r"1 token; prefill \d+ ms; "),
    (["--prompt_ids", 5, "--prompt_ids", 6, "--num_samples", 3], r"42 tokens, [\d.]+ tokens/s; prefill \d+ ms; "),
], ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "")  # fmt: skip
def test_the_report_is_one_line_unless_all_of_it_is_asked_for(tiny, capsys, monkeypatch, args, line):
    args = ["--checkpoint_path", tiny("llama-mha")[2], "--max_new_tokens", 7, "--ignore_eos", *args]
    capsys.readouterr()  # what transformers prints when it writes the checkpoint
    _, err = main(capsys, monkeypatch, *args)
    [said] = printed_lines(err)
    assert re.fullmatch(line + r"(\d+ MB|[\d.]+ GB)", said), said
    _, err = main(capsys, monkeypatch, *args, "--report")
    assert "; prefill " not in err
    assert all(part in err for part in ("load ", "prefill: ", "threads: ", "peak memory"))


@pytest.mark.parametrize("how", [["Once upon a time"], ["Hi", "--chat"], ["One", "--prompt", "Two"]])
def test_quiet_prints_the_answers_alone_and_errors(checkpoints, capsys, monkeypatch, how):
    """Several answers are told apart."""
    args = ["--checkpoint_path", checkpoints[None], "--max_new_tokens", 8, *GREEDY, "--prompt", *how]
    texts = [sample["text"] for sample in main(capsys, monkeypatch, *args, "--json")[0]["samples"]]
    if len(texts) > 1:
        texts = [f"--- prompt {i + 1}, sample 1 ---\n{text}\n" for i, text in enumerate(texts)]
    assert main(capsys, monkeypatch, *args, "--quiet") == ("\n".join(texts) + "\n", "")
    monkeypatch.setattr(sys, "argv", [*sys.argv[:3], "--quiet", "--prompt", "x " * 9000])
    with pytest.raises(SystemExit):
        run_command(program.main)
    assert re.fullmatch(r"generate.py: error: the prompt has \d+ tokens, .*\n", capsys.readouterr().err)


def test_profile_writes_a_trace_and_no_rates(tiny, tmp_path, capsys, monkeypatch):
    args = ["--checkpoint_path", tiny("llama-mha")[2], "--prompt_ids", "5,6", "--max_new_tokens", 4, "--json"]
    result, err = main(capsys, monkeypatch, *args, "--profile", tmp_path / "trace.json")
    assert "tokens/s" not in err and re.search(r"^4 tokens; \d+ MB$|^4 tokens; [\d.]+ GB$", err, re.M)
    rates = """time_to_first_token_s prefill_tokens_per_s decode_tokens_per_s bandwidth_bytes_per_s
        read_bandwidth_bytes_per_s mean_accepted_tokens"""
    assert {name for name, value in result.items() if value is None} - {"other_programs_cpus"} == set(rates.split())
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {"aten::linear", "fastpath::linear", "fastpath::linear_packed"} & {
        str(event.get("name")) for event in trace["traceEvents"]
    }
    with pytest.raises((UserError, OSError), match="no/trace.json"):
        main(capsys, monkeypatch, *args, "--profile", tmp_path / "no" / "trace.json")


@pytest.mark.slow
def test_compiled_program(tiny, capsys, monkeypatch):
    """--compile and --compile_prefill give the tokens of an eager run. After warm-up nothing is compiled."""
    torch._dynamo.reset()
    prompts = random_prompts((4, 23))
    args = ["--checkpoint_path", tiny("llama-mha")[2], "--dtype", "float32", "--json", "--max_new_tokens", 25]
    args += [part for prompt in prompts for part in ("--prompt_ids", ids(prompt))]
    args += ["--num_samples", 2, "--top_k", 50, "--repetition_penalty", 1.1]
    eager, _ = main(capsys, monkeypatch, *args)
    compiled, err = main(capsys, monkeypatch, *args, "--compile", "--compile_prefill")
    assert compiled["samples"] == eager["samples"]
    assert compiled["recompiles"] == compiled["graph_breaks"] == 0
    assert compiled["compile_s"] > 0 == eager["compile_s"] and "compiling" in err


@pytest.mark.slow
def test_peak_memory_of_an_eager_run(default_checkpoint):
    """The peak is at most the weights, the KV cache and 600 MB."""
    done = run("--max_new_tokens", 20, "--synthetic_prompt", 400, "--json")
    result = json.loads(done.stdout)
    cache = 2 * 30 * 520 * 3 * 64 * 2
    assert result["peak_memory_bytes"] <= result["weight_bytes_per_token"] + cache + 600e6


@pytest.mark.slow
def test_default_model_equals_transformers(gguf_package):
    """transformers' model of the default GGUF file and ours with the same dequantized weights, in float32."""
    path, source = default_gguf(), open_checkpoint(dequantize=True)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    texts = ["Once upon a time", "def fibonacci(n):\n", "日本の首都は", "1, 1, 2, 3, 5, 8, 13,"]
    texts.append((ROOT / "LICENSE").read_text()[:1500])
    requests = [Request(source.tokenizer.encode(text), GREEDY_PARAMS, 12) for text in texts]
    generate(Engine(load_model(source, dtype=torch.float32), len(texts), 512), requests)
    for request in requests:
        assert request.new_tokens == hf_greedy(oracle, request.prompt, 12), request.prompt[:8]
