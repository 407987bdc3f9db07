// What NIXL's tests use of Abseil's formats: numbers in a text.
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
