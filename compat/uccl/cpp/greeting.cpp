#include "greeting.hpp"

#include <charconv>

namespace shim {

using namespace std::string_view_literals;

static constexpr std::string_view PREFIX = "\0peerway.uccl\0"sv;
// Greetings are short and have a fixed format.
static constexpr size_t LONGEST = 512;
// GPU numbers are below this.
static constexpr int GPUS = 1 << 16;

// "either" wakes both kinds of accept that a Python peer may wait in.
std::string greeting() {
    return std::string(PREFIX) + R"({"gpu": 0, "bdf": ")" + GPU_NAME + R"(", "way": "either"})";
}

bool is_greeting(std::string_view message) { return message.substr(0, PREFIX.size()) == PREFIX; }

std::optional<int> gpu_in_greeting(std::string_view message) {
    static constexpr std::string_view KEY = "\"gpu\":";
    const size_t key = message.find(KEY);
    if (!is_greeting(message) || message.size() > LONGEST || key == message.npos) return {};
    const size_t start = message.find_first_not_of(' ', key + KEY.size());
    if (start == message.npos) return {};
    int gpu = 0;
    const auto [end, error] = std::from_chars(message.data() + start, message.data() + message.size(), gpu);
    if (error != std::errc() || gpu < 0 || gpu >= GPUS) return {};
    return gpu;
}

} // namespace shim
