"""Tensor parallelism on gloo: every split equals the single process, and all processes of torchrun end together.

All splits run in one launch of four processes (tp_worker.py). Two, three or four of them share each model.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cases import random_blocks, read_model, write_random
from conftest import ROOT, VOCABULARY
from tp_worker import PROMPTS, outcome

from checkpoint import Writer, empty_model, open_directory
from cli import UserError
from config import MAX_NUMBER, Config, DeltaNet, Experts, RopeScaling, ShortConv
from drafts.loading import Drafts
from engine import SingleProcess
from formats import FORMATS, Quantization, QuantizedLinear, quantize_model
from load import Loader, load_model
from options import ModelOptions
from quantize import quantize_checkpoint
from tp import TIMEOUT_S, Shard, check

LOGITS = 1e-4  # float32 sums in another order, for logits of the order of 1 to 10
LAUNCH_S = 60  # to start and end a few ranks on a busy machine
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

# Sizes are pairwise different within a model as far as the splits allow.
LLAMA = {"n_layer": 2, "vocab_size": VOCABULARY, "max_seq_length": 256}
QWEN2 = LLAMA | {"qkv_bias": True}
QWEN3 = LLAMA | {"qk_norm": True}
SMOLLM3 = LLAMA | {"layers_without_rope": (1,)}
WINDOW = LLAMA | {"sliding_window": 7}
GEMMA3 = WINDOW | {"norm_placement": "both", "mlp": "geglu", "qk_norm": True, "sliding_layers": (0,)}
GEMMA3 |= {"sliding_rope_base": 3e3, "embedding_scale": 6.5, "attention_scale": 0.3, "float32_norms": True}
SMALL = GEMMA3 | {"n_layer": 5, "sliding_layers": (1, 2), "value_norm": True, "layer_scale": True}
SMALL |= {"shared_kv_layers": 3, "shared_kv_hidden_dim": 134, "per_layer_dim": 22}  # Gemma 4's E2B
GEMMA4 = GEMMA3 | {"n_layer": 3, "sliding_layers": (0, 2), "full_head_dim": 32, "full_keys_as_values": True}
GEMMA4 |= {"full_kv_head": 1, "rope_scaling": RopeScaling("factors", factors=(1.0,) * 5 + (MAX_NUMBER,) * 11)}
GEMMA4 |= {"value_norm": True, "layer_scale": True, "attention_scale": 1.0, "logits_softcap": 7.0}
OLMO2 = LLAMA | {"norm_placement": "after", "qk_norm": True, "qk_norm_whole": True}
GRANITE = LLAMA | {"residual_scale": 0.3, "logits_scale": 0.7, "embedding_scale": 2.0, "attention_scale": 0.2}
LONGROPE = RopeScaling("longrope", original_max_seq_length=15, factors=(1.5,) * 5, long_factors=(3.0,) * 5)
PHI3 = LLAMA | {"rotary_dim": 10, "rope_scaling": LONGROPE}
MINISTRAL3 = LLAMA | {"rope_scaling": RopeScaling("yarn", 4.0, 7), "query_scale_beta": 0.8}
QWEN35 = LLAMA | {"attention_gate": True, "qk_norm": True, "float32_norms": True, "rotary_dim": 8}
QWEN35_2 = QWEN35 | {"mtp": True, "delta_net": DeltaNet((1,), n_key_head=4, n_value_head=12, key_dim=10, value_dim=16)}
QWEN35_3 = QWEN35 | {"mtp": True, "n_layer": 3}
QWEN35_3 |= {"delta_net": DeltaNet((0, 2), n_key_head=6, n_value_head=6, key_dim=9, value_dim=11)}
LFM2_2 = QWEN3 | {"n_layer": 3, "short_conv": ShortConv((0, 2), 64, conv_width=4)}
LFM2_3 = QWEN3 | {"short_conv": ShortConv((1,), 51, bias=True)}
SPARSE_2 = QWEN3 | {"n_layer": 3, "experts": Experts((0, 2), 5, 2, hidden_dim=96, shared_dim=64)}
SPARSE_3 = QWEN35_3 | {"experts": Experts((0, 1), 7, 3, hidden_dim=41, normalized=False, shared_dim=29)}
SIGMOID = Experts((1, 2), 5, 3, hidden_dim=44, scoring="sigmoid", choice_bias=True, scale=1.7)
LFM2_MOE = LFM2_2 | {"experts": SIGMOID}
GEMMA4_MOE = GEMMA3 | {"value_norm": True, "layer_scale": True}
GEMMA4_MOE |= {"experts": Experts((0, 1), 5, 3, hidden_dim=37, expert_scales=True, beside_mlp=True)}
NANOCHAT = QWEN3 | {"mlp": "relu2", "embedding_norm": True, "logits_softcap": 9.0}
SPARSE_1 = LLAMA | {"n_layer": 1, "experts": Experts((0,), 3, 2, hidden_dim=512, shared_dim=768)}
STACKS = {"blocks.0.experts.gate_up": "q4_k+q5_k", "blocks.0.experts.shared.gate_up": "q6_k+none"}
STACKS |= {"blocks.0.attention.out": "none", "blocks.0.experts.down": "q6_k"}
BLOOM = LLAMA | {"norm": "layer", "mlp": "gelu", "alibi": True, "embedding_norm": True, "n_token": 95}
BLOOM |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
POST_NORM = BLOOM | {"post_norm_residual": True}

# name: (ranks, family, H, K, E, D, F, tied, quantization or None, kernels, compiled)
# Pairwise over ranks, family, format, tied or not, how K goes into the ranks, kernels, compiled or not.
CASES = {
    "2 llama, MHA": (2, LLAMA, 6, 6, 10, 44, 57, False, None, "auto", False),
    "2 qwen2, K copied, int8": (2, QWEN2, 6, 3, 32, 52, 128, True, ("int8", 32, "int8"), "torch", False),
    "2 qwen2, iq4_nl": (2, QWEN2, 6, 3, 32, 54, 150, False, ("iq4_nl", 32, "iq4_nl"), "auto", False),
    "2 bloom, int4 in whole rows": (2, BLOOM, 10, 10, 6, 50, 84, True, ("int4", 0, "int4"), "auto", False),
    "2 qwen3, K on both, compiled": (2, QWEN3 | {"n_layer": 1}, 4, 1, 14, 38, 46, False, None, "auto", True),
    "3 llama, K split, int4": (3, LLAMA, 9, 3, 32, 46, 160, True, ("int4", 32, "int8"), "auto", False),
    "3 qwen3, K copied": (3, QWEN3, 6, 2, 12, 40, 54, False, None, "torch", False),
    "3 bloom, residuals after the norm": (3, POST_NORM, 9, 9, 5, 55, 66, False, None, "auto", False),
    "3 window, K on all, int8 in whole rows": (3, WINDOW, 3, 1, 20, 42, 69, False, ("int8", 0, "int8"), "auto", False),
    "3 smollm3, K split": (3, SMOLLM3, 6, 3, 18, 48, 72, True, None, "auto", False),
    "4 llama, K on two each, int8": (4, LLAMA, 8, 2, 16, 56, 230, False, ("int8", 32, "int8"), "auto", False),
    "4 qwen2, K split, int4": (4, QWEN2, 12, 4, 64, 70, 256, True, ("int4", 64, "int4"), "auto", False),
    "2 gemma3, K on both": (2, GEMMA3, 4, 1, 18, 42, 58, False, None, "auto", False),
    "2 gemma4 E2B, int8": (2, SMALL, 4, 2, 18, 46, 58, True, ("int8", 0, "int8"), "auto", False),
    "3 gemma4 E2B, K copied": (3, SMALL, 6, 2, 16, 50, 62, True, None, "torch", False),
    "2 gemma4, K split or on both, int4": (2, GEMMA4, 4, 2, 16, 54, 96, True, ("int4", 32, "int8"), "auto", False),
    "3 gemma4, K split or copied": (3, GEMMA4 | {"full_kv_head": 2}, 6, 3, 14, 42, 58, False, None, "auto", False),
    "3 olmo2, K copied, int8": (3, OLMO2, 6, 2, 14, 62, 99, False, ("int8", 0, "int8"), "auto", False),
    "2 olmo2, K split": (2, OLMO2, 4, 2, 16, 34, 70, False, None, "torch", False),
    "3 granite": (3, GRANITE, 3, 3, 8, 30, 52, False, None, "auto", False),
    "2 phi3, beyond its context": (2, PHI3, 2, 2, 16, 32, 60, False, None, "auto", False),
    "2 ministral3, K on both, int4": (2, MINISTRAL3, 4, 1, 16, 46, 64, True, ("int4", 32, "int8"), "auto", False),
    "2 qwen35, int4": (2, QWEN35_2, 4, 2, 16, 52, 64, True, ("int4", 32, "int8"), "auto", False),
    "3 qwen35, K split": (3, QWEN35_3, 6, 3, 12, 50, 63, False, None, "torch", False),
    "2 lfm2, int4": (2, LFM2_2, 4, 2, 16, 64, 96, True, ("int4", 32, "int8"), "auto", False),
    "3 lfm2, K copied, biased": (3, LFM2_3, 6, 2, 14, 51, 58, False, None, "torch", False),
    "2 lfm2 with experts": (2, LFM2_MOE, 4, 2, 14, 64, 58, True, None, "auto", False),
    "3 nanochat, K split": (3, NANOCHAT, 6, 3, 12, 38, 47, False, None, "auto", False),
    "2 experts, some layers dense": (2, SPARSE_2, 4, 2, 16, 48, 160, True, ("int4", 32, "int8"), "torch", False),
    "2 experts, q4_k": (2, SPARSE_1, 2, 2, 16, 256, 70, False, ("q4_k", 256, "none", STACKS), "torch", False),
    "3 qwen35 with experts": (3, SPARSE_3, 6, 3, 12, 50, 63, False, None, "auto", False),
    "2 gemma4 with experts": (2, GEMMA4_MOE, 4, 2, 18, 46, 59, True, None, "auto", False),
    "4 bloom, int8": (4, BLOOM, 8, 8, 16, 64, 128, True, ("int8", 32, "none"), "torch", False),
}  # fmt: skip

WITH_DRAFT = ("2 llama, MHA", "3 qwen3, K copied", "4 qwen2, K split, int4")  # one draft is the model itself


def make(folder: Path, case) -> Path:
    """The checkpoint of a case, with random weights."""
    _, family, H, K, E, D, F, tied, quantization, *_ = case
    config = Config(n_head=H, n_kv_head=K, head_dim=E, dim=D, hidden_dim=F, tied_embeddings=tied, **family)
    if quantization and FORMATS[quantization[0]].quantize is None:
        return make_of_blocks(folder / "quantized", config, Quantization(*quantization))
    scales = (0.1, 2.5) if config.alibi else (0.3, 1.2)  # so that the text does not repeat itself
    write_random(folder / "whole", config, H * 1000 + D, scales)
    if quantization is None:
        return folder / "whole"
    quantize_checkpoint(folder / "whole", folder / "quantized", Quantization(*quantization))
    return folder / "quantized"


def make_of_blocks(folder: Path, config: Config, quantization: Quantization) -> Path:
    """A checkpoint whose quantized matrices are random blocks of GGUF's formats."""
    model = empty_model(config, quantization)
    chance = torch.Generator().manual_seed(1)
    with Writer(folder) as writer:
        for name, tensor in model.state_dict().items():
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, QuantizedLinear):
                blocks = random_blocks(module.stored_as, len(tensor), module.in_features, len(name), 0.001)
                writer.add(name, blocks["blocks"])
            else:
                weight = torch.randn(tensor.shape, generator=chance)
                writer.add(name, weight + 3 if tensor.dim() == 1 else weight * tensor.shape[1] ** -0.5)
        writer.add_config(config, quantization)
        writer.add_json("tokenizer_config.json", {"bos_token_id": 1})
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """name -> (the results of the ranks, the checkpoint of the case)."""
    folder = tmp_path_factory.mktemp("tp")
    cases = {}
    for i, (name, case) in enumerate(CASES.items()):
        (folder / str(i)).mkdir()
        cases[name] = {"ranks": case[0], "path": make(folder / str(i), case), "kernels": case[-2], "compiled": case[-1]}
        cases[name]["draft"] = name in WITH_DRAFT
        cases[name]["drafts"] = ["mtp"] if case[1].get("mtp") else []
    torch.save(cases, folder / "cases.pt")
    command = [sys.executable, str(ROOT / "tests" / "tp_worker.py"), "cases", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "WORLD_SIZE": "4"}
    ranks = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(4)]
    try:
        assert [process.wait(300) for process in ranks] == [0] * 4
    finally:
        for process in ranks:
            process.kill()
    found = torch.load(folder / "found.pt", weights_only=False)
    return {name: (found[name], cases[name]) for name in cases}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_row_equals_the_single_process(launched, name):
    found, case = launched[name]
    model = load_model(case["path"], dtype=torch.float32, kernels=case["kernels"], draft=case["drafts"])
    draft = load_model(case["path"], dtype=torch.float32) if case["draft"] else None
    expected = outcome(model, compiled=False, draft=draft)
    for kind in [kind for kind in found if kind != "logits" and not kind.endswith(": cache")]:
        assert found[kind] == expected[kind], kind
    if "logits" in found:
        apart = [float((a - b).abs().max()) for a, b in zip(found["logits"], expected["logits"])]
        assert len(apart) == len(PROMPTS) and max(apart) < LOGITS
    assert len({token for tokens in expected["greedy"] for token in tokens}) > 5, "the model does not repeat one token"


def test_key_and_value_heads_of_a_rank():
    """Each rank has the K/V heads of its query heads, in the order that attention expects: head h uses h // (H/K)."""
    for H, K, ranks in ((12, 4, 2), (16, 2, 8), (12, 6, 4), (6, 3, 2), (9, 3, 3), (8, 1, 4)):
        config = Config(1, H, K, 4, 8, 8 * ranks, 20, 16)
        for rank in range(ranks):
            shard = Shard(rank, ranks)
            own, kv = shard.own(H), shard.own_heads(H, H // K)
            local = shard.config(config)
            assert [kv[i // (local.n_head // local.n_kv_head)] for i in range(len(own))] == [h // (H // K) for h in own]
    assert Shard(5, 8).own_heads(16, 8) == [1], "two heads on eight ranks: one each"


@pytest.mark.parametrize("sizes, quantization, ranks, why", [
    ((9, 3, 64, 1536), None, 2, "n_head 9 is not a multiple of 2; [1, 3, 9] ranks are possible"),
    ((8, 2, 16, 5), None, 8, "mlp.down: 5 columns in blocks of 1 are 5 blocks; [1, 2, 4] ranks are possible"),
    ((8, 2, 16, 256), ("int4", 64, "int8"), 4, "blocks.0.attention.out: 32 columns per rank are not a multiple of "
     "its block of 64; [1, 2] ranks are possible"),
    ((6, 2, 10, 5), ("int4", 0, "int8"), 6, "mlp.down: 5 columns in blocks of 2 are 3 blocks; [1, 2, 3] ranks are "
     "possible"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused_with_the_numbers(sizes, quantization, ranks, why):
    H, K, E, F = sizes
    config = Config(2, H, K, E, 40, F, 131, 64)
    with pytest.raises(UserError, match=re.escape(f"over {ranks} ranks: {why}")):
        check(empty_model(config, quantization and Quantization(*quantization)), ranks)


@pytest.mark.parametrize("hidden_dim, shared_dim, mode, why", [
    (3, 5, None, "experts.down: 3 columns in blocks of 1 are 3 blocks; [1, 2] ranks are possible"),
    (8, 3, None, "experts.shared.down: 3 columns in blocks of 1 are 3 blocks; [1, 2] ranks are possible"),
    (64, 0, "int4", "experts.down: 64 columns in blocks of 32 are 2 blocks; [1, 2] ranks are possible"),
])  # fmt: skip
def test_experts_that_cannot_be_split(hidden_dim, shared_dim, mode, why):
    """The width of dense layers does not count in a model without them."""
    config = Config(2, 8, 2, 16, 40, 1, 131, 64, experts=Experts((0, 1), 5, 2, hidden_dim, shared_dim=shared_dim))
    whole = empty_model(config, mode and Quantization(mode, 32, "int8"))
    with pytest.raises(UserError, match=re.escape(f"over 4 ranks: {why}")):
        check(whole, 4)
    if "[1, 2]" in why:
        experts = [Shard(rank, 2).fit(whole).config(config).experts for rank in range(2)]
        assert sum(part.hidden_dim for part in experts) == hidden_dim
        assert sum(part.shared_dim for part in experts) == shared_dim


@pytest.mark.parametrize("F, mode, shares", [(39, None, [9, 10, 10, 10]), (160, ("int4", 32), [32, 32, 32, 64])])
@pytest.mark.parametrize("exception", [None, "int8-g64"])
def test_hidden_units_are_cut_on_the_boundaries_of_blocks(F, mode, shares, exception):
    """Also of an exception with larger groups in one of the layers."""
    config = Config(2, 8, 2, 16, 40, F, 131, 64)
    exceptions = {"blocks.1.mlp.down": exception} if exception and mode else {}
    whole = empty_model(config, mode and Quantization(*mode, "int8", exceptions))
    if exceptions:
        with pytest.raises(UserError, match="160 columns in blocks of 64 are 3 blocks"):
            Shard(0, 4).fit(whole)
        return
    found = [Shard(rank, 4).fit(whole).config(whole.config).hidden_dim for rank in range(4)]
    assert found == shares and sum(found) == F


@pytest.mark.slow
@pytest.mark.parametrize("exceptions", [{}, {"blocks.1.mlp.down": "int4-g64", "blocks.0.attention.qkv": "iq4_nl"}])
@pytest.mark.parametrize("groupsize, head", [(0, "int8"), (32, "int4"), (64, "iq4_nl"), (128, "none")])
def test_the_part_of_a_model_in_4_bits_as_a_draft(tmp_path, groupsize, head, exceptions):
    """--draft int4-self of an int8 checkpoint, whose layers in 4 bits and in the head keep their own formats."""
    experts = Experts((2,), 3, 2, hidden_dim=192, shared_dim=256)
    config = Config(3, 4, 2, 32, 132, 320, 131, 64, tied_embeddings=head == "int8", experts=experts)
    write_random(tmp_path / "whole", config)
    quantize_checkpoint(tmp_path / "whole", tmp_path / "q", Quantization("int8", groupsize, head, exceptions))
    options = ModelOptions(dtype=torch.float32, kernels="torch", draft=["int4-self"])
    drafts = Drafts(open_directory(tmp_path / "q"), Loader(options, SingleProcess(), torch.device("cpu")))
    for rank in range(2):
        target = load_model(tmp_path / "q", dtype=torch.float32, kernels="torch", shard=Shard(rank, 2))
        draft = drafts.load_self_draft(target)
        whole = quantize_model(read_model(tmp_path / "q", dtype=torch.float32), Quantization("int4", 32, "int8"))
        state, slices = whole.state_dict(), draft.shard.slices(whole)
        assert draft.state_dict().keys() == state.keys() and len(state) == len(slices)
        assert all(torch.equal(part, slices[name].cut(state[name])) for name, part in draft.state_dict().items())


def test_a_layer_that_does_not_say_how_it_is_split_is_refused():
    model = empty_model(Config(1, 2, 2, 4, 8, 8, 20, 16))
    model.blocks[0].mixer.out.columns = ()
    with pytest.raises(AssertionError, match="attention.out does not say what its rows or columns consist of"):
        check(model, 2)


def torchrun(ranks, *args, program=ROOT / "generate.py", **options):
    command = [*TORCHRUN, "--standalone", f"--nproc_per_node={ranks}", str(program), *map(str, args)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, **options)


def finish(process, seconds=LAUNCH_S):
    """Wait for a process; returns (exit code, stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def ours(err: str) -> list[str]:
    """The errors on stderr that are not torchrun's."""
    return [line for line in err.splitlines() if re.match(r"\w+\.py: error: ", line)]


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make(tmp_path_factory.mktemp("one"), CASES["3 qwen3, K copied"])


def arguments(checkpoint, new=20):
    return ["--checkpoint_path", checkpoint, "--dtype", "float32", "--prompt_ids", "5,17,33", "--max_new_tokens", new]


@pytest.mark.slow
def test_the_program_under_torchrun(checkpoint):
    """The samples of the single process, one JSON object on stdout, and a clean exit."""
    args = [*arguments(checkpoint), "--prompt_ids", 64, "--top_k", 30, "--repetition_penalty", 1.1, "--json"]
    ranks = torchrun(3, *args, **PIPES)
    alone = subprocess.run([sys.executable, str(ROOT / "generate.py"), *map(str, args)], capture_output=True, text=True)
    alone = json.loads(alone.stdout)
    code, out, err = finish(ranks)
    assert (code, ours(err)) == (0, [])
    found = json.loads(out)
    assert found["samples"] == alone["samples"]
    assert found["ranks"] == 3 and found["communication_share"] > 0
    assert found["weight_bytes_per_rank"] < alone["peak_memory_bytes"] and found.keys() > alone.keys()


@pytest.mark.full
@pytest.mark.parametrize("step", ["prefill", "decode"])
@pytest.mark.parametrize(
    "rank, how, limit, told",
    [
        (1, "SIGKILL", 10, None),  # torchrun notices it at once and names the rank
        (0, "SIGKILL", 10, None),
        # Only our own watch notices this. torchrun waits 30 s more before it kills a stopped process.
        (2, "SIGSTOP", TIMEOUT_S + 35, "rank 2: ended without an error message"),
        (1, "raise", 10, "rank 1: Traceback"),
    ],
)
def test_all_ranks_end_if_one_does(checkpoint, step, rank, how, limit, told):
    """Within seconds, with the number of the rank, or after TIMEOUT_S if the rank hangs."""
    args = ["sabotage", rank, step, how, *arguments(checkpoint)]
    start = time.monotonic()
    process = torchrun(3, *args, program=ROOT / "tests" / "tp_worker.py", **PIPES)
    out, err = process.communicate(timeout=limit + LAUNCH_S)
    assert time.monotonic() - start < limit + 15, "not counting the launch"
    assert process.returncode != 0
    assert (told in err) if told else f"rank      : {rank} (local_rank: {rank})\n  exitcode  : -9" in err, err
    assert len(ours(err)) == (told is not None) and not survivors(process.pid)


def survivors(agent: int) -> list[str]:
    found = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in found if line.split()[0] == str(agent)]


def two_machines(program, port, *args):
    """Two torchrun launches of two ranks each on the loopback address stand for two machines."""

    def one(node):
        command = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=2", f"--node_rank={node}", "--rdzv_backend=c10d"]
        command += [f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=test", str(program), *map(str, args)]
        return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, **PIPES)

    return [one(0), one(1)]


@pytest.fixture(scope="module")
def splits_in_four(tmp_path_factory):
    return make(tmp_path_factory.mktemp("four"), CASES["4 llama, K on two each, int8"])


@pytest.mark.full
def test_two_machines(splits_in_four):
    args = [*arguments(splits_in_four), "--json"]
    found = [finish(process) for process in two_machines(ROOT / "generate.py", 29611, *args)]
    assert [code for code, *_ in found] == [0, 0] and sorted(map(bool, (out for _, out, _ in found))) == [False, True]
    result = json.loads("".join(out for _, out, _ in found))
    alone = subprocess.run([sys.executable, str(ROOT / "generate.py"), *map(str, args)], capture_output=True, text=True)
    assert result["samples"] == json.loads(alone.stdout)["samples"] and result["ranks"] == 4


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_death_on_one_machine_ends_the_other(splits_in_four, rank):
    args = ["sabotage", rank, "decode", "SIGKILL", *arguments(splits_in_four)]
    start = time.monotonic()
    both = two_machines(ROOT / "tests" / "tp_worker.py", 29612 + rank, *args)
    ends = [process.communicate(timeout=LAUNCH_S) for process in both]
    assert time.monotonic() - start < 45, "30 s, not counting the launch"
    assert all(process.returncode != 0 for process in both)
    told = "".join(err for _, err in ends)
    assert f"rank      : {rank} (local_rank: {rank % 2})\n  exitcode  : -9" in told
    assert len(ours(told)) <= 1


@pytest.mark.full
def test_a_checkpoint_that_differs_between_machines(checkpoint, tmp_path):
    """Rank 2 works in another directory, with another file of the same name."""
    other = tmp_path / "1"
    shutil.copytree(checkpoint, other)
    shutil.copytree(checkpoint, tmp_path / "0")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"norm_eps": 1e-4}))
    script = tmp_path / "start.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport generate\nfrom tp import run_together\n"
        f"os.chdir(os.path.join({str(tmp_path)!r}, str(int(os.environ['RANK']) // 2)))\nrun_together(generate.main)\n"
    )
    code, out, err = finish(torchrun(3, *arguments("."), program=script, **PIPES))
    [line] = ours(err)
    assert code != 0 and out == "" and "of rank 2 is not rank 0's: its config" in line


@pytest.mark.full
def test_ctrl_c_ends_all(checkpoint):
    process = torchrun(3, *arguments(checkpoint, 200), "--num_samples", 1000, **PIPES)
    process.stdout.readline()  # generation has begun
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    process.communicate(timeout=LAUNCH_S)
    assert time.monotonic() - start < 10 and process.returncode != 0 and not survivors(process.pid)


@pytest.mark.full
def test_a_conversation(default_checkpoint):
    """Rank 0 reads lines and prints the answers of the single process."""
    asked = "Name three colours.\nAnd a fourth?\n/stats\n"
    args = ["--interactive", "--checkpoint_path", default_checkpoint, "--dtype", "float32", "--max_new_tokens", "24"]
    args += ["--temperature", "0"]
    command = [sys.executable, str(ROOT / "generate.py"), *args]
    alone = subprocess.run(command, input=asked, capture_output=True, text=True)
    process = torchrun(3, *args, stdin=subprocess.PIPE, **PIPES)
    out, err = process.communicate(asked, timeout=2 * LAUNCH_S)
    assert process.returncode == 0 and out == alone.stdout and "reused from earlier turns" in err


@pytest.mark.full
def test_a_prompt_from_standard_input(default_checkpoint):
    """Rank 0 reads it, and the other ranks take no part of it."""
    args = ["--prompt", "-", "--prompt", "One", "--checkpoint_path", default_checkpoint, "--dtype", "float32", "--json"]
    args += ["--temperature", "0", "--max_new_tokens", "8"]
    text = "The first line.\nThe second\u2028line, " * 99 + "\n"
    command = [sys.executable, str(ROOT / "generate.py"), *args]
    alone = subprocess.run(command, input=text, capture_output=True, text=True)
    process = torchrun(3, *args, stdin=subprocess.PIPE, **PIPES)
    out, err = process.communicate(text, timeout=2 * LAUNCH_S)
    assert process.returncode == 0, err
    assert json.loads(out)["samples"] == json.loads(alone.stdout)["samples"]
    assert json.loads(out)["samples"][0]["prompt_tokens"] > 500
    code, _, err = finish(torchrun(3, *args, stdin=subprocess.DEVNULL, **PIPES))
    assert code != 0 and ours(err) == ["generate.py: error: --prompt - is empty"]


@pytest.mark.parametrize("mode, tied", [(None, True), ("int8", False), ("int4", True)])
def test_a_rank_has_its_share_of_the_bytes(mode, tied):
    """A rank of the default model has 1/ranks of the weights within 2 %, and a decode step reads all of them."""
    sizes = {"n_layer": 30, "n_head": 9, "n_kv_head": 3, "head_dim": 64, "dim": 576, "hidden_dim": 1536}
    config = Config(tied_embeddings=tied, vocab_size=49152, max_seq_length=8192, **sizes)
    quantization = mode and Quantization(mode, 32, "int8")

    def size(model):
        return sum(t.nbytes for t in model.state_dict().values())

    whole = size(empty_model(config, quantization))
    for rank in range(3):
        shard = Shard(rank, 3).fit(empty_model(config, quantization))
        model = empty_model(config, quantization, shard)
        slices = shard.slices(empty_model(config, quantization))
        assert size(model) == pytest.approx(whole / 3, rel=0.02)
        assert slices.keys() == model.state_dict().keys() and model.config is config


@pytest.mark.full
def test_peak_memory_of_loading_a_rank_s_part(default_checkpoint):
    """The peak is the rank's part plus one tensor (the mapped pages of the largest, the embedding), within 10 %: the
    heap keeps copies that were freed, and more or fewer of them from run to run."""
    script = """if True:
        import sys, torch
        from pathlib import Path
        from checkpoint import empty_model, read_config
        from load import load_model
        from report import peak_memory
        from tp import Shard
        directory = Path(sys.argv[1])
        empty_model(read_config(directory))  # torch imports 150 MB for the first one
        before = peak_memory(torch.device("cpu"))
        model = load_model(directory, kernels="torch", shard=Shard(1, 3))
        own = sum(t.nbytes for t in model.state_dict().values())
        print(peak_memory(torch.device("cpu")) - before, own, 49152 * 576 * 2)"""
    command = [sys.executable, "-c", script, str(default_checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    used, own, largest = map(int, done.stdout.split())
    assert used < 1.1 * (own + largest), (used, own, largest)
