"""Generate text from a checkpoint: load, prefill, decode, print.

Read from the bottom up: `main`, then what it calls: prompts, the command line, `generate` and its two steps. What is
measured is in report.py, a conversation (--interactive) in chat.py.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported; run_command takes over from there

import argparse
import json
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from chat_template import ChatTemplate
from checkpoint import DTYPES, check_memory, read_config, read_quantization
from cli import (
    ArgumentParser,
    HelpFormatter,
    Stopwatch,
    UserError,
    keep_freed_memory,
    number,
    print_status,
    run_command,
)
from linear import Quantization, quantize_model
from load import choose_device, install_kernels, load_model
from model import Config, Transformer
from report import (
    Timing,
    compile_counts,
    kv_bytes,
    measurements,
    print_report,
    read_bandwidth,
    roofline_text,
    rooflines,
)
from sampling import Sampling, known, sample
from speculative import AUTO_K, MOST_K, Lookup, ModelDraft, Speculation
from tokenizer import TextStream, Tokenizer

PREFILL_TOKENS = 2048  # in one pass: enough to be bound by arithmetic, few enough to bound the memory of long prompts
CACHE_LENGTHS = (512, 2048, 8192, 32768, 131072)  # a few lengths only, so that compiled graphs are found again

CONVERSATION_LENGTH = 8192  # of --interactive, where nothing says how long it will become

# ---------------------------------------------------------------- the two steps


def prefill(model: Transformer, tokens: Tensor, input_pos: Tensor, rows: Tensor | None) -> Tensor:
    """Tokens (B,S) at positions (B,S) of cache rows (B,) -> logits (B,V) after each row's last token."""
    return model(tokens, input_pos, rows, gather=False)


def decode(model, token: Tensor, input_pos: Tensor, rows: Tensor | None, settings: Sampling, seen: Tensor | None):
    """One step for every row: its token (B,) at position (B,), -1 where the row has ended -> the next token (B,)."""
    logits = model(token[:, None], input_pos[:, None], rows, gather=False)
    return choose(model, logits, settings, input_pos + 1, seen)


def choose(model, logits: Tensor, settings: Sampling, position: Tensor, seen: Tensor | None) -> Tensor:
    """The next token (B,) by logits (B,V), but none that only pads the table."""
    if model.split is not None:  # over ranks, each of which has some of the logits
        return model.split.choose(model.config, logits, settings, position, seen)
    return sample(known(logits, model.config.n_token), settings, position, seen)


@dataclass
class Steps:
    """The two steps, plain or compiled. With fixed shapes a row that has ended stays in the batch, as padding.

    compiled(function) does to a function (model, ...) of fixed shapes what was done to decode.
    """

    prefill: Callable = prefill
    decode: Callable = decode
    fixed_shapes: bool = False
    compiled: Callable = lambda function: function


def compiled_steps(decoding: bool, prefilling: bool) -> Steps:
    warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # scales are float16; torch 2.13 remarks on it
    return Steps(
        torch.compile(prefill, dynamic=True, fullgraph=True) if prefilling else prefill,
        one_graph_each(decode) if decoding else decode,
        decoding,
        one_graph_each if decoding else Steps.compiled,
    )


def one_graph_each(function: Callable) -> Callable:
    """function(model, ...) as one graph for each model, size of cache and shapes of its arguments.

    What a graph takes for granted of the model is not checked again at every step: some 2,000 guards, which take a
    fifth of a step of the default model in int4. So a model must not be changed between steps, but for its caches.
    """
    graphs = {}

    def step(model, *arguments):
        shapes = (x.shape if isinstance(x, Tensor) else None for x in arguments)
        case = model, model.blocks[0].attention.k_cache.shape, *shapes
        if case not in graphs:
            # Graphs belong to code objects: each case has its own.
            own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            options = {"triton.cudagraphs": True, "guard_filter_fn": guards_on_arguments}  # reduce-overhead, and ours
            graphs[case] = torch.compile(own, fullgraph=True, dynamic=False, options=options)
        return graphs[case](model, *arguments)

    return step


def guards_on_arguments(guards) -> list[bool]:
    return [re.match(r"(L\['model'\]|model\b)", guard.name) is None for guard in guards]


# ---------------------------------------------------------------- generation


@dataclass
class Batch:
    """The rows that are being continued, B of them, before a step."""

    numbers: list[int]  # the cache row of each
    live: list[int]  # those that go on; with fixed shapes the others stay, as padding
    slots: int  # places in a cache row
    rows: Tensor | None  # (B,) int64, numbers as model.forward takes them
    before: Tensor  # (B,) int64, the last token that the cache holds
    token: Tensor  # (B,) int64, the one after it, which the step reads
    position: Tensor  # (B,) int64, its place; -1 where the row has ended
    settings: Sampling
    seen: Tensor | None  # (B,V) bool, what the repetition penalty counts

    def keep(self, live: list[int], fixed_shapes: bool):
        """The other rows have ended."""
        if len(live) == len(self.live):
            return
        keep = torch.tensor([self.numbers.index(row) for row in live], device=self.token.device)
        self.live = live
        if fixed_shapes:
            self.position = torch.full_like(self.position, -1).index_put((keep,), self.position[keep])
            return
        self.numbers, self.rows = live, torch.tensor(live, device=self.token.device)
        self.before, self.token, self.position = self.before[keep], self.token[keep], self.position[keep]
        self.settings, self.seen = self.settings.rows(keep), None if self.seen is None else self.seen[keep]

    def advance(self, found: Tensor):
        """The step found these tokens (B,n), of each row a few and then -1."""
        count = 1
        if found.shape[1] == 1:
            self.before, self.token = self.token, found[:, 0]
        else:
            count = (found >= 0).sum(1)  # (B,)
            row, line = torch.arange(len(found), device=found.device), torch.cat([self.token[:, None], found], 1)
            self.before, self.token = line[row, count - 1], line[row, count]  # not views, which graphs tell by strides
        self.position = torch.where(self.position < 0, -1, self.position + count)
        if self.seen is not None:
            self.seen.scatter_(1, torch.where(found < 0, self.token[:, None], found), True)


class Output:
    """What each row says, and when it has said enough."""

    def __init__(self, prompts: list[list[int]], limits: list[int], stop_ids, on_token: Callable | None):
        self.texts = [list(prompt) for prompt in prompts]  # with what is new
        self.new: list[list[int]] = [[] for _ in prompts]
        self.limits, self.stop_ids, self.on_token = limits, stop_ids, on_token
        self.stopped: set[int] = set()  # the rows that ended before their limit

    def take(self, row: int, tokens: list[int]) -> bool:
        """Note a row's new tokens, as far as it wants them; True if it goes on."""
        for token in tokens:
            self.texts[row].append(token)
            self.new[row].append(token)
            if token in self.stop_ids:
                self.stopped.add(row)
            last = row in self.stopped or len(self.new[row]) == self.limits[row]
            if self.on_token is not None and self.on_token(row, token, last):
                self.stopped.add(row)
            if last or row in self.stopped:
                return False
        return True

    def results(self) -> list[tuple[list[int], str]]:
        return [(ids, "stop" if row in self.stopped else "length") for row, ids in enumerate(self.new)]


@torch.no_grad()  # not inference_mode, which is 4 % faster eager on CPU: compiled graphs still trip over it
def generate(
    model, prompts, settings, max_new_tokens, stop_ids=(), steps=None, timing=None, on_token=None, cached=None,
    speculation=None,
):  # fmt: skip
    """Continue prompts (lists of token ids), each in a cache row of its own; setup_caches has made that many.

    settings: the Sampling of these rows. A row whose cache is full ends before max_new_tokens; the last token needs
    no slot. on_token(row, id, last) hears of every token as it is decided, and ends the row where it answers True.
    timing: a Timing to add to. cached: of each row, how many tokens of its prompt the cache holds already, from
    earlier calls (fewer than all: the last one's logits are wanted). speculation: a Speculation, which may find several
    tokens in a step. Returns of each row (new token ids, "stop" or "length"); the stop token, if there was one, is the
    last id.
    """
    steps, timing = steps or Steps(), timing or Timing()
    slots = model.blocks[0].attention.k_cache.shape[2] - 8
    limits = [min(max_new_tokens, slots - len(prompt) + 1) for prompt in prompts]
    output = Output(prompts, limits, stop_ids, on_token)

    def take(live: list[int], ids: list[list[int]]) -> list[int]:
        """Note the new tokens of these rows; returns the rows that go on."""
        going = [row for row, tokens in zip(live, ids) if output.take(row, tokens)]
        return going if model.split is None else model.split.agree(going, len(prompts))

    start = time.perf_counter()
    batch = prefilled(model, prompts, settings, steps, cached or [0] * len(prompts), slots)
    ids = batch.token[:, None].tolist()
    timing.add_prefill(time.perf_counter() - start, sum(map(len, prompts)) - sum(cached or ()))
    live = take(batch.live, ids)
    if speculation is not None and live:
        start = time.perf_counter()
        speculation.begin(output.texts)  # a draft model reads the prompts as well
        timing.prefill_s += time.perf_counter() - start

    start = time.perf_counter()
    while live:
        batch.keep(live, steps.fixed_shapes)
        if speculation is None:
            arguments = (batch.token, batch.position, batch.rows, batch.settings, batch.seen)
            found = steps.decode(model, *arguments).clone()[:, None]  # a CUDA graph reuses its output
            ids = found.tolist()
        else:
            found, ids = speculation.step(batch, output.texts, timing)
        batch.advance(found)
        before = sum(map(len, output.new))
        kv = kv_bytes(model, [len(output.texts[row]) for row in live])
        live = take(live, [ids[batch.numbers.index(row)] for row in live])
        now = time.perf_counter()
        timing.add_step(now - start, sum(map(len, output.new)) - before, kv)
        start = now
    return output.results()


def prefilled(model: Transformer, prompts, settings: Sampling, steps: Steps, cached: list[int], slots: int) -> Batch:
    """The rows after their prompts, with the first new token of each."""
    device, numbers = model.norm.weight.device, list(range(len(prompts)))
    seen = None if settings.repetition_penalty is None else seen_tokens(prompts, model.config.vocab_size, device)
    position = torch.tensor([len(prompt) for prompt in prompts], device=device)  # (B,), of the token to come
    logits = prefill_rows(steps.prefill, model, dict(enumerate(prompts)), cached)
    token = choose(model, torch.stack([logits[row] for row in numbers]), settings, position, seen)  # (B,)
    if seen is not None:
        seen.scatter_(1, token[:, None], True)
    last = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    return Batch(numbers, numbers, slots, None, last, token, position, settings, seen)


def prefill_rows(step: Callable, model: Transformer, prompts: dict[int, list[int]], cached: list[int]) -> dict:
    """Fill cache row i with prompts[i], in passes of at most PREFILL_TOKENS; the logits (V,) after each prompt.

    cached: how many tokens of each row are there already. A pass holds only the rows that still have tokens, so that a
    long prompt does not pad the short ones.
    """
    device = model.norm.weight.device
    logits: dict[int, Tensor] = {}
    done = list(cached)  # tokens of each row that are in the cache by now
    while active := [row for row, prompt in prompts.items() if len(prompt) > done[row]]:
        width = min(max(1, PREFILL_TOKENS // len(active)), max(len(prompts[row]) - done[row] for row in active))
        tokens = torch.zeros(len(active), width, dtype=torch.int64)
        input_pos = torch.full((len(active), width), -1)
        for i, row in enumerate(active):
            part = prompts[row][done[row] : done[row] + width]
            tokens[i, : len(part)] = torch.tensor(part)
            input_pos[i, : len(part)] = torch.arange(done[row], done[row] + len(part))
            done[row] += len(part)
        rows = None if active == list(range(len(cached))) else torch.tensor(active, device=device)
        out = step(model, tokens.to(device), input_pos.to(device), rows).clone()
        logits |= {row: out[i] for i, row in enumerate(active) if len(prompts[row]) == done[row]}
    return logits


def seen_tokens(prompts: list[list[int]], V: int, device) -> Tensor:
    """(B,V) bool: the tokens of each prompt."""
    seen = torch.zeros(len(prompts), V, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return seen.to(device)


def cache_length(config: Config, needed: int, given: int | None) -> int:
    """Cache positions a row: as given, or `needed` rounded up to one of a few lengths, within the model's context."""
    if given is not None:
        return given
    return min(next((length for length in CACHE_LENGTHS if length >= needed), needed), config.max_seq_length)


# ---------------------------------------------------------------- command line


def token_ids(text: str) -> list[int]:
    return [int(part) for part in text.replace(",", " ").split()]


def parse_arguments(argv=None):
    count = number(int, "at least 1", lambda n: n >= 1)
    parser = ArgumentParser(description="Generate text.", formatter_class=HelpFormatter)
    add = parser.add_argument_group("what to continue (each may be repeated; together they are one batch)").add_argument
    add("--prompt", action="append", default=[], help="a text ('Hello, my name is' where nothing else is given)")
    add("--prompt_file", action="append", type=Path, default=[], help="a file with a prompt on every line")
    add("--prompt_ids", action="append", type=token_ids, default=[], help="token ids: 5,17,33 (needs no tokenizer)")
    add("--synthetic_prompt", action="append", type=count, default=[], metavar="N", help="N arbitrary tokens")
    add("--batch_size", type=count, default=1, help="copies of every prompt")
    add("--num_samples", type=count, default=1, help="how often the whole batch is continued, each with its own seeds")

    add = parser.add_argument_group("conversation").add_argument
    add("--chat", action="store_true", help="prompts are messages to the model, set in its own chat template")
    add("--system", metavar="TEXT", help="the system message before them (implies --chat)")
    interactive = "talk at the terminal, turn by turn (any --prompt is a first turn); /help lists what else can be said"
    add("--interactive", action="store_true", help=interactive)

    add = parser.add_argument_group("how to continue it").add_argument
    not_negative = number(float, "at least 0 and finite", lambda t: 0 <= t < float("inf"))
    positive = number(float, "above 0 and finite", lambda t: 0 < t < float("inf"))
    up_to_1 = number(float, "above 0 and at most 1", lambda p: 0 < p <= 1)
    any_length = "at most this many a prompt (default: 200; of an --interactive answer, what the context holds)"
    add("--max_new_tokens", type=count, help=any_length)
    stop = "end before this text, which may be any, and is not printed; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--ignore_eos", action="store_true", help="go on after an end token")
    add("--temperature", type=not_negative, default=0.8, help="0: greedy")
    top_k = number(int, "between 0 and 2^31", lambda k: 0 <= k <= 2**31)
    add("--top_k", type=top_k, default=200, help="draw from the k likeliest; 0: all")
    add("--top_p", type=up_to_1, default=1.0, help="draw from the likeliest tokens that make up p")
    min_p = number(float, "at least 0 and below 1", lambda p: 0 <= p < 1)
    add("--min_p", type=min_p, default=0.0, help="drop what is less likely than min_p times the likeliest")
    add("--repetition_penalty", type=positive, default=1.0, help="divides the logits of tokens seen before")
    seed = number(int, "within +-2^62", lambda n: abs(n) < 2**62)
    add("--seed", type=seed, default=1234, help="of the first row; every further row and sample has the next")

    add = parser.add_argument_group("the model and the machine").add_argument
    sources = "a checkpoint directory, a Hugging Face directory or hub id, a .gguf file"
    add("--checkpoint_path", help=f"{sources}; without it SmolLM2-135M-Instruct")
    add("--device", help="cpu, cuda, cuda:1, mps ...; without it the fastest there is")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of weights and cache")
    length = "positions of the cache; without it what is needed, rounded up (--interactive: up to 8192)"
    add("--max_seq_length", type=count, help=length)
    add("--kernels", choices=("auto", "torch"), default="auto", help="torch: no kernels of our own, only torch's")
    exact = "quantized weights are multiplied with activations as they are, not with 8 bits of them (CPU)"
    add("--exact_activations", action="store_true", help=exact)
    add("--compile", action="store_true", help="compile the decode step")
    add("--compile_prefill", action="store_true", help="compile prefill")

    add_speculation(parser)
    add = parser.add_argument_group("what to print").add_argument
    add("--json", action="store_true", help="one JSON object on stdout")
    bound = "no text but the most tokens a second the model can reach, at this bandwidth or else the one measured"
    gigabytes = number(float, "above 0 and at most 1e9", lambda n: 0 < n <= 1e9)
    add("--roofline", type=gigabytes, nargs="?", const=0.0, metavar="GB/s", help=bound)
    add("--profile", type=Path, help="write a trace for ui.perfetto.dev to this file; no rates are reported then")
    return checked(parser.parse_args(argv))


def add_speculation(parser: ArgumentParser):
    add = parser.add_argument_group("speculation: several tokens for one reading of the weights").add_argument
    add("--draft_checkpoint_path", metavar="PATH", help="a smaller model with the same vocabulary proposes tokens")
    drafts = (
        "prompt-lookup: what followed the same words before; lookup:FILE: in a text file, too; int4-self: the model"
    )
    add("--draft", metavar="KIND", type=draft_kind, help=f"{drafts} itself in 4 bits (or the checkpoint just named)")
    how_many = "tokens to propose at a time; auto: as many as pay, by what is measured meanwhile (auto)"
    add("--speculate_k", metavar="N", type=look_ahead, help=how_many)

    add("--draft_tp", action="store_true", help="split the draft model over the ranks, too (else each has all of it)")


def checked(args):
    """The arguments, with what follows from them; UserError where they contradict each other."""
    args.chat = args.chat or args.system is not None
    for text in args.stop:
        if not text or any("\ud800" <= c <= "\udfff" for c in text):
            raise UserError("--stop is empty; give the text to end before" if not text else "--stop is not valid UTF-8")
    if args.draft_checkpoint_path == "":
        raise UserError("--draft_checkpoint_path is empty; give what --checkpoint_path takes, or leave it away")
    if args.speculate_k and not (args.draft or args.draft_checkpoint_path):
        raise UserError("--speculate_k needs something that proposes: --draft_checkpoint_path or --draft")
    if args.draft_tp and not args.draft_checkpoint_path:
        raise UserError("--draft_tp is about the model of --draft_checkpoint_path, which is not given")
    if args.draft_checkpoint_path and args.draft not in (None, "int4-self"):
        raise UserError(f"--draft {args.draft} and --draft_checkpoint_path are two drafts; give one of them")
    if args.roofline is not None and (args.profile or args.interactive or args.draft or args.draft_checkpoint_path):
        raise UserError("--roofline runs nothing: no --profile, no --interactive, no draft")
    if args.interactive:
        batch = (args.prompt_file, args.prompt_ids, args.synthetic_prompt, args.batch_size > 1, args.num_samples > 1)
        if args.json or args.profile or any(batch):
            raise UserError("--interactive is one conversation: of the prompts it takes --prompt; no --json, --profile")
    elif args.max_new_tokens is None:
        args.max_new_tokens = 200
    return args


def read_texts(args) -> list[str]:
    """The prompts of the command line that are text."""
    texts = list(args.prompt)
    for path in args.prompt_file:
        try:
            texts += [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt_file {path} cannot be read: {error}") from None
    if not (texts or args.prompt_ids or args.synthetic_prompt):
        if args.prompt_file:
            raise UserError(f"--prompt_file {args.prompt_file[0]} has no line with a prompt")
        texts = ["Hello, my name is"]
    return texts


def read_prompts(args, tokenizer: Tokenizer, template: ChatTemplate | None, config: Config) -> list[list[int]]:
    """The token ids of every prompt of the command line: the texts first."""
    prompts = []
    for text in read_texts(args):
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        message = {"role": "user", "content": text}
        prompts.append(template.encode([*system, message]) if template else tokenizer.encode(text))
    prompts += args.prompt_ids
    for n in args.synthetic_prompt:
        check_length(n, args, config)  # before building it
        prompts.append([(7 + 31 * i) % config.vocab_size for i in range(n)])
    for i, prompt in enumerate(prompts):
        if not prompt and tokenizer.bos_id is None:
            raise UserError("the prompt is empty and the model has no beginning token; give at least one token")
        prompts[i] = prompt or [tokenizer.bos_id]
        check_ids(prompts[i], config)
    return prompts


def look_ahead(text: str) -> int | str:
    """The value of --speculate_k."""
    if text == "auto" or (text.isdecimal() and 1 <= int(text) <= MOST_K):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"must be auto, or between 1 and {MOST_K}, not {text}")


def draft_kind(text: str) -> str:
    if text in ("prompt-lookup", "int4-self") or (text.startswith("lookup:") and text != "lookup:"):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is none of prompt-lookup, lookup:FILE, int4-self")


def make_speculation(args, directory: Path, model: Transformer, tokenizer: Tokenizer, steps: Steps, ranks, sources):
    """What the arguments ask for, or None. sources: the tokens of the texts to look into."""
    if not (args.draft or args.draft_checkpoint_path):
        return None
    if args.draft and "lookup" in args.draft:
        draft = Lookup(sources)
    else:
        other = load_draft(args, directory, model, tokenizer, ranks)
        read = None if args.draft == "int4-self" else partial(prefill_rows, prefill)  # a few tokens, in any number
        draft = ModelDraft(model, other, steps.compiled, read)
    automatic = args.speculate_k in (None, "auto")
    k = AUTO_K if automatic else args.speculate_k
    return Speculation(model, draft, steps, k, automatic)


def read_sources(args, tokenizer: Tokenizer, config: Config) -> list[list[int]]:
    """The tokens of the file of --draft lookup:FILE, where there is one."""
    kind, _, name = (args.draft or "").partition(":")
    if kind != "lookup":
        return []
    path = Path(name).expanduser()
    if tokenizer.vocabulary is None:
        raise UserError("--draft lookup:FILE is about text, and the checkpoint has no tokenizer")
    try:
        ids = tokenizer.encode(path.read_text(encoding="utf-8-sig"), add_bos=False)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"--draft lookup:{path} cannot be read: {error}") from None
    check_ids(ids, config)
    return [ids]


def load_draft(args, directory: Path, model: Transformer, tokenizer: Tokenizer, ranks) -> Transformer:
    """The model of --draft_checkpoint_path, or of --draft int4-self the model itself in groups of 32.

    Of several ranks each has the whole draft, unless --draft_tp splits it or it works in the model's split caches.
    """
    from convert_hf_checkpoint import ensure_checkpoint

    config, device, dtype = model.config, model.norm.weight.device, model.norm.weight.dtype
    if args.draft_checkpoint_path is None:
        quantization = read_quantization(directory)
        if quantization is not None and quantization.mode != "int8":
            raise UserError(f"--draft int4-self: {directory} has 4 bits already; what proposes should be smaller")
        draft = quantize_model(load_model(directory, device, dtype, "torch"), Quantization("int4", 32, "int8"))
        if model.split is not None:
            model.split.cut(draft)
            model.split.connect(draft)
        return install_kernels(draft, args.kernels, args.exact_activations)
    path = ranks.in_turn(lambda: ensure_checkpoint(args.draft_checkpoint_path, args.dtype))
    ranks.check_same(path)
    other = read_config(path)
    if args.draft == "int4-self" and other != config:
        raise UserError(f"--draft int4-self: {path} is another model than {directory}; leave --draft away")
    if difference := Tokenizer(path).difference(tokenizer):
        raise UserError(f"{path} cannot propose tokens for {directory}: {difference}")
    if tokenizer.vocabulary is None and other.vocab_size != config.vocab_size:
        raise UserError(f"{path} has {other.vocab_size} tokens, {directory} {config.vocab_size}, and no tokenizer")
    shard = model.split if args.draft_tp or args.draft == "int4-self" else None
    return load_model(path, device, dtype, args.kernels, args.exact_activations, shard)


def check_ids(ids: list[int], config: Config):
    if outside := [token for token in ids if not 0 <= token < config.vocab_size]:
        raise UserError(
            f"token id {outside[0]} is outside the vocabulary of {config.vocab_size} (0 to {config.vocab_size - 1})"
        )


def check_length(tokens: int, args, config: Config):
    context = args.max_seq_length or config.max_seq_length
    if tokens > context:
        raise UserError(f"the prompt has {tokens} tokens, the context is {context}")


def choose_cache_length(args, config: Config, prompts: list[list[int]]) -> int:
    context = config.max_seq_length
    if args.max_seq_length is not None and args.max_seq_length > context and not config.alibi:  # it has no end
        raise UserError(f"--max_seq_length {args.max_seq_length} is more than the model's context of {context}")
    if args.interactive:
        return args.max_seq_length or min(context, CONVERSATION_LENGTH)
    longest = max(map(len, prompts))
    check_length(longest, args, config)
    return cache_length(config, longest + args.max_new_tokens - 1, args.max_seq_length)


def make_settings(args, sample_number: int, B: int, device: torch.device) -> Sampling:
    seeds = [args.seed + sample_number * B + row for row in range(B)]
    filters = (args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)
    return Sampling.make(B, seeds, *filters, device=device)


def warm_up(args, model: Transformer, prompts: list[list[int]], steps: Steps, speculation=None) -> float:
    """Compile by running what will be run, shortly; returns the seconds it took, which no rate includes."""
    parts = ["decode"] * args.compile + ["prefill"] * args.compile_prefill
    if not parts:
        return 0.0
    settings = make_settings(args, 0, len(prompts), model.norm.weight.device)
    first = "a minute or more the first time; torch keeps the result on disk"
    try:
        with Stopwatch(f"compiling {' and '.join(parts)}", first) as waiting:
            few = min(args.max_new_tokens or 4, 4)
            generate(model, prompts, settings, few, steps=steps)
            if speculation is not None:
                speculation.rehearsing = True
                generate(model, prompts, settings, few, steps=steps, speculation=speculation)
                speculation.rehearsing = False
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if "InvalidCxxCompiler" not in repr(error):
            raise
        raise UserError("--compile needs a C++ compiler (g++ or clang++, or CXX=...), and none was found") from None
    return waiting.seconds


def run_sample(args, model, tokenizer, prompts, settings, steps, timing, stop_ids, speculation) -> list[dict]:
    """Continue the prompts once and print the texts; their entries in --json."""
    streaming = len(prompts) == 1 and not args.json  # one row can be shown as it comes
    streams = [TextStream(tokenizer, () if args.chat else prompt, args.stop) for prompt in prompts]
    shown = [stream.context_text for stream in streams]
    if args.chat and not streaming:  # whose answer it is
        shown = [tokenizer.decode(prompt).rstrip() + "\n" for prompt in prompts]
    texts = [""] * len(prompts)

    def take(row, token, last):
        piece = streams[row].add(() if token in stop_ids else (token,), last)
        texts[row] += piece
        if streaming:
            print(piece, end="", flush=True)
        return streams[row].stopped

    if streaming:
        print(shown[0], end="", flush=True)
    most = args.max_new_tokens
    results = generate(model, prompts, settings, most, stop_ids, steps, timing, take, speculation=speculation)
    if streaming:
        print()
    elif not args.json:
        for before, text in zip(shown, texts):
            print(before + text + "\n")
    return [
        {"prompt_tokens": len(prompt), "token_ids": ids, "text": text, "finish_reason": reason}
        for prompt, text, (ids, reason) in zip(prompts, texts, results)
    ]


def talk(args, model, tokenizer, template, length: int, steps: Steps, stop_ids, ranks, speculation):
    """The conversation of --interactive; of several ranks the first has it, and tells the others what to answer."""
    from chat import converse

    settings = make_settings(args, 0, 1, model.norm.weight.device)
    for n in (40, 8):  # prefill has a graph for long inputs and one for short ones
        warm_up(args, model, [[0] * min(n, length)], steps, speculation)

    def answer(prompt, kept, limit, timing=None, on_token=None):
        check_ids(prompt, model.config)
        if ranks.size > 1 and ranks.rank == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun ends by it, so do we
            ranks.share(lambda: (prompt, kept, limit))
        ways = (steps, timing, on_token, [kept], speculation)
        [(_, reason)] = generate(model, [prompt], settings, limit, stop_ids, *ways)
        return reason

    if ranks.rank == 0:
        converse(open_session(args, answer, tokenizer, template, length, stop_ids), args.prompt)
        ranks.share()
    else:
        while (question := ranks.share()) is not None:
            answer(*question)


def open_session(args, answer: Callable, tokenizer, template, length: int, stop_ids):
    from chat import Session

    session = Session(answer, tokenizer, template, length, stop_ids, args.stop, args.max_new_tokens)
    if args.system is not None:
        session.set_system(args.system)
    return session


def find_template(args, directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template that the arguments ask for; --interactive does without one where there is none."""
    if args.chat or (args.interactive and (directory / "chat_template.jinja").exists()):
        return ChatTemplate(directory, tokenizer)
    return None


class Alone:
    """The only process of a run. Of several, each has a ranks.Ranks instead, where this is explained."""

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

    def check_same(self, directory: Path):
        pass


def main(ranks=None):
    """ranks: a ranks.Ranks, where torchrun has started several of us; all do the same, and the first one speaks."""
    ranks = ranks or Alone()
    args = ranks.share(parse_arguments)
    profile = args.profile if ranks.rank == 0 else None
    if profile:
        profile.open("w").close()  # a path that cannot be written is better told now than after the run
    sys.stdout.reconfigure(errors="replace")  # a terminal that knows no UTF-8 shows what it can
    device, dtype = choose_device(ranks.device(args.device)), DTYPES[args.dtype]
    if device.type == "cpu":
        keep_freed_memory()
    from convert_hf_checkpoint import ensure_checkpoint

    directory = ranks.in_turn(lambda: ensure_checkpoint(args.checkpoint_path, args.dtype))
    ranks.check_same(directory)
    config, quantization, tokenizer = read_config(directory), read_quantization(directory), Tokenizer(directory)
    if args.stop and tokenizer.vocabulary is None:
        raise UserError(f"--stop is about text, and {directory} has no tokenizer")
    template = find_template(args, directory, tokenizer)
    unknown = args.interactive or args.roofline is not None  # what there will be to read
    prompts = [[0]] if unknown else ranks.share(lambda: read_prompts(args, tokenizer, template, config))
    sources = ranks.share(lambda: read_sources(args, tokenizer, config))
    length = choose_cache_length(args, config, prompts)
    slots = len(prompts) * args.batch_size * (length + 8)
    check_memory(config, device, dtype, slots, quantization, ranks.portion(device))
    prompts = [prompt for prompt in prompts for _ in range(args.batch_size)]
    stop_ids = () if args.ignore_eos else {*tokenizer.eos_ids, *(template.end_ids() if template else ())}
    start = time.perf_counter()
    model = load_model(directory, device, dtype, args.kernels, args.exact_activations, ranks.shard(device))
    model.setup_caches(len(prompts), length)
    load_s = time.perf_counter() - start
    if args.roofline is not None:
        bandwidth = args.roofline * 1e9 or read_bandwidth(model)
        table = rooflines(config, bandwidth * ranks.size, dtype, args.batch_size, quantization)
        return print(json.dumps({"roofline": table}) if args.json else roofline_text(table, dtype))
    steps = compiled_steps(args.compile, args.compile_prefill)
    speculation = make_speculation(args, directory, model, tokenizer, steps, ranks, sources)
    if args.interactive:
        return talk(args, model, tokenizer, template, length, steps, stop_ids, ranks, speculation)
    compile_s = warm_up(args, model, prompts, steps, speculation)

    timing, samples, before = Timing(), [], compile_counts()
    with torch.profiler.profile() if profile else nullcontext() as profiler:
        for n in range(args.num_samples):
            settings = make_settings(args, n, len(prompts), device)
            samples += run_sample(args, model, tokenizer, prompts, settings, steps, timing, stop_ids, speculation)
    if profile:
        with suppress(TypeError):  # a name that is not UTF-8
            profiler.export_chrome_trace(str(profile))
        if profile.stat().st_size == 0:  # it fails in silence
            raise UserError(f"--profile {profile} could not be written")
        print_status(f"trace written to {profile}: load it in ui.perfetto.dev")
    recompiles, breaks = (b - a for a, b in zip(before, compile_counts()))
    result = {"samples": samples, "load_s": load_s, "compile_s": compile_s}
    result |= {"recompiles": recompiles, "graph_breaks": breaks} | measurements(model, timing, bool(args.profile))
    if speculation is not None:
        result |= speculation.report.numbers(0 if args.profile else timing.decode_s)
    print_report(result, timing)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun's
        from ranks import run_together

        run_together(main)
    run_command(main)
