"""How many of 24 easy questions a model answers: is it worth talking to?

The questions are those of questions.json, each with the words one of which a right answer contains.
Each is asked once at temperature 0, and SEEDS times with other settings. An answer that goes on after
MAX_NEW_TOKENS is cut there. sampling.DEFAULTS was chosen by this.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import measure

from cli import print_status, run_command
from engine import Request, generate
from load import choose_device, load_engine, open_checkpoint
from options import ModelOptions
from sampling import SamplingParams
from text.chat_template import ChatTemplate

QUESTIONS = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))["questions"]
SEEDS = 3
ROWS = 8
MAX_NEW_TOKENS = 64
SETTINGS = {
    "temperature 0": SamplingParams(temperature=0.0),
    "temperature 0.3": SamplingParams(temperature=0.3),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 0.7, min_p 0.1": SamplingParams(temperature=0.7, min_p=0.1),
    "temperature 0.8, top_k 200": SamplingParams(temperature=0.8, top_k=200),
    "temperature 1": SamplingParams(temperature=1.0),
}


def is_right(answer: str, words: list[str]) -> bool:
    """Whether an answer contains one of the words, as a word of its own."""
    return any(re.search(rf"\b{re.escape(word)}\b", answer, re.I) for word in words)


def ask_all(options: ModelOptions) -> list[dict]:
    """The answers of a model to all questions, with all settings."""
    checkpoint = open_checkpoint(options.checkpoint_path)
    template = ChatTemplate(checkpoint.tokenizer_files, checkpoint.tokenizer)
    stop_ids = frozenset(checkpoint.tokenizer.eos_ids) | template.end_ids()
    prompts = [template.encode([{"role": "user", "content": one["question"]}]) for one in QUESTIONS]
    engine = load_engine(checkpoint, options, ROWS, max(map(len, prompts)) + MAX_NEW_TOKENS)

    answers = []
    for name, params in SETTINGS.items():
        seeds = 1 if params.temperature == 0 else SEEDS
        for seed in range(seeds):
            own_params = replace(params, seed=seed)
            requests = [Request(prompt, own_params, MAX_NEW_TOKENS, stop_ids) for prompt in prompts]
            generate(engine, requests)
            for one, request in zip(QUESTIONS, requests):
                new_tokens = [i for i in request.new_tokens if i not in stop_ids]
                answer = checkpoint.tokenizer.decode(new_tokens)
                row = {"settings": name, "seed": seed, "question": one["question"]}
                row |= {"answer": answer, "right": is_right(answer, one["right"])}
                answers.append(row)
    return answers


def main():
    parser = measure.make_parser(__doc__, {})
    parser.add_argument("--further", nargs="*", default=[], metavar="MODEL", help="models besides --checkpoint_path")
    args = parser.parse_args()

    rows = []
    answers = []
    for path in (args.checkpoint_path, *args.further):
        about = {"model": open_checkpoint(path).name}
        print_status(about["model"])
        row = dict.fromkeys(SETTINGS, 0)
        for answer in ask_all(ModelOptions(checkpoint_path=path)):
            row[answer["settings"]] += answer["right"]
            answers.append(about | answer)
        rows.append(about | row)

    measure.print_table(rows, {"model": ""} | dict.fromkeys(SETTINGS, ""))
    about = {"questions": len(QUESTIONS), "seeds": SEEDS, "max_new_tokens": MAX_NEW_TOKENS}
    about |= {"rows": rows, "answers": answers}
    measure.save("questions", about, args.out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
