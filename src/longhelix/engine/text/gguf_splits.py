"""How byte-level tokenizers split texts into words. The pre-tokenizer names of GGUF files are from llama.cpp's list."""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class GGUFSplit:
    """One way to split texts into words.

    Attributes:
        patterns: Regular expressions, applied in order. Each expression splits the parts from the previous one.
        takes_whole_words: Whether a word that is a token becomes this token, even if merges would not produce it.
        begins_with_bos: Whether prompts begin with a BOS token, unless the file says otherwise.
        composes: Whether letters and combining accents are first composed into one character (NFC).
    """

    patterns: tuple[str, ...]
    takes_whole_words: bool = False
    begins_with_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the equivalent pre-tokenizer of the `tokenizers` library."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = f"(?i:{_ENDINGS})"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_BLANKS}"
_DIGIT, _NUMBER, _UP_TO_THREE = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
_THREE_DIGITS = "[0-9][0-9][0-9]"
# Upper and lower case letters. Letters without case count as both.
_UPPER, _LOWER, _BEFORE = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]", r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SIGNS}[\r\n/]*|{_BLANKS}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ANY_CASE}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ANY_CASE}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_BLANKS}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)
# llama.cpp's ranges, which have neither all characters of the script nor only those.
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef\U0002f800-\U0002fa1f"
_KIMI = rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_ANY_CASE}?|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_BLANKS}"
_CHINESE_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_CHINESE_AND_KOREAN = r"[一-龥[ࠀ-一&&\S]가-퟿]+"
_LETTERS_OF_DEEPSEEK = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

_SPLITS_BY_NAMES = {
    ("default",): GGUFSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, _NUMBER, _THREE_DIGITS)),
    ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais",
     "trillion", "granite-docling"): GGUFSplit((_GPT2,)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"):
        GGUFSplit((_LLAMA3,), takes_whole_words=True, begins_with_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): GGUFSplit((_LLAMA3,)),
    ("glm4", "glm5"): GGUFSplit((_LLAMA3,), takes_whole_words=True),
    ("qwen2", "deepseek-r1-qwen"): GGUFSplit((_QWEN2,), composes=True),
    ("stablelm2", "kormo", "f2llmv2", "megrez", "hunyuan", "solar-open", "grok-2", "bailingmoe", "bailingmoe2",
     "llada-moe"): GGUFSplit((_QWEN2,)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"):
        GGUFSplit((_DIGIT, _GPT2)),
    ("falcon",): GGUFSplit((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
    ("tekken",): GGUFSplit((_TEKKEN,), takes_whole_words=True, begins_with_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): GGUFSplit((_GPT4O,)),
    ("deepseek-llm",): GGUFSplit(
        (
            r"[\r\n]",
            rf"\s?[{_LETTERS_OF_DEEPSEEK}]+",
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"(?<!\s)\s+\z",
            _CHINESE_AND_KOREAN,
            _NUMBER,
        )
    ),
    ("deepseek-coder",): GGUFSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_AND_KOREAN, _DIGIT)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): GGUFSplit(
        (_UP_TO_THREE, _CHINESE_AND_KANA, _DEEPSEEK3)
    ),
    ("kimi-k2",): GGUFSplit((_KIMI,)),
    ("poro-chat", "bloom", "gpt3-finnish"): GGUFSplit((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    ("viking",): GGUFSplit((r" ?[^(\s|.,!?…。，、।۔،)]+", _DIGIT)),
    ("chameleon",): GGUFSplit(
        ("<sentinel:[0-9]+>", "(?:IMGIMG)[A-I]{1,4}Z", r"[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        begins_with_bos=True,
    ),
    ("seed-coder",): GGUFSplit(
        (rf"{_ANY_CASE}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
    ),
    ("ufakzeka",): GGUFSplit((rf"{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_BLANKS}",)),
    ("qwen35",): GGUFSplit(
        (
            rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
        ),
        composes=True,
    ),
    ("exaone-moe",): GGUFSplit(
        (
            rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"|{_SIGNS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    ("minicpm5",): GGUFSplit(
        (_UP_TO_THREE, rf"{_ANY_CASE}|{_WORD}|\p{{N}}+|{_SIGNS}[\r\n]*|{_BLANKS}"), takes_whole_words=True
    ),
    ("youtu",): GGUFSplit(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_ANY_CASE}?|\p{{N}}|{_SIGNS}[\r\n/]*|{_BLANKS}",
        ),
        takes_whole_words=True,
    ),
}  # fmt: skip

SPLITS = {name: split for names, split in _SPLITS_BY_NAMES.items() for name in names}
