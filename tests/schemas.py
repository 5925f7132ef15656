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
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis_jsonschema import from_schema

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


# ---------------------------------------------------------------- keywords in any combination


def schema_of_schemas(depth: int) -> dict:
    """The JSON schema of JSON schemas with any keywords beside each other.

    Some of the keywords may contradict each other.
    """
    small = {"type": "integer", "minimum": 0, "maximum": 4}
    value = {"type": ["null", "boolean", "integer", "string"]}
    bound = {"enum": [-20, -1.5, 0, 0.25, 3, 7]}
    type_ = {"enum": ["null", "boolean", "integer", "number", "string", "array", "object"]}
    types = {"type": "array", "items": type_, "minItems": 1, "uniqueItems": True}
    properties = {
        "type": {"anyOf": [type_, types]},
        "enum": {"type": "array", "items": value, "minItems": 1, "maxItems": 4, "uniqueItems": True},
        "const": value,
        "pattern": {"enum": PATTERNS},
        "format": {"enum": ["date", "time", "uuid", "email", "ipv4", "uri"]},
    }
    properties |= dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bound)
    sizes = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    properties |= dict.fromkeys(sizes, small)
    if depth:
        inner = schema_of_schemas(depth - 1)
        some = {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}
        name = {"enum": NAMES}
        members = {"type": "object", "propertyNames": name, "additionalProperties": inner}
        names = {"type": "array", "items": name, "maxItems": 2, "uniqueItems": True}
        additional = {"anyOf": [inner, {"type": "boolean"}]}
        properties |= {"properties": members, "additionalProperties": additional}
        properties |= {"items": inner, "prefixItems": some, "anyOf": some, "allOf": some}
        properties["required"] = names
    return {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": 1}


def strange_schemas(n: int) -> list[dict]:
    """n different schemas of `schema_of_schemas`, the same ones each time."""
    found: dict[str, dict] = {}

    @seed(5)
    @settings(
        max_examples=2 * n, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(from_schema(schema_of_schemas(1)))
    def collect(schema):
        found[json.dumps(schema, sort_keys=True)] = schema

    collect()
    return list(found.values())[:n]


# ---------------------------------------------------------------- the test suite


class SuiteCase(NamedTuple):
    """A schema of the test suite, with values that fit it and values that do not."""

    name: str
    schema: dict | bool
    fitting: list
    others: list


def suite_cases() -> list[SuiteCase]:
    """The cases of draft 2020-12, without the optional ones."""
    cases = []
    with tarfile.open(fetch_suite()) as archive:
        files = [name for name in archive.getnames() if name.startswith(SUITE_FOLDER)]
        for name in sorted(files):
            inner = name.removeprefix(SUITE_FOLDER)
            if "/" in inner or not inner.endswith(".json"):
                continue
            for case in json.load(archive.extractfile(name)):
                about = f"{Path(name).stem}: {case['description']}"
                fitting = [test["data"] for test in case["tests"] if test["valid"]]
                others = [test["data"] for test in case["tests"] if not test["valid"]]
                cases.append(SuiteCase(about, case["schema"], fitting, others))
    return cases


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
