#!/usr/bin/env python3
"""Speed of the encoder beside tiktoken's, one thread each, in one run; the ids must be equal.

Usage: python3 dev/bench_tokenizer.py TOKENIZER.bin TEXT        (needs: pip install tiktoken numpy, and a C compiler)
TOKENIZER.bin is what ./train_gpt tokenize writes; with --tokenizer vocab.bpe it is GPT-2's vocabulary.
"""
import os
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np
import tiktoken

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def read_ranks(path):
    data = open(path, "rb").read()
    magic, _, vocab, eot = struct.unpack("<4I", data[:16])
    assert magic == 20240328, f"{path} is not a tokenizer file"
    ranks, at = {}, 1024
    for i in range(vocab):
        if i != eot:
            ranks[data[at + 1:at + 1 + data[at]]] = i
        at += 1 + data[at]
    return ranks, eot


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    tokenizer, text_path = sys.argv[1:]
    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory() as work:
        program = work + "/bench"
        subprocess.run([os.environ.get("CC", "gcc"), "-std=gnu11", "-D_GNU_SOURCE", "-O3", "-march=native", here + "/bench_tokenizer.c", "-o", program,
                        "-lm", "-lpcre2-8"], check=True)
        out = subprocess.run([program, tokenizer, text_path, work + "/ids"], check=True, capture_output=True, text=True).stdout.strip()
        ours = np.fromfile(work + "/ids", dtype="<u4")
    ranks, eot = read_ranks(tokenizer)
    encoding = tiktoken.Encoding("bench", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": eot})
    text = open(text_path, encoding="utf-8", newline="").read()
    size, best = len(text.encode()), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        ids = encoding.encode_ordinary(text)
        best = min(best, time.perf_counter() - start)
    same = np.array_equal(ours, np.array(ids, dtype="<u4"))
    print(f"train_gpt  {out}")
    print(f"tiktoken   {size * 1e-6 / best:.1f} MB/s, {len(ids)} tokens")
    print(f"ratio      {float(out.split()[0]) / (size * 1e-6 / best):.2f}, ids {'equal' if same else 'DIFFER'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
