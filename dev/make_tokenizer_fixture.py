#!/usr/bin/env python3
"""Makes dev/fixtures/bpe_{text,tokenizer,tokens}.bin: a text of many scripts, the vocabulary that ./train_gpt tokenize makes from
it, and the ids that tiktoken gives for that text with that vocabulary and GPT-2's pattern.

Usage: make && python3 dev/make_tokenizer_fixture.py            (needs: pip install tiktoken numpy)
"""
import os
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

import numpy as np
import tiktoken

VOCAB_SIZE = 700
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
WORDS = """the of and to in a is that for it was on are as with his they at be this from have or by one had not but what all were when
we there can an your which their said if do will each about how up out them then she many some so these would other into has more her
two like him see time could no make than first been its who now people my made over did down only way find use may water long little
very after words called just where most know""".split()
OTHER = ["naïve café déjà vu", "Übergrößenträger", "Ελληνικά γράμματα", "русский язык, слова", "日本語の文章です。", "中文没有空格",
         "한국어 문장", "العربية ١٢٣", "हिन्दी १२३", "ไทย", "עברית", "½ ² Ⅷ ①", "😀👍🏽 👨‍👩‍👧", "a\u0301e\u0300", "I'm you're we'll they've he'd it's don't I'S 'LL",
         "x = y[3] + 0.5e-7; // why?", "http://a.b/c?d=e&f", "\u00a0\u2003\u3000 \u180e\u200b\ufeff", "tab\tcr\r\nlf\n\n\n  two   three", "NUL\0\x01\x7f\x85"]


def make_text():
    r = random.Random(2024)
    assigned = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    out = []
    for _ in range(420):
        kind = r.random()
        if kind < 0.7:
            s = " ".join(r.choice(WORDS) for _ in range(r.randint(3, 14)))
            out.append(s.capitalize() + r.choice([". ", ", ", "?\n", "! ", ".\n\n", " " + str(r.randint(0, 99999)) + " "]))
        elif kind < 0.88:
            out.append(r.choice(OTHER) + r.choice([" ", "", "\n", "   "]))
        elif kind < 0.97:
            out.append("".join(r.choice(assigned) for _ in range(r.randint(1, 12))))
        else:
            out.append(r.choice(["a", " ", "\n", "0", "-", "é"]) * r.randint(2, 90))
    return "".join(out)


def read_tokenizer(path):
    data = open(path, "rb").read()
    magic, version, vocab, eot = struct.unpack("<4I", data[:16])
    assert (magic, version) == (20240328, 2), (magic, version)
    tokens, at = [], 1024
    for _ in range(vocab):
        tokens.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    assert at == len(data) and eot == vocab - 1
    return tokens[:-1]


def main():
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "")
    program = sys.argv[1] if len(sys.argv) > 1 else "./train_gpt"
    text = make_text()
    with open(folder + "bpe_text.bin", "wb") as f:
        f.write(text.encode("utf-8"))
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([program, "tokenize", folder + "bpe_text.bin", "--format", "text", "--vocab-size", str(VOCAB_SIZE), "--val-fraction",
                        "0", "--output", work + "/x"], check=True)
        os.replace(work + "/x_tokenizer.bin", folder + "bpe_tokenizer.bin")
    ranks = {token: i for i, token in enumerate(read_tokenizer(folder + "bpe_tokenizer.bin"))}
    encoding = tiktoken.Encoding("fixture", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids) == text
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(ids)
    with open(folder + "bpe_tokens.bin", "wb") as f:
        f.write(header.tobytes() + np.array(ids, dtype="<u2").tobytes())
    print(f"{len(text.encode())} bytes, {len(ranks) + 1} tokens in the vocabulary, {len(ids)} ids")


if __name__ == "__main__":
    main()
