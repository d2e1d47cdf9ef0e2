"""Sparse training: masks that are made before training, or move while a model trains.

The public names stand in __init__.pyi, as those of the package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
