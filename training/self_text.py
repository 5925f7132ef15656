"""Text in a model's own words, for training its drafts: the engine answers thousands of prompts.

A draft predicts what this model generates, not what people write, so the model generates its
training text, in large batches. Half of the prompts are made from the descriptions and docstrings
of the installed Python packages: a task about a word or a passage, or a passage to continue. The
others are questions that the model itself generates, as the user's turn of its chat template
(arXiv:2406.08464). Half of the answers are greedy, half are sampled at temperature 0.8.

The output is a text file with one JSON object {"index", "prompt", "new"} per line, whose prompt and
new tokens are lists of ids. A file beside it holds the hidden state that each new token was sampled
from, in bfloat16, so that training need not run the model again. A run that was stopped can be
resumed: prompt number `index` is a function of the seed and the packages only.
"""

import importlib.metadata
import inspect
import json
import pydoc_data.topics
import random
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from checkpoint import Checkpoint
from cli import (
    ArgumentParser,
    HelpFormatter,
    UserError,
    number,
    positive,
    print_status,
    progress_bar,
    run_command,
)
from drafts.heads import fingerprint
from engine import Engine, Request, StepFunctions, draw
from load import load_model, open_checkpoint
from model import Transformer
from sampling import SamplingParams
from text.chat_template import ChatTemplate

FIRST_LINE = '{"index": '  # how the first line of a file of samples begins
TEMPERATURE = 0.8  # of the sampled half of the answers, and of the questions
QUESTION_TOKENS = 64  # the most tokens of a question that the model generates
PROMPT_TOKENS = 512  # the most tokens of a prompt
# Each text ends at a bar or at the end of its line.
OPENINGS = """What is|What are|Why|How do I|How does|Who was|When|Where|Which|Can you
Could you explain|Explain|Describe|Write a|Write a short|Write a Python function|Tell me|List
Give me|Name|Compare|Summarize|Translate|Create|Help me|I am|I have|I need|Is it|Do you|Please||"""
OPENINGS = OPENINGS.replace("\n", "|").split("|")
TASKS = """What is {word}?|Explain {word} in simple words.|Write a short story about {word}.
Write a poem about {word}.|Give me five tips about {word}.
What is the difference between {word} and {other}?|List three examples of {word}.
Why is {word} important?|Describe the history of {word}.|How does {word} work?
Write a letter about {word} to a friend.|Write a Python function about {word}.
What are the advantages and disadvantages of {word}?|Who uses {word}, and why?
Summarize this text: {passage}|Explain this to a child: {passage}
Rewrite this in other words: {passage}|Which questions does this text answer? {passage}
Continue this text: {passage}|Describe a day in the life of {word}."""
TASKS = TASKS.replace("\n", "|").split("|")


# ---------------------------------------------------------------- prompts


class PackageTexts:
    """Passages and words of the descriptions and docstrings of the installed packages."""

    def __init__(self):
        packages = importlib.metadata.distributions()
        texts = [str(package.metadata.get_payload()) for package in packages]
        texts += pydoc_data.topics.topics.values()
        for module in (torch, torch.nn, F):
            texts += [inspect.getdoc(item) or "" for item in vars(module).values()]

        passages = set()
        words = Counter()  # the number of texts that contain each word
        for text in set(texts):
            parts = [part.strip() for part in re.split(r"(?<=[.:!?])\s|\n\s*\n", text)]
            passages |= {one for one in parts if 40 <= len(one) <= 400 and one.count(" ") > 4}
            words.update(set(re.findall(r"\b[a-z]{4,12}\b", text)))
        self.passages = sorted(passages)
        self.words = sorted(word for word, n in words.items() if n >= 3)
        if len(passages) < 100:
            raise UserError(f"the installed packages ship only {len(passages)} passages of text")


class Prompts:
    """Makes the requests of each index. For odd ones, the model first generates the question."""

    def __init__(self, checkpoint: Checkpoint, seed: int, max_new_tokens: int):
        self.tokenizer = checkpoint.tokenizer
        self.texts = PackageTexts()
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        if checkpoint.tokenizer_files.template is None:
            raise UserError(f"{checkpoint.path} has no chat template, and training text needs a model that answers")
        self.template = ChatTemplate(checkpoint.tokenizer_files, self.tokenizer)
        self.stop_ids = frozenset(self.template.end_ids().union(self.tokenizer.eos_ids))
        marker = "\x01"
        turn = self.template.render([{"role": "user", "content": marker}])
        self.user_turn = turn.partition(marker)[0]  # the text before what the user says

    def first(self, index: int) -> tuple[Request, str | None]:
        """The first request of an index. If it asks the model for a question, also the first words
        of the question, otherwise None."""
        rng = random.Random(f"{self.seed} {index}")
        if index % 2:
            opening = rng.choice(OPENINGS)
            ids = self.tokenizer.encode(self.user_turn + opening, add_bos=False)
            return Request(ids, self.sampled(index), QUESTION_TOKENS, self.stop_ids), opening
        word, other = rng.sample(self.texts.words, 2)
        passage = rng.choice(self.texts.passages)
        if index % 8 == 0:
            return self.request(index, self.tokenizer.encode(passage)), None
        task = rng.choice(TASKS).format(word=word, other=other, passage=passage)
        return self.answer(index, task), None

    def question(self, opening: str, new_tokens: list[int]) -> str:
        """The question with these first words and what the model generated after them."""
        ids = [token for token in new_tokens if token not in self.stop_ids]
        return (opening + self.tokenizer.decode(ids)).strip() or "Hello!"

    def answer(self, index: int, question: str) -> Request:
        """The request for the answer to a question."""
        return self.request(index, self.template.encode([{"role": "user", "content": question}]))

    def request(self, index: int, prompt: list[int]) -> Request:
        """The request for the answer to a prompt. Answers of indices 2, 3, 6, 7, ... are greedy,
        which is half of each kind."""
        params = SamplingParams(temperature=0.0) if index // 2 % 2 else self.sampled(index)
        return Request(prompt, params, self.max_new_tokens, self.stop_ids)

    def sampled(self, index: int) -> SamplingParams:
        return SamplingParams(temperature=TEMPERATURE, seed=self.seed * 1_000_003 + index)


# ---------------------------------------------------------------- answers


def read_samples(path: Path) -> list[dict]:
    """The samples of a file. An incomplete last line, of a run that was stopped, is left out."""
    try:
        text = path.read_text()
        if text and not FIRST_LINE.startswith(text[: len(FIRST_LINE)]):
            raise ValueError("its first line does not describe a sample")
        samples = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        keys = {"index", "prompt", "new"}
        if not all(isinstance(one, dict) and one.keys() == keys and one["new"] for one in samples):
            raise ValueError("some of its lines are not samples")
        return samples
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a file of self_text.py: {error}") from None


def hidden_path(path: Path, model: Transformer) -> Path:
    """The file of the hidden states for a file of samples. Its name contains the fingerprint of the
    model."""
    return path.with_name(f"{path.stem}-{fingerprint(model)[:12]}.states")


class RecordedSteps:
    """Step functions for an engine that record the hidden states from which new tokens are sampled.

    When a request has ended, remove the entry of its cache row from `hidden`.
    """

    def __init__(self):
        # cache row -> position -> the hidden state (D,) of the token there
        self.hidden: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)

    def prefill(self, model, tokens, input_pos, rows):
        x = model.hidden(tokens, input_pos, rows)  # (B,S,D)
        x = x[torch.arange(len(x)), input_pos.argmax(1)]  # (B,D)
        self._record(rows, input_pos.amax(1), x)
        return model.head(x)

    def decode(self, model, inputs, sampling):
        token, position, rows = inputs.unbind(0)
        x = model.hidden(token[:, None], position[:, None], rows)[:, 0]  # (B,D)
        self._record(rows, position, x)
        return draw(model, model.head(x), rows, position + 1, sampling)

    def _record(self, rows: torch.Tensor, position: torch.Tensor, x: torch.Tensor):
        for row, at, vector in zip(rows.tolist(), position.tolist(), x):
            self.hidden[row][at] = vector


class SampleFile:
    """Appends samples to a file, and their hidden states (n,D) to the file beside it."""

    def __init__(self, path: Path, model: Transformer):
        hidden = hidden_path(path, model)
        try:
            self.lines = path.open("ab")
            self.hidden = hidden.open("ab")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error}") from None
        self.samples = read_samples(path)
        self.tokens = sum(len(sample["new"]) for sample in self.samples)
        size = 2 * model.config.dim * self.tokens  # bytes
        if self.hidden.tell() < size:
            raise UserError(f"{hidden} is too short for {path}, or {path} was written by another model; remove both")
        self.lines.truncate(path.read_bytes().rfind(b"\n") + 1)
        self.hidden.truncate(size)

    def add(self, sample: dict, hidden: torch.Tensor):
        self.hidden.write(hidden.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
        self.hidden.flush()
        # The line is written last, so that each line has its hidden states
        self.lines.write(json.dumps(sample).encode() + b"\n")
        self.lines.flush()
        self.samples.append(sample)
        self.tokens += len(sample["new"])


def write_samples(engine: Engine, steps: RecordedSteps, prompts: Prompts, path: Path, tokens: int):
    """Append samples to a file until it has this many new tokens. The engine runs the functions of
    `steps`."""
    file = SampleFile(path, engine.model)
    done = {sample["index"] for sample in file.samples}
    next_index = 0
    asked = {}  # request -> (its index, the first words of the question that it asks for or None)
    with progress_bar(tokens, path.name, " tokens") as bar:
        bar.update(file.tokens)
        while file.tokens < tokens:
            while len(engine.waiting) < max(1, len(engine.rows) // 4):
                if next_index not in done:
                    request, opening = prompts.first(next_index)
                    asked[request] = (next_index, opening)
                    engine.add(request)
                next_index += 1

            finished = engine.step()
            # Requests and rows are both in the order in which the requests ended
            for request, row in zip(finished, engine.released, strict=True):
                index, opening = asked.pop(request)
                states = steps.hidden.pop(row, {})
                new = request.new_tokens
                if opening is not None:
                    answer = prompts.answer(index, prompts.question(opening, new))
                    asked[answer] = (index, None)
                    engine.add(answer)
                elif request.finish_reason != "error":
                    first = len(request.prompt) - 1  # the position that the first new token follows
                    hidden = torch.stack([states[first + i] for i in range(len(new))])
                    file.add({"index": index, "prompt": request.prompt, "new": new}, hidden)
                    bar.update(len(new))


def main():
    parser = ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=HelpFormatter)
    add = parser.add_argument
    add(
        "--checkpoint_path",
        help="as for generate.py; a 4-bit version is fastest; default: SmolLM2-135M-Instruct",
    )
    add("--out", type=Path, default=Path("self_text.jsonl"), help="the file to write or continue")
    add("--tokens", type=positive, default=3_000_000, help="new tokens in the file at the end")
    add("--batch_size", type=positive, default=48, help="answers generated at the same time")
    add("--max_new_tokens", type=positive, default=256, help="the most new tokens of an answer")
    seed = number(int, "between 0 and 2^31", lambda n: 0 <= n <= 2**31)
    add("--seed", type=seed, default=0, help="seed of the prompts and of the sampled answers")
    args = parser.parse_args()

    checkpoint = open_checkpoint(args.checkpoint_path)
    prompts = Prompts(checkpoint, args.seed, args.max_new_tokens)
    steps = RecordedSteps()
    functions = StepFunctions(steps.prefill, steps.decode)
    length = min(PROMPT_TOKENS + args.max_new_tokens, checkpoint.config.max_seq_length)
    engine = Engine(load_model(checkpoint), args.batch_size, length, functions)
    write_samples(engine, steps, prompts, args.out, args.tokens)
    print_status(f"{args.out} holds at least {args.tokens:,} tokens")
    print_status(f"next: python training/medusa.py --checkpoint_path {checkpoint.path} --text {args.out}")


if __name__ == "__main__":
    run_command(main)
