"""Runs tasks of EleutherAI's lm-evaluation-harness (arXiv:2405.14782), for evaluate.py --tasks.

Read `run_tasks`, then HarnessModel, which turns the three calls that the harness makes into requests to the engine. The
harness decides everything else: the documents, the prompts, and how answers are scored. Needs requirements-eval.txt.
"""

import sys
from contextlib import redirect_stdout
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from cli import UserError, first_line, progress_bar
from engine import Engine, Request
from model import Transformer
from sampling import SamplingParams
from tokenizer import ChatTemplate, TextStream, Tokenizer

MAX_NEW_TOKENS = 256  # per answer, if a task does not say


def run_tasks(model: "HarnessModel", names: list[str], num_fewshot: int | None, limit: int | None, chat: bool) -> dict:
    """Run tasks and return {task: {metric: value}}.

    names: tasks of the harness, or paths of YAML files that define tasks. num_fewshot: examples before each question.
    limit: the number of documents to use of each task.
    """
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        # Python puts our directory first, but `import evaluate` in a task means a package, not our evaluate.py.
        sys.path.append(sys.path.pop(0))
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
        except Exception as error:  # an unknown task, a missing data set, or an error in the code of a task
            raise UserError(f"--tasks {' '.join(names)}: {type(error).__name__}: {first_line(error)}") from error
    return {
        task: {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in results["results"].items()
    }


class HarnessModel(TemplateLM):
    """A Transformer and its tokenizer behind the harness's interface, with up to batch_size rows at a time."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, batch_size: int, template: ChatTemplate | None = None):
        super().__init__()
        self.model, self.tokenizer, self.batch_size, self.template = model, tokenizer, batch_size, template
        self.max_length = model.config.max_seq_length
        if not tokenizer.eos_ids:
            raise UserError("--tasks needs a tokenizer with an EOS token, which this checkpoint does not have")

    # ------------------------------------------------------------ text

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self):
        """The token before a text that has no context."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        ids, bos = self.tokenizer.encode(string, add_bos=False), self.tokenizer.bos_id
        add_bos = self.tokenizer.add_bos and add_special_tokens is not False
        return [bos, *ids] if add_bos and ids[:1] != [bos] else ids  # a chat template may have written BOS

    @property
    def tokenizer_name(self):
        return str(self.template.path)

    def chat_template(self, chat_template=False):
        return self.template.source if chat_template else None

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.template.render(chat_history, add_generation_prompt)

    # ------------------------------------------------------------ the three calls of the harness

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """For each (texts, context ids, continuation ids): the log-probability of the continuation in nats, and whether
        greedy decoding would generate it.
        """
        scoring = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                n = len(continuation)
                raise UserError(f"a task scores {n} tokens at once, but the context holds {self.max_length}")
            ids = (context + continuation)[-self.max_length - 1 :]
            scoring.append(Request(ids, SamplingParams(), max_new_tokens=0, prompt_logprobs=1))
        self.run(scoring, "scoring")
        answers = []
        for (texts, _, continuation), scored in zip(requests, scoring):
            first = len(scored.prompt) - len(continuation)
            tokens = list(zip(continuation, scored.prompt_token_logprobs[first - 1 :])) if continuation else []
            greedy = all(likeliest == token for token, (_, [(likeliest, _)]) in tokens)
            answers.append((sum(logprob for _, (logprob, _) in tokens), greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """For each (text,): its log-probability in nats, summed over the windows into which the harness cuts it."""
        windows, owner = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owner.append(i)
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owner, self._loglikelihood_tokens(windows)):
            totals[i] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """For each (context, settings): generated text, up to one of settings["until"] or an EOS token."""
        answers = [Answer(self, *request.args, seed) for seed, request in enumerate(requests)]
        self.run([answer.request for answer in answers], "generating")
        texts = [answer.finish() for answer in answers]
        for request, text in zip(requests, texts):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

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
            while engine.active:
                for request in engine.step():
                    if request.finish_reason == "error":
                        raise UserError(f"the model failed on a task: {request.error}")
                    bar.update(length(request))


class Answer:
    """An answer that is generated for a task: its request to the engine, and its text so far."""

    def __init__(self, model: HarnessModel, context: str, settings: dict, seed: int):
        settings = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        new = settings["max_gen_toks"]
        if not 1 <= new < model.max_length:
            raise UserError(f"a task asks for {new} new tokens, but the context allows 1 to {model.max_length - 1}")
        try:
            params = SamplingParams(
                temperature=float(settings.get("temperature") or 0.0),
                top_k=int(settings.get("top_k") or 0),
                top_p=float(settings.get("top_p") or 1.0),
                seed=seed,
            )
        except ValueError as error:
            raise UserError(f"a task has invalid sampling settings: {error}") from None
        until = settings.get("until") or []
        until = [text for text in ([until] if isinstance(until, str) else until) if text]
        self.stream, self.text = TextStream(model.tokenizer, stop=until), ""
        prompt = model.tok_encode(context)[new - model.max_length :] or [model.prefix_token_id]
        self.request = Request(prompt, params, new, frozenset(model.tokenizer.eos_ids), self.add)

    def add(self, token: int) -> bool:
        """Add a new token to the text. Returns True if a stop string is complete."""
        self.text += self.stream.add([token])
        return self.stream.stopped

    def finish(self) -> str:
        """The whole text, with the end that was held back as a possible stop string."""
        return self.text + self.stream.add([], last=True)
