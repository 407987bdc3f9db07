// NIXL's tests count the warnings and errors of its log, which is Abseil's. The wheel contains
// Abseil without its headers. So this file intercepts the log where it is written: this program's
// fwrite() replaces the one of the C library.

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <string_view>
#include <vector>

#include "absl/log/log_sink_registry.h"

namespace {

std::mutex changing;
std::vector<absl::LogSink *> sinks;

// A log line begins with a letter and the date: "W1231 23:59:59.999999 1 file.cpp:1] message".
void show(std::string_view line) {
    constexpr std::string_view LETTERS = "IWEF";
    const auto letter = line.empty() ? LETTERS.npos : LETTERS.find(line[0]);
    const auto before = line.find("] ");
    if (letter == LETTERS.npos || before == line.npos || line.find_first_not_of("0123456789", 1) != 5) {
        return;
    }
    line.remove_prefix(before + 2);
    line.remove_suffix(line.ends_with('\n') ? 1 : 0);
    const absl::LogEntry entry(static_cast<absl::LogSeverity>(letter), std::string(line));
    const std::lock_guard lock(changing);
    for (auto *sink : sinks) {
        sink->Send(entry);
    }
}

} // namespace

namespace absl {

void AddLogSink(LogSink *sink) {
    const std::lock_guard lock(changing);
    sinks.push_back(sink);
}

void RemoveLogSink(LogSink *sink) {
    const std::lock_guard lock(changing);
    std::erase(sinks, sink);
}

} // namespace absl

extern "C" size_t fwrite(const void *bytes, size_t size, size_t count, FILE *file) {
    static const auto real = reinterpret_cast<decltype(&fwrite)>(dlsym(RTLD_NEXT, "fwrite"));
    if (file == stderr) {
        show({static_cast<const char *>(bytes), size * count});
    }
    return real(bytes, size, count, file);
}
