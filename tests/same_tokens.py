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

# Seven tables, each of names of runs, and what to run:
# QUANTIZED: checkpoints written by quantize.py: source, options
# WORDS: what the tables write for several options; its prompt of 40 ids is longer than the windows
# GENERATE: runs of generate.py --json: checkpoint, options (40 new tokens if they do not say otherwise)
# RANKED: runs under torchrun: ranks, checkpoint, options
# PRINTED: runs of generate.py without --json, whose output is text: checkpoint, options, lines of input
# SERVERS: checkpoint, options of serve.py; each gets all REQUESTS (path, body), and then several at once
TABLES = json.loads((Path(__file__).parent / "data" / "same_tokens.json").read_text())
QUANTIZED, WORDS, GENERATE, RANKED, PRINTED, SERVERS, REQUESTS = TABLES.values()
COMPLETION = "/v1/completions"
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
