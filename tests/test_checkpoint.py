"""Checkpoint directories: reading, writing, what is refused, and how much memory loading takes."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

import checkpoint
from checkpoint import ShardFile, Writer, empty_model, read_config
from cli import UserError
from config import Config
from costs import available_memory, check_memory, total_weight_bytes
from load import check_fits, load_model
from options import ModelOptions

SMALL = Config(1, 1, 1, 2, 2, 2, 2, 2)


@pytest.fixture
def ours(tiny, tmp_path):
    """A copy of a checkpoint directory, for tests that damage it."""
    shutil.copytree(tiny("llama-llama3")[2], tmp_path / "ours")
    return tmp_path / "ours"


def write(folder, value=1.0):
    """A checkpoint of one tensor."""
    with Writer(folder) as writer:
        writer.add_config(SMALL)
        writer.add("x", torch.full((1,), value))


def edit(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_config_round_trip(tiny):
    for name in ("llama-llama3", "qwen2-sliding", "llama-yarn-mscale", "mistral-window"):
        directory = tiny(name)[2]
        config = read_config(directory)
        assert isinstance(hash(config), int), "tuples, not lists"
        assert json.loads((directory / "config.json").read_text())["quantization"] is None
        with Writer(directory.parent / "again") as writer:
            writer.add_config(config)
            writer.add("x", torch.zeros(1))
        assert read_config(directory.parent / "again") == config


@pytest.mark.parametrize("fields, why", [
    ({"n_heads": 3}, "n_heads"), ({"quantization": {"mode": "int4"}}, "missing 2 required"),
    ({"quantization": {"mode": "int4", "groupsize": 32, "head": "none"}}, "holds tensor blocks.0"),
    ({"rope_scaling": {"kind": "linear", "speed": 3}}, "speed"),
    ({"dim": 47}, r"is \(.*48.*\), but by its config it should be \(.*47.*\)"),
    ({"n_layer": 4}, "lacks tensor blocks.3.attention_norm.weight and 5 more"),
    ({"n_layer": 2}, "ours holds tensor blocks.2.attention.out.weight .48, 48., which the model does not have"),
    ({"n_kv_head": 3}, "n_head 4 is not a multiple of n_kv_head 3"),
], ids=str)  # fmt: skip
def test_config_and_weights_that_do_not_fit(ours, fields, why):
    edit(ours, **fields)
    with pytest.raises(UserError, match=why):
        load_model(ours)


@pytest.mark.parametrize("text, why", [("{", "cannot be read as"), ("[1]", "holds list"), ("{}", "not the config of")])
def test_config_that_is_not_one(ours, text, why):
    (ours / "config.json").write_text(text)
    with pytest.raises(UserError, match=why):
        read_config(ours)
    (ours / "config.json").unlink()
    with pytest.raises(UserError, match="ours has no config.json"):
        read_config(ours)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_no_file_of_a_checkpoint(ours, name):
    """Reading it would wait for its writer."""
    (ours / name).unlink()
    os.mkfifo(ours / name)
    with pytest.raises(UserError, match=f"{name} is not a regular file"):
        load_model(ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loads_in_the_dtype_asked_for(ours, dtype):
    model, stored = load_model(ours, dtype=dtype, kernels="torch"), load_file(ours / "model.safetensors")
    assert all(torch.equal(weight, stored[name].to(dtype)) for name, weight in model.state_dict().items())
    assert not any(weight.requires_grad for weight in model.parameters())


def test_memory_is_refused_before_loading_with_both_numbers(monkeypatch):
    config = Config(40, 64, 8, 128, 8192, 28672, 128256, 131072)
    monkeypatch.setattr("costs.available_memory", lambda device: 30_000_000_000)
    with pytest.raises(UserError, match=r"needs 7\d\.\d\d GB .*7\d.\d\d weights, 0.17 KV cache.* 30.00 GB are free"):
        model = empty_model(config)
        caches = model.cache_bytes(1, 1016, torch.bfloat16)
        check_memory(total_weight_bytes(model, torch.bfloat16), caches, "cpu")
    check_fits(model, ModelOptions(), "cpu", 10**11, portion=0.1)
    check_memory(10**6, 10**6, "cpu")
    with pytest.raises(UserError, match="KV cache"):
        check_memory(10**6, 10**14, "cpu")


def test_available_memory(tmp_path, monkeypatch):
    """What is free, or what the limit of the cgroup leaves, where the page cache counts as used."""
    assert 10**8 < available_memory("cpu") < 10**14
    monkeypatch.setattr("costs.Path", lambda path: tmp_path / path.replace("/", "_"))
    (tmp_path / "_proc_meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 9 kB\n")
    assert available_memory("cpu") == 9 * 1024
    group = tmp_path / "_sys_fs_cgroup"
    group.mkdir()
    for name, text in (("current", "7000"), ("stat", "anon 1\nactive_file 300\ninactive_file 20")):
        (group / f"memory.{name}").write_text(text)
    for limit, expected in (("max", 9216), ("8000", 1320), ("90000", 9216)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert available_memory("cpu") == expected


@pytest.mark.slow
def test_loading_holds_little_besides_the_weights(tmp_path):
    """Float32 weights of 300 MB are loaded as bfloat16. The peak is these 150 MB, plus one tensor and the libraries."""
    config = Config(1, 8, 8, 64, 512, 2_000, 128_000, 64)
    with Writer(tmp_path / "big") as writer:
        writer.add_config(config)
        for name, tensor in checkpoint.empty_model(config).state_dict().items():
            writer.add(name, torch.zeros(tensor.shape))
    code = """if True:
        import sys, torch
        from load import load_model
        from report import peak_memory
        before = peak_memory(torch.device("cpu"))
        model = load_model(sys.argv[1], dtype=torch.bfloat16)
        weights = sum(w.nbytes for w in model.state_dict().values())
        print(peak_memory(torch.device("cpu")) - before, weights)"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "big")], capture_output=True, text=True, cwd=ROOT)
    grown, weights = map(int, done.stdout.split())
    largest = 128_000 * 512 * 4
    assert weights < grown < weights + 2 * largest + 60e6


def test_writer_leaves_nothing_after_an_error(tmp_path, monkeypatch):
    class Full(ShardFile):
        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ZeroDivisionError), Writer(tmp_path / "out") as writer:
        writer.add("x", torch.zeros(3))
        raise ZeroDivisionError
    monkeypatch.setattr("checkpoint.ShardFile", Full)
    why = "cannot write .*No space left on device; nothing was left"
    with pytest.raises(UserError, match=why), Writer(tmp_path / "out") as writer:
        writer.add("x", torch.zeros(3))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot write to /proc"), Writer("/proc/nowhere/out"):
        pass


def test_shards_are_plain_safetensors_files(tmp_path, monkeypatch):
    tensors = {f"t{i}": torch.randn(i % 7, 3).to(dtype) for i, dtype in enumerate([*checkpoint.FLOATS] * 9)}
    tensors |= {"bytes": torch.arange(7, dtype=torch.uint8), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 5)}
    tensors |= {"turned": torch.randn(5, 6).t(), "signed": torch.tensor([[-3, 127]], dtype=torch.int8)}
    for most in (ShardFile.MAX_TENSORS, 6):
        monkeypatch.setattr(ShardFile, "MAX_TENSORS", most)
        with Writer(tmp_path / "out") as writer:
            writer.add_config(SMALL)
            for name, tensor in tensors.items():
                writer.add(name, tensor)
        files = list((tmp_path / "out").glob("*.safetensors"))
        found = {name: tensor for path in files for name, tensor in load_file(path).items()}
        assert found.keys() == tensors.keys() and len(files) == (1 if most > 6 else 6)
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


@pytest.mark.slow
def test_writer_replaces_only_checkpoints(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    for name in ("file", "hf"):
        with pytest.raises(UserError, match="is not a checkpoint directory"), Writer(tmp_path / name):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf"]


def test_a_checkpoint_that_was_moved_out_of_the_way_comes_back(tmp_path, monkeypatch):
    """The writer is interrupted between its two renames, by an exception or by the end of the process."""

    def there():
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        return load_file(tmp_path / "out" / "model.safetensors")["x"].item()

    write(tmp_path / "out", 1.0)
    rename = Path.rename

    def interrupted(path, target):
        if Path(target).name == "out" and not Path(target).exists() and ".old." not in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "out", 2.0)
    assert there() == 1
    (tmp_path / "out").rename(tmp_path / ".out.old.0123.tmp")  # as a killed writer leaves it
    monkeypatch.setattr("checkpoint.ABANDONED_S", 0.0)
    with pytest.raises(ZeroDivisionError), Writer(tmp_path / "out"):
        raise ZeroDivisionError
    assert there() == 1


def test_writers_leave_each_other_alone(tmp_path, monkeypatch):
    """Also one whose directory has not changed for an hour, if a file in it has."""
    file = tmp_path / ".out.dead.tmp" / "shard-1"
    file.parent.mkdir()
    file.touch()
    time.sleep(0.05)
    file.touch()
    now = sum(path.stat().st_ctime for path in (file, file.parent)) / 2 + checkpoint.ABANDONED_S
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(time=lambda: now))
    with Writer(tmp_path / "out") as early:
        with Writer(tmp_path / "out") as late:
            for writer, value in ((late, 2.0), (early, 1.0)):
                writer.add_config(SMALL)
                writer.add("x", torch.full((1,), value))
            assert early.path != late.path and early.path.exists()
        assert load_file(tmp_path / "out" / "model.safetensors")["x"].item() == 2
    assert load_file(tmp_path / "out" / "model.safetensors")["x"].item() == 1
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.dead.tmp"}


def test_targets_behind_a_dot_or_a_link(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    for name in (".", "../link"):
        write(Path(name))
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").exists()
        monkeypatch.chdir(tmp_path / "real")
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(ours, value):
    state = load_file(ours / "model.safetensors")
    state["blocks.1.mlp.down.weight"][3, 5] = value
    save_file(state, ours / "model.safetensors")
    with pytest.raises(UserError, match=r"blocks\.1\.mlp\.down\.weight holds NaN or infinity"):
        load_model(ours)
