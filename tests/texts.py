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


AWKWARD = [
    # spaces of every kind, and runs of them
    " a", "a ", "a  b", "a   b", "a" + " " * 7 + "b", " " * 31, " " * 32, " " * 33, "a" + " " * 100 + "b",
    "\ta\t\tb", "\n" * 30, "\n" * 31, "\n" * 32, "\t" * 40, "\r", "\r\n\r\n", "\n \n  \n", " \n", "\n ", "\v\f",
    "\u00a0a\u00a0", "a\u2003b\u2009c", "\u2028\u2029", "\u3000\u3000", "\u2581", "\u2581a \u2581\u2581b", "a\u2581b",
    # control characters, and others that are not seen
    "\x00", "a\x00b", "\x01\x02\x1b[0m\x7f", "\x80\x9f", "a\u200bb\u200c\u200d", "\ufeffBOM", "\u202etxt\u202c",
    "\u2066rtl\u2069", "\u00adsoft\u00adhyphen", "\ufffd", "\ufffe\uffff", "\ue000\uf8ff", "\U000f0000\U0010ffff",
    # combining marks, composed and decomposed
    "é", "e\u0301", "ñn\u0303", "a\u0300\u0301\u0302\u0303", "Z\u0351\u036b\u0343a\u036c\u0310l\u0334g\u0321o\u0338",
    "ﬁ ﬂ ﬀ", "Å\u212bA\u030a", "ẛ\u0323", "한\u1112\u1161\u11ab", "q\u0307\u0323 q\u0323\u0307", "\u0301", " \u0301",
    "İıI i\u0307", "ß ẞ SS", "ς σ Σ",
    # scripts
    "你好，世界！", "繁體中文", "今日はいい天気ですね。", "ｶﾀｶﾅ ﾊﾝｶｸ", "안녕하세요 세계", "שלום עולם",
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd", "مرحبا بالعالم", "\u0627\u0644\u0633\u0651\u064e\u0644\u064e\u0627",
    "नमस्ते दुनिया", "ক্ষমা", "สวัสดีชาวโลก", "မင်္ဂလာပါ", "ជំរាបសួរ", "Γειά σου Κόσμε", "Привет, мир", "გამარჯობა",
    "Բարեւ", "ሰላም", "ᠮᠣᠩᠭᠣᠯ", "𐌲𐌿𐍄𐌹𐍃𐌺", "𒀀𒁀", "𓀀𓁐", "ⲁⲃⲅ", "ꙮ", "𠀀𠮷𪚥", "㐀㐁", "豈更車", "⼀⼁", "ㄅㄆㄇ",
    "ｆｕｌｌ　ｗｉｄｔｈ", "𝓱𝓮𝓵𝓵𝓸 𝕨𝕠𝕣𝕝𝕕", "ᵃᵇᶜ ₁₂₃ ⅷ ⑳", "٠١٢٣ ०१२३ ๐๑๒", "abcабвαβγ",
    # emoji
    "😀😀😀", "👍🏽", "🏳️\u200d🌈", "🇩🇪🇫🇷", "🇩", "1️⃣#️⃣", "❤️ ❤", "☺︎", "🧑🏿\u200d🚀", "a😀b", "🫠🫨🪿",
    # code, markup and numbers
    *CODE, "if (a<b&&c>d) { return !e; }", "λ x → x ∘ f", "#!/bin/sh\nset -eu\n", "<a href='x'>&amp;&#x41;</a>",
    "{{ x|safe }} {% if %}", "\\n\\t\\x00\\u0041", "$$\\int_0^\\infty e^{-x^2}\\,dx$$", "| a | b |\n|---|---|\n| 1 |\n",
    "```python\nprint(1)\n```", "a=1;b=2;;c", "0b1010 0o17 0xDEADBEEF 1_000_000", "1234567890" * 4, "1e-10+2E+5",
    "3.141592653589793238462643383279", "v1.2.3-rc.4+build.5", "C:\\Users\\x\\y.txt", "/usr/lib/../bin//x",
    "user@example.org", "....", "!!!???", "-----", "=====", "______", "***bold***", "(((())))", "''''", '""""', "``",
    "\\", "\\\\", "'s 't 're 've 'm 'll 'd", "I'M DON'T", "a" * 75, "the" * 40, "ab" * 12, "xqzjkvwpfg",
    "antidisestablishmentarianism", "Donaudampfschifffahrtsgesellschaft", "ALLCAPS lower MiXeD", "kebab-case camelCase",
]  # fmt: skip
WITH_SPECIAL = ["{}", "a{}b", " {} ", "{}{}", "{}\n", "\n{}", "  {}  {}", "é{}\u0301", "{}😀{}", "<{}>", "\x00{}\x00"]


def awkward(special, n=200):
    """n different strings that are easily tokenized wrongly; in some of them special tokens are written out."""
    texts = AWKWARD + [text.replace("{}", token) for token in special for text in WITH_SPECIAL]
    texts += [token[:-1] for token in special] + [token.upper() for token in special] + strings(special, n)
    return list(dict.fromkeys(texts))[:n]
