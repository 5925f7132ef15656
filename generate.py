"""Generate text from a checkpoint: `python generate.py --prompt "Hello"`.

Read from the bottom up: `main`, then what it calls: the runs, the prompts, the options. load.py
loads the model, engine.py has the generation loop, text/chat.py the conversation, report.py the
measurements.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process, until run_command runs

import json
import os
import sys
import time
from contextlib import nullcontext, redirect_stderr
from dataclasses import fields, replace
from pathlib import Path

import torch

from checkpoint import Checkpoint
from cli import (
    ArgumentParser,
    HelpFormatter,
    UserError,
    has_silent_pipe,
    number,
    piped_text,
    positive,
    print_status,
    read_standard_input,
    read_text,
    run_command,
    token_ids,
)
from compile import compile_counts, warm_up
from engine import Engine, EngineOptions, Request, SingleProcess, check_prompt, read_with_progress
from load import choose_cache_length, default_params, load_engine, open_checkpoint
from options import ModelOptions, add_model_options
from sampling import SamplingParams
from text.chat_template import ChatTemplate, mark_ids
from text.tokenizer import TextStream, Tokenizer

# A conversation reads a prompt in chunks of this many tokens, because Ctrl-C waits for the end of a
# chunk. With 2048 tokens, that takes 12 s in a 1.5B model.
CONVERSATION_CHUNK = 256
CONVERSATION_LENGTH = 8192  # cache positions for --interactive: the length is not known in advance

# ---------------------------------------------------------------- options


def parse_arguments(argv=None):
    """The options. An argument without an option, such as a model's name, becomes `checkpoint_path`
    (cli.ArgumentParser.parse_args)."""
    parser = ArgumentParser(description="Generate text.", formatter_class=HelpFormatter)

    group = "prompts (each option may be repeated; all prompts are one batch)"
    add = parser.add_argument_group(group).add_argument
    text = (
        "a text, after which text that is piped into the program is added; -: all of standard input, without "
        "its last newline. Without any prompt: the piped text, or else 'Hello, my name is'"
    )
    add("--prompt", "-p", action="append", default=[], help=text)
    lines = "a file with one prompt per line; empty lines are skipped"
    add("--prompt_file", action="append", type=Path, default=[], help=lines)
    add("--prompt_ids", action="append", type=token_ids, default=[], help="token ids: 5,17,33 (needs no tokenizer)")
    add("--synthetic_prompt", action="append", type=positive, default=[], metavar="N", help="N arbitrary tokens")
    add("--batch_size", type=positive, default=1, help="copies of every prompt")
    add("--num_samples", type=positive, default=1, help="how often to run the batch, with other seeds")

    add = parser.add_argument_group("conversation").add_argument
    add("--chat", action="store_true", help="apply the model's chat template to each prompt")
    add("--system", metavar="TEXT", help="a system message before the prompts (implies --chat)")
    interactive = "chat at the terminal; a --prompt is the first message, /help lists the commands"
    add("-i", "--interactive", action="store_true", help=interactive)
    keep = "with --interactive: in a full context, refuse messages instead of dropping old turns"
    add("--keep_all_turns", action="store_true", help=keep)

    add = parser.add_argument_group("generation").add_argument
    most = "at most this many per prompt (default: 200; --interactive: as the context allows)"
    add("-n", "--max_new_tokens", type=positive, help=most)
    stop = "stop before this text, which is not printed; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add("--ignore_eos", action="store_true", help="do not stop at EOS tokens")
    add("--json_schema", type=Path, metavar="FILE", help="write JSON that fits this JSON schema (needs llguidance)")
    add_sampling_options(add)

    add_model_options(parser, "as many as the run needs, rounded up (--interactive: up to 8192)")
    add_printing_options(parser.add_argument_group("what to print").add_argument)
    return check_arguments(parser.parse_args(argv))


def add_sampling_options(add):
    # Without a value of these five: default_params.
    add("--temperature", type=float, help="0: greedy. The default of this and the next four: see --generation_config")
    add("--top_k", type=int, help="sample from the k likeliest tokens; 0: from all")
    add("--top_p", type=float, help="sample from the likeliest tokens whose probabilities add up to p")
    add("--min_p", type=float, help="drop tokens less likely than min_p times the likeliest")
    add("--repetition_penalty", type=float, help="above 1: makes tokens that occurred before less likely")
    add("--frequency_penalty", type=float, default=0.0, help="subtracted from a token's logit per earlier occurrence")
    add("--presence_penalty", type=float, default=0.0, help="subtracted from a token's logit if it was generated")
    seed = number(int, "within +-2^62", lambda n: abs(n) < 2**62)
    add("--seed", type=seed, default=1234, help="of the first row; each further row or sample has the next integer")


def add_printing_options(add):
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("--report", action="store_true", help="print all measurements, not only a line of them")
    add("--quiet", action="store_true", help="print the answer alone, and only errors on stderr")
    bound = "print only the bound on tokens per second at this bandwidth (no value: measure it)"
    gigabytes = number(float, "above 0 and at most 1e9", lambda n: 0 < n <= 1e9)
    add("--roofline", type=gigabytes, nargs="?", const=0.0, metavar="GB/s", help=bound)
    add("--devices", type=positive, default=1, metavar="N", help="for --roofline: how many share the weights")
    add("--profile", type=Path, help="write a trace for ui.perfetto.dev to this file; no rates then")


def check_arguments(args):
    """Check the arguments, and fill in the values that depend on others.

    UserError if they contradict each other.
    """
    args.chat = args.chat or args.system is not None
    args.model = ModelOptions.from_arguments(args, converses=args.chat or args.interactive)
    args.piped = ""  # the text of standard input, once it was read
    args.lines = []  # the prompts in files
    for path in args.prompt_file:
        lines = read_text(path, "--prompt_file").replace("\r\n", "\n").split("\n")
        args.lines += [line for line in lines if line]
    if args.max_new_tokens is None and not args.interactive:
        args.max_new_tokens = 200

    other_prompts = args.prompt_ids or args.synthetic_prompt
    several = args.prompt_file or other_prompts or args.batch_size > 1 or args.num_samples > 1
    output = args.json or args.json_schema or args.report or args.quiet or args.profile
    generates = args.profile or args.report or args.interactive or args.model.speculates
    contradictions = {
        "--stop is empty; give the text to stop at": "" in args.stop,
        "--prompt - reads all of standard input: give it once, and not with --interactive": (
            args.prompt.count("-") + args.interactive > 1 and "-" in args.prompt
        ),
        "--prompt_file has no prompt: every line is empty": (
            args.prompt_file and not (args.lines or args.prompt or other_prompts)
        ),
        "--report and --quiet exclude each other": args.report and args.quiet,
        "--devices is for --roofline; to run on several devices, start the program with torchrun": (
            args.roofline is None and args.devices > 1
        ),
        "--roofline generates nothing, so leave out --profile, --report, --interactive and drafts": (
            args.roofline is not None and generates
        ),
        "--interactive is one conversation: use --prompt for prompts, and no --json, --json_schema, --report, --quiet "
        "or --profile": args.interactive and (several or output),
    }
    for message, applies in contradictions.items():
        if applies:
            raise UserError(message)

    given = {field.name: getattr(args, field.name, None) for field in fields(SamplingParams)}
    args.sampling = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**args.sampling)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    return args


# ---------------------------------------------------------------- prompts


def read_texts(args) -> list[str]:
    """The prompts of the command line that are texts."""
    texts = list(args.prompt)
    if "-" in texts:
        texts[texts.index("-")] = read_standard_input("--prompt -")
    elif args.piped:
        texts = [f"{text}\n\n{args.piped}" for text in texts] or [args.piped]
    texts += args.lines
    if texts or args.prompt_ids or args.synthetic_prompt:
        return texts
    print_status("no prompt was given: --chat --prompt TEXT asks a chat model, and --interactive talks to it", dim=True)
    return ["Hello, my name is"]


def read_prompts(args, checkpoint: Checkpoint, template: ChatTemplate | None) -> list[list[int]]:
    """The token ids of all prompts of the command line, the texts first."""
    config = checkpoint.config
    tokenizer = checkpoint.tokenizer
    length = args.max_seq_length or config.max_seq_length

    prompts = []
    for text in read_texts(args):
        messages = [{"role": "user", "content": text}]
        if args.system is not None:
            messages.insert(0, {"role": "system", "content": args.system})
        prompts.append(template.encode(messages) if template else tokenizer.encode(text))
    prompts += args.prompt_ids
    for n in args.synthetic_prompt:
        if n > length:  # checked before a list of this length is built
            raise UserError(f"the prompt has {n} tokens, the context is {length}")
        prompts.append([(7 + 31 * i) % config.vocab_size for i in range(n)])

    if tokenizer.bos_id is not None:
        prompts = [prompt or [tokenizer.bos_id] for prompt in prompts]
    for prompt in prompts:
        check_prompt(prompt, config, length)
    return prompts


def read_schema_option(args, checkpoint: Checkpoint, stop_ids: frozenset[int]):
    """Set args.make_grammar, which returns the grammar of a request, as --json_schema says."""
    args.make_grammar = lambda: None
    if args.json_schema is not None:
        from text.grammar import read_schema

        args.make_grammar = read_schema(args.json_schema, checkpoint.tokenizer, checkpoint.config, stop_ids)


def end_tokens(args, tokenizer: Tokenizer, template: ChatTemplate | None) -> frozenset[int]:
    """The tokens at which an answer ends."""
    if args.ignore_eos:
        return frozenset()
    ends = frozenset(tokenizer.eos_ids)
    return ends if template is None else ends | template.end_ids()


# ---------------------------------------------------------------- runs


class Output:
    """What a row generates: the request to the engine, and the text of its new tokens so far."""

    def __init__(self, args, tokenizer: Tokenizer, prompt: list[int], stop_ids: frozenset, seed: int):
        context = () if args.chat else prompt  # an answer in a chat begins a new text
        self.stream = TextStream(tokenizer, context, args.stop, args.shown_ids)
        self.text = ""
        self.request = Request(prompt, replace(args.params, seed=seed), args.max_new_tokens, stop_ids)
        self.request.on_token = self.add
        self.request.grammar = args.make_grammar()

    def add(self, token: int) -> bool:
        """Add a new token to the text. Returns True if a stop string is complete."""
        if token not in self.request.stop_ids:
            self.text += self.stream.add([token])
        return self.stream.stopped

    def finish(self):
        """Add the text that was held back, since no token follows."""
        self.text += self.stream.add([], last=True)

    def json_fields(self) -> dict:
        """An entry of "samples" in --json."""
        return {
            "prompt_tokens": len(self.request.prompt),
            "token_ids": self.request.new_tokens,
            "text": self.text,
            "finish_reason": "stop" if self.stream.stopped else self.request.finish_reason,
        }


def text_before(args, tokenizer: Tokenizer, outputs: list[Output], row: int, n: int) -> str:
    """What is printed before the output of a row in the n-th run of the batch.

    It is a heading that says which output this is, if there are several, and the prompt.
    """
    heading = ""
    if len(outputs) * args.num_samples > 1:
        sample = n * args.batch_size + row % args.batch_size + 1
        heading = f"--- prompt {row // args.batch_size + 1}, sample {sample} ---\n"
    if args.quiet:
        return heading

    prompt = outputs[row].request.prompt
    synthetic_rows = len(args.synthetic_prompt) * args.batch_size
    if row >= len(outputs) - synthetic_rows:  # the synthetic prompts are the last ones
        return f"{heading}({len(prompt)} arbitrary tokens, not shown)\n"
    if args.chat and len(outputs) > 1:
        return heading + tokenizer.decode(prompt).rstrip() + "\n"
    return heading + outputs[row].stream.context_text


def print_while_running(engine: Engine, output: Output):
    """Run the engine until its only request has ended, and print the text as it grows."""
    shown = 0  # characters
    while engine.has_requests:
        # Output.add cannot print: there, the error of a closed pipe would only end the request.
        print(output.text[shown:], end="", flush=True)
        shown = len(output.text)
        engine.step()
    output.finish()
    print(output.text[shown:])


def run_batch(args, engine: Engine, tokenizer: Tokenizer, prompts: list, stop_ids: frozenset, n: int):
    """Run the batch for the n-th time, counted from 0, and print the Outputs. Returns them."""
    first_seed = args.seed + n * len(prompts)
    outputs = []
    for row, prompt in enumerate(prompts):
        outputs.append(Output(args, tokenizer, prompt, stop_ids, first_seed + row))

    engine.clear()  # no prefix caching between runs: each is measured with its whole prefill
    for output in outputs:
        engine.add(output.request)
    read_with_progress(engine, [output.request for output in outputs])

    if len(outputs) == 1 and not args.json:
        print(text_before(args, tokenizer, outputs, 0, n), end="", flush=True)
        print_while_running(engine, outputs[0])
    else:
        while engine.has_requests:
            engine.step()
        for row, output in enumerate(outputs):
            output.finish()
            if not args.json:
                print(text_before(args, tokenizer, outputs, row, n) + output.text + "\n")

    for row, output in enumerate(outputs):
        if output.request.finish_reason == "error":
            raise UserError(f"generation failed for prompt {row + 1}: {output.request.error}")
    return outputs


def run_samples(args, engine: Engine, tokenizer: Tokenizer, prompts: list, stop_ids: frozenset) -> dict:
    """Run the batch --num_samples times, and return the fields of --json about these runs."""
    compile_s = warm_up(engine, prompts, random=args.params.temperature > 0)
    graphs_before, breaks_before = compile_counts()

    outputs = []
    profiler = torch.profiler.profile() if args.profile else nullcontext()
    with profiler:
        for n in range(args.num_samples):
            outputs += run_batch(args, engine, tokenizer, prompts, stop_ids, n)
    if args.profile:
        profiler.export_chrome_trace(str(args.profile))
        if args.profile.stat().st_size == 0:  # the profiler does not report a failed write
            raise UserError(f"--profile {args.profile} could not be written")
        print_status(f"trace written to {args.profile}: load it in ui.perfetto.dev")

    graphs, breaks = compile_counts()
    first_run = [output.request.times for output in outputs[: len(prompts)]]
    first_token_s = max(times["first_token"] - times["added"] for times in first_run)
    return {
        "samples": [output.json_fields() for output in outputs],
        "compile_s": compile_s,
        "time_to_first_token_s": None if args.profile else first_token_s,
        "recompiles": graphs - graphs_before,
        "graph_breaks": breaks - breaks_before,
    }


def load_for_prompts(args, checkpoint: Checkpoint, template: ChatTemplate | None, ranks) -> tuple[list, Engine]:
    """The token ids of all prompts, and an engine with room for them."""
    prompts = ranks.share(lambda: read_prompts(args, checkpoint, template))
    needed = max(map(len, prompts)) + args.max_new_tokens - 1  # the last token needs no position
    length = choose_cache_length(args.max_seq_length, checkpoint.config, needed)
    rows = len(prompts) * args.batch_size
    return prompts, load_engine(checkpoint, args.model, rows, length, EngineOptions(ranks=ranks))


def run_prompts(args, checkpoint: Checkpoint, template: ChatTemplate | None, ranks):
    """Continue all prompts, and report what was measured."""
    stop_ids = end_tokens(args, checkpoint.tokenizer, template)
    ranks.share(lambda: read_schema_option(args, checkpoint, stop_ids))
    args.shown_ids = mark_ids(checkpoint.tokenizer, template.thinking_marks()) if template else []
    takes_piped = ranks.size == 1 and "-" not in args.prompt
    takes_piped &= not (args.prompt_file or args.prompt_ids or args.synthetic_prompt)
    args.piped = piped_text() if takes_piped else ""

    start = time.perf_counter()
    prompts, engine = load_for_prompts(args, checkpoint, template, ranks)
    if takes_piped and not args.piped:
        args.piped = piped_text()
        if args.piped:  # it has come while the model was loaded, and needs more room
            engine = None
            prompts, engine = load_for_prompts(args, checkpoint, template, ranks)
        elif has_silent_pipe() and not args.quiet:
            print_status("nothing has come from the open pipe so far, so it is not read (--prompt - waits for it)")
    result = {"load_s": time.perf_counter() - start}

    if ranks.rank:
        engine.follow()
    else:
        batch = [prompt for prompt in prompts for _ in range(args.batch_size)]
        result |= run_samples(args, engine, checkpoint.tokenizer, batch, stop_ids)
    engine.close()

    from report import measurements, print_report

    in_full = args.json or args.report
    result |= measurements(engine, bool(args.profile), in_full)  # all ranks: it has collectives
    if ranks.rank == 0:
        print_report(result, engine.timing, args, engine.model.backend.drawable_logits)
        if args.json:
            print(json.dumps(result))


def run_conversation(args, checkpoint: Checkpoint, template: ChatTemplate | None, ranks):
    """Chat at the terminal."""
    length = choose_cache_length(args.max_seq_length, checkpoint.config, wanted=CONVERSATION_LENGTH)
    how = EngineOptions(CONVERSATION_CHUNK, always_chunk=True, ranks=ranks)
    engine = load_engine(checkpoint, args.model, 1, length, how)
    if ranks.rank:
        engine.follow()
    else:
        from text.chat import run_chat

        stop_ids = end_tokens(args, checkpoint.tokenizer, template)
        run_chat(args, engine, checkpoint.tokenizer, template, stop_ids)
    engine.close()


def run_roofline(args, ranks):
    """Print the bound on tokens per second, and generate nothing."""
    from report import print_roofline, read_bandwidth, read_without_weights

    bandwidth = args.roofline * 1e9
    model = read_without_weights(args)
    if model is None:
        checkpoint = open_checkpoint(args.checkpoint_path, ranks)
        model = (checkpoint.config, checkpoint.quantization)
    if not bandwidth:  # --roofline has no value
        engine = load_engine(checkpoint, args.model, 1, 1, EngineOptions(ranks=ranks))
        bandwidth = read_bandwidth(engine.model)
    print_roofline(args, *model, bandwidth * ranks.size)


def run(args, ranks):
    """Do what the arguments ask for."""
    if args.profile and ranks.rank == 0:
        args.profile.open("w").close()  # so that an unwritable path is reported before the run
    sys.stdout.reconfigure(errors="replace")  # "?" for characters that the terminal cannot show
    if args.roofline is not None:
        return run_roofline(args, ranks)

    checkpoint = open_checkpoint(args.checkpoint_path, ranks)
    args.params = replace(default_params(checkpoint, args.model), **args.sampling)
    if (args.stop or args.interactive) and checkpoint.tokenizer.vocabulary is None:
        option = "--interactive" if args.interactive else "--stop"
        raise UserError(f"{option} needs text, but {checkpoint.path} has no tokenizer")
    template = None
    if args.chat or (args.interactive and checkpoint.tokenizer_files.template is not None):
        template = ChatTemplate(checkpoint.tokenizer_files, checkpoint.tokenizer)
    if args.interactive:
        run_conversation(args, checkpoint, template, ranks)
    else:
        run_prompts(args, checkpoint, template, ranks)


def main(ranks=None):
    """ranks: a tp.Ranks if torchrun has started several processes.

    Rank 0 plans the steps, and the others follow.
    """
    ranks = ranks or SingleProcess()
    args = ranks.share(parse_arguments)
    if not args.quiet:
        return run(args, ranks)
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        run(args, ranks)  # run_command prints errors, after this block


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # set by torchrun
        from tp import run_together

        run_together(main)
    run_command(main)
