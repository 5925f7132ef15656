"""The quality of each quantized format: size, KL divergence and agreement with the full model.

quantize.py quantizes and evaluate.py compares, in float32 arithmetic, so that only the weights
differ. The text is the language reference that comes with Python (pydoc_data.topics): English
technical prose that no checkpoint here was calibrated on. int4-gptq is calibrated on text that the
model writes itself.

The weights of a GGUF file are dequantized first, and this is the reference. The default model was
made from a 4-bit file with groups of 32, so int4 in groups of 32 reproduces its levels, while
iq4_nl loses a second time; these rows say nothing about other models. With another 4-bit file, such
as a Q4_K_M, every 4-bit row loses a second time.
"""

import pydoc_data.topics
import tempfile
from pathlib import Path

import measure
import torch

from cli import print_status, run_command
from evaluate import evaluate
from formats import Quantization
from load import load_model
from quantize import quantize_checkpoint
from text.tokenizer import Tokenizer

SETTINGS = [Quantization("int8", size, "int8") for size in (0, 128, 64, 32)]  # 0: one group per row
SETTINGS += [Quantization("int8", 32, "none"), Quantization("int4", 32, "int4")]
SETTINGS += [Quantization(mode, size, "int8") for size in (128, 64, 32) for mode in ("int4", "int4-gptq")]
SETTINGS += [Quantization("iq4_nl", 32, "int8")]
WINDOW = 1024


def quality(directories: list[Path], tokenizer: Tokenizer, ids: list[int]) -> dict:
    """Size and perplexity of the first checkpoint, and its difference from the second, if any."""
    size = sum(path.stat().st_size for path in directories[0].glob("*.safetensors"))
    models = [load_model(directory, dtype=torch.float32) for directory in directories]
    return {"bytes": size} | evaluate(models, tokenizer, ids, WINDOW, WINDOW // 2)


def main():
    args = measure.make_parser(__doc__, {"--max_tokens": 4097}).parse_args()

    source = measure.quantized(args.checkpoint_path, "bf16")
    tokenizer = Tokenizer(source)
    ids = tokenizer.encode("\n".join(pydoc_data.topics.topics.values()))[: args.max_tokens]
    reference = quality([source], tokenizer, ids)
    rows = []
    for quantization in SETTINGS:
        row = {name: getattr(quantization, name) for name in ("mode", "groupsize", "head")}
        print_status(str(row))
        with tempfile.TemporaryDirectory(dir=source.parent, prefix=".quantization.") as folder:
            directory = Path(folder) / "model"
            quantize_checkpoint(source, directory, quantization)
            rows.append(row | quality([directory, source], tokenizer, ids))

    columns = {"mode": "", "groupsize": "", "head": "", "bytes": ".3e", "kl_nats": ".5f"}
    columns |= {"kl_ci95": ".5f", "top1_agreement": ".3f", "top1_ci95": ".3f", "perplexity": ".3f"}
    measure.print_table([reference, *rows], columns)
    measure.save("quantization", {"model": source.name, "reference": reference, "rows": rows}, args.out)


if __name__ == "__main__":
    run_command(main)
