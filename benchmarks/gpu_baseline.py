"""What the GPU path is compared with: torch operations one by one, and nvCOMP's Python API as it is commonly called."""

from __future__ import annotations

from typing import Any

import torch
from gpu_cases import CUDA, DIM, HEADS, LAYERS, device_gbs, gbs, host_ms

from kvserve_plugins.kernels.hadamard import accelerated, matrix


def cache(tokens: int) -> torch.Tensor:
    """``[2 * layers, heads, tokens, dim]`` of normal values."""
    return torch.randn(2 * LAYERS, HEADS, tokens, DIM, device=CUDA, dtype=torch.bfloat16)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``fast_hadamard_transform`` where that package is installed, else a product with the matrix."""
    if (fast := accelerated()) is not None:
        return fast(x.float()) * DIM**-0.5
    return x.float() @ (matrix(DIM) * DIM**-0.5).to(x.device)


def quantized(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Min-max codes of each head and token, operation by operation."""
    lo, hi = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((hi - lo) / (levels - 1)).clamp_min(1e-8)
    return ((x - lo) / scale).round().clamp(0, levels - 1).to(torch.uint8), lo, scale


def unfused(tokens: int) -> dict[str, Any]:
    """Rotation, min-max, codes and packing to nibbles; and back."""
    x = cache(tokens)
    nbytes = x.numel() * 2

    def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, lo, scale = quantized(rotate(x), 16)
        return codes[..., ::2] | (codes[..., 1::2] << 4), lo, scale

    packed, lo, scale = encode()

    def decode() -> torch.Tensor:
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        return rotate(codes * scale + lo).bfloat16()

    error = float((decode().float() - x.float()).norm() / x.float().norm())
    kind = "fast_hadamard_transform" if accelerated() else "matrix product (fast_hadamard_transform is not installed)"
    return {
        "rotation": kind, "original_bytes": nbytes, "error": round(error, 5),
        "encode_gbs": device_gbs(nbytes, encode), "decode_gbs": device_gbs(nbytes, decode),
    }  # fmt: skip


def api_chain(tokens: int) -> dict[str, Any]:
    """Rotation, min-max codes of two classes of heads with boolean masks, then nvCOMP ANS layer by layer.

    Each ``encode`` allocates its output, and its size is read at once. Wall time, since it waits for the device.
    """
    from nvidia import nvcomp

    x = cache(tokens)
    nbytes = x.numel() * 2
    high = torch.rand(HEADS, device=CUDA) < 0.5
    high[0], high[1] = True, False
    stream = torch.cuda.current_stream().cuda_stream
    codec = nvcomp.Codec(algorithm="ANS", data_type="|u1", cuda_stream=stream)

    def encode() -> list[Any]:
        out = []
        for layer in x:
            y = rotate(layer)
            made = [(*quantized(y[mask], levels), mask) for mask, levels in ((high, 8), (~high, 4))]
            blobs = codec.encode(nvcomp.as_arrays([codes.reshape(-1) for codes, *_ in made]))
            out.append((blobs, list(blobs.buffer_sizes), made))
        return out

    coded_layers = encode()

    def decode() -> torch.Tensor:
        out = torch.empty(x.shape, device=CUDA, dtype=torch.bfloat16)
        for layer, (blobs, _, made) in zip(out, coded_layers, strict=True):
            room = [torch.empty_like(codes) for codes, *_ in made]
            codec.decode(blobs, out=nvcomp.as_arrays([r.reshape(-1) for r in room]))
            for codes, (_, lo, scale, mask) in zip(room, made, strict=True):
                layer[mask] = rotate(codes * scale + lo).bfloat16()
        return out

    error = float((decode().float() - x.float()).norm() / x.float().norm())
    coded = sum(sum(sizes) + sum(4 * lo.numel() for _, lo, *_ in made) for _, sizes, made in coded_layers)
    return {
        "original_bytes": nbytes, "ratio": round(nbytes / coded, 3), "error": round(error, 5),
        "encode_gbs": gbs(nbytes, host_ms(encode, 5)), "decode_gbs": gbs(nbytes, host_ms(decode, 5)),
    }  # fmt: skip
