"""What speculation gains: each draft against plain decoding of the same model, on the same prompts, in turns.

Greedy, one row, compiled, in bfloat16, int8 and int4 (made beside the checkpoint if they are not there). Open prompts
are questions and tasks; copying prompts ask for code or text of this repository's own files to be repeated. For each
prompt, plain decoding and every draft take their turn, and the ratio of their tokens per second is taken, without
prefill. The median over the prompts is reported, after a first one that does not count; and predicted_over_plain, what
the formula in speculative.py gives for the measured k, a, c and v. same_text counts the prompts whose tokens are those
of plain decoding: with our kernels, all.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import measure
from measure import FORMATS, ROOT, column, quantized

from cli import UserError, keep_freed_memory, number, print_status, run_command
from convert_hf_checkpoint import ensure_checkpoint
from engine import Engine, Request, StepFunctions, generate
from linear import Quantization, quantize_model
from load import compiled_steps, install_kernels, load_model
from report import Timing
from speculative import AUTO_K, LookupDraft, ModelDraft, Report, Speculation, expected_tokens
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
    return OPEN.replace("\n", "|").split("|")[:n]


def copying_prompts(n: int) -> list[str]:
    """Pieces of some 600 characters of this repository's files, in turn."""
    texts = [(ROOT / name).read_text() for name in ("model.py", "LICENSE", "sampling.py", "README.md")]
    prompts = []
    for i in range(n):
        text = texts[i % len(texts)]
        start = text.index("\n\n", (len(text) - 1500) * (i + 1) // (n + 1)) + 2
        prompts.append(f"{COPY[i % len(COPY)]}\n\n{text[start : start + 600]}")
    return prompts


# ---------------------------------------------------------------- one model, several drafts


def run_prompt(engine: Engine, speculation: Speculation | None, prompt: list[int], new_tokens: int) -> dict:
    engine.speculation, engine.timing = speculation, Timing()
    engine.clear()
    request = Request(list(prompt), measure.GREEDY, new_tokens)
    generate(engine, [request])
    timing = engine.timing
    rate = timing.decode_tokens / timing.decode_s
    return {"rate": rate, "tokens": request.new_tokens, "decode_s": timing.decode_s, "count": timing.decode_tokens}


def warmed_up(engine: Engine, speculation: Speculation | None, prompts: list[list[int]], new_tokens: int) -> Callable:
    """A contestant that runs the next prompt at each turn. Runs of every graph and of a first prompt do not count."""
    if speculation is not None:
        speculation.begin(engine)
        speculation.rehearsing = True
        run_prompt(engine, speculation, prompts[0], 4)
        speculation.rehearsing = False
    run_prompt(engine, speculation, prompts[0], new_tokens)
    if speculation is not None:
        speculation.report = Report()
    remaining = iter(prompts)
    return lambda: run_prompt(engine, speculation, next(remaining), new_tokens)


def formula(report: Report, plain_s: float) -> dict:
    """What a proposed token was worth and cost on average, and the speedup that follows: (1 - a^(k+1)) / (1 - a)
    tokens for k c + v plain steps where something was proposed, and elsewhere one for one."""
    if report.steps == 0:
        return {"predicted_over_plain": 1.0}
    verify_s = max(0.0, report.target_s - report.plain_steps * plain_s)
    k, a = report.proposed / report.steps, sum(report.accepted) / sum(report.judged)
    c, v = report.draft_s / report.proposed / plain_s, verify_s / report.steps / plain_s
    tokens = report.steps * expected_tokens(min(a, 0.9999), k) + report.plain_steps
    predicted = tokens / (report.steps * (k * c + v) + report.plain_steps)
    return {"k": k, "a": a, "c": c, "v": v, "predicted_over_plain": predicted}


def compare(model, steps: StepFunctions, drafts: dict, prompts: list[list[int]], new_tokens: int) -> list[dict]:
    """A row of the table for plain decoding and for each draft; drafts: name -> (draft, tokens to propose or None: as
    many as pay)."""
    engine = Engine(model, 1, max(map(len, prompts)) + new_tokens, steps)
    speculations = {name: Speculation(draft, k or AUTO_K, automatic=k is None) for name, (draft, k) in drafts.items()}
    speculations = {"plain": None} | speculations
    turns = {name: warmed_up(engine, each, prompts, new_tokens) for name, each in speculations.items()}
    rounds, _ = measure.take_turns(turns, len(prompts), warm_up=0)
    plain, rows = rounds["plain"], []
    plain_s = sum(column(plain, "decode_s")) / sum(column(plain, "count"))
    for name, mine in rounds.items():
        same = sum(one["tokens"] == other["tokens"] for one, other in zip(mine, plain))
        row = {"draft": name, "tokens_per_s": median(column(mine, "rate"))}
        row |= measure.ratio("over_plain", column(mine, "rate"), column(plain, "rate"))
        row |= {"same_text": same, "of": len(prompts), "rates": column(mine, "rate")}
        if speculations[name] is not None:
            report = speculations[name].report
            numbers = report.numbers(sum(column(mine, "decode_s")))
            row |= {"mean_accepted_tokens": numbers["mean_accepted_tokens"]} | numbers["speculation"]
            row |= formula(report, plain_s)
        rows.append(row)
    return rows


# ---------------------------------------------------------------- all models


def compare_all(args, directory: Path) -> Iterator[dict]:
    steps, template = compiled_steps(not args.smoke, False), ChatTemplate(directory, Tokenizer(directory))
    prompts = {"open": open_prompts(args.prompts), "copying": copying_prompts(args.prompts)}
    for name, texts in prompts.items():
        prompts[name] = [template.encode([{"role": "user", "content": text}]) for text in texts]
    four = install_kernels(quantize_model(load_model(directory, kernels="torch"), Quantization("int4", 32, "int8")))
    for format in FORMATS:
        model, drafts = load_model(quantized(directory, format)), {"prompt-lookup, auto": (LookupDraft(), None)}
        if format == "bf16":
            drafts[f"int4-self, {AUTO_K}"] = ModelDraft(four, True), AUTO_K
            other = ModelDraft(load_model(quantized(directory, "int4")), False)
            drafts[f"int4 checkpoint, {AUTO_K}"] = other, AUTO_K
        else:
            drafts[f"prompt-lookup, {AUTO_K}"] = LookupDraft(), AUTO_K
        if format != "int4":
            drafts["int4-self, auto"] = ModelDraft(four, True), None
        for name in ("open",) if format == "bf16" else prompts:
            print_status(f"{format}, {name} prompts")
            for row in compare(model, steps, drafts, prompts[name], args.new_tokens):
                yield {"target": format, "prompts": name} | row


def main():
    parser = measure.make_parser(__doc__)
    add = parser.add_argument
    add("--prompts", type=number(int, "between 1 and 20", lambda n: 1 <= n <= 20), default=20, help="of each kind")
    add("--new_tokens", type=number(int, "at least 2", lambda n: n >= 2), default=128, help="after each")
    add("--smoke", action="store_true", help="do not compile")
    args = parser.parse_args()
    keep_freed_memory()
    directory = ensure_checkpoint(args.checkpoint_path)
    if not (directory / "chat_template.jinja").exists():
        raise UserError(f"{directory} has no chat template, in which the prompts are set")
    rows = list(compare_all(args, directory))
    columns = {"target": "", "prompts": "", "draft": "", "tokens_per_s": ".0f", "over_plain": ".2f"}
    columns |= {"over_plain_spread": ".2f", "predicted_over_plain": ".2f", "mean_accepted_tokens": ".2f"}
    columns |= {"mean_proposed_tokens": ".2f", "a": ".2f", "c": ".2f", "v": ".2f", "same_text": "", "of": ""}
    measure.print_table(rows, columns)
    about = measure.about_run() | {"model": directory.name, "new_tokens": args.new_tokens}
    measure.save(about | {"rows": rows}, args.out, "speculation")


if __name__ == "__main__":
    run_command(main)
