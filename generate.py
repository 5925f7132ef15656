"""Generate text from a checkpoint: `python generate.py --prompt "Hello"`.

Read from the bottom up: `main`, then what it calls: the runs, the prompts, the options. load.py loads the model,
engine.py has the generation loop, chat.py the conversation, report.py the measurements.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command handles Ctrl-C, it ends the process at once

import json
import os
import sys
import time
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from checkpoint import Checkpoint
from cli import (
    ArgumentParser,
    HelpFormatter,
    UserError,
    number,
    positive,
    print_status,
    read_standard_input,
    read_text,
    run_command,
    token_ids,
)
from compile import compile_counts, warm_up
from engine import Engine, EngineOptions, Request, SingleProcess, check_prompt, read_with_progress
from load import ModelOptions, add_model_options, choose_cache_length, load_engine, open_checkpoint
from sampling import SamplingParams
from tokenizer import ChatTemplate, TextStream, Tokenizer

CONVERSATION_CHUNK = 256  # of a prompt between two looks at the keyboard; with 2048, Ctrl-C takes 12 s in a 1.5B model
CONVERSATION_LENGTH = 8192  # cache positions for --interactive, whose length is not known in advance

# ---------------------------------------------------------------- options


def parse_arguments(argv=None):
    parser = ArgumentParser(description="Generate text.", formatter_class=HelpFormatter)
    add = parser.add_argument_group("prompts (each option may be repeated; all prompts are one batch)").add_argument
    text = "a text; -: all of standard input, without its last newline. Without any prompt: 'Hello, my name is'"
    add("--prompt", action="append", default=[], help=text)
    lines = "a file with one prompt per line; empty lines are skipped"
    add("--prompt_file", action="append", type=Path, default=[], help=lines)
    add("--prompt_ids", action="append", type=token_ids, default=[], help="token ids: 5,17,33 (needs no tokenizer)")
    add("--synthetic_prompt", action="append", type=positive, default=[], metavar="N", help="N arbitrary tokens")
    add("--batch_size", type=positive, default=1, help="copies of every prompt")
    add("--num_samples", type=positive, default=1, help="how often to run the whole batch, each time with other seeds")

    add = parser.add_argument_group("conversation").add_argument
    add("--chat", action="store_true", help="take prompts as user messages and apply the model's chat template")
    add("--system", metavar="TEXT", help="a system message before the prompts (implies --chat)")
    interactive = "chat at the terminal, turn by turn (a --prompt is the first turn); /help lists the commands"
    add("--interactive", action="store_true", help=interactive)
    keep = "with --interactive: when the context is full, refuse a message instead of dropping the oldest turns"
    add("--keep_all_turns", action="store_true", help=keep)

    add = parser.add_argument_group("generation").add_argument
    any_length = "at most this many per prompt (default: 200; with --interactive, as many as the context holds)"
    add("--max_new_tokens", type=positive, help=any_length)
    stop = "stop before this text, which is not printed; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--ignore_eos", action="store_true", help="do not stop at EOS tokens")
    add("--json_schema", type=Path, metavar="FILE", help="write JSON that fits this JSON schema (needs llguidance)")
    add_sampling_options(add)
    add_model_options(parser, "as many as the run needs, rounded up (--interactive: up to 8192)")
    add = parser.add_argument_group("what to print").add_argument
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("--report", action="store_true", help="print all measurements, not only a line of them")
    add("--quiet", action="store_true", help="print the answer alone: no prompt, and nothing on stderr but errors")
    bound = "generate nothing; print the bound on tokens per second at this bandwidth (without a value: measure it)"
    gigabytes = number(float, "above 0 and at most 1e9", lambda n: 0 < n <= 1e9)
    add("--roofline", type=gigabytes, nargs="?", const=0.0, metavar="GB/s", help=bound)
    add("--devices", type=positive, default=1, metavar="N", help="with --roofline: how many share the weights (1)")
    add("--profile", type=Path, help="write a trace for ui.perfetto.dev to this file; no rates are reported then")
    return check_arguments(parser.parse_args(argv))


def add_sampling_options(add):
    add("--temperature", type=float, default=0.8, help="0: greedy")
    add("--top_k", type=int, default=200, help="sample from the k likeliest tokens; 0: from all")
    add("--top_p", type=float, default=1.0, help="sample from the likeliest tokens whose probabilities add up to p")
    add("--min_p", type=float, default=0.0, help="drop tokens less likely than min_p times the likeliest")
    add("--repetition_penalty", type=float, default=1.0, help="above 1: makes tokens that occurred before less likely")
    add("--frequency_penalty", type=float, default=0.0, help="subtracted from a token's logit per earlier occurrence")
    add("--presence_penalty", type=float, default=0.0, help="subtracted from a token's logit if it was generated")
    seed = number(int, "within +-2^62", lambda n: abs(n) < 2**62)
    add("--seed", type=seed, default=1234, help="of the first row; each further row or sample has the next integer")


def check_arguments(args):
    """Check the arguments and fill in the values that depend on others. UserError if they contradict each other."""
    args.chat = args.chat or args.system is not None
    for text in args.stop:
        if not text or any("\ud800" <= c <= "\udfff" for c in text):
            raise UserError("--stop is empty; give the text to stop at" if not text else "--stop is not valid UTF-8")
    if args.prompt.count("-") > (0 if args.interactive else 1):
        raise UserError("--prompt - reads all of standard input: give it once, and not with --interactive")
    args.model = ModelOptions.from_arguments(args, converses=args.chat or args.interactive)
    if args.report and args.quiet:
        raise UserError("--report and --quiet exclude each other")
    if args.roofline is not None and (args.profile or args.report or args.interactive or args.model.speculates):
        raise UserError("--roofline generates nothing, so leave out --profile, --report, --interactive and drafts")
    if args.devices > 1 and args.roofline is None:
        raise UserError("--devices is for --roofline; to run on several devices, start the program with torchrun")
    if args.interactive:
        batch = (args.prompt_file, args.prompt_ids, args.synthetic_prompt, args.batch_size > 1, args.num_samples > 1)
        if args.json or args.report or args.quiet or args.profile or args.json_schema or any(batch):
            text = "use --prompt for prompts, and no --json, --json_schema, --report, --quiet or --profile"
            raise UserError(f"--interactive is one conversation: {text}")
    elif args.max_new_tokens is None:
        args.max_new_tokens = 200
    try:
        options = [field.name for field in fields(SamplingParams) if hasattr(args, field.name)]
        args.params = SamplingParams(**{name: getattr(args, name) for name in options})
    except ValueError as error:
        raise UserError(f"--{error}") from None
    return args


# ---------------------------------------------------------------- prompts


def read_texts(args) -> list[str]:
    """The prompts of the command line that are texts."""
    texts = [read_standard_input("--prompt -") if text == "-" else text for text in args.prompt]
    for path in args.prompt_file:
        lines = read_text(path, f"--prompt_file {path}").replace("\r\n", "\n").split("\n")
        texts += [line for line in lines if line]
    if not (texts or args.prompt_ids or args.synthetic_prompt):
        if args.prompt_file:
            raise UserError(f"--prompt_file {args.prompt_file[0]} has no prompt: every line is empty")
        texts = ["Hello, my name is"]
    return texts


def read_prompts(args, checkpoint: Checkpoint, template: ChatTemplate | None) -> list[list[int]]:
    """The token ids of all prompts of the command line, the texts first."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    length, prompts = args.max_seq_length or config.max_seq_length, []
    for text in read_texts(args):
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        message = {"role": "user", "content": text}
        prompts.append(template.encode([*system, message]) if template else tokenizer.encode(text))
    prompts += args.prompt_ids
    for n in args.synthetic_prompt:
        if n > length:  # checked before a list of this length is built
            raise UserError(f"the prompt has {n} tokens, the context is {length}")
        prompts.append([(7 + 31 * i) % config.vocab_size for i in range(n)])
    for i, prompt in enumerate(prompts):
        if not prompt and tokenizer.bos_id is None:
            raise UserError("the prompt is empty and the model has no BOS token; give at least one token")
        prompts[i] = prompt or [tokenizer.bos_id]
        check_prompt(prompts[i], config, length)
    return prompts


def open_template(args, checkpoint: Checkpoint) -> ChatTemplate | None:
    """The chat template that the arguments ask for, or None. --interactive works without one."""
    if args.chat or (args.interactive and checkpoint.tokenizer_files.template is not None):
        return ChatTemplate(checkpoint.tokenizer_files, checkpoint.tokenizer)
    return None


def end_tokens(args, tokenizer: Tokenizer, template: ChatTemplate | None) -> frozenset[int]:
    """The tokens at which an answer ends."""
    ends = frozenset(tokenizer.eos_ids) | (template.end_ids() if template else set())
    return frozenset() if args.ignore_eos else ends


# ---------------------------------------------------------------- runs


def text_before(args, tokenizer: Tokenizer, prompts: list, n: int, row: int, stream: TextStream) -> str:
    """What is printed before an answer: which one it is, if there are several, and its prompt."""
    several, sample = len(prompts) * args.num_samples > 1, n * args.batch_size + row % args.batch_size + 1
    heading = f"--- prompt {row // args.batch_size + 1}, sample {sample} ---\n" if several else ""
    if args.quiet:
        return heading
    if row >= len(prompts) - len(args.synthetic_prompt) * args.batch_size:  # these are the last prompts
        return f"{heading}({len(prompts[row])} arbitrary tokens, not shown)\n"
    if args.chat and len(prompts) > 1:
        return heading + tokenizer.decode(prompts[row]).rstrip() + "\n"
    return heading + stream.context_text


def run_sample(args, engine: Engine, tokenizer: Tokenizer, prompts: list, stop_ids: frozenset, n: int):
    """Run the batch for the n-th time and print the texts. Returns the entries of "samples" in --json, and the seconds
    of the longest wait for a first token."""
    streaming = len(prompts) == 1 and not args.json  # a single row is printed token by token
    streams = [TextStream(tokenizer, () if args.chat else prompt, args.stop) for prompt in prompts]
    before = [text_before(args, tokenizer, prompts, n, row, stream) for row, stream in enumerate(streams)]
    texts = [""] * len(prompts)

    def on_token(row: int, token: int) -> bool:
        texts[row] += streams[row].add(() if token in stop_ids else (token,))
        return streams[row].stopped

    requests = []
    for row, prompt in enumerate(prompts):
        params = replace(args.params, seed=args.seed + n * len(prompts) + row)
        listener, grammar = partial(on_token, row), args.make_grammar()
        requests.append(Request(prompt, params, args.max_new_tokens, stop_ids, listener, grammar=grammar))
    engine.clear()  # no prefix caching between samples: each is measured with its whole prefill
    for request in requests:
        engine.add(request)
    read_with_progress(engine, requests)
    if streaming:
        print(before[0], end="", flush=True)
    shown = 0  # characters
    while engine.has_requests:
        if streaming:  # not in on_token, where the error of a closed pipe would only end the request
            print(texts[0][shown:], end="", flush=True)
            shown = len(texts[0])
        engine.step()
    first_token_s = max(request.times["first_token"] - request.times["added"] for request in requests)
    for row, stream in enumerate(streams):
        texts[row] += stream.add((), last=True)
    if streaming:
        print(texts[0][shown:])
    elif not args.json:
        for shown_before, text in zip(before, texts):
            print(shown_before + text + "\n")
    if failed := [request for request in requests if request.finish_reason == "error"]:
        raise UserError(f"generation failed for prompt {requests.index(failed[0]) + 1}: {failed[0].error}")
    samples = [
        {
            "prompt_tokens": len(request.prompt),
            "token_ids": request.new_tokens,
            "text": text,
            "finish_reason": "stop" if stream.stopped else request.finish_reason,
        }
        for request, text, stream in zip(requests, texts, streams)
    ]
    return samples, first_token_s


def run_samples(args, engine: Engine, tokenizer: Tokenizer, prompts: list, stop_ids: frozenset) -> dict:
    """Run all samples, under the profiler with --profile. Returns their fields in --json."""
    compile_s = warm_up(engine, prompts, random=args.temperature > 0)
    samples, waits = [], []
    before = compile_counts()
    with torch.profiler.profile() if args.profile else nullcontext() as profiler:
        for n in range(args.num_samples):
            found, first_token_s = run_sample(args, engine, tokenizer, prompts, stop_ids, n)
            samples += found
            waits.append(first_token_s)
    if args.profile:
        with suppress(TypeError):  # raised for a file name that is not UTF-8
            profiler.export_chrome_trace(str(args.profile))
        if args.profile.stat().st_size == 0:  # the profiler does not report a failed write
            raise UserError(f"--profile {args.profile} could not be written")
        print_status(f"trace written to {args.profile}: load it in ui.perfetto.dev")
    recompiles, breaks = (b - a for a, b in zip(before, compile_counts()))
    return {
        "samples": samples,
        "compile_s": compile_s,
        "time_to_first_token_s": None if args.profile else waits[0],
        "recompiles": recompiles,
        "graph_breaks": breaks,
    }


def main(ranks=None):
    """ranks: a ranks.Ranks if torchrun has started several processes. Rank 0 plans the steps, the others follow."""
    ranks = ranks or SingleProcess()
    args = ranks.share(parse_arguments)
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere) if args.quiet else nullcontext():
        run(args, ranks)  # run_command prints errors, after this block


def run(args, ranks):
    """Do what the arguments ask for."""
    if args.profile and ranks.rank == 0:
        args.profile.open("w").close()  # so that an unwritable path is reported before the run
    sys.stdout.reconfigure(errors="replace")  # "?" for characters that the terminal cannot show
    how = EngineOptions(ranks=ranks)
    if args.roofline is not None:
        from report import print_roofline, read_bandwidth, read_without_weights

        model = read_without_weights(args) or open_checkpoint(args.checkpoint_path, ranks)
        bandwidth = args.roofline * 1e9 or read_bandwidth(load_engine(model, args.model, 1, 1, how).model)
        return print_roofline(args, model, bandwidth * ranks.size)
    checkpoint = open_checkpoint(args.checkpoint_path, ranks)
    if (args.stop or args.interactive) and checkpoint.tokenizer.vocabulary is None:
        option = "--interactive" if args.interactive else "--stop"
        raise UserError(f"{option} needs text, but {checkpoint.path} has no tokenizer")
    template = open_template(args, checkpoint)
    prompts = [[0]] if args.interactive else ranks.share(lambda: read_prompts(args, checkpoint, template))
    if args.interactive:
        length = choose_cache_length(args.max_seq_length, checkpoint.config, wanted=CONVERSATION_LENGTH)
        how = EngineOptions(CONVERSATION_CHUNK, always_chunk=True, ranks=ranks)
    else:
        needed = max(map(len, prompts)) + args.max_new_tokens - 1
        length = choose_cache_length(args.max_seq_length, checkpoint.config, needed)
    start = time.perf_counter()
    engine = load_engine(checkpoint, args.model, len(prompts) * args.batch_size, length, how)
    result = {"load_s": time.perf_counter() - start}
    prompts = [prompt for prompt in prompts for _ in range(args.batch_size)]  # after the memory check
    stop_ids = end_tokens(args, checkpoint.tokenizer, template)
    if ranks.rank:
        engine.follow()
    elif args.interactive:
        from chat import run_chat

        run_chat(args, engine, checkpoint.tokenizer, template, stop_ids)
    else:
        args.make_grammar = lambda: None
        if args.json_schema is not None:
            from grammar import read_schema

            args.make_grammar = read_schema(args.json_schema, checkpoint.tokenizer, checkpoint.config, stop_ids)
        result |= run_samples(args, engine, checkpoint.tokenizer, prompts, stop_ids)
    engine.close()
    if args.interactive:
        return
    from report import measurements, print_report

    result |= measurements(engine, bool(args.profile), args.json or args.report)  # has collectives: all ranks call it
    if ranks.rank == 0:
        print_report(result, engine.timing, args)
        if args.json:
            print(json.dumps(result))


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # set by torchrun
        from ranks import run_together

        run_together(main)
    run_command(main)
