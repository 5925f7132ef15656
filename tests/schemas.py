"""Random JSON schemas, and those of the JSON Schema test suite, for the tests of grammars and of the server."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from cli import UserError
from grammar import GrammarTokenizer, schema_source

# The source distribution of jsonschema has the test suite (json-schema-org/JSON-Schema-Test-Suite).
SUITE_PACKAGE = "jsonschema==4.26.0"
SUITE_SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
SUITE_FOLDER = "jsonschema-4.26.0/json/tests/draft2020-12/"
NAMES = ["name", "größe", "a b", 'with "quotes"', "n1", "Ünïcode", "x-y_z", "count"]
PATTERNS = ["^[A-Z]{2}[0-9]{3}$", "^(ab|c+d){1,3}$", "^x?$"]


def random_schema(chance: random.Random, depth: int = 3) -> dict:
    """A random JSON schema that some JSON value fits."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "array", "anyOf"] * 2
    kind = chance.choice(kinds)
    if kind == "object":
        names = chance.sample(NAMES, chance.randrange(1, 5))
        properties = {name: random_schema(chance, depth - 1) for name in names}
        required = chance.sample(names, chance.randrange(len(names) + 1))
        schema = {"type": "object", "properties": properties, "required": required}
        return schema | {"additionalProperties": False}
    if kind == "array":
        low = chance.randrange(3)
        items = random_schema(chance, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, depth - 1) for _ in range(2)]}

    low = chance.randrange(-50, 50)
    schemas = {
        "string": {"type": "string", "maxLength": chance.choice([1, 5, 20])},
        "integer": {"type": "integer", "minimum": low, "maximum": low + chance.choice([0, 3, 1000])},
        "number": {"type": "number", "minimum": low, "maximum": low + 7},
        "enum": {"enum": chance.sample(["a", "ä", 1, 2.5, None, True, {"k": []}, 'q"'], 3)},
        "const": {"const": chance.choice([1, "c", None])},
        "pattern": {"type": "string", "pattern": chance.choice(PATTERNS)},
    }
    return schemas.get(kind, {"type": kind})


# ---------------------------------------------------------------- the test suite


def suite_schemas() -> list[dict | bool]:
    """The schemas of draft 2020-12, without the optional ones."""
    schemas = []
    with tarfile.open(fetch_suite()) as archive:
        for name in sorted(archive.getnames()):
            inner = name.removeprefix(SUITE_FOLDER)
            if name.startswith(SUITE_FOLDER) and "/" not in inner and inner.endswith(".json"):
                schemas += [case["schema"] for case in json.load(archive.extractfile(name))]
    return schemas


def fetch_suite() -> Path:
    """The archive with the test suite. It is downloaded if it does not exist yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastpath"
    path = cache / f"{SUITE_PACKAGE.replace('==', '-')}.tar.gz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download.") as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-binary", "jsonschema", "--dest", folder, SUITE_PACKAGE]
            if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
                pytest.skip(f"pip could not download the source of {SUITE_PACKAGE}")
            next(Path(folder).glob("*.tar.gz")).rename(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SUITE_SHA256, f"{path} is another file"
    return path


def is_supported(compiler: GrammarTokenizer, schema: dict | bool) -> bool:
    """Whether the library takes a schema."""
    try:
        compiler.compile(schema_source(schema))
    except UserError:
        return False
    return True
