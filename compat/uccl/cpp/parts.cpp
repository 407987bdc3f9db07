#include "parts.hpp"

#include <algorithm>
#include <cstring>

#include "handles.hpp"
#include "log.hpp"

namespace shim {

using namespace std::string_view_literals;

static constexpr std::string_view PREFIX = "\0peerway.uccl.part\0"sv;
static constexpr size_t HEAD = PREFIX.size() + 2 * sizeof(uint64_t);
// Bytes of a note per part. A part leaves room for other notifications in the peer's queue.
static constexpr size_t PART = 512 << 10;
// The most unfinished notes at the same time.
static constexpr size_t MOST = 1024;

bool in_parts(const std::string &note, const std::function<bool(std::string_view)> &send) {
    if (note.size() <= PEERWAY_MAX_NOTIFICATION) return send(note);
    const uint64_t number = fresh_number(), whole = note.size();
    for (size_t at = 0; at < note.size(); at += PART) {
        std::string part(PREFIX);
        part.append(reinterpret_cast<const char *>(&number), sizeof number).append(reinterpret_cast<const char *>(&whole), sizeof whole);
        if (!send(part.append(note, at, PART))) return false;
    }
    return true;
}

bool is_part(std::string_view message) { return message.substr(0, PREFIX.size()) == PREFIX; }

std::optional<std::string> Unfinished::take(const Incarnation &from, std::string_view message) {
    static const char *const CALL = "uccl_engine_get_notifs";
    uint64_t number = 0, whole = 0;
    if (message.size() > HEAD) {
        std::memcpy(&number, message.data() + PREFIX.size(), sizeof number);
        std::memcpy(&whole, message.data() + PREFIX.size() + sizeof number, sizeof whole);
    }
    if (whole == 0 || whole > LONGEST_NOTE) {
        complain(CALL, "dropped a malformed part of a notification");
        return {};
    }
    const std::string_view bytes = message.substr(HEAD);
    const bool is_new = notes_.count({from, number}) == 0;
    if (bytes_ + bytes.size() > LONGEST_NOTE || (is_new && notes_.size() >= MOST)) {
        // A sender that is gone never finishes its note, so unfinished notes would accumulate.
        complain(CALL, "too many unfinished notifications: dropped " + std::to_string(notes_.size()) + " of them and a part of one");
        notes_.clear();
        bytes_ = 0;
        return {};
    }
    const auto found = notes_.try_emplace({from, number}).first;
    found->second.append(bytes);
    bytes_ += bytes.size();
    if (found->second.size() < whole) return {};
    auto node = notes_.extract(found);
    bytes_ -= node.mapped().size();
    if (node.mapped().size() == whole) return std::move(node.mapped());
    complain(CALL, "dropped a notification with more bytes than its announced length");
    return {};
}

} // namespace shim
