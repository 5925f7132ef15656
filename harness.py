"""Tasks of EleutherAI's lm-evaluation-harness (arXiv:2405.14782), for evaluate.py --tasks.

Read `run_tasks`, then HarnessModel: the three things that the harness asks of a model. It decides all else: which
documents, which prompts, how answers are judged. Needs requirements-eval.txt.
"""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from cli import UserError, first_line, progress_bar
from generate import generate
from sampling import Sampling
from scoring import Window, scores
from tokenizer import TextStream

MOST_TOKENS = 256  # of an answer, where a task does not say


def run_tasks(model: "HarnessModel", names: list[str], few: int | None, limit: int | None, chat: bool) -> dict:
    """Task to {metric: value}. names: the harness's tasks, or paths of YAML files that define some; few: examples
    before each question; limit: documents of each task."""
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:  # as for any program that is run from here
        sys.path.append(sys.path.pop(0))  # some tasks import a package called evaluate, which is not our evaluate.py
    with redirect_stdout(sys.stderr):  # the harness reports there
        try:
            wanted = EvaluatorConfig(tasks=names)
            manager = wanted.process_tasks()
            found = simple_evaluate(
                model,
                tasks=wanted.tasks,
                num_fewshot=few,
                limit=limit,
                apply_chat_template=chat,
                task_manager=manager,
                log_samples=False,
            )
        except UserError:
            raise
        except Exception as error:  # no such task, no data set, and whatever the code in task files raises
            raise UserError(f"--tasks {' '.join(names)}: {type(error).__name__}: {first_line(error)}") from error
    return {
        task: {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in found["results"].items()
    }


class HarnessModel(TemplateLM):
    """A Transformer with its tokenizer, up to batch_size rows at a time."""

    def __init__(self, model, tokenizer, batch_size: int, template=None):
        super().__init__()
        self.model, self.tokenizer, self.batch_size, self.template = model, tokenizer, batch_size, template
        self.max_length = model.config.max_seq_length
        if not tokenizer.eos_ids:
            raise UserError("--tasks needs a tokenizer with an end token, which this checkpoint does not have")
        self._device = model.norm.weight.device

    # ------------------------------------------------------------ text

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self):
        """What stands before a text that has nothing before it."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        ids, bos = self.tokenizer.encode(string, add_bos=False), self.tokenizer.bos_id
        wanted = self.tokenizer.add_bos and add_special_tokens is not False
        return [bos, *ids] if wanted and ids[:1] != [bos] else ids  # a chat template may have written it

    @property
    def tokenizer_name(self):
        return str(self.template.path)

    def chat_template(self, chat_template=False):
        return self.template.source if chat_template else None

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.template.render(chat_history, add_generation_prompt)

    # ------------------------------------------------------------ what the harness asks

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """requests: (texts, context ids, continuation ids). For each (log-probability of the continuation in nats,
        whether it is what greedy decoding says)."""
        answers = [None] * len(requests)
        cut = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(f"a task scores {len(continuation)} tokens at once, the context is {self.max_length}")
            ids = (context + continuation)[-self.max_length - 1 :]
            cut.append(Window(ids, len(ids) - len(continuation)))
        for batch in self.batches([len(window.ids) for window in cut], "scoring"):
            self.model.setup_caches(len(batch), max(len(cut[i].ids) for i in batch))
            for i, found in zip(batch, scores([self.model], [cut[i] for i in batch], "prefill")):
                answers[i] = -float(found["loss"].sum()), bool(found["greedy"].all())
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """For each (text,) its log-probability in nats, windows as the harness cuts them."""
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
        """For each (context, settings) the text that follows, up to one of settings["until"] or an end token."""
        answers = [None] * len(requests)
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(i)
        for group in alike.values():
            settings = normalize_gen_kwargs(requests[group[0]].args[1], MOST_TOKENS)
            most = settings["max_gen_toks"]
            if most >= self.max_length:
                raise UserError(f"a task wants {most} tokens, all that the context of {self.max_length} holds")
            if most < 1 or float(settings.get("temperature") or 0.0) < 0:
                raise UserError(f"a task wants {most} tokens at a temperature of {settings.get('temperature')}")
            prompts = [self.tok_encode(requests[i].args[0])[most - self.max_length :] for i in group]
            prompts = [prompt or [self.prefix_token_id] for prompt in prompts]
            for batch in self.batches([len(prompt) + most for prompt in prompts], "generating"):
                texts = self.continued([prompts[i] for i in batch], settings)
                for i, text in zip(batch, texts):
                    answers[group[i]] = text
                    self.cache_hook.add_partial("generate_until", requests[group[i]].args, text)
        return answers

    def continued(self, prompts: list[list[int]], settings: dict) -> list[str]:
        B, most = len(prompts), settings["max_gen_toks"]
        until = settings.get("until") or []
        until = [text for text in ([until] if isinstance(until, str) else until) if text]
        streams, texts = [TextStream(self.tokenizer, stop=until) for _ in prompts], [""] * B

        def on_token(row, token, last):
            texts[row] += streams[row].add([token], last)
            return streams[row].stopped

        sampling = Sampling.make(
            B,
            seed=list(range(B)),
            temperature=float(settings.get("temperature") or 0.0),
            top_k=int(settings.get("top_k") or 0),
            top_p=float(settings.get("top_p") or 1.0),
            device=self._device,
        )
        self.model.setup_caches(B, max(map(len, prompts)) + most)
        generate(self.model, prompts, sampling, most, self.tokenizer.eos_ids, on_token=on_token)
        return texts

    def batches(self, lengths: list[int], what: str):
        """Indices by length, the longest first, in batches; with a progress bar."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        with progress_bar(sum(lengths), what, delay=2) as bar:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                yield batch
                bar.update(sum(lengths[i] for i in batch))
