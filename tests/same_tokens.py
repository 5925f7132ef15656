"""Record the token ids and texts of many runs of a checkout, and compare two recordings.

    python tests/same_tokens.py record CHECKOUT OUT.json
    python tests/same_tokens.py compare A.json B.json

This is for changes that must not change any result, such as moving code: record a checkout from
before the change and one with it, on the same machine, and compare. A recording runs the programs
of the checkout as a user does, and knows nothing of its modules. It takes about eight minutes on
two cores, alone on the machine. Most models are tiny random ones (same_tokens_models.py) in a
temporary directory; only the default model is kept in CHECKOUT/checkpoints.

Some tokens depend on measured times. They are excluded: all runs have one thread, except the runs
about threads; --speculate_k auto runs only with greedy decoding in float32; a stream is compared as
a whole text and not by its pieces.

Read down: the tables of runs; how the programs are run; the two commands.
"""

import hashlib
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

try:
    from same_tokens_models import GGUF, MODELS, make_sources
except ModuleNotFoundError as error:
    sys.exit(f"same_tokens.py: error: {error.name} is missing: pip install -r requirements-dev.txt")

LIMIT_S = 300  # the longest that a program may run

# ---------------------------------------------------------------- the runs

# Checkpoints written by quantize.py: source, options
QUANTIZED = {
    "int8": ("llama-biased", "--mode int8"),
    "int8-row": ("qwen2", "--mode int8 --groupsize 0 --head none"),
    "int4": ("llama-biased", "--mode int4"),
    "int4-64": ("llama-wide", "--mode int4 --groupsize 64 --head none"),
    "int4-row": ("qwen3", "--mode int4 --groupsize 0 --head int4"),
    "int4-gptq": ("mistral", "--mode int4-gptq"),
    "int4-gptq-text": ("text", "--mode int4-gptq --calibration_file @notes.txt"),
    "int4-ranks": ("llama-ranks", "--mode int4"),
    "int4-text": ("text", "--mode int4"),
    "int4-small": ("text-small", "--mode int4"),
    "bloom-int8": ("bloom-post", "--mode int8"),
    "bloom-int4": ("bloom", "--mode int4"),
    "default-int8": ("default", "--mode int8"),
    "default-int4": ("default", "--mode int4"),
}

# The prompt LONG is longer than the windows and the contexts before scaling.
LONG = ",".join(str(3 + 29 * i % 128) for i in range(40))
WORDS = {  # the tables write these words for several options
    "F32": "--dtype float32",
    "GREEDY": "--temperature 0",
    "SAMPLED": "--temperature 0.9 --seed 7",
    "IDS": f"--prompt_ids 5,17,33,64,101 --prompt_ids 90 --prompt_ids {LONG}",
    "TEXTS": "--prompt 'the one and' --prompt 'In the end, two of three'",
    "SHORT": "--max_new_tokens 12",
    "DRAFTS": "--draft medusa --draft int4-self --draft prompt-lookup",
    "REPEAT": "--chat --prompt 'Repeat after me: one two three one two three one two'",
}

# Runs of generate.py --json: checkpoint, options (40 new tokens if they do not say otherwise)
GENERATE = {
    "default": ("default", "GREEDY SHORT"),
    "default, a batch": ("default", "GREEDY SHORT --prompt 'The sea is' --prompt 'def f(x):' --batch_size 2"),
    "default, sampled": ("default", "SHORT --seed 3 --num_samples 2 --prompt 'Once upon a time'"),
    "default, float32": ("default", "F32 GREEDY SHORT --prompt 'The sea is' --synthetic_prompt 70"),
    "default, threads chosen": ("default", "OMP_NUM_THREADS=2 F32 GREEDY"),
    "default, chat": ("default", "--chat GREEDY SHORT --prompt 'What is the capital of France?'"),
    "default, system": ("default", "--system 'You answer in rhyme.' SAMPLED SHORT --prompt 'Hello'"),
    "default, int8": ("default-int8", "GREEDY SHORT"),
    "default, int4": ("default-int4", "GREEDY SHORT --prompt 'The sea is' --threads 1"),
    "default, GGUF": ("default-gguf", "GREEDY SHORT --prompt 'The sea is'"),
    "llama": ("llama", "F32 GREEDY IDS"),
    "llama-biased": ("llama-biased", "F32 SAMPLED IDS"),
    "llama-llama3": ("llama-llama3", "F32 SAMPLED IDS"),
    "llama-yarn": ("llama-yarn", "F32 GREEDY IDS"),
    "mistral": ("mistral", "F32 SAMPLED IDS"),
    "qwen2": ("qwen2", "F32 SAMPLED IDS --max_seq_length 100"),
    "qwen3": ("qwen3", "F32 GREEDY IDS"),
    "bloom": ("bloom", "F32 SAMPLED IDS"),
    "bloom-post": ("bloom-post", "F32 SAMPLED IDS"),
    "llama, torch": ("llama-biased", "F32 SAMPLED IDS --kernels torch"),
    "llama, bfloat16": ("llama-biased", "SAMPLED IDS --batch_size 2"),
    "qwen3, float16": ("qwen3", "GREEDY IDS --dtype float16"),
    "int8": ("int8", "F32 SAMPLED IDS"),
    "int8, bfloat16": ("int8", "SAMPLED IDS"),
    "int8 by row, no head": ("int8-row", "F32 SAMPLED IDS"),
    "int4": ("int4", "F32 GREEDY IDS"),
    "int4, bfloat16": ("int4", "SAMPLED IDS --batch_size 3"),
    "int4, torch": ("int4", "F32 GREEDY IDS --kernels torch"),
    "int4, exact": ("int4", "SAMPLED IDS --exact_activations"),
    "int4 by 64, no head": ("int4-64", "F32 GREEDY IDS"),
    "int4 by row, int4 head": ("int4-row", "F32 SAMPLED IDS"),
    "int4-gptq": ("int4-gptq", "F32 SAMPLED IDS"),
    "int4-gptq from a text": ("int4-gptq-text", "F32 SAMPLED TEXTS"),
    "bloom int8": ("bloom-int8", "F32 SAMPLED IDS"),
    "bloom int4": ("bloom-int4", "SAMPLED IDS"),
    "GGUF Q4_0": ("gguf-q4_0", "F32 GREEDY TEXTS"),
    "GGUF Q8_0": ("gguf-q8_0", "SAMPLED TEXTS"),
    "GGUF mixed": ("gguf-mixed", "F32 GREEDY TEXTS"),
    "samples and copies": ("llama", "F32 SAMPLED IDS --num_samples 2 --batch_size 3 --top_k 9"),
    "top_p and min_p": ("qwen3", "F32 SAMPLED IDS --top_p 0.8 --min_p 0.02 --top_k 0"),
    "penalties": ("bloom", "F32 SAMPLED IDS --repetition_penalty 1.3 --frequency_penalty 0.4 --presence_penalty 0.3"),
    "prompts of a file": ("text", "F32 GREEDY --prompt_file @prompts.txt"),
    "stop strings": ("text", "F32 SAMPLED TEXTS --batch_size 4 --stop e --stop t"),
    "EOS ignored": ("text", "F32 --temperature 1.5 --top_k 0 TEXTS --batch_size 4 --ignore_eos --max_new_tokens 150"),
    "EOS": ("text", "F32 --temperature 1.5 --top_k 0 TEXTS --batch_size 4 --max_new_tokens 150"),
    "template": ("text", "F32 SAMPLED TEXTS --system 'one two'"),
    "compiled": ("text-small", "F32 SAMPLED --prompt 'the one' --compile"),
    "compiled, int4": ("int4-small", "SAMPLED --prompt 'the one' --compile --compile_prefill"),
    "lookup": ("mistral", "F32 IDS --temperature 0.4 --draft prompt-lookup --speculate_k 3"),
    "lookup, int4": ("int4", "F32 GREEDY IDS --max_new_tokens 150 --draft prompt-lookup --speculate_k 7"),
    "lookup, auto": ("default", "F32 GREEDY REPEAT --draft prompt-lookup"),
    "lookup in a file": ("text", "F32 GREEDY TEXTS --draft lookup:@notes.txt --speculate_k 4"),
    "int4-self": ("llama-llama3", "F32 SAMPLED IDS --draft int4-self --speculate_k 3"),
    "int4-self of int8": ("int8", "F32 GREEDY IDS --draft int4-self --speculate_k 5"),
    "medusa": ("default", "GREEDY SHORT --chat --draft medusa --speculate_k 3"),
    "medusa, sampled": ("default", "F32 SAMPLED SHORT --draft medusa --speculate_k 2 --batch_size 2"),
    "all drafts": ("default", "F32 GREEDY REPEAT DRAFTS --speculate_k 3"),
    "longrope, short rows": ("text-longrope", "F32 GREEDY IDS"),
    "longrope, long rows": ("text-longrope", "F32 GREEDY --synthetic_prompt 181 --synthetic_prompt 159"),
    "longrope, lookup": ("text-longrope", "F32 GREEDY --synthetic_prompt 181 --draft prompt-lookup --speculate_k 5"),
    "longrope, draft model": (
        "text-longrope",
        "F32 GREEDY --synthetic_prompt 181 --draft_checkpoint_path @text-longrope --speculate_k 3",
    ),
    "longrope, int4-self": ("text-longrope", "F32 SAMPLED IDS --draft int4-self --speculate_k 4"),
    "draft model": ("text", "F32 SAMPLED TEXTS --draft_checkpoint_path @int4-text --speculate_k 4"),
    "draft model, auto": ("qwen2", "F32 GREEDY IDS --draft_checkpoint_path @int8-row"),
}

# Runs under torchrun: ranks, checkpoint, options
RANKED = {
    "2 ranks": (2, "llama", "F32 GREEDY IDS"),
    "2 ranks, int4": (2, "int4-ranks", "F32 SAMPLED IDS --kernels torch"),
    "2 ranks, bloom": (2, "bloom", "F32 SAMPLED IDS --top_p 0.9"),
    "2 ranks, lookup": (2, "qwen3", "F32 GREEDY IDS --draft prompt-lookup --speculate_k 3"),
    "3 ranks": (3, "llama-ranks", "F32 SAMPLED IDS --batch_size 2"),
    "3 ranks, int4": (3, "int4-ranks", "F32 GREEDY IDS"),
    "3 ranks, draft model": (3, "bloom", "F32 SAMPLED IDS --draft_checkpoint_path @bloom --speculate_k 3"),
}

# Runs of generate.py without --json, whose output is text: checkpoint, options, lines of input
PRINTED = {
    "one prompt, streamed": ("default", "GREEDY SHORT --prompt 'It was'", []),
    "several prompts": ("text", "F32 SAMPLED TEXTS --num_samples 2 --synthetic_prompt 9", []),
    "conversation": ("default", "--interactive GREEDY SHORT", ["My name is Ada. Who are you?", "What is my name?"]),
    "commands": ("text", "--interactive F32 SAMPLED", ["one two", "/system In the end", "and three", "/reset", "one"]),
}

# Servers: checkpoint, options of serve.py. Each gets all requests of the next table, and then
# several at once.
SERVERS = {
    "server": ("text", "F32 --max_batch_size 3 --prefill_chunk 16"),
    "server, longrope": ("text-longrope", "F32 --max_batch_size 2"),
    "server, int4, lookup": ("int4-text", "F32 --max_batch_size 4 --draft prompt-lookup --speculate_k 3"),
}
MESSAGES = {"messages": [{"role": "system", "content": "one two"}, {"role": "user", "content": "In the end, three"}]}
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXT = {"prompt": "the one and", "max_tokens": 30}
REQUESTS = {
    "completion": (COMPLETION, TEXT | {"temperature": 0}),
    "streamed": (COMPLETION, TEXT | {"temperature": 0.9, "seed": 4, "stream": True}),
    "prompts": (COMPLETION, TEXT | {"prompt": ["one", "the end of the " * 9, "two"], "seed": 5, "top_p": 0.9}),
    "token ids": (COMPLETION, TEXT | {"prompt": [5, 17, 233, 101], "temperature": 0, "ignore_eos": True}),
    "logprobs": (COMPLETION, TEXT | {"temperature": 0, "logprobs": 3, "echo": True}),
    "penalties": (COMPLETION, TEXT | {"seed": 6, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.2}),
    "stop": (COMPLETION, TEXT | {"seed": 7, "stop": ["e", " t"], "min_p": 0.01}),
    "chat": (CHAT, MESSAGES | {"temperature": 0, "max_tokens": 30}),
    "chat, logprobs": (CHAT, MESSAGES | {"seed": 8, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}),
    "chat, streamed": (CHAT, MESSAGES | {"seed": 9, "max_tokens": 30, "stream": True, "temperature": 0.8}),
}
AT_ONCE = 10  # requests, each with its own seed and length

# ---------------------------------------------------------------- running the programs


@dataclass
class Checkout:
    """The programs of a checkout, with the directory of their checkpoints."""

    path: Path
    work: Path

    def command(self, program: str, checkpoint: str, options: str) -> list[str]:
        """The words of a command, without those of the form NAME=VALUE."""
        words = shlex.split(" ".join(WORDS.get(word, word) for word in options.split()))
        words = [word for word in words if not re.match("[A-Z_]+=", word)]
        if checkpoint != "default":
            words = ["--checkpoint_path", f"@{checkpoint}", *words]
        words = [str(self.path / program), *words]
        return [re.sub(r"(^|:)@", rf"\1{self.work}/", word) for word in words]

    def environment(self, options: str) -> dict[str, str]:
        settings = [word.split("=") for word in options.split() if re.match("[A-Z_]+=", word)]
        return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(settings)

    def run(self, command: list[str], options: str = "", ranks: int = 1, text: str = "") -> subprocess.CompletedProcess:
        """Run a program to its end. RuntimeError with the last line of its messages if it fails."""
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        how = {"env": self.environment(options), "cwd": self.path, "timeout": LIMIT_S, "text": True}
        done = subprocess.run([*launcher, *command], input=text, capture_output=True, **how)
        if done.returncode:
            message = done.stderr.strip() or "no message"
            raise RuntimeError(f"exit code {done.returncode}: {message.splitlines()[-1]}")
        return done


def write_checkpoint(checkout: Checkout, command: list[str], name: str) -> dict:
    """Run a command that writes a checkpoint directory, and return a digest of its tensors."""
    out = checkout.work / name
    checkout.run([*command, "--out", str(out)])
    digest = hashlib.sha256()
    with safe_open(out / "model.safetensors", "pt") as file:
        for key in sorted(file.keys()):
            tensor = file.get_tensor(key).contiguous()
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return {"tensors": digest.hexdigest()}


def generate(checkout: Checkout, checkpoint: str, options: str, ranks: int = 1) -> dict:
    """The samples of a run of generate.py.

    With a fixed number of proposed tokens, the result also says how many were accepted.
    """
    command = checkout.command("generate.py", checkpoint, f"--json --max_new_tokens 40 {options}")
    result = json.loads(checkout.run(command, options, ranks).stdout)
    found = {"samples": result["samples"]}
    if re.search(r"--speculate_k \d", options):
        found["accepted"] = result["mean_accepted_tokens"]
    return found


def read_output(checkout: Checkout, checkpoint: str, options: str, lines: list[str]) -> dict:
    """The output of a run, and how many tokens each turn of a conversation read and reused."""
    command = checkout.command("generate.py", checkpoint, f"--max_new_tokens 40 {options}")
    done = checkout.run(command, options, text="\n".join(lines) + "\n")
    return {"output": done.stdout, "turns": re.findall(r"\d+ read, \d+ reused", done.stderr)}


@contextmanager
def server(checkout: Checkout, checkpoint: str, options: str):
    """Run serve.py until the end of the block. Yields its port."""
    command = [sys.executable, *checkout.command("serve.py", checkpoint, f"--port 0 {options}")]
    log = checkout.work / "serve.log"
    how = {"env": checkout.environment(options), "cwd": checkout.path}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **how)

    try:
        end = time.monotonic() + LIMIT_S
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server does not start: {log.read_text()[-200:]}")
            time.sleep(0.1)
        yield int(found[1])
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(port: int, path: str, body: dict) -> dict:
    """The answer to a request.

    The events of a stream are put together, because their number depends on the time.
    """
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        status = response.status
        text = response.read().decode()

    if not body.get("stream"):
        answer = json.loads(text)
        return {"status": status} | {key: answer[key] for key in answer.keys() - {"id", "created"}}
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    reason = choices[-1]["finish_reason"]
    return {"status": status, "text": "".join(pieces), "finish_reason": reason}


def at_once(port: int) -> list[str]:
    """The texts of many requests that are sent at the same time."""

    def send(i: int) -> str:
        body = {"prompt": "the end " * i + "of", "seed": i, "max_tokens": 10 + 7 * i}
        answer = ask(port, COMPLETION, body | {"stream": i % 2 == 1})
        return answer["text"] if "text" in answer else answer["choices"][0]["text"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(send, range(AT_ONCE)))


def serve(checkout: Checkout, checkpoint: str, options: str) -> dict:
    """The answers of a server to all requests of the table in turn, and then to many at once."""
    with server(checkout, checkpoint, options) as port:
        answers = {name: ask(port, path, body) for name, (path, body) in REQUESTS.items()}
        return answers | {"at once": at_once(port)}


# ---------------------------------------------------------------- the commands


def all_runs(checkout: Checkout):
    """For every run, its name and a function that runs it and returns its results."""
    convert = str(checkout.path / "convert_hf_checkpoint.py")
    for name in MODELS:
        command = [convert, str(checkout.work / f"hf-{name}"), "--dtype=float32"]
        yield f"checkpoint {name}", partial(write_checkpoint, checkout, command, name)
    for name, (source, options) in QUANTIZED.items():
        command = checkout.command("quantize.py", source, options)
        yield f"checkpoint {name}", partial(write_checkpoint, checkout, command, name)
    files = {name: checkout.work / f"{name}.gguf" for name in GGUF}
    # The default model has been downloaded by now.
    files["default-gguf"] = checkout.path / "checkpoints" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    for name, file in files.items():
        command = [convert, str(file), "--keep_quantized"]
        yield f"checkpoint {name}", partial(write_checkpoint, checkout, command, name)

    for name, (checkpoint, options) in GENERATE.items():
        yield name, partial(generate, checkout, checkpoint, options)
    for name, (ranks, checkpoint, options) in RANKED.items():
        yield name, partial(generate, checkout, checkpoint, options, ranks)
    for name, arguments in PRINTED.items():
        yield name, partial(read_output, checkout, *arguments)
    for name, arguments in SERVERS.items():
        yield name, partial(serve, checkout, *arguments)


ERRORS = (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError, LookupError)


def record(path: Path, out: Path) -> int:
    """Record all runs of a checkout, and return the number of runs that failed.

    A run that failed is recorded with its error.
    """
    results = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(path.resolve(), Path(folder).resolve())
        make_sources(checkout.work)
        for name, run in all_runs(checkout):
            start = time.monotonic()
            try:
                results[name] = run()
            except ERRORS as error:
                failed += 1
                results[name] = {"error": f"{type(error).__name__}: {error}".replace(folder, "@")}
            outcome = results[name].get("error", "recorded")
            print(f"{name}: {outcome} ({time.monotonic() - start:.1f} s)", file=sys.stderr)

    lines = []
    for name, result in results.items():
        lines.append(f"{json.dumps(name)}: {json.dumps(result, sort_keys=True)}")
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(results)} runs recorded, {failed} of them failed")
    return failed


def differences(a, b, place: str = ""):
    """A line for each place where two results differ."""
    if type(a) is not type(b) or not isinstance(a, (dict, list)):
        if a != b:
            yield f"{place}: {a!r:.60} and {b!r:.60}"
        return
    if isinstance(a, list):
        if len(a) != len(b):
            yield f"{place}: {len(a)} entries, {len(b)} entries"
        for i, (one, other) in enumerate(zip(a, b)):
            yield from differences(one, other, f"{place}[{i}]")
        return
    for key in sorted(a.keys() | b.keys()):
        yield from differences(a.get(key), b.get(key), f"{place}[{key!r}]")


def compare(first: Path, second: Path) -> int:
    """Print the runs that differ between two recordings, and return their number."""
    a = json.loads(first.read_text())
    b = json.loads(second.read_text())
    differing = [name for name in a | b if a.get(name) != b.get(name)]
    for name in differing:
        if name not in a or name not in b:
            path = first if name in a else second
            print(f"{name}: only in {path}")
            continue
        found = list(differences(a[name], b[name]))
        print(f"{name}: {len(found)} differences, at first", *found[:2], sep="\n    ")
    print(f"{len(a | b) - len(differing)} runs are equal, {len(differing)} differ")
    return len(differing)


def main():
    commands = {"record": record, "compare": compare}
    if len(sys.argv) != 4 or sys.argv[1] not in commands:
        usage = "same_tokens.py record CHECKOUT OUT.json, or same_tokens.py compare A.json B.json"
        sys.exit(f"usage: {usage}")
    failed = commands[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
