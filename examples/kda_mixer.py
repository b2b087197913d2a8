"""A layer of Kimi Delta Attention on the best device: a prompt, then one token at a time.

python examples/kda_mixer.py
"""

import torch

import kda_core
from kda_core.nn import KDACache, KimiDeltaAttention

layer = KimiDeltaAttention(hidden_size=256, num_heads=4, head_dim=64, device=kda_core.default_device())
cache, prompt = KDACache(), torch.randn(2, 100, 256, device=layer.A_log.device)
with torch.inference_mode():
    y = layer(prompt, cache=cache)
    y = layer(y[:, -1:], cache=cache)
print(y.shape, cache.length)  # torch.Size([2, 1, 256]) 101
