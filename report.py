"""Measurements of a run: seconds and counts, bytes read per token, and the share of the machine's
memory bandwidth.

Read down: the roofline; measurements of the machine; the report of a run, as JSON fields and as
text. Knows the model and what the engine has measured, nothing of text or of the command line.
costs.py says how many bytes a step reads.

Rates never mix prefill and decode and never include compilation, and a run under the profiler has
no rates: all of these would be misleading numbers.
"""

import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from backend import synchronize
from checkpoint import is_ours, read_config, read_quantization
from cli import UserError, counted, print_status, size_text
from config import Config
from costs import WeightReads, layer_table_bytes, roofline, weight_reads
from formats import Quantization
from model import Transformer

FEW_TOKENS = 32  # a prefill of fewer tokens is reported as a time, most of which is start-up


def roofline_text(table: list[dict], dtype: torch.dtype) -> str:
    """The rooflines of several context lengths, as text."""
    bandwidth = table[0]["bandwidth_bytes_per_s"] / 1e9
    lines = [f"{counted(table[0]['rows'], 'row')}, {str(dtype).removeprefix('torch.')}, {bandwidth:,.1f} GB/s"]
    lines.append("context   GFLOPs/token   weights MB/token   state MB/token   bound tokens/s")
    for at in table:
        flops = f"{at['flops_per_token'] / 1e9:12,.3f}"
        weights = f"{at['weight_bytes_per_token'] / 1e6:16,.1f}"
        kv = f"{(at['kv_bytes_per_token'] + at['state_bytes_per_token']) / 1e6:14,.1f}"
        bound = f"{at['bound_tokens_per_s']:14,.1f}"
        lines.append(f"{at['context']:7}   {flops}   {weights}   {kv}   {bound}")
    return "\n".join(lines)


def read_without_weights(args) -> tuple[Config, Quantization | None] | None:
    """The model of a directory that has a config.json, ours or Hugging Face's, but no weights.

    None if --checkpoint_path is anything else. args: the arguments of generate.py.
    """
    directory = Path(os.path.expanduser(args.checkpoint_path or ""))
    has_weights = any(file.suffix in (".safetensors", ".bin") for file in directory.glob("*"))
    if not args.checkpoint_path or not (directory / "config.json").exists() or has_weights:
        return None
    if not args.roofline:
        raise UserError(f"{directory} has no weights to measure the bandwidth with; give one, as in --roofline 100")
    if is_ours(directory):
        return read_config(directory), read_quantization(directory)
    from sources.hf_directory import hf_config

    return hf_config(directory), None


def print_roofline(args, config: Config, quantization: Quantization | None, bandwidth: float):
    """Print the roofline of a model on stdout, for contexts up to the longest that it supports.

    args: the arguments of generate.py.
    """
    dtype = args.model.dtype
    rows = args.batch_size
    if args.model.dequantize:
        quantization = None
    table = []
    for n in (1, 512, 2048, 8192, 32768, 131072):
        if n <= config.max_seq_length:
            at = roofline(config, bandwidth * args.devices, dtype, n, rows, quantization)
            table.append({"context": n, "rows": rows} | at)
    print(json.dumps({"roofline": table}) if args.json else roofline_text(table, dtype))


def read_bandwidth(model: Transformer) -> float:
    """Memory bandwidth in bytes per second, measured by summing the model's weights."""
    weights = [w.view(-1)[: w.numel() // 8 * 8].view(torch.int64) for w in model.state_dict().values()]
    best = float("inf")
    for _ in range(4):
        synchronize(weights[0].device)
        start = time.perf_counter()
        for w in weights:
            w.sum()
        synchronize(weights[0].device)
        best = min(best, time.perf_counter() - start)
    return sum(w.nbytes for w in weights) / best


def all_reduces_s(model: Transformer, rows: int) -> float:
    """Seconds that the all-reduces of one decode step take by themselves.

    All ranks must call this together.
    """
    times = 10
    x = torch.zeros(rows, 1, model.config.dim, dtype=model.dtype, device=model.device)  # (B,1,D)
    synchronize(x.device)
    start = time.perf_counter()
    for _ in range(times * (1 + sum(2 + block.has_both for block in model.blocks))):
        model.shard.all_reduce(x)
    synchronize(x.device)
    return (time.perf_counter() - start) / times


def peak_memory(device: torch.device) -> int:
    """The most bytes in use so far: by the whole process on CPU, by torch's allocations on GPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:  # getrusage may report the memory of the parent at the moment when it started this process
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bytes_by_format(model: Transformer) -> dict[str, int]:
    """The bytes of a model's weights by the format that they are stored in, the largest first."""
    found = Counter()
    for name, tensor in model.state_dict().items():
        layer = model.get_submodule(name.rpartition(".")[0])
        stored_as = getattr(layer, "stored_as", None)  # a MatrixLayer has it
        found[stored_as or str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return dict(found.most_common())


def measurements(engine, profiled: bool, in_full: bool = True) -> dict:
    """The measured fields of --json.

    Under the profiler there are no rates, because it slows down every operation. in_full: also
    measure the memory bandwidth and the time of the all-reduces, which takes up to a second.
    """
    model = engine.model
    timing = engine.timing
    tokens = timing.decode_tokens
    fields = {
        "peak_memory_bytes": peak_memory(model.device),  # before the bandwidth is measured
        "prefill_tokens_per_s": None if profiled else timing.prefill_tokens / timing.prefill_s,
        "decode_tokens_per_s": None,
        "weight_bytes_by_format": bytes_by_format(model),
        "bandwidth_bytes_per_s": None,
        "read_bandwidth_bytes_per_s": None,
    }
    read = bytes_per_token(model, timing)
    has_rate = bool(tokens) and not profiled
    if has_rate:
        rate = tokens / timing.decode_s
        fields["decode_tokens_per_s"] = rate
        fields["bandwidth_bytes_per_s"] = sum(read.values()) * rate
    if has_rate and in_full:
        fields["read_bandwidth_bytes_per_s"] = read_bandwidth(model)

    fields |= read | {
        "threads": engine.threads.used(),
        "other_programs_cpus": None if model.shard.ranks > 1 else engine.threads.others(),
        "mean_accepted_tokens": None,  # Speculation.numbers replaces it
        "device": str(model.device),
        "kernels": model.backend.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    if model.config.experts is not None:
        fields["experts"] = expert_numbers(model, timing)
    if model.layer_inputs is not None:
        fields["layer_table_bytes"] = layer_table_bytes(model)
    if model.shard.ranks > 1:  # then all numbers of bytes are for one rank
        fields["ranks"] = model.shard.ranks
        fields["communication_share"] = None
        if has_rate and in_full:
            seconds = all_reduces_s(model, len(engine.rows)) * timing.decode_steps
            fields["communication_share"] = seconds / timing.decode_s
        fields["weight_bytes_per_rank"] = sum(tensor.nbytes for tensor in model.state_dict().values())
    return fields | engine.decoding.numbers(timing, profiled)


def bytes_per_token(model: Transformer, timing) -> dict[str, float | None]:
    """The fields of --json about what decode steps have read for each token; None without decode steps."""
    tokens = timing.decode_tokens
    if not tokens:
        return dict.fromkeys(("weight_bytes_per_token", "kv_bytes_per_token", "state_bytes_per_token"))
    reads = weight_reads(model)
    weights = reads.dense * timing.decode_steps + reads.row * tokens + expert_bytes_read(reads, timing)
    return {
        "weight_bytes_per_token": (weights + timing.draft_bytes) / tokens,
        "kv_bytes_per_token": timing.kv_bytes / tokens,
        "state_bytes_per_token": model.recurrent_bytes * timing.row_steps / tokens,
    }


def expert_bytes_read(reads: WeightReads, timing) -> float:
    """The bytes of experts that all decode steps have read, without the MTP layer."""
    if not reads.experts:
        return 0.0
    counts = timing.expert_counts[:, -1].tolist()
    return sum(n * nbytes for n, nbytes in zip(counts, reads.experts))


def expert_numbers(model: Transformer, timing) -> dict:
    """The fields of --json about experts, in decode steps.

    busiest_expert: how many tokens have used a layer's most used expert, divided by the number if
    all were used equally; unused_experts: how many of a layer's experts no token has used. Both are
    means over the sparse layers.
    """
    reads = weight_reads(model)
    numbers = {
        "weight_bytes_total": sum(tensor.nbytes for tensor in model.state_dict().values()),
        "expert_bytes_per_token": None,
        "busiest_expert": None,
        "unused_experts": None,
    }
    if timing.decode_tokens:
        used = timing.expert_counts[: len(reads.experts), :-1].double()  # (sparse layers, X)
        numbers["expert_bytes_per_token"] = expert_bytes_read(reads, timing) / timing.decode_tokens
        numbers["busiest_expert"] = (used.amax(1) / used.mean(1)).mean().item()
        numbers["unused_experts"] = (used == 0).sum(1).double().mean().item()
    return numbers


def print_report(result: dict, timing, args, shadow=None):
    """Print the measurements of a run on stderr: one line of them, or all.

    args: the arguments of generate.py. shadow: Backend.drawable_logits.
    """
    is_cut = any(sample["finish_reason"] == "length" for sample in result["samples"])
    if args.chat and not args.json and is_cut:
        print_status(f"(cut at --max_new_tokens {args.max_new_tokens}, or at the end of the context)", dim=True)
    if args.report:
        settings = [f"{name} {value:g}" for name, value in args.params.recommended().items()]
        print_status(f"\n{full_report(result, timing)}\nsampling: {', '.join(settings)}")
        if shadow is not None and shadow.share_read is not None:
            size = shadow.nbytes / 1e6
            print_status(
                f"output head: {shadow.share_read:.1%} of it were read, beside its shadow of {size:.1f} MB, in steps "
                "of one row that need no other logits"
            )
    else:
        print_status(short_report(result, timing, args.model.speculates), dim=True)


def short_report(result: dict, timing, asked: bool = False) -> str:
    """A line like "52 tokens, 46.6 tokens/s; prefill 341 tokens/s; 3.1 GB".

    It has the generated tokens of all samples, the tokens per second of decode and of prefill, and
    the peak memory. asked: whether the user has asked for drafts. Otherwise they are mentioned only if
    tokens were accepted.
    """
    line = counted(sum(len(sample["token_ids"]) for sample in result["samples"]), "token")
    if result["decode_tokens_per_s"] is not None:
        line += f", {result['decode_tokens_per_s']:.1f} tokens/s"

    drafts = result.get("speculation", {}).get("drafts", [])
    proposed = sum(draft["proposed_tokens"] for draft in drafts)
    accepted = sum(draft["accepted_tokens"] for draft in drafts)
    if asked and not proposed:
        line += ", no tokens drafted"
    elif asked or accepted:
        line += f", {accepted} of {proposed} drafted tokens accepted"

    if result["prefill_tokens_per_s"] is not None:
        line += f"; prefill {prefill_text(timing)}"
    line += f"; {size_text(result['peak_memory_bytes'])}"
    if "ranks" in result:
        line += f" on one of {result['ranks']} ranks"
    if result["recompiles"]:
        line += f"; recompiles: {result['recompiles']}, which the rates include"
    return line


def prefill_text(timing) -> str:
    if timing.prefill_tokens < FEW_TOKENS:
        return f"{1e3 * timing.prefill_s:.0f} ms"
    return f"{timing.prefill_tokens / timing.prefill_s:.0f} tokens/s"


def full_report(result: dict, timing) -> str:
    """The numbers of --json in a few lines."""
    line = f"load {result['load_s']:.2f} s, compile {result['compile_s']:.2f} s"
    if result["time_to_first_token_s"] is not None:
        line += f", first token {result['time_to_first_token_s']:.3f} s"
    how = [result["device"], f"{result['kernels']} kernels", result["dtype"], f"torch {result['torch']}"]
    lines = [f"{line} ({', '.join(how)})"]

    formats = result["weight_bytes_by_format"]
    if len(formats) > 1:
        sizes = [f"{name} {nbytes / 1e6:.1f} MB" for name, nbytes in formats.items()]
        lines.append(f"weights: {', '.join(sizes)}")
    if "layer_table_bytes" in result:
        size = result["layer_table_bytes"] / 1e6
        where = "stays in its mapped file" if result["device"] == "cpu" else "is in memory"
        lines.append(f"table of the layers' inputs: {size:.1f} MB, which {where}; a token reads one row of it")
    if result["prefill_tokens_per_s"] is not None:
        lines.append(f"prefill: {timing.prefill_tokens} tokens, {prefill_text(timing)}")
        if timing.draft_prefill_s:
            lines[-1] += f"; the draft model took {1e3 * timing.draft_prefill_s:.0f} ms more"
    if result["decode_tokens_per_s"] is not None:
        lines += decode_lines(result, timing)
    if result["device"] == "cpu" and result["threads"]:
        threads = threads_text(result["threads"])
        lines.append(f"threads: {threads}{others_text(result['other_programs_cpus'])}")
    if "speculation" in result:
        speculation = result["speculation"]
        steps = speculation["steps"] + speculation["plain_steps"]
        lines += [draft_text(draft, steps) for draft in speculation["drafts"]]
    if "ranks" in result:
        lines.append(ranks_text(result, timing))

    memory = f"peak memory {result['peak_memory_bytes'] / 1e6:.0f} MB"
    lines.append(f"{memory}; {result['recompiles']} recompiles, {result['graph_breaks']} graph breaks")
    return "\n".join(lines)


def decode_lines(result: dict, timing) -> list[str]:
    weights = result["weight_bytes_per_token"] / 1e6
    kv = result["kv_bytes_per_token"] / 1e6
    line = f"decode: {timing.decode_tokens} tokens, {result['decode_tokens_per_s']:.1f} tokens/s; "
    line += f"each reads {weights:.1f} MB of weights and {kv:.1f} MB of KV cache"
    if result["state_bytes_per_token"]:
        line += f", and reads and writes {result['state_bytes_per_token'] / 2e6:.1f} MB of recurrent states"

    used = result["bandwidth_bytes_per_s"] / 1e9
    measured = result["read_bandwidth_bytes_per_s"] / 1e9
    line += f": {used:.1f} GB/s"
    if used <= measured:  # otherwise other programs slowed the measurement, or caches held weights
        line += f", {used / measured:.0%} of the {measured:.1f} measured here"
    if "experts" not in result:
        return [line]

    experts = result["experts"]
    read = experts["expert_bytes_per_token"] / 1e6
    total = experts["weight_bytes_total"] / 1e6
    whose = " of a rank" if "ranks" in result else ""
    about = f"experts: each token reads {read:.1f} MB of them; all weights{whose} have {total:.1f} MB. In a layer, "
    about += f"the busiest expert has {experts['busiest_expert']:.1f} times its even share "
    about += f"of {timing.decode_tokens} tokens, and {experts['unused_experts']:.1f} have none"
    return [line, about]


def ranks_text(result: dict, timing) -> str:
    size = result["weight_bytes_per_rank"] / 1e6
    line = f"{result['ranks']} ranks, each with {size:.1f} MB of weights"
    share = result["communication_share"]  # may be above 1, where ranks share cores
    if share is not None:
        step_ms = timing.decode_s / timing.decode_steps * 1e3
        line += f"; the all-reduces of a step take {share * step_ms:.2f} ms by themselves"
        line += f", a step {step_ms:.2f}"
    return line


def draft_text(draft: dict, steps: int) -> str:
    line = f"{draft['name']}: {draft['accepted_tokens']} of {draft['proposed_tokens']} "
    line += f"proposed tokens accepted, in {draft['steps']} of {steps} steps"
    if draft["share_of_time"] is not None:
        line += f"; proposing took {draft['share_of_time']:.1%} of the time"
    return line


def threads_text(used: dict[str, dict[int, int]]) -> str:
    """A text like "prefill 2, decode 2 (97%) or 1 (3%)".

    used: kind of step -> number of threads -> number of steps.
    """
    kinds = []
    for kind, steps in used.items():
        total = sum(steps.values())
        numbers = [str(n) if n_steps == total else f"{n} ({n_steps / total:.0%})" for n, n_steps in steps.items()]
        kinds.append(f"{kind} {' or '.join(numbers)}")
    return ", ".join(kinds)


def others_text(cpus: float | None) -> str:
    if cpus is None or cpus < 0.1:
        return ""
    return f"; other programs used {cpus:.1f} processors"
