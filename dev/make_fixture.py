#!/usr/bin/env python3
"""Makes dev/fixtures/ with PyTorch in double precision: an opinion on the model that shares nothing with the C code.

    python3 dev/make_fixture.py          (needs PyTorch and numpy; the tests themselves read only the files)

For each of two tiny GPT-2 models, `tiny` (head size 16) and `odd` (head size 5, T = 3):
    NAME_model.bin        weights, llm.c's model file version 3 (magic 20240326)
    NAME_debug_state.bin  tokens, targets, logits, loss and all 16 gradients, llm.c's debug state version 2 (magic 20240327)
    NAME_losses.txt       loss and gradient norm of 10 AdamW steps on these tokens, settings in the first lines
Weights are rounded to fp32 first, so that the double-precision results belong to exactly the weights in the file.
"""
import math
import os

import numpy as np
import torch

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures")
LR, BETAS, EPS, DECAY, CLIP, STEPS = 1e-3, (0.9, 0.95), 1e-8, 0.1, 3.0, 10
DECAYED = ("wte", "qkvw", "attprojw", "fcw", "fcprojw")


def make_weights(L, C, V, Vp, maxT, generator):
    """The 16 tensors in file order; gains around 1, biases well away from 0, so that a swapped or forgotten one shows."""
    def normal(*shape, std, mean=0.0):
        values = torch.randn(*shape, generator=generator) * std + mean
        return values.float().double()

    w = {
        "wte": normal(Vp, C, std=0.5), "wpe": normal(maxT, C, std=0.3),
        "ln1w": normal(L, C, std=0.2, mean=1.0), "ln1b": normal(L, C, std=0.2),
        "qkvw": normal(L, 3 * C, C, std=1.2 / math.sqrt(C)), "qkvb": normal(L, 3 * C, std=0.2),
        "attprojw": normal(L, C, C, std=0.7 / math.sqrt(C)), "attprojb": normal(L, C, std=0.2),
        "ln2w": normal(L, C, std=0.2, mean=1.0), "ln2b": normal(L, C, std=0.2),
        "fcw": normal(L, 4 * C, C, std=1.0 / math.sqrt(C)), "fcb": normal(L, 4 * C, std=0.2),
        "fcprojw": normal(L, C, 4 * C, std=0.5 / math.sqrt(C)), "fcprojb": normal(L, C, std=0.2),
        "lnfw": normal(C, std=0.1, mean=0.5), "lnfb": normal(C, std=0.1),
    }
    w["wte"][V:] = 0.0
    for tensor in w.values():
        tensor.requires_grad_(True)
    return w


def forward(w, x, V, NH):
    """Logits (B, T, V) from PyTorch's own layer_norm, linear, gelu and attention."""
    F = torch.nn.functional
    L, C = w["ln1w"].shape
    B, T = x.shape
    h = w["wte"][x] + w["wpe"][:T]
    for l in range(L):
        n = F.layer_norm(h, (C,), w["ln1w"][l], w["ln1b"][l], 1e-5)
        q, k, v = (z.view(B, T, NH, C // NH).transpose(1, 2) for z in F.linear(n, w["qkvw"][l], w["qkvb"][l]).split(C, dim=2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        h = h + F.linear(a, w["attprojw"][l], w["attprojb"][l])
        n = F.layer_norm(h, (C,), w["ln2w"][l], w["ln2b"][l], 1e-5)
        h = h + F.linear(F.gelu(F.linear(n, w["fcw"][l], w["fcb"][l]), approximate="tanh"), w["fcprojw"][l], w["fcprojb"][l])
    return F.linear(F.layer_norm(h, (C,), w["lnfw"], w["lnfb"], 1e-5), w["wte"][:V])


def make_tokens(B, T, V, generator):
    """A stream of B T + 1 tokens, cut as a token shard is, with many repeats and both ends of the vocabulary as input and target."""
    s = (torch.rand(B * T + 1, generator=generator) ** 3 * V).long()
    s[0], s[T + 1], s[-1] = V - 1, 0, V - 1
    return s[:-1].view(B, T).contiguous(), s[1:].view(B, T).contiguous()


def header(*values):
    h = np.zeros(256, dtype="<i4")
    h[: len(values)] = values
    return h.tobytes()


def fp32(tensor):
    return tensor.detach().numpy().astype("<f4").tobytes()


def train(w, x, y, V, NH):
    """(loss, gradient norm) of each step, before its update."""
    optimizer = torch.optim.AdamW(
        [{"params": [t for n, t in w.items() if (n in DECAYED) == decayed], "weight_decay": DECAY if decayed else 0.0}
         for decayed in (True, False)],
        lr=LR, betas=BETAS, eps=EPS)
    curve = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(forward(w, x, V, NH).view(-1, V), y.view(-1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(w.values()), CLIP)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


def make(name, seed, L, NH, C, V, Vp, maxT, B, T):
    generator = torch.Generator().manual_seed(seed)
    w = make_weights(L, C, V, Vp, maxT, generator)
    x, y = make_tokens(B, T, V, generator)
    with open(os.path.join(FOLDER, name + "_model.bin"), "wb") as f:
        f.write(header(20240326, 3, maxT, V, L, NH, C, Vp))
        f.write(b"".join(fp32(t) for t in w.values()))
    logits = forward(w, x, V, NH)
    loss = torch.nn.functional.cross_entropy(logits.view(-1, V), y.view(-1))
    loss.backward()
    with open(os.path.join(FOLDER, name + "_debug_state.bin"), "wb") as f:
        f.write(header(20240327, 2, B, T))
        f.write(x.numpy().astype("<i4").tobytes() + y.numpy().astype("<i4").tobytes())
        f.write(fp32(logits) + fp32(loss) + b"".join(fp32(t.grad) for t in w.values()))
    curve = train(w, x, y, V, NH)
    with open(os.path.join(FOLDER, name + "_losses.txt"), "w") as f:
        f.write(f"# AdamW lr {LR} betas {BETAS[0]} {BETAS[1]} eps {EPS} decay {DECAY} on {' '.join(DECAYED)}, clip {CLIP}\n")
        f.write("# loss and gradient norm before each update, all steps on the tokens of the debug state; made by dev/make_fixture.py\n")
        f.writelines(f"{loss:.9f} {norm:.9f}\n" for loss, norm in curve)
    print(name, "loss", *(f"{loss:.6f} ({norm:.3f})" for loss, norm in curve))


if __name__ == "__main__":
    os.makedirs(FOLDER, exist_ok=True)
    make("tiny", 1, L=2, NH=3, C=48, V=257, Vp=384, maxT=64, B=2, T=37)
    make("odd", 2, L=3, NH=4, C=20, V=257, Vp=384, maxT=5, B=3, T=3)
