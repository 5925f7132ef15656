"""What speculation is worth: each draft against plain decoding of the same model, on the same prompts, in turns.

Greedy, one row, compiled, the default checkpoint or another in bfloat16, and in int8 and int4 (made beside it where
they are not there). Open prompts are questions and tasks; in copying ones much of the answer stands in the question:
code to be repeated with a change, text to be quoted, from this repository's own files. For each prompt everybody takes
a turn, and the ratio of the tokens a second to those of plain steps is taken (prefill is not counted); reported is the
median over prompts, after a first one that does not count; beside it what the formula of speculative.py makes of k, a,
c and v, as measured in the mean. `same text` counts the prompts whose tokens are those of plain steps: all, where the
kernels run.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from chat_template import ChatTemplate
from decode import ROOT, circumstances, quantized

from cli import ArgumentParser, UserError, keep_freed_memory, number, print_status, run_command
from convert_hf_checkpoint import ensure_checkpoint
from generate import cache_length, compiled_steps, generate, prefill_rows
from linear import Quantization, quantize_model
from load import install_kernels, load_model
from report import Timing
from sampling import Sampling
from speculative import AUTO_K, Lookup, ModelDraft, Report, Speculation, expected_tokens
from tokenizer import Tokenizer

OPEN = """What is the capital of France?|Write a short poem about the sea.|Explain why the sky is blue.
Give me three tips for learning a language.|How does a bicycle stay upright?|Tell me a story about a fox and a crow.
Write a Python function that reverses a list.|What are the planets of the solar system?|Describe your favourite season.
How do I boil an egg?|What is photosynthesis?|Who was Ada Lovelace?|List five uses of a paper clip.
What is the difference between a virus and a bacterium?|Write an invitation to a birthday party.
Explain recursion to a child.|What causes tides?|Name some famous painters and their works.
How can I sleep better?|What is inflation in an economy?"""
COPY = (
    "Repeat this code and rename the argument x to y:",
    "Write this out again, exactly as it is:",
    "Quote this text:",
)


def open_prompts() -> list[str]:
    return [line for lines in OPEN.splitlines() for line in lines.split("|")]


def copying_prompts(count: int) -> list[str]:
    """Pieces of some 600 characters of this repository's files, in turn."""
    texts = [(ROOT / name).read_text() for name in ("model.py", "LICENSE", "sampling.py", "README.md")]
    found = []
    for i in range(count):
        text = texts[i % len(texts)]
        start = text.index("\n\n", (len(text) - 1500) * (i + 1) // (count + 1)) + 2
        found.append(f"{COPY[i % len(COPY)]}\n\n{text[start : start + 600]}")
    return found


class Case:
    """A model with what may propose for it, each with a Speculation of its own; the first is plain."""

    def __init__(self, args, target: str, name: str, prompts: list[list[int]], model, steps, drafts: dict):
        self.args, self.target, self.name, self.prompts = args, target, name, prompts
        self.model, self.steps = model, steps
        self.ways = {"plain": None}
        for kind, (draft, k) in drafts.items():
            self.ways[kind] = Speculation(model, draft, steps, k or AUTO_K, automatic=k is None)
        self.rates = {kind: [] for kind in self.ways}
        self.same = dict.fromkeys(self.ways, 0)
        self.timings = {kind: Timing() for kind in self.ways}

    def run(self, prompt: list[int], kind: str) -> tuple[float, list[int]]:
        timing, settings = Timing(), Sampling.make(1, temperature=0.0)
        [(ids, _)] = generate(
            self.model, [prompt], settings, self.args.new_tokens, steps=self.steps, timing=timing,
            speculation=self.ways[kind],
        )  # fmt: skip
        self.timings[kind].add_step(timing.decode_s, timing.decode_tokens, 0)
        return timing.decode_tokens / timing.decode_s, ids

    def measure(self):
        longest = max(map(len, self.prompts))
        self.model.setup_caches(1, cache_length(self.model.config, longest + self.args.new_tokens, None))
        for speculation in filter(None, self.ways.values()):
            speculation.rehearsing = True
            generate(self.model, self.prompts[:1], Sampling.make(1, temperature=0.0), 4, steps=self.steps,
                     speculation=speculation)  # fmt: skip
            speculation.rehearsing = False
        for i, prompt in enumerate([self.prompts[0], *self.prompts]):  # the first is warm-up
            kinds = list(self.ways)
            found = {kind: self.run(prompt, kind) for kind in kinds[i % len(kinds) :] + kinds[: i % len(kinds)]}
            if i == 0:
                self.timings = {kind: Timing() for kind in self.ways}
                for speculation in filter(None, self.ways.values()):
                    speculation.report = Report()
                continue
            expected = found["plain"][1]
            for kind, (rate, ids) in found.items():
                self.rates[kind].append(rate)
                self.same[kind] += ids == expected

    def formula(self, kind: str) -> dict:
        """What a proposed token was worth and cost in the mean, and the speedup that follows from it: (1 - a^(k+1)) /
        (1 - a) tokens for k c + v plain steps where something was proposed, and elsewhere one for one."""
        report, plain = self.ways[kind].report, self.timings["plain"]
        plain_s = plain.decode_s / plain.decode_tokens
        if report.steps == 0:
            return {"predicted_over_plain": 1.0}
        k, a = report.proposed / report.steps, sum(report.kept) / sum(report.looked_at)
        c, v = report.draft_s / report.proposed / plain_s, report.verify_s / report.steps / plain_s
        tokens = report.steps * expected_tokens(min(a, 0.9999), k) + report.plain_steps
        predicted = tokens / (report.steps * (k * c + v) + report.plain_steps)
        return {"k": k, "a": a, "c": c, "v": v, "predicted_over_plain": predicted}

    def rows(self) -> list[dict]:
        plain, found = self.rates["plain"], []
        for kind, rates in self.rates.items():
            ratios = [a / b for a, b in zip(rates, plain)]
            row = {"target": self.target, "prompts": self.name, "draft": kind, "tokens_per_s": median(rates)}
            row |= {"over_plain": median(ratios), "same_text": self.same[kind], "of": len(plain), "ratios": ratios}
            if self.ways[kind] is not None:
                numbers = self.ways[kind].report.numbers(self.timings[kind].decode_s)
                row |= {"mean_accepted_tokens": numbers["mean_accepted_tokens"]} | numbers["speculation"]
                row |= self.formula(kind)
            found.append(row)
        return found


def about(row: dict) -> str:
    """Of a row of the table, what its draft did."""
    if "a" not in row:
        return ""
    kept, numbers = row["mean_accepted_tokens"], " ".join(f"{name} {row[name]:.2f}" for name in "kacv")
    return f"  by the formula {row['predicted_over_plain']:.2f}x  kept {kept:.2f} a proposal  {numbers}"


def cases(args, directory: Path):
    steps, template = compiled_steps(True, False), ChatTemplate(directory, Tokenizer(directory))
    prompts = {"open": open_prompts(), "copying": copying_prompts(args.prompts)}
    for name, texts in prompts.items():
        prompts[name] = [template.encode([{"role": "user", "content": text}]) for text in texts[: args.prompts]]
    model, read = load_model(directory), partial(prefill_rows, steps.prefill)
    four = quantize_model(load_model(directory, kernels="torch"), Quantization("int4", 32, "int8"))
    itself = ModelDraft(model, install_kernels(four), steps.compiled, None)
    given = ModelDraft(model, load_model(quantized(directory, "int4")), steps.compiled, read)
    k = args.speculate_k
    drafts = {f"int4-self, {k}": (itself, k), "int4-self, auto": (itself, None), f"int4 checkpoint, {k}": (given, k)}
    yield Case(args, "bf16", "open", prompts["open"], model, steps, drafts | {"prompt-lookup, auto": (Lookup(), None)})
    for format in ("int8", "int4"):
        model = load_model(quantized(directory, format))
        drafts = {f"prompt-lookup, {k}": (Lookup(), k), "prompt-lookup, auto": (Lookup(), None)}
        if format == "int8":
            drafts["int4-self, auto"] = (ModelDraft(model, four, steps.compiled, None), None)
        for name in prompts:
            yield Case(args, format, name, prompts[name], model, steps, drafts)


def main():
    count = number(int, "between 1 and 20", lambda n: 1 <= n <= 20)
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint_path", help="whatever generate.py takes, with a chat template (SmolLM2-135M-Instruct)")
    add("--prompts", type=count, default=20, help="of each kind (20)")
    new = number(int, "at least 2", lambda n: n >= 2)
    add("--new_tokens", type=new, default=128, help="after each (128)")
    add("--speculate_k", type=number(int, "between 1 and 15", lambda n: 1 <= n <= 15), default=7, help="fixed k (7)")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "speculation_cpu.json", help="the JSON file")
    args = parser.parse_args()
    keep_freed_memory()
    directory, rows = ensure_checkpoint(args.checkpoint_path), []
    if not (directory / "chat_template.jinja").exists():
        raise UserError(f"{directory} has no chat template, in which the prompts are set")
    for case in cases(args, directory):
        print_status(f"{case.target}, {case.name} prompts")
        case.measure()
        for row in case.rows():
            print(
                f"{row['target']:5} {row['prompts']:8} {row['draft']:22} {row['tokens_per_s']:6.0f} tokens/s "
                f"{row['over_plain']:5.2f}x  same text {row['same_text']} of {row['of']}{about(row)}"
            )
            rows.append(row)
    result = circumstances(torch.device("cpu"), []) | {"model": directory.name, "new_tokens": args.new_tokens}
    args.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
