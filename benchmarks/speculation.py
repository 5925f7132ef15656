"""What speculation is worth: each draft against plain decoding of the same model, on the same prompts, in turns.

Greedy, one row, compiled, the default checkpoint or another in bfloat16, and in int8 and int4 (made beside it where
they are not there). Open prompts are questions and tasks; in copying ones much of the answer stands in the question:
code to be repeated with a change, text to be quoted, from this repository's own files. For each prompt everybody takes
a turn, and the ratio of the tokens a second to those of plain steps is taken (prefill is not counted); reported is the
median over prompts, after a first one that does not count; beside it what the formula of speculative.py makes of k, a,
c and v, as measured in the mean. `same text` counts the prompts whose tokens are those of plain steps: all, where the
kernels run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from measure import GREEDY, ROOT, Ratio, about_run, make_parser, quantized, save

from cli import UserError, keep_freed_memory, number, print_status, run_command
from convert_hf_checkpoint import ensure_checkpoint
from engine import Engine, Request, StepFunctions, generate
from linear import Quantization, quantize_model
from load import compiled_steps, install_kernels, load_model
from report import Timing
from speculative import AUTO_K, MAX_K, LookupDraft, ModelDraft, Report, Speculation, expected_tokens
from tokenizer import ChatTemplate, Tokenizer

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


def open_prompts(n: int) -> list[str]:
    return [line for lines in OPEN.splitlines() for line in lines.split("|")][:n]


def copying_prompts(n: int) -> list[str]:
    """Pieces of some 600 characters of this repository's files, in turn."""
    texts = [(ROOT / name).read_text() for name in ("model.py", "LICENSE", "sampling.py", "README.md")]
    found = []
    for i in range(n):
        text = texts[i % len(texts)]
        start = text.index("\n\n", (len(text) - 1500) * (i + 1) // (n + 1)) + 2
        found.append(f"{COPY[i % len(COPY)]}\n\n{text[start : start + 600]}")
    return found


# ---------------------------------------------------------------- one model, several drafts


@dataclass
class Contestant:
    """Plain decoding (None), or with a draft; and what it has done so far."""

    speculation: Speculation | None
    rates: list[float] = field(default_factory=list)  # tokens a second, a prompt each
    tokens: list[list[int]] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)  # of decoding alone

    def run(self, engine: Engine, prompt: list[int], new_tokens: int):
        engine.speculation, engine.timing = self.speculation, Timing()
        engine.clear()
        request = Request(list(prompt), GREEDY, new_tokens)
        generate(engine, [request])
        timing = engine.timing
        self.timing.add_step(timing.decode_s, timing.decode_tokens, 0)
        self.rates.append(timing.decode_tokens / timing.decode_s)
        self.tokens.append(request.new_tokens)

    def warm_up(self, engine: Engine, prompt: list[int], new_tokens: int):
        """Run every graph once, and then a prompt that does not count."""
        if self.speculation is not None:
            self.speculation.begin(engine)
            self.speculation.rehearsing = True
            self.run(engine, prompt, 4)
            self.speculation.rehearsing = False
        self.run(engine, prompt, new_tokens)
        self.rates, self.tokens, self.timing = [], [], Timing()
        if self.speculation is not None:
            self.speculation.report = Report()

    def formula(self, plain_s: float) -> dict:
        """What a proposed token was worth and cost in the mean, and the speedup that follows from it: (1 - a^(k+1)) /
        (1 - a) tokens for k c + v plain steps where something was proposed, and elsewhere one for one."""
        report = self.speculation.report
        if report.steps == 0:
            return {"predicted_over_plain": 1.0}
        verify_s = max(0.0, report.step_s - report.plain_steps * plain_s)
        k, a = report.proposed / report.steps, sum(report.accepted) / sum(report.judged)
        c, v = report.draft_s / report.proposed / plain_s, verify_s / report.steps / plain_s
        tokens = report.steps * expected_tokens(min(a, 0.9999), k) + report.plain_steps
        predicted = tokens / (report.steps * (k * c + v) + report.plain_steps)
        return {"k": k, "a": a, "c": c, "v": v, "predicted_over_plain": predicted}


def measure(model, steps: StepFunctions, drafts: dict, prompts: list[list[int]], new_tokens: int) -> list[dict]:
    """drafts: name -> (draft, tokens to propose; None: as many as pay). A row of the table for each, after plain's."""
    engine = Engine(model, 1, max(map(len, prompts)) + new_tokens, steps)
    everyone = {"plain": Contestant(None)}
    for name, (draft, k) in drafts.items():
        everyone[name] = Contestant(Speculation(draft, k or AUTO_K, automatic=k is None))
    for contestant in everyone.values():
        contestant.warm_up(engine, prompts[0], new_tokens)
    names = list(everyone)
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            everyone[name].run(engine, prompt, new_tokens)
    plain, rows = everyone["plain"], []
    for name, contestant in everyone.items():
        ratios = [a / b for a, b in zip(contestant.rates, plain.rates)]
        same = sum(a == b for a, b in zip(contestant.tokens, plain.tokens))
        row = {"draft": name, "tokens_per_s": median(contestant.rates)}
        row |= Ratio.of(contestant.rates, plain.rates).fields("over_plain")
        row |= {"same_text": same, "of": len(prompts), "ratios": ratios}
        if contestant.speculation is not None:
            numbers = contestant.speculation.report.numbers(contestant.timing.decode_s)
            row |= {"mean_accepted_tokens": numbers["mean_accepted_tokens"]} | numbers["speculation"]
            row |= contestant.formula(plain.timing.decode_s / plain.timing.decode_tokens)
        rows.append(row)
    return rows


# ---------------------------------------------------------------- the table


def measure_all(args, directory: Path) -> Iterator[list[dict]]:
    steps, template = compiled_steps(not args.smoke, False), ChatTemplate(directory, Tokenizer(directory))
    prompts = {"open": open_prompts(args.prompts), "copying": copying_prompts(args.prompts)}
    for name, texts in prompts.items():
        prompts[name] = [template.encode([{"role": "user", "content": text}]) for text in texts]
    k, lookup = args.speculate_k, {"prompt-lookup, auto": (LookupDraft(), None)}
    four = install_kernels(quantize_model(load_model(directory, kernels="torch"), Quantization("int4", 32, "int8")))
    for format in ("bf16", "int8", "int4"):
        model, drafts = load_model(quantized(directory, format)), dict(lookup)
        if format == "bf16":
            itself, other = ModelDraft(four, True), ModelDraft(load_model(quantized(directory, "int4")), False)
            drafts |= {f"int4-self, {k}": (itself, k), f"int4 checkpoint, {k}": (other, k)}
        else:
            drafts[f"prompt-lookup, {k}"] = (LookupDraft(), k)
        if format != "int4":
            drafts["int4-self, auto"] = (ModelDraft(four, True), None)
        for name in ("open",) if format == "bf16" else prompts:
            print_status(f"{format}, {name} prompts")
            rows = measure(model, steps, drafts, prompts[name], args.new_tokens)
            yield [{"target": format, "prompts": name} | row for row in rows]


def print_row(row: dict):
    line = f"{row['target']:5} {row['prompts']:8} {row['draft']:22} {row['tokens_per_s']:6.0f} tokens/s "
    line += f"{Ratio(row['over_plain'], *row['over_plain_spread'])}  same text {row['same_text']} of {row['of']}"
    if "a" in row:
        numbers = " ".join(f"{name} {row[name]:.2f}" for name in "kacv")
        line += f"  by the formula {row['predicted_over_plain']:.2f}x"
        line += f"  accepted {row['mean_accepted_tokens']:.2f} a proposal  {numbers}"
    print(line)


def main():
    parser = make_parser(__doc__, rounds=None)
    add = parser.add_argument
    add("--prompts", type=number(int, "between 1 and 20", lambda n: 1 <= n <= 20), default=20, help="of each kind (20)")
    add("--new_tokens", type=number(int, "at least 2", lambda n: n >= 2), default=128, help="after each (128)")
    add("--smoke", action="store_true", help="do not compile")
    fixed = number(int, f"between 1 and {MAX_K}", lambda n: 1 <= n <= MAX_K)
    add("--speculate_k", type=fixed, default=AUTO_K, help=f"the fixed number of tokens to propose ({AUTO_K})")
    args = parser.parse_args()
    keep_freed_memory()
    directory, rows = ensure_checkpoint(args.checkpoint_path), []
    if not (directory / "chat_template.jinja").exists():
        raise UserError(f"{directory} has no chat template, in which the prompts are set")
    for found in measure_all(args, directory):
        for row in found:
            print_row(row)
        rows += found
    save(about_run() | {"model": directory.name, "new_tokens": args.new_tokens, "rows": rows}, args.out, "speculation")


if __name__ == "__main__":
    run_command(main)
