import sys

sys.path[:0] = [".", "tests/drafts", "tests/mixers", "tests/server", "tests/sources", "tests"]
import random, json, jsonschema
import pytest
from test_gemma_calls import *


def test_dbg(served):
    chance = random.Random(12)
    model = served("gemma-4")
    for _ in range(30):
        keys = chance.sample(["f", "ab", "b-c", "x.y", "from", "a b", "a:b"], 3)
        properties = {key: random_schema(chance, 2) for key in keys}
        schema = an_object(*keys[: chance.randrange(4)], **properties)
        src = source_of(model, "gemma-4", [Tool("f", schema, strict=True)])
        text = random_text(model, src, chance)
        events = events_of(SYNTAX, [text])
        for one in [json.loads(event[2]) for event in events if event[0] is CallArguments]:
            for e in jsonschema.Draft202012Validator(schema).iter_errors(one):
                print("ERR", e.message[:300])
                print(json.dumps(e.schema)[:1500])
                print(src[:3000])
