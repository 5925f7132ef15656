"""Which file may import which, how long a file may be, and which files are optional."""

import ast
import shutil
import subprocess

import pytest
from conftest import ROOT

# Each file may import only files above it. Only main() may import what its own command needs.
ORDER = ["cli", "threads", "kernels", "model", "sampling", "linear", "kernels_cpu", "kernels_triton", "checkpoint"]
ORDER += ["tokenizer", "gguf_file", "hf_directory", "convert_hf_checkpoint", "tp", "report", "speculative"]
ORDER += [
    "draft_model",
    "retrieval",
    "medusa",
    "engine",
    "load",
    "chat",
    "generate",
    "api",
    "metrics",
    "http_server",
    "serve",
]
ORDER += ["quantize", "harness", "evaluate"]
COMMANDS = ["generate", "serve", "evaluate"]  # nothing imports them
LONGEST = {"generate": 300, "engine": 350, "kernels_triton": 1000}  # lines; every other file 600
SERVER = "api metrics http_server serve"
OPTIONAL = ["chat", "speculative", "draft_model", "retrieval", "medusa", "tp", "kernels_cpu", "kernels_triton", SERVER]
OPTIONAL += ["harness evaluate"]

FILES = {path.stem: path for path in sorted(ROOT.glob("*.py"))}


def imports(tree: ast.AST, in_main: bool = False):
    """(module, names, whether main() imports it) of every import in a file, also of those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], [], in_main) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0], [alias.name for alias in node.names], in_main
        else:
            is_main = isinstance(node, ast.FunctionDef) and node.name == "main"
            is_main |= isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            yield from imports(node, in_main or is_main)


def own_imports(name: str):
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    return [found for found in imports(tree) if found[0] in FILES]


def test_every_file_is_in_the_order():
    assert FILES.keys() <= set(ORDER) and len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_files_above_it(name):
    allowed = ORDER[: ORDER.index(name)]
    assert [module for module, _, in_main in own_imports(name) if module not in allowed and not in_main] == []


@pytest.mark.parametrize("name", FILES)
def test_nothing_imports_a_command(name):
    found = own_imports(name)
    assert [module for module, *_ in found if module in COMMANDS] == []
    assert [module for module, names, _ in found if {"main", "parse_arguments"} & set(names)] == []


def test_the_engine_gets_drafts_and_ranks_as_arguments():
    assert not {"speculative", "tp"} & {module for module, *_ in own_imports("engine")}


def test_imports_in_functions_and_in_main_are_found():
    """Otherwise the tests above could pass without seeing any import."""
    source = "import a\ndef f():\n    if x:\n        from b.c import d\ndef main():\n    import e\n"
    source += "if __name__ == '__main__':\n    import g\nclass C:\n    def main_(self):\n        import h\n"
    found = [("a", [], False), ("b", ["d"], False), ("e", [], True), ("g", [], True), ("h", [], False)]
    assert list(imports(ast.parse(source))) == found


@pytest.mark.parametrize("path", [*FILES.values(), *sorted((ROOT / "csrc").iterdir())], ids=lambda path: path.name)
def test_a_file_can_be_read_in_one_sitting(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST.get(path.stem, 600)


def test_the_whole_idea_is_short():
    files = [FILES[name].read_text(encoding="utf-8") for name in ("model", "sampling", "engine")]
    assert sum(len(text.splitlines()) for text in files) < 1000


# Runs generate.py of each directory in a fork of one process, so that torch is imported once only.
GENERATE = """if True:
    import os, sys, torch
    for directory in sorted(os.listdir()):
        if os.fork() == 0:
            os.chdir(directory)
            import generate
            generate.main()
            sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1] == 0, f"{directory} {os.listdir(directory)}"
    print("all ran")"""


@pytest.mark.slow
def test_generation_works_without_optional_files(tiny, tmp_path, python):
    """After each of them is deleted, and after all are."""
    for i, absent in enumerate([*OPTIONAL, " ".join(OPTIONAL)]):
        shutil.copytree(ROOT / "csrc", tmp_path / str(i) / "csrc")
        for path in FILES.values():
            if path.stem not in absent.split():
                shutil.copy(path, tmp_path / str(i))
    options = ["--prompt_ids", "5,6,7", "--max_new_tokens", "3", "--checkpoint_path", str(tiny("llama-mha")[2])]
    done = subprocess.run([*python, "-c", GENERATE, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("all ran\n"), done.stderr
