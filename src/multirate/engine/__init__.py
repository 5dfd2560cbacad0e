"""`attach` prepares a model for decoding; `Engine.generate` decodes, with or without an
accelerator.
"""

from multirate.engine.arguments import SPECULATE, check_mode
from multirate.engine.attachment import attach
from multirate.engine.defaults import eos_token_ids
from multirate.engine.engine import Engine
from multirate.methods.spec import PLAIN

__all__ = ["PLAIN", "SPECULATE", "Engine", "attach", "check_mode", "eos_token_ids"]
