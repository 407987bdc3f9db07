"""Element types that a registration can name."""

from enum import Enum


class FloatType(Enum):
    """The element type of registered memory. It is stored, but this build does not compress."""

    kUndefined = 0
    kFloat16 = 1
    kBFloat16 = 2
    kFloat32 = 3
    kFloat8E4M3FN = 4
    kFloat8E5M2 = 5


kUndefined = FloatType.kUndefined
kFloat16 = FloatType.kFloat16
kBFloat16 = FloatType.kBFloat16
kFloat32 = FloatType.kFloat32
kFloat8E4M3FN = FloatType.kFloat8E4M3FN
kFloat8E5M2 = FloatType.kFloat8E5M2
