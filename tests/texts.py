"""Varied texts for tokenizers, and a small chat template."""

import json
import random
from itertools import chain
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)

AWKWARD = json.loads((Path(__file__).parent / "data" / "texts.json").read_text(encoding="utf-8"))
WORDS = AWKWARD.pop("words")  # the other lists have names, too
SPACES = ["", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", " \n ", "\n    ", "\t\t", "        ", "\u3000"]
CODE = AWKWARD["code, markup and numbers"][:5]


def strings(special=(), n=200):
    """Varied strings: words of many scripts with runs of whitespace, code, and special tokens."""
    chance = random.Random(0)
    out = ["", " ", "a", "\n", *SPACES, *CODE, *WORDS]
    while len(out) < n + 60:
        parts = [chance.choice(WORDS) + chance.choice(SPACES) for _ in range(chance.randint(1, 9))]
        if special and chance.random() < 0.4:
            parts.insert(chance.randrange(len(parts)), chance.choice(special))
        out.append(chance.choice(SPACES) + "".join(parts))
    return out


WITH_SPECIAL = ["{}", "a{}b", " {} ", "{}{}", "{}\n", "\n{}", "  {}  {}", "é{}\u0301", "{}😀{}", "<{}>", "\x00{}\x00"]


def awkward(special, n=200):
    """n different strings that are easily tokenized wrongly; in some of them special tokens are written out."""
    texts = list(chain(*AWKWARD.values())) + [text.replace("{}", token) for token in special for text in WITH_SPECIAL]
    texts += [token[:-1] for token in special] + [token.upper() for token in special] + strings(special, n)
    return list(dict.fromkeys(texts))[:n]
