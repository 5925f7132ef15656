"""How many of 24 easy questions a model answers: is it worth talking to?

The questions are those of questions.json, each with the words one of which a right answer contains.
Each is asked once at temperature 0, and SEEDS times with the default settings of generate.py and
with careful ones. An answer that goes on after MAX_NEW_TOKENS is cut there. The default model is
asked in several ways of computing, which shows whether wrong answers come from its own weights or
from our rounding; further models are asked in one way, without options.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import measure

from cli import print_status, run_command
from engine import Request, generate
from load import ModelOptions, choose_device, load_engine, open_checkpoint
from sampling import SamplingParams
from tokenizer import ChatTemplate

QUESTIONS = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))["questions"]
SEEDS = 3
ROWS = 8
MAX_NEW_TOKENS = 64
WAYS = {
    "as it is": {},
    "with exact activations": {"exact_activations": True},
    "dequantized": {"dequantize": True},
    "dequantized, float32": {"dequantize": True, "dtype": "float32"},
}
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "default": SamplingParams(temperature=0.8, top_k=200),
    "careful": SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1),
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
    cases = [(args.checkpoint_path, way, options) for way, options in WAYS.items()]
    cases += [(path, "as it is", {}) for path in args.further]

    rows = []
    answers = []
    for path, way, options in cases:
        about = {"model": open_checkpoint(path).name, "way": way}
        print_status(f"{about['model']}, {way}")
        row = dict.fromkeys(SETTINGS, 0)
        for answer in ask_all(ModelOptions(checkpoint_path=path, **options)):
            row[answer["settings"]] += answer["right"]
            answers.append(about | answer)
        rows.append(about | row)

    measure.print_table(rows, {"model": "", "way": ""} | dict.fromkeys(SETTINGS, ""))
    about = {"questions": len(QUESTIONS), "seeds": SEEDS, "max_new_tokens": MAX_NEW_TOKENS}
    about |= {"rows": rows, "answers": answers}
    measure.save("questions", about, args.out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
