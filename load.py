"""Makes an Engine from command-line arguments: checkpoint, model, kernels, ranks, draft, compiled steps.

Read down: the options that several commands share; the checkpoint; `load_engine`, which puts everything together; then
its parts. The files of optional features (kernels, drafts, several ranks) are imported only if they are used.
"""

import argparse
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import DTYPES, Source, available_memory, check_memory, empty_model, is_ours, open_directory, read_model
from cli import Stopwatch, UserError, check_is_file, first_line, number, print_status
from engine import Engine, Request, StepFunctions, Timing, check_prompt, decode, generate, prefill
from model import SCRATCH_SLOTS, Config, Transformer
from sampling import SamplingParams
from tokenizer import Tokenizer

DEFAULT_HEADS = Path(__file__).parent / "training" / "SmolLM2-135M-Instruct-medusa.safetensors"
CACHE_LENGTHS = (512, 2048, 8192, 32768, 131072)  # a few lengths only, so that compiled graphs are reused

# ---------------------------------------------------------------- options


def add_model_options(parser: argparse.ArgumentParser):
    """The options that say which model runs, and how."""
    count = number(int, "at least 1", lambda n: n >= 1)
    add = parser.add_argument_group("the model and the machine").add_argument
    sources = "a checkpoint directory, a Hugging Face directory or hub id, a .gguf file"
    add("--checkpoint_path", help=f"{sources}; default: SmolLM2-135M-Instruct")
    add("--device", help="cpu, cuda, cuda:1, mps ...; default: the fastest that is available")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the KV cache, and of weights that are not quantized")
    add("--dequantize", action="store_true", help="unpack quantized weights to --dtype, which takes more memory")
    length = "KV cache positions per row; default: as many as the run needs, rounded up (--interactive: up to 8192)"
    add("--max_seq_length", type=count, help=length)
    add("--kernels", choices=("auto", "torch"), default="auto", help="torch: only PyTorch's own operations")
    exact = "with quantized weights, do not quantize the activations to 8 bits (CPU)"
    add("--exact_activations", action="store_true", help=exact)
    threads = "CPU threads for each step; default: the number that is fastest at the moment, up to OMP_NUM_THREADS"
    add("--threads", type=number(int, "between 1 and 1024", lambda n: 1 <= n <= 1024), metavar="N", help=threads)
    add("--compile", action="store_true", help="compile the decode step with torch.compile")
    add("--compile_prefill", action="store_true", help="compile prefill with torch.compile")

    add = parser.add_argument_group("speculation: several tokens per pass over the weights").add_argument
    add("--draft_checkpoint_path", metavar="PATH", help="a smaller model with the same vocabulary proposes tokens")
    kinds = "prompt-lookup: propose what followed the latest tokens earlier in the text; lookup:FILE: search this text"
    heads = DEFAULT_HEADS.relative_to(Path(__file__).parent)
    kinds += f" file, too; medusa or medusa:FILE: heads that were trained for the model (default: {heads}); int4-self: "
    kinds += "the model itself in 4 bits (--draft_checkpoint_path may name that copy). May be repeated; none (the "
    kinds += "default): no draft"
    add("--draft", metavar="KIND", type=draft_kind, action="append", help=kinds)
    how_many = "tokens to propose per step; auto (the default): the number that is fastest, measured while running"
    add("--speculate_k", metavar="N", type=draft_length, help=how_many)
    add("--draft_tp", action="store_true", help="split the draft model over the ranks, too, instead of copying it")


def draft_length(text: str) -> int | str:
    """The value of --speculate_k."""
    from speculative import MAX_K

    if text == "auto" or (text.isdecimal() and 1 <= int(text) <= MAX_K):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"must be auto, or between 1 and {MAX_K}, not {text}")


def draft_kind(text: str) -> str:
    kind, _, path = text.partition(":")
    if text in ("none", "prompt-lookup", "medusa", "int4-self") or (kind in ("lookup", "medusa") and path):
        return text
    kinds = "prompt-lookup, lookup:FILE, medusa, medusa:FILE, int4-self, none"
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {kinds}")


def check_model_options(args):
    """Raise UserError if options contradict each other."""
    if args.draft_checkpoint_path == "":
        raise UserError("--draft_checkpoint_path is empty; give what --checkpoint_path takes, or leave it out")
    if args.speculate_k and args.draft in (None, ["none"]) and not args.draft_checkpoint_path:
        raise UserError("--speculate_k needs something that proposes: --draft_checkpoint_path or --draft")
    if args.draft_tp and not args.draft_checkpoint_path:
        raise UserError("--draft_tp is about the model of --draft_checkpoint_path, which is not given")
    kinds = [kind.partition(":")[0] for kind in args.draft or ()]
    if "none" in kinds:
        if len(kinds) > 1 or args.draft_checkpoint_path:
            raise UserError("--draft none and other drafts exclude each other")
        args.draft = []
    if twice := [kind for kind in ("prompt-lookup", "medusa", "int4-self") if kinds.count(kind) > 1]:
        raise UserError(f"--draft {twice[0]} is given twice")


# ---------------------------------------------------------------- the checkpoint, before its weights are read


class SingleProcess:
    """The interface of ranks.Ranks for a run with one process, without torchrun."""

    rank, size = 0, 1

    def device(self, name: str | None):
        return name

    def portion(self, device: torch.device) -> float:
        return 1.0

    def shard(self, device: torch.device):
        return None

    def share(self, work: Callable = lambda: None):
        return work()

    in_turn = share

    def check_same(self, source: Source):
        pass


class Checkpoint:
    """An opened model: its source, and its tokenizer."""

    def __init__(self, source: Source):
        self.source, self.path, self.name = source, source.path, source.name
        self.config, self.quantization = source.config, source.quantization
        self.tokenizer_files = source.tokenizer_files()
        self.tokenizer = Tokenizer(self.tokenizer_files)


def find_source(name: str | None) -> Source:
    """What --checkpoint_path names. All but directories of ours need the files of sources/."""
    path = Path(os.path.expanduser(name or ""))
    if name and (path / "config.json").exists() and is_ours(path):
        return open_directory(path)
    try:
        from sources.opening import open_source
    except ModuleNotFoundError as error:
        raise UserError(f"{path} is no checkpoint directory, and to read it, {error.name} is missing") from None
    return open_source(name)


def open_checkpoint(args, ranks) -> Checkpoint:
    """Open the model of --checkpoint_path."""
    source = ranks.in_turn(lambda: find_source(args.checkpoint_path))
    ranks.check_same(source)
    checkpoint, quantization = Checkpoint(source), source.quantization
    drafts_itself = "int4-self" in (args.draft or ()) and not args.draft_checkpoint_path
    if drafts_itself and quantization is not None and quantization.bits < 8 and source.path.is_file():
        args.dequantize = True
        if ranks.rank == 0:
            print_status(f"--draft int4-self: {source.path.name} drafts in its own bits, and the model is dequantized")
    if args.dequantize:
        checkpoint.quantization = None
    return checkpoint


def choose_cache_length(args, config: Config, needed: int) -> int:
    """Cache positions per row: --max_seq_length, or `needed` rounded up to a common length within the context."""
    given, context = args.max_seq_length, config.max_seq_length
    if given is not None:
        if given > context and not config.alibi:  # ALiBi has no maximum context
            raise UserError(f"--max_seq_length {given} is more than the model's context of {context}")
        return given
    return min(next((length for length in CACHE_LENGTHS if length >= needed), needed), context)


# ---------------------------------------------------------------- the engine


def load_engine(args, checkpoint: Checkpoint, rows: int, length: int, ranks) -> tuple[Engine, float]:
    """An engine with `rows` cache rows of `length` positions, and the seconds that loading model and draft took."""
    device, dtype = choose_device(ranks.device(args.device)), DTYPES[args.dtype]
    sources = open_drafts(args, checkpoint, ranks)
    slots = rows * (length + SCRATCH_SLOTS)
    check_memory(checkpoint.config, device, dtype, slots, checkpoint.quantization, ranks.portion(device))
    module = kernels_module(device, "auto")
    if device.type == "cpu" and module is not None:
        module.prepare_process(args.threads)
    start = time.perf_counter()
    how = (args.kernels, args.exact_activations, ranks.shard(device))
    model = load_model(checkpoint.source, device, dtype, *how, dequantize=args.dequantize)
    speculation = make_speculation(args, checkpoint, model, sources)
    load_s = time.perf_counter() - start
    steps = compiled_steps(args.compile, args.compile_prefill)
    chunk_tokens = 128 if checkpoint.quantization else 256
    ranks_or_none = ranks if ranks.size > 1 else None
    engine = Engine(model, rows, length, steps, chunk_tokens, speculation, ranks_or_none)
    engine.threads.fixed = args.threads is not None or device.type != "cpu"
    return engine, load_s


def load_model(
    source: Source | Path,
    device="cpu",
    dtype=torch.bfloat16,
    kernels: str = "auto",
    exact_activations: bool = False,
    shard=None,
    dequantize: bool = False,
) -> Transformer:
    """The model of a source or a checkpoint directory (checkpoint.read_model), with kernels installed as
    `install_kernels` says. dequantize: quantized matrices become matrices in dtype."""
    module = kernels_module(torch.device(device), kernels)
    start = getattr(module, "pack_while_reading", None)
    if start is None or dequantize or kernels != "auto":
        model = read_model(source, device, dtype, shard, getattr(module, "HugePages", None))
    else:
        memory = getattr(module, "HugePages", None)
        model = read_model(source, device, dtype, shard, memory, lambda model: start(model, exact_activations))
    if dequantize:
        from formats import repack_layers

        repack_layers(model, (), "--dequantize")
    return install_kernels(model, kernels, exact_activations)


def choose_device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {name} cannot be used here: known are cpu, cuda, cuda:1 (and so on) and mps")
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name} cannot be used here: {first_line(error)}") from None


def kernels_module(device: torch.device, kernels: str):
    """The module that makes models fast on a device, or None: cpu.install, which also manages memory and threads, or
    kernels_triton, unless `kernels` is "torch"."""
    try:
        if device.type == "cpu":
            from cpu import install as module
        elif device.type == "cuda" and kernels == "auto":
            import kernels_triton as module
        else:
            return None
    except ModuleNotFoundError as error:  # of Triton or of the file: models run without either
        print_status(f"{error.name} is not there: torch's own operations are used instead of our kernels")
        return None
    return module


def install_kernels(model, kernels: str = "auto", exact_activations: bool = False):
    """Install the kernels for the device of a model (or of its Medusa heads) if `kernels` is "auto" and they can run
    there. Returns the model.

    exact_activations: quantized layers do not quantize their activations (CPU).
    """
    module = kernels_module(model.device, kernels)
    if module is not None:
        backend = module.install(model, kernels == "auto", exact_activations)
        if isinstance(model, Transformer):
            unpack_without_kernels(model, kernels)
            model.use(backend)
    elif isinstance(model, Transformer):
        unpack_without_kernels(model, kernels)
    return model


def unpack_without_kernels(model: Transformer, kernels: str):
    """Unpack the quantized weights for which no kernels are installed, because products with unpacked weights are
    several times as fast as the reference, which unpacks them in every step. With `kernels` "torch" they stay."""
    layers = [module for module in model.modules() if hasattr(module, "scheme")]
    if kernels != "auto" or not layers:
        return
    from formats import repack_layers

    extra = sum(layer.in_features * layer.out_features for layer in layers) * model.norm.weight.element_size()
    if extra < available_memory(model.device):
        return repack_layers(model, ())
    print_status("no kernels, and no memory to unpack the quantized weights: each step unpacks them, which is slow")


# ---------------------------------------------------------------- compiled steps


def compiled_steps(decoding: bool, prefilling: bool) -> StepFunctions:
    warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # scales are float16, which torch 2.13 warns about
    compiled = torch.compile(prefill, dynamic=True, fullgraph=True) if prefilling else prefill
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
        shapes = (x.shape if isinstance(x, Tensor) else x if isinstance(x, int) else None for x in arguments)
        case = model, model.blocks[0].attention.cache.k.shape, *shapes
        if case not in graphs:
            # Dynamo stores graphs by code object, so each case gets its own copy of the code.
            own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            options = {"triton.cudagraphs": True, "guard_filter_fn": guards_on_arguments}  # like mode="reduce-overhead"
            if model.backend.thread_invariant:  # the kernels have their own threads; other operations are small
                options["cpp.threads"] = 1
            graphs[case] = torch.compile(own, fullgraph=True, dynamic=False, options=options)
        return graphs[case](model, *arguments)

    return step


def guards_on_arguments(guards) -> list[bool]:
    """Which guards a graph keeps: all but those on the models and on torch's global state (the number of threads)."""
    on_model = re.compile(r"(L\['(model|draft|vocabulary)'\]|(model|draft|vocabulary)\b)")
    return [guard.guard_type != "GLOBAL_STATE" and on_model.match(guard.name) is None for guard in guards]


def compile_counts() -> tuple[int, int]:
    """(graphs compiled, graph breaks) in this process so far."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled: an import, only to read zeros, would take a second
        return 0, 0
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


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


def warm_up(args, engine: Engine, prompts: list[list[int]], random: bool) -> float:
    """Compile the steps by running some of each kind. Returns the seconds that this took, which no rate includes.

    Decode gets two graphs, one for a single row and one for all rows.
    """
    parts = [name for name, wanted in (("decode", args.compile), ("prefill", args.compile_prefill)) if wanted]
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


# ---------------------------------------------------------------- drafts


@dataclass
class DraftSources:
    """What the drafts need from files, apart from weights."""

    kinds: dict[str, str]  # of --draft: kind -> what follows its colon
    texts: list[list[int]]  # token ids of the files of lookup:FILE
    source: Source | None  # of the draft model, if it is read from a checkpoint


def open_drafts(args, checkpoint: Checkpoint, ranks) -> DraftSources:
    """Check what can be checked before the model's weights are read."""
    kinds = {kind.partition(":")[0]: kind.partition(":")[2] for kind in args.draft or ()}
    texts = ranks.share(lambda: read_lookup_texts(args, checkpoint))
    if "medusa" in kinds:
        from drafts.heads import describe_heads

        describe_heads(heads_path(kinds))
    source = None if args.draft_checkpoint_path is None else open_draft_model(args, checkpoint, ranks)
    quantization = checkpoint.quantization
    if "int4-self" in kinds and source is None and quantization is not None and quantization.bits < 8:
        four = f"{checkpoint.path} has {quantization.bits} bits already, and a draft should be smaller"
        raise UserError(f"--draft int4-self: {four}; give --dequantize to run the model in {args.dtype}")
    return DraftSources(kinds, texts, source)


def open_draft_model(args, checkpoint: Checkpoint, ranks) -> Source:
    """The source of --draft_checkpoint_path, after checking that this model can be a draft."""
    target, config, tokenizer = checkpoint.path, checkpoint.config, checkpoint.tokenizer
    source = ranks.in_turn(lambda: find_source(args.draft_checkpoint_path))
    ranks.check_same(source)
    path, other = source.path, source.config
    if "int4-self" in (args.draft or ()) and other != config:
        raise UserError(f"--draft int4-self: {path} is another model than {target}; leave out --draft int4-self")
    if difference := Tokenizer(source.tokenizer_files()).difference(tokenizer):
        raise UserError(f"{path} cannot propose tokens for {target}: {difference}")
    if tokenizer.vocabulary is None and other.vocab_size != config.vocab_size:
        raise UserError(f"{path} has {other.vocab_size} tokens, {target} {config.vocab_size}, and no tokenizer")
    return source


def make_speculation(args, checkpoint: Checkpoint, model: Transformer, sources: DraftSources):
    """The Speculation that the arguments ask for, or None."""
    if not (args.draft or args.draft_checkpoint_path):
        return None
    from speculative import MAX_K, Speculation

    drafts, automatic = make_drafts(args, checkpoint, model, sources), args.speculate_k in (None, "auto")
    k = MAX_K if automatic else args.speculate_k
    heads = getattr(drafts[0], "heads", None)
    if not automatic and len(drafts) == 1 and heads is not None and heads.n < k:
        print_status(f"--speculate_k {k}: there are only {heads.n} heads, so {heads.n} tokens are proposed")
    return Speculation(drafts, k, automatic)


def make_drafts(args, checkpoint: Checkpoint, model: Transformer, sources: DraftSources) -> list:
    """The drafts that the arguments ask for, the cheapest first."""
    from drafts.draft_model import DraftVocabulary, ModelDraft, output_vectors
    from drafts.heads import MedusaDraft, make_heads
    from drafts.retrieval import RetrievalDraft

    def with_kernels(module):
        return install_kernels(module, args.kernels, args.exact_activations)

    kinds, drafts = sources.kinds, []
    file = read_heads_file(kinds, checkpoint, model)
    if kinds.keys() & {"prompt-lookup", "lookup"}:
        drafts.append(RetrievalDraft(sources.texts, lookup_name(args.draft)))
    if "medusa" in kinds:
        drafts.append(MedusaDraft(with_kernels(make_heads(file, model))))
    if "int4-self" in kinds or args.draft_checkpoint_path:
        shares_caches, vocabulary = "int4-self" in kinds, None
        draft = load_draft(args, checkpoint, model, sources)
        if file is not None:
            ids = file.vocabulary[file.vocabulary < draft.config.vocab_size]
            vocabulary = with_kernels(DraftVocabulary(ids, output_vectors(model if shares_caches else draft, ids)))
        name = "int4-self" if shares_caches else Path(args.draft_checkpoint_path).resolve().name
        drafts.append(ModelDraft(draft, shares_caches, vocabulary, name))
    return drafts


def lookup_name(kinds: list[str]) -> str:
    """The name of the one draft that all prompt-lookup and lookup:FILE are, for example prompt-lookup+lookup:a.txt."""
    parts = (kind.partition(":") for kind in kinds if "lookup" in kind.partition(":")[0])
    return "+".join(kind + colon + Path(path).name for kind, colon, path in parts)


def heads_path(kinds: dict[str, str]) -> Path:
    """The file that --draft medusa or medusa:FILE names."""
    return Path(os.path.expanduser(kinds["medusa"])) if kinds.get("medusa") else DEFAULT_HEADS


def read_heads_file(kinds: dict[str, str], checkpoint: Checkpoint, model: Transformer):
    """The file of --draft medusa:FILE, by default that of the default model. Its vocabulary makes draft models faster,
    too; so without --draft medusa, the file is read as well, if it is one for this model. Otherwise returns None."""
    from drafts.heads import read_heads

    try:
        return read_heads(heads_path(kinds), model, checkpoint.name)
    except UserError:
        if "medusa" in kinds:
            raise
        return None


def read_lookup_texts(args, checkpoint: Checkpoint) -> list[list[int]]:
    """The tokens of the file of each --draft lookup:FILE."""
    return [read_lookup_text(kind.partition(":")[2], checkpoint) for kind in args.draft or () if kind[:7] == "lookup:"]


def read_lookup_text(name: str, checkpoint: Checkpoint) -> list[int]:
    path = Path(os.path.expanduser(name))
    if checkpoint.tokenizer.vocabulary is None:
        raise UserError("--draft lookup:FILE needs text, but the checkpoint has no tokenizer")
    if not path.exists():
        raise UserError(f"--draft lookup:{path}: there is no such file")
    try:
        check_is_file(path)
        ids = checkpoint.tokenizer.encode(path.read_text(encoding="utf-8-sig"), add_bos=False)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"--draft lookup:{path} cannot be read: {error}") from None
    check_prompt(ids or [0], checkpoint.config, len(ids) + 1)
    return ids


def load_draft(args, checkpoint: Checkpoint, model: Transformer, sources: DraftSources) -> Transformer:
    """The model of --draft_checkpoint_path, or for --draft int4-self the model itself in 4 bits with groups of 32.

    Each rank has the whole draft, unless --draft_tp splits it, or the target model is split and shares its caches.
    """
    device, dtype = model.norm.weight.device, model.norm.weight.dtype
    if sources.source is not None:
        shard = model.shard if args.draft_tp or "int4-self" in sources.kinds else None
        return load_model(sources.source, device, dtype, args.kernels, args.exact_activations, shard)
    from formats import Quantization, quantize_model, swap

    print_status("quantizing the draft to 4 bits ...")
    draft = quantize_model(read_model(checkpoint.source, device, dtype), Quantization("int4", 32, "int8"))
    if model.shard is not None:
        shard, whole = model.shard.fit(draft), draft.state_dict()
        schemes = {name: layer.scheme for name, layer in draft.named_modules() if hasattr(layer, "scheme")}
        slices, draft = shard.slices(draft), swap(empty_model(model.config, shard=shard), schemes.get)
        draft.load_state_dict({name: part.of(whole[name]).clone() for name, part in slices.items()}, assign=True)
    return install_kernels(draft, args.kernels, args.exact_activations)
