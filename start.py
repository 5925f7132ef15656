"""From an opened checkpoint to a running engine: the check of memory, the weights, the drafts, compiled steps.

The files of optional features (kernels, drafts, several ranks) are imported only if they are used.
"""

from dataclasses import replace

from checkpoint import check_memory
from cli import UserError, print_status
from compile import compiled_steps
from config import Config
from engine import Engine, EngineOptions
from load import Checkpoint, choose_device, load_model
from model import SCRATCH_SLOTS

CACHE_LENGTHS = (512, 2048, 8192, 32768, 131072)  # a few lengths only, so that compiled graphs are reused

# ---------------------------------------------------------------- the engine


def choose_cache_length(given: int | None, config: Config, needed: int = 1, wanted: int = 0) -> int:
    """Cache positions per row: what --max_seq_length gives, if the context allows it, or else `needed` rounded up to a
    common length, and at least `wanted`, within the context. With longrope that is the original context, in which rows
    have the short factors, unless more is needed."""
    context = config.max_seq_length
    if given is not None:
        if given > context and not config.alibi:  # ALiBi has no maximum context
            raise UserError(f"--max_seq_length {given} is more than the model's context of {context}")
        return given
    if needed <= config.short_context:
        context = config.short_context
    common = next((length for length in CACHE_LENGTHS if length >= needed), needed)
    return min(max(common, wanted), context)


def load_engine(checkpoint: Checkpoint, rows: int, length: int, how: EngineOptions | None = None) -> Engine:
    """An engine with the model of a checkpoint, and `rows` cache rows of `length` positions (at most the context)."""
    how = how or EngineOptions()
    ranks, length = how.ranks, choose_cache_length(length, checkpoint.config)
    if min(rows, length) < 1:
        raise UserError(f"an engine has at least one row of one position, not {rows} of {length}")
    options = replace(checkpoint.options, device=ranks.device(checkpoint.options.device))
    device = choose_device(options.device)
    if options.speculates:
        from drafts import loading

        drafts = loading.open_drafts(checkpoint, ranks)
    slots = rows * (length + SCRATCH_SLOTS)
    check_memory(checkpoint.config, device, options.dtype, slots, checkpoint.quantization, ranks.portion(device))
    model = load_model(checkpoint.source, options, ranks.shard(device))
    decoding = loading.make_speculation(checkpoint, model, drafts) if options.speculates else None
    if options.lookup_by_default and device.type == "cpu" and model.backend.thread_invariant:
        decoding = default_speculation()
    chunk_tokens = how.chunk_tokens or (128 if checkpoint.quantization else 256)
    how = replace(how, chunk_tokens=chunk_tokens, fixed_threads=options.threads is not None)
    steps = compiled_steps(options.compile, options.compile_prefill)
    engine = Engine(model, rows, length, steps, decoding, how)
    if checkpoint.config.is_longrope and ranks.rank == 0:
        kind = "long" if checkpoint.config.has_long_factors(length) else "short"
        original = f"the original context is {checkpoint.config.short_context}"
        print_status(f"longrope: the {kind} factors, because rows have {length} positions and {original}")
    return engine


def default_speculation():
    """Prompt lookup; or None if its files have been deleted, as they may be."""
    try:
        from drafts.retrieval import RetrievalDraft
        from speculative import Speculation
    except ModuleNotFoundError:
        return None
    return Speculation([RetrievalDraft()])
