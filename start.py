"""From an opened checkpoint to a running engine: the check of memory, the weights, the drafts, compiled steps.

Read down: `load_engine`, which puts everything together; the compiled steps; reading prompts, warming up.
The files of optional features (kernels, drafts, several ranks) are imported only if they are used.
"""

import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from checkpoint import check_memory
from cli import Stopwatch, UserError, first_line, print_status, progress_bar
from config import Config
from engine import Engine, Request, StepFunctions, Timing, decode, generate, prefill
from load import Checkpoint, SingleProcess, choose_device, load_model
from model import SCRATCH_SLOTS
from sampling import SamplingParams

CACHE_LENGTHS = (512, 2048, 8192, 32768, 131072)  # a few lengths only, so that compiled graphs are reused

# ---------------------------------------------------------------- the engine


def choose_cache_length(given: int | None, config: Config, needed: int = 1) -> int:
    """Cache positions per row: what --max_seq_length gives, if the context allows it, or else `needed` rounded up to a
    common length within the context."""
    context = config.max_seq_length
    if given is not None:
        if given > context and not config.alibi:  # ALiBi has no maximum context
            raise UserError(f"--max_seq_length {given} is more than the model's context of {context}")
        return given
    return min(next((length for length in CACHE_LENGTHS if length >= needed), needed), context)


def load_engine(checkpoint: Checkpoint, rows: int, length: int, ranks=None) -> Engine:
    """An engine with the model of a checkpoint, and `rows` cache rows of `length` positions (at most the context).
    ranks: as in load.open_checkpoint."""
    ranks, length = ranks or SingleProcess(), choose_cache_length(length, checkpoint.config)
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
    speculation = loading.make_speculation(checkpoint, model, drafts) if options.speculates else None
    if options.lookup_by_default and device.type == "cpu" and model.backend.thread_invariant:
        speculation = default_speculation()
    steps = compiled_steps(options.compile, options.compile_prefill)
    engine = Engine(model, rows, length, steps, 128 if checkpoint.quantization else 256, speculation)
    engine.ranks = ranks if ranks.size > 1 else None
    engine.threads.fixed = options.threads is not None or device.type != "cpu"
    return engine


def default_speculation():
    """Prompt lookup; or None if its files have been deleted, as they may be."""
    try:
        from drafts.retrieval import RetrievalDraft
        from speculative import Speculation
    except ModuleNotFoundError:
        return None
    return Speculation([RetrievalDraft()])


# ---------------------------------------------------------------- compiled steps


def compiled_steps(decoding: bool, prefilling: bool) -> StepFunctions:
    warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # scales are float16, which torch 2.13 warns about
    compiled = prefill
    if prefilling:
        options = {"guard_filter_fn": drop_global_state_guards}
        compiled = torch.compile(prefill, dynamic=True, fullgraph=True, options=options)
    if not decoding:
        return StepFunctions(compiled)
    return StepFunctions(compiled, compile_per_shape(decode), fixed_shapes=True, compile=compile_per_shape)


def compile_per_shape(function: Callable) -> Callable:
    """Compile function(model, ...) as one graph for each model, cache size and shapes of the arguments.

    The graphs skip Dynamo's guards on the model: there are about 2,000, which take a fifth of a step of the default
    model in int4. Therefore only the contents of a model's caches may change between steps.
    """
    graphs = {}

    def step(model, *arguments):
        case = model, model.blocks[0].attention.cache.k.shape, *shapes_of(arguments)
        if case not in graphs:
            # Dynamo stores graphs by code object, so each case gets its own copy of the code.
            own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            options = {"triton.cudagraphs": True, "guard_filter_fn": drop_model_guards}  # like mode="reduce-overhead"
            if model.backend.thread_invariant:  # the kernels have their own threads; other operations are small
                options["cpp.threads"] = 1
            graphs[case] = torch.compile(own, fullgraph=True, dynamic=False, options=options)
        return graphs[case](model, *arguments)

    return step


def shapes_of(arguments: tuple) -> Iterator:
    """The shapes of all tensors of the arguments, those in tuples included, and the values of integers."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from shapes_of(x)
        else:
            yield x.shape if isinstance(x, Tensor) else x if isinstance(x, int) else None


def drop_global_state_guards(guards) -> list[bool]:
    """For each guard of a graph, whether it is kept: all are, except for that on torch's global state. The number of
    threads is a part of this state, and changes from step to step."""
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


def drop_model_guards(guards) -> list[bool]:
    """`drop_global_state_guards` for `compile_per_shape`, which also drops all guards on the models."""
    on_model = re.compile(r"(L\['(model|vocabulary|draft)'\]|(model|vocabulary|draft)\b)")
    kept = drop_global_state_guards(guards)
    return [keep and on_model.match(guard.name) is None for keep, guard in zip(kept, guards)]


def compile_counts() -> tuple[int, int]:
    """(graphs compiled, graph breaks) in this process so far."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled: an import, only to read zeros, would take a second
        return 0, 0
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# ---------------------------------------------------------------- reading prompts, warming up


def read_with_progress(engine: Engine, requests: list[Request]):
    """Do the engine's steps until it has read the prompts of these requests. If that takes long, show how far it is."""
    total = sum(len(request.prompt) for request in requests)
    with progress_bar(total, "reading the prompt", " tokens", delay=2) as bar:
        while not all(request.new_tokens or request.finish_reason for request in requests):
            engine.step()
            reading = [row for row in engine.rows if row.request is not None and not row.is_decoding]
            unread = sum(len(row.unread) for row in reading)
            bar.n = total - unread - sum(len(request.prompt) for request in engine.waiting)


@torch.no_grad()
def compile_while_serving(engine: Engine):
    """Compile the decode step for one row and for all rows, and then let the engine use it.

    The rows are padding, so this writes only to the caches' scratch slots, and the engine may run beside it.
    """
    steps = compiled_steps(True, False)
    try:
        with Stopwatch("compiling decode while eager steps serve", "a minute or more the first time") as watch:
            for n in {1, len(engine.rows)}:
                inputs = torch.tensor([[0] * n, [-1] * n, list(range(n))])
                steps.decode(engine.model, inputs, engine.sampling)
    except Exception as error:  # no C++ compiler, for example
        return print_status(f"--compile failed, eager steps go on: {first_line(error)}")
    engine.steps = replace(steps, prefill=engine.steps.prefill)
    print_status(f"decode is compiled ({watch.seconds:.0f} s)")


def warm_up(engine: Engine, prompts: list[list[int]], random: bool) -> float:
    """Compile the steps by running some of each kind. Returns the seconds that this took, which no rate includes.

    Decode gets two graphs, one for a single row and one for all rows.
    """
    parts = ["decode"] if engine.steps.fixed_shapes else []
    parts += ["prefill"] if engine.steps.prefill is not prefill else []
    if not parts:
        return 0.0
    try:
        first = "seconds to minutes the first time; torch keeps the result on disk"
        with Stopwatch(f"compiling {' and '.join(parts)}", first) as watch:
            if engine.speculation is not None:
                engine.speculation.rehearsing = True
            params = SamplingParams(temperature=1.0 if random else 0.0)
            for batch in (prompts[:1], prompts) if len(engine.rows) > 1 else (prompts,):
                generate(engine, [Request(list(prompt), params, 3) for prompt in batch])
            if engine.speculation is not None:
                engine.speculation.rehearsing = False
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if "InvalidCxxCompiler" not in repr(error):
            raise
        raise UserError("--compile needs a C++ compiler (g++ or clang++, or CXX=...), and none was found") from None
    engine.clear()
    engine.timing = Timing()
    engine.threads.forget()
    return watch.seconds
