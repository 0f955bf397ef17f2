"""The types of arrays: numpy's on the host, and those that may be torch's tensors. No torch in here."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
Array = TypeVar("Array", np.ndarray, Any)  # or a torch tensor
