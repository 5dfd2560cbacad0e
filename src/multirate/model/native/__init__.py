"""The native bf16 kernel for models on CPU: packed weights, bit-identical rows, one call
per pass.
"""

from multirate.model.native.decoder import NativeDecoder
from multirate.model.native.moe import NativeMoEDecoder

__all__ = ["NativeDecoder", "NativeMoEDecoder"]
