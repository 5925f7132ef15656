"""Measures how good a checkpoint is: perplexity on a text, KL divergence from a reference model,
benchmark tasks.

Read down: a Window is a piece of a text, of which some tokens are scored; `scores` runs the models
over a window in one pass; `interval` is the confidence interval of a mean; `evaluate` puts them
together; then the tasks and the command. Windows do not depend on each other. Benchmark tasks are
run by EleutherAI's harness: HarnessCalls turns the three calls that it makes into requests to the
engine.

Sources: perplexity with a stride (huggingface.co/docs/transformers/perplexity); confidence
intervals for tokens that are not independent within a window: cluster-robust standard errors (Liang
and Zeger, Biometrika 73, 1986).
"""

import json
import math
import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import Checkpoint
from cli import (
    ArgumentParser,
    HelpFormatter,
    UserError,
    first_line,
    natural,
    number,
    positive,
    progress_bar,
    read_text,
    run_command,
)
from engine import Engine, Request, check_prompt
from load import check_fits, choose_device, load, load_model, open_checkpoint, plan_model
from model import WHOLE_MODEL, Transformer
from options import ModelOptions, add_loading_options
from sampling import SamplingParams
from text.chat_template import ChatTemplate
from text.tokenizer import TextStream, Tokenizer

MAX_NEW_TOKENS = 256  # per answer, if a task does not say
POSITIONS = 128  # log-probabilities (POSITIONS,V) of this many positions are in memory at a time

# ---------------------------------------------------------------- windows of a text


@dataclass(frozen=True)
class Window:
    """Token ids, of which those from index `first` on are scored, given the tokens before them."""

    ids: list[int]
    first: int


def windows(ids: list[int], length: int, stride: int, bos: int | None = None) -> list[Window]:
    """Cut ids into windows that start `stride` (less than length) tokens apart.

    Each token except the first of the text is scored once. At least length - stride tokens are
    before it in its window, or all tokens before it in the text. bos: the token that takes the
    place of the first one in all windows but the first. Some models, such as Gemma 3, predict badly
    without it.
    """
    found = []
    scored = 1  # tokens at the start of the text, including the first one
    for start in range(0, len(ids), stride):
        end = min(start + length, len(ids))
        if end > scored:
            window = ids[start:end]
            if bos is not None and start > 0:
                window[0] = bos
            found.append(Window(window, scored - start))
            scored = end
    return found


@torch.no_grad()
def scores(models: list[Transformer], window: Window) -> dict[str, Tensor]:
    """The scores of the n scored tokens of a window: tensors (n,) of float64 on CPU, by name.

    "loss" is the first model's -log p(token), in nats. With a second model, the reference, there
    are also "kl", which is KL(reference || model) in nats, and "top1", whether both models have the
    same likeliest token.
    """
    ids = torch.tensor(window.ids, device=models[0].device)
    input_pos = torch.arange(len(ids), device=ids.device)
    states = [model.hidden(ids[None], input_pos[None])[0] for model in models]  # (S,D) each

    parts = []
    for start in range(window.first, len(ids), POSITIONS):
        targets = ids[start : start + POSITIONS]
        before = slice(start - 1, start - 1 + len(targets))  # the positions that predict them
        logprobs = [model.head(x[before]).float().log_softmax(-1) for model, x in zip(models, states)]
        part = {"loss": -logprobs[0].gather(1, targets[:, None])[:, 0]}
        if len(models) == 2:
            p = logprobs[1].exp()
            terms = p * (logprobs[1] - logprobs[0])
            part["kl"] = torch.where(p == 0, 0, terms).sum(1)  # 0 log 0 is 0
            part["top1"] = logprobs[0].argmax(1) == logprobs[1].argmax(1)
        parts.append({name: values.double().cpu() for name, values in part.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def interval(clusters: list[Tensor]) -> tuple[float, float]:
    """(mean of all numbers, half the width of its 95 % confidence interval).

    Numbers in one tensor may be dependent. A single tensor has no interval: NaN.
    """
    n = len(clusters)
    count = sum(map(len, clusters))
    mean = sum(float(values.sum()) for values in clusters) / count
    if n == 1:
        return mean, math.nan
    residuals = sum(float((values - mean).sum()) ** 2 for values in clusters)
    return mean, 1.96 * math.sqrt(residuals * n / (n - 1)) / count


def evaluate(models: list[Transformer], tokenizer: Tokenizer, ids: list[int], length: int, stride: int) -> dict:
    """Score a text's token ids with models[0], against the reference models[1] if there is one.

    Returns fields of --json.
    """
    for model in models:
        model.setup_caches(1, length)
    results = []
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    with progress_bar(len(ids), "evaluating", " tokens", delay=2) as bar:
        for window in windows(ids, length, stride, bos):
            results.append(scores(models, window))
            bar.update(len(results[-1]["loss"]))

    total = float(sum(result["loss"].sum() for result in results))
    count = sum(len(result["loss"]) for result in results)
    size = sum(len(tokenizer.vocabulary.token_bytes(i)) for i in ids[1:])
    fields = {
        "perplexity": math.inf if total / count >= 700 else math.exp(total / count),  # NaN stays NaN
        "bits_per_byte": total / math.log(2) / size if size else math.nan,
        "tokens": count,
    }
    if len(models) == 2:
        fields["kl_nats"], fields["kl_ci95"] = interval([result["kl"] for result in results])
        fields["top1_agreement"], fields["top1_ci95"] = interval([result["top1"] for result in results])
    return fields | {"window": length, "stride": stride}


# ---------------------------------------------------------------- tasks
#
# The harness (arXiv:2405.14782) decides everything but the model: the documents, the prompts, and
# how answers are scored. It needs requirements-eval.txt, and is imported only for --tasks, because
# that takes seconds.


def run_tasks(model: "HarnessCalls", names: list[str], num_fewshot: int | None, limit: int | None, chat: bool) -> dict:
    """Run tasks and return {task: {metric: value}}.

    names: tasks of the harness, or paths of YAML files that define tasks. num_fewshot: examples
    before each question. limit: how many documents of each task are used.
    """
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        # Python puts our directory first, but `import evaluate` in a task means a package.
        sys.path.append(sys.path.pop(0))
    # Its bootstrap otherwise forks workers, which inherit our threads and signal handlers,
    # and may never end.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    from lm_eval import simple_evaluate
    from lm_eval.config.evaluate_config import EvaluatorConfig

    with redirect_stdout(sys.stderr):  # the harness prints its progress
        try:
            config = EvaluatorConfig(tasks=names)
            manager = config.process_tasks()
            results = simple_evaluate(
                model,
                tasks=config.tasks,
                num_fewshot=num_fewshot,
                limit=limit,
                apply_chat_template=chat,
                task_manager=manager,
                log_samples=False,
            )
        except UserError:
            raise
        except Exception as error:  # an unknown task, a missing data set, an error in a task's code
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"--tasks {' '.join(names)}: {reason}") from error

    found = {}
    for task, metrics in results["results"].items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        found[task] = {name.removesuffix(",none"): value for name, value in numbers.items()}
    return found


def harness_model(*arguments) -> "HarnessCalls":
    """A HarnessCalls that is also an instance of the harness's own base class.

    Only --tasks needs to import that class.
    """
    from lm_eval.api.model import TemplateLM

    class HarnessModel(HarnessCalls, TemplateLM):
        pass

    return HarnessModel(*arguments)


class HarnessCalls:
    """A Transformer and its tokenizer behind the harness's interface.

    The engine runs up to batch_size rows at a time.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, batch_size: int, template: ChatTemplate | None = None):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.template = template
        self.max_length = model.config.max_seq_length
        if not tokenizer.eos_ids:
            raise UserError("--tasks needs a tokenizer with an EOS token, which this checkpoint does not have")

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self):
        """The token before a text that has no context."""
        if self.tokenizer.bos_id is None:
            return self.eot_token_id
        return self.tokenizer.bos_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        ids = self.tokenizer.encode(string, add_bos=False)
        bos = self.tokenizer.bos_id
        add_bos = self.tokenizer.add_bos and add_special_tokens is not False
        if add_bos and ids[:1] != [bos]:  # a chat template may have written BOS
            return [bos, *ids]
        return ids

    @property
    def tokenizer_name(self):
        return str(self.template.path)

    def chat_template(self, chat_template=False):
        return self.template.source if chat_template else None

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.template.render(chat_history, add_generation_prompt)

    # The three calls that the harness makes:

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """The log-probability of each continuation, in nats, and whether it is the greedy one.

        requests: (texts, context ids, continuation ids).
        """
        scoring = []
        for _, context, continuation in requests:
            n = len(continuation)
            if n > self.max_length:
                raise UserError(f"a task scores {n} tokens at once, but the context holds {self.max_length}")
            ids = (context + continuation)[-self.max_length - 1 :]
            scoring.append(Request(ids, SamplingParams(), max_new_tokens=0, prompt_logprobs=1))
        self.run(scoring, "scoring")

        answers = []
        for (_, _, continuation), scored in zip(requests, scoring):
            # The first token of a prompt has no entry, hence - 1.
            entries = scored.prompt_token_logprobs[len(scored.prompt) - len(continuation) - 1 :]
            likeliest = [top[0][0] for _, top in entries]
            answers.append((sum(logprob for logprob, _ in entries), likeliest == continuation))
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-probability of each (text,) in nats, summed over the harness's windows."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pieces = []
        ends = [0]  # how many pieces there are up to the end of each request
        for request in requests:
            ids = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pieces += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(pieces))
        logprobs = [logprob for logprob, _ in self._loglikelihood_tokens(pieces)]
        return [sum(logprobs[start:end]) for start, end in pairwise(ends)]

    def generate_until(self, requests, disable_tqdm=False):
        """A generated text for each (context, settings).

        It ends at one of settings["until"] or at an EOS token.
        """
        from lm_eval.models.utils import normalize_gen_kwargs

        stops = []
        answers = []
        for seed, request in enumerate(requests):
            context, settings = request.args
            settings = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
            stops.append([text for text in settings["until"] if text])
            answers.append(self.make_request(context, settings, stops[-1], seed))
        self.run(answers, "generating")
        streams = [TextStream(self.tokenizer, stop=stop) for stop in stops]
        return [stream.add(answer.new_tokens, last=True) for stream, answer in zip(streams, answers)]

    def make_request(self, context: str, settings: dict, stop: list[str], seed: int) -> Request:
        """The request for an answer. settings: as normalize_gen_kwargs returns them."""
        new = settings["max_gen_toks"]
        if not 1 <= new < self.max_length:
            raise UserError(f"a task asks for {new} new tokens, but the context allows 1 to {self.max_length - 1}")
        given = {name: settings[name] for name in ("temperature", "top_k", "top_p") if settings.get(name) is not None}
        params = SamplingParams(**{"temperature": 0.0} | given, seed=seed)
        stream = TextStream(self.tokenizer, stop=stop)

        def stops(token: int) -> bool:
            stream.add([token])
            return stream.stopped

        prompt = self.tok_encode(context)[new - self.max_length :] or [self.prefix_token_id]
        return Request(prompt, params, new, frozenset(self.tokenizer.eos_ids), stops)

    def run(self, requests: list[Request], what: str):
        """Run requests to their end, the longest first, with a progress bar."""
        if not requests:
            return

        def length(request):
            return len(request.prompt) + request.max_new_tokens

        engine = Engine(self.model, min(self.batch_size, len(requests)), max(map(length, requests)))
        for request in sorted(requests, key=length, reverse=True):
            engine.add(request)
        with progress_bar(sum(map(length, requests)), what, " tokens", delay=2) as bar:
            while engine.has_requests:
                for request in engine.step():
                    if request.finish_reason == "error":
                        raise UserError(f"the model failed on a task: {request.error}")
                    bar.update(length(request))


# ---------------------------------------------------------------- the command


def parse_arguments():
    about = "Perplexity and KL divergence from a reference on a text, and tasks of lm-evaluation-harness."
    parser = ArgumentParser(description=about, formatter_class=HelpFormatter)
    add_loading_options(parser)
    add = parser.add_argument_group("what to measure").add_argument
    at_least_2 = number(int, "at least 2", lambda n: n >= 2)
    add("--reference_checkpoint_path", help="the model to compare with, by KL divergence and top token")
    add("--text", type=Path, help="a UTF-8 text file to score")
    add("--max_tokens", type=at_least_2, help="score only this many tokens at the start of the text")
    add("--window", type=at_least_2, default=1024, help="tokens per window, at most the model's context")
    add("--stride", type=positive, help="tokens from the start of one window to the next; default: half a window")
    tasks = "tasks of the harness (hellaswag winogrande ...), or .yaml files that define tasks"
    add("--tasks", nargs="+", default=[], metavar="TASK", help=tasks)
    add("--num_fewshot", type=natural, help="examples before each question")
    add("--limit", type=positive, help="use only this many documents of each task")
    add("--batch_size", type=positive, default=8, help="batch size for the tasks")
    add("--chat", action="store_true", help="apply the model's chat template to the tasks")
    add("--json", action="store_true", help="print one JSON object on stdout")

    args = parser.parse_args()
    if not args.text and not args.tasks:
        parser.error("nothing to evaluate: give --text or --tasks")
    if args.reference_checkpoint_path is not None and not args.text:
        parser.error("--reference_checkpoint_path needs a --text to compare the models on")
    if not args.tasks and (args.chat or args.limit or args.num_fewshot is not None):
        parser.error("--chat, --limit and --num_fewshot need --tasks")
    return args


def read_ids(path: Path, tokenizer: Tokenizer, max_tokens: int | None) -> list[int]:
    """The token ids of a text file, at most max_tokens."""
    ids = tokenizer.encode(read_text(path, "--text"))
    if len(ids) < 2:
        raise UserError(f"--text {path} has {len(ids)} tokens, but at least 2 are needed")
    return ids[:max_tokens]


def evaluate_text(args, checkpoint: Checkpoint, options: ModelOptions) -> dict:
    """The result of `evaluate` for the text of the command line."""
    checkpoints = [checkpoint]
    if args.reference_checkpoint_path is not None:
        checkpoints.append(open_checkpoint(args.reference_checkpoint_path))
    configs = [one.config for one in checkpoints]
    ids = read_ids(args.text, checkpoint.tokenizer, args.max_tokens)
    length = min(args.window, len(ids), *(config.max_seq_length for config in configs))
    stride = args.stride or max(1, length // 2)
    if stride >= length:
        raise UserError(f"--stride {stride} must be less than the window of {length}, or tokens would have no context")
    if len({config.vocab_size for config in configs}) > 1:
        sizes = " and ".join(str(config.vocab_size) for config in configs)
        raise UserError(f"checkpoints with vocabularies of {sizes} have probabilities that cannot be compared")
    check_prompt(ids, configs[0], len(ids))

    models = []
    for one in checkpoints:
        device = choose_device(args.device)
        one = one.without_mtp()
        whole = one.empty_model()
        check_fits(whole, options, device, whole.cache_bytes(1, length, options.dtype))
        models.append(load(plan_model(one, options, device, WHOLE_MODEL, whole)))
    return evaluate(models, checkpoint.tokenizer, ids, length, stride)


def evaluate_tasks(args, checkpoint: Checkpoint, options: ModelOptions) -> dict:
    """The harness's metrics for each task of the command line."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UserError(f"--tasks needs more packages: pip install -r requirements-eval.txt ({error})") from None
    template = None
    if args.chat:
        template = ChatTemplate(checkpoint.tokenizer_files, checkpoint.tokenizer)
    model = load_model(checkpoint, options)
    calls = harness_model(model, checkpoint.tokenizer, args.batch_size, template)
    return run_tasks(calls, args.tasks, args.num_fewshot, args.limit, args.chat)


def result_text(result: dict, dtype: str) -> str:
    """The result as a few lines. dtype: the value of --dtype."""
    lines = []
    if "perplexity" in result:
        line = f"perplexity {result['perplexity']:.4f}, {result['bits_per_byte']:.4f} bits per byte"
        where = f"{result['tokens']} tokens in windows of {result['window']}, {result['stride']} apart"
        lines.append(f"{line} ({where}, {dtype})")
    if "kl_nats" in result:
        line = f"KL to the reference {result['kl_nats']:.5f} +- {result['kl_ci95']:.5f} nats"
        same = f"same top token at {result['top1_agreement']:.2%} +- {result['top1_ci95']:.2%}"
        lines.append(f"{line}; {same}")
    for task, metrics in result.get("tasks", {}).items():
        numbers = [f"{name} {value:.4f}" for name, value in metrics.items()]
        lines.append(f"{task}: {', '.join(numbers)}")
    return "\n".join(lines)


def main():
    args = parse_arguments()
    checkpoint = open_checkpoint(args.checkpoint_path)
    options = ModelOptions.from_arguments(args)
    result = {}
    if args.text:
        result = evaluate_text(args, checkpoint, options)
    if args.tasks:
        result["tasks"] = evaluate_tasks(args, checkpoint, options)
    if args.json:
        # NaN and infinity, which JSON cannot hold, become null.
        print(json.dumps(json.loads(json.dumps(result), parse_constant=lambda _: None)))
    else:
        print(result_text(result, args.dtype))


if __name__ == "__main__":
    run_command(main)
