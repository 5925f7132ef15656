"""What each way to quantize costs in quality: a table of size, KL divergence and agreement with the unquantized model.

Every row is made by quantize.py's function and compared by evaluate.py's, on one text, in float32 arithmetic, so that
only the weights differ. Without --text it is the language reference that comes with Python (pydoc_data.topics):
English technical prose that no checkpoint here was calibrated on. int4-gptq is calibrated on text that the model writes
itself, unless there is a --calibration_file.

The default model was itself made from a 4-bit file with groups of 32, so int4 in groups of 32 finds its levels again
and says nothing of other models.
"""

import argparse
import hashlib
import json
import pydoc_data.topics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from decode import ROOT, circumstances

from cli import ArgumentParser, number, print_status, run_command
from convert_hf_checkpoint import ensure_checkpoint
from evaluate import evaluate, read_text
from linear import Quantization
from load import load_model
from quantize import quantize_checkpoint
from tokenizer import Tokenizer

SETTINGS = [Quantization("int8", size, "int8") for size in (0, 128, 64, 32)]
SETTINGS += [Quantization("int8", 32, "none"), Quantization("int4", 32, "int4")]
SETTINGS += [Quantization(mode, size, "int8") for size in (128, 64, 32) for mode in ("int4", "int4-gptq")]
WINDOW = 1024


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def measure(source: Path, quantization: Quantization, ids: list[int], args) -> dict:
    with tempfile.TemporaryDirectory(dir=source.parent, prefix=".quantization.") as folder:
        directory = Path(folder) / "model"
        quantize_checkpoint(source, directory, quantization, args.calibration_file)
        models = [load_model(path, dtype=torch.float32) for path in (directory, source)]
        length = min(WINDOW, len(ids), models[0].config.max_seq_length)
        result = evaluate(models, Tokenizer(source), ids, length, length // 2, args.path)
        row = {"mode": quantization.mode, "groupsize": quantization.groupsize, "head": quantization.head}
        return row | {"bytes": stored_bytes(directory)} | result


def print_table(result: dict):
    """As Markdown, the way the README has it."""
    before = result["reference"]
    print("| mode | group | head | MB | KL, nats | same top token | perplexity |\n|---|---|---|---|---|---|---|")
    print(f"| bf16 | | | {before['bytes'] / 1e6:.0f} | 0 | 100 % | {before['perplexity']:.2f} |")
    for row in result["rows"]:
        cells = [row["mode"], row["groupsize"] or "row", row["head"], f"{row['bytes'] / 1e6:.0f}"]
        cells += [f"{row['kl_nats']:.5f} ± {row['kl_ci95']:.5f}"]
        cells += [f"{100 * row['top1_agreement']:.1f} ± {100 * row['top1_ci95']:.1f} %"]
        print("|", " | ".join(map(str, cells)), f"| x {row['perplexity'] / before['perplexity']:.3f} |")


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    count = number(int, "at least 2", lambda n: n >= 2)
    add("--checkpoint_path", help="as generate.py takes it (SmolLM2-135M-Instruct)")
    add("--text", type=Path, help="a UTF-8 file (Python's language reference)")
    add("--max_tokens", type=count, default=4097, help="read no more of it (4097)")
    add("--path", choices=("prefill", "decode"), default="prefill", help="a window at once, or token by token")
    add("--calibration_file", type=Path, help="text for int4-gptq (the model writes its own)")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "quantization_cpu.json", help="the JSON file")
    args = parser.parse_args()
    source = ensure_checkpoint(args.checkpoint_path)
    with tempfile.TemporaryDirectory() as folder:
        path = args.text or Path(folder) / "text"
        if args.text is None:
            path.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        ids = read_text(path, Tokenizer(source), args.max_tokens)
    print_status("the model as it is")
    model = load_model(source, dtype=torch.float32)
    length = min(WINDOW, len(ids), model.config.max_seq_length)
    result = circumstances(torch.device("cpu"), []) | {"model": source.name, "text_sha256": digest}
    result["text"] = args.text.name if args.text else "pydoc_data.topics"
    result["reference"] = evaluate([model], Tokenizer(source), ids, length, length // 2, args.path)
    result["reference"]["bytes"] = stored_bytes(source)
    del model
    result["rows"] = []
    for quantization in SETTINGS:
        print_status(f"{quantization.mode}, groups of {quantization.groupsize or 'a row'}, head {quantization.head}")
        result["rows"].append(measure(source, quantization, ids, args))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print_table(result)


if __name__ == "__main__":
    run_command(main)
