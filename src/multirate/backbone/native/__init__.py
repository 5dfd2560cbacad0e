"""The native bf16 kernel for Llama-like models on CPU: packed weights, bit-identical rows, one call per pass."""

from multirate.backbone.native.decoder import NativeDecoder
from multirate.backbone.native.moe import NativeMoEDecoder

__all__ = ["NativeDecoder", "NativeMoEDecoder"]
