// Notifications that are longer than the engine's: sent as several, and put together again.
//
// A part is a reserved prefix, the note's number at its sender, its whole length (64 bits each), and bytes. The next part is sent when the last
// has arrived, so parts of one note come in order; those of several may be mixed.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "incarnation.hpp"

namespace shim {

// The longest note that is taken.
inline constexpr size_t LONGEST_NOTE = 64 << 20;

// Gives the notifications that carry a note, one after the other, until one is not sent: one, the note itself, where that is short enough.
bool in_parts(const std::string &note, const std::function<bool(std::string_view)> &send);

// Whether a notification is a part, well-formed or not.
bool is_part(std::string_view message);

// Notes of which parts are missing.
class Unfinished {
  public:
    // Takes a part; the note, where it was the last one.
    std::optional<std::string> take(const Incarnation &from, std::string_view message);

  private:
    std::map<std::pair<Incarnation, uint64_t>, std::string> notes_;
    size_t bytes_ = 0;
};

} // namespace shim
