"""A thousand texts that tokenizers get wrong in different ways; the same at every run.

Without control characters: SmolLM2's vocabulary lacks some of their bytes, and transformers' own
releases disagree about what becomes of them (dropped since 5.23, an unknown token in 5.17).
"""

# ruff: noqa: RUF001  (letters that look like others are the point)

from __future__ import annotations

import random

_WHOLE = [
    "",
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u200b",
    "\ufeff",
    "\x7f",
    "Hello, world!",
    " leading",
    "trailing ",
    "two  spaces",
    "tab\tbetween",
    "line\nbreak",
    "para\n\ngraph",
    "windows\r\nline",
    "It's John's; they'll say I'd've won't can't",
    "IT'S LOUD'LL",
    "it\u2019s curly",
    "naïve café über straße",
    "nai\u0308ve cafe\u0301 (decomposed)",
    "ﬁ ligature ﬀ",
    "Ελληνικά κείμενα",
    "Русский текст",
    "עברית עם ניקוד שָׁלוֹם",
    "العربية نص طويل",
    "हिन्दी पाठ",
    "ภาษาไทยไม่มีวรรค",
    "中文没有空格",
    "日本語、カタカナとひらがな。",
    "한국어 문장입니다",
    "Tiếng Việt có dấu",
    "👍",
    "👍🏽",
    "👩‍👩‍👧‍👦 family",
    "🇫🇷🇩🇪",
    "❤️ and ❤",
    "𝕳𝖊𝖑𝖑𝖔",
    "𓀀 hieroglyph",
    "\U0010ffff",
    "\ud7ff\ue000",
    "0",
    "1234567890",
    "3.14159",
    "1,000,000.00",
    "0x7fff_ffff",
    "1e-05",
    "²³¼½",
    "١٢٣",
    "１２３",
    "Ⅳ",
    "a1b2c3",
    "v2.0.1-rc3",
    "!!!",
    "?!?!",
    "...",
    "—–-",
    "“quoted” ‘text’ «ici»",
    "<html><body class='x'>&amp;</body></html>",
    '{"key": [1, 2, {"nested": null}]}',
    "def f(x):\n    return x ** 2  # square\n",
    "\tif (a && b || !c) { i++; }\n",
    "SELECT * FROM t WHERE a='b';",
    "for i in range(10):\n        print(i)\n\n\n",
    "C:\\path\\to\\file",
    "https://example.org/a?b=c&d=%20#e",
    "user@example.org",
    "$\\sum_{i=0}^{n} x_i$",
    "```python\nx = 1\n```",
    "| a | b |\n|---|---|\n",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|> spaced <|im_end|>",
    "x<|im_end|>y",
    "<|im_start",
    "<repo_name>a/b<file_sep>c.py",
    "<jupyter_code>print(1)<jupyter_output>1",
    "<empty_output><|endoftext|><|endoftext|>",
    "< |im_end| >",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ababababababababababab",
    "Donaudampfschifffahrtsgesellschaft",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "camelCaseAndPascalCase snake_case kebab-case SCREAMING_SNAKE",
]

_PIECES = [
    *(" ", "  ", "   ", "    ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0"),
    *("the", "The", " the", "ing", "un", "tokenization", "x", "I", "'s", "'ll"),
    *("0", "7", "12", "2024", "3.5", " 42", "1_000"),
    *("é", "ß", "ö", "Ω", "я", "中", "の", "한", "🙂", "👩‍💻", "\u0301"),
    *(".", ",", "!", "?", "(", ")", "[]", "{}", "->", "==", "//", "#", '"', "'", "`", "\\"),
    *("def ", "return", "class X:", "</p>", "&nbsp;", "http://", "<|im_end|>", "<|im_start|>"),
]


def thousand_strings() -> list[str]:
    rng = random.Random(20250207)
    texts = list(_WHOLE)
    texts += [" " * n + "end" for n in range(1, 20)]
    texts += ["start" + "\n" * n + "end" for n in range(1, 12)]
    texts += [f"{'  ' * n}{n} = {n * 37}" for n in range(12)]
    texts += ["".join(rng.choices(_PIECES, k=rng.randint(2, 24))) for _ in range(670)]
    texts += [_any_code_points(rng) for _ in range(300)]
    return list(dict.fromkeys(texts))[:1000]


def _any_code_points(rng: random.Random) -> str:
    tops = (rng.choice((0x80, 0x800, 0x3000, 0xD800, 0x1F700)) for _ in range(12))
    points = [rng.randrange(top) for top in tops]
    return "".join(chr(p) for p in points if p >= 0x20 and not 0xD800 <= p < 0xE000)
