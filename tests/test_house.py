"""Which file may import which, what a function, a statement and a line may hold, which files are optional."""

import ast
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

import cli

# Each file may import only files above it. Only main() may import what its own command needs.
ORDER = """
    cli edits config backend kernels positions layers mixers.recurrent mixers.experts mixers.mtp model sampling formats
    cpu.memory cpu.threads cpu.build cpu.layers cpu.shadow cpu.install kernels_triton
    text.tokenizer text.chat_template text.grammar checkpoint tp costs
    sources.fields sources.families sources.hf_directory sources.gguf_header sources.gguf_tokenizer
    sources.gguf_file sources.hub sources.wheels sources.names
    sources.assemble sources.opening convert_hf_checkpoint
    report engine watchdog compile
    drafts.controller drafts.draft drafts.draft_model drafts.retrieval drafts.heads drafts.mtp drafts.loading
    speculative
    options load text.chat generate
    server.parameters server.python_calls server.json_reader server.gemma_calls
    server.tools server.tool_grammars server.answers
    server.pipe_messages server.request_fields server.openai_requests server.constraints server.chat_prompts
    server.answer_text server.api server.embeddings
    server.responses server.anthropic_requests server.anthropic server.responses_requests server.openai_responses
    server.metrics server.engine_client server.error_responses server.access
    server.connections server.http_server serve
    quantize evaluate
""".split()  # noqa: SIM905
COMMANDS = ["generate", "serve", "evaluate"]  # nothing imports them
ROOMS = ["cpu", "drafts", "mixers", "server", "sources", "text"]
# Files and folders that can be deleted together.
OPTIONAL = ["text/chat", "speculative drafts", "tp", "cpu", "kernels_triton", "mixers/recurrent mixers/mtp"]
OPTIONAL += ["mixers/experts", "mixers", "training", "serve server text/grammar", "evaluate"]
OPTIONAL += ["sources convert_hf_checkpoint"]

TOP_LEVEL = sorted(ROOT.glob("*.py"))
IN_ROOMS = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py")) if path.stem != "__init__"]
PATHS = [*TOP_LEVEL, *IN_ROOMS]
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


def test_the_readme_is_short_and_lists_each_file_once():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 169
    lists = re.search(r"^## The files\n(.*?)^\*\*To copy\*\*", readme, re.S | re.M)[1]
    listed = re.findall(r"`(\w+)\.py`:", lists) + re.findall(r"\[`(\w+)/`\]", lists)
    assert sorted(listed) == sorted([path.stem for path in TOP_LEVEL] + ROOMS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_files_above_it_and_no_command(name):
    allowed, found = ORDER[: ORDER.index(name)], own_imports(name)
    assert [module for module, _, in_main in found if module not in allowed and not in_main] == []
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


# ---------------------------------------------------------------- functions, statements and lines

LINES = 60  # of a function
LONG_LINE = 100  # columns; the formatter allows 120
LONG_LINES = 0.06  # the part of all lines that may be longer
CONDITIONALS = 0.02  # conditional expressions a statement
PROGRAMS = [path for folder in ("training", "benchmarks") for path in sorted((ROOT / folder).glob("*.py"))]
SEVERAL_VALUES = ast.Tuple | ast.List | ast.GeneratorExp | ast.ListComp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def is_text(node: ast.AST) -> bool:
    is_bytes = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_bytes or isinstance(node, ast.JoinedStr)


def is_count(node: ast.AST) -> bool:
    """Whether an expression is a number in sight: a literal, len(...) or a calculation."""
    is_len = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
    return is_len or isinstance(node, ast.BinOp) or (isinstance(node, ast.Constant) and type(node.value) is int)


def is_condition(node: ast.AST) -> bool:
    is_bool = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"
    negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_bool or negation or isinstance(node, ast.Compare | ast.BoolOp)


def function_faults(node: ast.AST):
    is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    if node.end_lineno - node.lineno >= LINES and not is_kernel:
        yield f"{node.name} has more than {LINES} lines"


def expression_faults(node: ast.AST):
    if isinstance(node, ast.Assign):
        pairs = [target for target in node.targets if isinstance(target, ast.Tuple)]
        is_list = any(isinstance(target, ast.List) for target in node.targets)
        if len(node.targets) > 1 or is_list or (pairs and isinstance(node.value, SEVERAL_VALUES)):
            yield "several assignments in a statement"
    if isinstance(node, ast.IfExp):
        parts = [part for child in ast.iter_child_nodes(node) for part in ast.walk(child)]
        if node.end_lineno > node.lineno or any(isinstance(part, ast.IfExp) for part in parts):
            yield "a conditional expression inside another, or over several lines"
    if isinstance(node, ast.Call):
        splatted = [argument.value for argument in node.args if isinstance(argument, ast.Starred)]
        if any(isinstance(value, ast.Tuple | ast.List) for value in splatted):
            yield "a tuple that is built to be splatted"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if is_text(one) and not is_count(other):
                yield "a text times something that may be a condition"
            if isinstance(one, ast.List) and is_condition(other):
                yield "a list times a condition"


def faults(tree: ast.AST):
    """(line, what) of each function and statement in a file that does too much."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            yield from ((node.lineno, fault) for fault in function_faults(node))
        yield from ((node.lineno, fault) for fault in expression_faults(node))


@pytest.mark.parametrize("path", [*PATHS, *PROGRAMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_statement_does_one_thing(path):
    found = list(faults(ast.parse(path.read_text(encoding="utf-8"))))
    assert found == []


def test_conditional_expressions_and_long_lines_are_few():
    texts = [path.read_text(encoding="utf-8") for path in (*PATHS, *PROGRAMS)]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    conditionals = sum(isinstance(node, ast.IfExp) for node in nodes)
    assert conditionals <= CONDITIONALS * sum(isinstance(node, ast.stmt) for node in nodes)
    lines = [line for text in texts for line in text.splitlines()]
    assert sum(len(line) > LONG_LINE for line in lines) <= LONG_LINES * len(lines)


def test_faults_are_found():
    wrong = [
        "def f():" + "\n pass" * 60, "a, b = 1, 2", "a, b = (f(x) for x in y)",
        "[a, b] = f()", "a = b = c", "a = b if c else d if e else f", "a = (b if c else\n d)", "f(*(a, b))",
        "'s' * (n > 1)", "f'{x}' * many", "[x] * (a and b)", "[x] * (not a)",
    ]  # fmt: skip
    for source in wrong:
        assert len(list(faults(ast.parse(source)))) == 1, source
    right = [
        "def f():" + "\n pass" * 59, "a, b, c = x.shape", "'-' * 8",
        "a, *b = f()", "a = b, c, d", "a = b if c else d", "f(*a, *b.c)", "b' ' * (8 + n)", "'ab' * len(x)", "[0] * n",
        "x * (a > b)",
    ]  # fmt: skip
    for source in right:
        assert list(faults(ast.parse(source))) == [], source


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
    files = "backend checkpoint cli compile config costs edits engine formats generate kernels layers load mixers model"
    files += " options positions sampling text text.chat_template text.tokenizer watchdog"
    others = [name for name in names if not name.startswith("cpu")]
    assert others == files.split(), done.stderr
    folder = {"cpu"} | {name for name in FILES if name.startswith("cpu.")}
    assert {name for name in names if name.startswith("cpu")} <= folder


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


def test_the_optional_files_are_those_that_a_command_may_miss():
    names = " ".join(OPTIONAL).replace("/", ".").split()
    assert sorted(name for name in names if not name.startswith("mixers.")) == sorted(cli.OPTIONAL)


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
            path = copy / name
            if path.is_dir():
                shutil.rmtree(path)
            elif path.parent.exists():  # its folder was deleted before it
                path.with_suffix(".py").unlink(missing_ok=True)
    options = ["--prompt_ids", "5,6,7", "--max_new_tokens", "3", "--checkpoint_path", str(tiny("llama-mha")[2])]
    done = subprocess.run([*python, "-c", GENERATE, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("all ran\n"), done.stderr


COPIED = """if True:
    import sys, torch
    from checkpoint import open_directory, read_weights
    from engine import Engine, Request, generate
    from sampling import SamplingParams
    checkpoint = open_directory(sys.argv[1])
    model = read_weights(checkpoint, checkpoint.empty_model(), dtype=torch.float32)
    request = Request([5, 6, 7], SamplingParams(temperature=0.0), 3)
    generate(Engine(model, 1, 16), [request])
    print(*request.new_tokens)"""


COPIED_KERNELS = COPIED.replace(
    "model = read_weights(checkpoint, checkpoint.empty_model(), dtype=torch.float32)",
    """
    from cpu.install import CpuInstaller
    model = checkpoint.empty_model()
    installer = CpuInstaller(model)
    read_weights(checkpoint, model, installer=installer)
    model.backend = installer.finish()""",
)


def test_the_files_that_the_readme_says_to_copy_run_a_checkpoint(tiny, tmp_path, python):
    """Those of the model alone and of the engine can be imported, and with all of them a directory generates."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.search(r"^\*\*To copy\*\*(.*?)\n\n", readme, re.S | re.M)[1]
    for count, part in enumerate(text.split(";")):
        for name in re.findall(r"`([\w/]+\.py)`", part):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
        if "`cpu/`" in part:
            shutil.copytree(ROOT / "cpu", tmp_path / "cpu")
        code = ("import model", "import model, engine", COPIED, COPIED_KERNELS)[count]
        command = [*python, "-c", code, str(tiny("llama-mha")[2])]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3
