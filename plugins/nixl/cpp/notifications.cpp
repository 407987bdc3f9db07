#include "notifications.h"

#include <atomic>
#include <cstring>

namespace {

// The header of every message. The last byte of the magic is the version of the layout, so messages
// of another version are recognised.
struct Head {
    char magic[4];
    uint32_t name_len;
    uint64_t id;
    uint32_t part;
    uint32_t parts;
};
static_assert(sizeof(Head) == 24);

constexpr char MAGIC[4] = {'P', 'W', 'N', 1};
// The most parts of a notification, of about a MiB each. Numbers in received headers are checked
// against it too.
constexpr size_t MOST_PARTS = 1024;
// The most bytes of unfinished notifications, including bookkeeping. Programs have far less in
// flight.
constexpr size_t MOST_UNFINISHED = size_t{1} << 30;

std::atomic<uint64_t> last_id{0};

} // namespace

std::vector<std::string> packed(const std::string &from, const std::string &notification) {
    if (from.size() > PEERWAY_MAX_NOTIFICATION / 2) {
        return {};
    }
    const size_t room = PEERWAY_MAX_NOTIFICATION - sizeof(Head) - from.size();
    const size_t count = notification.empty() ? 1 : (notification.size() + room - 1) / room;
    if (count > MOST_PARTS) {
        return {};
    }
    Head head{};
    std::memcpy(head.magic, MAGIC, sizeof MAGIC);
    head.name_len = static_cast<uint32_t>(from.size());
    head.id = ++last_id;
    head.parts = static_cast<uint32_t>(count);
    std::vector<std::string> messages;
    messages.reserve(count);
    for (head.part = 0; head.part < head.parts; ++head.part) {
        std::string message(reinterpret_cast<const char *>(&head), sizeof head);
        message += from;
        message.append(notification, head.part * room, room);
        messages.push_back(std::move(message));
    }
    return messages;
}

bool Arrivals::take(const std::array<uint8_t, 16> &incarnation,
                    const std::string &message,
                    std::string &who,
                    std::string &what,
                    std::string &complaint) {
    Head head{};
    if (message.size() >= sizeof head) {
        std::memcpy(&head, message.data(), sizeof head);
    }
    if (std::memcmp(head.magic, MAGIC, sizeof MAGIC) != 0 || head.name_len > message.size() - sizeof head ||
        head.part >= head.parts || head.parts > MOST_PARTS) {
        complaint = "dropped a message of " + std::to_string(message.size()) +
                    " bytes, which is not a notification of a NIXL agent with this version of the backend";
        return false;
    }
    std::string from = message.substr(sizeof head, head.name_len);
    std::string part = message.substr(sizeof head + head.name_len);
    if (head.parts == 1) {
        who = std::move(from);
        what = std::move(part);
        return true;
    }
    const Key key{incarnation, head.id};
    auto [at, is_new] = unfinished.try_emplace(key);
    Parts &whole = at->second;
    if (is_new) {
        begun.push_back(key);
        whole = {std::move(from), std::vector<std::string>(head.parts), head.parts, head.parts * sizeof(std::string)};
        bytes += whole.bytes;
    }
    if (head.parts != whole.parts.size() || !whole.parts[head.part].empty() || part.empty()) {
        complaint = "dropped a part of a notification of agent '" + whole.from + "', which does not match its other parts";
        return false;
    }
    whole.bytes += part.size();
    bytes += part.size();
    whole.parts[head.part] = std::move(part);
    if (--whole.missing > 0) {
        if (bytes > MOST_UNFINISHED) {
            complaint = "unfinished notifications take more than 1 GiB: dropped the oldest";
            forget_oldest();
        }
        return false;
    }
    who = std::move(whole.from);
    what.clear();
    what.reserve(whole.bytes);
    for (const auto &each : whole.parts) {
        what += each;
    }
    bytes -= whole.bytes;
    unfinished.erase(at);
    std::erase(begun, key);
    return true;
}

void Arrivals::forget_oldest() {
    const auto oldest = unfinished.find(begun.front());
    bytes -= oldest->second.bytes;
    unfinished.erase(oldest);
    begun.erase(begun.begin());
}
