"""The exercises of docs/exercises.md can be solved as the page says, and their tests say what is missing.

The .diff files of this folder are the solutions. In a fork that does the exercises, delete this file.
"""

import re
import shutil
import subprocess

import checks
import pytest
from conftest import ROOT
from test_house import ROOMS, TOP_LEVEL

DIFFS = {path.stem: path for path in sorted((ROOT / "tests" / "exercises").glob("*.diff"))}
TESTS = {name.removeprefix("test_"): test for name, test in vars(checks).items() if name.startswith("test_")}


def apply(diff: str, directory):
    """Replace the old lines of each hunk, which the file must have once, by the new ones. A new file is one hunk."""
    for file in re.split(r"^--- .*\n\+\+\+ b/", diff, flags=re.M)[1:]:
        name, _, rest = file.partition("\n")
        path = directory / name
        text = path.read_text() if path.exists() else ""
        for hunk in re.split(r"^@@.*\n", rest, flags=re.M):
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
            assert not old or text.count(old) == 1, f"{name} does not have these lines once:\n{old}"
            text = text.replace(old, new) if old else text + new
        path.write_text(text)


def test_the_page_has_a_test_and_a_solution_of_each_exercise():
    page = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")
    assert re.findall(r"^    python -m pytest -n 0 tests/exercises/checks\.py -k (\w+)$", page, re.M) == [*TESTS]
    assert sorted(TESTS) == [*DIFFS]


@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_an_exercise_that_is_not_done_says_so(test):
    with pytest.raises(pytest.fail.Exception, match="^not done yet: there is no "):
        test(*[None] * test.__code__.co_argcount)


@pytest.mark.slow
def test_the_solutions_are_right(tmp_path, python):
    for name in (*ROOMS, "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*TOP_LEVEL, ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    for path in DIFFS.values():
        apply(path.read_text(encoding="utf-8"), tmp_path)
    command = [*python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/exercises/checks.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"{len(TESTS)} passed" in done.stdout, done.stdout
