"""Which file may import which, how long functions may be, and which files are optional."""

import ast
import shutil
import subprocess

import pytest
from conftest import ROOT

# Each file may import only files above it. Only main() may import what its own command needs.
ORDER = """
    cli kernels model sampling formats
    cpu.memory cpu.threads cpu.install kernels_triton tp
    checkpoint ranks tokenizer
    sources.fields sources.families sources.hf_directory sources.gguf_header sources.gguf_file sources.hub
    sources.assemble sources.opening convert_hf_checkpoint
    report drafts.controller speculative drafts.draft_model drafts.retrieval drafts.heads
    engine load chat generate
    server.messages server.api server.metrics server.http_server serve
    quantize evaluate
""".split()  # noqa: SIM905
COMMANDS = ["generate", "serve", "evaluate"]  # nothing imports them
ROOMS = ["cpu", "sources", "drafts", "server"]
# Files and folders that can be deleted together.
OPTIONAL = ["chat", "speculative drafts", "tp ranks", "cpu", "kernels_triton", "serve server", "evaluate", "training"]
OPTIONAL += ["sources convert_hf_checkpoint"]

TOP_LEVEL = sorted(ROOT.glob("*.py"))
PATHS = [
    *TOP_LEVEL,
    *(path for room in ROOMS for path in sorted((ROOT / room).glob("*.py")) if path.stem != "__init__"),
]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}  # by the module's name


def imports(tree: ast.AST, in_main: bool = False):
    """(module, names, whether main() imports it) of every import in a file, also of those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [], in_main) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names], in_main
            if node.module in ROOMS:  # from cpu import threads
                yield from ((f"{node.module}.{alias.name}", [], in_main) for alias in node.names)
        else:
            is_main = isinstance(node, ast.FunctionDef) and node.name == "main"
            is_main |= isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            yield from imports(node, in_main or is_main)


def own_imports(name: str):
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    return [found for found in imports(tree) if found[0] in FILES]


def test_every_file_is_in_the_order():
    assert sorted(FILES) == sorted(ORDER)


def test_the_top_level_is_small():
    assert len(TOP_LEVEL) <= 20


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
    source += "from cpu import threads\n"
    found = [("a", [], False), ("b.c", ["d"], False), ("e", [], True), ("g", [], True), ("h", [], False)]
    found += [("cpu", ["threads"], False), ("cpu.threads", [], False)]
    assert list(imports(ast.parse(source))) == found


@pytest.mark.parametrize("path", [*PATHS, *sorted((ROOT / "training").glob("*.py"))], ids=lambda path: path.stem)
def test_a_function_fits_on_a_screen(path):
    functions = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [f"{f.name}: {f.end_lineno - f.lineno + 1}" for f in functions if f.end_lineno - f.lineno >= 60] == []


def test_the_whole_idea_is_short():
    files = [FILES[name].read_text(encoding="utf-8") for name in ("model", "sampling", "engine", "generate")]
    assert sum(len(text.splitlines()) for text in files) < 1350


FIRST_KERNEL = """if True:
    import sys, torch, generate
    class FirstKernel(BaseException):
        pass
    def stop(*_):
        raise FirstKernel
    import model
    model.Transformer.forward = stop
    try:
        generate.main()
    except FirstKernel:
        for name in sorted(sys.modules):
            if name in OURS:
                print(name)"""


def test_a_plain_prompt_imports_few_modules(tiny, python):
    """From generate.py to the first operation of the model, a reader passes these files, and no others."""
    options = ["--prompt_ids", "5,6,7", "--checkpoint_path", str(tiny("llama-mha")[2])]
    command = [*python, "-c", FIRST_KERNEL.replace("OURS", repr({*FILES, *ROOMS})), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    names = done.stdout.split()
    files = "checkpoint cli engine generate kernels load model sampling tokenizer".split()  # noqa: SIM905
    assert [name for name in names if not name.startswith("cpu")] == files, done.stderr
    assert {name for name in names if name.startswith("cpu")} <= {"cpu", "cpu.install", "cpu.memory", "cpu.threads"}


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
        copy = tmp_path / str(i)
        for folder in (*ROOMS, "training"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for path in TOP_LEVEL:
            shutil.copy(path, copy)
        for name in absent.split():
            if (copy / name).is_dir():
                shutil.rmtree(copy / name)
            else:
                (copy / f"{name}.py").unlink()
    options = ["--prompt_ids", "5,6,7", "--max_new_tokens", "3", "--checkpoint_path", str(tiny("llama-mha")[2])]
    done = subprocess.run([*python, "-c", GENERATE, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("all ran\n"), done.stderr
