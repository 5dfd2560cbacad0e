"""The native bf16 kernel for models on CPU: packed weights, bit-identical rows, one call
per pass.
"""

from multirate.runtime.native.decoder import NativeDecoder
from multirate.runtime.native.moe import NativeMoEDecoder

__all__ = ["NativeDecoder", "NativeMoEDecoder"]
