// The part of Abseil's formatting that NIXL's tests use: a number in a text.
#pragma once

#include <cstdio>
#include <string>

namespace absl {

inline std::string StrFormat(const char *format, size_t number) {
    char text[64];
    std::snprintf(text, sizeof text, format, static_cast<int>(number));
    return text;
}

} // namespace absl
