"""Runs generate.py as a user does: as a program of its own, or its main() in this process."""

import json
import subprocess
import sys

from conftest import ROOT

import generate


def run(*args, **options):
    command = [sys.executable, str(ROOT / "generate.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def main(capsys, monkeypatch, *args):
    """Run main() in this process. Returns (the samples or stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, args)])
    generate.main()
    out, err = capsys.readouterr()
    return (json.loads(out) if "--json" in args else out), err


def printed_lines(text: str) -> list[str]:
    """The lines of stderr, but for the one that says why better kernels do not run on this processor."""
    return [line for line in text.splitlines() if not line.startswith("the CPU kernels for ")]


def ids(prompt):
    """A value of --prompt_ids."""
    return ",".join(map(str, prompt))
