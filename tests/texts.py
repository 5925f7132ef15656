"""Varied texts for tokenizers, and a small chat template."""

import random

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)

WORDS = [
    "the", "quick", "brown", "Fox", "jumps", "over", "lazy", "dogs'", "don't", "I'LL", "we've", "it's",
    "naïve", "façade", "Straße", "Ελληνικά", "русский", "язык", "עברית", "العربية", "हिन्दी", "ไทย",
    "日本語のテキスト", "中文字符", "한국어", "éclair", "ﬁne", "½", "²", "٣٤", "Ⅷ", "😀",
    '👩\u200d👩\u200d👧\u200d👦', "🇩🇪",
    "☕️", '\u200b', '\ufeff', '\x00', '\x7f', "3.14159", "1234567890", "0x1F", "1e-9", "2024-01-31",
    "$5,000.00", "100%", "#1", "C++", "a_b", "camelCase", "SCREAMING_CASE", "foo.bar()", '{"k":', "[1,",
    "2]}", "<div", 'class="x">', "https://example.org/?q=1&r=%20", '\\n', "/*", "c", "*/", "//", "#", "'''",
    '"""', "->", "=>", "!=", "<=", "&&", "||", "::", "...", "?!", "--", "—", "“quotes”", "•", "™",
]  # fmt: skip
SPACES = ["", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", " \n ", "\n    ", "\t\t", "        ", "\u3000"]
CODE = [
    "def f(x):\n    return x + 1\n\n\nprint(f(10))\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i] * b[i];\n}\n",
    "    indented\n        deeper\n\n   odd",
    "SELECT * FROM t WHERE id = 42;",
    "\\alpha + \\beta = \\frac{1}{2}",
]


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
