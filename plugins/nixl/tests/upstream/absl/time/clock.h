// The part of Abseil's clock that NIXL's tests use.
#pragma once

#include <chrono>

namespace absl {

inline std::chrono::steady_clock::time_point Now() {
    return std::chrono::steady_clock::now();
}

inline double ToDoubleSeconds(std::chrono::steady_clock::duration duration) {
    return std::chrono::duration<double>(duration).count();
}

} // namespace absl
