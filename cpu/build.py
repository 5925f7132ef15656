"""Builds the C++ kernels of this folder at their first use, and loads them.

Read down: the instruction sets, of which the best one that the processor has is chosen; the build,
which is cached.
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
from edits import set_aside
from kernels import KERNELS, find_kernels

SOURCES = Path(__file__).resolve().parent
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"]  # and the flags of an InstructionSet
FORMATS_WITH_KERNELS = set()  # names of formats.FORMATS: try_to_load asks the kernels (`Formats` of formats.h)

# ---------------------------------------------------------------- the instruction sets


@dataclass(frozen=True)
class InstructionSet:
    """A set of instructions that the kernels can be compiled for."""

    name: str  # --kernels selects the sets whose names begin with its value
    needs: frozenset[str]  # the flags in /proc/cpuinfo of a processor that has these instructions
    flags: tuple[str, ...]  # the compiler's options


# The best one first. With -march=native, the compiler also uses VNNI, BF16 and AMX where the
# processor has them.
AVX512 = InstructionSet(
    "avx512",
    frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ("-march=native", "-DVECTOR_BITS=512"),
)
AVX2 = InstructionSet(
    "avx2",
    frozenset({"avx2", "fma", "f16c", "bmi2"}),
    ("-march=x86-64-v3", "-DVECTOR_BITS=256"),
)
AVX2_VNNI = InstructionSet("avx2-vnni", AVX2.needs | {"avx_vnni"}, (*AVX2.flags, "-mavxvnni"))
INSTRUCTION_SETS = [AVX512, AVX2_VNNI, AVX2]
LOADED: list[InstructionSet] = []  # the instruction set of the loaded kernels, if any are loaded
INSTEAD = "PyTorch's own operations run instead, which decode several times more slowly"


@cache
def processor_flags() -> frozenset[str]:
    """The features of the processor, as /proc/cpuinfo names them. Empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def choose_instruction_set(kernels: str) -> InstructionSet:
    """The best of INSTRUCTION_SETS that this processor has, or with "avx2" the best one in 256 bits.
    Raises UserError with the reason if it has none of them."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise UserError(
            f"the CPU kernels are for x86 processors under Linux, not for {platform.machine()} under {sys.platform}"
        )
    choices = [one for one in INSTRUCTION_SETS if one.name.startswith(kernels) or kernels == "auto"]
    found = next((one for one in choices if one.needs <= processor_flags()), None)
    if found is None:
        missing = ", ".join(sorted(choices[-1].needs - processor_flags()))
        raise UserError(f"the CPU kernels need AVX2, and this processor lacks {missing}")
    return found


# ---------------------------------------------------------------- the build


def load_kernels(kernels: str = "auto") -> bool:
    """Build the kernels for choose_instruction_set(kernels) if no build is cached, and load them. A
    process has only one set of kernels. If they cannot run, print the reason and return False."""
    if LOADED and not LOADED[0].name.startswith(kernels) and kernels != "auto":
        raise UserError(f"--kernels {kernels}: this process has loaded those for {LOADED[0].name} already")
    is_loaded = bool(LOADED) or try_to_load(kernels)
    if is_loaded:
        set_aside(KERNELS["cpu"], "cpu")
    return is_loaded


@cache
def try_to_load(kernels: str) -> bool:
    try:
        chosen = choose_instruction_set(kernels)
        compiler = find_compiler()
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
    """The C++ compiler: $CXX, or the first one on the PATH. Raises UserError if there is none."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    found = next(filter(shutil.which, names), None)
    if found is None:
        raise UserError("no C++ compiler for the CPU kernels: install g++ (Debian, Ubuntu), gcc-c++ (Fedora) or clang")
    return found


@cache
def allow_amx() -> bool:
    """Let the loaded kernels use the processor's matrix unit, AMX, if it has one, if
    ONEDNN_MAX_CPU_ISA does not exclude it, and if Linux grants it. Returns whether they use it.

    ONEDNN_MAX_CPU_ISA is set by users who do not want AMX, and by backend.guard_amx where AMX kills
    the process.
    """
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # limits oneDNN in the same way
    wanted = most in ("", "ALL", "DEFAULT") or "AMX" in most
    works = wanted and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return torch.ops.fastpath.allow_amx(works)


def run_compiler(command: list[str]) -> str:
    """Run the compiler and return what it printed. Raises RuntimeError with its first error."""
    # Its messages are asked for in English. They may quote source code in any encoding.
    english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, env=english, encoding="utf-8", errors="replace")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError(errors[0] if errors else "the compiler failed")
    return done.stdout


def cache_folder() -> Path:
    """The folder of the builds: ~/.cache/fastpath, or one of this user's in the temporary directory
    where no home directory is writable."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastpath"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.lock").touch()
    except (OSError, RuntimeError):
        folder = Path(tempfile.gettempdir()) / f"fastpath-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise OSError(f"{folder} belongs to somebody else, or lets others write") from None
    return folder


def build_library(compiler: str, instructions: InstructionSet) -> Path:
    """Compile the C++ files to a cached library, and return its path. If several processes need it
    at once, one builds it and the others wait. Raises RuntimeError with the compiler's first error."""
    flags = [*FLAGS, *instructions.flags]
    home = Path(torch.__file__).parent
    include = home / "include"
    compile_one = [compiler, *flags, f"-I{include}", f"-I{include}/torch/csrc/api/include", "-c"]
    link = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]

    version = run_compiler([compiler, "--version"])
    processor = sorted(processor_flags())  # -march=native depends on it
    paths = sorted([*SOURCES.glob("[!.]*.h"), *SOURCES.glob("[!.]*.cpp")])  # not editors' hidden files
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]
    key = repr((sources, compiler, version, flags, torch.__version__, processor))
    name = f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"

    folder = cache_folder()
    library = folder / name
    if library.exists():
        return library
    with locked(folder / "kernels.lock", "builds the CPU kernels"):
        if library.exists():  # another process has built it meanwhile
            return library
        with (
            Stopwatch("building the CPU kernels", "some 40 seconds, once"),
            tempfile.TemporaryDirectory(dir=folder, prefix=".build.") as temporary,
            ThreadPoolExecutor() as pool,
        ):
            files = [path for path in paths if path.suffix == ".cpp"]
            objects = [f"{temporary}/{file.stem}.o" for file in files]
            commands = [[*compile_one, str(f), "-o", o] for f, o in zip(files, objects)]
            list(pool.map(run_compiler, commands))  # a list, so that errors are raised
            built = Path(temporary, name)
            run_compiler([compiler, *flags, "-shared", *objects, "-o", str(built), *link])
            built.replace(library)
    return library
