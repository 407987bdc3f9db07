// The part of a log entry that NIXL's tests use.
#pragma once

#include <string>

namespace absl {

enum class LogSeverity { kInfo, kWarning, kError, kFatal };

class LogEntry {
    LogSeverity severity;
    std::string message;

  public:
    LogEntry(LogSeverity severity, std::string message) : severity(severity), message(std::move(message)) {}

    LogSeverity log_severity() const { return severity; }
    const std::string &text_message() const { return message; }
};

} // namespace absl
