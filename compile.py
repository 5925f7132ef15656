"""What concerns torch.compile: compiled steps, compiling them while a server runs, and warming up.

Read down: `compiled_steps`, which the engine runs instead of its own; the guards of their graphs;
`warm_up`, which compiles them before a measurement. Without --compile and --compile_prefill, the
compiled steps are the plain ones, and nothing is warmed up.
"""

import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from cli import Stopwatch, UserError, first_line, print_status
from engine import Engine, Request, StepFunctions, decode, generate, prefill
from sampling import SamplingParams

# ---------------------------------------------------------------- compiled steps


def compiled_steps(decoding: bool, prefilling: bool) -> StepFunctions:
    """The functions of a step. decoding, prefilling: whether decode and prefill are compiled."""
    # Scales are float16, which torch 2.13 warns about.
    warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")
    compiled = prefill
    if prefilling:
        options = {"guard_filter_fn": drop_global_state_guards}
        compiled = torch.compile(prefill, dynamic=True, fullgraph=True, options=options)
    if not decoding:
        return StepFunctions(compiled)
    per_shape = compile_per_shape(decode)
    return StepFunctions(compiled, per_shape, fixed_shapes=True, compile=compile_per_shape)


def compile_per_shape(function: Callable) -> Callable:
    """Compile function(model, ...) as one graph for each model, cache size and shapes of arguments.

    The graphs skip Dynamo's guards on the model, and on other modules that are arguments: a model
    has about 2,000, which take a fifth of a step of the default model in int4. Therefore only the
    contents of a model's caches may change between steps. All arguments are positional.
    """
    graphs = {}

    def step(model, *arguments):
        case = model, model.cache_size, *shapes_of(arguments)
        if case not in graphs:
            names = zip(function.__code__.co_varnames, (model, *arguments))
            modules = {name for name, value in names if isinstance(value, nn.Module)}
            options = {
                "triton.cudagraphs": True,  # like mode="reduce-overhead"
                "guard_filter_fn": partial(drop_module_guards, modules),
            }
            if model.backend.thread_invariant:
                options["cpp.threads"] = 1  # the kernels have their own; other operations are small
            # Dynamo stores graphs by code object, so each case gets its own copy of the code.
            code = function.__code__.replace()
            own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
            graphs[case] = torch.compile(own, fullgraph=True, dynamic=False, options=options)
        return graphs[case](model, *arguments)

    return step


def shapes_of(arguments: tuple) -> Iterator:
    """The shapes of all tensors in the arguments, also in tuples, and the values of integers. Any
    other argument counts as None."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from shapes_of(x)
        elif isinstance(x, Tensor):
            yield x.shape
        else:
            yield x if isinstance(x, int) else None


def drop_global_state_guards(guards) -> list[bool]:
    """Which guards of a graph are kept: all except the guard on torch's global state. This state
    includes the number of threads, which changes from step to step."""
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


def drop_module_guards(modules: set[str], guards) -> list[bool]:
    """Which guards of a graph are kept: what `drop_global_state_guards` keeps, except for guards on
    the function's parameters `modules` and what they contain. The names of guards look like
    `model.blocks` or `L['model'].blocks`."""
    roots = [re.match(r"(?:L\[')?(\w*)", guard.name)[1] for guard in guards]
    kept = drop_global_state_guards(guards)
    return [keep and root not in modules for keep, root in zip(kept, roots)]


def compile_counts() -> tuple[int, int]:
    """(graphs compiled, graph breaks) in this process so far."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second, and would count nothing
        return 0, 0
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# ---------------------------------------------------------------- compiling


@torch.no_grad()
def compile_while_serving(engine: Engine):
    """Compile the decode step for one row and for all rows, and then let the engine use it.

    It runs steps that have rows of padding only. They write to the caches' scratch slots alone, so
    the engine may run at the same time.
    """
    steps = compiled_steps(True, False)
    try:
        with Stopwatch("compiling decode while eager steps serve", "a minute or more the first time") as watch:
            for n in {1, len(engine.rows)}:
                inputs = torch.tensor([[0] * n, [-1] * n, list(range(n))])
                steps.decode(engine.model, inputs, engine.sampling)
    except Exception as error:  # no C++ compiler, for example
        return print_status(f"--compile failed, eager steps go on: {first_line(error)}")
    engine.next_steps = replace(steps, prefill=engine.steps.prefill)
    print_status(f"decode is compiled ({watch.seconds:.0f} s)")


def warm_up(engine: Engine, prompts: list[list[int]], random: bool) -> float:
    """Compile the steps by running some of each kind. Returns the seconds that this took, which no
    rate includes.

    Decode gets two graphs, one for a single row and one for all rows.
    """
    is_compiled = {"decode": engine.steps.fixed_shapes, "prefill": engine.steps.prefill is not prefill}
    kinds = [kind for kind, yes in is_compiled.items() if yes]
    if not kinds:
        return 0.0

    batches = [prompts]
    if len(engine.rows) > 1:
        batches.insert(0, prompts[:1])
    params = SamplingParams(temperature=1.0 if random else 0.0)
    hint = "seconds to minutes the first time; torch keeps the result on disk"
    try:
        with Stopwatch(f"compiling {' and '.join(kinds)}", hint) as watch, engine.decoding.rehearsal():
            for batch in batches:
                generate(engine, [Request(list(prompt), params, 3) for prompt in batch])
    except torch._dynamo.exc.Unsupported as error:  # a print in `forward`, for example
        place = error.real_stack[-1]
        where = f"{place.filename}:{place.lineno}, {place.line}"
        raise UserError(f"--compile cannot compile {where} ({first_line(error)}); leave out --compile") from None
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if "InvalidCxxCompiler" not in repr(error):
            raise
        raise UserError("--compile needs a C++ compiler (g++ or clang++, or CXX=...), and none was found") from None

    engine.clear()
    engine.reset_timing()
    engine.threads.forget()
    return watch.seconds
