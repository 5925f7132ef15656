"""Builds the C++ kernels of this folder at their first use, and loads them.

Read down: the instruction sets, of which the best one is chosen that the processor has; the build, which is cached.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import sampling  # noqa: F401 (declares two of the operations)
from cli import Stopwatch, UserError, locked, print_status
from kernels import find_kernels

SOURCES = Path(__file__).resolve().parent
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"]  # and those of an InstructionSet
FORMATS_WITH_KERNELS = set()  # names of formats.FORMATS, once the kernels are loaded

# ---------------------------------------------------------------- the instruction sets


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that the kernels are compiled for."""

    name: str  # as --kernels takes it
    needs: frozenset[str]  # flags of the processor, as Linux names them
    flags: tuple[str, ...]  # of the compiler

    def is_in(self, processor: frozenset[str]) -> bool:
        return self.needs <= processor


# The best one first. With -march=native, the compiler also uses VNNI, BF16 and AMX where the processor has them.
AVX512 = InstructionSet(
    "avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}), ("-march=native", "-DVECTOR_BITS=512")
)
AVX2 = InstructionSet("avx2", frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-march=x86-64-v3", "-DVECTOR_BITS=256"))
AVX2_VNNI = InstructionSet("avx2-vnni", AVX2.needs | {"avx_vnni"}, (*AVX2.flags, "-mavxvnni"))
INSTRUCTION_SETS = [AVX512, AVX2_VNNI, AVX2]
LOADED: list[InstructionSet] = []  # the one of the loaded kernels
INSTEAD = "PyTorch's own operations run instead, which decode several times more slowly"


@cache
def processor_flags() -> frozenset[str]:
    """What /proc/cpuinfo says that the processor can do. Empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), ":").partition(":")[2].split())


def choose_instruction_set(kernels: str) -> InstructionSet:
    """The best of INSTRUCTION_SETS that this processor has, or with "avx2" the best one in 256 bits. UserError with the
    reason if there is none."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise UserError(
            f"the CPU kernels are for x86 processors under Linux, not for {platform.machine()} under {sys.platform}"
        )
    choices = [one for one in INSTRUCTION_SETS if one.name.startswith(kernels) or kernels == "auto"]
    found = next((one for one in choices if one.is_in(processor_flags())), None)
    if found is None:
        missing = ", ".join(sorted(choices[-1].needs - processor_flags()))
        raise UserError(f"the CPU kernels need AVX2, and this processor lacks {missing}")
    return found


# ---------------------------------------------------------------- the build


def load_kernels(kernels: str = "auto") -> bool:
    """Build the kernels if no build is cached, and load them: those of choose_instruction_set(kernels). A process has
    only one set. If there is none, print the reason and return False."""
    if LOADED and not LOADED[0].name.startswith(kernels) and kernels != "auto":
        raise UserError(f"--kernels {kernels}: this process has loaded those for {LOADED[0].name} already")
    return bool(LOADED) or try_to_load(kernels)


@cache
def try_to_load(kernels: str) -> bool:
    try:
        chosen, compiler = choose_instruction_set(kernels), find_compiler()
    except UserError as error:
        print_status(f"{error}; {INSTEAD}")
        return False
    try:
        library = str(build_library(compiler, chosen))
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        print_status(f"the CPU kernels cannot be built with {compiler} (GCC 11 or clang 14 can): {why}; {INSTEAD}")
        return False
    functions = ctypes.CDLL(library)
    for function in (functions.register_kernels, functions.format_names):
        function.restype = ctypes.c_char_p
    FORMATS_WITH_KERNELS.update(functions.format_names().decode().split())
    if misfits := functions.register_kernels().decode():
        print_status(f"kernels in cpu/ do not fit their schemas in Python, so the references run: {misfits}")
    find_kernels("cpu")
    LOADED.append(chosen)
    allow_amx()
    if chosen is not AVX512 and kernels == "auto":
        missing = ", ".join(sorted(AVX512.needs - processor_flags()))
        print_status(f"the CPU kernels for {chosen.name} run: for the faster ones, this processor lacks {missing}")
    return True


def find_compiler() -> str:
    found = next(filter(shutil.which, [os.environ.get("CXX", ""), "g++", "clang++", "c++"]), None)
    if found is None:
        raise UserError("no C++ compiler for the CPU kernels: install g++ (Debian, Ubuntu), gcc-c++ (Fedora) or clang")
    return found


@cache
def allow_amx() -> bool:
    """Let the loaded kernels use the processor's matrix unit, AMX, if there is one, ONEDNN_MAX_CPU_ISA does not exclude
    it, and Linux grants it. Returns whether they use it.

    ONEDNN_MAX_CPU_ISA is set by users who do not want AMX, and by kernels.guard_amx where AMX kills the process.
    """
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # the instructions that oneDNN may use as well
    wanted = most in ("", "ALL", "DEFAULT") or "AMX" in most
    works = wanted and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return torch.ops.fastpath.allow_amx(works)


def run_compiler(command: list[str]) -> str:
    """Run the compiler and return what it printed. RuntimeError, with its first error, if it fails.

    Its messages are asked for in English. They may quote names and source code in any encoding.
    """
    english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, env=english, encoding="utf-8", errors="replace")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["the compiler failed"]
        raise RuntimeError(errors[0])
    return done.stdout


def build_library(compiler: str, instructions: InstructionSet) -> Path:
    """Compile the C++ files to a cached library, and return its path. If several processes need it at once, one builds
    it and the others wait. Raises RuntimeError with the compiler's first error."""
    flags = [*FLAGS, *instructions.flags]
    home = Path(torch.__file__).parent
    include = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    link = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    version = run_compiler([compiler, "--version"])
    processor = sorted(processor_flags())  # -march=native depends on it
    paths = sorted([*SOURCES.glob("[!.]*.h"), *SOURCES.glob("[!.]*.cpp")])  # without the hidden files of editors
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
    key = repr((sources, compiler, version, flags, torch.__version__, processor))
    name = f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastpath"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.lock").touch()
    except (OSError, RuntimeError):  # no home directory, or not writable
        folder = Path(tempfile.gettempdir()) / f"fastpath-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if (about := folder.lstat()).st_uid != os.getuid() or about.st_mode & 0o077:
            raise OSError(f"{folder} belongs to somebody else, or lets others write") from None
    path = folder / name
    if path.exists():
        return path
    with locked(folder / "kernels.lock", "builds the CPU kernels"):
        if not path.exists():
            with (
                Stopwatch("building the CPU kernels", "some 40 seconds, once"),
                tempfile.TemporaryDirectory(dir=folder, prefix=".build.") as temporary,
                ThreadPoolExecutor() as pool,
            ):
                files = [path for path in paths if path.suffix == ".cpp"]
                objects = [f"{temporary}/{file.stem}.o" for file in files]
                compile_one = [compiler, *flags, *include, "-c"]
                list(pool.map(run_compiler, ([*compile_one, str(f), "-o", o] for f, o in zip(files, objects))))
                run_compiler([compiler, *flags, "-shared", *objects, "-o", f"{temporary}/{name}", *link])
                Path(temporary, name).replace(path)
    return path
