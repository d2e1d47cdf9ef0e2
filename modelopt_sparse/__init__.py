"""Make PyTorch and Hugging Face models sparse, keep them sparse, save, restore and export them.

The public names stand in __init__.pyi. Each is imported when it is first used, so a program waits for what it uses.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__.remove("training")  # pyright: ignore  # a package, whose names are its own
__all__.append("__version__")
