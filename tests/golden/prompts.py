"""The eight prompts of the golden files, and texts that tokenizers get wrong."""

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

PROMPTS = (
    CHAT.format("What is the capital of France, and what is it known for?"),
    CHAT.format("Write a Python function that returns the n-th Fibonacci number."),
    CHAT.format("Explain in three sentences why the sky is blue."),
    CHAT.format("Écris une courte lettre à mon voisin pour le remercier."),
    "The history of the printing press begins in",
    "def quicksort(values):\n    if len(values) <= 1:\n        return values\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "Once upon a time, in a village between two rivers, there lived a",
)
NEW_TOKENS = 64

# ruff: noqa: RUF001
# digits, spaces, line ends, contractions, scripts, emoji
TEXTS = (
    "",
    " ",
    "   leading and trailing   ",
    "two  spaces   three    four",
    "tabs\tand\t\ttabs\nnew\n\nlines\r\nwindows\r\n",
    "\n \n  \n   \n",
    "1234567890 3.14159 1,000,000 0x7fff 1e-6 ²³ ½ ٣٤ 五",
    "It's they'll I'd we've YOU'RE can't 'tis",
    "snake_case camelCase kebab-case SCREAMING_CASE a.b.c()[0]{1}",
    'for (int i = 0; i < n; ++i) {\n\tprintf("%d\\n", a[i]);\n}\n',
    "https://example.com/path?x=1&y=2#frag user@example.org",
    "naïve café Ångström straße ﬁne Œuvre e\u0301 vs \u00e9",
    "Быстрая коричневая лиса. Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "你好,世界。こんにちは世界。안녕하세요 สวัสดีชาวโลก नमस्ते",
    "🙂🚀👩‍👩‍👧‍👦🇫🇷 \U0001f3f3\ufe0f\u200d\U0001f308 ☕️",
    "zero\u200bwidth non\u00a0breaking \u2003em\u2028line \ufeffbom \x00 \x07 \x7f",
    "<|im_start|>system\nHi<|im_end|>\n<|endoftext|><|im_start",
    "!!! ??? ... --- ___ === *** ((( ))) <<< >>> \"quoted\" 'single'",
    "∑_{i=1}^{n} xᵢ² ≤ ∫₀^∞ e^{-x²} dx ≈ √π/2",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)


def sentencepiece_metadata() -> dict:
    """A small SentencePiece tokenizer: bytes, characters, pieces ranked by scores."""
    pieces = ["▁t", "he", "▁the", "in", "er", "▁a", "an", "▁an", "▁▁", "▁▁▁▁", "ll"]
    pieces += ["hell", "lo", "hello", "▁hello", "aa", "aaaa"]
    characters = "▁abcdefghijklmnopqrstuvwxyzT.,!'0123456789\n"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(tokens)
    for rank, piece in enumerate([*pieces, *characters]):
        tokens.append(piece)
        types.append(1)
        scores.append(-float(rank))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
