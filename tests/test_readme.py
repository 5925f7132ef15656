"""What can be checked of the README: its commands, flags, files and line counts."""

import re

import pytest
from conftest import ROOT

from generate import parse_arguments
from hf_directory import FAMILIES

README = (ROOT / "README.md").read_text()


def test_files_exist_and_are_as_long_as_said():
    rows = re.findall(r"^\| `([\w./]+)` \| .* \| (\d+) \|$", README, re.M)
    assert len(rows) >= 10
    for name, said in rows:
        lines = len((ROOT / name).read_text().splitlines())
        assert abs(lines - int(said)) <= max(10, 0.1 * lines), f"{name} has {lines} lines, the README says {said}"
    listed = {name for name, _ in rows}
    assert {path.name for path in ROOT.glob("*.py")} <= listed


@pytest.mark.parametrize("command", re.findall(r"python generate\.py ([^\n#`|]*)", README))
def test_generate_commands_parse(command, capsys):
    import shlex

    arguments = shlex.split(command)
    if "--help" in arguments:
        with pytest.raises(SystemExit):
            parse_arguments(arguments)
        shown = capsys.readouterr().out
        offered = set(re.findall(r"^  (--\w+)", shown, re.M))
        assert offered == set(re.findall(r"--\w+", shown)) - {"--help"}, "--help names no option that there is not"
        torchrun = {"--standalone", "--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint"}
        named = set(re.findall(r"(?<![\w-])--\w+", README)) - {"--help"} - torchrun
        programs = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/com*.py")]
        programs = [path.read_text() for path in programs if path.name not in ("generate.py", "tp.py")]
        others = {flag for text in programs for flag in re.findall(r'(?:add|add_argument)\("(--\w+)"', text)} - offered
        assert named - others == offered, "README.md and --help should name the same options"
    else:
        parse_arguments(arguments)


def test_families_and_commands_are_the_programs():
    for family in FAMILIES:
        assert re.search(rf"^\|.*\b{family} \|", README, re.M), family
    assert "pip install -r requirements.txt && python generate.py" in README
    test_command = "pip install -r requirements-dev.txt && python -m pytest"
    assert test_command in README and (ROOT / ".ci" / "run").read_text().rstrip().endswith(test_command)


def test_requirements_pin_what_they_name():
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-bench.txt", "requirements-eval.txt"):
        lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
        assert all("==" in line or line.startswith("-r ") for line in lines if line)
