"""The gain of speculation: each draft and plain decoding of the same model on the same prompts, measured alternately.

Greedy, one row, compiled (or --eager), in the formats of --formats, which are made beside the
checkpoint if they are not there (file: a GGUF file in its own format). A model without trained heads
runs without the drafts that need them. Open prompts are questions and tasks; copying prompts ask for
text or code of this repository to be repeated. Each prompt runs with plain decoding and with every
draft, and the ratio of their decode rates is taken. over_plain is the median of these ratios over
the prompts. same_text counts the prompts whose tokens equal those of plain decoding: with our
kernels, these are all prompts.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import measure
from measure import FORMATS, ROOT, column, quantized

from checkpoint import Checkpoint
from cli import UserError, print_status, run_command
from compile import compiled_steps
from drafts.draft import MAX_K
from drafts.draft_model import DraftVocabulary, SelfDraft, output_head_rows
from drafts.heads import MedusaDraft, make_heads, read_heads
from drafts.retrieval import RetrievalDraft
from engine import Engine, Request, StepFunctions, generate
from formats import Quantization, quantize_model
from load import install_kernels, load_model, open_checkpoint
from options import DEFAULT_HEADS
from speculative import Report, Speculation
from text.chat_template import ChatTemplate
from text.tokenizer import Tokenizer

OPEN_PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue.",
    "Give me three tips for learning a language.",
    "How does a bicycle stay upright?",
    "Tell me a story about a fox and a crow.",
    "Write a Python function that reverses a list.",
    "What are the planets of the solar system?",
    "Describe your favourite season.",
    "How do I boil an egg?",
    "What is photosynthesis?",
    "Who was Ada Lovelace?",
    "List five uses of a paper clip.",
    "What is the difference between a virus and a bacterium?",
    "Write an invitation to a birthday party.",
    "Explain recursion to a child.",
    "What causes tides?",
    "Name some famous painters and their works.",
    "How can I sleep better?",
    "What is inflation in an economy?",
]


def copying_prompts() -> list[str]:
    """Requests to repeat pieces of 600 characters of code and of prose."""
    texts = [(ROOT / name).read_text() for name in ("model.py", "README.md")]
    pieces = [text[start : start + 600] for start in range(0, 6000, 600) for text in texts]
    return [f"Write this out again, exactly as it is:\n\n{piece}" for piece in pieces]


# ---------------------------------------------------------------- one model, several drafts


def run_prompt(engine: Engine, prompts: Iterator, new_tokens: int) -> dict:
    """Run the next of the prompts.

    As in a server, the numbers of threads are tuned over all prompts.
    """
    engine.reset_timing()
    engine.clear()
    request = Request(next(prompts), measure.GREEDY, new_tokens)
    generate(engine, [request])
    decode_s = engine.timing.decode_s
    return {"rate": engine.timing.decode_tokens / decode_s, "tokens": request.new_tokens, "decode_s": decode_s}


def warm_up(engine: Engine, prompt: list[int], new_tokens: int):
    """Compile every graph and run one prompt, without measuring them."""
    with engine.decoding.rehearsal():
        run_prompt(engine, iter([prompt]), 4)
    engine.threads.forget()
    run_prompt(engine, iter([prompt]), new_tokens)
    engine.decoding.report = Report()


def compare(model, steps: StepFunctions, drafts: dict, prompts: list[list[int]], new_tokens: int) -> list[dict]:
    """A row of the table for plain decoding and for each set of drafts.

    drafts: name -> (drafts, number of tokens to propose, or None for "auto").
    """
    length = max(map(len, prompts)) + new_tokens
    # All engines use the same caches, one after another.
    engines = {"plain": Engine(model, 1, length, steps)}
    for name, (some, k) in drafts.items():
        speculation = Speculation(some, k or MAX_K, automatic=k is None)
        engines[name] = Engine(model, 1, length, steps, speculation)
    turns = {}
    for name, engine in engines.items():
        warm_up(engine, prompts[0], new_tokens)
        turns[name] = partial(run_prompt, engine, iter(prompts), new_tokens)
    rounds = measure.take_turns(turns, len(prompts), warm_up=0)

    plain = rounds["plain"]
    rows = []
    for name, mine in rounds.items():
        rates = column(mine, "rate")
        row = {"draft": name, "tokens_per_s": median(rates), "rates": rates, "of": len(prompts)}
        row |= measure.ratio("over_plain", rates, column(plain, "rate"))
        row["same_text"] = sum(one["tokens"] == other["tokens"] for one, other in zip(mine, plain))
        if name in drafts:
            report = engines[name].decoding.report
            numbers = report.numbers(sum(column(mine, "decode_s")))
            row |= numbers.pop("speculation") | numbers
        rows.append(row)
    return rows


# ---------------------------------------------------------------- all models


def make_drafts(model, heads, four) -> dict:
    """The drafts to compare for a model, as `compare` takes them.

    heads: a file of Medusa heads, or None. four: the model in 4 bits, or None.
    """

    def medusa():
        return MedusaDraft(install_kernels(make_heads(heads, model)))

    def in_4_bits():
        vocabulary = None
        if heads is not None:
            rows = output_head_rows(model, heads.vocabulary)
            vocabulary = install_kernels(DraftVocabulary(heads.vocabulary, rows))
        return SelfDraft(four, vocabulary)

    drafts = {"prompt-lookup, auto": ([RetrievalDraft()], None)}
    best = [RetrievalDraft()]
    if heads:
        drafts["medusa, 3"] = ([medusa()], 3)
        drafts["medusa, auto"] = ([medusa()], None)
        best.append(medusa())
    if four is not None:
        drafts["int4-self, auto"] = ([in_4_bits()], None)
        best.append(in_4_bits())
    if len(best) > 1:
        drafts["all, auto"] = (best, None)
    return drafts


def in_four_bits(source: Checkpoint, directory: Path):
    """The model in the bits of its file, if these are fewer than 8, and otherwise in int4."""
    if source.quantization is not None and source.quantization.bits < 8:
        return load_model(source)
    return install_kernels(quantize_model(load_model(directory, kernels="torch"), Quantization("int4", 32, "int8")))


def main():
    parser = measure.make_parser(__doc__, {"--prompts": 20, "--new_tokens": 128})
    add = parser.add_argument
    add("--formats", nargs="+", choices=measure.WITH_FILE, default=list(FORMATS), help="of the weights (all but file)")
    add("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()

    source = open_checkpoint(args.checkpoint_path)
    directory = quantized(args.checkpoint_path, "bf16")
    template = ChatTemplate(directory, Tokenizer(directory))
    prompts = {}
    for kind, texts in {"open": OPEN_PROMPTS, "copying": copying_prompts()}.items():
        chats = [[{"role": "user", "content": text}] for text in texts[: args.prompts]]
        prompts[kind] = [template.encode(chat) for chat in chats]

    rows = []
    for format in args.formats:
        steps = compiled_steps(not args.eager, False)  # they keep the models that they have compiled
        model = load_model(open_checkpoint(str(quantized(args.checkpoint_path, format))))
        four = in_four_bits(source, directory) if format in ("bf16", "int8") else None
        try:
            heads = read_heads(DEFAULT_HEADS, model, directory.name)
        except UserError:
            heads = None  # they were trained for another model
        for kind, ids in prompts.items():
            print_status(f"{format}, {kind} prompts")
            drafts = make_drafts(model, heads, four)
            compared = compare(model, steps, drafts, ids, args.new_tokens)
            rows += [{"target": format, "prompts": kind} | row for row in compared]

    columns = {"target": "", "prompts": "", "draft": "", "tokens_per_s": ".0f"}
    ratios = ("over_plain", "over_plain_spread", "mean_accepted_tokens", "mean_proposed_tokens", "acceptance_by_place")
    columns |= dict.fromkeys(ratios, ".2f")
    measure.print_table(rows, columns | {"same_text": "", "of": ""})
    about = {"model": source.name, "new_tokens": args.new_tokens, "rows": rows}
    measure.save("speculation", about, args.out)


if __name__ == "__main__":
    run_command(main)
