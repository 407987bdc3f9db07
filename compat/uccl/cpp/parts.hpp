// Notes that are longer than a notification of libpeerway. They are sent as several notifications,
// and reassembled at the receiver.
//
// A part consists of a reserved prefix, the note's number at its sender, its total length (64 bits
// each), and bytes. A sender sends the next part when the previous one has arrived, so parts of one
// note come in order. Parts of several notes may interleave.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "incarnation.hpp"

namespace shim {

// The maximum length of a note.
inline constexpr size_t LONGEST_NOTE = 64 << 20;

// Calls `send` with the notifications of a note, one after the other, until one fails. A short note
// is a single notification. Returns whether all were sent.
bool in_parts(const std::string &note, const std::function<bool(std::string_view)> &send);

// Whether a notification is a part, also a malformed one.
bool is_part(std::string_view message);

// Notes that still miss parts.
class Unfinished {
  public:
    // Adds a part. Returns the whole note after its last part.
    std::optional<std::string> take(const Incarnation &from, std::string_view message);

  private:
    std::map<std::pair<Incarnation, uint64_t>, std::string> notes_;
    size_t bytes_ = 0;
};

} // namespace shim
