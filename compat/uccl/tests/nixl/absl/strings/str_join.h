// The part of Abseil's strings that NIXL's headers use.
#pragma once

#include <sstream>
#include <string>

namespace absl {

template <typename Range> std::string StrJoin(const Range &range, const char *between) {
    std::ostringstream text;
    bool first = true;
    for (const auto &value : range) {
        text << (first ? "" : between) << value;
        first = false;
    }
    return text.str();
}

} // namespace absl
