"""Native code: one submodule per room. A folder of stubs only; at run time `_native` is the extension module."""

from kvarto.core._native import adapters as adapters
from kvarto.core._native import memory as memory
from kvarto.core._native import ops as ops
from kvarto.core._native import planning as planning
from kvarto.core._native import weights as weights
