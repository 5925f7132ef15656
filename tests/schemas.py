"""Random JSON schemas for the tests of grammars and of the server."""

import random

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
        return {"type": "array", "items": random_schema(chance, depth - 1), "minItems": low, "maxItems": low + 2}
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
