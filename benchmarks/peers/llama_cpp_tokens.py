"""Tokens of longhelix's tokenizers for GGUF files against llama.cpp's: the same file, the same texts, the same tokens.

Vocabularies are learned here, from texts that are not split into words. Merges therefore cross words, and any place
where the two split a text differently changes tokens.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from longhelix.compute.models.gguf_file import GgufModel
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.text.gguf_splits import SPLITS
from longhelix.engine.text.tokenizer import Tokenizer

# The first article of the Universal Declaration of Human Rights, or the first words of it.
LANGUAGES = (
    "All human beings are born free and equal in dignity and rights. They aren't things; they've got reason.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. L'homme n'est pas né d'hier.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Straße, Größe, ÄRGER, ẞ.",
    "Todos los seres humanos nacen libres e iguales en dignidad y derechos. ¿Qué? ¡Año Ñandú!",
    "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Perché l'uomo è così.",
    "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Não, coração.",
    "Wszyscy ludzie rodzą się wolni i równi w swej godności i swych prawach. Zażółć gęślą jaźń.",
    "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Příliš žluťoučký kůň.",
    "Minden emberi lény szabadon születik és egyenlő méltósága és joga van. Árvíztűrő tükörfúrógép.",
    "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan. Äiti söi yöllä.",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Türkiye'nin İstanbul'u ve ısı.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi. Nguyễn Văn Ấ.",
    "Все люди рождаются свободными и равными в своём достоинстве и правах. Ёлка, объём.",
    "Всі люди народжуються вільними і рівними у своїй гідності та правах. Їжак і ґанок.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. ΆΈΉ ς.",
    "Բոլոր մարդիկ ծնվում են ազատ ու հավասար իրենց արժանապատվությամբ ու իրավունքներով։",
    "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. שָׁלוֹם",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. مُحَمَّد ١٢٣٤٥",
    "تمام ابنای بشر آزاد به دنیا می‌آیند و در حیثیت و حقوق برابرند. ۱۲۳۴",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। १२३",
    "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে। ১২৩৪",
    "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; அவர்கள் மதிப்பிலும் உரிமைகளிலும் சமமானவர்கள்.",
    "మానవులెల్లరునూ జన్మతః స్వతంత్రులు, సమాన ప్రతిపత్తి, హక్కులు కలవారు.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ๑๒๓๔",
    "မနုဿအားလုံးသည် တူညီလွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့်",
    "ሰብዓዊ ፍጡራን ሁሉ ሲወለዱ ነጻና በክብርና በመብትም እኩልነት ያላቸው ናቸው።",
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "人人生而自由﹐在尊嚴和權利上一律平等。『繁體』「字」……",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。ｶﾀｶﾅ ー々〇",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. ㄱㄴㄷ",
)
CODE = (
    "def f(x: int) -> str:\n    return f\"{x!r}\"  # it's 0x1F\n\n\nif __name__ == '__main__':\n\tprint(f(12345))\n",
    "for (int i = 0; i < n; ++i) {\n\t\ta[i] += b->c * 1e-3f; /* don't */\r\n}\r\n",
    'SELECT "a"."b", COUNT(*) FROM t WHERE c <> \'x\' AND d >= 3.14159;',
    '{"key": [1, 22, 333, 4444, 55555], "nested": {"a_b": null}}\n',
    '<div class="a-b">&nbsp;<!-- HTMLPage --></div>\n  <p>camelCase XMLHttpRequest iPhone</p>',
    "https://example.org/a/b?c=d&e=%20#f user@example.com C:\\Users\\x `code` **bold** ~~old~~ $x^2_i$",
    'let x = match y { Some(z) => z?, None => return Err("…".into()), };',
    "#include <vector>\n#define A(x) ((x)+1)\nstd::vector<int> v{1,2,3};",
)
NAMED = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>")  # the last one is no control token
# Pieces that texts are joined of: what the patterns of pre-tokenizers look at.
PIECES = (
    *(" ", "  ", "   ", "    ", "        ", "\n", "\n\n", "\r\n", "\t", "\t\t", "\r", " \n", "\n "),
    *("\u3000", "\u00a0", "\u2003", "\u200b", "\u200d", "\ufeff", "\u00ad"),
    *("'s", "'T", "'re", "'VE", "'m", "'Ll", "'d", "'", "’s", "''", "'x"),
    *("0", "7", "42", "123", "1234", "12345", "1234567", "3.14", "1,000", "٣", "४२", "½", "Ⅷ", "²", "１２"),
    *("a", "A", "ab", "AB", "Ab", "aB", "abc", "ABCd", "é", "É", "e\u0301", "ß", "ǅ", "ʰ", "ª", "ﬁ", "ı", "İ"),
    *("!", "?", ".", "...", ",", ";", ":", "-", "--", "—", "_", "/", "//", "\\", "|", "||", "(", ")", "[", "]"),
    *("{", "}", "+", "=", "==", "=>", "<", ">", "^", "~", "`", "$", "€", "%", "&", "&&", "@", "#", "*", "**"),
    *('"', "…", "。", "、", "！", "？", "～", "「", "」", "·", "¿", "§", "©", "™", "→", "∑", "≠"),
    *("中", "中文", "漢字", "ひらがな", "カタカナ", "ー", "々", "〇", "한국어", "ㄱ", "ㄅ", "ก", "ไทย", "日本、。"),
    *(*NAMED, "<unk>", "<0x41>", "▁"),
    *("😀", "👍🏽", "👨‍👩‍👧", "🇩🇪", "❤️", "☃", "𝒳", "𠀀", "🀄", "\u0940", "\u0301", "क्", "\u0e31"),
)  # fmt: skip


def random_text(chance: random.Random) -> str:
    """A text of one to forty pieces: words of all languages, code, pieces as above, and any other characters."""
    parts = []
    for _ in range(chance.choice([1, 2, 3, 5, 8, 13, 40])):
        kind = chance.random()
        if kind < 0.55:
            parts.append(chance.choice(PIECES))
        elif kind < 0.75:
            words = chance.choice(LANGUAGES).split(" ")
            first = chance.randrange(len(words))
            parts.append(" ".join(words[first : first + chance.randrange(1, 5)]))
        elif kind < 0.85:
            code = chance.choice(CODE)
            first = chance.randrange(len(code))
            parts.append(code[first : first + chance.randrange(1, 30)])
        elif kind < 0.92:
            parts.append(chr(chance.randrange(1, 0x250)))
        else:
            parts.append(any_character(chance))
    return "".join(parts)


def any_character(chance: random.Random) -> str:
    """A character of Unicode 15 or before. Newer ones have other classes in one of the libraries."""
    while True:
        found = chr(
            chance.choice([chance.randrange(1, 0x3000), chance.randrange(1, 0x10000), chance.randrange(1, 0x30000)])
        )
        if unicodedata.category(found) not in ("Cs", "Cn", "Co"):
            return found


def texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    whole = [*LANGUAGES, *CODE, *PIECES, "", "\n".join(LANGUAGES), "".join(CODE), " ".join(PIECES)]
    return (whole + [random_text(chance) for _ in range(count)])[:count]


def byte_level(name: str, learned: list[str], num_tokens: int) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary that is learned from whole texts."""
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = bytes_alone
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, initial_alphabet=bytes_alone.alphabet(), show_progress=False,
                                  max_token_length=24)  # fmt: skip
    backend.train_from_iterator(learned, trainer)
    found = json.loads(backend.to_str())["model"]
    tokens = [token for token, _ in sorted(found["vocab"].items(), key=lambda item: item[1])]
    # Tokens that no merges make.
    words = [word.replace(" ", "Ġ") for text in LANGUAGES[:6] for word in text.split() if word.isascii()]
    tokens += [word for word in dict.fromkeys(words) if word not in found["vocab"]]
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * (len(NAMED) - 1)
    kinds.append(gguf.TokenType.USER_DEFINED)
    tokens += NAMED
    return {
        "model": "gpt2", "pre": name, "tokens": tokens, "token_type": [int(kind) for kind in kinds],
        "merges": [" ".join(pair) for pair in found["merges"]],
        "bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>"),
    }  # fmt: skip


def sentencepiece(learned: list[str], num_tokens: int, *, prefix: bool) -> dict[str, Any]:
    """Metadata of a vocabulary of pieces with scores and bytes, for characters that it does not have."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.train_from_iterator(
        learned, trainers.BpeTrainer(vocab_size=num_tokens, limit_alphabet=300, show_progress=False)
    )
    found = json.loads(backend.to_str())["model"]["vocab"]
    pieces = [token for token, _ in sorted(found.items(), key=lambda item: item[1])]
    named = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    pieces = [piece for piece in pieces if piece not in named]
    return {
        "model": "llama", "tokens": [*named, *pieces, "<think>"],
        "token_type": [*map(int, kinds), *[int(gguf.TokenType.NORMAL)] * len(pieces), int(gguf.TokenType.USER_DEFINED)],
        "scores": [*[0.0] * len(named), *(-float(rank) for rank in range(len(pieces))), 0.0],
        "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": prefix,
    }  # fmt: skip


def write(path: Path, keys: Mapping[str, Any]) -> None:
    """Write a GGUF file that has a tokenizer alone."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        key = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            adds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            adds[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabularies(names: Sequence[str], folder: Path, num_tokens: int) -> Iterator[tuple[str, Path]]:
    """Yield the files to try, by name."""
    learned = [*LANGUAGES, *CODE, *(random_text(random.Random(seed)) for seed in range(1000))]
    learned = [text for text in learned if not any(token in text for token in (*NAMED, "<unk>", "<0x"))]
    for name in names:
        path = folder / f"{name}.gguf"
        if name == "builtin":
            path = open_checkpoint("builtin").path
        elif name.startswith("sentencepiece"):
            write(path, sentencepiece(learned, num_tokens, prefix=name == "sentencepiece"))
        else:
            write(path, byte_level(name, learned, num_tokens))
        yield name, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="pre-tokenizers, builtin, sentencepiece, sentencepiece-no-prefix [default: all]"
    )
    parser.add_argument("--texts", type=int, default=2000, help="texts per vocabulary")
    parser.add_argument("--tokens", type=int, default=3000, help="tokens that a vocabulary is learned with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--llama-cpp", help="folder with the llama_cpp package, if this Python has none")
    parser.add_argument("--show", type=int, default=3, help="differences to print per vocabulary")
    asked = parser.parse_args()
    if asked.llama_cpp:
        sys.path.append(asked.llama_cpp)  # last, so that all else is longhelix's own
    import llama_cpp

    names = asked.names or ["builtin", "sentencepiece", "sentencepiece-no-prefix", *SPLITS]
    given = texts(asked.texts, asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        for name, path in vocabularies(names, Path(folder), asked.tokens):
            try:
                peer = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            except ValueError:
                print(f"{name}: this llama.cpp does not load it", flush=True)
                continue
            own = Tokenizer.from_gguf(GgufModel.open(path).metadata)
            composes = name in SPLITS and SPLITS[name].composes  # llama.cpp does not, so its texts are composed before
            compared = [unicodedata.normalize("NFC", text) for text in given] if composes else given
            differ = [
                (text, *both)
                for text in compared
                if len(set(both := (tuple(own.encode(text)), tuple(peer.tokenize(text.encode(), True, True))))) > 1
            ]
            print(f"{name}: {len(differ)} of {len(compared)} texts differ", flush=True)
            for text, ours, theirs in itertools.islice(sorted(differ, key=lambda found: len(found[0])), asked.show):
                pieces = [" ".join(own.spell([token]) for token in tokens) for tokens in (ours, theirs)]
                print(f"  {text!r}\n    longhelix: {pieces[0]}\n    llama.cpp: {pieces[1]}", flush=True)


if __name__ == "__main__":
    main()
