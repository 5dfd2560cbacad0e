"""`model.generate(..., custom_generate=...)` of transformers, with a callable or a saved
accelerator's folder.
"""

from multirate.integration.callable import CustomGenerate, custom_generate
from multirate.integration.folder import generate_from_folder

__all__ = ["CustomGenerate", "custom_generate", "generate_from_folder"]
