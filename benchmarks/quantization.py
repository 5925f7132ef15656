"""What each way to quantize costs in quality: size, KL divergence and agreement with the unquantized model.

Every row is made by quantize.py's function and compared by evaluate.py's, on one text, in float32 arithmetic, so that
only the weights differ. Without --text it is the language reference that comes with Python (pydoc_data.topics):
English technical prose that no checkpoint here was calibrated on. int4-gptq is calibrated on text that the model writes
itself.

The default model was itself made from a 4-bit file with groups of 32, so int4 in groups of 32 finds its levels again
and says nothing of other models.
"""

import hashlib
import pydoc_data.topics
import tempfile
from pathlib import Path

import measure
import torch

from cli import number, print_status, run_command
from convert_hf_checkpoint import ensure_checkpoint
from evaluate import evaluate, read_text
from linear import Quantization
from load import load_model
from quantize import quantize_checkpoint
from tokenizer import Tokenizer

SETTINGS = [Quantization("int8", size, "int8") for size in (0, 128, 64, 32)]  # 0: one group per row
SETTINGS += [Quantization("int8", 32, "none"), Quantization("int4", 32, "int4")]
SETTINGS += [Quantization(mode, size, "int8") for size in (128, 64, 32) for mode in ("int4", "int4-gptq")]
WINDOW = 1024


def compare(source: Path, ids: list[int], quantization: Quantization | None = None) -> dict:
    """The fields of evaluate.py for these ids, beside the unquantized model; of that model by itself with None."""
    with tempfile.TemporaryDirectory(dir=source.parent, prefix=".quantization.") as folder:
        directories, row = [source], {}
        if quantization is not None:
            directories.insert(0, Path(folder) / "model")
            quantize_checkpoint(source, directories[0], quantization)
            row = {name: getattr(quantization, name) for name in ("mode", "groupsize", "head")}
        row["bytes"] = sum(path.stat().st_size for path in directories[0].glob("*.safetensors"))
        models = [load_model(path, dtype=torch.float32) for path in directories]
        length = min(WINDOW, len(ids), models[0].config.max_seq_length)
        return row | evaluate(models, Tokenizer(source), ids, length, length // 2, "prefill")


def main():
    parser = measure.make_parser(__doc__)
    parser.add_argument("--text", type=Path, help="a UTF-8 file; without it Python's language reference")
    above_1 = number(int, "at least 2", lambda n: n >= 2)
    parser.add_argument("--max_tokens", type=above_1, default=4097, help="read no more of it")
    parser.add_argument("--smoke", action="store_true", help="only the first of the settings, to see that this works")
    args = parser.parse_args()
    source = ensure_checkpoint(args.checkpoint_path)
    with tempfile.TemporaryDirectory() as folder:
        path = args.text or Path(folder) / "pydoc_data.topics"
        if args.text is None:
            path.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        ids = read_text(path, Tokenizer(source), args.max_tokens)
    result = measure.about_run() | {"model": source.name, "text_sha256": digest, "text": path.name}
    print_status("the model as it is")
    result |= {"reference": compare(source, ids), "rows": []}
    for quantization in SETTINGS[:1] if args.smoke else SETTINGS:
        print_status(f"{quantization.mode}, groups of {quantization.groupsize or 'a row'}, head {quantization.head}")
        result["rows"].append(compare(source, ids, quantization))
    columns = {"mode": "", "groupsize": "", "head": "", "bytes": ".3e", "kl_nats": ".5f", "kl_ci95": ".5f"}
    columns |= {"top1_agreement": ".3f", "top1_ci95": ".3f", "perplexity": ".3f"}
    measure.print_table([result["reference"], *result["rows"]], columns)
    measure.save(result, args.out, "quantization")


if __name__ == "__main__":
    run_command(main)
