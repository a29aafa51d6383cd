"""How texts are split under each name of GGUF files. The tokens are recorded from llama.cpp."""

from collections import Counter
from itertools import pairwise

import gguf
import pytest
from tokenizers import pre_tokenizers

from longhelix.engine.text.gguf_splits import SPLITS
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

TEXT = (
    "DON'T don't we'Ll ab's 1234567 1234 ٣4x camelCase HTMLPage École Éa! éAb éAc éAd ~x `y` ==> (a/b)."
    "\n\n  x\r\n \n\tab cd    e 日本、。ー한국 ab\u3000…/\n?!\r\n IMGIMGABZ g\u0940h <sentinel:12>#if"
    "\nOh!\nAh!\nNo!\n   "
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def learned_merges(text):
    """The merges that are learned from a text that is not split: the most frequent pair first, until none is left."""
    ((symbols, _),) = BYTES.pre_tokenize_str(text)
    symbols, merges = list(symbols), []
    while len(symbols) > 1:
        counts = Counter(pairwise(symbols))
        pair = max(counts, key=lambda pair: (counts[pair], -len("".join(pair)), pair))
        merges.append(pair)
        at = 0
        while at < len(symbols) - 1:
            if (symbols[at], symbols[at + 1]) == pair:
                symbols[at : at + 2] = ["".join(pair)]
            at += 1
    return merges


def metadata(pre, text=TEXT, whole_words=(), **keys):
    merges = learned_merges(text)
    joined = dict.fromkeys([*map("".join, merges), *whole_words])
    tokens = [*sorted(BYTES.alphabet()), *joined, "<s>", "</s>"]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def pieces(file, text=TEXT):
    return " ".join(file["tokenizer.ggml.tokens"][token_id] for token_id in Tokenizer.from_gguf(file).encode(text))


RECORDED = {
    "default": (
        "DON ' T Ġdon ' t Ġw e ' Ll Ġab ' s Ġ 12 3 4 5 6 7 Ġ 12 3 4 Ġ Ù £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a "
        "! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ ~ x Ġ` y ` Ġ = => Ġ ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã "
        "ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģ h Ġ < sen tin el : 12 ># if Ċ O h ! Ċ A h ! Ċ No ! Ċ "
        "ĠĠĠ"
    ),
    "gpt-2": (
        "DON ' T Ġdon 't Ġw e ' Ll Ġab 's Ġ1234567 Ġ1234 ĠÙ £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! ĠÃ©Ab "
        "ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼íķ ľêµŃ "
        "Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģ h Ġ< sen tin el : 12 ># if Ċ O h ! Ċ A h ! Ċ No ! Ċ ĠĠĠ"
    ),
    "llama-bpe": (
        "<s> DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 12 3 4 5 6 7 Ġ 12 3 4 Ġ Ù £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī "
        "a ! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã "
        "ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģh Ġ< sen tin el : 12 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "dbrx": (
        "DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 12 3 4 5 6 7 Ġ 12 3 4 Ġ Ù £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! "
        "ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼íķ "
        "ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģh Ġ< sen tin el : 12 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "stablelm2": (
        "DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a "
        "! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã "
        "ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģh Ġ< sen tin el : 1 2 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "smollm": (
        "DON ' T Ġdon 't Ġw e ' Ll Ġab 's Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī "
        "a ! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã "
        "ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģ h Ġ< sen tin el : 1 2 ># if Ċ O h ! Ċ A h ! Ċ No ! Ċ "
        "ĠĠĠ"
    ),
    "falcon": (
        "DON ' T Ġdon ' t Ġw e ' Ll Ġab ' s Ġ 12 3 4 5 6 7 Ġ 12 3 4 ĠÙ £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a "
        "! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ ~ x Ġ ` y ` Ġ = => Ġ ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ "
        "ã ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģ h Ġ < sen tin el : 12 ># if Ċ O h ! Ċ A h ! Ċ No ! "
        "Ċ ĠĠĠ"
    ),
    "tekken": (
        "<s> DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x Ġcam el Ca se ĠHTM LPag e ĠÃī col e "
        "ĠÃī a ! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ "
        "ã ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģh Ġ< sen tin el : 1 2 ># if Ċ O h !Ċ A h !Ċ No !Ċ "
        "ĠĠĠ"
    ),
    "gpt-4o": (
        "DON'T Ġdon't Ġwe'Ll Ġab's Ġ 12 3 4 5 6 7 Ġ 12 3 4 Ġ Ù £4 x Ġcam el Ca se ĠHTM LPag e ĠÃī col e ĠÃī a ! "
        "ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼íķ "
        "ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģh Ġ< sen tin el : 12 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "deepseek-llm": (
        "DON ' T Ġdon ' t Ġw e ' Ll Ġab ' s Ġ 12 34 567 Ġ 12 34 Ġ Ù £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! "
        "ĠÃ © A b ĠÃ © A c ĠÃ © A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . Ċ Ċ Ġ Ġ x č Ċ Ġ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġ æ Ĺ¥æ ľ¬ ãĢ "
        "ģãĢ Ĥ ã ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦ / Ċ ? ! č Ċ Ġ IMG IMGABZ Ġg à¥ Ģ h Ġ< sen tin el : 12 ># if Ċ O h ! Ċ A h ! "
        "Ċ No ! Ċ ĠĠĠ"
    ),
    "deepseek-coder": (
        "DON ' T Ġdon ' t Ġw e ' Ll Ġab ' s Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e "
        "ĠÃī a ! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . Ċ Ċ Ġ Ġ x č Ċ Ġ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġ æ Ĺ¥æ ľ¬ ãĢ "
        "ģãĢ Ĥ ã ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦ / Ċ ? ! č Ċ Ġ IMG IMGABZ Ġg à¥ Ģ h Ġ< sen tin el : 1 2 > # if Ċ O h ! Ċ A h "
        "! Ċ No ! Ċ ĠĠĠ"
    ),
    "deepseek-v3": (
        "DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 12 3 4 5 6 7 Ġ 12 3 4 Ġ Ù £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! "
        "ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġ æ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼ íķ "
        "ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġgà¥ Ģh Ġ< sen tin el : 12 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "kimi-k2": (
        "DON'T Ġdon't Ġwe'Ll Ġab's Ġ 12 3 4 5 6 7 Ġ 12 3 4 Ġ Ù £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! ĠÃ©Ab "
        "ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġ æ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼íķ ľêµŃ "
        "Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģh Ġ< sen tin el : 12 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "glm4": (
        "DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 12 3 4 5 6 7 Ġ 12 3 4 Ġ Ù £4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! "
        "ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼íķ "
        "ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģh Ġ< sen tin el : 12 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "poro-chat": (
        "DON'T Ġdon't Ġwe'Ll Ġab's Ġ1234567 Ġ1234 ĠÙ£4x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d "
        "Ġ~x Ġ`y` Ġ==> Ġ( a/ b ) . ĊĊ Ġ Ġ x čĊĠ Ċĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼íķ ľêµŃ Ġab ãĢĢâ Ģ¦ / Ċ?! "
        "čĊ Ġ IMG IMGABZ Ġgà¥ Ģh Ġ< sen tinel: 12># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "viking": (
        "DON'T Ġdon't Ġwe'Ll Ġab's Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! "
        "ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~x Ġ`y` Ġ==> Ġ( a/ b ) . ĊĊ Ġ Ġ x čĊĠ Ċĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼íķ ľêµŃ "
        "Ġab ãĢĢâ Ģ¦ / Ċ?! čĊ Ġ IMG IMGABZ Ġgà¥ Ģh Ġ< sen tinel: 1 2 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "chameleon": (
        "<s> DON ' T Ġdon ' t Ġw e ' Ll Ġab ' s Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCa se ĠHTM LPag e ĠÃī col "
        "e ĠÃī a ! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ ~ x Ġ ` y ` Ġ = = > Ġ ( a / b ) . Ċ Ċ ĠĠ x č Ċ Ġ Ċ ĉ ab Ġcd ĠĠ ĠĠ e Ġæ Ĺ¥æ "
        "ľ¬ ãĢ ģ ãĢ Ĥ ã ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦ / Ċ ? ! č Ċ Ġ IMG IMGABZ Ġg à¥ Ģ h Ġ < sen tin el : 1 2 > # if Ċ O h "
        "! Ċ A h ! Ċ No ! Ċ ĠĠ Ġ"
    ),
    "seed-coder": (
        "DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a "
        "! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã "
        "ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġg à¥ Ģh Ġ< sen tin el : 1 2 ># if Ċ O h ! Ċ A h ! Ċ No ! Ċ "
        "ĠĠĠ"
    ),
    "qwen35": (
        "DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a "
        "! ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã "
        "ĥ¼íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦/ Ċ ? ! čĊ Ġ IMG IMGABZ Ġgà¥ Ģh Ġ< sen tin el : 1 2 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "exaone-moe": (
        "DON 'T Ġdon 't Ġw e ' Ll Ġab 's Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCaseĠHTMLPag eĠÃīcol eĠÃī a ! "
        "ĠÃ©AbĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . Ċ Ċ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġæ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼íķ "
        "ľêµŃĠab ãĢ Ģ â Ģ¦/ Ċ ? ! č Ċ Ġ IMG IMGABZĠgà¥ Ģh Ġ< sen tin el : 1 2 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
    "youtu": (
        "DON'T Ġdon't Ġwe'Ll Ġab's Ġ 1 2 3 4 5 6 7 Ġ 1 2 3 4 Ġ Ù £ 4 x ĠcamelCa se ĠHTM LPag e ĠÃī col e ĠÃī a ! "
        "ĠÃ©Ab ĠÃ©Ac ĠÃ©A d Ġ~ x Ġ` y ` Ġ==> Ġ( a / b ) . ĊĊ Ġ Ġ x čĊĠ Ċ ĉ ab Ġcd ĠĠĠ Ġ e Ġ æ Ĺ¥æ ľ¬ ãĢ ģãĢ Ĥ ã ĥ¼ "
        "íķ ľêµŃ Ġab ãĢ Ģ â Ģ¦ / Ċ ? ! čĊ Ġ IMG IMGABZ Ġgà¥ Ģh Ġ< sen tin el : 1 2 ># if Ċ O h !Ċ A h !Ċ No !Ċ ĠĠĠ"
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_texts_become_what_llama_cpp_makes_of_them(name):
    assert pieces(metadata(name)) == RECORDED[name]


def test_names_for_the_same_way_of_splitting():
    expected = {name: RECORDED[first] for first in RECORDED for name in SPLITS if SPLITS[name] is SPLITS[first]}
    assert {"smaug-bpe", "refact", "command-r", "falcon3", "olmo", "bloom", "hunyuan-dense", "llama4"} < expected.keys()
    assert {name: pieces(metadata(name)) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("minicpm5", "we'Ll 1234567?!\n", "we 'Ll Ġ 123 456 7 ?!Ċ"),
        ("ufakzeka", "we's 1234?!\n", "we 's Ġ 1 2 3 4 ?!Ċ"),
        ("ufakzeka", "we'sek", "we 'sek"),
        ("stablelm2", "we'sek", "we 's ek"),
        # Han characters beyond the basic plane, and the two next to the ranges.
        ("kimi-k2", "ab中𠀀豈cd가〇々漢", "ab 中𠀀豈 cd가 〇 々 漢"),
        ("deepseek-v3", "a~~b ~(", "a ~~ b Ġ~("),
    ],
)
def test_words_of_texts(name, text, expected):
    words = SPLITS[name].pre_tokenizer().pre_tokenize_str(text)
    assert " ".join(text[start:end].replace(" ", "Ġ").replace("\n", "Ċ") for _, (start, end) in words) == expected


@pytest.mark.parametrize("name", SPLITS)
def test_words_that_are_tokens_stay_whole_where_the_merges_do_not_count(name):
    is_whole = name in {"minicpm5", "youtu", "tekken", "glm4", "glm5"} or SPLITS[name] is SPLITS["llama-bpe"]
    file = metadata(name, text="ab", whole_words=["zq"], add_bos_token=False)
    assert pieces(file, "zq") == ("zq" if is_whole else "z q")


@pytest.mark.parametrize("name", RECORDED)
def test_long_runs_are_split_in_steps_that_do_not_grow_with_them(name):
    tokenizer = Tokenizer.from_gguf(metadata(name))
    for text in (" " * 30_000 + "1", "\n" * 30_000 + "x", "A" * 30_000, "1" * 30_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["gemma4", "afmoe", "whitespace", "", "Llama-bpe"])
def test_another_way_is_refused(name):
    with pytest.raises(UserError, match=f"tokenizer.ggml.pre is '{name}', which is not supported"):
        Tokenizer.from_gguf(metadata(name))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "<s> ab"),
        ({"add_eos_token": True}, "<s> ab </s>"),
        ({"add_bos_token": False, "add_eos_token": True}, "ab </s>"),
        ({"add_bos_token": False}, "ab"),
    ],
)
def test_bos_and_eos(keys, expected):
    assert pieces(metadata("llama-bpe", text="ab", **keys), "ab") == expected


@pytest.mark.parametrize(
    ("name", "ends"), [("<|eot_id|>", True), ("<|file_sep|>", True), ("<fim-pad>", True), ("<PRE>", False)]
)
def test_tokens_that_llama_cpp_knows_by_their_names_are_special_whatever_the_file_says(name, ends):
    file = metadata("llama-bpe", text="ab", whole_words=[name, "<other>"])
    assert pieces(file, f"a{name}b<other>") == f"<s> a {name} b < o t h e r >"
    tokenizer = Tokenizer.from_gguf(file)
    assert tokenizer.decode(tokenizer.encode(f"a{name}b")) == "ab"
    assert (file["tokenizer.ggml.tokens"].index(name) in tokenizer.end_ids) is ends


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_tokens_that_a_file_names_end_an_answer(key):
    file = metadata("gpt-2", **{f"{key}_token_id": 7})
    assert 7 in Tokenizer.from_gguf(file).end_ids


def test_tokens_without_a_name_have_llama_cpps():
    file = metadata("gpt-2", text="ab", whole_words=[""])
    empty = file["tokenizer.ggml.tokens"].index("")
    assert Tokenizer.from_gguf(file).spell([empty]) == f"[EMPTY_{empty}]"
